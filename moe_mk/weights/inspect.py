"""The contents of a checkpoint, from its index, headers and config.json, without reading weights."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_mk import quant
from moe_mk.config.hf_rules import stores_whole_zeros
from moe_mk.errors import ConfigError, WeightError, unless_signalled
from moe_mk.files import read_json
from moe_mk.quant.grouped import GROUPED, GROUPS, Grouped, grouped, kind_of
from moe_mk.quant.kinds import BLOCK_KINDS, FORMATS, scheme_of_kind
from moe_mk.quant.microscaling import GROUP
from moe_mk.weights.completeness import entry_problems, name_problems, read_entries, recognise_block, some
from moe_mk.weights.gguf_source import GgufSource, open_source
from moe_mk.weights.layer_spec import Features, LayerSpec, expected_tensors, unnamed_parts
from moe_mk.weights.names import Convention, Part, Role, block_prefixes, layer_of, local_names
from moe_mk.weights.packed_layouts import FLOATS, IN_GGUF
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import TensorSource

E8M0 = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of power-of-two scales in files."""


@dataclass(frozen=True)
class LayerFacts(Features):
    """One MoE block, as described by file headers."""

    layer: int | None
    """None: the prefix contains no layer number."""
    prefix: str
    convention: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
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
    down: str = ""
    """The format of down projections where it differs; else empty."""
    shared: str = ""
    """The format of shared experts where it differs from that of the routed ones; else empty."""
    has_input_scales: bool = False
    """Whether routed experts have calibrated scales of activations."""

    def layer_spec(self) -> LayerSpec:
        """The specification for `load_layer`; WeightError if the layer's problems prevent it."""
        if not self.num_experts or not self.kind:
            raise WeightError(f"layer {self.layer} cannot be described: {'; '.join(self.problems)}")
        block = self.block or (128, 128)
        scheme = scheme_of_kind(self.kind, block)
        width = self.shared_intermediate_size
        sizes = (self.num_experts, self.hidden_size, self.intermediate_size)
        down, shared = (scheme_of_kind(kind, block) if kind else None for kind in (self.down, self.shared))
        return LayerSpec(*sizes, scheme, int(width > 0), width, down_scheme=down, shared_scheme=shared, **self.features)


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
        return {**asdict(self), "sound": self.sound}


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointFacts:
    """Describe a checkpoint and list what is wrong with it. Cost: one small read a file.

    Raises WeightError only if there is no checkpoint or its index cannot be used at all.
    """
    source = open_source(path)
    if isinstance(source, GgufSource):  # the architecture in place of the model type
        config, problems = dict[str, object](model_type=source.metadata.get("general.architecture", "")), list[str]()
    else:
        config, problems = _config(source.path)
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    sides: Any = quantization.get("weight_block_size")
    is_block = isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
    block = (sides[0], sides[1]) if is_block else None
    num_bytes = 0
    for file in source.files:
        try:
            num_bytes += source.header(file).num_bytes
        except WeightError as problem:
            problems.append(str(problem))
    zero = config.get("zero_expert_num")
    stated = block, quantization, zero if isinstance(zero, int) else 0
    layers = tuple(describe_block(source, prefix, *stated) for prefix in block_prefixes(source.names()))
    if not layers:
        stacks = [name for name in sorted(source.names()) if not problems and len(source.entry(name).shape) == 3]
        like = f"; stacks of matrices that are not read: {some(stacks)}" if stacks else ""
        problems.append(f"no name has a part 'experts.': this checkpoint has no MoE layer that is read{like}")
    return CheckpointFacts(
        source.where, str(config.get("model_type", "")), str(quantization.get("quant_method", "")), block,
        len(source.files), len(source.names()), num_bytes, layers, tuple(problems),
    )  # fmt: skip


def _config(path: Path) -> tuple[dict[str, object], list[str]]:
    file = path / "config.json" if path.is_dir() else path.parent / "config.json"
    try:
        config = read_json(file)
    except unless_signalled(FileNotFoundError):
        return {}, []
    except unless_signalled(OSError, ValueError) as problem:
        return {}, [f"config.json cannot be read: {problem}"]
    return (config, []) if isinstance(config, dict) else ({}, ["config.json is not a JSON object"])


