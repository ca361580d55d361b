"""Limits of DeepEP V2's kernels, worked by hand."""

from math import comb

import pytest
from moe_mk_contrib.deepep_v2_limits import elastic_bytes, elastic_sms

from moe_mk.external.deepep_limits import up_to


def test_elastic_buffers_grow_with_tokens_times_ranks() -> None:
    plain = elastic_bytes(128, 7168, 8, 8, fp8=False, ranks_per_node=8)
    assert plain == up_to(9 * 128 * 14464, 2 << 20) == 16_777_216
    # FP8 rows are 7168 + 224 + 128; sums still return as bf16: 8 x 128 x 14464 is more.
    assert elastic_bytes(128, 7168, 8, 8, fp8=True, ranks_per_node=8) == up_to(8 * 128 * 14464, 2 << 20)
    assert elastic_bytes(128, 7168, 8, 16, fp8=False, ranks_per_node=8) > 2 * plain


def destinations(groups: int) -> float:
    """Expected groups that a token is sent to: 256 experts, top-8."""
    return groups * (1 - comb(256 - 256 // groups, 8) / comb(256, 8))


@pytest.mark.row(50)
def test_the_analytic_multiprocessors_of_v2_by_hand() -> None:
    # Two ranks of one node, every token goes to both. Reads half a row for each that arrives, writes one; half of them
    # cross. 50 GB/s carry 100 GB/s of arriving rows: 2 multiprocessors write that, 0.25 read it. 2.5 is less than 4.
    assert elastic_sms(2.0, 1.0, 2, 8, 50.0, 1.0) == 4
    # 500 GB/s: 20 write, a quarter more is 25, made even.
    assert elastic_sms(2.0, 1.0, 2, 8, 500.0, 1.0) == 26
    # Two nodes of one rank: writes 1 + 1/2 + 1/2 (its own node's half of two nodes), and 1/2 crosses at 40 GB/s:
    # 80 GB/s of rows, 160 GB/s written, 3.2 multiprocessors and a quarter more.
    assert elastic_sms(2.0, 2.0, 2, 1, 500.0, 40.0) == 4
    assert elastic_sms(2.0, 2.0, 2, 1, 500.0, 400.0) == 40


@pytest.mark.row(50)
@pytest.mark.parametrize(
    "ranks,near_gbs,published",
    [(16, 430.0, 12), (32, 430.0, 6), (8, 810.0, 24)],
    ids=["SM90, two nodes", "SM90, four nodes", "SM100, one node"],
)
def test_the_analytic_multiprocessors_are_those_of_deepep_s_table(ranks: int, near_gbs: float, published: int) -> None:
    # README of DeepEP V2: 256 experts, top-8, no limit of groups; NVLink at nine tenths of its speed, 50 GB/s of RDMA.
    assert elastic_sms(destinations(ranks), destinations(-(-ranks // 8)), ranks, 8, near_gbs, 50.0) == published
