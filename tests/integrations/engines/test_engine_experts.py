"""Routed experts over an engine's weights: by loops, at the edges, compiled, and laid out anew when they change."""

import gc
import logging
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_mk import ParallelGroups
from moe_mk.errors import CommError, ConfigError, ShapeError, UnsupportedError, WeightError
from moe_mk.integrations import vllm
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights, HeldExperts, _warn_of_copies, is_released
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.runner.invariant import add_choices
from tests.integrations.engines.cases import CLOSE, EXPERTS, HIDDEN, Tiny, call, error
from tests.integrations.engines.stand_ins import UnquantizedFusedMoEMethod, Vllm, moe_config, put_in
from tests.layer.native import NEEDS_COMPILER
from tests.support.worlds import world_of

world = world_of(2)
pytestmark = pytest.mark.timeout(300)
"""The first test of `cpu_native` in an environment compiles its kernels."""


def made(tiny: Tiny, **settings: object) -> EngineExperts:
    return EngineExperts("tiny", EngineWeights(tiny.w13, tiny.w2), top_k=2, settings=settings)


def test_one_token_by_hand() -> None:
    # w13 = 0.5 everywhere and x = 0.125, 32 wide: gate = up = 2. y = weight * 0.25 * 24 * silu(2) * 2.
    tiny = Tiny(torch.full((EXPERTS, 48, HIDDEN), 0.5), torch.full((EXPERTS, HIDDEN, 24), 0.25))
    y_TH = made(tiny)(torch.full((1, HIDDEN), 0.125), torch.tensor([[3.0]]), torch.tensor([[2]]))
    silu_of_2 = 2.0 / (1.0 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(y_TH, 3.0 * 0.25 * 24 * silu_of_2 * 2.0 * torch.ones(1, HIDDEN))


def test_no_tokens_one_token_and_ids_that_are_not_here() -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    here, before = made(tiny), [x_TH.clone(), weights_TK.clone(), ids_TK.clone()]
    assert here(x_TH[:0], weights_TK[:0], ids_TK[:0]).shape == (0, HIDDEN)
    assert error(here(x_TH[:1], weights_TK[:1], ids_TK[:1]), tiny.loops(x_TH[:1], weights_TK[:1], ids_TK[:1])) < CLOSE
    for nowhere in (-1, EXPERTS, 2**31 - 1):
        ids = ids_TK.clone()
        ids[:, 1] = nowhere
        assert error(here(x_TH, weights_TK, ids), tiny.loops(x_TH, weights_TK, ids)) < CLOSE
        assert not here(x_TH, weights_TK, torch.full_like(ids, nowhere)).any()
    assert all(torch.equal(*pair) for pair in zip(before, (x_TH, weights_TK, ids_TK), strict=True)), "as they were"


def of_rank(rank: int, transport: str) -> tuple[list[float], str]:
    """Errors of vLLM's calls with other tokens on each rank, and what the failure of rank 1 in between ends in."""
    tiny, size, errors = Tiny.drawn(), 1 if transport == "all_to_all" else 2, list[float]()  # a token has two choices
    mine, all_ranks = slice(size * rank, size * rank + size), Tiny(tiny.w13[: 2 * size], tiny.w2[: 2 * size])
    parallel = SimpleNamespace(dp_size=2, ep_size=2, use_ep=True, tp_rank=0, enable_eplb=False)
    stated = {"prepare_finalize": transport} | ({"max_num_tokens": 9} if transport == "auto" else {})
    host, group, layers = Vllm(["moe_mk"], {"moe_mk": stated}), Mock(cpu_group=dist.group.WORLD), list[Any]()
    host.modules["vllm.distributed"] = {"get_ep_group": lambda: group}
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch, host.modules)
        assert vllm.register()
        for placed in ("round_robin", "linear", "linear"):
            layer = host.layer(
                UnquantizedFusedMoEMethod, moe_config(num_experts=2 * size, moe_parallel_config=parallel),
                expert_map=torch.full((2 * size,), -1), expert_map_manager=SimpleNamespace(placement_strategy=placed),
            )  # fmt: skip
            layer.w13_weight, layer.w2_weight = (nn.Parameter(w[mine], False) for w in (tiny.w13, tiny.w2))
            with pytest.raises(UnsupportedError, match=placed) if placed != "linear" else nullcontext():
                layer.quant_method.process_weights_after_loading(layer)
                layers.append(layer)
        assert vllm._groups() is vllm._groups(), "layers share what transports keep open"

    def run(layer: Any, *tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer.quant_method.apply(layer, *tokens, None, None)
        return y

    here = layers[1].quant_method.experts_here
    config = here.of_rank.decision.problem.config
    assert (config.kernel.max_num_tokens, config.router.top_k) == (9 if transport == "auto" else 64, 2)
    for count in (7, 3 * rank, 1):
        if count == 1:
            vars(here.of_rank.kernel.experts).update({"run": None} if rank else {})
            with pytest.raises(TypeError if rank else CommError) as caught:
                run(layers[1], *call())
            vars(here.of_rank.kernel.experts).pop("run", None)
            here.recover()
        tokens = call(count, seed=rank)
        for layer in layers:
            errors += [error(run(layer, *tokens), all_ranks.loops(*tokens))] if count else [run(layer, *tokens).numel()]
    return errors, str(caught.value)


@pytest.mark.parametrize("transport", ["auto", "all_gather", "all_to_all"])
def test_ranks_of_an_engine_share_out_the_experts(world: RankWorld, transport: str) -> None:
    (first, failed), (second, _) = world.call(of_rank, transport)
    assert max(first + second) < CLOSE and "peer 1: its call failed: TypeError" in failed


def of_rank_in_one_call(rank: int, transport: str) -> list[bool]:
    """Whether calls of other sizes on each rank have the bits of the stages, and whether they were counted."""
    tiny, size, same = Tiny.drawn(), 1 if transport == "all_to_all" else 2, list[bool]()
    mine = slice(size * rank, size * rank + size)
    held = EngineWeights(tiny.w13[mine].bfloat16(), tiny.w2[mine].bfloat16())
    settings, groups = {"prepare_finalize": transport, "experts": "cpu_native"}, ParallelGroups(ep=dist.group.WORLD)
    here = EngineExperts("tiny", held, top_k=2, settings=settings, groups=groups)
    native, experts = here.of_rank.call, vars(here.of_rank)
    assert native is not None
    for count in (5, 2 * rank, 1):
        x_TH, weights_TK, ids_TK = call(count, seed=rank)
        found = list[torch.Tensor]()
        for experts["call"] in (native, native if rank else None, None):
            found.append(here(x_TH.bfloat16(), weights_TK, ids_TK))
            assert here.of_rank.grid.agreed == here.of_rank.grid.epochs
        same.append(all(torch.equal(found[0], other) for other in found))
    experts["call"] = native
    same.append({entry.calls for entry in here.of_rank.kernel.spans.ledger.entries.values()} == {9})
    same.append(here.of_rank.decision.problem.config.router.top_k == 2)
    if rank:
        vars(native).update(_lock=None, _parts=None, _idle=[])
    with pytest.raises((AttributeError, TypeError) if rank else CommError, match="." if rank else "peer 1: its call"):
        here(x_TH.bfloat16(), weights_TK, ids_TK)
    here.recover()
    return same


@NEEDS_COMPILER
@pytest.mark.parametrize("transport", ["one_sided", "all_to_all"])
def test_ranks_exchange_rows_in_one_native_call_with_the_bits_of_the_stages(world: RankWorld, transport: str) -> None:
    assert world.call(of_rank_in_one_call, transport) == [[True] * 5] * 2


@NEEDS_COMPILER
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_native_experts_in_one_call_have_the_bits_of_the_stages_and_skip_other_ids(ids_dtype: torch.dtype) -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    here = made(Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16()), experts="cpu_native")
    x_TH, ids_TK = x_TH.bfloat16(), ids_TK.to(ids_dtype)
    for nowhere in (-1, EXPERTS, -7, 2**32 if ids_dtype is torch.int64 else 2**31 - 1):
        ids_TK[1:4, 1] = nowhere
        found_TH, native = here(x_TH, weights_TK, ids_TK), here.of_rank.call
        vars(here.of_rank)["call"] = None
        assert native is not None and torch.equal(here(x_TH, weights_TK, ids_TK), found_TH)
        vars(here.of_rank)["call"] = native
    assert {entry.calls for entry in here.of_rank.kernel.spans.ledger.entries.values()} == {8}


