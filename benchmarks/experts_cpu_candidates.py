"""Who is measured by experts_cpu.py: ours in every form, and every other project that is there."""

from __future__ import annotations

import argparse

import torch
from experts_cpu_formats import format_candidates
from experts_cpu_peers import (
    Experts,
    KtKernel,
    Weights,
    eager,
    grouped_mm,
    load_vllm,
    vllm_bf16,
    vllm_fp8,
    zentorch_bf16,
)

from moe_mk.kernels.native import (
    ExpertsMode,
    Format,
    Isa,
    MatrixLayout,
    Native,
    PackedMatrix,
    allocate,
    experts_rows,
    pack_slot,
)


def packed(native: Native, layer: Weights, storage: Format, threads: int) -> tuple[PackedMatrix, PackedMatrix]:
    """Pack the layer for the native kernels."""
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


def ours(native: Native, weights: tuple[PackedMatrix, PackedMatrix], threads: int, **options: object) -> Experts:
    """Return the native experts as a candidate."""
    isa = options.get("isa")
    mode = ExpertsMode(batch_invariant=bool(options.get("batch_invariant")))
    chosen = isa if isinstance(isa, Isa) else None
    return lambda x, ids, w: experts_rows(native, x, ids, w, *weights, mode=mode, threads=threads, isa=chosen)


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
        candidates["ours fp8 batch-invariant"] = ours(native, fp8, options.threads, batch_invariant=True)
        if Isa.AVX2 in native.isas and native.best is not Isa.AVX2:
            candidates["ours fp8 avx2"] = ours(native, fp8, options.threads, isa=Isa.AVX2)
        if not options.ours_only:
            candidates |= peers(native, layer, options, kt)
    vllm = options.vllm is not None and not options.ours_only
    formats, references = format_candidates(
        native, layer, options.quant, options.threads, vllm=vllm, ggml=options.ggml, kt=kt
    )
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
