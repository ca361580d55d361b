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


@pytest.mark.parametrize("counts", [[3, 0, 4, 1, 2], [0, 0, 9, 0, 0], [0, 0, 0, 0, 1]])
def test_sorted_rows_are_multiplied_by_their_experts(door: ModuleType, counts: list[int]) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows(counts)
    module = built(door, tiny, experts="torch_cpu")
    assert type(module) is door.MoeMkGroupedExperts and module.settings == {"experts": "torch_cpu"}
    assert error(module(x_RD, counts_E), loops(tiny, x_RD, counts)) < 1e-5


def test_no_rows_and_rows_beyond_the_counts(door: ModuleType) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows([2, 0, 1, 0, 3], beyond=4)
    module = built(door, tiny)
    assert module(x_RD[:0], torch.zeros(EXPERTS, dtype=torch.int64)).shape == (0, HIDDEN)
    y_RD = module(x_RD, counts_E)
    assert error(y_RD[:6], loops(tiny, x_RD, [2, 0, 1, 0, 3])) < 1e-5
    assert not y_RD[6:].any()


def test_which_expert_a_row_belongs_to(door: ModuleType) -> None:
    assert door.expert_of_rows(torch.tensor([2, 0, 1]), 5).flatten().tolist() == [0, 0, 2, -1, -1]


def test_a_new_weight_is_seen_and_rows_come_back_in_their_dtype(door: ModuleType) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows([3, 0, 4, 1, 2])
    module = built(door, tiny)
    first = module(x_RD, counts_E)
    with torch.no_grad():
        module.w2_EDF.mul_(2.0)
    assert torch.allclose(module(x_RD, counts_E), 2.0 * first)
    assert module(x_RD.bfloat16(), counts_E).dtype is torch.bfloat16


def test_training_is_refused_and_states_where_to_activate_it(door: ModuleType) -> None:
    tiny, (x_RD, counts_E) = Tiny.drawn(), rows([3, 0, 4, 1, 2])
    module = built(door, tiny)
    with pytest.raises(UnsupportedError, match=r"gradients through moe_mk in torchtitan\n.*generator, not the trainer"):
        module(x_RD.requires_grad_(), counts_E)


def test_the_override_names_its_target_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    put_in(monkeypatch, stand_in(found))
    module = importlib.import_module(NAME)
    assert found == {f"{NAME}.inference_experts": (GroupedExperts.Config, True, module.inference_experts)}
    sys.modules.pop(NAME, None)