def describe_block(
    source: TensorSource, prefix: str, block: tuple[int, int] | None, quantization: dict[str, object], zero: int = 0
) -> LayerFacts:
    """Describe the block under a prefix from its headers. block, quantization: what config.json states of them.

    zero: how many of the scored experts have no weights.
    """
    local = local_names(source.names(), prefix)
    entries, problems = read_entries(source, prefix, local)
    convention = recognise_block(source, prefix, local)
    parts = {part: entries[name] for name in entries if (part := convention.parse(name)) is not None}
    schemes: tuple[quant.QuantScheme | None, ...] = (None, None, None)
    sizes, block_of, features = (0, 0, 0, 0), None, _named(parts)
    try:
        spec = (
            _guess_packed(parts, convention, quantization) if convention.packing else _guess(parts, convention, block)
        )
        bias = parts.get(Part(Role.BIAS))
        if 0 < zero < spec.num_experts and Part(Role.ROUTER) in parts:
            spec = replace(spec, num_experts=spec.num_experts - zero, num_zero_experts=zero)
        elif bias is not None and len(bias.shape) == 1:
            fused = spec.num_experts - bias.shape[0]
            spec = replace(spec, num_fused_shared_experts=fused if 0 < fused < bias.shape[0] else 0)
        expected = expected_tensors(spec, convention)
    except ConfigError as problem:
        problems.append(str(problem))
    else:
        problems += [*name_problems(local, expected, convention), *entry_problems(entries, expected)]
        sizes = spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.shared_intermediate_size
        schemes, features = (spec.scheme, spec.down_scheme, spec.shared_scheme), spec.features
        block_of = next((each.block for each in schemes if each and kind_of_scheme(each) in BLOCK_KINDS), None)
    kind, down, shared = ("" if scheme is None else kind_of_scheme(scheme) for scheme in schemes)
    return LayerFacts(
        layer_of(prefix), prefix, convention.name, *sizes, _dtypes(parts, ""), _dtypes(parts, "scale"), block_of,
        len(local), sum(entry.num_bytes for entry in entries.values()), tuple(problems),
        kind, down, shared, any(part.role is Role.EXPERT and part.extra == "input" for part in parts), **features,
    )  # fmt: skip


def _named(parts: dict[Part, TensorEntry]) -> dict[str, Any]:
    """Return the features of a layer that the names of its tensors show."""
    found = {
        "has_gate_bias": Part(Role.BIAS), "has_logit_bias": Part(Role.LOGIT_BIAS),
        "has_shared_gate": Part(Role.SHARED_GATE), "has_latent_norm": Part(Role.LATENT, "norm"),
        "has_input_norm": Part(Role.INPUT_NORM, "experts"), "has_expert_scale": Part(Role.EXPERT_SCALE),
        "has_image_bias": Part(Role.IMAGE_BIAS),
    }  # fmt: skip
    gated = any(part.role is Role.EXPERT and part.projection in ("gate", "gate_up") for part in parts)
    table = parts.get(Part(Role.TABLE))
    sizes = None if table is None or len(table.shape) != 2 else table.shape
    return {name: part in parts for name, part in found.items()} | {"table": sizes, "gated": gated}


