"""Who is measured by experts_cpu.py: ours in every form, and every other project that is there.

Names of `--quant`, stored formats in packed form, are those of `model.quant.weights` (mxfp4, nvfp4, int8, int8_block,
fp8_channel, fp8_tensor, int4_g32, int4_g128_zp, q4_k, q8_0, ...), with _w8a8 or _w4a8 at the end where tokens are
rounded to INT8 as well (int8_w8a8, int8_block_w8a8, q8_0_w8a8, int4_g32_w4a8, q4_k_w4a8, ...). A format's error is
against f32 with the weights it really has and tokens in bf16.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from experts_cpu_ggml import Ggml, IkLlama, ggml_candidates
from experts_cpu_peers import (
    Batch,
    Experts,
    KtKernel,
    Slot,
    kt_candidates,
    load_vllm,
    spoken,
    transformers_candidates,
    vllm_candidates,
    zentorch_candidates,
)
from torch import Tensor

from moe_mk.experts.cpu_native.weights import pack_matrix, storage_of
from moe_mk.kernels.native.experts_mode import ExpertsMode, Rounding
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix, allocate
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.kinds import scheme_of_kind

INTEGERS = ("_w8a8", "_w4a8")
POOL = 4
"""Experts that are drawn; further ones are copies of them in memory of their own."""
LARGEST_ERROR = 0.05
"""Of any candidate against f32 with its weights; tokens rounded to INT8 or FP8 cost 0.02 to 0.04."""


def kind_of(quant: str) -> str:
    """The format in a name of `--quant`; fp8 is that with blocks."""
    return quant[:-5] if quant.endswith(INTEGERS) else "fp8_block" if quant == "fp8" else quant


def mode_of(quant: str) -> ExpertsMode:
    """How tokens are rounded for a name of `--quant`."""
    if not quant.endswith(INTEGERS):
        return ExpertsMode()
    kind = kind_of(quant)
    return ExpertsMode(quantize=Rounding.INT8_PARTS if kind in GROUPED or kind in GGUF else Rounding.INT8)


@dataclass(frozen=True)
class Weights:
    """One layer in one format: gate, up and down of the experts that were drawn, and how many there are in all."""

    kind: str
    drawn: Sequence[Slot]
    experts: int

    @classmethod
    def random(cls, experts: int, hidden: int, inter: int) -> "Weights":
        """FP8 with scales of 128x128 blocks."""
        scheme, shapes = scheme_of_kind("fp8_block"), ((inter, hidden), (inter, hidden), (hidden, inter))
        slots = [
            tuple(scheme.quantize(torch.randn(rows, columns) * columns**-0.5) for rows, columns in shapes)
            for _ in range(min(experts, POOL))
        ]
        return cls("fp8_block", slots, experts)

    def stored_as(self, kind: str) -> "Weights":
        """The same layer requantised."""
        if kind == self.kind:
            return self
        scheme = scheme_of_kind(kind)
        slots = [tuple(scheme.quantize(q.dequantize(torch.float32)) for q in slot) for slot in self.drawn]
        return Weights(kind, slots, self.experts)

    @property
    def slots(self) -> list[Slot]:
        return [self.drawn[e % len(self.drawn)] for e in range(self.experts)]

    def packed(self, native: Native) -> tuple[PackedMatrix, PackedMatrix]:
        """w13 and w2 as our kernels read them."""
        storage = storage_of(scheme_of_kind(self.kind))
        assert storage is not None, f"the kernels read no {self.kind} weights"
        inter, hidden = self.drawn[0][0].shape
        w13 = allocate(native, storage.layout(inter, hidden, gated=True), self.experts)
        w2 = allocate(native, storage.layout(hidden, inter, gated=False), self.experts)
        for e, (gate, up, down) in enumerate(self.drawn):
            pack_matrix(w13, e, [gate, up], self.kind, native)
            pack_matrix(w2, e, [down], self.kind, native)
        for e in range(len(self.drawn), self.experts):
            w13.copy_slot(e % len(self.drawn), e)
            w2.copy_slot(e % len(self.drawn), e)
        return w13, w2

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The layer in f32 throughout, with the weights as they are stored."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for number, slot in enumerate(self.drawn):
            rows, choices = ((ids >= 0) & (ids % len(self.drawn) == number)).nonzero(as_tuple=True)
            w1, w3, w2 = (q.dequantize(torch.float32) for q in slot)
            h = torch.nn.functional.silu(x[rows].float() @ w1.T) * (x[rows].float() @ w3.T)
            out.index_add_(0, rows, h @ w2.T * weights[rows, choices, None])
        return out


@dataclass(frozen=True)
class Candidate:
    """Somebody's experts, and the weights that they have."""

    call: Experts
    weights: Weights


