"""A linear layer with packed weights, for engines: one matrix in its format, rows in bf16 or INT8. Inference only."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.experts.cpu_native.weights import native_kernels, pack_matrix, storage_of
from moe_mk.kernels.native.experts_mode import INT8_PART_FORMATS
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.packed import allocate
from moe_mk.kernels.native.prepared import ProductCall
from moe_mk.layer.custom_op import Identity, Operator, not_copied
from moe_mk.quant import QuantTensor


class PackedLinear:
    """One weight matrix (N, K) in the layout of the native kernels."""

    def __init__(self, q: QuantTensor, name: str, *, int8: bool = False) -> None:
        """q: of a scheme that the kernels store, with K a multiple of `STEP`; it is copied. name: for messages.

        int8: rows are rounded to INT8 where the kernels multiply the format so: INT4, INT8, Q4_0, Q4_1, Q8_0 and Q4_K.
        """
        storage, native = storage_of(q.scheme), native_kernels()
        assert storage is not None, "callers refuse other schemes"
        scale_dtype = torch.bfloat16 if q.scales is None else q.scales.dtype
        layout = storage.layout(q.shape[0], q.shape[1], gated=False, scale_dtype=scale_dtype)
        packed = allocate(native, layout, 1)
        pack_matrix(packed, 0, [q], name, native)
        self.call = ProductCall(native, packed, int8=int8 and layout.format in {Format.INT8, *INT8_PART_FORMATS})
        self.num_outputs, self.num_bytes = q.shape[0], packed.num_bytes
        self.entry = LINEARS.enter(self, Identity.of(name, (q.scheme.name, *q.shape)))

    __reduce__ = not_copied

    def run(self, x: Tensor) -> Tensor:
        """(..., K) bf16 to (..., N)."""
        rows = x.reshape(-1, x.shape[-1])
        return self.call(rows, torch.get_num_threads()).view(*x.shape[:-1], self.num_outputs)


LINEARS: Operator[PackedLinear] = Operator(
    "packed_linear",
    "(Tensor x, Tensor entry, int outputs) -> Tensor",
    lambda linear, x, outputs: linear.run(x),
    fake=lambda x, entry, outputs: x.new_empty((*x.shape[:-1], outputs)),
    untrained=("a packed linear layer", "train with plain layers"),
)


def packed_linear(x: Tensor, entry: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """(..., K) bf16 to (..., outputs) by the matrix behind an entry: one node of a graph, and a sum."""
    y = LINEARS.traced(x, entry, outputs)
    return y if bias is None else y + bias