def _guess(parts: dict[Part, TensorEntry], convention: Convention, block: tuple[int, int] | None) -> LayerSpec:
    """The specification of a layer, by most down projections and the gate. Raises ConfigError where there is none."""
    downs = [
        (part, entry)
        for part, entry in parts.items()
        if part.role is Role.EXPERT and part.projection == "down" and not part.extra
    ]
    if not downs:
        raise ConfigError("no expert has a down projection")
    (shape, dtype), _ = Counter((entry.shape, entry.dtype) for _, entry in downs).most_common(1)[0]
    experts = [part.expert for part, _ in downs if part.expert is not None]
    router, shared = parts.get(Part(Role.ROUTER)), parts.get(Part(Role.SHARED, "down"))
    shared = shared or parts.get(Part(Role.SHARED, "down", extra="plain"))
    if convention.blocks_apart and len(shape) == 4:
        shape = (*shape[:2], shape[2] * shape[3])
    if len(shape) != (3 if convention.fused or convention.stacked else 2):
        raise ConfigError(f"down projections have shape {list(shape)}")
    both, halves = parts.get(Part(Role.EXPERT, "gate_up" if convention.fused else "up")), 1 + convention.fused
    turned = router is not None and both is not None and both.shape[-2:-1] == router.shape[-1:] == shape[-1:]
    if both is not None and turned:  # both of one size on either side show nothing
        squares = {both.shape[-2:] == both.shape[-2:][::-1], shape[-2] == shape[-1]}
        turned = both.shape[-1] == halves * shape[-2] and False in squares
        turned = turned and dtype in (*FLOATS, torch.float8_e4m3fn, torch.int8)
    if turned:
        shape = (*shape[:-2], shape[-1], shape[-2])
    latent = parts.get(Part(Role.LATENT, "down"))
    hidden = shape[-2] if latent is None else latent.shape[-1]
    if latent is None and router is not None and len(router.shape) == 2 and shape[-2] != router.shape[1] == shape[-1]:
        raise ConfigError(
            f"down projections have shape {list(shape)} and the router {list(router.shape)}: "
            "matrices are stored transposed"
        )
    num_experts = (
        router.shape[0] if router is not None and router.shape else shape[0] if len(shape) == 3 else 1 + max(experts)
    )
    scheme = _scheme(dtype, shape[-2:], parts, block)
    if scheme is None:
        raise ConfigError(f"expert weights of dtype {downs[0][1].dtype_name} are not supported")
    plain_dtype = shared.dtype if shared is not None and isinstance(scheme, quant.BlockedScheme) else None
    shared_scheme: quant.QuantScheme | None = None
    if plain_dtype in FLOATS and plain_dtype is not None:
        shared_scheme = quant.plain(plain_dtype)
    elif plain_dtype is torch.float8_e4m3fn and scheme.per_byte == 2 and shared is not None:
        theirs = {replace(part, role=Role.EXPERT): e for part, e in parts.items() if part.role is Role.SHARED}
        shared_scheme = _scheme(plain_dtype, shared.shape, theirs, block)
    wide = (shared_scheme or scheme).logical_columns
    width = wide(shared.shape[1]) if shared is not None and len(shared.shape) == 2 else 0
    biased = any(part.role is Role.EXPERT and part.extra == "bias" for part in parts)
    spec = LayerSpec(
        num_experts, hidden, scheme.logical_columns(shape[-1]), scheme, int(width > 0), width, has_expert_bias=biased,
        shared_scheme=shared_scheme, stacks_transposed=turned, latent_size=None if latent is None else shape[-2],
        **_named(parts),
    )  # fmt: skip
    if nameless := unnamed_parts(spec, convention):
        raise ConfigError("; ".join(nameless))
    return spec


