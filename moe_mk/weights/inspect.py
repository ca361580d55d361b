"""The contents of a checkpoint, from its index, headers and config.json, without reading weights."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moe_mk.errors import ConfigError, WeightError
from moe_mk.files import read_json
from moe_mk.quant import (
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
    QuantScheme,
    plain,
    weight_scheme,
)
from moe_mk.quant.kinds import BLOCK_KINDS, KINDS, scheme_of_kind
from moe_mk.quant.microscaling import GROUP
from moe_mk.weights.completeness import entry_problems, name_problems
from moe_mk.weights.layer_spec import FLOATS, LayerSpec, expected_tensors, unnamed_parts
from moe_mk.weights.names import Convention, Part, Role, block_prefixes, layer_of, recognise
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import SafetensorsSource

E8M0 = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of power-of-two scales in files."""


@dataclass(frozen=True)
class LayerFacts:
    """One MoE block, as described by file headers."""

    layer: int | None
    """None: the prefix contains no layer number."""
    prefix: str
    convention: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
    has_gate_bias: bool
    dtype: str
    """Dtype of the expert weights, in safetensors notation."""
    scale_dtype: str
    """Dtype of the scales; empty without scales."""
    block: tuple[int, int] | None
    num_tensors: int
    num_bytes: int
    problems: tuple[str, ...]
    kind: str = ""
    """The format of the experts, a value of `model.quant.weights`; empty if unknown."""
    has_expert_bias: bool = False
    has_logit_bias: bool = False
    table: tuple[int, int] | None = None
    """For layers that choose experts by token id: (vocabulary size, experts per token)."""

    def layer_spec(self) -> LayerSpec:
        """The specification for `load_layer`; WeightError if the layer's problems prevent it."""
        if not self.num_experts or not self.kind:
            raise WeightError(f"layer {self.layer} cannot be described: {'; '.join(self.problems)}")
        scheme = scheme_of_kind(self.kind, self.block or (128, 128))
        width = self.shared_intermediate_size
        sizes = (self.num_experts, self.hidden_size, self.intermediate_size)
        return LayerSpec(
            *sizes, scheme, int(width > 0), width, self.has_gate_bias,
            has_expert_bias=self.has_expert_bias, has_logit_bias=self.has_logit_bias, table=self.table,
        )  # fmt: skip


@dataclass(frozen=True)
class CheckpointFacts:
    """The summary of a checkpoint."""

    where: str
    model_type: str
    """The model type of config.json; empty without one."""
    quant_method: str
    block: tuple[int, int] | None
    """weight_block_size of config.json."""
    num_files: int
    num_tensors: int
    num_bytes: int
    """Total of all files."""
    layers: tuple[LayerFacts, ...]
    problems: tuple[str, ...]
    """Problems of files and config; those of a layer are in the layer."""

    @property
    def sound(self) -> bool:
        """Whether there is at least one MoE layer and nothing is wrong."""
        return bool(self.layers) and not self.problems and not any(layer.problems for layer in self.layers)

    def as_dict(self) -> dict[str, object]:
        """The summary as JSON."""
        return {**asdict(self), "sound": self.sound}


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointFacts:
    """Describe a checkpoint and list what is wrong with it. Cost: one small read a file.

    Raises WeightError only if there is no checkpoint or its index cannot be used at all.
    """
    source = SafetensorsSource(path)
    config, problems = _config(source.path)
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    block = _block(quantization.get("weight_block_size"))
    num_bytes = 0
    for file in source.files:
        try:
            num_bytes += source.header(file).num_bytes
        except WeightError as problem:
            problems.append(str(problem))
    layers = tuple(_layer(source, prefix, block) for prefix in block_prefixes(source.names()))
    if not layers:
        problems.append("no name has a part 'experts.': this checkpoint has no MoE layer")
    return CheckpointFacts(
        source.where, str(config.get("model_type", "")), str(quantization.get("quant_method", "")), block,
        len(source.files), len(source.names()), num_bytes, layers, tuple(problems),
    )  # fmt: skip


def _config(path: Path) -> tuple[dict[str, object], list[str]]:
    file = path / "config.json" if path.is_dir() else path.parent / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError) as problem:
        return {}, [f"config.json cannot be read: {problem}"]
    return (config, []) if isinstance(config, dict) else ({}, ["config.json is not a JSON object"])


def _block(sides: object) -> tuple[int, int] | None:
    if isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
        return sides[0], sides[1]
    return None


def _layer(source: SafetensorsSource, prefix: str, block: tuple[int, int] | None) -> LayerFacts:
    local = [name.removeprefix(prefix) for name in source.names() if name.startswith(prefix)]
    convention = recognise(local)
    entries, unreadable = _entries(source, prefix, local)
    parts = {part: entries[name] for name in entries if (part := convention.parse(name)) is not None}
    spec, why_not = _guess(parts, convention, block)
    problems = list(unreadable)
    if spec is None:
        problems.append(why_not)
    else:
        expected = expected_tensors(spec, convention)
        problems += name_problems(local, expected, convention)
        problems += entry_problems(
            source, prefix, {name: expected[name] for name in local if name in expected and name in entries}
        )
    dtypes, scale_dtypes = _dtypes(parts, is_scale=False), _dtypes(parts, is_scale=True)
    return LayerFacts(
        layer_of(prefix), prefix, convention.name,
        spec.num_experts if spec else 0, spec.hidden_size if spec else 0, spec.intermediate_size if spec else 0,
        spec.shared_intermediate_size if spec else 0, Part(Role.BIAS) in parts, dtypes, scale_dtypes,
        _block_of(spec), len(local), sum(entry.num_bytes for entry in entries.values()), tuple(problems),
        _kind_of(spec), spec is not None and spec.has_expert_bias, spec is not None and spec.has_logit_bias,
        None if spec is None else spec.table,
    )  # fmt: skip


