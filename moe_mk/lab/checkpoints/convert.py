"""Convert a checkpoint to another expert format, expert by expert, in constant memory.

Any layout that `load_layer` reads is written with the official names; tensors outside MoE blocks are copied byte for
byte. Each expert is decoded to f32 and quantised once; the error of its weights is reported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.config.hf import SECOND, section_of
from moe_mk.errors import ConfigError, WeightError
from moe_mk.experts.held import is_kept, requantised, slot_held_as
from moe_mk.files import read_json
from moe_mk.lab.checkpoints.checkpoint_plan import matrices
from moe_mk.lab.checkpoints.checkpoint_shape import GGUF_FILES, MIXED, MXFP4_GGUF, PACKED
from moe_mk.lab.checkpoints.conversion_report import ConversionReport, ExpertError
from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.lab.checkpoints.gguf_checkpoint import FILE, GgufTensor, gguf_from_hf, layer_tensors, write_gguf
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.lab.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.lab.files import partial_folder
from moe_mk.quant.gguf import Q6_K
from moe_mk.quant.grouped import AFFINE, GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.completeness import raise_if, some
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.gguf_metadata import hf_from_gguf
from moe_mk.weights.gguf_source import GgufSource, is_gguf, open_source
from moe_mk.weights.input_scales import ENDS
from moe_mk.weights.inspect import LayerFacts, inspect_checkpoint
from moe_mk.weights.layer_reader import LayerReader
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors
from moe_mk.weights.names import CONVENTIONS, OFFICIAL, SCALED, Convention, Part, Role
from moe_mk.weights.scan import Contents, Progress
from moe_mk.weights.source import INDEX, SafetensorsSource, TensorSource, in_memory, is_inside

SHARD_BYTES = 4 << 30
PIECE_BYTES = 64 << 20
REPORT = "conversion.json"
_INTEGERS = tuple(name for name in GROUPED if name not in AFFINE)
TARGETS = ("bf16", "fp8", "fp8_channel", "int8", "mxfp8", "mxfp4", "nvfp4", *PACKED, *_INTEGERS, *GGUF_FILES)
AS_STORED = (Role.ROUTER, Role.BIAS, Role.LOGIT_BIAS, Role.TABLE)
"""Tensors of the router, which are copied."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress | None = None,
) -> ConversionReport:
    """Write a checkpoint with its experts in another format; the source is not changed.

    to: one of TARGETS; "fp8" is blocks of 128 x 128 with f32 scales. The folder `target` must be empty or absent. The
    checkpoint is written to a new folder `target.*.partial` and renamed at the end, so that an interrupted conversion
    never looks complete; the folder remains only if the process is killed.
    Raises ConfigError for an unknown type, a target in use and layers that are not converted, WeightError for a source
    that is not sound.
    """
    if to not in TARGETS:
        raise ConfigError(f"experts cannot be converted to {to!r}; use one of {', '.join(TARGETS)}")
    root, facts = Path(target), inspect_checkpoint(source)
    problems = [*facts.problems, *(line for layer in facts.layers for line in layer.problems)]
    if not facts.layers or problems:
        raise WeightError(f"{source} cannot be converted:" + "".join(f"\n  - {line}" for line in problems))
    for layer in facts.layers:
        kept = {"experts without a gate": not layer.gated, "a gate of the shared experts": layer.has_shared_gate,
                "latent projections": layer.latent_size is not None, "a norm of the input": layer.has_input_norm,
                "shared experts that the router scores": layer.num_fused_shared_experts > 0,
                "a bias of tokens of images": layer.has_image_bias,
                "MLX's names, under which routers and attention are packed too": layer.convention.startswith("mlx"),
                f"shared experts in {layer.shared}": layer.shared == "fp8_block"}  # fmt: skip
        if odd := [what for what, found in kept.items() if found]:
            raise ConfigError(f"layer {layer.layer} of {source} has {' and '.join(odd)}, which are not converted")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} is in use; choose a folder that is empty or not there yet")
    report = ConversionReport(to, facts.num_bytes)
    with partial_folder(root, last=("config.json", INDEX)) as partial:
        tensors = open_source(source)
        if isinstance(tensors, GgufSource):
            others = len(GgufSource(source, everything=True).names()) - len(tensors.names())
            why = "their names in other formats are not known here"
            report.dropped += [f"{others} tensors outside of MoE blocks: {why}"] if others else []
        if to in GGUF_FILES:
            _ToGguf(tensors, to, report, on_progress).write(partial, facts.layers)
        else:
            _Conversion(tensors, facts.layers, to, report, on_progress).write(partial, shard_bytes)
            _write_config(Path(source), partial, to)
        (partial / REPORT).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    return report