def _guess_packed(parts: dict[Part, TensorEntry], convention: Convention, quantization: dict[str, object]) -> LayerSpec:
    """Guess the specification of packed integers, from the gate and the projections of the first expert."""
    router = parts.get(Part(Role.ROUTER))
    experts = [part.expert for part in parts if part.role is Role.EXPERT and part.expert is not None]
    first = None if convention.stacked or convention.fused else min(experts, default=0)
    halves = "gate_up" if convention.fused else "up"
    gate, up, down = (parts.get(Part(Role.EXPERT, projection, first)) for projection in ("gate", halves, "down"))
    if router is None or len(router.shape) != 2 or up is None or down is None:
        raise ConfigError("the gate or the first expert is missing, which state the sizes of packed experts")
    num_experts, hidden = router.shape
    latent = parts.get(Part(Role.LATENT, "down"))
    latent_size = latent.shape[0] if latent is not None and latent.shape else None
    if len(up.shape) != (3 if first is None else 2) or len(down.shape) != len(up.shape):
        raise ConfigError(f"projections have shapes {list(up.shape)} and {list(down.shape)}")
    if convention.packing == "gguf":
        inner, stored = up.shape[-2] // (2 if convention.fused else 1), [t for t in (gate, up, down) if t is not None]
        if odd := " and ".join(f"{t.name} is {t.dtype_name}" for t in stored if _stored_in_gguf(t) is None):
            raise ConfigError(f"{odd}, which is not supported; types that are: {', '.join(IN_GGUF)}")
        wide, bf16 = {_stored_in_gguf(each) for each in (gate, up) if each is not None}, quant.plain(torch.bfloat16)
        # Gate and up of different types are decoded to bf16.
        schemes = (wide.pop() if len(wide) == 1 else None) or bf16, _stored_in_gguf(down) or bf16
    else:
        inner, hidden = _width(convention, up, down), down.shape[-2] if convention.packing == "mlx" else hidden
        known = first, latent_size or hidden, inner
        integers = _integers(parts, convention, known, quantization)
        if integers is None:
            raise ConfigError("groups of packed experts are not 32, 64 or 128 columns or whole rows of 4 or 8 bits")
        schemes = (integers, _integers(parts, convention, known, quantization, "down") or integers)
    shared = parts.get(Part(Role.SHARED, "up", extra="" if convention.packing == "mlx" else "plain"))
    ups, downs = (parts.get(Part(Role.SHARED, projection)) for projection in ("up", "down"))
    width = shared.shape[0] if shared is not None else 0
    if shared is None and ups is not None and downs is not None:
        width = _width(convention, ups, downs)
    theirs = {replace(part, role=Role.EXPERT): entry for part, entry in parts.items() if part.role is Role.SHARED}
    shared_scheme: quant.QuantScheme | None = None
    if shared is not None and shared.dtype in FLOATS:
        shared_scheme = quant.plain(shared.dtype)
    elif width and convention.packing != "gguf":
        own = _integers(theirs, convention, (None, hidden, width), quantization)
        shared_scheme = own if own != schemes[0] else None
    v2 = convention.packing == "gptq" and stores_whole_zeros(quantization)
    return LayerSpec(
        num_experts, hidden, inner, schemes[0], int(width > 0), width,
        has_expert_bias=Part(Role.EXPERT, "down", first, extra="bias") in parts,
        down_scheme=None if schemes[1] == schemes[0] else schemes[1], shared_scheme=shared_scheme,
        gptq_v2=v2 and isinstance(schemes[0], Grouped) and schemes[0].has_zeros, latent_size=latent_size,
        **_named(parts),
    )  # fmt: skip


def _integers(
    parts: dict[Part, TensorEntry],
    convention: Convention,
    known: tuple[int | None, int, int],
    quantization: dict[str, object],
    of: str = "up",
) -> quant.QuantScheme | None:
    """The scheme of a packed projection and its scales; None if unsupported. known: (expert, hidden, intermediate)."""
    expert, by_row = known[0], convention.packing == "compressed_tensors"
    sizes, values = dict(zip(("up", "down"), known[1:], strict=True)), parts[Part(Role.EXPERT, of, expert)]
    if convention.packing == "mlx" and values.dtype in FLOATS:  # modules without scales are plain
        return quant.plain(values.dtype)
    if convention.packing == "mlx":
        return _of_mlx(parts, Part(Role.EXPERT, of, expert), sizes[of])
    groups = []
    for projection, columns in sizes.items():
        scales = parts.get(Part(Role.EXPERT, projection, expert, "scale"))
        if scales is None or len(scales.shape) != 2 or not min(*scales.shape, columns):
            return None
        groups.append((scales.shape[1 if by_row else 0], columns))
    # One scale of a row is that of a group as long as the row, if the other projection has several.
    wide, columns = max(groups)
    group = columns // wide if wide > 1 or quantization.get("group_size") == columns else quant.WHOLE
    bits = 4 if convention.packing == "awq" else 32 * values.shape[1 if by_row else 0] // sizes[of]
    zeros = Part(Role.EXPERT, of, expert, extra="zeros") in parts
    if convention.packing == "gptq":
        zeros = zeros and (not quantization or quantization.get("sym") is False)  # absent is true, as in the settings
    return grouped(bits, group, zeros=zeros) if group in GROUPS and bits in (4, 8) else None


