"""The formats in which checkpoints store experts, by their names in settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, lcm

from moe_mk.errors import ConfigError
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8 import FP8_CHANNEL, FP8_TENSOR, FP8_128x128, weight_scheme
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_128x128, Int8Block
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.quant.plain import BF16, FP16, FP32
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Records, did_you_mean
from moe_mk.shapes import divisors_of


@dataclass(frozen=True)
class StoredFormat:
    """A number format of stored experts: one value of model.quant.weights, under which it is registered.

    Another distribution adds one by an entry point of `moe_mk.number_formats`.
    """

    scheme: QuantScheme
    """Of weights; of fp8_block and int8_block that with blocks of 128 x 128."""
    rounds: tuple[str, ...] = ()
    """Types of activations (model.quant.activations) that go with it, the usual one first; empty: the layer's dtype
    alone."""
    oracle: str = ""
    """The oracle that selects its backends; empty: that of the name of the format."""
    static: bool = False
    """Whether checkpoints may have static activation scales."""
    mixes: bool = False
    """Whether down projections may have it while gate and up have another one, and the other way round."""


PLAIN_KINDS = ("bf16", "fp16", "fp32")
BLOCK_KINDS = ("fp8_block", "int8_block")
WEIGHT_ONLY_KINDS = (*GROUPED, *GGUF)
"""Integers in groups and blocks of GGUF, of which activations are not rounded unless the settings say so."""
_WEIGHT_ONLY = ("none", "int8")
FORMATS: Records[StoredFormat] = Records(
    StoredFormat,
    "moe_mk.number_formats",
    {
        **{
            kind: StoredFormat(scheme, oracle="unquantized", mixes=True)
            for kind, scheme in zip(PLAIN_KINDS, (BF16, FP16, FP32), strict=True)
        },
        # In blocks, channels or whole matrices; activations in FP8 as the checkpoint states, or in the layer's dtype.
        "fp8_block": StoredFormat(FP8_128x128, ("fp8",), "fp8"),
        "fp8_channel": StoredFormat(FP8_CHANNEL, ("fp8",), "fp8", static=True),
        "fp8_tensor": StoredFormat(FP8_TENSOR, ("fp8",), "fp8", static=True),
        # Symmetric with a scale a channel or a block: W8A8 with a scale a token, or weight-only W8A16.
        "int8": StoredFormat(INT8_CHANNEL, ("int8",)),
        "int8_block": StoredFormat(INT8_128x128, ("int8",), "int8"),
        # e4m3 weights and activations with an E8M0 scale for 32.
        "mxfp8": StoredFormat(MXFP8, ("mxfp8",)),
        # Four bits with an E8M0 scale for 32 (gpt-oss, DeepSeek-V4); activations in MXFP8 or the layer's dtype.
        "mxfp4": StoredFormat(MXFP4, ("none", "fp8", "mxfp8", "mxfp4"), mixes=True),
        # Four bits with FP8 scales for 16 under one f32 scale; activations alike or in the layer's dtype.
        "nvfp4": StoredFormat(NVFP4, ("nvfp4",), static=True),
        # Of 4 or 8 bits with a scale, and optionally a zero point, for a group of columns (GPTQ, AWQ). Checkpoints
        # define no activations; `kernel.activations = int8` asks for integer products (W4A8, W8A8).
        **{kind: StoredFormat(scheme, _WEIGHT_ONLY, "int_wna16", mixes=True) for kind, scheme in GROUPED.items()},
        # Codes, scales and minima are adjacent.
        **{kind: StoredFormat(scheme, _WEIGHT_ONLY, "gguf", mixes=True) for kind, scheme in GGUF.items()},
    },
)
"""Every number format by its name in model.quant.weights."""
KINDS = tuple(kind for kind in FORMATS.built_in if kind not in WEIGHT_ONLY_KINDS)
"""All built-in ones but the weight-only ones."""


def scheme_of_kind(kind: str, block: tuple[int, int] = (128, 128), *, ue8m0: bool = False) -> QuantScheme:
    """The weight scheme of a type. block: of fp8_block and int8_block. ue8m0: of fp8_block.

    Raises ConfigError for an unknown type.
    """
    if kind == "fp8_block":
        return weight_scheme(block, ue8m0=ue8m0)
    if kind == "int8_block":
        return Int8Block(f"int8_{block[0]}x{block[1]}", *block)
    if kind in FORMATS:
        return FORMATS[kind].scheme
    raise ConfigError(f"no type of experts is called {kind!r}{did_you_mean(kind, tuple(FORMATS))}")


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