@dataclass
class _Block:
    """One MoE block of the source and its conversion."""

    reader: LayerReader
    spec: LayerSpec
    convention: Convention
    layer: int | None
    slots: dict[int | None, tuple[SlotWeights, ExpertError]] = field(default_factory=dict)


class _Conversion:
    """Plans every tensor of the new checkpoint with the function that makes it, then writes shard after shard."""

    def __init__(
        self,
        source: SafetensorsSource | GgufSource,
        layers: Sequence[LayerFacts],
        to: str,
        report: ConversionReport,
        on_progress: Progress | None,
    ) -> None:
        self.source, self.report, self.on_progress = source, report, on_progress
        self.scheme: QuantScheme = scheme_of_kind(kind_of_target(to))
        self.convention = OFFICIAL if to in ("fp8", "bf16") else SCALED
        if to in PACKED or to in GROUPED:
            self.convention = CONVENTIONS[PACKED[to][0] if to in PACKED else "compressed_tensors"]
        # As in Kimi-K2-Thinking, where only the routed experts are packed.
        self.shared_scheme = BF16 if self.convention.packing == "compressed_tensors" else None
        self.makers: dict[str, Callable[[], Iterator[Tensor]]] = {}
        self.planned: list[Planned] = []
        inside = tuple(layer.prefix for layer in layers)
        for layer in layers:
            self._plan_block(layer)
            report.dropped += _dropped(source, layer, to)
        for name in source.names():
            if not name.startswith(inside):
                entry = source.entry(name)
                if entry.dtype is None:
                    raise WeightError(f"{name} is {entry.dtype_name}, which cannot be copied")
                self._plan(name, entry.dtype, entry.shape, self._copier(name))

    def write(self, root: Path, shard_bytes: int) -> None:
        """Write all shards, then the index."""
        shards: list[list[Planned]] = [[]]
        for group in matrices(self.planned):  # a matrix and its scales stay together
            if shards[-1] and sum(t.num_bytes for t in (*shards[-1], *group)) > shard_bytes:
                shards.append([])
            shards[-1] += group
        total = sum(t.num_bytes for t in self.planned)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            with SafetensorsWriter(root / name, shard, {"format": "pt"}) as file:
                for tensor in shard:
                    offset = 0
                    for piece in self.makers.pop(tensor.name)():
                        file.write(tensor.name, piece, offset)
                        offset += piece.numel() * piece.element_size()
                    assert offset == tensor.num_bytes, f"{tensor.name}: {offset} of {tensor.num_bytes} bytes"
                    self.report.bytes_written += tensor.num_bytes
                    if self.on_progress is not None:
                        self.on_progress("convert", self.report.bytes_written, total)
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _plan(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Iterator[Tensor]]
    ) -> None:
        self.planned.append(Planned(name, dtype, shape))
        self.makers[name] = make

    def _plan_block(self, layer: LayerFacts) -> None:
        spec, convention = layer.layer_spec(), CONVENTIONS[layer.convention]
        reader = LayerReader(self.source, layer.prefix, convention, spec, 0, 1)
        new = replace(spec, scheme=self.scheme, down_scheme=None, shared_scheme=self.shared_scheme)
        block = _Block(reader, new, convention, layer.layer)
        for local, each in expected_tensors(block.spec, self.convention).items():
            if each.optional and not (self.convention.packing == "gptq" and each.part.extra == "order"):
                continue
            dtype = each.dtypes[0]
            if each.part.extra == "scale" and self.convention.packing:
                dtype = self._scale_dtype(block)
            if each.part.role in AS_STORED or each.part.extra == "bias":
                dtype = self._stored_dtype(block, each.part)
            make = self._maker(block, each.part)
            gguf = convention.packing == "gguf"
            prefix = self.convention.prefix.replace("{N}", str(layer.layer)) if gguf else layer.prefix
            self._plan(prefix + local, dtype, each.shape, make)

    def _copier(self, name: str) -> Callable[[], Iterator[Tensor]]:
        return lambda: _pieces(self.source.open(name))

    def _stored_dtype(self, block: _Block, part: Part) -> torch.dtype:
        if part.extra == "bias" and (block.convention.fused or block.convention.stacked):
            both = "gate_up" if block.convention.fused and part.projection in ("gate", "up") else part.projection
            part = replace(part, projection=both, expert=None)
        dtype = self.source.entry(block.reader.prefix + block.convention.spell(part)).dtype
        assert dtype is not None
        return dtype

    def _scale_dtype(self, block: _Block) -> torch.dtype:
        """f16 in GPTQ and AWQ; otherwise that of the source if its groups are kept, else bf16."""
        if self.convention.packing in ("gptq", "awq"):
            return torch.float16
        source, convention = block.reader, block.convention
        if not is_kept(source.spec.scheme, self.scheme):
            return torch.bfloat16
        part = Part(Role.EXPERT, "up", 0, "scale")
        return self.source.entry(source.prefix + convention.spell(part)).dtype or torch.bfloat16

    def _maker(self, block: _Block, part: Part) -> Callable[[], Iterator[Tensor]]:
        if part.role in AS_STORED:
            return self._copier(block.reader.prefix + block.convention.spell(part))
        return lambda: iter((self._tensor_of(block, part),))

    def _tensor_of(self, block: _Block, part: Part) -> Tensor:
        """One tensor of a projection. An expert is converted at its first tensor and released after its last."""
        if part.expert not in block.slots:
            block.slots.clear()
            block.slots[part.expert] = self._converted(block, part)
        slot, _ = block.slots[part.expert]
        if part.extra == "bias":
            bias = slot.bias(part.projection)
            assert bias is not None
            return bias
        q = slot.matrices[part.projection]
        if self.convention.packing and part.extra != "plain":
            found = pack(self.convention.packing, q)[part.extra]
            return found.to(self._scale_dtype(block)) if part.extra == "scale" else found
        tensor = {"scale": q.scales, "global": q.global_scale}.get(part.extra, q.values)
        assert tensor is not None
        return tensor

    def _converted(self, block: _Block, part: Part) -> tuple[SlotWeights, ExpertError]:
        shared = part.expert is None
        old = block.reader.mlp(part.expert).changed(in_memory)
        _check(block.reader, f"layer {block.layer}, {'shared experts' if shared else f'expert {part.expert}'}")
        new = slot_held_as(old, self.shared_scheme if shared and self.shared_scheme is not None else self.scheme)
        moved = {p: _distance(old.matrices[p], new.matrices[p]) for p in ("gate", "up", "down")}
        error = ExpertError(block.layer, part.expert, **moved)
        self.report.errors.append(error)
        return new, error