def errors_of(candidates: Mapping[str, Candidate], batch: Batch, judged: int) -> dict[str, float]:
    """L2 errors of some tokens against f32 with the weights of each candidate."""
    some = tuple(part[:judged] for part in batch)
    layers = {each.weights.kind: each.weights for each in candidates.values()}
    wanted = {kind: layer.reference(*some) for kind, layer in layers.items()}
    errors = {}
    for name, each in candidates.items():
        want = wanted[each.weights.kind]
        errors[name] = ((each.call(*batch)[:judged].float() - want).norm() / want.norm()).item()
    return errors


def without_wrong(candidates: Mapping[str, Any], errors: Mapping[str, float]) -> dict[str, Any]:
    """Drop candidates of other projects whose outputs differ from the reference, and print which.

    Raises ValueError before the measurement if a result of ours is wrong or NaN.
    """
    wrong = wrong_results(errors)
    if ours := {name: error for name, error in wrong.items() if name.startswith("ours")}:
        listed = ", ".join(f"{name} {error}" for name, error in ours.items())
        raise ValueError(f"L2 errors against f32 with the same weights are {LARGEST_ERROR} at most, got {listed}")
    for name, error in wrong.items():
        print(f"  {name} is left out: L2 error {error} against f32 with the same weights")
    return {name: each for name, each in candidates.items() if name not in wrong}


def wrong_results(errors: Mapping[str, float]) -> dict[str, str]:
    """L2 errors, as text, of candidates that err by more than rounding, or give NaN."""
    return {name: f"{error:.1e}" for name, error in errors.items() if not error < LARGEST_ERROR}


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
) -> tuple[dict[str, Candidate], tuple[PackedMatrix, PackedMatrix]]:
    """Everything that can be run here, and ours in FP8."""
    fp8, projects = layer.packed(native), list(projects_of(native, options))
    found = {"ours fp8": Candidate(ours(native, fp8, options.threads), layer)}
    own = {"ours fp8 batch-invariant": ours(native, fp8, options.threads, ExpertsMode(batch_invariant=True))}
    if Isa.AVX2 in native.isas and native.best is not Isa.AVX2:
        own["ours fp8 avx2"] = ours(native, fp8, options.threads, isa=Isa.AVX2)
    if not options.formats_only:
        found |= {name: Candidate(call, layer) for name, call in own.items()}
    # Other projects in FP8 and bf16, and ours in bf16, which theirs compare with.
    compared = not options.formats_only and not options.ours_only
    kinds: dict[str, list[str]] = {layer.kind: []} if compared else {}
    for quant in (*(["bf16"] if compared else []), *options.quant):
        kinds.setdefault(kind_of(quant), []).append(quant)
    for kind, quants in kinds.items():
        stored = layer.stored_as(kind)
        matrices = stored.packed(native) if quants else fp8
        calls = {f"ours {spoken(quant)}": ours(native, matrices, options.threads, mode_of(quant)) for quant in quants}
        for project in projects:
            calls |= project(kind, stored.slots)
        found |= {name: Candidate(call, stored) for name, call in calls.items()}
    return found, fp8


def projects_of(
    native: Native, options: argparse.Namespace
) -> Iterator[Callable[[str, Sequence[Slot]], dict[str, Experts]]]:
    """What makes the experts of each other project from a format and its slots; nothing of formats that it lacks."""
    if options.ours_only:
        return
    yield transformers_candidates
    if options.vllm is not None:
        load_vllm(options.vllm, native.best)
        yield partial(vllm_candidates, amx=Isa.AMX_BF16 in native.isas)
    if options.zentorch is not None:
        yield partial(zentorch_candidates, options.zentorch)
    if options.kt is not None:
        workers = options.kt_threads or options.threads
        yield partial(kt_candidates, KtKernel(options.kt, workers, options.top_k, max(options.rows), best=native.best))
    if options.ggml is not None:
        library = Ggml(options.ggml, options.threads, native.best)
        print(f"ggml: the {library.variant} build of its CPU backend", flush=True)
        yield partial(ggml_candidates, library)
    if options.ik is not None:
        yield partial(ggml_candidates, IkLlama(options.ik, options.threads))
