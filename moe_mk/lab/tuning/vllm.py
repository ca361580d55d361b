"""Read vLLM's tuned files: E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json.

Keys are numbers of tokens, values Triton parameters; "triton_version" is an optional key. Format of vLLM 0.33.
Parameters serve inside the tuned range only: a file with small sizes alone once cost prefill 2 % (vllm-project/vllm
issue 52192).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_mk.config.tuned import MOST_TOKENS
from moe_mk.errors import ConfigError
from moe_mk.files import read_json

NAME = re.compile(
    r"^E=(?P<experts>\d+),N=(?P<inner>\d+),device_name=(?P<device>[^,]+)"
    r"(?:,dtype=(?P<dtype>[^,]+?))?(?:,block_shape=\[(?P<rows>\d+), ?(?P<columns>\d+)\])?\.json$"
)
VERSION = "triton_version"


@dataclass(frozen=True)
class VllmTuned:
    """The contents of one tuned file of vLLM."""

    num_experts: int
    intermediate_size: int
    """N of the file's name: of one TP shard."""
    device: str
    dtype: str | None
    """None: unquantised."""
    block: tuple[int, int] | None
    triton_version: str | None
    parameters: Mapping[int, Mapping[str, Any]]
    """By number of tokens, ascending."""

    def at(self, tokens: int) -> Mapping[str, Any] | None:
        """The parameters of the nearest size on a logarithmic scale; None outside the tuned range."""
        sizes = list(self.parameters)
        if not sizes or not sizes[0] <= tokens <= sizes[-1]:
            return None
        return self.parameters[min(sizes, key=lambda size: abs(math.log(size / tokens)))]


def read_vllm(path: str | Path) -> VllmTuned:
    """Read one of vLLM's files. Raises ConfigError for another name or content."""
    path = Path(path)
    named = NAME.match(path.name)
    if named is None:
        raise ConfigError(
            f"{path.name} is not the name of a tuned file of vLLM: E=..,N=..,device_name=..[,dtype=..].json"
        )
    try:
        data = dict(read_json(path))
        version = data.pop(VERSION, None)
        sizes = {int(tokens): dict(parameters) for tokens, parameters in data.items()}
        if not sizes or min(sizes) < 1 or max(sizes) > MOST_TOKENS:
            raise ValueError(f"it has no sizes, or one that is not positive or above {MOST_TOKENS}")
    except (OSError, TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} contains no tuned parameters of vLLM: {problem}") from None
    block = (int(named["rows"]), int(named["columns"])) if named["rows"] else None
    return VllmTuned(
        num_experts=int(named["experts"]),
        intermediate_size=int(named["inner"]),
        device=named["device"],
        dtype=named["dtype"],
        block=block,
        triton_version=version,
        parameters=dict(sorted(sizes.items())),
    )
