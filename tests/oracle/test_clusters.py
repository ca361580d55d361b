"""Decisions for whole clusters: every transport with its time or its reasons, and times that were published. Reviewed
by hand like `golden.yaml`: a line that changes must be looked at. Transports that are not named here are left out, so
that a new one brings its own lines."""

from typing import Any

import pytest

from moe_mk import Problem, oracle
from moe_mk.experts import EXPERTS
from moe_mk.oracle.cost import transport_us
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import BF16
from tests.support import problems

LIBRARIES = frozenset({"triton", "deep_ep", "deep_gemm", "flashinfer", "uccl"})


def asked(device: str, ranks: int, num_tokens: int = 128, **settings: Any) -> Problem:
    settings = {"installed": LIBRARIES, "ep": ranks, "max_num_tokens": num_tokens, **settings}
    return problems.problem("deepseek_v3", device, num_tokens, **settings)


ONE_NODE = {"hierarchical": {"fabric"}, "no_ep": {"ranks"}, "replicated": {"tokens"}, "one_sided": {"device"}}
FOUR_NODES = {"no_ep": {"ranks"}, "replicated": {"tokens"}, "one_sided": {"device", "fabric"}}
NVIDIA_ONLY = {
    name: {"device"} for name in ("deepep_ht", "deepep_ll", "nvlink_one_sided", "nvlink_two_sided", "uccl_ep")
}
CLUSTERS = {
    # One node: FlashInfer sends a row to each distinct rank in two launches. DeepEP waits for counts first, as
    # all-to-all does. FIFOs take four launches. Low latency sends a row to each of 8 experts: 7 leave the rank, not
    # 3.5 (4 of 8 groups are kept), and at 128 tokens that costs more than its launches save.
    ("h200", 8): (
        [("nvlink_one_sided", 101), ("all_to_all", 121), ("deepep_ht", 121), ("nvlink_two_sided", 141),
         ("deepep_ll", 162), ("uccl_ep", 162), ("all_gather", 182)],
        ONE_NODE,
    ),
    # Four nodes of two groups each, 4 groups kept: relays send a row once to each of 3.1 nodes and forward while others
    # arrive. Without them all-to-all crosses nodes with a row for each of 6.8 ranks, which costs a little more than the
    # six steps that hierarchical takes one after the other.
    ("h200", 32): (
        [("deepep_ht", 202), ("hierarchical", 367), ("all_to_all", 370), ("deepep_ll", 404), ("uccl_ep", 404),
         ("all_gather", 1515)],
        {**FOUR_NODES, "nvlink_one_sided": {"fabric"}, "nvlink_two_sided": {"fabric"}},
    ),
    ("mi300x", 8): ([("all_to_all", 92), ("all_gather", 125)], {**ONE_NODE, **NVIDIA_ONLY}),
    # Faster links inside a node than an H200's make relays worth their steps.
    ("mi300x", 32): (
        [("hierarchical", 318), ("all_to_all", 370), ("all_gather", 1515)],
        {**FOUR_NODES, **NVIDIA_ONLY, "nvlink_one_sided": {"device", "fabric"},
         "nvlink_two_sided": {"device", "fabric"}},
    ),
}  # fmt: skip


def wire_of(name: str) -> Any:
    return FP8_1x128 if "fp8" in PREPARE_FINALIZE[name].traits.wire else BF16


@pytest.mark.parametrize("device,ranks", CLUSTERS, ids=str)
def test_every_transport_has_its_time_or_its_reasons(device: str, ranks: int) -> None:
    problem, (order, refused) = asked(device, ranks), CLUSTERS[device, ranks]
    able = {name: kind for name, kind in PREPARE_FINALIZE.items() if not kind.reasons_against(problem)}
    times = {name: transport_us(problem, kind.volume(problem), wire_of(name)) for name, kind in able.items()}
    known = {name for name, _ in order} | set(refused)
    assert [(n, round(us)) for us, n in sorted((round(us), n) for n, us in times.items()) if n in known] == order
    reported = {
        n: {r.code for r in kind.reasons_against(problem)} for n, kind in PREPARE_FINALIZE.items() if n in refused
    }
    # Between nodes, limits of libraries come on top of the device: what is asked is that each named one is reported.
    assert reported.keys() == refused.keys() and all(reported[name] >= refused[name] for name in refused), reported


