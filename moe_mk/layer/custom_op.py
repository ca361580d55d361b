"""The layer's forward as one torch operator, so that `torch.compile(fullgraph=True)` sees a single node.

An operator takes tensors and numbers only. A layer therefore registers its bound `run` and passes the number that it
gets; the table holds weak references, so it keeps no layer alive.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from weakref import WeakMethod

import torch

# Its functions keep the default group of the moment they are imported, and the first call of a custom op imports them:
# after `init_process_group` that group would never end, and gloo's threads would meet an interpreter on its way out.
import torch.distributed.nn
from torch import Tensor

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(T, H), the expert load [E] to add to, and token ids [T] or None; to (T, H)."""

_numbers = count(1)
_runs: dict[int, WeakMethod[Run]] = {}


def register_run(run: Run) -> int:
    """Enter a layer's bound `run` into the table; the entry disappears with the layer."""
    number = next(_numbers)
    _runs[number] = WeakMethod(run, lambda _: _runs.pop(number, None))
    return number


@torch.library.custom_op("moe_mk::moe_layer", mutates_args=("expert_load_E",))
def moe_layer(hidden_states: Tensor, expert_load_E: Tensor, layer: int, token_ids_T: Tensor | None = None) -> Tensor:
    """Run a layer on (T, H); adds the chosen experts to expert_load_E. token_ids_T: where they choose the experts."""
    run = _runs[layer]()
    assert run is not None
    return run(hidden_states, expert_load_E, token_ids_T)


@moe_layer.register_fake
def _(hidden_states: Tensor, expert_load_E: Tensor, layer: int, token_ids_T: Tensor | None = None) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
