"""Write a checkpoint in the official DeepSeek-V3 layout from seeded normals, for machines without the real weights.

Every tensor has its own seed, so that the files do not depend on the number of threads. Standard deviations keep the
outputs of RMS-normed inputs near 1 (0.02 at DeepSeek-V3 width). Scales differ between blocks by more than quantising
explains, and gate biases are negative, because only then a router that masks groups with 0 instead of -inf fails.
Layers that choose experts by token id (DeepSeek-V4) get a random table.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, WeightError
from moe_mk.files import INDEX_BYTES, read_json
from moe_mk.jobs import Threads, all_results
from moe_mk.lab.checkpoints.checkpoint_plan import RECIPE, matrices, plan_shards, planned_tensors, recipe_of
from moe_mk.lab.checkpoints.checkpoint_shape import CheckpointShape
from moe_mk.lab.checkpoints.gguf_checkpoint import FILE, GgufTensor, gguf_from_hf, layer_tensors, write_gguf
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.lab.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.lab.files import partial_folder
from moe_mk.quant import WHOLE, BlockedScheme, QuantTensor
from moe_mk.text import amount
from moe_mk.weights.gguf_source import GgufSource
from moe_mk.weights.names import Part, Role
from moe_mk.weights.safetensors_header import read_header
from moe_mk.weights.scan import Progress
from moe_mk.weights.source import INDEX, SafetensorsSource

DRAWS = 1 << 20
"""Random numbers drawn at a time."""


def table_strips(random: np.random.Generator, shape: tuple[int, ...], num_experts: int) -> Iterator[Tensor]:
    """Rows of the table (X, K), int64, in order: K different experts of each token, every choice equally likely."""
    vocabulary, top_k = shape
    height = max(1, DRAWS // num_experts)
    for start in range(0, vocabulary, height):
        draws = random.random((min(height, vocabulary - start), num_experts), dtype=np.float32)
        yield torch.from_numpy(np.ascontiguousarray(draws.argsort(axis=1)[:, :top_k]).astype(np.int64))


SHARD_BYTES = 512 << 20
STRIP_ELEMENTS = 1 << 20
SPARE_BYTES = 64_000_000
PARTIAL = ".checkpoint"
GATE_UP_GAIN, DOWN_GAIN, ROUTER_GAIN = 1.7, 0.9, 1.0
BIAS_MEAN, BIAS_STD = -0.8, 0.1
NVFP4_AMAX = 16.0
"""The largest activation that NVFP4 represents with the input scales written here; tokens are N(0, 1)."""


def write_checkpoint(
    directory: str | os.PathLike[str],
    shape: CheckpointShape,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> int:
    """Write shards, config.json and, last, the index; returns the bytes of all tensors.

    Constant memory: a few MB per thread. Files are written to a temporary folder and moved at the end, so that an
    interrupted run leaves none. An earlier checkpoint of this function is replaced at the end, or removed first where
    the disk does not hold both; other files are never changed (ConfigError). threads: None uses as many as torch.
    on_progress is called with "write".
    Raises ConfigError if the disk is too small, with both numbers.
    """
    if shape.is_gguf:
        return _write_gguf(Path(directory), shape, seed, on_progress)
    root = Path(directory)
    shards = plan_shards(shape, shard_bytes)
    total = sum(t.num_bytes for shard in shards for t in shard)
    recipe = recipe_of(shape, seed)
    _expect_own(root)
    if _expect_room(root, total) < total + SPARE_BYTES:
        _remove(root)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress("write", done, total)

    with partial_folder(root, last=("config.json", INDEX), name=PARTIAL) as partial:
        for name, shard in zip(names, shards, strict=True):
            with SafetensorsWriter(partial / name, shard, {"format": "pt", RECIPE: recipe}) as file:
                _write_shard(file, shard, shape, seed, threads or torch.get_num_threads(), report)
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total, RECIPE: recipe}, "weight_map": weight_map}
        (partial / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _remove(root)
    return total


def recipe_in(directory: str | os.PathLike[str]) -> str | None:
    """Return the recipe with which `write_checkpoint` wrote a directory; None without one."""
    root = Path(directory)
    try:
        if (root / FILE).is_file():
            found = GgufSource(root / FILE).metadata.get(RECIPE)
        else:
            found = read_json(root / INDEX, INDEX_BYTES)["metadata"].get(RECIPE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, WeightError):
        return None
    return None if found is None else str(found)


def is_complete(directory: str | os.PathLike[str], shape: CheckpointShape, seed: int = 0) -> bool:
    """Whether a directory holds the whole checkpoint of this shape and seed, by its index and its file sizes."""
    root = Path(directory)
    try:
        if shape.is_gguf:
            source = GgufSource(root / FILE)
            whole = all(source.entry(name).missing_bytes == 0 for name in source.names())
            return whole and source.metadata.get(RECIPE) == recipe_of(shape, seed)
        index = read_json(root / INDEX, INDEX_BYTES)
        if index["metadata"].get(RECIPE) != recipe_of(shape, seed) or not (root / "config.json").is_file():
            return False
        tensors = SafetensorsSource(root)
        wanted = planned_tensors(shape)
        return all(tensors.entry(t.name).missing_bytes == 0 for t in wanted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, WeightError):
        return False


def _write_gguf(root: Path, shape: CheckpointShape, seed: int, on_progress: Progress | None) -> int:
    """`model.gguf`, under a temporary name until it is whole."""
    if (root / FILE).exists() and GgufSource(root / FILE).metadata.get(RECIPE) is None:
        raise ConfigError(f"{root / FILE} was not written here; choose an empty directory")
    if foreign := [name for name in ("config.json", INDEX) if (root / name).exists()]:
        raise ConfigError(f"{root} holds {foreign[0]} of another checkpoint; choose an empty directory")
    spec = shape.layer_spec()
    names = {Role.ROUTER: "mlp.gate.weight", Role.BIAS: "e_score_correction_bias"}

    def tensors_of(layer: int) -> list[GgufTensor]:
        def strip(part: Part, rows: int, columns: int) -> Tensor:
            label = names.get(part.role, f"{part.role.value}.{part.expert}.{part.projection}_proj")
            random = np.random.Generator(np.random.SFC64(seed_of(seed, f"{layer}.{label}")))
            return next(_strips(random, label, (rows, columns), rows)).clone()

        def matrix(part: Part) -> QuantTensor:
            width = spec.intermediate_size if part.role is Role.EXPERT else spec.shared_intermediate_size
            n, k = (spec.hidden_size, width) if part.projection == "down" else (width, spec.hidden_size)
            return spec.scheme_of(part.role, part.projection).quantize(strip(part, n, k))

        def vector(part: Part) -> Tensor:
            if part.role is Role.BIAS:
                return strip(part, 1, spec.num_experts)[0]
            return strip(part, spec.num_experts, spec.hidden_size)

        return layer_tensors(spec, layer, matrix, vector)

    tensors = [tensor for layer in shape.layers for tensor in tensors_of(layer)]
    total, done = sum(math.prod(t.shape) for t in tensors), 0

    def reported(tensor: GgufTensor) -> GgufTensor:
        def make() -> NDArray[np.uint8]:
            nonlocal done
            data = tensor.make()
            done += data.nbytes
            if on_progress is not None:
                on_progress("write", done, total)
            return data

        return replace(tensor, make=make)

    _expect_room(root, total)
    architecture, metadata = gguf_from_hf(shape.hf_config(), str(root))
    metadata |= {RECIPE: recipe_of(shape, seed)}
    with partial_folder(root, name=PARTIAL) as partial:
        write_gguf(partial / FILE, architecture, metadata, [reported(t) for t in tensors])
    return total


def _write_shard(
    file: SafetensorsWriter,
    shard: Sequence[Planned],
    shape: CheckpointShape,
    seed: int,
    threads: int,
    report: Callable[[int], None],
) -> None:
    calls = [partial(_write_matrix, file, group, shape, seed) for group in matrices(shard)]
    all_results(Threads(threads), calls, report)


def _write_matrix(file: SafetensorsWriter, group: list[Planned], shape: CheckpointShape, seed: int) -> int:
    weight, scheme = group[0], shape.scheme
    random = np.random.Generator(np.random.SFC64(seed_of(seed, weight.name)))
    if weight.name.endswith(shape.convention.table):
        _write_strips(file, weight, table_strips(random, weight.shape, shape.num_experts))
    elif shape.convention.packing and len(group) > 1:
        _write_packed(file, group, shape, random)
    elif len(group) == 1:
        _write_strips(file, weight, _strips(random, weight.name, weight.shape, 1))
    else:
        assert isinstance(scheme, BlockedScheme)
        n, k = weight.shape[0], scheme.logical_columns(weight.shape[1])
        # The scale of a whole matrix requires all of its values.
        together = n if WHOLE in scheme.block[:1] or scheme.has_global_scale else scheme.rows
        strips = _strips(random, weight.name, (n, k), together)
        _write_quantised(file, group, scheme, strips, _spreads(random, shape))
        for each in group:
            if each.name.endswith(".input_scale"):  # of block scales up to 448 and values up to 6
                file.write(each.name, torch.full(each.shape, NVFP4_AMAX / (448 * 6), dtype=each.dtype, device="cpu"))
    return sum(t.num_bytes for t in group)


def _write_packed(
    file: SafetensorsWriter, group: list[Planned], shape: CheckpointShape, random: np.random.Generator
) -> None:
    """One matrix of packed integers, drawn whole."""
    convention = shape.convention
    local = {t.name: t.name[t.name.index("experts.") :].removeprefix("shared_") for t in group}
    local = {t.name: ("shared_" if "shared_experts." in t.name else "") + local[t.name] for t in group}
    parts = {name: part for name, short in local.items() if (part := convention.parse(short)) is not None}
    first = parts[group[0].name]
    width = shape.num_shared_experts * shape.intermediate_size if first.expert is None else shape.intermediate_size
    n, k = (shape.hidden_size, width) if first.projection == "down" else (width, shape.hidden_size)
    q = shape.scheme.quantize(next(_strips(random, group[0].name, (n, k), n)))
    assert q.scales is not None
    q = replace(
        q, scales=(q.scales.to(torch.float32) * _spread(random, q.scales.shape, whole=False)).to(q.scales.dtype)
    )
    held = pack(convention.packing, q)
    for tensor in group:
        part = parts[tensor.name]
        file.write(tensor.name, held[part.extra].to(tensor.dtype))


def _write_strips(file: SafetensorsWriter, weight: Planned, strips: Iterator[Tensor]) -> None:
    offset = 0
    for strip in strips:
        piece = strip.to(weight.dtype)
        file.write(weight.name, piece, offset)
        offset += piece.numel() * piece.element_size()


def _write_quantised(
    file: SafetensorsWriter,
    group: list[Planned],
    scheme: BlockedScheme,
    strips: Iterator[Tensor],
    spread: Callable[[torch.Size], Tensor | float],
) -> None:
    """Values strip by strip, then their scales in the dtype of the file."""
    scales: list[Tensor] = []

    def values() -> Iterator[Tensor]:
        for strip in strips:
            q = scheme.quantize(strip)
            assert q.scales is not None
            scales.append(q.scales.to(torch.float32) * spread(q.scales.shape))
            if q.global_scale is not None:
                file.write(group[2].name, q.global_scale)
            yield q.values

    _write_strips(file, group[0], values())
    file.write(group[1].name, torch.cat(scales).to(group[1].dtype))


def _spreads(random: np.random.Generator, shape: CheckpointShape) -> Callable[[torch.Size], Tensor | float]:
    """Factors of scales; 1 for NVFP4, whose FP8 scales differ already and must stay in range."""
    if shape.quant == "nvfp4":
        return lambda size: 1.0
    whole = shape.power_of_two_scales or shape.quant in ("mxfp4", "mxfp8")
    return lambda size: _spread(random, size, whole=whole)


def _strips(random: np.random.Generator, name: str, shape: tuple[int, ...], rows_together: int) -> Iterator[Tensor]:
    """Normally distributed rows, a few blocks at a time; the buffer is reused for every strip."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    mean, std = _distribution(name, columns)
    height = rows_together * max(1, STRIP_ELEMENTS // (rows_together * columns))
    buffer = np.empty((min(height, rows), columns), dtype=np.float32)
    for start in range(0, rows, height):
        strip = buffer[: min(height, rows - start)]
        random.standard_normal(out=strip, dtype=np.float32)
        strip *= np.float32(std)
        strip += np.float32(mean)
        yield torch.from_numpy(strip)


def _distribution(name: str, columns: int) -> tuple[float, float]:
    if name.endswith("e_score_correction_bias"):
        return BIAS_MEAN, BIAS_STD
    gain = GATE_UP_GAIN
    if name.endswith("mlp.gate.weight"):
        gain = ROUTER_GAIN
    elif "down_proj" in name:
        gain = DOWN_GAIN
    return 0.0, gain / math.sqrt(columns)


def _spread(random: np.random.Generator, shape: torch.Size, *, whole: bool) -> Tensor:
    """Factors that make the sizes of blocks differ: 2^u, u in (-0.5, 0.5), or one of 1/2, 1, 2."""
    exponents = random.integers(-1, 2, size=tuple(shape)) if whole else random.uniform(-0.5, 0.5, size=tuple(shape))
    return torch.from_numpy(np.exp2(exponents).astype(np.float32))


def seed_of(seed: int, name: str) -> int:
    """The seed of one tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


def _expect_room(root: Path, total: int) -> int:
    """Bytes that are free while an earlier checkpoint is kept.

    Raises ConfigError, before any file is created or removed, if the disk is too small without one.
    """
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    without = free + sum(file.lstat().st_size for file in root.glob("*.safetensors"))
    if without < total + SPARE_BYTES:
        raise ConfigError(
            f"the checkpoint needs {amount(total)} and {amount(SPARE_BYTES)} to spare, {root} has {amount(without)} "
            "free; write fewer experts or choose another directory"
        )
    return free


def _expect_own(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; choose a directory")
    shards = sorted(root.glob("*.safetensors"))
    foreign = [path.name for path in shards if not _is_own(path)]
    if not shards:
        foreign = [name for name in ("config.json", INDEX) if (root / name).exists()]
    if foreign:
        raise ConfigError(
            f"{root} holds {len(foreign)} files that were not written here, e.g. {foreign[0]}; "
            "choose an empty directory"
        )


def _is_own(path: Path) -> bool:
    try:
        return RECIPE in read_header(path).metadata
    except WeightError:
        return False


def _remove(root: Path) -> None:
    """Remove an earlier checkpoint, its index first."""
    for path in (root / INDEX, root / "config.json", *sorted(root.glob("*.safetensors"))):
        path.unlink(missing_ok=True)