def _entries(source: SafetensorsSource, prefix: str, local: list[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    entries: dict[str, TensorEntry] = {}
    unreadable: Counter[str] = Counter()
    for name in local:
        try:
            entries[name] = source.entry(prefix + name)
        except WeightError as problem:
            unreadable[str(problem)] += 1
    return entries, [f"{problem} ({count} tensors of this layer)" for problem, count in unreadable.items()]


def _guess(
    parts: dict[Part, TensorEntry], convention: Convention, block: tuple[int, int] | None
) -> tuple[LayerSpec | None, str]:
    """The sizes of most down projections and of the gate, as the expected specification of the layer."""
    downs = [
        (part, entry)
        for part, entry in parts.items()
        if part.role is Role.EXPERT and part.projection == "down" and not (part.is_scale or part.extra)
    ]
    if not downs:
        return None, "no expert has a down projection"
    (shape, dtype), _ = Counter((entry.shape, entry.dtype) for _, entry in downs).most_common(1)[0]
    experts = [part.expert for part, _ in downs if part.expert is not None]
    router, shared = parts.get(Part(Role.ROUTER)), parts.get(Part(Role.SHARED, "down"))
    if convention.blocks_apart and len(shape) == 4:
        shape = (*shape[:2], shape[2] * shape[3])
    if len(shape) != (3 if convention.fused else 2):
        return None, f"down projections have shape {list(shape)}"
    num_experts = (
        router.shape[0] if router is not None and router.shape else shape[0] if convention.fused else 1 + max(experts)
    )
    scheme = _scheme(dtype, shape[-2:], parts, block)
    if scheme is None:
        return None, f"expert weights of dtype {downs[0][1].dtype_name} are not supported"
    width = shared.shape[1] * scheme.per_byte if shared is not None and len(shared.shape) == 2 else 0
    biased = Part(Role.EXPERT, "down", extra="bias") in parts
    try:
        spec = LayerSpec(
            num_experts, shape[-2], shape[-1] * scheme.per_byte, scheme, int(width > 0), width,
            Part(Role.BIAS) in parts, has_expert_bias=biased, has_logit_bias=Part(Role.LOGIT_BIAS) in parts,
            table=_table_of(parts),
        )  # fmt: skip
    except ConfigError as problem:
        return None, str(problem)
    nameless = "; ".join(unnamed_parts(spec, convention))
    return (None, nameless) if nameless else (spec, "")


def _table_of(parts: dict[Part, TensorEntry]) -> tuple[int, int] | None:
    """The sizes of the table of experts by token id; None without a valid table."""
    table = parts.get(Part(Role.TABLE))
    return None if table is None or len(table.shape) != 2 else (table.shape[0], table.shape[1])


def _scheme(
    dtype: torch.dtype | None, shape: tuple[int, ...], parts: dict[Part, TensorEntry], block: tuple[int, int] | None
) -> QuantScheme | None:
    """The scheme that follows from dtypes and shapes of a down projection and its scales."""
    if dtype in FLOATS:
        return plain(dtype)
    downs = {part: e for part, e in parts.items() if part.role is Role.EXPERT and part.projection == "down"}
    scales = [e for part, e in downs.items() if part.is_scale]
    if dtype is None or not scales:
        return None
    scale = scales[0]
    grid = scale.shape[1:] if len(scale.shape) == 3 else scale.shape
    per_row = len(grid) > 0 and grid[0] == shape[0]
    if dtype is torch.float8_e4m3fn and per_row and grid[1:] == (shape[1] // GROUP,) and scale.dtype in E8M0:
        return MXFP8
    if dtype is torch.float8_e4m3fn and block is None and math.prod(grid) in (1, shape[0]):
        return FP8_CHANNEL if per_row and math.prod(grid) > 1 else FP8_TENSOR
    if dtype in (torch.uint8, torch.int8) and per_row and len(grid) == 2 and grid[1] > 1:
        return {torch.float8_e4m3fn: NVFP4}.get(scale.dtype or torch.uint8, MXFP4 if scale.dtype in E8M0 else None)
    if dtype is torch.int8:
        sides = block or (128, 128)
        return INT8_CHANNEL if math.prod(grid) == shape[0] else scheme_of_kind("int8_block", sides)
    return weight_scheme(block or (128, 128)) if dtype is torch.float8_e4m3fn else None


def _block_of(spec: LayerSpec | None) -> tuple[int, int] | None:
    return spec.block if spec is not None and _kind_of(spec) in BLOCK_KINDS else None


def _kind_of(spec: LayerSpec | None) -> str:
    if spec is None:
        return ""
    for kind in KINDS:
        if scheme_of_kind(kind, spec.block or (128, 128)) == spec.scheme:
            return kind
    return ""


def _dtypes(parts: dict[Part, TensorEntry], *, is_scale: bool) -> str:
    experts = {part: entry for part, entry in parts.items() if part.role is Role.EXPERT and not part.extra}
    found = {entry.dtype_name for part, entry in experts.items() if part.is_scale == is_scale}
    return " and ".join(sorted(found))
