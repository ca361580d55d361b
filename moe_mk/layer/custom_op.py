"""A forward as one torch operator, so that `torch.compile(fullgraph=True)` sees a single node.

An operator takes tensors and numbers only. A layer therefore registers itself and passes the entry that it gets: a
tensor and not a number, which `torch.compile` would make a constant of the graph, so that each layer of a model had to
be compiled apart. The table holds weak references, so it keeps no layer alive.

`torch.export` makes the entry a constant of the program. Its first word is random, so it is found in no other process;
the others are the name of the layer and digests of its description and of its weights, by which `bind` and a later call
recognise it.

Operators are defined with `torch.library.Library`: a call costs a few microseconds, one of `torch.library.custom_op`
more than the smallest layer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Iterable
from hashlib import blake2b
from os import urandom
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer

# Functions of torch.distributed.nn keep the default group of the moment they are imported, and the first call of a
# custom op may import them: that group would never end, and gloo's threads would meet an interpreter that exits. They
# are imported before there is a group; where this module comes after it, importing them here would be just that.
if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
    import torch.distributed.nn

T = TypeVar("T")
MASKS = (torch.bool, torch.int64, torch.int32, torch.uint8, torch.int8)
_LIBRARY: Any = torch.library.Library("moe_mk", "FRAGMENT")  # type: ignore[no-untyped-call]

NAME_BYTES = 64
"""Of a name in an entry; longer ones are cut."""


class Identity(NamedTuple):
    """By what an exported program recognises the object that it calls, in whatever process."""

    name: bytes
    description: bytes
    """16 bytes, a digest of the settings that determine the result."""
    weights: bytes = bytes(8)
    """A digest of some values of the weights; zeros before loading, which fit all."""

    @classmethod
    def of(cls, name: str, description: object, weights: Tensor | None = None) -> Self:
        """description: with a repr that is equal in all processes. weights: read on the host, a few kilobytes."""
        words = blake2b(repr(description).encode(), digest_size=16).digest()
        found = cls(name.encode(errors="replace")[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), words)
        if weights is None or weights.is_meta:
            return found
        octets = weights.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
        return found._replace(weights=blake2b(octets, digest_size=8).digest())

    @classmethod
    def read(cls, words: list[int]) -> Self:
        """From the words of an entry."""
        octets = struct.pack(f"<{len(words) - 1}q", *words[1:])
        return cls(octets[:NAME_BYTES], octets[NAME_BYTES : NAME_BYTES + 16], octets[NAME_BYTES + 16 :])

    def words(self) -> tuple[int, ...]:
        octets = b"".join(self)
        return struct.unpack(f"<{len(octets) // 8}q", octets)

    def differs(self, other: Self) -> str:
        """Describe how another object differs; "" if it can be called instead."""
        if self.name != other.name:
            return "the name"
        if self.description != other.description:
            return "the settings"
        known = any(self.weights) and any(other.weights)
        return "the weights" if known and self.weights != other.weights else ""

    def __str__(self) -> str:
        name = self.name.rstrip(b"\0").decode(errors="replace")
        return f"{name!r} ({self.description.hex()[:8]}/{self.weights.hex()[:8]})"


class Operator(Generic[T]):
    """An operator `moe_mk::name` over objects of one kind, each found by its entry. The result is a tensor like x."""

    every: ClassVar[list[Operator[Any]]] = []

    def __init__(
        self,
        name: str,
        schema: str,
        run: Callable[..., Any],
        fake: Callable[..., Any] | None = None,
        untrained: tuple[str, str] | None = None,
        shares: Operator[T] | None = None,
    ) -> None:
        """schema: arguments and result as torch writes them; the first is x, and one of them is `Tensor entry`.

        run: the implementation, with the object of the entry before the other arguments of the schema. fake: the shape
        of the result; None: that of x.
        untrained: what a backward pass raises, and the remedy; None: gradients are the caller's.
        shares: an operator over the same objects, by the same entries.
        """
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary() if shares is None else shares._objects
        self._entries: WeakKeyDictionary[T, Tensor] = WeakKeyDictionary() if shares is None else shares._entries
        self._bound: WeakSet[T] = WeakSet() if shares is None else shares._bound
        self.name = name
        self.every.append(self)
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        at = schema[: schema.index("Tensor entry")].count(",")

        def run_of_entry(*given: Any) -> Any:
            return run(self.owner(given[at]), *given[:at], *given[at + 1 :])

        _LIBRARY.impl(name, run_of_entry, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_mk::{name}", fake or like_first, lib=_LIBRARY)
        if untrained is not None:
            refuse_gradients(name, *untrained)
        self.call: Any = getattr(torch.ops.moe_mk, name).default
        """The operator."""
        arguments = schema[1:].split(") ->")[0].split(", ")
        self._tensors = [re.fullmatch(r"Tensor(\(\w!\))?(\??) (\w+)(=None)?", each) for each in arguments]

    def traced(self, *given: Any) -> Tensor:
        """Call the operator where torch may follow it. Raises ShapeError for tensors that it is not defined for."""
        if not is_compiling():
            for found, each in zip(self._tensors, given, strict=False):
                if found is not None and not (each is None and found[2]):
                    expect_dense(found[3], each, traced=True)
                    mode = getattr(each, "fake_mode", None)
                    if mode is not None and not mode.allow_non_fake_inputs:
                        way = "use FakeTensorMode(allow_non_fake_inputs=True)"
                        raise ShapeError(f"{found[3]} is a FakeTensor of a mode without real tensors; {way}")
        out: Tensor = self.call(*given)
        return out

    def enter(self, owner: T, identity: Identity) -> Tensor:
        """Register an object; returns its entry, int64 on the CPU. The object is not kept alive."""
        number = int.from_bytes(urandom(8), "little", signed=True)  # no number of another process, nor of a fork
        self._objects[number] = owner
        with torch.inference_mode(False):
            entry = torch.tensor([number, *identity.words()], dtype=torch.int64, device="cpu")
        self._entries[owner] = entry
        return entry

    def identify(self, owner: T, identity: Identity) -> None:
        """Another identity of a registered object, after its weights were loaded. Programs in use still find it."""
        words = torch.tensor(identity.words(), dtype=torch.int64, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            self._entries[owner][1:].copy_(words)

    def owner(self, entry: Tensor) -> T:
        """The object of an entry, or the one that was bound in its place. Raises UnsupportedError without one."""
        words = entry.tolist()
        found = self._objects.get(words[0])
        return self._bound_to(words) if found is None else found

    def bind(self, wanted: Container[int]) -> int:
        """Let programs find the objects with these ids, see the function `bind`; returns their number."""
        found = [each for each in self._entries if id(each) in wanted]
        self._bound.update(found)
        return len(found)

    def _bound_to(self, words: list[int]) -> T:
        asked = Identity.read(words)
        bound = {each: Identity.read(self._entries[each].tolist()) for each in self._bound}
        fitting = [each for each, identity in bound.items() if not asked.differs(identity)]
        if len(fitting) == 1:
            self._objects[words[0]] = fitting[0]
            return fitting[0]
        raise UnsupportedError(
            f"the object {asked} behind moe_mk::{self.name} of a compiled graph is gone, or of another process",
            [
                "compile the new model again; for a program of torch.export, build and load the layer with the name, "
                "the settings and the weights that it was exported with, and call moe_mk.layer.bind(layer)",
                *(f"{each} is bound, and differs in {asked.differs(each)}" for each in bound.values() if not fitting),
                *([f"{len(fitting)} bound objects fit it; give each layer a name of its own"] if fitting else []),
            ],
        )


def bind(*owners: object) -> None:
    """Let programs that `torch.export` wrote in other processes call these objects.

    owners: layers, modules that contain them, and experts and linear layers of the engines' adapters; not kept alive.
    At its first call a program takes the one object of the same name, settings and weights. Of the weights, the first
    values of each row of a layer's gate are compared, once they are loaded. Raises ConfigError for an owner without a
    layer, and the call UnsupportedError if none fits, or several do.
    """
    for owner in owners:
        inside: Iterable[object] = owner.modules() if isinstance(owner, nn.Module) else (owner,)
        wanted = {id(each) for part in inside for each in (part, *getattr(part, "__dict__", {}).values())}
        if not sum([operator.bind(wanted) for operator in Operator.every]):
            raise ConfigError(f"{type(owner).__name__} holds no layer that a program could call")


def not_copied(owner: object) -> NoReturn:
    """The `__reduce__` of objects whose memory is of native kernels. Raises UnsupportedError."""
    raise UnsupportedError(
        f"{type(owner).__name__} can be neither copied nor pickled", ["make another one from the same weights"]
    )


def refuse_gradients(name: str, subject: str, way_out: str) -> None:
    """Let a backward pass through the operator `moe_mk::name` raise UnsupportedError."""

    def refused(*_: object) -> None:
        raise UnsupportedError(f"gradients through {subject}", [f"inference only; {way_out}"])

    torch.library.register_autograd(
        f"moe_mk::{name}", refused, setup_context=lambda ctx, inputs, output: None, lib=_LIBRARY
    )


def like_first(x: Tensor, *_: object) -> Tensor:
    """The shape of a result like the first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def is_untraced(x_TH: Tensor) -> bool:
    """Whether this is a plain tensor outside of tracing, dispatch modes and torch.func: else use the torch operator."""
    if type(x_TH) is not Tensor or is_compiling():
        return False
    followed = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return not followed and forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None


