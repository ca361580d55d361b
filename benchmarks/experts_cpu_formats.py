"""One layer in any stored format, in packed form: what `--quant` of experts_cpu.py measures of ours, and vLLM's INT8.

Names are those of `model.quant.weights` (mxfp4, nvfp4, mxfp8, int8, int8_block, fp8_channel, fp8_tensor, int4_g32,
int4_g128_zp, q4_k, q8_0, ...), or int8_w8a8 and int8_block_w8a8 with tokens rounded to INT8 as well. A format's error
is against f32 with the weights it really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from experts_cpu_ggml import ggml_candidates
from experts_cpu_peers import Experts, Weights, weighted_experts
from torch import Tensor

from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native import ExpertsMode, Native, PackedMatrix, Rounding, allocate, experts_rows
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantScheme, QuantTensor

INTEGERS = "_w8a8"
POOL = 2
"""Experts that are quantised; further ones are copies of them in memory of their own."""


def scheme_of(kind: str) -> QuantScheme:
    """The scheme of a name of `--quant`."""
    return GROUPED.get(kind) or GGUF.get(kind) or scheme_of_kind(kind)


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
    native: Native, layer: Weights, quants: Sequence[str], threads: int, *, vllm: bool, ggml: Path | None = None
) -> tuple[dict[str, Experts], dict[str, Experts]]:
    """What to call for each name of `--quant`, and what its results are to be compared with."""
    calls: dict[str, Experts] = {}
    references: dict[str, Experts] = {}
    held: dict[str, Stored] = {}
    for quant in quants:
        kind = quant.removesuffix(INTEGERS)
        stored = held[kind] = held.get(kind) or Stored(native, layer, kind)
        name = f"ours {quant.replace('_', ' ')}"
        calls[name] = stored.run(native, threads, Rounding.INT8 if quant.endswith(INTEGERS) else Rounding.NONE)
        references[name] = stored.reference
    if vllm and "int8" in held:
        calls["vllm int8 w8a8"], references["vllm int8 w8a8"] = vllm_int8(held["int8"]), held["int8"].reference
    if ggml is not None:
        slots = {kind: partial(_slots, one) for kind, one in held.items()}
        for kind, of_kind in ggml_candidates(ggml, threads, slots).items():
            calls |= of_kind
            references |= dict.fromkeys(of_kind, held[kind].reference)
    return calls, references


def _slots(stored: Stored) -> list[tuple[QuantTensor, ...]]:
    return [stored.slot(e) for e in range(stored.w13.num_slots)]


def vllm_int8(stored: Stored) -> Experts:
    """vLLM's INT8 experts (method 1): scales of channels, tokens rounded to INT8 as they come."""
    slots = [stored.slot(e) for e in range(stored.w13.num_slots)]
    codes13 = torch.stack([torch.cat([gate.values, up.values]) for gate, up, _ in slots])
    codes2 = torch.stack([down.values for _, _, down in slots])
    scales13 = torch.stack([torch.cat([_scales(gate), _scales(up)]) for gate, up, _ in slots])
    scales2 = torch.stack([_scales(down) for _, _, down in slots])
    w13, w2 = (torch.ops._C.convert_weight_packed(codes) for codes in (codes13, codes2))

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, nothing = torch.empty_like(x), (None,) * 8
        torch.ops._C.fused_experts_cpu(out, x, w13, w2, weights, ids, 1, scales13, scales2, *nothing, True)
        return out

    return run


def _scales(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales[:, 0]
