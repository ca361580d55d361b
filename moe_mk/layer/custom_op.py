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
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError

# Functions of torch.distributed.nn keep the default group of the moment they are imported, and the first call of a
# custom op may import them: that group would never end, and gloo's threads would meet an interpreter that exits. They
# are imported before there is a group; where this module comes after it, importing them here would be just that.
if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
    import torch.distributed.nn

T = TypeVar("T")
_LIBRARY: Any = torch.library.Library("moe_mk", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator(Generic[T]):
    """An operator `moe_mk::name` over objects of one kind, each found by its entry. The result is a tensor like x."""

    def __init__(
        self, name: str, schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor] | None = None
    ) -> None:
        """schema: arguments and result as torch writes them; the first is x, and one of them is `Tensor entry`.

        run: the implementation, with the arguments of the schema. fake: the shape of the result; None: that of x.
        """
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers, self.name = count(1), name
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_mk::{name}", fake or _fake, lib=_LIBRARY)
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


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run_layer(
    hidden_states: Tensor,
    expert_load_E: Tensor,
    entry: Tensor,
    token_ids_T: Tensor | None = None,
    active_T: Tensor | None = None,
) -> Tensor:
    y_TH: Tensor = LAYERS.owner(entry).run_operator(hidden_states, expert_load_E, token_ids_T, active_T)
    return y_TH


LAYERS: Operator[Any] = Operator(
    "moe_layer",
    "(Tensor hidden_states, Tensor(a!) expert_load_E, Tensor entry, Tensor? token_ids_T=None, "
    "Tensor? active_T=None) -> Tensor",
    _run_layer,
)
"""Layers: (T, H), the expert load [E] to add to, and token ids [T] and active tokens [T] or None; to (T, H)."""
moe_layer = LAYERS.call
