"""What torch expects of a layer: one operator in one graph; shapes of sequences, state dicts, conversions of dtype."""

import contextlib
import copy
import io
import pickle
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe_mk import ExpertMap, MoEConfig, MoELayer, MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.layer.custom_op import REPLAYED, ROUTES, moe_layer
from moe_mk.tokens import Routing
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, INNER, config, layer, tensors


@pytest.fixture
def moe() -> MoELayer:
    return layer(8, 2, experts="torch_cpu", num_shared_experts=1, max_num_tokens=16)


def block(moe: MoELayer) -> Any:
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(HIDDEN), moe=moe))


@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (0, 4), (3, 0)])
def test_sequences_come_back_in_their_shape(moe: MoELayer, shape: tuple[int, int]) -> None:
    x_BSH = torch.randn((*shape, HIDDEN), generator=torch.Generator().manual_seed(0))
    y_BSH = moe(x_BSH)
    assert y_BSH.shape == x_BSH.shape
    assert torch.equal(y_BSH.flatten(0, 1), moe(x_BSH.flatten(0, 1)))


def test_sequences_may_be_transposed(moe: MoELayer) -> None:
    x_SBH = torch.randn((5, 3, HIDDEN), generator=torch.Generator().manual_seed(0))
    y_BSH = moe(x_SBH.transpose(0, 1))
    assert torch.equal(y_BSH, moe(x_SBH.transpose(0, 1).contiguous()))
    # Of the other order of tokens an expert multiplies its rows in another order, which may change their last bits.
    torch.testing.assert_close(y_BSH, moe(x_SBH).transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(HIDDEN,), ()])
