"""Checkpoints as their writers lay them out, in plain torch, with the weights that they stand for in f64.

Nothing here is code of the library: a layout or a packing that reader and writer get wrong alike is found. Values are
drawn as codes and scales, so that every code occurs and the weights are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E4M3, GROUP = torch.float8_e4m3fn, 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
Parts = dict[str, Tensor]
"""The tensors of a matrix by the end of their names, "" for the values."""


@dataclass(frozen=True)
class Draw:
    """What a writer may choose."""

    form: str
    layout: str = "official"
    experts: int = 4
    hidden: int = 128
    inner: int = 128
    seed: int = 0
    zero_block: bool = False
    """Whether one block of each matrix is zero, under a scale of 0."""
    scalar: int = 0
    """Axes of size 1 of a single number."""
    flat: bool = False
    """Whether an axis of size 1 behind scales of rows is left out."""
    scale_dtype: torch.dtype = torch.float32
    symmetric: bool = True
    g_idx: bool = True
    ordered: bool = False
    """Whether columns of down are ordered by activation (desc_act)."""
    block: int = 128
    biased: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of quantization_config."""


def _random(draw: Draw, *key: int) -> torch.Generator:
    seed = draw.seed
    for each in key:
        seed = seed * 1009 + each + 1
    return torch.Generator("cpu").manual_seed(seed)


def _codes(n: int, k: int, bits: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), generator=g)


def _positive(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.02 * (0.3 + torch.rand(shape, generator=g))).to(dtype)


