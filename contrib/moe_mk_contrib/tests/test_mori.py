"""MoRI over its emulation: results that outlive their memory, nodes, limits, bytes."""

import torch
from moe_mk_contrib.mori import Mori, operator_bytes

from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant import FP16
from tests.support.library_ranks import Ranks, problem, reported, with_top_k

NAME = "mori"


def test_a_result_outlives_the_next_call_of_the_operator() -> None:
    ranks = Ranks(NAME)
    tokens = ranks.dispatched()
    results = ranks.combined([t.x_RH.values.clone() for t in tokens], tokens)
    before = [y_TH.clone() for y_TH in results]
    ranks.dispatched()  # poisons all that the operator has returned
    assert all(torch.equal(y_TH, kept) for y_TH, kept in zip(results, before, strict=True))
    assert not results[0].isnan().any()


def test_several_nodes_are_served_by_the_kernels_for_them() -> None:
    place = ExpertMap.linear(4, 4)
    config = Ranks(NAME, place, ranks_per_node=2).transports[0]._session.pool.slots[0].buffer.config
    assert config.kernel_type.name == "InterNodeV1" and config.gpu_per_node == 2
    config = Ranks(NAME, place).transports[0]._session.pool.slots[0].buffer.config
    assert config.kernel_type.name == "IntraNode" and config.gpu_per_node == 4


def test_planned_bytes_are_those_of_the_librarys_formula() -> None:
    # MI300X, EP8, 128 tokens of 7168 bf16, top-8, scales of 56 * 4 B: 1024 rows of room.
    #   rows in    14336 + 32 ids + 32 weights + 4 + 224 scales = 14628        14,979,072
    #   rows out   14336                                                       14,680,064
    #   sums       128 of 14336                                                 1,835,008
    #   weights and ids, 5 sets of 32; scales, 2 sets of 224                      622,592
    assert operator_bytes(8, 1, 128, 14336, 8, 224) == 14_979_072 + 14_680_064 + 1_835_008 + 622_592
    assert Mori.plan(problem("mi300x")).buffer_bytes == 32_116_736
    # Four nodes: what crosses, 3 * 4 + 1 sets of 128 rows of 14628.
    assert operator_bytes(32, 4, 128, 14336, 8, 224) - operator_bytes(32, 1, 128, 14336, 8, 224) == 13 * 128 * 14628


def test_every_limit_is_reported() -> None:
    assert reported(NAME, problem("mi300x")) == {} and reported(NAME, problem("mi300x", ep=32)) == {}
    assert reported(NAME, with_top_k(10, "mi300x"))["top_k"] == "the kernels take 9 experts a token, this router has 10"
    assert "6 ranks lie 6 to a node [parallel.ranks_per_node]" in reported(NAME, with_top_k(2, "mi300x", ep=6))["ranks"]
    assert reported(NAME, problem("mi300x", dtype=FP16)) == {
        "dtype": "carries rows of one dtype, and fp16 layers sum in fp32 [dtype = bf16]"
    }
    assert reported(NAME, problem("mi300x", deterministic=True))["deterministic"]
    assert reported(NAME, problem("b200")) == {"device": "runs on rocm, this device is cuda"}