def test_other_shapes_are_refused_with_their_shape(moe: MoELayer, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as refused:
        moe(torch.zeros(shape))
    assert f"has {len(shape)} dimensions {shape}, expected 2 [T, H] or 3 [B, S, H]" in str(refused.value)


def test_limits_count_the_tokens_of_all_sequences(moe: MoELayer) -> None:
    with pytest.raises(ShapeError, match=r"T=18 tokens, kernel\.max_num_tokens=16"):
        moe(torch.zeros(3, 6, HIDDEN))


def test_a_compiled_layer_takes_sequences(moe: MoELayer) -> None:
    x_BSH = torch.randn((2, 3, HIDDEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(torch.compile(moe, fullgraph=True, backend="eager")(x_BSH), moe(x_BSH))


def test_a_layer_says_that_its_weights_are_no_state_dict(moe: MoELayer) -> None:
    way_out = r"(?s)weights are no parameters; load them with load\(path or tensors"
    with pytest.raises(UnsupportedError, match=way_out):
        moe.state_dict()
    with pytest.raises(UnsupportedError, match=way_out):
        moe.load_state_dict({})
    assert list(moe.parameters()) == [] and moe.requires_grad_(False) is moe


def test_the_state_dict_of_a_model_holds_the_rest_and_loads_strictly(moe: MoELayer) -> None:
    model, x_TH = block(moe), torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0))
    wanted_TH, state = moe(x_TH), model.state_dict()
    assert sorted(state) == ["norm.bias", "norm.weight"]
    state["norm.weight"] = torch.full((HIDDEN,), 2.0)
    assert str(model.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    assert torch.equal(model.norm.weight.detach(), state["norm.weight"]) and torch.equal(moe(x_TH), wanted_TH)


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_does_not_drop_weights_of_a_layer_in_silence(moe: MoELayer, strict: bool) -> None:
    model = block(moe)
    state = model.state_dict() | {"moe.gate.weight": torch.zeros(8, HIDDEN)}
    with pytest.raises(RuntimeError, match=r"layer 'moe' cannot load 1 tensors, for example 'moe.gate.weight'"):
        model.load_state_dict(state, strict=strict)


def test_a_conversion_to_another_dtype_is_refused_with_the_way_out(moe: MoELayer) -> None:
    message = r"(?s)layer 'moe' cannot be converted from torch\.float32 to torch\.float16.*build it with dtype="
    for convert in (moe.half, lambda: moe.to(torch.float16), block(moe).half):
        with pytest.raises(UnsupportedError, match=message):
            convert()
    assert moe.to(torch.float32) is moe.float() is moe
    assert moe(torch.zeros(1, HIDDEN)).dtype is torch.float32


@pytest.mark.parametrize("way", ["load_weights", "loader", "to_empty"])
def test_a_layer_on_the_meta_device_is_built_when_it_is_loaded(moe: MoELayer, way: str) -> None:
    with torch.device("meta"):
        model = block(MoELayer(moe.config, dtype=torch.float32))
        lazy = model.moe
        assert lazy.device.type == "meta" and all(
            tensor.is_meta for tensor in model.state_dict(keep_vars=True).values()
        )
        assert lazy.expert_load.is_meta and list(lazy.parameters()) == []
        x_TH = torch.randn((3, HIDDEN), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        for x in (x_TH, torch.empty(3, HIDDEN)):
            with pytest.raises(WeightError, match="layer 'moe' has no weights yet"):
                lazy(x)
        assert lazy.explain().chosen.experts == "torch_cpu" and lazy.memory_report().total > 0
        assert copy.deepcopy(lazy).device.type == "meta"
    given = tensors(8, shared=1)
    if way == "to_empty":
        assert model.to_empty(device="cpu") is model and lazy.device == torch.device("cpu")
        assert int(lazy.expert_load.abs().sum()) == 0
    if way == "loader":
        loader = lazy.loader()
        for name, tensor in given.items():
            loader.feed(name, tensor)
        loader.finish()
    else:
        with torch.device("meta"):  # also where a whole program runs under it
            lazy.load_weights(given)
    assert lazy.device == torch.device("cpu") and torch.equal(lazy(x_TH), moe(x_TH))
    assert int(lazy.expert_load.sum()) == 6


def test_the_default_device_is_that_of_torch(moe: MoELayer) -> None:
    assert MoELayer(moe.config, dtype=torch.float32).device == torch.device("cpu")
    with torch.device("cuda:7"), pytest.raises(UnsupportedError, match="device cuda:7 cannot be used"):
        MoELayer(moe.config, dtype=torch.float32)
    with torch.device("cuda:7"):
        assert MoELayer(moe.config, dtype=torch.float32, device="cpu").device == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="computes in bf16, the layer is fp32"):
        MoELayer(moe.config.with_(experts="cpu_native"), dtype=torch.float32, device="meta")


@NEEDS_COMPILER
def test_the_copy_in_the_format_of_the_checkpoint_can_be_released() -> None:
    moe = MoELayer(config(8, 2, experts="cpu_native", num_shared_experts=1, quant={"weights": "bf16"}))
    loader, given = moe.loader(), tensors(8, shared=1, dtype=torch.bfloat16)
    for name, tensor in given.items():
        loader.feed(name, tensor)
    loader.finish()
    x_TH = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted_TH, experts = moe(x_TH), moe.weights.experts
    held = [StorageWeakRef(slot.up_IH.values.untyped_storage()) for slot in experts.slots]
    num_bytes = experts.num_bytes
    del experts
    assert moe.release_weights() == num_bytes > 0 and all(storage.expired() for storage in held)
    assert torch.equal(moe(x_TH), wanted_TH) and torch.equal(moe.forward(x_TH[None])[0], wanted_TH)
    assert moe.release_weights() == 0 and moe.weights.experts.num_bytes == 0
    moved = ExpertMap(((1, 0, 2, 3, 4, 5, 6, 7),), num_experts=8)
    for call in (lambda: copy.deepcopy(moe), lambda: pickle.dumps(moe), lambda: moe.live.set_placement(moved)):
        with pytest.raises(UnsupportedError, match=r"the experts of layer 'moe' were released.*\n.*load them again"):
            call()
    assert torch.equal(moe.load_weights(given)(x_TH), wanted_TH) and torch.equal(copy.deepcopy(moe)(x_TH), wanted_TH)
    held = [StorageWeakRef(tensor.untyped_storage()) for name, tensor in given.items() if name.startswith("experts.")]
    del loader, given, tensor
    assert moe.release_weights() == num_bytes and all(storage.expired() for storage in held)


def test_weights_that_the_backend_reads_are_not_released(moe: MoELayer) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 'moe' cannot be released\n.*torch_cpu reads them"):
        moe.release_weights()
    with pytest.raises(WeightError, match="no weights yet"):
        MoELayer(moe.config, dtype=torch.float32).release_weights()


VERBS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "float": lambda module: module.float(),
    "type f32": lambda module: module.type(torch.float32),
    "type f64": lambda module: module.type(torch.float64),
    "type int64": lambda module: module.type(torch.int64),
    "type by name": lambda module: module.type("torch.FloatTensor"),
    "to f32": lambda module: module.to(torch.float32),
    "to f16": lambda module: module.to(torch.float16),
    "to cpu": lambda module: module.to("cpu", non_blocking=True),
    "to a format": lambda module: module.to(memory_format=torch.channels_last),
    "to meta": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "to_empty meta": lambda module: module.to_empty(device="meta"),
    "cpu": lambda module: module.cpu(),
    "share_memory": lambda module: module.share_memory(),
    "requires_grad_": lambda module: module.requires_grad_(True),
    "zero_grad": lambda module: module.zero_grad(),
    "train": lambda module: module.train(),
    "eval": lambda module: module.eval(),
    "apply": lambda module: module.apply(lambda part: None),
    "_apply clone": lambda module: module._apply(torch.clone),
    "_apply zeros": lambda module: module._apply(torch.zeros_like),
    "state_dict": lambda module: module.state_dict(),
    "load_state_dict": lambda module: module.load_state_dict({}),
    "copy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": lambda module: torch.save(module, io.BytesIO()),
    "script": torch.jit.script,
    "functional_call": lambda module: torch.func.functional_call(module, {}, (torch.zeros(2, HIDDEN),)),
    "trace": lambda module: torch.jit.trace(module, torch.zeros(2, HIDDEN), check_trace=False),
    "vmap": lambda module: torch.vmap(module)(torch.zeros(2, 2, HIDDEN)),
    "grad": lambda module: torch.func.grad(lambda x: module(x).sum())(torch.zeros(2, HIDDEN)),
    "jvp": lambda module: torch.func.jvp(module, (torch.zeros(2, HIDDEN),), (torch.ones(2, HIDDEN),)),
    "functionalize": lambda module: torch.func.functionalize(module)(torch.zeros(2, HIDDEN)),
    "autocast": lambda module: torch.autocast("cpu", torch.bfloat16)(module)(torch.zeros(2, HIDDEN)),
    "inference_mode": lambda module: torch.inference_mode()(module)(torch.zeros(2, HIDDEN)),
}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside of a model"])
def test_after_any_methods_of_modules_a_layer_computes_and_counts_as_before(moe: MoELayer, inside: bool) -> None:
    """Each does what it does to any module without parameters, or raises an error of this library."""
    draw, model = random.Random(inside), block(moe).requires_grad_(False) if inside else moe
    if inside:
        model.norm = nn.Identity()  # torch's own modules may fail at the dtypes that they were converted to
    x_TH = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0))
    wanted_TH, load_E = moe(x_TH), moe.expert_load.clone()
    for verb in (*VERBS, *draw.choices(list(VERBS), k=40)):
        with warnings.catch_warnings(), contextlib.suppress(MoEMKError, pickle.PicklingError):
            warnings.simplefilter("ignore")
            VERBS[verb](model)
        assert bool((moe.expert_load >= load_E).all()), f"{verb}: counts are lost"
        moe.reset_expert_load()
        assert torch.equal(model(x_TH), wanted_TH) and torch.equal(moe.expert_load, load_E), verb
        assert moe.expert_load.dtype is torch.int64 and moe.device == torch.device("cpu"), verb


