"""Whatever is given to a door: what plain contiguous tensors give, or a typed error that names the argument."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.masked import masked_tensor
from torch.testing._internal.distributed import fake_pg  # registers the group of one rank  # noqa: F401

from moe_mk import MoELayer, MoEMKError, ShapeError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.router.gate import gate_logits
from moe_mk.router.hashed import HashRouter
from moe_mk.router.topk import grouped_topk, topk
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, config, tensors
from tests.support.tiers import quick_where, slow

TOKENS, EXPERTS, TOP_K = 3, 8, 2
BACKENDS = {"torch_cpu": torch.float32, "reference": torch.float32, "cpu_native": torch.bfloat16}

LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda t: t.T.contiguous().T,
    "every_other": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "flipped_twice": lambda t: t.flip(0).flip(0),
    "a_parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "negated_twice": lambda t: torch._neg_view(-t),
    "inside_others": lambda t: torch.cat((t, t), 1)[:, : t.shape[1]],
}
"""The same numbers; one of them must give the same results."""
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "list": lambda t: t.tolist(),
    "tuple": lambda t: (t,),
    "str": lambda t: "tokens",
    "number": lambda t: 1.0,
    "numpy": lambda t: np.zeros(tuple(t.shape), np.float32),
    "sparse": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.float().to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "int8": lambda t: t.to(torch.int8),
    "int16": lambda t: t.to(torch.int16),
    "uint8": lambda t: t.to(torch.uint8),
    "uint32": lambda t: t.to(torch.int32).to(torch.uint32),
    "uint64": lambda t: t.to(torch.int32).to(torch.uint64),
    "fp8": lambda t: t.float().to(torch.float8_e4m3fn),
    "float64": lambda t: t.double(),
    "one_dimension": lambda t: t.flatten(),
    "four_dimensions": lambda t: t[None, None],
    "a_row_less": lambda t: t[:-1],
    "a_column_less": lambda t: t[:, :-1],
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8),
    "gradients": lambda t: t.float().clone().requires_grad_(),
}


class Wrapped(Tensor):
    """A tensor of another memory, as of DTensor and of quantisation libraries."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"no memory for {func}")


class Named(nn.Parameter):
    """Of its own memory, as parameters of engines are."""


def distributed(tensor: Tensor) -> Tensor:
    """Of one rank, whole, and without a group of processes for the length of the call."""
    with threaded_world():
        return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


@contextmanager
def threaded_world() -> Iterator[None]:
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if started:
        dist.destroy_process_group()


def freed(tensor: Tensor) -> Tensor:
    """As of a model that was sharded again, or of weights that an engine has released."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def of_torch_func(tensor: Tensor) -> Tensor:
    """That a function inside of vmap has got."""
    found: list[Tensor] = []
    torch.vmap(lambda t: found.append(t) or t)(tensor[None])  # type: ignore[func-returns-value]
    return found[0]


def faked(tensor: Tensor) -> Tensor:
    """Outside of a trace."""
    return FakeTensorMode().from_tensor(tensor)


def uninitialised(tensor: Tensor) -> Tensor:
    return nn.UninitializedParameter(dtype=tensor.dtype, requires_grad=False)


FOREIGN: dict[str, Callable[[Tensor], Any]] = {
    "a DTensor": distributed,
    "a wrapper": Wrapped,
    "an AsyncCollectiveTensor": AsyncCollectiveTensor,
    "a MaskedTensor": lambda t: masked_tensor(t.float(), torch.ones_like(t, dtype=torch.bool)),
    "a FakeTensor": faked,
    "without values": uninitialised,
    "without memory": freed,
    "of zeros without memory": lambda t: torch._efficientzerotensor(tuple(t.shape), dtype=t.dtype),  # type: ignore[attr-defined]
    "of vmap": of_torch_func,
    "quantised": OTHERS["quantised"],
    "sparse": OTHERS["sparse"],
    "nested": OTHERS["nested"],
    "a list": lambda t: t.tolist(),
}
"""Memory that no kernel can read."""
NOT_OF_FP8 = ("a MaskedTensor", "quantised", "sparse", "nested", "of zeros without memory")
OF_TORCH = ("a FakeTensor",)
"""What torch's own operators take, or refuse in words of theirs."""
MAY_WORK = {"int16", "float64", "a_row_less", "one_dimension"}
"""Accepted by some doors."""


@cache
def layer(experts: str) -> MoELayer:
    dtype = BACKENDS[experts]
    quant = {"weights": "bf16" if dtype is torch.bfloat16 else "fp32"}
    settings = {"num_shared_experts": 1, "quant": quant, "experts": experts}
    made = MoELayer(config(EXPERTS, TOP_K, **settings), dtype=dtype)
    return made.load_weights(tensors(EXPERTS, shared=1, dtype=dtype))


