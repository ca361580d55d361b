"""GGUF files with the MoE layers of a synthetic or a converted checkpoint.

Only MoE blocks are written: a file for this library and for tests, not a whole model. A projection of all experts of a
layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.external.gguf_file import GgufTensor
from moe_mk.quant.gguf import mxfp4_to_gguf
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors
from moe_mk.weights.names import GGUF_NAMES, Part, Role

FILE = "model.gguf"
PROJECTIONS = ("gate", "up", "down")
Matrix = Callable[[Part], QuantTensor]
"""One matrix of one expert, or of the shared experts, in the scheme of the file."""
Vector = Callable[[Part], Tensor]
"""The gate, a bias of the router, or a bias of one expert."""


def layer_tensors(spec: LayerSpec, layer: int, matrix: Matrix, vector: Vector) -> list[GgufTensor]:
    """The tensors of one layer. spec: of the file."""
    found = []
    for local, each in expected_tensors(spec, GGUF_NAMES).items():
        part, stacked = each.part, each.part.role is Role.EXPERT
        if part.role in (Role.EXPERT, Role.SHARED) and not part.extra:
            scheme = spec.scheme_of(part.role, part.projection)
            shape = (*each.shape[:-1], row_bytes(scheme, _columns(spec, part)))
            make = _stack_of(matrix, part, spec.num_experts if stacked else 0)
            found.append(GgufTensor(f"blk.{layer}.{local}", type_name(scheme), shape, make))
        else:
            shape = (*each.shape[:-1], each.shape[-1] * 4)
            make = _floats_of(vector, part, spec.num_experts if stacked else 0)
            found.append(GgufTensor(f"blk.{layer}.{local}", "F32", shape, make))
    return found


def type_name(scheme: QuantScheme) -> str:
    """The type of ggml that holds a scheme."""
    plain = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
    # ggml spells the K in capitals: Q4_K.
    return plain.get(scheme.name, scheme.name.upper())


def row_bytes(scheme: QuantScheme, columns: int) -> int:
    """Bytes of a row."""
    return scheme.num_bytes(1, columns)


def _columns(spec: LayerSpec, part: Part) -> int:
    width = spec.intermediate_size if part.role is Role.EXPERT else spec.shared_intermediate_size
    return width if part.projection == "down" else spec.hidden_size


def _stack_of(matrix: Matrix, part: Part, experts: int) -> Callable[[], NDArray[np.uint8]]:
    def make() -> NDArray[np.uint8]:
        if not experts:
            return _row_bytes_of(matrix(part))
        first = _row_bytes_of(matrix(replace(part, expert=0)))
        out = np.empty((experts, *first.shape), dtype=np.uint8)
        out[0] = first
        for expert in range(1, experts):
            out[expert] = _row_bytes_of(matrix(replace(part, expert=expert)))
        return out

    return make


def _floats_of(vector: Vector, part: Part, experts: int) -> Callable[[], NDArray[np.uint8]]:
    def make() -> NDArray[np.uint8]:
        found = torch.stack([vector(replace(part, expert=e)) for e in range(experts)]) if experts else vector(part)
        array: NDArray[np.uint8] = found.to(torch.float32).contiguous().view(torch.uint8).numpy()
        return array

    return make


def _row_bytes_of(q: QuantTensor) -> NDArray[np.uint8]:
    rows = mxfp4_to_gguf(q) if q.scheme == MXFP4 else q.values.contiguous()
    array: NDArray[np.uint8] = (rows.view(torch.uint8) if isinstance(q.scheme, Plain) else rows).numpy()
    return array
