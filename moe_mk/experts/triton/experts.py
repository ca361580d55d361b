"""Experts on NVIDIA GPUs from Hopper on, in Triton: every weight format, no permuted copy, CUDA graph support.

FP8 blocks and INT8 weights are multiplied directly if activations may be quantised. MXFP4 with FP8 activations is
decoded to FP8 in registers, which is exact; MXFP8, NVFP4, and all formats with plain activations are decoded to bf16.
Memory traffic stays that of the checkpoint's format.

Use it for every layout and number of tokens on an H100 or H200. Tiles are read from `configs/tuned` if the device has
been measured, else from a built-in table. Importing this module does not require triton; constructing the backend does.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.config.device import DeviceProfile
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.tuned import Case, Tuned
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, QUANTISED, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.paged import slots_of_rows
from moe_mk.experts.triton.paged import PagedWeights, page, record_bytes
from moe_mk.experts.triton.tuning import (
    BUILT_IN,
    CANDIDATES,
    CHOICES,
    DECODED,
    DECODED_TO_FP8,
    INTEGERS,
    load_tuned,
    of_engines,
    sensible,
    tile_of,
)
from moe_mk.experts.triton.weights import (
    BOX_BYTES,
    LARGEST_SHIFT,
    META,
    PackedWeights,
    joined,
    kernel_format_of,
    pack_weights,
    ready,
    size_reasons,
    spare_of,
)
from moe_mk.experts.triton.workspace import Workspace, workspace_of
from moe_mk.external.device import is_here, profile_here, stream_of
from moe_mk.kernels.reference.activation import ACTIVATIONS, CLAMPED
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.tile import BLOCK, NOT_COMPILING, TARGETS, TRITON, Target, Tile, engines_for
from moe_mk.quant.fp8 import Fp8Static
from moe_mk.quant.grouped import AFFINE, GROUPED
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, SlotBiases, SlotWeights, Weights, expect_one_width
from moe_mk.weights.scan import Progress

MASKED_ROWS = 64
"""Default upper bound of the mean rows per expert for padded blocks without `expected_N`: counts are on the device,
and this layout is used for decoding.
"""
FEWEST = 2.0**-10
"""Lower bound of the mean rows per expert."""
INVARIANT = Tile(rows=64, swap=False, warps=8, stages=4)


@EXPERTS.register("triton")
class TritonExperts(FusedExperts):
    """Two persistent grouped GEMMs; the first quantises its output, the second applies routing weights and scatters."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="our Triton kernels for Hopper: bf16, FP8 and INT8 products, FP8 by MXFP4, weight-only FP8, INT8, "
        "INT4, MXFP8, MXFP4 and NVFP4, biases and clamped SwiGLU, every layout; compiled for sm_90 in CI",
        graph_safe=True,
        deterministic=True,
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="triton",
        extra="pip install 'moe-mk[cuda]'",
        emits={RowTokens: OutputStage.REDUCED, GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"plain", *QUANTISED, *GROUPED}) - AFFINE,
        computes=("fp8", "int8", "plain"),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        pages=True,
        activations=frozenset({*ACTIVATIONS, *CLAMPED}),
        biases=True,
        bandwidth=0.75,
        compute=0.6,
        launches=5,
        per_expert=False,
        batch_invariant=True,
    )

    def __init__(self, context: ExpertsContext, workspace: Workspace | None = None) -> None:
        """workspace: scratch memory; None: the one shared by all layers of the device.

        Raises ImportError if triton is not installed; the oracle rejects the backend then.
        """
        from moe_mk.kernels.triton import experts as kernels

        super().__init__(context)
        self.kernels = kernels
        self.workspace = workspace or workspace_of(context.device)
        self.tuned: Tuned[Tile] | None = None
        """Tiles by rows per expert; loaded when the scheme of the weights is known."""
        self.fused: tuple[Weights, Weights, Weights | None] | None = None
        """Routed and shared experts as they were given, and both in one stack, if they fit."""
        self._parameters = ""

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: architectures without kernels, plain weights in bf16, and sizes that are multiples of
        blocks and TMA boxes.
        """
        reasons = [*super().reasons_against(problem), *_arch_reasons(problem.device), *size_reasons(problem)]
        kernel = problem.config.kernel
        if kernel.residency is not None and kernel.graphs:
            text = "reads the experts of each call back to the host, which a graph cannot"
            reasons.append(Reason("graphs", text, "kernel.graphs = false, or kernel.residency = null"))
        return reasons

    @classmethod
    def priced(cls, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
        """The time measured by tuning at this number of rows per expert, or None: the cost model is used."""
        hidden, weights = problem.config.model.hidden_size, problem.weights.name
        case = Case(hidden, problem.intermediate, problem.slots, weights, compute.name)
        tuned = load_tuned(problem.device.name, case, problem.config.kernel.tuned_dir, log=False)
        measured = tuned.microseconds(problem.rows_an_expert)
        if measured is not None:
            return measured, "measured"
        target = _target_of(problem.device)
        how = "compiled" if target is None or target == TARGETS[9] else str(target)
        return None, f"model; {how}, not yet measured"

    @classmethod
    def tuning_space(cls, context: ExpertsContext, rows: int) -> list[dict[str, int | bool | str]]:
        """Tiles to try for a number of tokens, of other engines for FP8 only; the first is used without tuning.

        Defaults of the context: up to eight experts per token, and weights that are not decoded.
        """
        if context.batch_invariant:
            return [asdict(INVARIANT)]
        an_expert = max(rows * min(context.top_k or CHOICES, context.num_slots) / context.num_slots, FEWEST)
        untuned = Tuned((), _built_in(context.weights, context.compute)).at(an_expert)
        direct = context.compute.block == (1, BLOCK) and (context.weights is None or context.weights.family == "fp8")
        engines = _engines(context.device) if direct else (TRITON.name,)
        able = (tile for tile in (*CANDIDATES, *of_engines()) if tile.engine in engines and sensible(tile, an_expert))
        return [asdict(tile) for tile in dict.fromkeys((untuned, *able))]

    def tuned_with(self, parameters: Mapping[str, int | bool | str]) -> TritonExperts:
        """A copy with one tile for every call. Raises ConfigError for a tile that no kernel of this device has."""
        one = copy(self)
        one.tuned = self._checked(Tuned.fixed(tile_of(parameters)))
        return one

    @classmethod
    def slot_bytes(cls, problem: Problem) -> int:
        """A record, in host memory or a store."""
        model, stored, inner = problem.config.model, problem.weights, problem.intermediate
        plain = torch.empty((inner, model.hidden_size), dtype=torch.float32, device=META)
        up, down = stored.quantize(plain), stored.quantize(plain.T)
        biases = SlotBiases(plain[:, 0] if model.gated else None, plain[:, 0], plain[0]) if model.expert_bias else None
        slot = SlotWeights(up if model.gated else None, up, down, biases)
        compute = BF16 if problem.config.kernel.activations == "plain" else problem.activations or BF16
        return record_bytes(slot, _format_of(stored, compute, model.hidden_size, inner))

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Quantised rows; the hidden row, the output row and the place of each assignment that rows can have here."""
        hidden, inner = problem.config.model.hidden_size, problem.intermediate
        assignments = rows * min(problem.config.router.top_k, problem.slots)
        return rows * (hidden + 4 * hidden // BLOCK) + assignments * (3 * inner + 2 * hidden + 20)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """One stack on the device. bf16 and FP8 stacks already there are not copied; other formats are repacked.

        Raises UnsupportedError for experts of different intermediate sizes.
        """
        self._tuned_tiles(weights.scheme)
        if isinstance(weights, PackedWeights | PagedWeights):
            return weights
        expect_one_width(weights, "triton")
        c = self.context
        format = _format_of(weights.scheme, c.compute, c.hidden_size, c.intermediate_size)
        stays = isinstance(weights, ExpertWeights) and not (format.group or format.row_scales)
        spare = 0 if stays else spare_of(weights.num_slots)
        if (residency := c.residency) is not None and weights.num_slots:
            if c.pool is not None:
                raise ConfigError("experts on a GPU share no ResidencyPool: give each layer kernel.residency.slots")
            paged = page(weights, format, residency, c.device, on_progress, spare=spare, limit_s=c.timeout_s)
            self._parameters = "; ".join(filter(None, (str(paged.cache), self._decoding(paged.stack))))
            return paged
        if stays:
            assert isinstance(weights, ExpertWeights)
            w13, w2 = (ready(q, c.device) for q in (weights.w13, weights.w2))
            return ExpertWeights(w13, w2, weights.layout, weights.gated)
        packed = pack_weights(weights, format, c.device, spare=spare)
        self._parameters = self._decoding(packed)
        return packed

    def parameters(self) -> str:
        """Where FP8 activations are asked for with MXFP4 weights: whether they are multiplied as FP8."""
        return self._parameters

    def _decoding(self, packed: PackedWeights) -> str:
        c = self.context
        if kernel_format_of(packed.scheme, c.compute).name != "mxfp4":
            return ""
        if packed.format.name == "mxfp4":
            return "MXFP4 weights are multiplied as FP8, exactly"
        why = f"scales within {BLOCK} x {BLOCK} weights differ by more than 2^{LARGEST_SHIFT}"
        if not _format_of(packed.scheme, c.compute, c.hidden_size, c.intermediate_size).block_scales:
            sizes = f"{c.hidden_size} and {c.intermediate_size}"
            why = f"FP8 rows need multiples of {BOX_BYTES} and {BLOCK} columns before the products, a rank has {sizes}"
        return f"MXFP4 weights are decoded to bf16, and activations are not rounded: {why}"

    def fuse_shared_experts(self, weights: Weights, shared: Weights) -> Weights | None:
        """Writes the shared experts into the spare slot behind the routed ones; repeated calls reuse the result."""
        if isinstance(weights, PagedWeights):
            return weights.fused(shared)
        if self.fused is None or self.fused[0] is not weights or self.fused[1] is not shared:
            self.fused = weights, shared, joined(weights, shared)
        return self.fused[2]

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Apply the experts in the layout of the tokens; queued on the current stream without synchronisation.

        Of experts with `kernel.residency` the ids are read back. Raises StoreError where one of them cannot be read.
        """
        paged = weights if isinstance(weights, PagedWeights) else None
        experts = self._experts(weights if paged is None else paged.stack)
        tuned = self._tuned_tiles(weights.scheme)
        arena = self.workspace.arena((stream_of(self.context.device), get_ident()))
        with arena.frame(self.context.device) as empty:
            if isinstance(tokens, RowTokens):
                x = self._readable(tokens.x_RH, experts.format)
                ids, share = tokens.ids_RK.to(torch.int32).contiguous(), tokens.weights_RK.contiguous()
                expected_N = ids.numel() if tokens.expected_N is None else tokens.expected_N
                tile = self._tile(tuned, expected_N / self.context.num_slots)
                if tokens.most_K is not None and tokens.most_K < ids.shape[1]:
                    ids, share = self.kernels.first_kept(ids, share, tokens.most_K, empty)
                if paged is not None:
                    share = torch.nn.functional.pad(share.to(torch.float32), (0, paged.is_fused), value=1.0)
                    with paged.cache.exclusive():
                        kept, waves = paged.begin(ids)
                        y = self.kernels.experts_in_waves(
                            x, kept, share, experts, waves, tile, empty, out=tokens.out_RH
                        )
                        paged.end()
                    return ExpertOutput(y, OutputStage.REDUCED)
                y = self.kernels.experts_rows(
                    x, ids, share, experts, tile, empty, out=tokens.out_RH,
                    fuse_shared=weights.num_slots > tokens.num_slots,
                )  # fmt: skip
                return ExpertOutput(y, OutputStage.REDUCED)
            if isinstance(tokens, GroupedTokens):
                x = self._readable(tokens.x_NH, experts.format)
                expected_N = len(x[0]) if tokens.expected_N is None else tokens.expected_N
                tile = self._tile(tuned, expected_N / self.context.num_slots)
                run = self.kernels.experts_grouped
            else:
                x = self._readable(tokens.x_LSH, experts.format)
                mean_rows = MASKED_ROWS if tokens.expected_N is None else tokens.expected_N / self.context.num_slots
                tile = self._tile(tuned, min(x[0].shape[1], mean_rows))
                run = self.kernels.experts_batched
            if paged is None:
                return ExpertOutput(run(x, tokens.counts_L, experts, tile, empty), OutputStage.RAW)
            flat = (x[0].flatten(0, -2), None if x[1] is None else x[1].flatten(0, -2))
            with paged.cache.exclusive():
                kept, waves = paged.begin(slots_of_rows(tokens.counts_L, x[0]))
                y = self.kernels.experts_in_waves(flat, kept, None, experts, waves, tile, empty)
                paged.end()
            return ExpertOutput(y.view(x[0].shape), OutputStage.RAW)

    def _experts(self, weights: Weights) -> Any:
        assert isinstance(weights, ExpertWeights | PackedWeights), "as `relayout` returns them"
        format, rows13, rows2 = kernel_format_of(weights.scheme, self.context.compute), None, None
        if isinstance(weights, PackedWeights):
            format = weights.format
            rows13, rows2 = (each.blocks if format.block_scales else each.rows for each in (weights.w13, weights.w2))
        b13, b2 = (getattr(each, "bias", None) for each in (weights.w13, weights.w2))
        compute = self.context.compute
        return self.kernels.Experts(
            (weights.w13.values, weights.w13.scales),
            (weights.w2.values, weights.w2.scales),
            self.context.activation,
            weights.gated,
            getattr(self.context.compute, "ue8m0", False),
            format,
            rows13, rows2, b13, b2, self.context.swiglu_alpha, self.context.swiglu_limit,
            (compute.scale, compute.hidden.scale) if isinstance(compute, Fp8Static) else None,
        )  # fmt: skip

    def _tuned_tiles(self, weights: QuantScheme) -> Tuned[Tile]:
        if self.tuned is None:
            c = self.context
            case = Case(c.hidden_size, c.intermediate_size, c.num_slots, weights.name, c.compute.name)
            name = profile_here(c.device).name
            self.tuned = self._checked(load_tuned(name, case, c.tuned_dir, built_in=_built_in(weights, c.compute)))
        return self.tuned

    def _checked(self, tuned: Tuned[Tile]) -> Tuned[Tile]:
        engines = _engines(self.context.device)
        for tile in (*(point.parameters for point in tuned.points), *(tile for _, tile in tuned.built_in)):
            if tile.engine not in engines:
                raise ConfigError(
                    f"{tile} has no kernel on {profile_here(self.context.device).name}, which compiles those of "
                    f"{' and '.join(engines)}; run `moe-mk tune triton` on this device"
                )
        return tuned

    def _tile(self, tuned: Tuned[Tile], rows_an_expert: float) -> Tile:
        """The tile for a mean number of rows, which is computed from shapes only.

        With batch_invariant one tile is used for every number of rows; rows of a tile are independent of each other.
        """
        return INVARIANT if self.context.batch_invariant else tuned.at(max(rows_an_expert, FEWEST))

    def _readable(self, x: QuantTensor, format: KernelFormat) -> tuple[Tensor, Tensor | None]:
        """Tokens in their received scheme if the experts compute in it, else in bf16, to be quantised on the device."""
        if x.scheme != self.context.compute or format.name == "w_mxfp4":
            return x.dequantize(torch.bfloat16), None
        if isinstance(x.scheme, Fp8Static):  # the scale is a constant and is not transported
            rows = (*x.values.shape[:-1], 1)
            return x.values, torch.full(rows, x.scheme.scale, dtype=torch.float32, device=x.values.device)
        return x.values, x.scales


def _format_of(weights: QuantScheme, compute: QuantScheme, hidden: int, inner: int) -> KernelFormat:
    """Without FP8 products if rows are not whole boxes before the first one, or whole groups before the second."""
    format = kernel_format_of(weights, compute)
    return KERNEL_FORMATS["w_mxfp4"] if format.block_scales and (hidden % BOX_BYTES or inner % BLOCK) else format


def _target_of(device: DeviceProfile) -> Target | None:
    return None if device.arch is None else TARGETS.get(device.arch[0])


def _engines(device: torch.device) -> tuple[str, ...]:
    """The engines whose kernels compile for a device; all of them where kernels are interpreted or no GPU is here."""
    arch = profile_here(device).arch if is_here(device) else None
    return engines_for(None if arch is None or arch[0] not in TARGETS else arch[0])


def _arch_reasons(device: DeviceProfile) -> list[Reason]:
    if device.gfx in NOT_COMPILING:
        return [Reason("arch", NOT_COMPILING[device.gfx])]
    if device.kind != "cuda" or device.arch is None or device.arch[0] < min(TARGETS) or _target_of(device):
        return []
    names = " and ".join(target.name for target in TARGETS.values())
    return [Reason("arch", f"has kernels for {names}, this device is sm_{device.arch[0]}{device.arch[1]}")]


def _built_in(weights: QuantScheme | None, compute: QuantScheme) -> tuple[tuple[float, Tile], ...]:
    """The built-in table of a weight scheme: decoded in registers, or multiplied directly."""
    if weights is None:
        return BUILT_IN
    format = kernel_format_of(weights, compute)
    if format.block_scales:
        return DECODED_TO_FP8
    return INTEGERS if format.integer else DECODED if format.name.startswith("w_") else BUILT_IN