@cache
def engine(experts: str, change: Callable[[Tensor], Tensor] = torch.clone) -> EngineExperts:
    named = tensors(EXPERTS, shared=1, dtype=BACKENDS[experts])
    w13 = [torch.cat([named[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(EXPERTS)]
    down = [named[f"experts.{e}.down_proj.weight"] for e in range(EXPERTS)]
    weights = EngineWeights(change(torch.stack(w13)), change(torch.stack(down)))
    return EngineExperts("engine", weights, top_k=TOP_K, settings={"experts": experts})


Door = tuple[Callable[..., Any], list[Tensor]]


def doors(experts: str) -> dict[str, Door]:
    """Every door with good arguments."""
    draw = torch.Generator().manual_seed(2)
    x_TH = torch.randn((TOKENS, HIDDEN), generator=draw).to(BACKENDS[experts])
    weights_TK = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 2.0]])
    ids_TK = torch.tensor([[0, 3], [1, -1], [7, 2]], dtype=torch.int32)
    made = layer(experts)
    assert made.state.backends.shared is not None
    return {
        "layer": (made, [x_TH]),
        "route": (lambda x: made.route(x).weights_TK, [x_TH]),
        "forward_routed": (made.forward_routed, [x_TH, weights_TK, ids_TK]),
        "engine": (engine(experts), [x_TH, weights_TK, ids_TK]),
        "shared": (made.state.backends.shared, [x_TH]),
    }


def kernel_doors() -> dict[str, Door]:
    """Doors of routers and kernels."""
    draw = torch.Generator().manual_seed(2)
    logits_TE, gate_EH = torch.randn((TOKENS, EXPERTS), generator=draw), torch.randn((EXPERTS, HIDDEN), generator=draw)
    x_TH, table = torch.randn((TOKENS, HIDDEN), generator=draw), torch.arange(20).view(10, 2) % EXPERTS
    return {
        "gate_logits": (gate_logits, [x_TH, gate_EH]),
        "topk": (lambda x: topk(x, TOP_K)[0], [logits_TE]),
        "grouped_topk": (lambda x: grouped_topk(x, TOP_K, 2, 1)[0], [logits_TE]),
        "hashed": (lambda x, ids: HashRouter(table).route(x, ids).weights_TK, [logits_TE, torch.tensor([1, 2, 3])]),
    }


def try_foreign(door: Door, name: str, *, pure: bool = False) -> None:
    """Every argument of every kind is refused by its name. pure: of torch's own operators, which may take some."""
    call, good = door
    with torch.no_grad():
        wanted = call(*good)
        for at in range(len(good)):
            named = [Named(t, requires_grad=False) if i == at else t for i, t in enumerate(good)]
            torch.testing.assert_close(call(*named), wanted, rtol=0.0, atol=0.0, msg=f"{name} {at}: a subclass")
            for kind, change in FOREIGN.items():
                if kind == "of vmap":  # it has none outside of the function
                    continue
                given = [change(t) if i == at else t for i, t in enumerate(good)]
                try:
                    call(*given)
                except MoEMKError:
                    continue
                except Exception as error:
                    if pure and kind in OF_TORCH:
                        continue
                    raise AssertionError(f"{name}, argument {at}, {kind}: untyped {error!r}") from error
                assert pure and kind in OF_TORCH, f"{name}, argument {at}: took {kind}"
            if not pure and name != "shared":
                with pytest.raises(ShapeError, match="is a tensor of torch.func"):
                    torch.vmap(lambda *given: call(*given))(*[t[None] for t in good])
        assert torch.equal(call(*good), wanted), "and computes as before"


def try_door(door: Door, name: str, may_work: set[str], *, gradients: bool = False) -> None:
    call, good = door
    with torch.set_grad_enabled(gradients):
        wanted = call(*good)
        for at, tensor in enumerate(good):
            for layout, change in (LAYOUTS if tensor.dim() == 2 else {}).items():
                got = call(*[change(t) if i == at else t for i, t in enumerate(good)])
                torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3, msg=f"{name} {at} {layout}")
            for other, change in OTHERS.items():
                if tensor.dim() != 2 and other in ("sparse_csr", "a_column_less"):
                    continue
                given = [change(t) if i == at else t for i, t in enumerate(good)]
                try:
                    call(*given)
                except MoEMKError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{name}, argument {at}, {other}: untyped {error!r}") from error
                taken = other in may_work or (other == "gradients" and not gradients)
                assert taken, f"{name}, {at}: took {other}"


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", quick_where(lambda experts: experts != "reference", BACKENDS))
@pytest.mark.parametrize("door", ["layer", "route", "forward_routed", "engine", "shared"])
def test_a_layer_takes_it_or_names_what_is_wrong(experts: str, door: str) -> None:
    for gradients in (False, True) if door != "shared" else (False,):  # its callers have refused gradients
        try_door(doors(experts)[door], door, MAY_WORK, gradients=gradients)


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", quick_where(lambda experts: experts == "cpu_native", BACKENDS))
@pytest.mark.parametrize("door", ["layer", "route", "forward_routed", "engine", "shared"])
def test_memory_that_no_kernel_reads_is_refused_by_name(experts: str, door: str) -> None:
    try_foreign(doors(experts)[door], door)


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", ["gate_logits", "topk", "grouped_topk", "hashed"])
def test_routers_and_kernels_refuse_what_they_cannot_read(door: str) -> None:
    try_foreign(kernel_doors()[door], door, pure=True)


