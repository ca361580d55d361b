"""The router of a configuration: which experts a token selects, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moe_mk.config.base import Settings
from moe_mk.shapes import divisors_of

if TYPE_CHECKING:
    from moe_mk.config.moe import MoEConfig

TRAINING_KINDS = ("noisy_topk", "expert_capacity")
"""Values of `router.kind` that layers which serve refuse."""


class RouterConfig(Settings):
    """The selection of experts for each token."""

    kind: str = "topk"
    """topk: the best experts, in one group or several. For training only (`moe_mk.lab.training`): noisy_topk adds
    trainable Gaussian noise to the logits; expert_capacity limits the tokens of each expert. Or the name of a plugin of
    `moe_mk.routers`, which reads the settings below."""
    top_k: int = Field(ge=1, le=2**16)
    scoring_func: Literal[
        "sigmoid", "softmax", "sqrtsoftplus", "logit_sigmoid", "logit_softmax", "masked_softmax"
    ] = "softmax"  # fmt: skip
    """The function from logits to scores; sqrtsoftplus, the root of ln(1 + exp(x)), is DeepSeek-V4's. logit_sigmoid and
    logit_softmax: logits plus the correction bias select (Kolibri 1). masked_softmax: logits select, a softmax over the
    expert and lower ones within two percent weighs it (PhiMoE)."""
    num_expert_group: int = Field(default=1, ge=1)
    topk_group: int = Field(default=1, ge=1)
    has_correction_bias: bool = False
    """Whether a bias is added to the scores for selection only (noaux_tc), not for the routing weights."""
    has_logit_bias: bool = False
    """Whether a bias is added to the logits, for both selection and routing weights."""
    renormalize: bool = True
    group_score: Literal["auto", "two_best"] = "auto"
    """The score of a group of experts. auto: the sum of its two best with a correction bias, else its best. two_best:
    the sum of the two best also without a bias, as in Mistral 4."""
    has_expert_scale: bool = False
    """Whether each expert has a factor, by which its routing weights are multiplied after renormalisation, as in
    Gemma 4."""
    weight_on_input: bool = False
    """Whether the routing weight multiplies the input of the expert, not its output, as in Llama 4; with top_k = 1."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    hash_vocabulary: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Vocabulary size of a layer that selects experts by a table of token ids (DeepSeek-V4's first layers), or None."""
    first_image_token: int | None = Field(default=None, ge=0)
    """Token ids from this one on are image tokens; their experts are selected with a separate bias (`bias_vl`)."""
    router_dtype: Literal["float32", "model"] = "float32"
    """float32: gate and scores in f32, as in transformers. model: in the layer's dtype, as in DeepSeek's code. The two
    select different experts for several percent of tokens."""
    noise_std: float = Field(default=1.0, ge=0)
    """noisy_topk: standard deviation of the noise before it is scaled by softplus(x @ noise.T); 0 adds none."""
    capacity_factor: float = Field(default=1.25, gt=0)
    """expert_capacity: an expert takes ceil(capacity_factor * T * K / E) of a rank's T tokens."""
    num_choices: int | None = Field(default=None, ge=1)
    """expert_capacity: experts that a token tries, best first; None is all, top_k drops what does not fit at once."""


def router_problems(config: MoEConfig) -> Iterator[str]:
    """Yield the settings of the router that exclude each other or do not fit the model, each with a remedy."""
    model, r = config.model, config.router
    experts, fused = model.num_experts, model.num_fused_shared_experts
    if r.top_k > experts:
        yield f"router.top_k={r.top_k} exceeds model.num_experts={experts}; lower top_k"
    if r.topk_group > r.num_expert_group:
        yield (
            f"router.topk_group={r.topk_group} exceeds router.num_expert_group={r.num_expert_group}; "
            f"keep at most {r.num_expert_group} groups"
        )
    per_group = experts // r.num_expert_group
    if experts % r.num_expert_group:
        nearest = min(divisors_of(experts), key=lambda g: abs(g - r.num_expert_group))
        yield (
            f"model.num_experts={experts} does not divide into router.num_expert_group={r.num_expert_group} "
            f"groups; use {nearest} groups"
        )
    elif r.topk_group * per_group < r.top_k:
        yield (
            f"router.topk_group={r.topk_group} groups of {per_group} experts leave {r.topk_group * per_group} "
            f"to choose router.top_k={r.top_k} from; keep {-(-r.top_k // per_group)} groups or more"
        )
    if r.weight_on_input and r.top_k > 1:
        yield (
            f"router.weight_on_input=True but router.top_k={r.top_k}: a token is sent to all of its experts as one "
            "row, so that it can be multiplied by one weight only; use top_k=1"
        )
    without = {
        "router.num_expert_group": r.num_expert_group > 1, "router.hash_vocabulary": r.hash_vocabulary,
        "router.has_expert_scale": r.has_expert_scale, "router.weight_on_input": r.weight_on_input,
        "model.latent_size": model.latent_size, "model.input_norm": model.input_norm,
        "model.num_fused_shared_experts": fused,
    }  # fmt: skip
    given = [name for name, is_given in without.items() if is_given]
    if given and (zero := model.num_zero_experts):
        yield f"model.num_zero_experts={zero} is not supported with {', '.join(given)}"
    if fused and (given := [name for name in given if name.startswith("router.num") or "hash" in name]):
        yield f"model.num_fused_shared_experts={fused} is not supported with {', '.join(given)}"
    if fused >= r.top_k:
        yield f"model.num_fused_shared_experts={fused} leaves none of router.top_k={r.top_k} to choose"
    if r.hash_vocabulary is not None and r.has_correction_bias:
        what = "router.has_correction_bias=True but router.hash_vocabulary fixes the experts of every token, so a"
        yield f"{what} bias has no effect; set has_correction_bias=false"
    if r.hash_vocabulary is not None and config.kernel.graphs:
        what = "kernel.graphs=True but router.hash_vocabulary reads token ids on the host to check their range"
        yield f"{what}; set graphs=false"
    yield from _training_problems(r, experts)


def _training_problems(r: RouterConfig, experts: int) -> Iterator[str]:
    if r.kind != "topk":
        trained = r.kind in TRAINING_KINDS
        others = {
            "num_expert_group": trained and r.num_expert_group > 1,
            "has_correction_bias": trained and r.has_correction_bias,
            "has_logit_bias": trained and r.has_logit_bias,
            "hash_vocabulary": r.hash_vocabulary is not None,
            "first_image_token": r.first_image_token is not None,
        }
        if given := [f"router.{name}" for name, is_given in others.items() if is_given]:
            yield f"router.kind={r.kind!r} does not support {', '.join(given)}; use kind='topk'"
    if r.num_choices is not None and not r.top_k <= r.num_choices <= experts:
        tried = f"router.num_choices={r.num_choices}"
        yield f"{tried} is not in [router.top_k={r.top_k}, model.num_experts={experts}]"
