"""Convert a checkpoint to another expert format, expert by expert, in constant memory.

Any layout that `load_layer` reads is written with the official names; tensors outside MoE blocks are copied byte for
byte. Each expert is decoded to f32 and quantised once; the error of its weights is reported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, WeightError
from moe_mk.files import read_json
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.checkpoint_plan import matrices
from moe_mk.weights.completeness import some
from moe_mk.weights.conversion_report import ConversionReport, ExpertError
from moe_mk.weights.dialects import quantization_config
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.input_scales import input_scale_names
from moe_mk.weights.inspect import LayerFacts, inspect_checkpoint
from moe_mk.weights.layer_reader import LayerReader
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors
from moe_mk.weights.names import CONVENTIONS, OFFICIAL, SCALED, Convention, Part, Role
from moe_mk.weights.requantise import slot_held_as
from moe_mk.weights.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.weights.scan import Progress
from moe_mk.weights.source import INDEX, SafetensorsSource, is_inside

SHARD_BYTES = 4 << 30
PIECE_BYTES = 64 << 20
REPORT = "conversion.json"
TARGETS = ("bf16", "fp8", "fp8_channel", "int8", "mxfp8", "mxfp4", "nvfp4")
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
    Raises ConfigError for an unknown type or a target in use, WeightError for a source that is not sound.
    """
    if to not in TARGETS:
        raise ConfigError(f"experts cannot be converted to {to!r}; use one of {', '.join(TARGETS)}")
    root, facts = Path(target), inspect_checkpoint(source)
    problems = [*facts.problems, *(line for layer in facts.layers for line in layer.problems)]
    if not facts.layers or problems:
        raise WeightError(f"{source} cannot be converted:" + "".join(f"\n  - {line}" for line in problems))
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} is in use; choose a folder that is empty or not there yet")
    report = ConversionReport(to, facts.num_bytes)
    with _partial_folder(root) as partial:
        _Conversion(SafetensorsSource(source), facts.layers, to, report, on_progress).write(partial, shard_bytes)
        _write_config(Path(source), partial, to)
        (partial / REPORT).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    return report


@contextmanager
def _partial_folder(root: Path) -> Iterator[Path]:
    """A new folder that is renamed to `root`, or removed on failure."""
    root = Path(os.path.realpath(root))  # resolves "." and keeps symbolic links
    partial = root.with_name(f"{root.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        if root.exists():
            root.rmdir()
        os.replace(partial, root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
        source: SafetensorsSource,
        layers: Sequence[LayerFacts],
        to: str,
        report: ConversionReport,
        on_progress: Progress | None,
    ) -> None:
        self.source, self.report, self.on_progress = source, report, on_progress
        self.scheme: QuantScheme = scheme_of_kind("fp8_block" if to == "fp8" else to)
        self.convention = OFFICIAL if to in ("fp8", "bf16") else SCALED
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
        shards = _shards(self.planned, shard_bytes)
        total = sum(t.num_bytes for t in self.planned)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            with SafetensorsWriter(root / name, shard, {"format": "pt"}) as file:
                for tensor in shard:
                    self._write_tensor(file, tensor)
                    self.report.bytes_written += tensor.num_bytes
                    if self.on_progress is not None:
                        self.on_progress("convert", self.report.bytes_written, total)
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_tensor(self, file: SafetensorsWriter, tensor: Planned) -> None:
        offset = 0
        for piece in self.makers.pop(tensor.name)():
            file.write(tensor.name, piece, offset)
            offset += piece.numel() * piece.element_size()
        assert offset == tensor.num_bytes, f"{tensor.name}: {offset} of {tensor.num_bytes} bytes"

    def _plan(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Iterator[Tensor]]
    ) -> None:
        self.planned.append(Planned(name, dtype, shape))
        self.makers[name] = make

    def _plan_block(self, layer: LayerFacts) -> None:
        spec, convention = layer.layer_spec(), CONVENTIONS[layer.convention]
        reader = LayerReader(self.source, layer.prefix, convention, spec, 0, 1)
        block = _Block(reader, replace(spec, scheme=self.scheme), convention, layer.layer)
        for local, each in expected_tensors(block.spec, self.convention).items():
            if each.optional:
                continue
            dtype = each.dtypes[0]
            if each.part.role in AS_STORED or each.part.extra == "bias":
                dtype = self._stored_dtype(block, each.part)
            make = self._maker(block, each.part)
            self._plan(layer.prefix + local, dtype, each.shape, make)

    def _copier(self, name: str) -> Callable[[], Iterator[Tensor]]:
        return lambda: _pieces(self.source.open(name))

    def _stored_dtype(self, block: _Block, part: Part) -> torch.dtype:
        if part.extra == "bias" and block.convention.fused:
            part = replace(part, projection="gate_up" if part.projection in ("gate", "up") else "down", expert=None)
        dtype = self.source.entry(block.reader.prefix + block.convention.spell(part)).dtype
        assert dtype is not None
        return dtype

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
            assert slot.biases is not None
            bias = {"gate": slot.biases.gate_I, "up": slot.biases.up_I, "down": slot.biases.down_H}[part.projection]
            assert bias is not None
            return bias
        q = _projection(slot, part.projection)
        tensor = q.scales if part.is_scale else q.global_scale if part.extra == "global" else q.values
        assert tensor is not None
        return tensor

    def _converted(self, block: _Block, part: Part) -> tuple[SlotWeights, ExpertError]:
        shared = part.expert is None
        old = block.reader.shared_experts() if part.expert is None else block.reader.expert(part.expert)
        _check(block.reader, f"layer {block.layer}, {'shared experts' if shared else f'expert {part.expert}'}")
        new = slot_held_as(old, self.scheme)
        moved = {p: _distance(_projection(old, p), _projection(new, p)) for p in ("gate", "up", "down")}
        error = ExpertError(block.layer, part.expert, **moved)
        self.report.errors.append(error)
        return new, error