def _of_mlx(parts: dict[Part, TensorEntry], part: Part, columns: int) -> quant.QuantScheme | None:
    """The scheme of a matrix of MLX, by the words and the scales of a row; None if unsupported."""
    scales, words = parts.get(replace(part, extra="scale")), parts[part].shape[-1]
    if scales is None or not min(*scales.shape, columns):
        return None
    bits, group = 32 * words // columns, columns // scales.shape[-1]
    if replace(part, extra="zeros") in parts:
        return GROUPED.get(kind_of(bits, group, biases=True))
    return {(4, 32): quant.MXFP4, (8, 32): quant.MXFP8, (4, 16): quant.NVFP4}.get((bits, group))


def _stored_in_gguf(entry: TensorEntry) -> quant.QuantScheme | None:
    """The scheme of a tensor of a GGUF file; None for types that are not supported."""
    if entry.dtype in FLOATS:
        return quant.plain(entry.dtype)
    return IN_GGUF.get(entry.dtype_name.lower())


def _width(convention: Convention, up: TensorEntry, down: TensorEntry) -> int:
    """The intermediate size of packed projections."""
    return {"gptq": up.shape[-1], "awq": down.shape[-2]}.get(convention.packing, up.shape[-2])


def _scheme(
    dtype: torch.dtype | None, shape: tuple[int, ...], parts: dict[Part, TensorEntry], block: tuple[int, int] | None
) -> quant.QuantScheme | None:
    """The scheme that follows from dtypes and shapes of a down projection and its scales."""
    if dtype in FLOATS:
        return quant.plain(dtype)
    downs = {part: e for part, e in parts.items() if part.role is Role.EXPERT and part.projection == "down"}
    scales = [e for part, e in downs.items() if part.extra == "scale"]
    if dtype is None or not scales:
        return None
    scale = scales[0]
    grid = scale.shape[1:] if len(scale.shape) == 3 else scale.shape
    per_row = len(grid) > 0 and grid[0] == shape[0]
    if dtype is torch.float8_e4m3fn and per_row and grid[1:] == (shape[1] // GROUP,) and scale.dtype in E8M0:
        return quant.MXFP8
    if dtype is torch.float8_e4m3fn and block is None and math.prod(grid) in (1, shape[0]):
        return quant.FP8_CHANNEL if max(grid, default=1) == math.prod(grid) > 1 else quant.FP8_TENSOR
    if dtype in (torch.uint8, torch.int8) and per_row and len(grid) == 2 and grid[1] > 1:
        return {torch.float8_e4m3fn: quant.NVFP4}.get(
            scale.dtype or torch.uint8, quant.MXFP4 if scale.dtype in E8M0 else None
        )
    if dtype is torch.int8:
        sides = block or (128, 128)
        return quant.INT8_CHANNEL if math.prod(grid) == shape[0] else scheme_of_kind("int8_block", sides)
    return quant.weight_scheme(block or (128, 128)) if dtype is torch.float8_e4m3fn else None


def kind_of_scheme(scheme: quant.QuantScheme) -> str:
    """The value of `model.quant.weights` for a scheme; empty if there is none."""
    for kind in FORMATS:
        if scheme_of_kind(kind, scheme.block or (128, 128)) == scheme:
            return kind
    return ""


def _dtypes(parts: dict[Part, TensorEntry], extra: str) -> str:
    found = {entry.dtype_name for part, entry in parts.items() if (part.role, part.extra) == (Role.EXPERT, extra)}
    return " and ".join(sorted(found))