class _ToGguf:
    """Writes the MoE blocks as `model.gguf`; no other tensor has a name there. Experts are read once a projection."""

    def __init__(
        self, source: SafetensorsSource | GgufSource, to: str, report: ConversionReport, on_progress: Progress | None
    ) -> None:
        self.source, self.report, self.on_progress = source, report, on_progress
        self.scheme = scheme_of_kind(kind_of_target(to))
        self.down = Q6_K if to == MIXED else None
        self.errors: dict[tuple[int | None, int | None], ExpertError] = {}

    def write(self, folder: Path, layers: Sequence[LayerFacts]) -> None:
        """Write the file, and note what is left out."""
        architecture, metadata = gguf_from_hf(_hf_of(self.source), self.source.where)
        tensors = [tensor for layer in layers for tensor in self._layer(layer)]
        inside = tuple(layer.prefix for layer in layers)
        others = [name for name in self.source.names() if not name.startswith(inside)]
        if others:
            self.report.dropped.append(
                f"{len(others)} tensors outside of MoE blocks, e.g. {others[0]}: not written to GGUF"
            )
        self.report.dropped += [line for layer in layers for line in _dropped(self.source, layer, self.report.to)]
        self.report.bytes_written = write_gguf(folder / FILE, architecture, metadata, tensors)
        self.report.errors += self.errors.values()

    def _layer(self, layer: LayerFacts) -> list[GgufTensor]:
        spec, convention = layer.layer_spec(), CONVENTIONS[layer.convention]
        if layer.layer is None or spec.table is not None:
            raise ConfigError(f"layer {layer.layer} of {self.source.where}: GGUF names hold no such layer")
        reader = LayerReader(self.source, layer.prefix, convention, spec, 0, 1)
        new = replace(spec, scheme=self.scheme, down_scheme=self.down, shared_scheme=None)

        def matrix(part: Part) -> QuantTensor:
            slot = reader.mlp(part.expert).changed(in_memory)
            _check(reader, f"layer {layer.layer}, expert {part.expert}")
            old = slot.matrices[part.projection]
            found = requantised(old, new.scheme_of(part.role, part.projection))
            error = self.errors.setdefault((layer.layer, part.expert), ExpertError(layer.layer, part.expert))
            setattr(error, part.projection, _distance(old, found))
            if self.on_progress is not None:
                self.on_progress("convert", len(self.errors), spec.num_experts + 1)
            return found

        def vector(part: Part) -> Tensor:
            if part.extra == "bias":
                bias = reader.mlp(part.expert).bias(part.projection)
                assert bias is not None
                return bias
            return self.source.read(layer.prefix + convention.spell(part))

        return layer_tensors(new, layer.layer, matrix, vector)