def words(codes: Tensor, bits: int) -> Tensor:
    """(m, k) codes to (m, k * bits / 32) int32, the lowest bits first."""
    shifted = codes.long().view(codes.shape[0], -1, 32 // bits) << torch.arange(0, 32, bits)
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _spread(scales: Tensor, n: int, k: int, rows: int, columns: int) -> Tensor:
    return scales.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def _plain(dtype: torch.dtype) -> Callable[..., tuple[Parts, Tensor]]:
    def made(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
        values = (torch.randn(n, k, generator=g) / k**0.5).to(dtype)
        return {"": values}, values.double()

    return made


def _e4m3(n: int, k: int, g: torch.Generator) -> Tensor:
    return (torch.randn(n, k, generator=g) * 60).clamp(-448, 448).to(E4M3)


def _fp8_block(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    b, values = draw.block, _e4m3(n, k, g)
    scales = _positive(g, -(-n // b), -(-k // b), dtype=draw.scale_dtype) / 64
    if draw.zero_block:
        values[-(n % b or b) :, -(k % b or b) :] = torch.zeros((), dtype=E4M3)
        scales[-1, -1] = 0
    return {"": values, "inverse": scales}, values.double() * _spread(scales, n, k, b, b)


def _scalar(draw: Draw, value: Tensor) -> Tensor:
    return value.reshape((1,) * draw.scalar)


def _fp8_tensor(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    values, scale = _e4m3(n, k, g), _positive(g, 1, dtype=draw.scale_dtype) / 64
    found = {"": values, "scale": _scalar(draw, scale), "input": _scalar(draw, _positive(g, 1))}
    return found, values.double() * scale.double()


def _fp8_channel(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    values, scales = _e4m3(n, k, g), _positive(g, n, 1, dtype=draw.scale_dtype) / 64
    if draw.zero_block:
        values[-1], scales[-1] = torch.zeros((), dtype=E4M3), 0
    return {"": values, "scale": scales.flatten() if draw.flat else scales}, values.double() * scales.double()


def _int8(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    values = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
    scales = _positive(g, n, 1, dtype=draw.scale_dtype) / 64
    if draw.zero_block:
        values[-1], scales[-1] = 0, 0
    return {"": values, "scale": scales.flatten() if draw.flat else scales}, values.double() * scales.double()


def _integers(draw: Draw, bits: int, n: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zero points and the weights."""
    codes, wide = _codes(n, k, bits, g), -(-k // GROUP)
    middle = 1 << (bits - 1)
    scales = _positive(g, n, wide).to(torch.float16) / 8
    zeros = torch.full((n, wide), middle)
    if not draw.symmetric:
        zeros = torch.randint(1, 2**bits, (n, wide), generator=g)
    if draw.zero_block:
        codes[-1, -GROUP:], scales[-1, -1] = zeros[-1, -1], 0
    dense = (codes - zeros.repeat_interleave(GROUP, 1)[:, :k]).double() * _spread(scales, n, k, 1, GROUP)
    return codes, scales, zeros, dense


def _gptq(bits: int) -> Callable[..., tuple[Parts, Tensor]]:
    def made(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
        codes, scales, zeros, dense = _integers(draw, bits, n, k, g)
        less = 0 if {"gptq_v2", "auto_round", "auto_round:gptqmodel"} & {*draw.options.values()} else 1
        found = {"qweight": words(codes, bits).T.contiguous(), "scales": scales.T.contiguous()}
        found["qzeros"] = words((zeros - less).T.contiguous(), bits)
        if draw.g_idx or draw.ordered:
            found["g_idx"] = (torch.arange(k) // GROUP).to(torch.int32)
        return found, dense

    return made


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _awq(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scales, zeros, dense = _integers(draw, 4, n, k, g)

    def packed(numbers_KN: Tensor) -> Tensor:
        eights = numbers_KN.reshape(numbers_KN.shape[0], -1, 8)
        return words(eights[..., AWQ_ORDER].flatten(1), 4)

    found = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous()}
    return found, dense


def _packed_integers(bits: int) -> Callable[..., tuple[Parts, Tensor]]:
    def made(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
        codes, scales, zeros, dense = _integers(draw, bits, n, k, g)
        shape = torch.tensor([n, k])
        found = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": shape}
        if not draw.symmetric:
            filled = torch.nn.functional.pad(zeros, (0, 0, 0, -n % (32 // bits)))
            found["weight_zero_point"] = words(filled.T.contiguous(), bits).T.contiguous()
        return found, dense

    return made


def _e2m1(n: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte, the even column in the low bits; and their values."""
    codes = _codes(n, k, 4, g)
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), values


def _mxfp4(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
    octets, values = _e2m1(n, k, g)
    exponents = torch.randint(118, 124, (n, k // 32), generator=g)
    if draw.zero_block:
        octets[-1, -16:], values[-1, -32:], exponents[-1, -1] = 0, 0, 0
    scales = torch.exp2(exponents.double() - 127)
    return {"packed": octets, "scale": exponents.to(torch.uint8)}, values * scales.repeat_interleave(32, 1)


def _nvfp4(divides: bool) -> Callable[..., tuple[Parts, Tensor]]:
    def made(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
        octets, values = _e2m1(n, k, g)
        scales = (_positive(g, n, k // 16) * 1e4).to(E4M3)
        above = torch.exp2(torch.randint(-14, -11, (1,), generator=g).float())  # the reciprocal is exact
        if draw.zero_block:
            octets[-1, -8:], values[-1, -16:] = 0, 0
            scales[-1, -1] = torch.zeros((), dtype=E4M3)
        dense = values * scales.double().repeat_interleave(16, 1) * above.double()
        tokens = torch.exp2(torch.randint(-9, -6, (1,), generator=g).float())
        above, tokens = (1 / above, 1 / tokens) if divides else (above, tokens)
        key = "packed" if divides else ""
        found = {key: octets, "scale": scales, "global": _scalar(draw, above), "input": _scalar(draw, tokens)}
        return found, dense

    return made


def _mlx(bits: int) -> Callable[..., tuple[Parts, Tensor]]:
    def made(draw: Draw, n: int, k: int, g: torch.Generator) -> tuple[Parts, Tensor]:
        codes = _codes(n, k, bits, g)
        scales = _positive(g, n, k // GROUP) * torch.where(torch.rand(n, k // GROUP, generator=g) < 0.5, -1.0, 1.0) / 8
        scales, biases = scales.bfloat16(), (torch.randn(n, k // GROUP, generator=g) / 30).bfloat16()
        if draw.zero_block:
            codes[-1, -GROUP:], scales[-1, -1], biases[-1, -1] = 0, 0, 0
        dense = codes.double() * _spread(scales, n, k, 1, GROUP) + _spread(biases, n, k, 1, GROUP)
        return {"": words(codes, bits).view(torch.uint32), "scales": scales, "biases": biases}, dense

    return made


FORMS: Mapping[str, Callable[..., tuple[Parts, Tensor]]] = {
    "bf16": _plain(torch.bfloat16), "fp16": _plain(torch.float16), "fp32": _plain(torch.float32),
    "fp8_block": _fp8_block, "fp8_tensor": _fp8_tensor, "fp8_channel": _fp8_channel, "int8": _int8,
    "gptq4": _gptq(4), "gptq8": _gptq(8), "awq": _awq, "ct4": _packed_integers(4), "ct8": _packed_integers(8),
    "mxfp4": _mxfp4, "nvfp4": _nvfp4(False), "nvfp4_ct": _nvfp4(True), "mlx4": _mlx(4), "mlx8": _mlx(8),
}  # fmt: skip


def _compressed(draw: Draw, kind: str, tokens: object = None, **weights: object) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": tokens, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


def quantization(draw: Draw) -> dict[str, Any] | None:
    """The quantization_config that the writer states."""
    form, bits = draw.form, 8 if draw.form.endswith("8") else 4
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    if form == "fp8_block":
        return {"quant_method": "fp8", "weight_block_size": [draw.block] * 2, "activation_scheme": "dynamic"}
    if form == "fp8_tensor":
        return {"quant_method": "fp8", "activation_scheme": "static"}
    if form == "fp8_channel":
        tokens = {**eight, "strategy": "token", "dynamic": True}
        return _compressed(draw, "float-quantized", tokens, **eight, strategy="channel")
    if form == "int8":
        eight["type"] = "int"
        tokens = {**eight, "strategy": "token", "dynamic": True}
        return _compressed(draw, "int-quantized", tokens, **eight, strategy="channel")
    if form.startswith("gptq"):
        stated = {"bits": bits, "group_size": GROUP, "sym": draw.symmetric}
        if "packing_format" in draw.options:
            return {"quant_method": "auto-round", "data_type": "int", **stated, **draw.options}
        return {"quant_method": "gptq", "desc_act": draw.ordered, **stated, **draw.options}
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    if form in ("ct4", "ct8"):
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
        return _compressed(draw, "pack-quantized", **weights, symmetric=draw.symmetric)
    if form in ("mxfp4", "nvfp4_ct"):
        size = 32 if form == "mxfp4" else 16
        weights = {"num_bits": 4, "type": "float", "group_size": size, "symmetric": True, "strategy": "group"}
        local = {**weights, "strategy": "tensor_group", "dynamic": "local"}
        return _compressed(draw, f"{form[:5]}-pack-quantized", None if form == "mxfp4" else local, **weights)
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"} if form == "nvfp4" else None


@dataclass(frozen=True)
class Written:
    """A checkpoint in a folder and the experts that it holds."""

    folder: Path
    experts: list[tuple[Tensor, Tensor, Tensor]]
    """gate (I, H), up (I, H) and down (H, I) of each, f64."""
    tensors: dict[str, Tensor]
    biases: list[list[Tensor]] = field(default_factory=list)
    """Of gate, up and down of each."""


def _endings(draw: Draw) -> dict[str, str]:
    """The ends of the names of linear modules."""
    packed = {"": "weight", "packed": "weight_packed", "scale": "weight_scale", "inverse": "weight_scale_inv"}
    if draw.form == "nvfp4_ct":
        return {**packed, "global": "weight_global_scale", "input": "input_global_scale"}
    return {**packed, "global": "weight_scale_2", "input": "input_scale"}


WORDS = {"official": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def write(draw: Draw, folder: Path) -> Written:
    """Write layer 0 and return what it holds."""
    sizes = (draw.inner, draw.hidden), (draw.inner, draw.hidden), (draw.hidden, draw.inner)
    drawn = [
        [FORMS[draw.form](draw, n, k, _random(draw, e, at)) for at, (n, k) in enumerate(sizes)]
        for e in range(draw.experts)
    ]
    if draw.ordered:
        drawn = [[gate, up, _ordered(down, draw, e)] for e, (gate, up, down) in enumerate(drawn)]
    biases = [
        [torch.randn(n, generator=_random(draw, e, at, 5)) for at, (n, _) in enumerate(sizes)]
        for e in range(draw.experts)
    ]
    for matrices, of_expert in zip(drawn if draw.biased else [], biases, strict=False):
        for (parts, _), bias in zip(matrices, of_expert, strict=True):
            parts["bias"] = bias
    tensors = {"gate.weight": torch.randn(draw.experts, draw.hidden, generator=_random(draw, 7)).bfloat16()}
    tensors |= LAYOUTS[draw.layout](draw, [[parts for parts, _ in expert] for expert in drawn])
    prefix, config = _config(draw)
    if (stated := quantization(draw)) is not None:
        config["quantization_config"] = stated
    if draw.form.startswith("mlx"):
        config["quantization"] = {"group_size": GROUP, "bits": int(draw.form[3:]), "mode": "affine"}
    config |= draw.options.get("config", {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    dense = [tuple(values for _, values in expert) for expert in drawn]
    return Written(folder, dense, tensors, biases)  # type: ignore[arg-type]


def _ordered(down: tuple[Parts, Tensor], draw: Draw, expert: int) -> tuple[Parts, Tensor]:
    """The same matrix with its columns in another order, which g_idx states."""
    parts, dense = down
    bits = int(draw.form[4:])
    order = torch.randperm(dense.shape[1], generator=_random(draw, 11, expert))
    shifts = torch.arange(0, 32, bits)
    codes = ((parts["qweight"].long()[:, None] >> shifts[None, :, None]) & (2**bits - 1)).reshape(dense.shape[1], -1).T
    changed = {"qweight": words(codes[:, order], bits).T.contiguous(), "g_idx": parts["g_idx"][order].contiguous()}
    return {**parts, **changed}, dense[:, order]


def _config(draw: Draw) -> tuple[str, dict[str, Any]]:
    """The prefix of names, and config.json."""
    dtype = {"fp16": "float16", "fp32": "float32"}.get(draw.form, "bfloat16")
    sizes = {"hidden_size": draw.hidden, "num_experts_per_tok": 2, "torch_dtype": dtype, "num_hidden_layers": 1}
    qwen = {"moe_intermediate_size": draw.inner, "num_experts": draw.experts, "norm_topk_prob": True}
    if draw.layout == "mixtral":
        own = {"intermediate_size": draw.inner, "num_local_experts": draw.experts}
        return "model.layers.0.block_sparse_moe.", {"model_type": "mixtral", **sizes, **own, "hidden_act": "silu"}
    if draw.layout == "transposed":
        text = {"model_type": "qwen3_vl_moe_text", **sizes, **qwen, "hidden_act": "silu"}
        return "model.language_model.layers.0.mlp.", {"model_type": "qwen3_vl_moe", "text_config": text}
    return "model.layers.0.mlp.", {"model_type": "qwen3_moe", **sizes, **qwen, "hidden_act": "silu"}


def _one_by_one(draw: Draw, experts: list[list[Parts]]) -> dict[str, Tensor]:
    ends, names = _endings(draw), WORDS.get(draw.layout, WORDS["official"])
    return {
        f"experts.{e}.{name}.{ends.get(end, end)}": tensor
        for e, matrices in enumerate(experts)
        for name, parts in zip(names, matrices, strict=True)
        for end, tensor in parts.items()
    }


def _stacks(draw: Draw, experts: list[list[Parts]]) -> dict[str, Tensor]:
    """Tensors of all experts, gate and up apart, or in one."""
    ends, found = {"": "", "inverse": "_scale_inv", "bias": "_bias"}, {}
    for at, name in enumerate(WORDS["official"]):
        for end in experts[0][at]:
            found[f"{name}{ends[end]}"] = torch.stack([matrices[at][end] for matrices in experts])
    if draw.layout != "stacked":
        for end in experts[0][0]:
            gate, up = (found.pop(f"{name}{ends[end]}") for name in WORDS["official"][:2])
            found[f"gate_up_proj{ends[end]}"] = torch.cat((gate.float(), up.float()), 1).to(gate.dtype)
    if draw.layout == "transposed":
        found = {name: tensor.transpose(1, 2) for name, tensor in found.items()}
    return {f"experts.{name}": tensor for name, tensor in found.items()}


def _mlx_stacks(draw: Draw, experts: list[list[Parts]]) -> dict[str, Tensor]:
    return {
        f"switch_mlp.{name}.{end or 'weight'}": torch.stack([matrices[at][end] for matrices in experts])
        for at, name in enumerate(WORDS["official"])
        for end in experts[0][at]
    }


LAYOUTS: Mapping[str, Callable[[Draw, list[list[Parts]]], dict[str, Tensor]]] = {
    "official": _one_by_one, "mixtral": _one_by_one, "stacked": _stacks, "fused": _stacks, "transposed": _stacks,
    "switch_mlp": _mlx_stacks,
}  # fmt: skip
STACKABLE = ("bf16", "fp16", "fp32", "fp8_block")


def layouts_of(form: str) -> tuple[str, ...]:
    """The layouts in which a format is written."""
    if form.startswith("mlx"):
        return ("switch_mlp",)
    return (*LAYOUTS,)[:5] if form in STACKABLE else ("official", "mixtral")


def write_gguf(draw: Draw, folder: Path) -> Written:
    """Layer 0 of a Mixtral by the `gguf` package, in stacks or one tensor an expert. form: a type of ggml."""
    import gguf
    from gguf.quants import dequantize, quantize

    kind = gguf.GGMLQuantizationType[draw.form.upper()]
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_embedding_length(draw.hidden)
    writer.add_feed_forward_length(draw.inner)
    writer.add_block_count(1)
    writer.add_expert_count(draw.experts)
    writer.add_expert_used_count(2)
    router = torch.randn(draw.experts, draw.hidden, generator=_random(draw, 7))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", router.numpy())
    sizes = {"gate": (draw.inner, draw.hidden), "up": (draw.inner, draw.hidden), "down": (draw.hidden, draw.inner)}
    dense = []
    for at, (name, (n, k)) in enumerate(sizes.items()):
        values = torch.stack([torch.randn(n, k, generator=_random(draw, e, at)) / k**0.5 for e in range(draw.experts)])
        if draw.zero_block:
            values[:, -1, -32:] = 0
        stored = quantize(values.numpy(), kind)
        dense.append(torch.from_numpy(dequantize(stored, kind)).double())
        if draw.layout == "gguf":
            writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", stored, raw_dtype=kind)
        for e in range(draw.experts) if draw.layout == "gguf_one_by_one" else ():
            writer.add_tensor(f"blk.0.ffn_{name}.{e}.weight", stored[e], raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", router[0].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(folder, [tuple(each) for each in zip(*dense, strict=True)], {})


GGUF_FORMS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
