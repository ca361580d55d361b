"""The formats in which checkpoints store experts, by their names in settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, lcm

from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8_block import weight_scheme
from moe_mk.quant.fp8_whole import FP8_CHANNEL, FP8_TENSOR
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.int8 import INT8_CHANNEL, Int8Block
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.quant.plain import BF16, FP16, FP32
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import did_you_mean
from moe_mk.shapes import divisors_of

PLAIN_KINDS = ("bf16", "fp16", "fp32")
BLOCK_KINDS = ("fp8_block", "int8_block")
STATIC_KINDS = ("fp8_tensor", "fp8_channel", "nvfp4")
"""Formats that support static activation scales."""
_FIXED: Mapping[str, QuantScheme] = {
    "bf16": BF16, "fp16": FP16, "fp32": FP32, "fp8_channel": FP8_CHANNEL, "fp8_tensor": FP8_TENSOR,
    "int8": INT8_CHANNEL, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4,
}  # fmt: skip
WEIGHT_ONLY_KINDS = (*GROUPED, *GGUF)
"""Integers in groups and blocks of GGUF, of which activations are not rounded unless the settings say so."""
KINDS = (*PLAIN_KINDS, *BLOCK_KINDS, *(kind for kind in _FIXED if kind not in PLAIN_KINDS))
"""All others."""


def scheme_of_kind(kind: str, block: tuple[int, int] = (128, 128), *, ue8m0: bool = False) -> QuantScheme:
    """The weight scheme of a type. block: of fp8_block and int8_block. ue8m0: of fp8_block.

    Raises ConfigError for an unknown type.
    """
    if kind == "fp8_block":
        return weight_scheme(block, ue8m0=ue8m0)
    if kind == "int8_block":
        return Int8Block(f"int8_{block[0]}x{block[1]}", *block)
    for schemes in (_FIXED, GROUPED, GGUF):
        if kind in schemes:
            return schemes[kind]
    raise ConfigError(f"no type of experts is called {kind!r}{did_you_mean(kind, (*KINDS, *WEIGHT_ONLY_KINDS))}")


LARGEST_ACTIVATION_GROUP = 128
"""Columns of a token that share a scale at most, where weights have larger groups."""


def activation_group(scheme: QuantScheme) -> int:
    """Columns of a token that share a scale where it is rounded to INT8 for weight-only weights: as of the weights.

    Blocks of GGUF have groups of 32; those of Q6_K, of 16, are taken two at a time.
    """
    if isinstance(scheme, Gguf):
        return max(scheme.group, 32)
    return min(scheme.columns, LARGEST_ACTIVATION_GROUP) if isinstance(scheme, Grouped) else LARGEST_ACTIVATION_GROUP


def edges_of(wide: Iterable[QuantScheme], down: Iterable[QuantScheme]) -> tuple[int, int]:
    """(rows, columns): where weights may be cut without dividing what shares a scale or a byte.

    Rows of gate and up and columns of down are cut. A scale of a whole row or matrix holds for each part.
    """
    rows = ((scheme.block or (1, 1))[0] for scheme in wide)
    columns = ((scheme.block or (1, 1))[1] for scheme in down)
    return lcm(*(side for side in rows if side != WHOLE)), lcm(*(side for side in columns if side != WHOLE))


def legal_tp_sizes(widths: Iterable[int], edges: tuple[int, int]) -> list[int]:
    """The tensor-parallel sizes that divide all intermediate sizes but 0 equally, at edges."""
    widths = [width for width in widths if width]
    cuts = [(width, side) for width in widths for side in edges]
    return [n for n in divisors_of(gcd(*widths)) if n == 1 or all(width // n % side == 0 for width, side in cuts)]
