"""Padding is left out of a call, tokens that cannot be routed are counted, and `route` returns the logits."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer, ParallelGroups, ShapeError
from moe_mk.comm.threads import ThreadWorld
from moe_mk.router.gate import gate_logits
from moe_mk.tokens import Routing
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, config, tensors
from tests.support.tiers import quick_where

BACKENDS = [
    ("torch_cpu", torch.float32),
    ("reference_monolithic", torch.float32),
    pytest.param("cpu_native", torch.bfloat16, marks=NEEDS_COMPILER),
]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def build(experts: str, dtype: torch.dtype, shared: int = 1, groups: Any = None, **settings: Any) -> MoELayer:
    settings = {"num_shared_experts": shared, "quant": {"weights": NAMES[dtype]}, "experts": experts} | settings
    made = MoELayer(config(8, 2, **settings), dtype=dtype, groups=groups)
    return made.load_weights(tensors(8, shared=shared, dtype=dtype))


def tokens(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("experts,dtype", BACKENDS)
def test_padding_is_as_if_it_were_not_there(experts: str, dtype: torch.dtype, shared: int) -> None:
    made, draw = build(experts, dtype, shared), torch.Generator().manual_seed(9)
    for count in (0, 1, 2, 7, 12):
        x_TH, active_T = tokens(count, dtype, seed=count), torch.rand(count, generator=draw) < 0.5
        for mask in (active_T, ~active_T, torch.zeros_like(active_T), torch.ones_like(active_T)):
            made.reset_expert_load()
            wanted_NH, load_E = made(x_TH[mask]), made.expert_load.clone()
            made.reset_expert_load()
            x_TH = x_TH.masked_fill(~mask[:, None], float("nan")) if count > 2 else x_TH
            y_TH = made(x_TH, active_T=mask)
            assert torch.equal(y_TH[mask], wanted_NH) and not y_TH[~mask].any() and y_TH.dtype is dtype
            assert torch.equal(made.expert_load, load_E) and made.unrouted == 0
            x_TH = tokens(count, dtype, seed=count)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_a_mask_of_sequences_is_an_attention_mask(dtype: torch.dtype) -> None:
    made, seen = build("torch_cpu", torch.float32), list[Routing]()
    made.on_routing = seen.append
    x_BSH = tokens(10, torch.float32).view(2, 5, HIDDEN)
    mask_BS = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], dtype=dtype)
    y_BSH = made(x_BSH, active_T=mask_BS)
    assert [routing.num_tokens for routing in seen] == [7]
    assert torch.equal(y_BSH[mask_BS.bool()], made(x_BSH[mask_BS.bool()])) and not y_BSH[~mask_BS.bool()].any()


@pytest.mark.thorough
def test_a_compiled_layer_takes_a_mask() -> None:
    made, x_TH, mask_T = build("torch_cpu", torch.float32), tokens(4, torch.float32), torch.tensor([1, 0, 1, 1])
    wanted_TH = made(x_TH, active_T=mask_T)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x_TH, active_T=mask_T), wanted_TH)


@pytest.mark.parametrize(
    "mask,message",
    [
        ([True] * 3, "active_T is a list, expected a torch.Tensor"),
        (torch.ones(3), "active_T has dtype torch.float32, expected torch.bool or"),
        (torch.ones(4, dtype=torch.bool), r"active_T is \(4,\), expected \(3,\) as of hidden_states"),
        (torch.ones(3, 1, dtype=torch.bool), r"active_T has 2 dimensions \(3, 1\), expected 1"),
        (torch.ones(3, dtype=torch.bool, device="meta"), "active_T is on meta, expected cpu"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Any, message: str) -> None:
    made = build("torch_cpu", torch.float32)
    with pytest.raises(ShapeError, match=message):
        made(tokens(3, torch.float32), active_T=mask)
    assert not made.expert_load.any()


def test_ranks_mask_what_they_like() -> None:
    world = ThreadWorld(2)
    alone = build("torch_cpu", torch.float32)
    masks = torch.tensor([True, False, True, True]), torch.zeros(3, dtype=torch.bool)
    ranks = [
        build("torch_cpu", torch.float32, groups=ParallelGroups(ep=comm), prepare_finalize="all_to_all")
        for comm in world.communicators()
    ]

    def call(rank: int) -> Tensor:
        y_TH: Tensor = ranks[rank](tokens(len(masks[rank]), torch.float32, seed=rank), active_T=masks[rank])
        return y_TH

    for rank, y_TH in enumerate(world.together([lambda rank=rank: call(rank) for rank in range(2)])):
        x_TH = tokens(len(masks[rank]), torch.float32, seed=rank)
        torch.testing.assert_close(y_TH, alone(x_TH, active_T=masks[rank]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", quick_where(lambda bad: bad != bad, [float("nan"), float("inf"), -float("inf")]))
@pytest.mark.parametrize("experts,dtype", BACKENDS)
def test_tokens_that_cannot_be_routed_give_zero_and_are_counted(experts: str, dtype: torch.dtype, bad: float) -> None:
    made, x_TH = build(experts, dtype, shared=0), tokens(6, dtype)
    x_TH[1], x_TH[4] = bad, bad
    for call in (lambda: made(x_TH), lambda: made(x_TH[None])[0]):
        y_TH = call()
        assert not y_TH[[1, 4]].any() and y_TH.isfinite().all()
    assert made.unrouted == made.report().unrouted == made.explain().unrouted == 8
    line = "8 assignments chose no expert: NaN or infinity in hidden states, or ids of -1"
    assert line in str(made.explain()) and line in str(made.report()) and made.report().as_dict()["unrouted"] == 8
    made.warm_up([3])
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin.unrouted == 8
    made.reset_expert_load()
    made(x_TH[:1])
    assert made.unrouted == 0 and "chose no expert" not in str(made.explain())
    if experts != "reference_monolithic":
        made.forward_routed(x_TH[:1], torch.ones(1, 2), torch.tensor([[3, -1]]))
        assert made.unrouted == 1


@pytest.mark.parametrize("experts,dtype", BACKENDS)
def test_route_returns_the_logits_that_it_chose_by(experts: str, dtype: torch.dtype) -> None:
    made, x_TH = build(experts, dtype), tokens(5, dtype)
    routing = made.route(x_TH)
    assert routing.logits_TE is not None and routing.logits_TE.shape == (5, 8)
    assert routing.logits_TE.dtype is torch.float32
    weight_EH = tensors(8, dtype=dtype)["gate.weight"]
    torch.testing.assert_close(routing.logits_TE, gate_logits(x_TH, weight_EH.float()), rtol=1e-5, atol=1e-5)
    assert torch.equal(routing.logits_TE.topk(2).indices.sort().values, routing.ids_TK.long().sort().values)