@NEEDS_COMPILER
def test_invariant_sums_are_those_of_each_choice_alone_in_their_order() -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call(23)
    half, x_TH = Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16()), x_TH.bfloat16()
    found_TH = made(half, experts="cpu_native", invariant=True)(x_TH, weights_TK, ids_TK)
    plain = made(half, experts="cpu_native", batch_invariant=True)
    each = [plain(x_TH, torch.ones(23, 1), ids_TK[:, k : k + 1].contiguous()) for k in range(2)]
    assert torch.equal(found_TH, add_choices(torch.stack(each, 1), weights_TK))
    assert not torch.equal(found_TH, plain(x_TH, weights_TK, ids_TK))


@pytest.mark.parametrize("experts", ["auto", "torch_cpu"])
def test_calls_are_split_into_the_tiles_of_the_settings(experts: str) -> None:
    tiny, tokens = Tiny.drawn(), call()
    here = made(tiny, experts=experts, tiles=3)
    assert error(here(*tokens), tiny.loops(*tokens)) < CLOSE and "3 tiles per call" in here.explain()
    assert [entry.calls for entry in here.of_rank.kernel.spans.ledger.entries.values()] == [3] * 3


@NEEDS_COMPILER
def test_two_copies_are_logged_and_the_engine_s_can_be_released(caplog: pytest.LogCaptureFixture) -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    w13, w2 = tiny.w13.bfloat16(), tiny.w2.bfloat16()
    settings = {"experts": "cpu_native"}
    with caplog.at_level(logging.INFO, "moe_mk.integrations"):
        _warn_of_copies.cache_clear()
        here = EngineExperts("layer 3", EngineWeights(w13, w2), top_k=2, settings=settings)
        EngineExperts("layer 4", EngineWeights(w13, w2), top_k=2, settings=settings)
        copied = w13.clone(), w2.clone()
        EngineExperts("layer 5", EngineWeights(*copied), top_k=2, settings=settings, release=True)
    assert is_released(copied[0]) and is_released(copied[1])
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "cpu_native keeps weights in its own layout, in addition to those of the engine" in warning
    caplog.records.remove(next(record for record in caplog.records if record.levelno == logging.WARNING))
    held = f"{w13.nbytes + w2.nbytes:,} B"
    stated = f"layer 3: cpu_native keeps the weights in its own layout, {here.copied_bytes:,} B"
    assert caplog.messages[0] == f"{stated}, in addition to the engine's {held}; release() frees those"
    assert caplog.messages[2].endswith("the engine's were released") and len(caplog.messages) == 3
    assert here.explain().endswith(caplog.messages[0]) and "cpu_native" in here.explain().splitlines()[0]
    before_TH = here(x_TH.bfloat16(), weights_TK, ids_TK)
    assert here.release() == w13.nbytes + w2.nbytes and w13.untyped_storage().nbytes() == 0
    assert torch.equal(here(x_TH.bfloat16(), weights_TK, ids_TK), before_TH)
    assert here.note == f"{stated}; the engine's were released"
    flat = torch.cat((tiny.w13.flatten(), tiny.w2.flatten())).bfloat16()
    views = flat[: tiny.w13.numel()].view(tiny.w13.shape), flat[tiny.w13.numel() :].view(tiny.w2.shape)
    with pytest.raises(UnsupportedError, match="2 of 2 tensors share their storage with others"):
        EngineExperts("tiny", EngineWeights(*views), top_k=2, settings={"experts": "cpu_native"}).release()
    with pytest.raises(UnsupportedError, match=r"the weights of layer 3 were released\n.*load them into the engine"):
        EngineExperts("layer 3", EngineWeights(w13, w2), top_k=2)


