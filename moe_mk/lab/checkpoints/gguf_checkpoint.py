"""GGUF files with the MoE layers of a synthetic or a converted checkpoint.

Only MoE blocks are written: a file for this library and for tests, not a whole model. A projection of all experts of a
layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.config.hf import settings_from_hf
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.external.library import find
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.ggml_blocks import MXFP4_BYTES, MXFP4_CODES, divided
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.gguf_metadata import FAMILIES, KEYS, SIGMOID, SOFTMAX
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors
from moe_mk.weights.names import GGUF_NAMES, Part, Role

FILE = "model.gguf"
PROJECTIONS = ("gate", "up", "down")
ARCHITECTURES = {
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "deepseek_v32": "deepseek2", "kimi_k2": "deepseek2",
    "qwen3_moe": "qwen3moe", "mixtral": "llama", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""The architecture of each model_type."""
Matrix = Callable[[Part], QuantTensor]
"""One matrix of one expert, or of the shared experts, in the scheme of the file."""
Vector = Callable[[Part], Tensor]
"""The gate, a bias of the router, or a bias of one expert."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to write."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    """Of its bytes: the last dimension counts bytes."""
    make: Callable[[], NDArray[np.uint8]]


def layer_tensors(spec: LayerSpec, layer: int, matrix: Matrix, vector: Vector) -> list[GgufTensor]:
    """The tensors of one layer. spec: of the file."""
    found = []
    for local, each in expected_tensors(spec, GGUF_NAMES).items():
        part, stacked = each.part, each.part.role is Role.EXPERT
        if part.role in (Role.EXPERT, Role.SHARED) and not part.extra:
            scheme = spec.scheme_of(part.role, part.projection)
            shape = (*each.shape[:-1], row_bytes(scheme, _columns(spec, part)))
            make = _stack_of(matrix, part, spec.num_experts if stacked else 0)
            found.append(GgufTensor(f"blk.{layer}.{local}", type_name(scheme), shape, make))
        else:
            shape = (*each.shape[:-1], each.shape[-1] * 4)
            make = _floats_of(vector, part, spec.num_experts if stacked else 0)
            found.append(GgufTensor(f"blk.{layer}.{local}", "F32", shape, make))
    return found


def type_name(scheme: QuantScheme) -> str:
    """The type of ggml that holds a scheme."""
    plain = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
    # ggml spells the K in capitals: Q4_K.
    return plain.get(scheme.name, scheme.name.upper())


def row_bytes(scheme: QuantScheme, columns: int) -> int:
    """Bytes of a row."""
    return scheme.num_bytes(1, columns)


def _columns(spec: LayerSpec, part: Part) -> int:
    width = spec.intermediate_size if part.role is Role.EXPERT else spec.shared_intermediate_size
    return width if part.projection == "down" else spec.hidden_size


def _stack_of(matrix: Matrix, part: Part, experts: int) -> Callable[[], NDArray[np.uint8]]:
    def make() -> NDArray[np.uint8]:
        if not experts:
            return _row_bytes_of(matrix(part))
        first = _row_bytes_of(matrix(replace(part, expert=0)))
        out = np.empty((experts, *first.shape), dtype=np.uint8)
        out[0] = first
        for expert in range(1, experts):
            out[expert] = _row_bytes_of(matrix(replace(part, expert=expert)))
        return out

    return make


def _floats_of(vector: Vector, part: Part, experts: int) -> Callable[[], NDArray[np.uint8]]:
    def make() -> NDArray[np.uint8]:
        found = torch.stack([vector(replace(part, expert=e)) for e in range(experts)]) if experts else vector(part)
        array: NDArray[np.uint8] = found.to(torch.float32).contiguous().view(torch.uint8).numpy()
        return array

    return make


def _row_bytes_of(q: QuantTensor) -> NDArray[np.uint8]:
    rows = mxfp4_to_gguf(q) if q.scheme == MXFP4 else q.values.contiguous()
    array: NDArray[np.uint8] = (rows.view(torch.uint8) if isinstance(q.scheme, Plain) else rows).numpy()
    return array


def gguf_from_hf(hf: Mapping[str, Any], where: str) -> tuple[str, dict[str, str | int | float | bool]]:
    """The architecture and the metadata of a config.json. Raises ConfigError for a model_type without architecture."""
    model_type = str(hf.get("model_type", ""))
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"{where}: GGUF has no architecture for model_type {model_type!r}")
    architecture = ARCHITECTURES[model_type]
    _, experts, width, stored_width, _ = FAMILIES[architecture]
    out: dict[str, str | int | float | bool] = {}
    if architecture == "deepseek2":
        settings = settings_from_hf({**hf, "quantization_config": None}, where)
        router = settings["router"]
        hf = {
            **hf, "n_group": router["num_expert_group"], "topk_group": router["topk_group"],
            "routed_scaling_factor": router["routed_scaling_factor"], "norm_topk_prob": router["renormalize"],
            "n_shared_experts": settings["model"]["num_shared_experts"],
        }  # fmt: skip
        out["deepseek2.expert_gating_func"] = SIGMOID if router["scoring_func"] == "sigmoid" else SOFTMAX
    for key, name in {**KEYS, experts: "expert_count", width: stored_width}.items():
        value = hf.get(key)
        if value is not None:
            out[f"{architecture}.{name}"] = float(value) if key == "routed_scaling_factor" else value
    return architecture, out


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, str | int | float | bool], tensors: Sequence[GgufTensor]
) -> int:
    """Write one file, tensor after tensor, and return the bytes of all tensors. One tensor is in memory at a time."""
    gguf = find("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for each in tensors:
        kind = gguf.GGMLQuantizationType[each.type_name]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.uint8), int(np.prod(each.shape)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = 0
    for each in tensors:
        data = each.make()
        assert data.shape == each.shape, f"{each.name}: {data.shape} is not {each.shape}"
        writer.write_tensor_data(data)
        total += data.nbytes
    writer.close()
    return total


def mxfp4_to_gguf(q: QuantTensor) -> Tensor:
    """The inverse of `mxfp4_of_gguf`. Raises ShapeError for other schemes and for partial blocks."""
    if q.scheme != MXFP4 or q.scales is None or q.shape[-1] != q.scales.shape[-1] * MXFP4.columns:
        raise ShapeError(f"{q.scheme.name} of {tuple(q.shape)} is no MXFP4 of whole blocks of {MXFP4.columns}")
    blocks = torch.zeros((*q.scales.shape, MXFP4_BYTES), dtype=torch.uint8, device=q.device)
    blocks[..., 0] = q.scales.view(torch.uint8)
    MXFP4_CODES.put(blocks, divided(e2m1.unpack(q.values), -1, MXFP4.columns))
    return blocks.flatten(-2)
