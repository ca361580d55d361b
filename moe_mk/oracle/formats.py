"""One oracle for each type of quantised weights, with the two functions that select and build a backend for it.

    decision = oracle.fp8.select_fp8_moe_backend(problem)  # UnsupportedError with every reason if no pair is eligible
    kernel = oracle.fp8.make_fp8_moe_kernel(decision, parts)

`oracle.fp8`, `oracle.gguf` and so on are this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from moe_mk.oracle.assemble import assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED

_STORED: Mapping[str, Iterable[str]] = {
    # In blocks, channels or whole matrices; activations in FP8 as the checkpoint states, or in the layer's dtype.
    "fp8": ("fp8_block", "fp8_channel", "fp8_tensor"),
    # Weight-only: codes, scales and minima are adjacent; down projections may have another type.
    "gguf": GGUF,
    # Symmetric with a scale a channel or a block: W8A8 with a scale a token, or weight-only W8A16.
    "int8": ("int8", "int8_block"),
    # Of 4 or 8 bits with a scale, and optionally a zero point, for a group of columns (GPTQ, AWQ). Checkpoints define
    # no activations; `kernel.activations = int8` asks for integer products (W4A8, W8A8).
    "int_wna16": GROUPED,
    # Four bits with an E8M0 scale for 32 (gpt-oss, DeepSeek-V4); activations in MXFP8 or the layer's dtype.
    "mxfp4": ("mxfp4",),
    # e4m3 weights and activations with an E8M0 scale for 32.
    "mxfp8": ("mxfp8",),
    # Four bits with FP8 scales for 16 under one f32 scale; activations alike or in the layer's dtype.
    "nvfp4": ("nvfp4",),
    # The layer's own floating point: tokens travel and are multiplied in it.
    "unquantized": ("bf16", "fp16", "fp32"),
}
"""The values of model.quant.weights by oracle."""


def _declared(name: str, stored: Iterable[str]) -> type[Oracle]:
    parts = {"name": name, "stored": frozenset(stored), "__module__": __name__}
    return ORACLES.register(name)(type(f"Oracle_{name}", (Oracle,), parts))


_OF = {name: _declared(name, stored) for name, stored in _STORED.items()}
select_fp8_moe_backend = partial(decide, oracle=_OF["fp8"])
select_gguf_moe_backend = partial(decide, oracle=_OF["gguf"])
select_int8_moe_backend = partial(decide, oracle=_OF["int8"])
select_int_wna16_moe_backend = partial(decide, oracle=_OF["int_wna16"])
select_mxfp4_moe_backend = partial(decide, oracle=_OF["mxfp4"])
select_mxfp8_moe_backend = partial(decide, oracle=_OF["mxfp8"])
select_nvfp4_moe_backend = partial(decide, oracle=_OF["nvfp4"])
select_unquantized_moe_backend = partial(decide, oracle=_OF["unquantized"])
make_fp8_moe_kernel = make_gguf_moe_kernel = make_int8_moe_kernel = make_int_wna16_moe_kernel = assemble
make_mxfp4_moe_kernel = make_mxfp8_moe_kernel = make_nvfp4_moe_kernel = make_unquantized_moe_kernel = assemble
