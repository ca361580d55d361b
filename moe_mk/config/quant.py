"""How a checkpoint stores its experts, and what it expects activations to be rounded to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from moe_mk.config.base import Settings
from moe_mk.quant.fp8_block import activation_scheme
from moe_mk.quant.fp8_whole import FP8_TOKEN, fp8_static
from moe_mk.quant.int8 import INT8_TOKEN, int8_groups
from moe_mk.quant.kinds import PLAIN_KINDS, STATIC_KINDS, WEIGHT_ONLY_KINDS, activation_group, edges_of, scheme_of_kind
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import nvfp4_tokens
from moe_mk.quant.tensor import QuantScheme

Integers = Literal[
    "int4_g32", "int4_g64", "int4_g128", "int4_row", "int4_g32_zp", "int4_g64_zp", "int4_g128_zp", "int4_row_zp",
    "int8_g32", "int8_g64", "int8_g128", "int8_row", "int8_g32_zp", "int8_g64_zp", "int8_g128_zp", "int8_row_zp",
    "int4_g32_affine", "int4_g64_affine", "int4_g128_affine", "int8_g32_affine", "int8_g64_affine", "int8_g128_affine",
]  # fmt: skip
Stored = Literal[
    "bf16", "fp16", "fp32", "fp8_block", "fp8_channel", "fp8_tensor", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4",
    Integers, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs",
]  # fmt: skip
_ROUNDED: Mapping[str, tuple[str, ...]] = {
    "fp8_block": ("fp8",), "fp8_channel": ("fp8",), "fp8_tensor": ("fp8",), "int8": ("int8",), "int8_block": ("int8",),
    "mxfp8": ("mxfp8",), "mxfp4": ("none", "fp8", "mxfp8", "mxfp4"), "nvfp4": ("nvfp4",),
    **dict.fromkeys(WEIGHT_ONLY_KINDS, ("none", "int8")),
}  # fmt: skip
"""The activation types of each weight type other than "none", the default first."""


class QuantConfig(Settings):
    """How the checkpoint stores the experts."""

    weights: Stored = "bf16"
    block: tuple[int, int] = (128, 128)
    """(rows, columns) of a weight that share a scale, for fp8_block and int8_block; the other types have their own."""
    scale: Literal["float32", "ue8m0"] = "float32"
    """Of fp8_block, and of FP8 activations with mxfp4."""
    down: Stored | None = None
    """The type of down projections where it differs from that of gate and up, as in many GGUF files; None: the same."""
    shared: Literal[
        "same", "bf16", "fp16", "fp32", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", Integers
    ] = "same"  # fmt: skip
    """The type of shared experts: that of the routed ones, or another one; FP8 blocks of `block` with `scale`."""
    activations: Literal["auto", "none", "fp8", "int8", "mxfp8", "mxfp4", "nvfp4"] = "auto"
    """What the checkpoint expects activations to be rounded to; auto is the habit of the type: MXFP4 and
    weight-only types (int4_*, int8_g*, int8_row*, GGUF) round nothing, the others round to their own format. int8 is
    one scale per token for int8 and int8_block; for weight-only types one for each of their groups, of at most 128. fp8
    with mxfp4 is one scale per 128 columns of a token, as dispatch in FP8 sends them."""
    activation_scales: Literal["static", "dynamic"] | None = None
    """What the configuration of the checkpoint states about them; None: nothing. Its tensors decide (input_scale)."""
    gptq_v2: bool = False
    """Zero points of GPTQ are stored as they are (checkpoint_format gptq_v2) instead of less one."""
    input_scale: float | None = Field(default=None, gt=0)
    """A calibrated scale of activations: of whole FP8 tensors, or above the scales of NVFP4. None finds FP8 scales
    token by token, and is 1 for NVFP4 where a layer is not loaded from a checkpoint."""
    hidden_scale: float | None = Field(default=None, gt=0)
    """A calibrated FP8 scale of the rows between the two products of an expert; None is input_scale."""

    @field_validator("block")
    @classmethod
    def _block_sides(cls, block: tuple[int, int]) -> tuple[int, int]:
        if min(block) < 1:
            raise ValueError("both sides must be positive")
        return block

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        mixed = (*WEIGHT_ONLY_KINDS, "mxfp4", *PLAIN_KINDS)
        if self.down is not None and not {self.weights, self.down} <= set(mixed):
            raise ValueError(f"down={self.down!r} with {self.weights!r}: only {', '.join(mixed)} can be mixed")
        return self

    @model_validator(mode="after")
    def _activations_fit(self) -> Self:
        possible = ("none", *_ROUNDED.get(self.weights, ()))
        if self.activations not in ("auto", *possible):
            raise ValueError(
                f"activations={self.activations!r} do not go with {self.weights} weights; "
                f"use auto, {', '.join(dict.fromkeys(possible))}"
            )
        if self.gptq_v2 and not self.weights.endswith("_zp"):
            raise ValueError(f"gptq_v2 is about zero points, which {self.weights} weights do not have; drop it")
        if self.input_scale is not None and self.weights not in STATIC_KINDS:
            raise ValueError(f"input_scale={self.input_scale} means nothing for {self.weights} weights; drop it")
        if self.hidden_scale is not None and (self.input_scale is None or self.weights == "nvfp4"):
            raise ValueError(
                f"hidden_scale={self.hidden_scale} goes with the input_scale of FP8 weights; give both, or drop it"
            )
        return self

    @property
    def may_be_int8(self) -> bool:
        """Whether the weights go with INT8 activations."""
        return "int8" in _ROUNDED.get(self.weights, ())

    @property
    def is_fp8(self) -> bool:
        return self.weights == "fp8_block"

    @property
    def kind(self) -> str:
        """Name of the format in traits of experts backends: plain, or the type."""
        return "plain" if self.weights in PLAIN_KINDS else self.weights

    @property
    def weight_scheme(self) -> QuantScheme:
        return scheme_of_kind(self.weights, self.block, ue8m0=self.scale == "ue8m0")

    @property
    def down_scheme(self) -> QuantScheme:
        return self.weight_scheme if self.down is None else scheme_of_kind(self.down)

    @property
    def shared_scheme(self) -> QuantScheme | None:
        """The scheme of shared experts where it is stated; None: those of the routed ones."""
        if self.shared == "same":
            return None
        return scheme_of_kind(self.shared, self.block, ue8m0=self.scale == "ue8m0")

    @property
    def shared_activations(self) -> QuantScheme | None:
        """Scheme to which shared experts of a stated type round activations; None for the layer's own dtype."""
        blocks = activation_scheme(self.block[1], ue8m0=self.scale == "ue8m0")
        tokens = dict.fromkeys(("fp8_channel", "fp8_tensor"), FP8_TOKEN)
        return {"fp8_block": blocks, "mxfp8": MXFP8, **tokens}.get(self.shared)

    @property
    def activation_scheme(self) -> QuantScheme | None:
        """Activation scheme that the checkpoint was trained or calibrated with, or None for the layer's own dtype."""
        return self.rounded_to(self.activations)

    def rounded_to(self, activations: str) -> QuantScheme | None:
        """The scheme of a type of activations; None for the layer's own dtype."""
        habit = _ROUNDED.get(self.weights, ("none",))[0]
        rounded = habit if activations == "auto" else activations
        if rounded == "none":
            return None
        if self.is_fp8:
            return activation_scheme(self.block[1], ue8m0=self.scale == "ue8m0")
        if rounded == "fp8" and self.weights == "mxfp4":
            return activation_scheme(128, ue8m0=self.scale == "ue8m0")
        if rounded == "fp8":
            return FP8_TOKEN if self.input_scale is None else fp8_static(self.input_scale, self.hidden_scale)
        if rounded == "nvfp4":
            return nvfp4_tokens(self.input_scale or 1.0)
        if rounded == "int8" and self.weights in WEIGHT_ONLY_KINDS:
            return int8_groups(activation_group(self.weight_scheme), activation_group(self.down_scheme))
        return {"mxfp8": MXFP8, "mxfp4": MXFP4}.get(rounded, INT8_TOKEN)

    @property
    def edges(self) -> tuple[int, int]:
        """(rows, columns): where a weight may be cut, see `edges_of`."""
        shared = [scheme for scheme in (self.shared_scheme,) if scheme is not None]
        return edges_of([self.weight_scheme, *shared], [self.down_scheme, *shared])