def run_operator(
    layer: MoELayer,
    hidden_states: Tensor,
    expert_load_E: Tensor,
    token_ids_T: Tensor | None = None,
    active_T: Tensor | None = None,
) -> Tensor:
    """The implementation of the operator of a layer. It checks the tokens, so that graphs need no guards for it.

    Raises ShapeError for other numbers of dimensions, and for ids and masks of another shape.
    """
    expect_dense("hidden_states", hidden_states)
    if hidden_states.dim() not in (2, 3):
        raise ShapeError(
            f"hidden_states has {hidden_states.dim()} dimensions {tuple(hidden_states.shape)}, "
            "expected 2 [T, H] or 3 [B, S, H]"
        )
    shape = hidden_states.shape
    ids_T = _flat("token_ids_T", token_ids_T, shape[:-1]) if hidden_states.dim() == 3 else token_ids_T
    x_TH = layer.checked(hidden_states.flatten(0, -2))
    if active_T is None:
        return layer.forward_checked(x_TH, expert_load_E, ids_T).view(shape)
    expect("active_T", active_T, "T" if len(shape) == 2 else "X T", MASKS, layer.device)
    place_N = _flat("active_T", active_T, shape[:-1]).nonzero().flatten()
    if ids_T is not None:
        ids_T = _flat("token_ids_T", ids_T, x_TH.shape[:1])[place_N]
    y_TH = torch.zeros_like(x_TH, requires_grad=False)
    with torch.no_grad():
        y_TH[place_N] = layer.forward_checked(x_TH[place_N], expert_load_E, ids_T)
    return y_TH.view(shape)


