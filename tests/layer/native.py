"""A small FP8 layer on the native kernels."""

import shutil
from pathlib import Path

import pytest
from torch import Tensor

from moe_mk import DeepseekV3MoE, MoELayer
from moe_mk.kernels.native.prepared import RouteCall
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.layer.gate import mode_of
from moe_mk.router import Router
from moe_mk.tokens import Routing

EXPERTS, HIDDEN, TOP_K = 16, 256, 4
NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
)
SHAPE = CheckpointShape(
    num_experts=EXPERTS, top_k=TOP_K, num_groups=4, top_k_groups=2, hidden_size=HIDDEN, intermediate_size=128,
    quant="fp8",
)  # fmt: skip


def route_natively(x: Tensor, gate: Tensor, bias: Tensor | None, router: Router) -> tuple[Routing, Tensor]:
    """The routing and the logits."""
    ids_TK, weights_TK, logits_TE = RouteCall(loaded(), gate, bias, mode_of(router))(x, 2)
    return Routing(ids_TK, weights_TK), logits_TE


def written(path: Path) -> Path:
    """Layer 3 of one, in a folder."""
    write_checkpoint(path, SHAPE)
    return path


def built(path: Path, **settings: object) -> MoELayer:
    chosen = {"experts": "cpu_native", "activations": "plain", "max_num_tokens": 64} | settings
    return DeepseekV3MoE.from_checkpoint(path, 3, **chosen)
