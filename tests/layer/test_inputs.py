"""Bad input is refused before any work, with values, limit and the way out; odd input works; padding is left out."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_mk import ConfigError, MoELayer, ParallelGroups, ShapeError, UnsupportedError, WeightError
from moe_mk.comm.threads import ThreadWorld
from moe_mk.flight import wait
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer.checks import tokens_with_repeats
from moe_mk.router.gate import gate_logits
from moe_mk.tokens import Routing
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, config, layer, tensors
from tests.support.tiers import quick_where


@pytest.fixture
def made() -> MoELayer:
    return layer(8, 2, experts="torch_cpu", num_shared_experts=1, max_num_tokens=16)


@pytest.mark.parametrize(
    "x,message",
    [
        (torch.zeros(3, 17), r"hidden_states has H=17 \(axis 1\), expected H=16"),
        (torch.zeros(1, 1, 3, 16), r"hidden_states has 4 dimensions \(1, 1, 3, 16\), expected 2 \[T, H\]"),
        (torch.zeros(3, 16, dtype=torch.bfloat16), r"has dtype torch\.bfloat16, expected torch\.float32"),
        (torch.zeros(3, 16, device="meta"), r"is on meta, expected cpu; move it with \.to\('cpu'\)"),
        (torch.zeros(17, 16), r"T=17 tokens, kernel\.max_num_tokens=16; raise the setting or split the batch"),
        (
            torch.zeros(3, 17, dtype=torch.float16),
            r"has H=17 \(axis 1\), expected H=16; has dtype torch\.float16, expected torch\.float32",
        ),
    ],
)
def test_tokens_that_do_not_fit_are_refused(made: MoELayer, x: Tensor, message: str) -> None:
    for ask in (made, made.route):
        with pytest.raises(ShapeError, match=message):
            ask(x)
    assert int(made.expert_load.sum()) == 0, "nothing was done"


def test_gradients_are_refused_and_not_dropped(made: MoELayer) -> None:
    x_TH = torch.zeros(3, HIDDEN, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"(?s)gradients through the layer.*call it under torch\.no_grad\(\)"):
        made(x_TH)
    with torch.no_grad():
        assert made(x_TH).shape == (3, HIDDEN)
        x_TH, weights_TK, ids_TK = x_TH.detach(), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
        for call in (made, made.route, partial(made.forward_routed, topk_weights=weights_TK, topk_ids=ids_TK)):
            with pytest.raises(UnsupportedError, match="gradients through the layer"):
                torch.func.jvp(call, (x_TH,), (x_TH,))
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="gradients through topk_weights"):
            made.forward_routed(x_TH, forward_ad.make_dual(weights_TK, weights_TK), ids_TK)


def test_warming_up_runs_each_number_of_tokens_once_and_counts_nothing(
    made: MoELayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    run = made.forward_checked

    def counted(x_TH: Tensor, load_E: Tensor, token_ids_T: Tensor | None = None) -> Tensor:
        ran.append(len(x_TH))
        return run(x_TH, load_E, token_ids_T)

    monkeypatch.setattr(made, "forward_checked", counted)
    seen: list[Routing] = []
    made.on_routing = seen.append
    made.warm_up([4, 0, 16, 4])
    assert ran == [0, 4, 16] and not seen and int(made.expert_load.sum()) == 0
    with pytest.raises(ShapeError, match=r"T=17 tokens, kernel\.max_num_tokens=16"):
        made.warm_up([17])
    for wrong in (-1, 1.5, "2", None):
        with pytest.raises(ShapeError, match=r"warm_up got token_counts with \[.*\]; give integers of at least 0"):
            made.warm_up([3, wrong])  # type: ignore[list-item]
    made(torch.zeros(3, HIDDEN))
    assert len(seen) == 1, "the observer is there again"


def test_a_layer_without_weights_states_how_to_load_them() -> None:
    empty = MoELayer(config(8, 2), dtype=torch.float32, name="layer 5")
    message = r"layer 'layer 5' has no weights yet; call load\(path, layer"
    with pytest.raises(WeightError, match=message):
        empty(torch.zeros(3, HIDDEN))
    with pytest.raises(WeightError, match=message):
        wait(empty.steps(torch.zeros(3, HIDDEN)))


def routed(made: MoELayer, ids: list[list[int]], **changes: Any) -> Tensor:
    topk_ids = torch.tensor(ids, dtype=changes.get("dtype", torch.int32))
    weights = torch.full(topk_ids.shape, 0.5, dtype=changes.get("weights_dtype", torch.float32))
    return made.forward_routed(torch.ones(len(ids), HIDDEN), weights, topk_ids)


@pytest.mark.parametrize("bad", [8, -2, 2**31 - 1, -(2**31), 2**32])
def test_ids_that_do_not_exist_are_refused(made: MoELayer, bad: int) -> None:
    with pytest.raises(ShapeError, match=rf"topk_ids holds 1 ids outside \[-1, 8\), for example \[{bad}\]; use -1"):
        routed(made, [[0, 1], [2, bad]], dtype=torch.int64 if bad >= 2**31 else torch.int32)
    assert int(made.expert_load.sum()) == 0


@pytest.mark.parametrize(
    "ids,changes,message",
    [
        ([[0, 1, 2]], {}, r"topk_ids has K=3 \(axis 1\), expected K=2"),
        ([[0, 1]], {"dtype": torch.int16}, r"topk_ids has dtype torch\.int16, expected torch\.int32 or torch\.int64"),
        ([[0, 1]], {"weights_dtype": torch.int32}, r"topk_weights has dtype torch\.int32, expected torch\.float32 or"),
    ],
)
def test_routings_that_do_not_fit_are_refused(made: MoELayer, ids: Any, changes: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        routed(made, ids, **changes)


@pytest.mark.row(20)
@pytest.mark.parametrize("experts", ["torch_cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_engine_may_route_by_itself_and_leave_assignments_out(experts: str, dtype: torch.dtype) -> None:
    made = layer(8, 2, experts=experts)
    x_TH = torch.randn(3, HIDDEN)
    routing = made.route(x_TH)
    whole = made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK.to(dtype))
    assert torch.equal(whole, made(x_TH))
    first = made.forward_routed(x_TH, routing.weights_TK, torch.where(torch.tensor([True, False]), routing.ids_TK, -1))
    second = made.forward_routed(x_TH, routing.weights_TK, torch.where(torch.tensor([False, True]), routing.ids_TK, -1))
    torch.testing.assert_close(first + second, whole, atol=1e-6, rtol=0)
    assert not made.forward_routed(x_TH, routing.weights_TK, torch.full_like(routing.ids_TK, -1)).any()


def test_experts_that_route_inside_refuse_a_routing_from_outside() -> None:
    inside = layer(8, 2, experts="reference_monolithic")
    with pytest.raises(UnsupportedError, match=r"(?s)reference_monolithic routes inside.*pin kernel\.experts"):
        routed(inside, [[0, 1]])


def test_the_load_counter_is_the_bincount_of_the_choices(made: MoELayer) -> None:
    x_TH = torch.randn(9, HIDDEN)
    made(x_TH)
    expected = torch.bincount(made.route(x_TH).ids_TK.flatten(), minlength=8)
    assert torch.equal(made.expert_load, expected) and made.expert_load.dtype is torch.int64
    made(x_TH)
    assert torch.equal(made.expert_load, 2 * expected), "counts go on until they are reset"
    made.reset_expert_load()
    routed(made, [[0, -1], [-1, -1], [0, 7]])
    assert made.expert_load.tolist() == [2, 0, 0, 0, 0, 0, 0, 1], "-1 counts for nobody"


@pytest.mark.parametrize("experts", ["torch_cpu", "reference", "reference_monolithic"])
def test_no_tokens_and_strided_tokens_work_and_stay_as_they_were(experts: str) -> None:
    made = layer(8, 2, experts=experts, num_shared_experts=1)
    x_TH = torch.randn(5, HIDDEN)
    expected = made(x_TH)
    assert made(x_TH[:0]).shape == (0, HIDDEN) and made(x_TH[:0]).dtype is torch.float32
    wide = torch.zeros(5, 2 * HIDDEN)
    wide[:, ::2] = x_TH
    before = wide.clone()
    assert torch.equal(made(wide[:, ::2]), expected)
    assert torch.equal(made(x_TH.t().contiguous().t()), expected)
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    "settings,error,message",
    [
        (
            {"experts": "torch_cup"},
            ConfigError,
            r"no experts backend is called 'torch_cup'; did you mean 'torch_cpu'\?",
        ),
        ({"prepare_finalize": "noep"}, ConfigError, r"no prepare_finalize backend .* 'noep'; did you mean 'no_ep'\?"),
        ({"prepare_finalize": "all_to_all"}, UnsupportedError, r"needs 2 ranks or more, the group has 1"),
        ({"ep": 2}, ConfigError, r"parallel\.ep=2 but the group has 1 rank; pass groups=ParallelGroups"),
        ({"graphs": True}, UnsupportedError, r"cannot be captured in a CUDA graph \[kernel\.graphs = false\]"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_built(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MoELayer(config(8, 2, **settings), dtype=torch.float32)


def test_groups_of_another_size_than_stated_are_refused() -> None:
    groups = virtual_groups(ep=4)[0]
    with pytest.raises(ConfigError, match=r"parallel\.ep=2 but the group has 4 ranks"):
        MoELayer(config(8, 2, ep=2), dtype=torch.float32, groups=groups)
    with pytest.raises(ConfigError, match=r"parallel\.ep=4 exceeds model\.num_experts=3, .* use 1 to 3 ranks"):
        MoELayer(config(3, 2), dtype=torch.float32, groups=groups)


@pytest.mark.row(31)
def test_slices_that_cut_an_expert_unevenly_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp=3 does not divide model\.moe_intermediate_size=8"):
        MoELayer(config(8, 2), dtype=torch.float32, groups=virtual_groups(tp=3)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_no_layer_computes_in_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"dtype {dtype} is not supported; use bfloat16, float16 or float32"):
        MoELayer(config(8, 2), dtype=dtype)


@pytest.mark.parametrize(
    "device,message", [("cuda", r"cannot be used"), ("tpu", r"is not a device"), ("mps", r"cannot be used")]
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        MoELayer(config(8, 2), device=device)


@pytest.mark.parametrize("count", [0, 1, 2, 16])
@pytest.mark.parametrize("order", [range(8), [3, 0, 5, 1, 7, 2, 6, 4], [*range(8), 0, 7, 5, 2]], ids=len)
@pytest.mark.parametrize(("dtype", "weights"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_experts_in_torch_run_in_one_call_with_the_bits_and_the_load_of_the_stages(
    dtype: torch.dtype, weights: str, order: Any, count: int
) -> None:
    settings = config(8, 3, experts="torch_cpu", max_num_tokens=16, placement=tuple(order), quant={"weights": weights})
    built = MoELayer(settings, dtype=dtype).load_weights(tensors(8, dtype=dtype))
    x_TH = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    heard = list[Routing]()
    built.on_routing = heard.append
    fused = built.prepare()
    assert fused.call is not None and not fused.call.routes and fused.call is fused.alone
    y_TH, load_E, routing = built(x_TH), built.expert_load.clone(), built.route(x_TH)
    assert torch.equal(wait(built.steps(x_TH)), y_TH) and torch.equal(built.expert_load, 2 * load_E)
    assert len(heard) == 2 and torch.equal(heard[0].ids_TK, routing.ids_TK) and int(load_E.sum()) == 3 * count
    ids_TK = routing.ids_TK.long()
    assert torch.equal(built.forward_routed(x_TH, routing.weights_TK, ids_TK), y_TH)
    assert torch.equal(built.expert_load, 3 * load_E) and heard[-1].ids_TK.dtype is torch.int32
    ids_TK[:1, 1] = -1
    found_TH = built.forward_routed(x_TH, routing.weights_TK, ids_TK)
    assert torch.equal(wait(built.steps(x_TH, given=Routing(ids_TK.int(), routing.weights_TK))), found_TH)
    counted_E, ids_TK[:1, 1] = built.expert_load.clone(), 8
    if count:
        with pytest.raises(ShapeError, match=r"topk_ids holds 1 ids outside \[-1, 8\), for example \[8\]"):
            built.forward_routed(x_TH, routing.weights_TK, ids_TK)
        assert torch.equal(built.expert_load, counted_E), "nothing is counted"


def test_tokens_that_choose_an_expert_twice_are_found() -> None:
    ids_TK = torch.tensor([[0, 1, 2], [3, -1, -1], [2, 5, 2], [-1, 4, 4]], dtype=torch.int32)
    assert tokens_with_repeats(ids_TK) == [2, 3]
    assert tokens_with_repeats(ids_TK[:, :1]) == [] and tokens_with_repeats(ids_TK[:0]) == []


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


@pytest.mark.slow
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