def of_engine(**given: Any) -> ExpertWeights | MappedExpertWeights:
    return ExpertWeights.from_engine(**given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FOREIGN)
def test_weights_without_memory_of_their_own_are_refused_by_name(kind: str) -> None:
    """Of state dicts, of loaders and of engines: each tensor, biases and scales included."""
    good, config_of = tensors(EXPERTS, shared=1, bias=True), config(EXPERTS, TOP_K, num_shared_experts=1)
    config_of = config_of.with_(has_correction_bias=True, scoring_func="sigmoid")
    kept = MoELayer(config_of, dtype=torch.float32).load_weights(good)
    x_TH = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
    wanted_TH = kept(x_TH)
    for name in ("gate.weight", "gate.e_score_correction_bias", "experts.3.down_proj.weight"):
        given = {**good, name: FOREIGN[kind](good[name])}
        with pytest.raises(MoEMKError, match=name):
            kept.load_weights(given)
        with pytest.raises(MoEMKError, match=name):
            kept.loader().feed(name, given[name])
    assert torch.equal(kept(x_TH), wanted_TH)
    sizes = {"w13": (2, 8, 16), "w2": (2, 16, 4), "w13_bias": (2, 8), "w2_bias": (2, 16)}
    stacks = {name: torch.ones(size) for name, size in sizes.items()}
    scaled = {name: torch.ones(2, n, 128).to(torch.float8_e4m3fn) for name, n in (("w13", 256), ("w2", 128))}
    scaled |= {"w13_scale": torch.ones(2, 2, 1), "w2_scale": torch.ones(2, 1, 1)}
    for given, quant in ((stacks, ""), (scaled, "fp8_block")):
        of_engine(**given, quant=quant)
        for name, tensor in given.items():
            if tensor.dtype.itemsize == 1 and kind in NOT_OF_FP8:
                continue
            with pytest.raises(MoEMKError, match=name):
                of_engine(**{**given, name: FOREIGN[kind](tensor)}, quant=quant)


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", ["gate_logits", "topk", "grouped_topk", "hashed"])
def test_routers_and_kernels_take_it_or_name_what_is_wrong(door: str) -> None:
    try_door(kernel_doors()[door], door, MAY_WORK | {"meta", "a_column_less"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["experts.0.up_proj.weight", *slow("gate.weight", "shared_experts.down_proj.weight")])
def test_what_is_no_weight_is_refused_when_it_is_loaded(name: str) -> None:
    good = tensors(EXPERTS, shared=1)

    def load(given: dict[str, Any]) -> MoELayer:
        return MoELayer(layer("torch_cpu").config, dtype=torch.float32).load_weights(given)

    def feed(given: dict[str, Any]) -> None:
        loader = MoELayer(layer("torch_cpu").config, dtype=torch.float32).loader()
        for key, tensor in given.items():
            loader.feed(key, tensor)
        loader.finish()

    for other in set(OTHERS) - {"gradients", "float64"}:
        for call in (load, feed):
            with pytest.raises(MoEMKError):
                call({**good, name: OTHERS[other](good[name])})


@NEEDS_COMPILER
@pytest.mark.parametrize("experts", BACKENDS)
def test_weights_of_any_layout_are_the_same_weights(experts: str) -> None:
    given, (x_TH, *routed) = tensors(EXPERTS, shared=1, dtype=BACKENDS[experts]), doors(experts)["forward_routed"][1]
    for layout, change in LAYOUTS.items():
        made = MoELayer(layer(experts).config, dtype=BACKENDS[experts])
        made.load_weights({name: change(tensor) for name, tensor in given.items()})
        torch.testing.assert_close(made(x_TH), layer(experts)(x_TH), rtol=2**-7, atol=1e-3, msg=layout)
    of_engine = engine(experts, LAYOUTS["negated_twice"])(x_TH, *routed)
    assert torch.equal(of_engine, engine(experts)(x_TH, *routed))


@NEEDS_COMPILER
@pytest.mark.parametrize("experts", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_floats_are_used_as_f32(experts: str, dtype: torch.dtype) -> None:
    for door in ("forward_routed", "engine"):
        call, (x_TH, weights_TK, ids_TK) = doors(experts)[door]
        for ids in (ids_TK, ids_TK.long()):
            assert torch.equal(call(x_TH, weights_TK.to(dtype), ids), call(x_TH, weights_TK, ids_TK))
