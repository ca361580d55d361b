"""The Python API of deep_ep 2.1.0, imitated over the ranks' group. Written from its documented behaviour, not its code.

`Buffer` has the high-throughput and low-latency kernels of V1.
"""

import torch

from moe_mk.lab.testing.emulated.deep_ep.buffer import Buffer
from moe_mk.lab.testing.emulated.deep_ep.config import Config
from moe_mk.lab.testing.emulated.events import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""What ids of experts must be."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
