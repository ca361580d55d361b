"""A layer with two pairs: the number of tokens chooses, at the modelled crossover, over one copy of the weights."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, DeepseekV3MoE
from moe_mk.errors import WeightError
from moe_mk.flight import interleave
from moe_mk.kernels.native.toolchain import find_compiler
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer import DecodePrefillMoE
from moe_mk.layer.settings import decide
from moe_mk.placement.expert_map import ExpertMap
from tests.layer.conftest import Twin

TWO = {"experts": "torch_cpu", "max_num_tokens": 64}
DECODE, PREFILL = {"prepare_finalize": "all_gather"}, {"prepare_finalize": "all_to_all"}


def served(twin: Twin, made: list[DecodePrefillMoE], counts: list[int]) -> list[str]:
    """One batch; outputs equal transformers. The transports that carried it."""
    before = [dict(moe.layer.ep.traffic.calls_by_phase) for moe in made]
    tokens = list(twin.x_TH[: sum(counts)].split(counts))
    flights = [moe.steps(x_TH, max(counts)) for moe, x_TH in zip(made, tokens, strict=True)]
    for y_TH, x_TH in zip(interleave(flights), tokens, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=1e-6, rtol=0)
    assert all(moe.layer.ep.traffic.calls_by_phase != was for moe, was in zip(made, before, strict=True))
    return [moe.layer.decision.chosen.prepare_finalize for moe in made]


@pytest.mark.row(64)
def test_few_tokens_take_one_transport_and_many_the_other_over_one_copy_of_the_weights(twin: Twin) -> None:
    made = [DecodePrefillMoE(layer, decode=DECODE, prefill=PREFILL, crossover=4) for layer in twin.layers(4, **TWO)]
    laid_out = [moe.layer.state.experts.weights for moe in made]
    for counts, transport in (([1, 0, 3, 2], "all_gather"), ([4, 0, 1, 1], "all_to_all"), ([0, 0, 0, 1], "all_gather"),
                              ([1, 2, 5, 0], "all_to_all")):  # fmt: skip
        assert served(twin, made, counts) == [transport] * 4
        assert all(moe.layer.state.experts.weights is held for moe, held in zip(made, laid_out, strict=True))
    assert sum(int(moe.layer.expert_load.sum()) for moe in made) == 4 * (6 + 6 + 1 + 8)


@pytest.mark.row(64)
def test_the_crossover_is_where_the_model_finds_the_other_pair_cheaper(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer, *_), pairs = twin.layers(4, **TWO), {"decode": DECODE, "prefill": PREFILL}
    moe = DecodePrefillMoE(layer, **pairs, crossover=2)  # type: ignore[arg-type]
    for (kind, pair), most in product(pairs.items(), (1, 64)):
        alone = decide(layer.config.with_(max_num_tokens=most, **pair), layer.dtype, layer.device)
        assert moe._cost_us(moe._decision(kind), most) == alone.chosen.cost_us
    names = [f"{each['prepare_finalize']} + torch_cpu" for each in (DECODE, PREFILL)]
    for first in (1, 2, 33, 64, 65):  # decode's costs a token each, prefill's what decode's does for one token less
        costs = {"all_gather": lambda tokens: tokens, "all_to_all": lambda tokens, first=first: first - 1}
        modelled = staticmethod(lambda decision, n, costs=costs: costs[decision.chosen.prepare_finalize](n))
        monkeypatch.setattr(DecodePrefillMoE, "_cost_us", modelled)
        moe.crossover = moe._modelled()
        assert [moe.kind_of(n) == "prefill" for n in range(1, 65)] == [n >= first for n in range(1, 65)]
        several = f"up to {first - 1} tokens: {names[0]}; from {first}: {names[1]}"
        ends = {1: f"any number of tokens: {names[1]}", 65: f"any number of tokens up to 64: {names[0]}"}
        assert moe.explain() == ends.get(first, several)


@pytest.mark.row(64)
@pytest.mark.skipif(not find_compiler(shutil.which), reason="no C++ compiler on this machine")
def test_experts_with_a_layout_of_their_own_are_held_once(tmp_path: Path) -> None:
    shape = CheckpointShape(
        num_experts=8, hidden_size=256, intermediate_size=128, top_k=2, num_groups=1, top_k_groups=1
    )  # fmt: skip
    write_checkpoint(tmp_path, shape)
    native = {"experts": "cpu_native"}
    for groups in virtual_groups(2):
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, layer=3, groups=groups, experts="reference")
        moe = DecodePrefillMoE(layer, decode=DECODE | native, prefill=PREFILL | native, crossover=4)
        held = {id(state.experts.weights) for state in (*moe._states.values(), moe.layer.state)}
        assert len(held) == 1 and moe.explain().count("cpu_native") == 2


def test_it_follows_a_change_of_placement(twin: Twin) -> None:
    made = [DecodePrefillMoE(layer, decode=DECODE, prefill=PREFILL, crossover=4) for layer in twin.layers(2, **TWO)]
    assert served(twin, made, [5, 1]) == ["all_to_all"] * 2
    swapped = ExpertMap(made[0].layer.expert_map.experts_of_rank[::-1], 16)
    slots = {rank: made[1 - rank].layer.state.weights.experts.slots for rank in range(2)}
    for rank, moe in enumerate(made):
        moe.layer.live.set_placement(swapped, dict(enumerate(slots[rank])))
    for counts, transport in (([5, 1], "all_to_all"), ([1, 2], "all_gather")):
        assert served(twin, made, counts) == [transport] * 2
        assert all(moe.layer.expert_map.experts_of_rank == swapped.experts_of_rank for moe in made)


def test_ranks_must_be_given_the_same_number(twin: Twin) -> None:
    made = DecodePrefillMoE(twin.layers(2, **TWO)[0], decode=DECODE, prefill=PREFILL, crossover=4)
    x_TH: Tensor = twin.x_TH[:3]
    with pytest.raises(ConfigError, match="2 ranks choose alike only by most_tokens"):
        made(x_TH)
    with pytest.raises(ConfigError, match="most_tokens=2 is fewer than the 3 tokens"):
        made(x_TH, most_tokens=2)
    with pytest.raises(ConfigError, match="crossover=0"):
        DecodePrefillMoE(twin.layers(1, **TWO)[0], decode={}, prefill={"experts": "reference"}, crossover=0)
    with pytest.raises(WeightError):
        DecodePrefillMoE(DeepseekV3MoE(twin.config(), dtype=torch.float32), decode={}, prefill={"experts": "reference"})
    alone = DecodePrefillMoE(twin.layers(1, **TWO)[0], decode={}, prefill={"experts": "reference"}, crossover=2)
    torch.testing.assert_close(alone(x_TH), twin.run(x_TH), atol=1e-6, rtol=0)
    assert alone.layer.decision.chosen.experts == "reference"
