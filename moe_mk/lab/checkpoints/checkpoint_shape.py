"""The shape of a checkpoint to write: sizes, routing, format, and its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.quant import BF16, Fp8Block, QuantScheme, weight_scheme
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import AFFINE, GROUPED
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.names import CONVENTIONS, GGUF_NAMES, OFFICIAL, SCALED, Convention

PACKED: Mapping[str, tuple[str, str]] = {"gptq": ("gptq", "int4_g128"), "awq": ("awq", "int4_g128_zp")}
"""Layouts other than that of compressed-tensors for integers in groups: the packing and the format."""
MIXED = "q4_k_m"
"""Q4_K with down projections in Q6_K, as in most layers of a Q4_K_M file."""
MXFP4_GGUF = "mxfp4_gguf"
"""MXFP4 in a GGUF file, as in those of gpt-oss."""
GGUF_FILES = (*GGUF, MIXED, MXFP4_GGUF)
"""Formats that are written as GGUF files."""
FORMATS = (
    "fp8", "bf16", "fp8_channel", "fp8_tensor", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4",
    *PACKED, *(name for name in GROUPED if name not in AFFINE), *GGUF_FILES,
)  # fmt: skip

SWIGLU_LIMIT = 10.0
"""Of DeepSeek-V4."""
HASHED: Mapping[str, Any] = {"num_groups": 1, "top_k_groups": 1, "top_k": 6, "routed_scaling_factor": 1.5}
"""What DeepSeek-V4's layers have in place of DeepSeek-V3's numbers; to be given with `hash_vocabulary`."""


@dataclass(frozen=True)
class CheckpointShape:
    """MoE layers in the official DeepSeek-V3 layout; the defaults are one full layer of that model.

    hash_vocabulary: tokens of the vocabulary, of layers that choose experts by token id as DeepSeek-V4's first ones do:
    a table in place of the bias, and that model's config.json. They have no groups; None is DeepSeek-V3.

    quant: "fp8" (e4m3, one scale a block), "bf16", or another type of `FORMATS`.
    power_of_two_scales: f32 scales that are powers of two, as newer official checkpoints have ("scale_fmt": "ue8m0").
    Raises ConfigError listing everything that does not fit together, with group counts that would.
    """

    num_experts: int = 256
    hidden_size: int = 7168
    intermediate_size: int = 2048
    num_shared_experts: int = 1
    layers: tuple[int, ...] = (3,)
    top_k: int = 8
    num_groups: int = 8
    top_k_groups: int = 4
    routed_scaling_factor: float = 2.5
    quant: str = "fp8"
    block: tuple[int, int] = (128, 128)
    power_of_two_scales: bool = False
    hash_vocabulary: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "block", tuple(self.block))
        positive = ("num_experts", "hidden_size", "intermediate_size", "top_k", "num_groups", "top_k_groups")
        wrong = [f"{name}={getattr(self, name)} must be at least 1" for name in positive if getattr(self, name) < 1]
        if self.num_shared_experts < 0:
            wrong.append(f"num_shared_experts={self.num_shared_experts} must not be negative")
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) < len(self.layers):
            wrong.append(f"layers={self.layers} must be one or more different layers from 0 on")
        if self.quant not in FORMATS:
            wrong.append(f"quant={self.quant!r} must be one of {', '.join(FORMATS)}")
        if len(self.block) != 2 or min(self.block) < 1:
            wrong.append(f"block={self.block} must be two positive numbers")
        if self.hash_vocabulary is not None and self.hash_vocabulary < 1:
            wrong.append(f"hash_vocabulary={self.hash_vocabulary} must be at least 1")
        if self.hash_vocabulary is not None and self.num_groups != 1:
            wrong.append(f"num_groups={self.num_groups} has no part in a choice by token id; use num_groups=1")
        wrong += [] if wrong else self._routing_problems()
        if wrong:
            raise ConfigError("; ".join(wrong))

    @property
    def scheme(self) -> QuantScheme:
        """How expert weights are stored; scales of FP8 blocks are f32 either way."""
        if self.quant == "bf16":
            return BF16
        if self.quant != "fp8":
            return scheme_of_kind(self.kind, self.block)
        scheme = weight_scheme(self.block)
        return Fp8Block(scheme.name, *self.block, ue8m0=True) if self.power_of_two_scales else scheme

    @property
    def convention(self) -> Convention:
        """How the tensors are called."""
        if self.quant in PACKED or self.quant in GROUPED:
            return CONVENTIONS[PACKED[self.quant][0] if self.quant in PACKED else "compressed_tensors"]
        if self.is_gguf:
            return GGUF_NAMES
        return OFFICIAL if self.quant in ("fp8", "bf16") else SCALED

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file is written."""
        return self.quant in GGUF_FILES

    @property
    def down(self) -> str | None:
        """The format of down projections, where it differs."""
        return "q6_k" if self.quant == MIXED else None

    @property
    def kind(self) -> str:
        """The value of `model.quant.weights`."""
        named = {"fp8": "fp8_block", MIXED: "q4_k", MXFP4_GGUF: "mxfp4"} | {
            quant: kind for quant, (_, kind) in PACKED.items()
        }
        return named.get(self.quant, self.quant)

    def layer_spec(self) -> LayerSpec:
        """Return the specification of a layer that a reader must expect."""
        scheme = weight_scheme(self.block) if self.quant == "fp8" else self.scheme
        return LayerSpec(
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            scheme,
            num_shared_experts=self.num_shared_experts,
            shared_intermediate_size=self.num_shared_experts * self.intermediate_size,
            has_gate_bias=self.hash_vocabulary is None,
            # As in Kimi-K2-Thinking, where only the routed experts are packed.
            down_scheme=None if self.down is None else scheme_of_kind(self.down),
            shared_scheme=BF16 if self.convention.packing == "compressed_tensors" else None,
            table=None if self.hash_vocabulary is None else (self.hash_vocabulary, self.top_k),
        )

    def hf_config(self) -> dict[str, object]:
        """The keys of a DeepSeek-V3 config.json, or of a DeepSeek-V4 one, that concern the MoE layers."""
        keys: dict[str, object] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "vocab_size": self.hash_vocabulary,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": SWIGLU_LIMIT,
        }
        if self.hash_vocabulary is None:
            keys = {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "n_group": self.num_groups,
                "topk_group": self.top_k_groups,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "first_k_dense_replace": min(self.layers),
                "moe_layer_freq": 1,
            }
        packing = self.convention.packing
        quantization = (
            {}
            if self.is_gguf
            else quantization_config(self.kind, self.block, ue8m0=self.power_of_two_scales, packing=packing)
        )
        return {
            **keys,
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.intermediate_size,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": self.num_shared_experts,
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_hidden_layers": max(self.layers) + 1,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            **({"quantization_config": quantization} if quantization else {}),
        }

    def _routing_problems(self) -> list[str]:
        if _groups_fit(self.num_experts, self.num_groups, self.top_k_groups, self.top_k):
            return []
        group_size = self.num_experts / self.num_groups
        what = (
            f"num_experts={self.num_experts} in num_groups={self.num_groups} groups of {group_size:g}, of which "
            f"top_k_groups={self.top_k_groups} are kept, cannot give top_k={self.top_k} experts; groups must be equal, "
            "hold at least 2 experts where there are several, and the kept ones at least top_k"
        )
        fit = [
            g
            for g in range(1, self.num_experts + 1)
            if _groups_fit(self.num_experts, g, min(g, self.top_k_groups), self.top_k)
        ]
        others = [
            e
            for e in range(max(1, self.num_experts - self.num_groups), self.num_experts + 4 * self.num_groups)
            if _groups_fit(e, self.num_groups, self.top_k_groups, self.top_k)
        ]
        hints = [f"num_groups={' or '.join(map(str, fit))}"] if fit else [f"top_k of at most {self.num_experts}"]
        hints += [f"num_experts={' or '.join(map(str, others[:3]))}"] if others else []
        return [f"{what}. Use {', or '.join(hints)}"]


def groups_of(num_experts: int, top_k: int = 8) -> dict[str, Any]:
    """The arguments of a `CheckpointShape` for a number of experts: DeepSeek-V3's 8 groups, or the most that fit."""
    top_k = max(1, min(top_k, num_experts))
    fit = [g for g in range(1, 9) if _groups_fit(num_experts, g, min(g, 4), top_k)]
    groups = max(fit, default=1)
    return {"num_groups": groups, "top_k_groups": min(groups, 4), "top_k": top_k}


def _groups_fit(num_experts: int, num_groups: int, top_k_groups: int, top_k: int) -> bool:
    size, rest = divmod(num_experts, num_groups)
    return rest == 0 and (size >= 2 or num_groups == 1) and top_k_groups <= num_groups and top_k_groups * size >= top_k
