"""`ElasticBuffer` of deep_ep 2.1.0 (V2), imitated over the ranks' group. Written from its documented behaviour."""

import torch

from moe_mk.lab.testing.emulated.events import EventHandle, EventOverlap
from moe_mk_contrib.emulated.deep_ep.elastic import ElasticBuffer
from moe_mk_contrib.emulated.deep_ep.handle import EPHandle

topk_idx_t = torch.int64
"""What ids of experts must be."""

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