def _hf_of(source: SafetensorsSource | GgufSource) -> dict[str, Any]:
    """The config.json of a checkpoint, or the keys of one from the metadata of a GGUF model."""
    if isinstance(source, GgufSource):
        return hf_from_gguf(source.metadata, source.where, source.names())
    file = (source.path if source.path.is_dir() else source.path.parent) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{source.where} has no config.json, from which the metadata of a GGUF file follow")
    found: dict[str, Any] = read_json(file)
    return found


def kind_of_target(to: str) -> str:
    """The value of `model.quant.weights` of a target."""
    if to in (MIXED, MXFP4_GGUF):
        return "q4_k" if to == MIXED else "mxfp4"
    return PACKED[to][1] if to in PACKED else "fp8_block" if to == "fp8" else to


def _dropped(source: TensorSource, layer: LayerFacts, to: str) -> list[str]:
    """Contents without counterpart in the new checkpoint: calibrated activation scales."""
    inside = [name.removeprefix(layer.prefix) for name in source.names() if name.startswith(layer.prefix)]
    names = sorted(name for name in inside if name.endswith(ENDS))
    why = f"experts in {to} round activations as they come, and config.json states so"
    return [f"layer {layer.layer}: {len(names)} input scales ({some(names)}): {why}"] if names else []


def _check(reader: LayerReader, what: str) -> None:
    """Raise WeightError for NaN codes and invalid scales."""
    problems = reader.content_problems(None)
    reader.contents = Contents()
    raise_if(f"{what} is damaged", problems)


def _distance(old: QuantTensor, new: QuantTensor) -> float:
    if old is new:
        return 0.0
    before = old.dequantize(torch.float32)
    size = float(before.norm())
    return float((new.dequantize(torch.float32) - before).norm()) / size if size else 0.0


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in runs of rows, so that a large tensor is never completely in memory."""
    if tensor.dim() == 0 or not tensor.numel():
        yield in_memory(tensor)
        return
    step = max(1, PIECE_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for start in range(0, len(tensor), step):
        yield in_memory(tensor[start : start + step])


def _write_config(source: Path, root: Path, to: str) -> None:
    """Write config.json for the new format and copy the other small files of the checkpoint.

    Symbolic links to files outside the folder are skipped. Of a GGUF model the keys follow from its metadata.
    """
    from_gguf = is_gguf(source)
    for file in sorted(source.iterdir()) if source.is_dir() and not from_gguf else ():
        own = file.is_file() and is_inside(source, file.name)
        if own and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json", SECOND, REPORT):
            shutil.copy2(file, root / file.name)
    if not from_gguf and not (source / "config.json").is_file():
        return
    packing = PACKED[to][0] if to in PACKED else ""
    quantization = quantization_config(kind_of_target(to), (128, 128), packing=packing)
    stated = {"quantization_config": quantization} if quantization else {"torch_dtype": "bfloat16"}
    config = _hf_of(GgufSource(source)) if from_gguf else read_json(source / "config.json")
    config = _without_format(config, is_plain=not quantization) | stated
    (root / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _without_format(config: Mapping[str, Any], *, is_plain: bool) -> dict[str, Any]:
    """A config.json without a format of experts, also in the section of a text model; is_plain: in bf16 throughout."""
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    kept |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if is_plain and key in kept}
    section = section_of(kept)
    return kept if section is None else kept | {section: _without_format(kept[section], is_plain=is_plain)}