def test_the_hand_worked_times_are_those_of_the_table() -> None:
    # 128 tokens, a row of 7392 + 64 B out and 14336 B back = 21,792 B.
    row = 7392 + 64 + 14336
    # H200, 8 ranks: 3.983 distinct ranks a token, 7/8 of them others: 446 rows over 160 GB/s, two launches of 20 us.
    assert 128 * 3.983 * 7 / 8 * row / 160e3 + 2 * 20 == pytest.approx(100.8, abs=0.1)
    # Low latency: 8 rows a token, 7/8 of them to others.
    assert 128 * 8 * 7 / 8 * row / 160e3 + 2 * 20 == pytest.approx(162.0, abs=0.1)
    # Four nodes: 3.133 distinct nodes, 3/4 of them others: 301 rows over 46 GB/s; inside 6.820 ranks, 7/8 others: 764
    # rows over 160 GB/s. The slower leg hides the faster one.
    far, near = 128 * 3.133 * 3 / 4 * row / 46e3, 128 * 6.820 * 7 / 8 * row / 160e3
    assert (far, near) == (pytest.approx(142.5, abs=0.1), pytest.approx(104.0, abs=0.1))
    assert max(far, near) + 2 * 20 == pytest.approx(182.5, abs=0.1)
    assert far + near + 6 * 20 == pytest.approx(366.5, abs=0.1)


@pytest.mark.parametrize("kept,cheaper", [(8, "all_to_all"), (4, "hierarchical"), (2, "hierarchical")])
def test_the_fewer_nodes_a_token_may_visit_the_better_is_a_relay(kept: int, cheaper: str) -> None:
    problem = asked("h200", 32, topk_group=kept)
    us = {
        n: transport_us(problem, PREPARE_FINALIZE[n].volume(problem), wire_of(n))
        for n in ("all_to_all", "hierarchical")
    }
    assert min(us, key=lambda name: us[name]) == cheaper


# DeepEP on H800 with ConnectX-7, 7168 values, top-8: dispatch in FP8 + combine in bf16, microseconds as published by
# DeepEP (low latency) and derived from its published bandwidths (4096 tokens, high throughput).
PUBLISHED = [
    ("deepep_ll", 128, 8, 77 + 114), ("deepep_ll", 128, 16, 118 + 195), ("deepep_ll", 128, 32, 155 + 273),
    ("deepep_ll", 128, 64, 173 + 314), ("deepep_ll", 128, 128, 192 + 369), ("deepep_ll", 128, 256, 194 + 360),
    ("deepep_ht", 4096, 8, 1050 + 1972), ("deepep_ht", 4096, 16, 1403 + 2722), ("deepep_ht", 4096, 32, 1889 + 3728),
]  # fmt: skip


@pytest.mark.parametrize("name,num_tokens,ranks,published", PUBLISHED)
def test_the_model_is_within_a_quarter_of_what_was_published(
    name: str, num_tokens: int, ranks: int, published: float
) -> None:
    # Without fitting: link rates and fixed costs are those of configs/devices/h100.yaml, which has an H800's links.
    # DeepEP measures with a group a node of which up to four are kept, so that up to four nodes nothing is limited.
    problem = asked("h100", ranks, num_tokens, num_expert_group=1, topk_group=1)
    predicted = transport_us(problem, PREPARE_FINALIZE[name].volume(problem), FP8_1x128)
    assert predicted == pytest.approx(published, rel=0.25)


@pytest.mark.row(64)
@pytest.mark.parametrize("ranks", [8, 32])
def test_decoding_takes_low_latency_and_prefill_high_throughput_from_the_modelled_crossover_on(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {name: PREPARE_FINALIZE[name] for name in ("deepep_ht", "deepep_ll")}

    def cheaper(num_tokens: int) -> str:
        problem = asked("h200", ranks, num_tokens)
        us = {n: transport_us(problem, kind.volume(problem), FP8_1x128) for n, kind in both.items()}
        return min(us, key=lambda name: us[name])

    assert (cheaper(1), cheaper(256)) == ("deepep_ll", "deepep_ht")
    crossover = next(tokens for tokens in range(1, 257) if cheaper(tokens) == "deepep_ht")
    assert {cheaper(tokens) for tokens in range(1, crossover)} == {"deepep_ll"}
    # 20 us of one collective more against rows of 21,792 B that low latency sends beyond: one node 7 - 3.485 a token
    # over 160 GB/s, 41.8 tokens; four nodes 6 - 2.350 that cross over 46 GB/s, 11.6 tokens.
    assert crossover == {8: 42, 32: 12}[ranks]
    monkeypatch.setattr(PREPARE_FINALIZE, "_entries", {**both, "no_ep": PREPARE_FINALIZE["no_ep"]})
    monkeypatch.setattr(EXPERTS, "_entries", {"reference": EXPERTS["reference"]})
    for tokens, wanted in ((crossover - 1, "deepep_ll"), (crossover, "deepep_ht")):
        decision = oracle.select(asked("h200", ranks, tokens, prepare_finalize="auto", experts="reference"))
        assert decision.chosen.prepare_finalize == wanted and "lowest cost of 2 eligible pairs" in decision.because
