"""How a checkpoint stores its experts, and what it expects activations to be rounded to."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from moe_mk.config.base import Settings
from moe_mk.quant.fp8 import FP8_TOKEN, activation_scheme, fp8_static
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import INT8_TOKEN, int8_groups
from moe_mk.quant.kinds import FORMATS, PLAIN_KINDS, WEIGHT_ONLY_KINDS, activation_group, edges_of, scheme_of_kind
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import nvfp4_tokens
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import did_you_mean

SHARED = ("same", *PLAIN_KINDS, "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", *GROUPED)


class QuantConfig(Settings):
    """How the checkpoint stores the experts."""

    weights: str = Field(default="bf16", json_schema_extra={"enum": [*FORMATS.built_in]})
    """A name of `moe_mk.quant.kinds.FORMATS`."""
    block: tuple[int, int] = (128, 128)
    """(rows, columns) of a weight that share a scale, for fp8_block and int8_block; the other types have their own."""
    scale: Literal["float32", "ue8m0"] = "float32"
    """Of fp8_block, and of FP8 activations with mxfp4."""
    down: str | None = Field(default=None, json_schema_extra={"enum": [*FORMATS.built_in, None]})
    """The type of down projections where it differs from that of gate and up, as in many GGUF files; None: the same."""
    shared: str = Field(default="same", json_schema_extra={"enum": [*SHARED]})
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

    @field_validator("weights", "down")
    @classmethod
    def _of_experts(cls, kind: str | None) -> str | None:
        if kind is not None and kind not in FORMATS:
            raise ValueError(f"no type of experts is called {kind!r}{did_you_mean(kind, tuple(FORMATS))}")
        return kind

    @field_validator("shared")
    @classmethod
    def _of_shared(cls, shared: str) -> str:
        if shared not in SHARED:
            raise ValueError(f"shared experts cannot be stored as {shared!r}{did_you_mean(shared, SHARED)}")
        return shared

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        if self.down is not None and not (FORMATS[self.weights].mixes and FORMATS[self.down].mixes):
            mixed = [kind for kind, each in FORMATS.items() if each.mixes]
            raise ValueError(f"down={self.down!r} with {self.weights!r}: only {', '.join(mixed)} can be mixed")
        return self

    @model_validator(mode="after")
    def _activations_fit(self) -> Self:
        possible = ("none", *FORMATS[self.weights].rounds)
        if self.activations not in ("auto", *possible):
            raise ValueError(
                f"activations={self.activations!r} do not go with {self.weights} weights; "
                f"use auto, {', '.join(dict.fromkeys(possible))}"
            )
        if self.gptq_v2 and not self.weights.endswith("_zp"):
            raise ValueError(f"gptq_v2 is about zero points, which {self.weights} weights do not have; drop it")
        if self.input_scale is not None and not FORMATS[self.weights].static:
            raise ValueError(f"input_scale={self.input_scale} means nothing for {self.weights} weights; drop it")
        if self.hidden_scale is not None and (self.input_scale is None or self.weights == "nvfp4"):
            raise ValueError(
                f"hidden_scale={self.hidden_scale} goes with the input_scale of FP8 weights; give both, or drop it"
            )
        return self

    @property
    def may_be_int8(self) -> bool:
        """Whether the weights go with INT8 activations."""
        return "int8" in FORMATS[self.weights].rounds

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
        habit = (*FORMATS[self.weights].rounds, "none")[0]
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
