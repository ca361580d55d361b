"""Experts by FlashInfer's TRT-LLM kernels for Blackwell: one call from routed rows to weighted sums.

Use it on sm_100 for FP8 blocks, MXFP8, NVFP4, MXFP4 (with MXFP8 or bf16 rows) and bf16. The adapter uses the
entry points for routed tokens, which work with any router and transport; the library sorts rows and computes both
products, the activation, and the weighted sum. Read at FlashInfer 0.7.0 to 0.7.2 (github.com/flashinfer-ai/
flashinfer, flashinfer/fused_moe/core.py and csrc/trtllm_fused_moe_kernel_launcher.cu).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import LibraryMissing
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.flashinfer.cutlass import Served, reasons_of_served, summed_rows
from moe_mk.experts.flashinfer.trtllm_weights import ORDERS, TrtllmWeights, filled, shuffled_weights
from moe_mk.external.library import installed_version, load
from moe_mk.quant.nvfp4 import Nvfp4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import Weights
from moe_mk.weights.scan import Progress

BLACKWELL, NEWEST = (10, 0), (10, 9)
"""The library has kernels for sm_100, sm_103 and sm_107; built for sm_120 they fail at run time."""

SERVED: Mapping[str, Served] = {
    "plain": Served(("plain",), 128, BLACKWELL, NEWEST),
    "fp8_block": Served(("fp8",), 128, BLACKWELL, NEWEST),
    "mxfp8": Served(("mxfp8",), 128, BLACKWELL, NEWEST),
    "nvfp4": Served(("nvfp4",), 128, BLACKWELL, NEWEST),
    "mxfp4": Served(("mxfp8", "plain"), 32, BLACKWELL, NEWEST),
}
"""By value of `quant.kind`. MXFP4 experts are padded to multiples of the tile size."""

NO_BF16_ROWS = (10, 3)
"""Architectures that support MXFP4 weights only with MXFP8 rows (FlashInfer issue 1754)."""
MOST_CHOICES, MOST_EXPERTS = 32, 2048
"""Limits of the library's row sorting: experts per token, and experts of a call including the unassigned one."""
OLDEST_LIBRARY = (0, 7)
"""First version with separate ids and f32 weights; before, bf16 weights were in the lower halves of the ids."""


