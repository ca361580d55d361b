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

from tests.support import plain_formats as plain

GROUP = 32
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


FORMS: Mapping[str, tuple[str, str]] = {
    **{kind: (kind, "") for kind in ("bf16", "fp16", "fp32", "fp8_block", "fp8_tensor", "fp8_channel", "int8")},
    "gptq4": ("int4_g32", "gptq"), "gptq8": ("int8_g32", "gptq"), "awq": ("int4_g32", "awq"),
    "ct4": ("int4_g32", "compressed_tensors"), "ct8": ("int8_g32", "compressed_tensors"),
    "mxfp4": ("mxfp4", ""), "nvfp4": ("nvfp4", ""), "nvfp4_ct": ("nvfp4", ""),
    "mlx4": ("int4_g32_affine", "mlx"), "mlx8": ("int8_g32_affine", "mlx"),
}  # fmt: skip
"""Kind and packing of `plain_formats`."""
WORDS_OF_GROUPS = {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx"}
ENDINGS = {
    "gptq": WORDS_OF_GROUPS, "awq": WORDS_OF_GROUPS, "mlx": {"scale": "scales", "zeros": "biases"},
    "compressed_tensors": {"": "weight_packed", "scale": "weight_scale", "zeros": "weight_zero_point",
                           "shape": "weight_shape"},
    "mxfp4": {"": "packed"}, "nvfp4_ct": {"": "packed"}, "fp8_block": {"scale": "inverse"},
}  # fmt: skip
"""By packing or form: the keys of parts that differ from those of `plain_formats`."""


def _matrix(draw: Draw, n: int, k: int, g: torch.Generator, *, ordered: bool) -> tuple[Parts, Tensor]:
    """The parts of a matrix and its values in f64. ordered: columns are in groups by activation."""
    (kind, packing), form = FORMS[draw.form], draw.form
    kind += "_128" if (form, draw.block) == ("fp8_block", 128) else ""
    kind += "_zp" if packing and packing != "mlx" and not draw.symmetric else ""
    second = {"gptq_v2", "auto_round", "auto_round:gptqmodel"} & {*draw.options.values()}
    source = plain.Draw(g, draw.zero_block, draw.scale_dtype, less=0 if second else 1)
    stored = source.matrix(kind, n, k, packing, ordered)
    ends = ENDINGS.get(packing or form, {})
    parts = {ends.get(end, end): tensor for end, tensor in stored.tensors.items()}
    if packing == "gptq" and not (draw.g_idx or draw.ordered):
        del parts["g_idx"]
    if form == "mxfp4":
        parts["scale"] = parts["scale"].view(torch.uint8)
    if draw.flat and form in ("fp8_channel", "int8"):
        parts["scale"] = parts["scale"].flatten()
    if form in ("fp8_tensor", "nvfp4", "nvfp4_ct"):
        parts["input"] = source.near(0.01, 1).float()
        above = "scale" if form == "fp8_tensor" else "global"
        if form == "nvfp4_ct":  # divides by both
            parts |= {key: 1 / parts[key] for key in ("input", "global")}
        parts |= {key: parts[key].reshape((1,) * draw.scalar) for key in ("input", above)}
    return parts, stored.values


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
        [_matrix(draw, n, k, _random(draw, e, at), ordered=draw.ordered and at == 2) for at, (n, k) in enumerate(sizes)]
        for e in range(draw.experts)
    ]
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
