"""FlashInfer's moe_ep over its emulation: ids of no expert, alignment, limits, bytes, failures."""

from unittest.mock import Mock

import pytest
import torch
from moe_mk_contrib.emulated import flashinfer_moe_ep as moe_ep
from moe_mk_contrib.moe_ep import MoeEpOneSided, MoeEpTwoSided, filled_hidden

from moe_mk import Problem
from moe_mk.config import device_profile
from moe_mk.errors import UnsupportedError
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.deepep.common import wire_bytes
from moe_mk.quant import BF16, FP32
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.tokens import Routing
from tests.support.library_ranks import ROUTINGS, Ranks, live_rows, problem, reported, with_top_k

ONE, CAKE, TWO = "moe_ep_one_sided", "moe_ep_cake", "moe_ep_two_sided"


@pytest.mark.row(77)
@pytest.mark.parametrize("name", [ONE, TWO])
def test_a_weight_of_zero_is_not_an_assignment_to_no_expert(name: str) -> None:
    """The marker of ids that go nowhere is minus infinity: an expert that weighs nothing is still computed."""
    routings = [
        Routing(torch.tensor([[3, 0], [-1, 2], [-1, -1]], dtype=torch.int32), torch.tensor([[0.0, 1.0]] * 3)),
        ROUTINGS[1],
    ]
    first, second = Ranks(name).dispatched(routings=routings)
    assert live_rows(first)[0] == ((1.0, 2.0), (-1, 0), (0.0, 1.0))
    assert live_rows(second) == [((1.0, 2.0), (1, -1), (0.0, 0.0)), ((3.0, 4.0), (-1, 0), (0.0, 1.0))]


def test_a_token_of_no_expert_stays_on_its_rank() -> None:
    lonely = Routing(torch.full((1, 2), -1, dtype=torch.int32), torch.zeros(1, 2))
    first, second = Ranks(ONE).dispatched(routings=[ROUTINGS[0], lonely])
    assert 5.0 not in first.x_RH.values[:, 0].tolist() and 5.0 in second.x_RH.values[:, 0].tolist()
    assert bool((second.ids_RK[second.x_RH.values[:, 0] == 5.0] == -1).all())
    first, second = Ranks(TWO).dispatched(routings=[ROUTINGS[0], lonely])
    assert 5.0 not in [*first.x_RH.values[:, 0].tolist(), *second.x_RH.values[:, 0].tolist()]


@pytest.mark.row(77)
def test_every_payload_is_aligned_whatever_the_ranks_and_rows() -> None:
    # Three ranks, one token each: 3 rows of 25 bytes before scales of four would break their alignment.
    ranks = Ranks(ONE, ExpertMap.linear(6, 3), hidden=25, wire=FP8_1x128, dtype=BF16, max_num_tokens=1)
    x = [torch.ones(1, 25, dtype=torch.bfloat16)] * 3
    routing = Routing(torch.tensor([[0, 5]], dtype=torch.int32), torch.ones(1, 2))
    assert all(len(live_rows(tokens)) in (0, 3) for tokens in ranks.dispatched(x, [routing] * 3))


def test_what_the_library_refuses_is_stated_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=ValueError("NVLink backends are not supported on EP ranks [1]"))
    monkeypatch.setattr(moe_ep, "create_communication", refuse)
    with pytest.raises(UnsupportedError, match=r"(?s)flashinfer refuses open.*not supported on EP ranks \[1\]"):
        Ranks(ONE)


def test_planned_bytes_are_those_of_the_librarys_formula() -> None:
    # As of nvlink_one_sided: bf16 rows of 14336 there and back, 8 ids and weights, 1024 rows of room.
    assert MoeEpOneSided.plan(problem("h200")).buffer_bytes == 29_448_576
    assert MoeEpTwoSided.plan(problem("h200")).buffer_bytes == 562_106_368
    # 25 bf16 values are 50 bytes, filled up to 64; in FP8 32 and a scale of 4, filled up to 16.
    assert filled_hidden(BF16, 25) == 32 and wire_bytes(FP8_1x128, 25) == 32 + 16 and wire_bytes(FP32, 25) == 112
    ranks = Ranks(ONE, hidden=8, wire=FP8_1x128, dtype=BF16)
    (slot,) = ranks.transports[0]._session.pool.slots
    # 2 ranks of 4 tokens: rows of 16 bytes, 16 more for scales, 16 of ids and weights; 16 back.
    notes = 3 * 128 + 2 * (-(-4 * 22 * 4 // 128) * 128)
    assert slot.buffer.alltoall.workspace.shape[1] == notes + 8 * 48 + 8 * 16


def test_every_limit_is_reported() -> None:
    for name in (ONE, TWO):
        assert reported(name, problem("h200")) == {} and reported(name, problem("b200")) == {}
        assert "needs all ranks in one node" in reported(name, problem("h200", ep=32))["fabric"]
        assert set(reported(name, problem("mi300x"))) == {"device"}
    assert reported(ONE, with_top_k(23, "h200"))["top_k"] == "the kernels take 22 experts a token, this router has 23"
    assert reported(TWO, with_top_k(33, "h200"))["top_k"] == "the kernels take 32 experts a token, this router has 33"
    assert reported(CAKE, problem("b200")) == {}
    assert reported(CAKE, problem("h200")) == {"arch": "needs sm_100, this device is sm_90"}
    asked = problem("b200")
    newer = Problem(
        asked.config, device_profile("b200").model_copy(update={"arch": (12, 0)}), BF16, 128, asked.installed
    )
    assert reported(CAKE, newer) == {"arch": "has kernels for sm_100 and sm_103, this device is sm_120"}
