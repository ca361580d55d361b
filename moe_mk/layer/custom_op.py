"""A forward as one torch operator, so that `torch.compile(fullgraph=True)` sees a single node.

An operator takes tensors and numbers only. A layer therefore registers itself and passes the entry that it gets: a 0-d
tensor and not a number, which `torch.compile` would make a constant of the graph, so that each layer of a model had to
be compiled apart. The table holds weak references, so it keeps no layer alive.

Operators are defined with `torch.library.Library`: a call costs a few microseconds, one of `torch.library.custom_op`
more than the smallest layer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.shapes import expect, expect_dense

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


class Operator(Generic[T]):
    """An operator `moe_mk::name` over objects of one kind, each found by its entry. The result is a tensor like x."""

    def __init__(
        self,
        name: str,
        schema: str,
        run: Callable[..., Tensor],
        fake: Callable[..., Tensor] | None = None,
        untrained: tuple[str, str] | None = None,
    ) -> None:
        """schema: arguments and result as torch writes them; the first is x, and one of them is `Tensor entry`.

        run: the implementation, with the object of the entry before the other arguments of the schema. fake: the shape
        of the result; None: that of x.
        untrained: what a backward pass raises, and the remedy; None: gradients are the caller's.
        """
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers, self.name = count(1), name
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        at = schema[: schema.index("Tensor entry")].count(",")

        def run_of_entry(*given: Any) -> Tensor:
            return run(self.owner(given[at]), *given[:at], *given[at + 1 :])

        _LIBRARY.impl(name, run_of_entry, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_mk::{name}", fake or like_first, lib=_LIBRARY)
        if untrained is not None:
            refuse_gradients(name, *untrained)
        self.call: Any = getattr(torch.ops.moe_mk, name).default
        """The operator."""

    def enter(self, owner: T) -> Tensor:
        """Register an object; returns its entry, an int64 scalar on the CPU. The object is not kept alive."""
        number = next(self._numbers)
        self._objects[number] = owner
        with torch.inference_mode(False):
            return torch.tensor(number, dtype=torch.int64, device="cpu")

    def owner(self, entry: Tensor) -> T:
        """The object of an entry. Raises UnsupportedError if it is gone."""
        found = self._objects.get(int(entry))
        if found is None:
            raise UnsupportedError(
                f"the object behind moe_mk::{self.name} of a compiled graph is gone", ["compile the new model again"]
            )
        return found


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
        return layer.run(x_TH, expert_load_E, ids_T).view(shape)
    expect("active_T", active_T, "T" if len(shape) == 2 else "X T", MASKS, layer.device)
    place_N = _flat("active_T", active_T, shape[:-1]).nonzero().flatten()
    if ids_T is not None:
        ids_T = _flat("token_ids_T", ids_T, x_TH.shape[:1])[place_N]
    y_TH = torch.zeros_like(x_TH, requires_grad=False)
    with torch.no_grad():
        y_TH[place_N] = layer.run(x_TH[place_N], expert_load_E, ids_T)
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