@EXPERTS.register("flashinfer_trtllm")
class FlashInferTrtllmExperts(FusedExperts):
    """One call for routed rows; weights are shuffled once, at load, and can be restored."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="FlashInfer's TRT-LLM experts on Blackwell: FP8 blocks, MXFP8, NVFP4, MXFP4 and bf16",
        kinds=frozenset({"cuda"}),
        min_arch=BLACKWELL,
        library="flashinfer",
        extra="pip install 'moe-mk[flashinfer]'",
        emits={RowTokens: OutputStage.REDUCED},
        weights=frozenset(SERVED),
        computes=("fp8", "nvfp4", "mxfp8", "plain"),
        activations=frozenset({"silu", "swiglu_limit", "swiglu_oai"}),
        biases=True,
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({128}),
        bandwidth=0.8,  # vLLM 0.33 prefers it on Blackwell
        compute=0.7,
        launches=6,
        graph_safe=True,
        deterministic=False,  # not guaranteed by the library, whose tuner may select other kernels
    )

    def __init__(self, context: ExpertsContext) -> None:
        """Raises LibraryMissing if FlashInfer 0.7 is not installed; on a CPU the emulation is used, if allowed."""
        super().__init__(context)
        self.library: Any = load("flashinfer.fused_moe.core", allow_emulated=context.device.type == "cpu")
        _expect_recent(installed_version("flashinfer"))
        self.clamp = _clamp(context)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: activations and architectures of a format, sizes, choices, clamps and biases."""
        reasons, kind = super().reasons_against(problem), problem.config.model.quant.kind
        if kind in SERVED:
            reasons += [r for r in reasons_of_served(problem, SERVED[kind]) if not _is_too_old(r, reasons)]
            reasons += _own_reasons(problem, kind)
        return reasons

    @classmethod
    def priced(cls, problem: Problem, compute: object) -> tuple[float | None, str]:
        """The cost model; the adapter has been tested only with the emulated library."""
        return None, "model; never run on a device"

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> TrtllmWeights:
        """Up before gate, rows shuffled. Raises UnsupportedError for experts without a gate."""
        if isinstance(weights, TrtllmWeights):
            return weights
        kind = "plain" if isinstance(weights.scheme, Plain) else weights.scheme.family
        return shuffled_weights(weights, "fp8_block" if kind == "fp8" else kind, self.context)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """One call; -1 is replaced by an expert of another rank, which the library ignores."""
        assert isinstance(tokens, RowTokens) and isinstance(weights, TrtllmWeights)
        return summed_rows(tokens, weights.room[1], lambda out: self._call(tokens, weights, out))

    def _call(self, tokens: RowTokens, weights: TrtllmWeights, out: Tensor) -> None:
        ids_RK = torch.where(tokens.ids_RK < 0, weights.num_slots, tokens.ids_RK).to(torch.int32).contiguous()
        routing = (ids_RK, tokens.weights_RK.to(torch.float32).contiguous())
        common = self._common(weights, top_k=ids_RK.shape[1]) | {"output": out}
        w13, w2, core = weights.w13, weights.w2, self.library
        if weights.kind == "plain":
            x = tokens.x_RH.dequantize(torch.bfloat16).contiguous()
            layout = int(core.WeightLayout.BlockMajorK)
            core.trtllm_bf16_routed_moe(
                routing, x, w13.values, w2.values, use_shuffled_weight=True, weight_layout=layout, **common
            )
            return
        x, scales = self._input(tokens.x_RH, weights)
        if weights.kind in ("fp8_block", "mxfp8"):
            core.trtllm_fp8_block_scale_routed_moe(
                routing, None, x, scales, w13.values, w13.scales, w2.values, w2.scales, use_shuffled_weight=True,
                **self._fp8_format(weights.kind), **common,
            )  # fmt: skip
            return
        assert w13.scales is not None and w2.scales is not None
        core.trtllm_fp4_block_scale_routed_moe(
            routing, None, x, scales, w13.values, w13.scales.view(torch.float8_e4m3fn), w13.bias,
            common.pop("gemm1_alpha"), common.pop("gemm1_beta"), common.pop("gemm1_clamp_limit"),
            w2.values, w2.scales.view(torch.float8_e4m3fn), w2.bias, *self._wholes(weights),
            hidden_states_scale_layout=core.SfLayout.layout_linear, **common,
        )  # fmt: skip

    def _common(self, weights: TrtllmWeights, *, top_k: int) -> dict[str, Any]:
        """Common arguments of all entry points: this rank's experts come first, then one unassigned expert."""
        slots = weights.num_slots
        return self.clamp | {
            "num_experts": -(-max(slots + 1, top_k + 1) // 4) * 4, "top_k": top_k, "n_group": None, "topk_group": None,
            "intermediate_size": weights.room[0], "local_expert_offset": 0, "local_num_experts": slots,
            "routed_scaling_factor": None, "routing_method_type": int(self.library.RoutingMethodType.Renormalize),
            "activation_type": int(self.library.ActivationType.Swiglu),
        }  # fmt: skip

    def _fp8_format(self, kind: str) -> dict[str, Any]:
        core, panels = self.library, ORDERS[kind].panels
        format = core.Fp8QuantizationType.DeepSeekFp8 if kind == "fp8_block" else core.Fp8QuantizationType.MxFp8
        layout = core.WeightLayout.BlockMajorK if panels else core.WeightLayout.MajorK
        return {"fp8_quantization_type": format, "weight_layout": int(layout)}

    def _wholes(self, weights: TrtllmWeights) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Factors of up, gate and the output for each expert; None if groups have all scales.

        Hidden rows are quantised with the global scale of rows; only up is divided by it, because silu is not linear.
        """
        compute, first, second = self.context.compute, weights.w13.whole, weights.w2.whole
        if first is None or second is None:
            return None, None, None
        rows = compute.fixed_scale if isinstance(compute, Nvfp4) and compute.fixed_scale is not None else 1.0
        return first.clone(), first * rows, second * rows

    def _input(self, x: QuantTensor, weights: TrtllmWeights) -> tuple[Tensor, Tensor | None]:
        """Codes and group scales, or bf16 rows, as required by the format; codes are not quantised again."""
        compute, kind, wide = self.context.compute, weights.kind, weights.room[1]
        if isinstance(compute, Plain):
            plain = x.dequantize(torch.bfloat16)
            return pad(plain, (0, wide - plain.shape[1])).contiguous(), None
        q = x if x.scheme == compute else compute.quantize(x.dequantize(torch.bfloat16))
        q = filled(q, q.shape[0], wide)
        assert q.scales is not None
        values = q.values.contiguous()
        if kind == "fp8_block":  # a row of scales for each group of columns
            return values, q.scales.to(torch.float32).T.contiguous()
        octets = q.scales.contiguous()
        return values, octets.view(torch.uint8 if kind == "mxfp8" else torch.float8_e4m3fn)


def _clamp(context: ExpertsContext) -> dict[str, Tensor | None]:
    """Slope of the sigmoid, offset of up, and limit, for each expert; None for plain SwiGLU."""
    oai = context.activation == "swiglu_oai"
    asked = {
        "gemm1_alpha": context.swiglu_alpha if oai else None,
        "gemm1_beta": 1.0 if oai else None,
        "gemm1_clamp_limit": None if context.activation == "silu" else context.swiglu_limit,
    }
    shape = (context.num_slots,)
    return {
        name: None if value is None else torch.full(shape, value, dtype=torch.float32, device=context.device)
        for name, value in asked.items()
    }


def _own_reasons(problem: Problem, kind: str) -> list[Reason]:
    model, device, name, reasons = problem.config.model, problem.device, problem.weights.name, []
    plain = problem.activations is None or problem.config.kernel.activations == "plain"
    if kind == "mxfp4" and plain and device.kind == "cuda" and device.arch == NO_BF16_ROWS:
        fix = "" if problem.activations is None else "kernel.activations = auto"
        reasons.append(Reason("arch", f"has no {name} kernels with bf16 rows for sm_103", fix))
    if problem.config.router.top_k > MOST_CHOICES:
        text = f"sorts at most {MOST_CHOICES} choices a token, router.top_k is {problem.config.router.top_k}"
        reasons.append(Reason("top_k", text))
    if problem.slots >= MOST_EXPERTS:
        text = f"has room for {MOST_EXPERTS - 1} experts a rank, there are {problem.slots}"
        reasons.append(Reason("experts", text, "use more ranks"))
    if kind == "nvfp4" and model.activation != "silu":
        reasons.append(
            Reason("activation", f"computes silu alone for {name} weights, the model needs {model.activation}")
        )
    if model.expert_bias and kind != "mxfp4":
        reasons.append(Reason("bias", f"adds biases to mxfp4 experts only, these are {name}"))
    return reasons


def _is_too_old(reason: Reason, reasons: list[Reason]) -> bool:
    """Whether the reasons of the traits already cover this reason about the architecture."""
    return reason.code == "arch" and any(each.code == "arch" for each in reasons)


def _expect_recent(found: str | None) -> None:
    """Raise LibraryMissing for a FlashInfer without separate f32 weights. None: the emulation."""
    parts = (found or "").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return
    if (int(parts[0]), int(parts[1])) < OLDEST_LIBRARY:
        wanted = ".".join(map(str, OLDEST_LIBRARY))
        raise LibraryMissing(
            f"flashinfer_trtllm needs FlashInfer {wanted} or newer",
            [f"{found} is installed", f"pip install 'flashinfer-python>={wanted}'"],
        )
