"""The layer as one operator of torch, so that `torch.compile(fullgraph=True)` sees a single node.

An operator takes tensors and numbers only, so a layer goes by its number in a weak table: the table keeps nothing
alive and configures nothing.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

# Its functions keep the default group of the moment they are imported, and the first call of a custom op imports them:
# after `init_process_group` that group would never end, and gloo's threads would meet an interpreter on its way out.
import torch.distributed.nn
from torch import Tensor

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer

_numbers = count(1)
_layers: WeakValueDictionary[int, MoELayer] = WeakValueDictionary()


def number_of_new(layer: MoELayer) -> int:
    """Enter a layer into the table."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@torch.library.custom_op("moe_mk::moe_layer", mutates_args=("expert_load_E",))
def moe_layer(hidden_states: Tensor, expert_load_E: Tensor, layer: int, token_ids_T: Tensor | None = None) -> Tensor:
    """Run a layer on (T, H); adds the chosen experts to expert_load_E. token_ids_T: where they choose the experts."""
    return _layers[layer].run(hidden_states, expert_load_E, token_ids_T)


@moe_layer.register_fake
def _(hidden_states: Tensor, expert_load_E: Tensor, layer: int, token_ids_T: Tensor | None = None) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
