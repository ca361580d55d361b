"""Who is measured by experts_cpu.py: ours in every form, and every other project that is there.

Names of `--quant`, stored formats in packed form, are those of `model.quant.weights` (mxfp4, nvfp4, int8, int8_block,
fp8_channel, fp8_tensor, int4_g32, int4_g128_zp, q4_k, q8_0, ...), with _w8a8 or _w4a8 at the end where tokens are
rounded to INT8 as well (int8_w8a8, int8_block_w8a8, q8_0_w8a8, int4_g32_w4a8, q4_k_w4a8, ...). A format's error is
against f32 with the weights it really has and tokens in bf16.
"""

import argparse
from functools import partial

import torch
from experts_cpu_peers import (
    Experts,
    KtKernel,
    Weights,
    eager,
    grouped_mm,
    load_vllm,
    vllm_bf16,
    vllm_fp8,
    weighted_experts,
    zentorch_bf16,
)
from experts_cpu_stored_peers import ggml_candidates, ik_candidates, kt_candidates, vllm_candidates
from torch import Tensor

from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix, allocate, pack_slot
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantScheme, QuantTensor

INTEGERS = ("_w8a8", "_w4a8")
POOL = 2
"""Experts that are quantised; further ones are copies of them in memory of their own."""


def scheme_of(kind: str) -> QuantScheme:
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


def format_candidates(
    native: Native, layer: Weights, options: argparse.Namespace, kt: KtKernel | None
) -> tuple[dict[str, Experts], dict[str, Experts]]:
    """What to call for each name of `--quant`, and what its results are to be compared with."""
    calls: dict[str, Experts] = {}
    references: dict[str, Experts] = {}
    held: dict[str, Stored] = {}
    for quant in options.quant:
        kind = quant[:-5] if quant.endswith(INTEGERS) else quant
        stored = held[kind] = held.get(kind) or Stored(native, layer, kind)
        mode = ExpertsMode(quantize=rounding_of(quant, kind))
        calls[f"ours {quant.replace('_', ' ')}"] = ours(native, (stored.w13, stored.w2), options.threads, mode)
        references[f"ours {quant.replace('_', ' ')}"] = stored.reference
    slots = {kind: partial(_slots, one) for kind, one in held.items()}
    others: list[dict[str, dict[str, Experts]]] = []
    if options.vllm is not None and not options.ours_only:
        amx = Isa.AMX_BF16 in native.isas
        others.append({kind: vllm_candidates(kind, _slots(one), amx=amx) for kind, one in held.items()})
    if kt is not None:
        others.append({kind: kt_candidates(kt, kind, _slots(one)) for kind, one in held.items()})
    if options.ggml is not None:
        others.append(ggml_candidates(options.ggml, options.threads, slots, native.best))
    if options.ik is not None:
        others.append(ik_candidates(options.ik, options.threads, slots))
    for kind, of_kind in (each for found in others for each in found.items()):
        calls |= of_kind
        references |= dict.fromkeys(of_kind, held[kind].reference)
    return calls, references


def _slots(stored: Stored) -> list[tuple[QuantTensor, ...]]:
    return [stored.slot(e) for e in range(stored.w13.num_slots)]


def packed(native: Native, layer: Weights, storage: Format, threads: int) -> tuple[PackedMatrix, PackedMatrix]:
    experts, hidden, inter = layer.shape
    w13 = allocate(native, MatrixLayout(inter, hidden, True, storage), experts)
    w2 = allocate(native, MatrixLayout(hidden, inter, False, storage), experts)
    for e in range(experts):
        up, up_scales, down, down_scales = layer.expert(e)
        if storage is Format.FP8:
            pack_slot(native, w13, e, up.chunk(2), up_scales.chunk(2), threads=threads)
            pack_slot(native, w2, e, (down,), (down_scales,), threads=threads)
        else:
            pack_slot(native, w13, e, layer.exact(up, up_scales).bfloat16().chunk(2), threads=threads)
            pack_slot(native, w2, e, (layer.exact(down, down_scales).bfloat16(),), threads=threads)
    return w13, w2


def ours(
    native: Native,
    weights: tuple[PackedMatrix, PackedMatrix],
    threads: int,
    mode: ExpertsMode | None = None,
    isa: Isa | None = None,
) -> Experts:
    return lambda x, ids, w: experts_rows(native, x, ids, w, *weights, mode=mode, threads=threads, isa=isa)


def gather_candidates(
    native: Native, layer: Weights, options: argparse.Namespace
) -> tuple[dict[str, Experts], dict[str, Experts], tuple[PackedMatrix, PackedMatrix]]:
    """Everything that can be run here, what to compare those with that have other weights, and ours in FP8."""
    if options.vllm is not None:
        load_vllm(options.vllm, native.best)
    kt = None
    if options.kt is not None and not options.ours_only:
        workers = options.kt_threads or options.threads
        kt = KtKernel(options.kt, workers, options.top_k, max(options.rows), best=native.best)
    fp8 = packed(native, layer, Format.FP8, options.threads)
    candidates = {"ours fp8": ours(native, fp8, options.threads)}
    if not options.formats_only:
        candidates["ours fp8 batch-invariant"] = ours(native, fp8, options.threads, ExpertsMode(batch_invariant=True))
        if Isa.AVX2 in native.isas and native.best is not Isa.AVX2:
            candidates["ours fp8 avx2"] = ours(native, fp8, options.threads, isa=Isa.AVX2)
        if not options.ours_only:
            candidates |= peers(native, layer, options, kt)
    formats, references = format_candidates(native, layer, options, kt)
    return candidates | formats, references, fp8


def peers(native: Native, layer: Weights, options: argparse.Namespace, kt: KtKernel | None) -> dict[str, Experts]:
    """Other projects, and ours in bf16 as what theirs in bf16 compare with."""
    candidates = {"ours bf16": ours(native, packed(native, layer, Format.BF16, options.threads), options.threads)}
    w13, w2 = layer.bf16()
    candidates["transformers grouped_mm bf16"] = grouped_mm(w13, w2)
    candidates["transformers eager bf16"] = eager(w13, w2)
    if options.vllm is not None:
        candidates["vllm bf16"] = vllm_bf16(w13, w2, "amx" if Isa.AMX_BF16 in native.isas else "vec")
        if hasattr(torch.ops._C, "fused_experts_cpu"):  # not built for AVX2
            candidates["vllm fp8"] = vllm_fp8(layer)
    if options.zentorch is not None:
        candidates["zentorch bf16"] = zentorch_bf16(options.zentorch, w13, w2)
    if kt is not None:
        candidates["kt-kernel fp8"] = kt.experts(layer.w13, layer.w2, (layer.s13, layer.s2))
        if options.experts <= 8:  # bf16 four times over is more than 24 GiB hold at 32 experts
            candidates["kt-kernel bf16"] = kt.experts(w13, w2, None)
    return candidates
