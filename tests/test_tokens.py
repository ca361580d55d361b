"""What travels: defaults, order of stages, and names of layouts."""

from dataclasses import FrozenInstanceError
from typing import get_args

import pytest
import torch

from moe_mk.tokens import LAYOUT_NAMES, OutputStage, Routing, Tokens


def test_a_routing_counts_its_tokens_and_has_no_losses_of_its_own() -> None:
    routing = Routing(torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2))
    assert routing.num_tokens == 5 and dict(routing.losses) == {}
    with pytest.raises(FrozenInstanceError):
        routing.ids_TK = routing.ids_TK  # type: ignore[misc]


def test_stages_have_an_order() -> None:
    assert OutputStage.RAW < OutputStage.WEIGHTED < OutputStage.REDUCED


def test_every_layout_has_a_name() -> None:
    assert set(LAYOUT_NAMES) == set(get_args(Tokens)) and len(set(LAYOUT_NAMES.values())) == 3
