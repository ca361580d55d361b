"""One layer in any stored format, in packed form: what `--quant` of experts_cpu.py measures of ours and of others.

Names are those of `model.quant.weights` (mxfp4, nvfp4, mxfp8, int8, int8_block, fp8_channel, fp8_tensor, int4_g32,
int4_g128_zp, q4_k, q8_0, ...), with _w8a8 or _w4a8 at the end where tokens are rounded to INT8 as well (int8_w8a8,
int8_block_w8a8, q8_0_w8a8, int4_g32_w4a8, q4_k_w4a8, ...). A format's error is against f32 with the weights it really
has and tokens in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from experts_cpu_ggml import ggml_candidates
from experts_cpu_peers import Experts, KtKernel, Weights, weighted_experts
from experts_cpu_stored_peers import kt_candidates, vllm_candidates
from torch import Tensor

from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native import ExpertsMode, Isa, Native, PackedMatrix, Rounding, allocate, experts_rows
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantScheme, QuantTensor

INTEGERS = ("_w8a8", "_w4a8")
POOL = 2
"""Experts that are quantised; further ones are copies of them in memory of their own."""


def scheme_of(kind: str) -> QuantScheme:
    """The scheme of a name of `--quant`."""
    return GROUPED.get(kind) or GGUF.get(kind) or scheme_of_kind(kind)


def rounding_of(quant: str, kind: str) -> Rounding:
    """How tokens are rounded for a name of `--quant` and its format."""
    if not quant.endswith(INTEGERS):
        return Rounding.NONE
    return Rounding.INT8_PARTS if kind in GROUPED or kind in GGUF else Rounding.INT8


class Stored:
    """The layer requantised to one format, expert by expert: its codes, and packed."""

    def __init__(self, native: Native, layer: Weights, kind: str) -> None:
        scheme = scheme_of(kind)
        storage = storage_of(scheme)
        assert storage is not None, f"the kernels read no {kind} weights"
        experts, hidden, inter = layer.shape
        self.w13 = allocate(native, storage.layout(inter, hidden, gated=True), experts)
        self.w2 = allocate(native, storage.layout(hidden, inter, gated=False), experts)
        self.slots: list[tuple[QuantTensor, QuantTensor, QuantTensor]] = []
        for e in range(min(experts, POOL)):
            up, up_scales, down, down_scales = layer.expert(e)
            halves = layer.exact(up, up_scales).chunk(2)
            gate, above = (scheme.quantize(half) for half in halves)
            second = scheme.quantize(layer.exact(down, down_scales))
            pack_matrix(self.w13, e, [gate, above], kind)
            pack_matrix(self.w2, e, [second], kind)
            self.slots.append((gate, above, second))
        for e in range(POOL, experts):
            self.w13.copy_slot(e % POOL, e)
            self.w2.copy_slot(e % POOL, e)

    def slot(self, e: int) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
        """gate, up and down of one expert."""
        return self.slots[e % POOL]

    def exact(self, e: int) -> tuple[Tensor, Tensor]:
        """w13 and w2 of one expert in f32."""
        gate, up, down = (q.dequantize(torch.float32) for q in self.slot(e))
        return torch.cat([gate, up]), down

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """f32 throughout, with the weights as they are stored."""
        return weighted_experts(x, ids, weights, self.exact)

    def run(self, native: Native, threads: int, rounding: Rounding) -> Experts:
        """Our kernels on it."""
        packed: tuple[PackedMatrix, PackedMatrix] = (self.w13, self.w2)
        mode = ExpertsMode(quantize=rounding)
        return lambda x, ids, w: experts_rows(native, x, ids, w, *packed, mode=mode, threads=threads)


def format_candidates(
    native: Native,
    layer: Weights,
    quants: Sequence[str],
    threads: int,
    *,
    vllm: bool,
    ggml: Path | None = None,
    kt: KtKernel | None = None,
) -> tuple[dict[str, Experts], dict[str, Experts]]:
    """What to call for each name of `--quant`, and what its results are to be compared with."""
    calls: dict[str, Experts] = {}
    references: dict[str, Experts] = {}
    held: dict[str, Stored] = {}
    for quant in quants:
        kind = quant[:-5] if quant.endswith(INTEGERS) else quant
        stored = held[kind] = held.get(kind) or Stored(native, layer, kind)
        name = f"ours {quant.replace('_', ' ')}"
        calls[name] = stored.run(native, threads, rounding_of(quant, kind))
        references[name] = stored.reference
    for kind, stored in held.items():
        others: dict[str, Experts] = {}
        if vllm:
            others |= vllm_candidates(kind, _slots(stored), amx=Isa.AMX_BF16 in native.isas)
        if kt is not None:
            others |= kt_candidates(kt, kind, _slots(stored))
        calls |= others
        references |= dict.fromkeys(others, stored.reference)
    if ggml is not None:
        slots = {kind: partial(_slots, one) for kind, one in held.items()}
        for kind, of_kind in ggml_candidates(ggml, threads, slots, native.best).items():
            calls |= of_kind
            references |= dict.fromkeys(of_kind, held[kind].reference)
    return calls, references


def _slots(stored: Stored) -> list[tuple[QuantTensor, ...]]:
    return [stored.slot(e) for e in range(stored.w13.num_slots)]
