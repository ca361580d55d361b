"""vLLM's and kt-kernel's CPU experts over weights that are quantised already, with the codes and scales of ours.

Layouts and operators were read in vLLM 0.32.0 (csrc/cpu/sgl-kernels, fused_moe/experts/cpu_moe.py) and kt-kernel 0.7.2
(operators/amx, operators/llamafile, utils/amx.py). `slots` are gate, up and down of each expert; peers/README.md states
how to get the libraries, and what is rounded.
"""

from collections.abc import Sequence

import torch
from experts_cpu_ggml import TYPES, blocks_of_ggml
from experts_cpu_peers import Experts, KtKernel
from torch import Tensor

from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.tensor import QuantTensor

Slot = tuple[QuantTensor, ...]

INT8_W8A8, INT4_W4A8, MXFP4 = 1, 3, 4
"""Methods of vLLM's `fused_experts_cpu`."""
AWQ = 0
"""Layout of what `convert_weight_packed_scale_zp` reads; that of GPTQ, 1, stores zero points minus one."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibbles of an int32 that hold 8 consecutive output columns."""
VLLM_GROUPS = (32, 64, 128)
"""Columns under one scale that vLLM's INT4 experts apply; with longer groups 0.32.0 computes other values."""
GGML_BF16 = 30
KT_GROUPED = {
    "int4_g32": (("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), 4),
    "mxfp4": (("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), 4),
    "mxfp8": (("AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"), 8),
}
"""Classes of kt-kernel that read stored codes with scales of 32 columns, of which an extension has one, and bits. In
0.7.2 AMXInt4_KGroup_MOE crashes with groups of 128 and computes NaN with groups of 64."""
KT_ROWS = {"int4_row": "AMXInt4_MOE", "int8": "AMXInt8_MOE"}
"""Classes that quantise rows of bf16 weights themselves. AMXInt4_1_MOE and AMXInt4_1KGroup_MOE, with zero points, are
left out: they make other codes of weights that 4 bits hold exactly, with errors of about 0.25 and more."""
KT_GGML = "MOE"


def vllm_candidates(kind: str, slots: Sequence[Slot], *, amx: bool) -> dict[str, Experts]:
    """vLLM's experts for a format, empty for others. amx: whether the processor has it; INT4 and MXFP4 need it."""
    scheme = GROUPED.get(kind)
    if kind == "int8" and hasattr(torch.ops._C, "fused_experts_cpu"):
        return {"vllm int8 w8a8": vllm_int8(slots)}
    if amx and scheme is not None and scheme.bits == 4 and scheme.columns in VLLM_GROUPS:
        return {f"vllm {_spoken(kind)}": vllm_int4(scheme, slots)}
    return {"vllm mxfp4": vllm_mxfp4(slots)} if amx and kind == "mxfp4" else {}


def kt_candidates(library: KtKernel, kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """kt-kernel's experts for a format, empty for others and for classes that its extension lacks."""
    name, stored = f"kt-kernel {_spoken(kind)}", [list(part) for part in zip(*slots, strict=True)]
    if kind in KT_GROUPED and any(map(library.has, KT_GROUPED[kind][0])):
        return {name: kt_grouped(library, kind, stored)}
    if kind in KT_ROWS and library.has(KT_ROWS[kind]):
        return {name: kt_rows(library, kind, stored)}
    if kind in TYPES and kind not in KT_GROUPED and library.has(KT_GGML):
        return {name: kt_ggml(library, kind, stored)}
    return {}


def vllm_int8(slots: Sequence[Slot]) -> Experts:
    """vLLM's INT8 experts: scales of channels, tokens rounded to INT8 as they come."""
    codes13 = torch.stack([torch.cat([gate.values, up.values]) for gate, up, _ in slots])
    codes2 = torch.stack([down.values for _, _, down in slots])
    scales13 = torch.stack([torch.cat([_scales(gate)[:, 0], _scales(up)[:, 0]]) for gate, up, _ in slots])
    scales2 = torch.stack([_scales(down)[:, 0] for _, _, down in slots])
    w13, w2 = (torch.ops._C.convert_weight_packed(codes) for codes in (codes13, codes2))
    return _fused(INT8_W8A8, (w13, w2), (scales13, scales2))


def vllm_int4(scheme: Grouped, slots: Sequence[Slot]) -> Experts:
    """vLLM's INT4 experts with scales and zero points of groups: rows of x and h are rounded to INT8."""
    w13, zeros13, scales13 = _packed_int4(scheme, [slot[:2] for slot in slots])
    w2, zeros2, scales2 = _packed_int4(scheme, [slot[2:] for slot in slots])
    return _fused(INT4_W4A8, (w13, w2), (scales13, scales2), (zeros13, zeros2))


def vllm_mxfp4(slots: Sequence[Slot]) -> Experts:
    """vLLM's MXFP4 experts with bf16 activations."""
    codes = [torch.stack([torch.cat([q.values for q in slot[part]]) for slot in slots]) for part in _PARTS]
    scales = [
        torch.stack([torch.cat([_scales(q).view(torch.uint8) for q in slot[part]]) for slot in slots])
        for part in _PARTS
    ]
    w13, w2 = (torch.ops._C.convert_weight_packed(matrix) for matrix in codes)
    scales13, scales2 = (torch.ops._C.convert_scale_packed(each) for each in scales)
    return _fused(MXFP4, (w13, w2), (scales13, scales2))


_PARTS = (slice(0, 2), slice(2, 3))
"""Of a slot: gate and up, and down."""


def _fused(
    method: int,
    weights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    zeros: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Experts:
    def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out, nothing = torch.empty_like(x), (None,) * 6
        torch.ops._C.fused_experts_cpu(out, x, *weights, routing, ids, method, *scales, *zeros, *nothing, True)
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


def kt_grouped(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's experts of stored codes: INT4, whose tokens it rounds to INT8, MXFP4 and MXFP8 with bf16 tokens."""
    names, bits = KT_GROUPED[kind]
    config, alive = library.config(*_shape(stored)), []
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        codes, scales = [q.values.contiguous() for q in tensors], [kt_scales(kind, _scales(q)) for q in tensors]
        setattr(config, f"{matrix}_projs", [[each.data_ptr() for each in codes]])
        setattr(config, f"{matrix}_scales", [[each.data_ptr() for each in scales]])
        alive += codes + scales
    quant = config.quant_config
    quant.bits, quant.group_size, quant.zero_point = bits, 32, False
    return library.loaded(next(name for name in names if library.has(name)), config)


def kt_scales(kind: str, scales: Tensor) -> Tensor:
    """As kt-kernel reads them: exponents of MXFP8 as bytes, others in bf16, which holds E8M0 exactly."""
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
    config.m_block, config.group_min_len, config.group_max_len, config.hidden_type = 32, 10, library.most, GGML_BF16
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


def _spoken(kind: str) -> str:
    return kind.replace("_", " ")