def _flat(name: str, tensor: Tensor | None, shape: torch.Size) -> Any:
    """A tensor with one element for each token, flat; raises ShapeError for another shape."""
    if tensor is None:
        return None
    expect_dense(name, tensor)
    if tensor.shape != shape:
        raise ShapeError(f"{name} is {tuple(tensor.shape)}, expected {tuple(shape)} as of hidden_states")
    return tensor.flatten()


LAYERS: Operator[Any] = Operator(
    "moe_layer",
    "(Tensor hidden_states, Tensor(a!) expert_load_E, Tensor entry, Tensor? token_ids_T=None, "
    "Tensor? active_T=None) -> Tensor",
    run_operator,
)
"""Layers: (T, H), the expert load [E] to add to, and token ids [T] and active tokens [T] or None; to (T, H)."""
moe_layer = LAYERS.call
ROUTED: Operator[Any] = Operator(
    "moe_layer_routed",
    "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor(a!) expert_load_E, Tensor entry) -> Tensor",
    lambda layer, *given: layer.run_routed(*given),
    shares=LAYERS,
)
"""Routed experts alone: (T, H), weights (T, K), ids (T, K), the expert load [E] to add to; to (T, H)."""
REPLAYED: Operator[Any] = Operator(
    "moe_layer_replayed",
    "(Tensor hidden_states, Tensor recorded_ids, Tensor(a!) expert_load_E, Tensor entry, "
    "Tensor? recorded_weights=None) -> Tensor",
    lambda layer, x_TH, ids_TK, load_E, weights_TK=None: layer.run_replayed(x_TH, ids_TK, weights_TK, load_E),
    shares=LAYERS,
)
"""Whole layers with recorded experts: (T, H), ids (T, K), the expert load [E] to add to, weights (T, K); to (T, H)."""


def _route(layer: MoELayer, x_TH: Tensor, token_ids_T: Tensor | None, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    routing = layer.route(x_TH, token_ids_T)
    assert routing.logits_TE is not None, "a layer always returns them"
    return routing.ids_TK, routing.weights_TK, routing.logits_TE


def _like_routing(
    x_TH: Tensor, entry: Tensor, token_ids_T: Tensor | None, sizes: list[int], ids: torch.dtype, logits: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    top_k, num_experts = sizes
    ids_TK = x_TH.new_empty((x_TH.shape[0], top_k), dtype=ids)
    weights_TK = x_TH.new_empty((x_TH.shape[0], top_k), dtype=torch.float32)
    return ids_TK, weights_TK, x_TH.new_empty((x_TH.shape[0], num_experts), dtype=logits)


ROUTES: Operator[Any] = Operator(
    "moe_layer_route",
    "(Tensor hidden_states, Tensor entry, Tensor? token_ids_T, SymInt[2] sizes, ScalarType ids, ScalarType logits)"
    " -> (Tensor, Tensor, Tensor)",
    _route,
    fake=_like_routing,
    shares=LAYERS,
)
"""The router alone: (T, H) and token ids [T] or None; to ids (T, K), weights (T, K) and logits (T, E)."""


def traced_route(layer: MoELayer, x_TH: Tensor, token_ids_T: Tensor | None) -> Routing:
    """`MoELayer.route` of a compiled graph: one node. What is read of the layer here becomes guards of the graph."""
    config, logits = layer.state.backends.config, torch.float32
    if config.router.router_dtype == "model":
        logits = x_TH.dtype
    ids = getattr(layer.routing.router, "ids_dtype", torch.int32)
    sizes = config.router.top_k, config.model.scored_experts
    ids_TK, weights_TK, logits_TE = ROUTES.call(x_TH, layer._entry, token_ids_T, sizes, ids, logits)
    return Routing(ids_TK, weights_TK, logits_TE=logits_TE)