ON_TOKENS = sorted(
    name for name in dir(MoELayer)
    if not name.startswith(("_", "run")) and callable(getattr(MoELayer, name))
    and "hidden_states" in signature(getattr(MoELayer, name)).parameters
)  # fmt: skip
"""All methods of a layer that callers pass tokens to; `run` and its kind are what operators call."""


def results(made: MoELayer, name: str, x_TH: Tensor) -> list[Callable[..., object]]:
    """Calls of a method, with each kind of its arguments."""
    weights_TK, ids_TK = torch.tensor([[0.25, 0.75]] * 3), torch.tensor([[0, 3], [1, -1], [7, 2]])
    given: dict[str, list[tuple[object, ...]]] = {
        "checked": [()], "forward": [()], "route": [()], "forward_routed": [(weights_TK, ids_TK)],
        "forward_replayed": [(ids_TK,), (Routing(ids_TK, weights_TK),)],
    }  # fmt: skip
    return [partial(getattr(made, name), x_TH, *more) for more in given[name]]


@pytest.mark.parametrize("name", ON_TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_method_on_tokens_is_compiled_whole_and_counts_as_without(name: str, dtype: torch.dtype) -> None:
    made = layer(8, 2, dtype=dtype, experts="torch_cpu", router_dtype="model")
    made.router = replace(made.router, ids_dtype=torch.int64)
    x_TH = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0)).to(dtype)

    def flat(call: Any, *given: object) -> tuple[list[Tensor], list[torch.dtype]]:
        """The tensors of a result, and the dtypes that a graph takes them for."""
        found = call(*given)
        parts = (found.ids_TK, found.weights_TK, found.logits_TE) if isinstance(found, Routing) else (found,)
        return list(parts), [part.dtype for part in parts]

    for call in results(made, name, x_TH):
        made.reset_expert_load()
        (wanted, dtypes), counted = flat(call), made.expert_load.clone()
        for backend in ("eager", "aot_eager"):
            torch.compiler.reset()
            made.reset_expert_load()
            with torch.no_grad():
                compiled = torch.compile(flat, fullgraph=True, backend=backend)
                found, known = compiled(call.func, *call.args)  # type: ignore[attr-defined]
            assert known == dtypes and torch.equal(made.expert_load, counted)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype is other.dtype and torch.equal(one, other)