def test_weights_that_are_read_directly_are_not_released() -> None:
    tiny = Tiny.drawn()
    here = made(tiny, experts="torch_cpu")
    assert here.copied_bytes == 0 and here.note.startswith("tiny: torch_cpu reads the engine's weights")
    with pytest.raises(UnsupportedError, match="torch_cpu reads them, there is no second copy"):
        here.release()


def test_it_is_one_node_of_a_graph_and_keeps_the_rules_of_torch() -> None:
    here, tokens = made(Tiny.drawn()), call()
    compiled = torch.compile(lambda *given: here(*given) * 2.0, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tokens), here(*tokens) * 2.0)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_mk.engine_experts, (*tokens, here._entry), test_utils=tests)


def test_the_experts_of_61_layers_share_one_graph() -> None:
    tokens, graphs = call(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    class Block(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            tiny = Tiny.drawn()
            self.experts = EngineExperts(f"layer {seed}", EngineWeights(tiny.w13 * (1 + seed), tiny.w2), top_k=2)

        def forward(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
            return self.experts(x_TH, weights_TK, ids_TK)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in map(Block, range(61)):
            assert torch.equal(torch.compile(block, fullgraph=True, backend=backend)(*tokens), block(*tokens))
    assert len(graphs) == 1


def test_a_graph_whose_experts_are_gone_states_so() -> None:
    here, tokens = made(Tiny.drawn()), call()
    number = here._entry
    del here
    with pytest.raises(UnsupportedError, match="behind moe_mk::engine_experts of a compiled graph is gone"):
        torch.ops.moe_mk.engine_experts(*tokens, number)


def test_wrong_weights_and_wrong_calls_are_refused_with_numbers() -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    with pytest.raises(ShapeError, match=r"tiny.w13 has R=47 \(axis 1\), expected R=48"):
        made(Tiny(tiny.w13[:, :-1], tiny.w2))
    with pytest.raises(ConfigError, match="unknown setting 'expert'; did you mean 'experts'"):
        made(tiny, expert="reference")
    with pytest.raises(UnsupportedError, match="computes in bf16, the layer is fp32"):
        made(tiny, experts="cpu_native")
    here = made(tiny)
    with pytest.raises(ShapeError, match=r"hidden_states has dtype torch.bfloat16"):
        here(x_TH.bfloat16(), weights_TK, ids_TK)
    with pytest.raises(ShapeError, match=r"topk_weights is \(7, 1\), topk_ids is \(7, 2\)"):
        here(x_TH, weights_TK[:, :1], ids_TK)
    with pytest.raises(UnsupportedError, match=r"gradients through tiny\n.*no_grad"):
        here(x_TH.requires_grad_(), weights_TK, ids_TK)


@pytest.mark.parametrize("release", [False, pytest.param(True, marks=NEEDS_COMPILER)])
def test_what_was_made_of_replaced_weights_is_dropped_and_the_rest_is_kept(release: bool) -> None:
    (x_TH, weights_TK, ids_TK), builds = call(), list[object]()
    held, tokens = HeldExperts(release=release), (x_TH.bfloat16(), weights_TK, ids_TK)

    def drawn() -> Tiny:
        tiny = Tiny.drawn()
        return Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16())

    layers = [drawn() for _ in range(3)]

    def run(layer: Tiny) -> weakref.ref[EngineExperts]:
        def build() -> EngineExperts:
            builds.append(layer)
            settings = {"experts": "cpu_native" if release else "reference"}
            return EngineExperts(
                "tiny", EngineWeights(layer.w13, layer.w2), top_k=2, settings=settings, release=release
            )

        experts = held.of((layer.w13, layer.w2), build)
        experts(*tokens)
        return weakref.ref(experts)

    last: list[weakref.ref[EngineExperts]] = []
    for _ in range(20):
        last = [run(layer) for layer in layers]
    assert len(builds) == 3
    layers[1] = drawn()
    builds.clear()
    for _ in range(2 * HeldExperts.KEPT):
        now = [run(layer) for layer in layers]
    gc.collect()
    assert len(builds) == 1 and len(held._held) == 3 and last[1]() is None
    assert now[0]() is last[0]() is not None


@NEEDS_COMPILER
def test_released_weights_are_kept_however_long_a_layer_is_not_called() -> None:
    (x_TH, weights_TK, ids_TK), held = call(), HeldExperts(release=True)
    drawn = [Tiny.drawn() for _ in range(2)]
    layers = [(each.w13.bfloat16(), each.w2.bfloat16()) for each in drawn]

    def run(at: int) -> torch.Tensor:
        given = EngineWeights(*layers[at])
        return held.of(
            layers[at],
            lambda: EngineExperts("tiny", given, top_k=2, settings={"experts": "cpu_native"}, release=True),
        )(x_TH.bfloat16(), weights_TK, ids_TK)

    first = [run(0), run(1)]
    assert all(is_released(tensor) for layer in layers for tensor in layer)
    for _ in range(4 * HeldExperts.KEPT):
        run(1)
    assert torch.equal(run(0), first[0]) and torch.equal(run(1), first[1])


def test_invalid_numbers_are_refused_with_the_name_of_the_layer() -> None:
    tiny = Tiny.drawn()
    tiny.w2[1, 2, 3] = float("nan")
    with pytest.raises(WeightError, match=r"(?s)^tiny\.weights cannot be used:.* w2\[1, 2, 3\] \(expert 1\) = nan"):
        made(tiny)
