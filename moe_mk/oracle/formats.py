"""One oracle for each type of quantised weights, with the two functions that select and build a backend for it.

    decision = oracle.fp8.select_fp8_moe_backend(problem)  # UnsupportedError with every reason if no pair is eligible
    kernel = oracle.fp8.make_fp8_moe_kernel(decision, parts)

`oracle.fp8`, `oracle.gguf` and so on are this module.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.oracle.assemble import assemble
from moe_mk.oracle.base import ORACLES, Oracle, RoundedOracle
from moe_mk.oracle.decide import decide
from moe_mk.prepare_finalize.base import TransportTraits
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme


@ORACLES.register("fp8")
class Fp8Oracle(RoundedOracle):
    """FP8 in blocks, channels or whole matrices; activations in FP8 as the checkpoint states, or the layer's dtype."""

    name: ClassVar[str] = "fp8"
    stored: ClassVar[frozenset[str]] = frozenset({"fp8_block", "fp8_channel", "fp8_tensor"})


@ORACLES.register("gguf")
class GgufOracle(RoundedOracle):
    """Blocks of GGUF, weight-only: codes, scales and minima are adjacent; down projections may have another type."""

    name: ClassVar[str] = "gguf"
    stored: ClassVar[frozenset[str]] = frozenset(GGUF)


@ORACLES.register("int8")
class Int8Oracle(RoundedOracle):
    """Symmetric INT8 with a scale a channel or a block: W8A8 with a scale a token, or weight-only W8A16."""

    name: ClassVar[str] = "int8"
    stored: ClassVar[frozenset[str]] = frozenset({"int8", "int8_block"})


@ORACLES.register("int_wna16")
class IntWna16Oracle(RoundedOracle):
    """Integers of 4 or 8 bits with a scale, and optionally a zero point, for a group of columns (GPTQ, AWQ).

    Checkpoints define no activations; `model.quant.activations = int8` asks for integer products (W4A8, W8A8).
    """

    name: ClassVar[str] = "int_wna16"
    stored: ClassVar[frozenset[str]] = frozenset(GROUPED)


@ORACLES.register("mxfp4")
class Mxfp4Oracle(RoundedOracle):
    """Four-bit weights with an E8M0 scale for 32 (gpt-oss, DeepSeek-V4); activations in MXFP8 or the layer's dtype."""

    name: ClassVar[str] = "mxfp4"
    stored: ClassVar[frozenset[str]] = frozenset({"mxfp4"})


@ORACLES.register("mxfp8")
class Mxfp8Oracle(RoundedOracle):
    """e4m3 weights and activations with an E8M0 scale for 32."""

    name: ClassVar[str] = "mxfp8"
    stored: ClassVar[frozenset[str]] = frozenset({"mxfp8"})


@ORACLES.register("nvfp4")
class Nvfp4Oracle(RoundedOracle):
    """Four-bit weights with FP8 scales for 16 under one f32 scale; activations alike or in the layer's dtype."""

    name: ClassVar[str] = "nvfp4"
    stored: ClassVar[frozenset[str]] = frozenset({"nvfp4"})


@ORACLES.register("unquantized")
class UnquantizedOracle(Oracle):
    """Experts in the layer's own floating point: tokens travel and are multiplied in it."""

    name: ClassVar[str] = "unquantized"
    stored: ClassVar[frozenset[str]] = frozenset({"bf16", "fp16", "fp32"})

    @classmethod
    def compute_scheme(cls, problem: Problem, experts: ExpertsTraits) -> QuantScheme:
        return problem.dtype

    @classmethod
    def wire_scheme(cls, problem: Problem, transport: TransportTraits, compute: QuantScheme) -> QuantScheme:
        return problem.dtype


select_fp8_moe_backend = partial(decide, oracle=Fp8Oracle)
select_gguf_moe_backend = partial(decide, oracle=GgufOracle)
select_int8_moe_backend = partial(decide, oracle=Int8Oracle)
select_int_wna16_moe_backend = partial(decide, oracle=IntWna16Oracle)
select_mxfp4_moe_backend = partial(decide, oracle=Mxfp4Oracle)
select_mxfp8_moe_backend = partial(decide, oracle=Mxfp8Oracle)
select_nvfp4_moe_backend = partial(decide, oracle=Nvfp4Oracle)
select_unquantized_moe_backend = partial(decide, oracle=UnquantizedOracle)
make_fp8_moe_kernel = make_gguf_moe_kernel = make_int8_moe_kernel = make_int_wna16_moe_kernel = assemble
make_mxfp4_moe_kernel = make_mxfp8_moe_kernel = make_nvfp4_moe_kernel = make_unquantized_moe_kernel = assemble