def test_compiled_methods_refuse_what_eager_ones_refuse(moe: MoELayer) -> None:
    x_TH, ids_TK = torch.zeros((3, HIDDEN)), torch.full((3, 2), 100)
    replayed = torch.compile(moe.forward_replayed, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(ShapeError, match="recorded ids are 100 to 100"):
        replayed(x_TH, ids_TK)
    route = torch.compile(moe.route, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(ShapeError, match=r"hidden_states has H=17"):
        route(torch.zeros((3, HIDDEN + 1)))
    weights_TK, routed = torch.ones(3, 2), torch.compile(moe.forward_routed, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(ShapeError, match="topk_ids holds 3 ids outside"):
        routed(x_TH, weights_TK, torch.tensor([[100, 1]] * 3))
    torch.library.opcheck(
        torch.ops.moe_mk.moe_layer_routed, (x_TH, weights_TK, ids_TK % 8, moe.expert_load, moe._entry)
    )
    torch.library.opcheck(ROUTES.call, (x_TH, moe._entry, None, (2, 8), torch.int32, torch.float32))
    torch.library.opcheck(REPLAYED.call, (x_TH, ids_TK % 8, moe.expert_load, moe._entry))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def made() -> MoELayer:
    return layer(8, 2, experts="torch_cpu", num_shared_experts=1)


def test_one_graph_serves_every_number_of_tokens(made: MoELayer) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=backend)
    for count in (2, 3, 17, 64):
        x_TH = torch.randn(count, HIDDEN)
        assert torch.equal(compiled(x_TH), made(x_TH))
    assert len(graphs) == 1, "no recompilation over T"
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(call) for call in calls] == ["moe_mk.moe_layer.default"]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_opcheck_is_clean(made: MoELayer, count: int) -> None:
    x_TH = torch.randn(count, HIDDEN)
    torch.library.opcheck(moe_layer, (x_TH, made.expert_load, made._entry))


def test_the_fake_answers_shape_and_dtype_without_a_layer() -> None:
    with torch._subclasses.FakeTensorMode():
        x_TH = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        y_TH = moe_layer(x_TH.t().contiguous().t(), torch.zeros(8, dtype=torch.int64), torch.tensor(0))
    assert y_TH.shape == (3, HIDDEN) and y_TH.dtype is torch.bfloat16 and y_TH.is_contiguous()


class Block(torch.nn.Module):
    """A decoder layer, as far as the compiler is concerned."""

    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.norm, self.moe = torch.nn.RMSNorm(HIDDEN, elementwise_affine=False), moe

    def forward(self, x_TH: Tensor) -> Tensor:
        out: Tensor = x_TH + self.moe(self.norm(x_TH))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["torch_cpu", pytest.param("cpu_native", marks=NEEDS_COMPILER)])
def test_61_blocks_compiled_one_by_one_share_one_graph(experts: str) -> None:
    dtype, weights = torch.bfloat16, tensors(4, dtype=torch.bfloat16)
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 4, "quant": {"weights": "bf16"}}
    settings = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test").with_(experts=experts)
    layers = [MoELayer(settings, dtype=dtype, name=f"layer {n}").load_weights(weights) for n in range(61)]
    for number, each in enumerate(layers):  # so that a graph that calls another layer is noticed
        assert each.weights.gate_EH is not None
        each.state.backends.gate.load(each.weights.gate_EH.roll(number, 0), None)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    x_TH = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = [Block(each) for each in layers]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        found = [torch.compile(block, fullgraph=True, backend=backend)(x_TH) for block in blocks]
        assert len(graphs) == 1
        for block, y_TH in zip(blocks, found, strict=True):
            assert torch.equal(y_TH, block(x_TH))
    assert [int(each.expert_load.sum()) for each in layers] == [2 * 3 * 2] * 61


def test_a_graph_whose_layer_is_gone_says_so(made: MoELayer) -> None:
    entry, load_E = made._entry, made.expert_load
    with pytest.raises(UnsupportedError, match="behind moe_mk::moe_layer of a compiled graph is gone"):
        moe_layer(torch.randn(2, HIDDEN), load_E, entry + 10**6)
