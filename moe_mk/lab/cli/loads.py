"""Recorded expert loads, JSON, NumPy, safetensors and SGLang's .pt of which only tensors are read, and traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from moe_mk.errors import ConfigError
from moe_mk.files import INDEX_BYTES, named_in_utf8, read_json
from moe_mk.lab.files import expect_small_header
from moe_mk.lab.trace.foreign import read_npy, read_pt
from moe_mk.lab.trace.importers import import_trace
from moe_mk.lab.trace.routing import Phase, RoutingTrace, TraceError

NAMES = ("logical_count", "load", "expert_load", "counts")
"""Names of the counts in recordings; SGLang uses "logical_count"."""


@dataclass(frozen=True)
class Recording:
    """Recorded loads to compute a placement for."""

    source: Path
    loads_NXE: NDArray[np.float64]
    """Tokens of [windows, layers, experts]."""
    groups: int
    """Expert groups of the router."""
    trace: RoutingTrace | None = None
    """The experts of every token, if they were recorded."""


def read_recording(
    loads: Path | None, trace: Path | None, phase: str | None, num_experts: int | None, groups: int | None
) -> Recording:
    """Read loads or a trace. A trace of several steps is split into two windows.

    groups: None: those of the trace, or 1. Raises ConfigError, or TraceError for a trace that cannot be read.
    """
    if (loads is None) == (trace is None):
        both, example = "--loads and --trace are both given; use one", "moe-mk place --loads counts.json --gpus 16"
        raise ConfigError(both if loads else f"give --loads or --trace, as in {example}")
    if loads is not None:
        if only := [name for name, value in (("--phase", phase), ("--experts", num_experts)) if value is not None]:
            raise ConfigError(f"{' and '.join(only)} only apply to --trace")
        return Recording(loads, read_loads(loads), groups or 1)
    assert trace is not None
    full = import_trace(trace, num_experts=num_experts)
    part = full if phase is None else full.filter(phase=cast(Phase, phase))
    if part.num_rows == 0:
        raise TraceError(f"trace {trace} has no tokens{'' if phase is None else f' of phase {phase}'} to place for")
    return Recording(trace, part.windows(2), groups or full.facts.num_groups, part)


def read_loads(file: Path) -> NDArray[np.float64]:
    """Tokens of [windows, layers, experts]; a file of [layers, experts] is one window, of [experts] one layer.

    Raises ConfigError with the contents of the file.
    """
    if not file.is_file():
        raise ConfigError(f"--loads {file} is not a file")
    readers = {".json": _from_json, ".npy": read_npy, ".safetensors": _from_safetensors, ".pt": _from_recording}
    if file.suffix not in readers:
        raise ConfigError(f"--loads {file} ends in {file.suffix!r}, known are {', '.join(readers)}")
    try:
        loads = np.asarray(readers[file.suffix](file), np.float64)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, SafetensorError) as problem:
        raise ConfigError(f"--loads {file} cannot be read: {problem}") from problem
    if not 1 <= loads.ndim <= 3 or loads.size == 0:
        raise ConfigError(f"--loads {file} has shape {loads.shape}, expected [[windows,] layers,] experts")
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ConfigError(f"--loads {file} has values from {loads.min()} to {loads.max()}; counts are 0 or more")
    return loads.reshape((1,) * (3 - loads.ndim) + loads.shape)


def _from_json(file: Path) -> object:
    content = read_json(file, INDEX_BYTES)
    return _named(content, file) if isinstance(content, dict) else content


def _from_safetensors(file: Path) -> object:
    expect_small_header(file)
    with named_in_utf8(file) as path, safe_open(path, framework="pt", device="cpu") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return _named(tensors, file).to(torch.float64).numpy()  # type: ignore[attr-defined]


def _from_recording(file: Path) -> object:
    """A recording of SGLang's expert distribution recorder: a dict with "logical_count" [windows, layers, experts].

    Only tensors and plain containers are read; a file that would execute code is rejected.
    """
    try:
        content = read_pt(file)
    except TraceError as problem:
        raise ConfigError(f"--loads {problem}") from problem
    counts = _named(content, file) if isinstance(content, dict) else content
    if not isinstance(counts, torch.Tensor):
        raise ConfigError(f"--loads {file} holds a {type(counts).__name__} where the counts should be a tensor")
    return counts.to(torch.float64).numpy()


def _named(content: dict[str, object], file: Path) -> object:
    """The entry with the counts: the one with a known name, or the only one."""
    for name in NAMES:
        if name in content:
            return content[name]
    if len(content) == 1:
        return next(iter(content.values()))
    raise ConfigError(f"--loads {file} holds {sorted(content)[:8]}, none of them called {' or '.join(NAMES)}")