def _dropped(source: SafetensorsSource, layer: LayerFacts, to: str) -> list[str]:
    """Contents without counterpart in the new checkpoint: calibrated activation scales."""
    names = input_scale_names({n.removeprefix(layer.prefix) for n in source.names() if n.startswith(layer.prefix)})
    why = f"experts in {to} round activations as they come, and config.json states so"
    return [f"layer {layer.layer}: {len(names)} input scales ({some(names)}): {why}"] if names else []


def _check(reader: LayerReader, what: str) -> None:
    """Raise WeightError for NaN codes and invalid scales."""
    problems = reader.content_problems(None)
    reader.values.clear()
    reader.scales.clear()
    if problems:
        raise WeightError(f"{what} is damaged:" + "".join(f"\n  - {line}" for line in problems))


def _projection(slot: SlotWeights, projection: str) -> QuantTensor:
    q = {"gate": slot.gate_IH, "up": slot.up_IH, "down": slot.down_HI}[projection]
    assert q is not None
    return q


def _distance(old: QuantTensor, new: QuantTensor) -> float:
    if old is new:
        return 0.0
    before = old.dequantize(torch.float32)
    size = float(before.norm())
    return float((new.dequantize(torch.float32) - before).norm()) / size if size else 0.0


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in runs of rows, so that a large tensor is never completely in memory."""
    if tensor.dim() == 0 or not tensor.numel():
        yield tensor
        return
    step = max(1, PIECE_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for start in range(0, len(tensor), step):
        yield tensor[start : start + step]


def _shards(planned: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Fill shards in order up to a size; a matrix and its scales stay together."""
    shards: list[list[Planned]] = [[]]
    for group in matrices(planned):
        if shards[-1] and sum(t.num_bytes for t in (*shards[-1], *group)) > shard_bytes:
            shards.append([])
        shards[-1] += group
    return shards


def _write_config(source: Path, root: Path, to: str) -> None:
    """Write config.json for the new format and copy the other small files of the checkpoint.

    Symbolic links to files outside the folder are skipped.
    """
    if not source.is_dir():
        return
    for file in sorted(source.iterdir()):
        own = file.is_file() and is_inside(source, file.name)
        if own and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json", REPORT):
            shutil.copy2(file, root / file.name)
    if not (source / "config.json").is_file():
        return
    config = read_json(source / "config.json")
    config.pop("quantization_config", None)
    quantization = quantization_config("fp8_block" if to == "fp8" else to, (128, 128))
    config |= {"quantization_config": quantization} if quantization else {"torch_dtype": "bfloat16"}
    (root / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
