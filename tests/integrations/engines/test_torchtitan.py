"""The torchtitan override: what it builds, rows by loops, padding, no gradients; by torchtitan where it is there."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_mk.errors import UnsupportedError
from tests.integrations.engines.cases import EXPERTS, HIDDEN, INNER, Tiny, error
from tests.integrations.engines.stand_ins import GroupedExperts, put_in
from tests.integrations.engines.stand_ins import torchtitan as stand_in

NAME = "moe_mk.integrations.torchtitan"


@pytest.fixture(params=["stand-in", "torchtitan"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The adapter over a stand-in, imported anew, and over torchtitan itself."""
    if request.param == "torchtitan" and importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed here; `make engines` installs it and runs this")
    if request.param == "torchtitan":
        yield over_torchtitan()
        return
    put_in(monkeypatch, stand_in({}))
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@cache
def over_torchtitan() -> ModuleType:
    """Once a process: torchtitan refuses an override that is registered twice."""
    made = importlib.import_module(NAME)
    del sys.modules[NAME]
    return made


def built(door: ModuleType, tiny: Tiny, **settings: Any) -> Any:
    """What torchtitan makes of its own configuration after the override, with weights."""
    (own,) = (base for base in door.MoeMkGroupedExperts.__mro__[1:] if base.__name__ == "GroupedExperts")
    config = door.inference_experts(own.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS), **settings)
    module = config.build() if hasattr(config, "build") else door.MoeMkGroupedExperts(config)
    gate, up = tiny.w13.chunk(2, dim=1)
    for name, weight in (("w1_EFD", gate), ("w2_EDF", tiny.w2), ("w3_EFD", up)):
        setattr(module, name, nn.Parameter(weight.clone(), requires_grad=False))
    return module


def rows(counts: list[int], beyond: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return torch.randn((sum(counts) + beyond, HIDDEN), generator=draw), torch.tensor(counts)


def loops(tiny: Tiny, x_RD: Tensor, counts: list[int]) -> Tensor:
    parts = [tiny.expert(e, part) for e, part in enumerate(x_RD[: sum(counts)].split(counts))]
    return torch.cat(parts)


def test_no_rows_and_rows_beyond_the_counts(door: ModuleType) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows([2, 0, 1, 0, 3], beyond=4)
    module = built(door, tiny)
    assert module(x_RD[:0], torch.zeros(EXPERTS, dtype=torch.int64)).shape == (0, HIDDEN)
    y_RD = module(x_RD, counts_E)
    assert error(y_RD[:6], loops(tiny, x_RD, [2, 0, 1, 0, 3])) < 1e-5
    assert not y_RD[6:].any()


def test_weights_of_two_layers_are_seen_when_they_change_and_rows_come_back_in_their_dtype(door: ModuleType) -> None:
    drawn = [Tiny.drawn(seed=seed) for seed in (0, 1)]
    modules = [built(door, tiny, experts="reference") for tiny in drawn]
    every = [3, 0, 4, 1, 2], [0, 0, 9, 0, 0], [0, 0, 0, 0, 1], [1, 2, 0, 0, 2]
    for name, counts in zip(("", "w1_EFD", "w2_EDF", "w3_EFD"), every, strict=True):
        x_RD, counts_E = rows(counts)
        for module, tiny in zip(modules, drawn, strict=True):
            if name:
                changed = {"w1_EFD": tiny.w13[:, :INNER], "w2_EDF": tiny.w2, "w3_EFD": tiny.w13[:, INNER:]}[name]
                getattr(module, name).copy_(changed.mul_(-1.5))
            assert error(module(x_RD, counts_E), loops(tiny, x_RD, counts)) < 1e-5
            held = module._moe_mk_held._held
            assert {experts.backend for _, experts, _ in held.values()} == {"reference"} and len(held) == 1
    half, local = x_RD.bfloat16(), modules[0].w2_EDF
    y_RD, sharded = modules[0](half, counts_E), nn.Parameter(torch.zeros_like(local), False)
    sharded.to_local = lambda: local
    assert y_RD.dtype is torch.bfloat16 and error(y_RD, loops(drawn[0], half, counts)) < 2**-7
    modules[0].w2_EDF = sharded
    assert torch.equal(modules[0](half, counts_E), y_RD)
    modules[0].w1_EFD.requires_grad_()
    with torch.no_grad():
        assert torch.equal(modules[0](half.requires_grad_(), counts_E), y_RD)


def test_training_is_refused_and_states_where_to_activate_it(door: ModuleType) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows([3, 0, 4, 1, 2])
    module = built(door, tiny)
    with pytest.raises(UnsupportedError, match=r"gradients through moe_mk in torchtitan\n.*generator, not the trainer"):
        module(x_RD.requires_grad_(), counts_E)
    module.w1_EFD.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients through moe_mk in torchtitan"):
        module(x_RD.detach(), counts_E)


def test_the_override_names_its_target_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    put_in(monkeypatch, stand_in(found))
    module = importlib.import_module(NAME)
    assert found == {f"{NAME}.inference_experts": (GroupedExperts.Config, True, module.inference_experts)}
    sys.modules.pop(NAME, None)
