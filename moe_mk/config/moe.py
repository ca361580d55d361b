"""The configuration of an MoE layer: the model, its router, how the layer is distributed, and how it is computed.

`with_` assigns settings given by their bare key to the section that has the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from moe_mk.config.base import Settings, overrides_of, read_mapping
from moe_mk.config.quant import QuantConfig
from moe_mk.errors import ConfigError, expect_kind
from moe_mk.quant.kinds import legal_tp_sizes
from moe_mk.registry import did_you_mean
from moe_mk.shapes import divisors_of


def place_overrides(data: dict[str, Any], overrides: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
    """Write each override into the section that has its key, a bare one or `section.key`.

    Raises ConfigError for an unknown key.
    """
    section_of = {
        key: group
        for group, cls in groups.items()
        if isinstance(cls, type) and issubclass(cls, BaseModel)
        for key in cls.model_fields
    }
    for key, value in overrides.items():
        section, dot, bare = key.rpartition(".")
        if section_of.get(bare) is None or (dot and section_of[bare] != section):
            known = [f"{group}.{each}" for each, group in section_of.items()] if dot else list(section_of)
            raise ConfigError(f"unknown setting {key!r}{did_you_mean(key, known)}")
        data[section_of[bare]][bare] = value


Size = Field(ge=1, le=2**31 - 1)
"""Limited by 32-bit counters in kernels."""
Experts = Field(ge=1, le=2**16)
"""Every rank holds tables of all experts."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_limit", "swiglu_oai", "silu_limit", "situ"]
LIMITED = ("swiglu_limit", "swiglu_oai", "silu_limit", "situ")
"""Activations with a swiglu_limit, that of situ optional."""


class ModelConfig(Settings):
    """The shape of one MoE layer."""

    name: str = "custom"
    hidden_size: int = Size
    moe_intermediate_size: int = Size
    num_experts: int = Experts
    num_zero_experts: int = Field(default=0, ge=0, le=2**16)
    """Experts without weights, with the ids from num_experts on, as in LongCat-Flash; no token is sent to them."""
    zero_expert_type: Literal["identity", "drop"] = "identity"
    """What an expert without weights returns. identity: the layer's input; drop: zeros."""
    num_fused_shared_experts: int = Field(default=0, ge=0, le=2**16)
    """How many of num_experts, the last ones, are shared experts that the router scores and every token has, as in
    Inkling: router.top_k counts them, and a renormalisation includes them."""
    num_shared_experts: int = Field(default=0, ge=0, le=2**16)
    shared_intermediate_size: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Intermediate size of all shared experts together; None is num_shared_experts times moe_intermediate_size."""
    activation: Activation = "silu"
    swiglu_limit: float | None = Field(default=None, gt=0)
    """Clamp of the gate from above and of up on both sides: before SiLU (swiglu_limit, swiglu_oai) or after it
    (silu_limit). situ: the soft limit of up, limit * tanh(up / limit); None for none."""
    swiglu_alpha: float = Field(default=1.702, gt=0)
    """The factor inside the sigmoid of swiglu_oai; the soft limit of the gate in situ."""
    shared_activation: Activation | None = None
    """The activation of shared experts where it is not that of the routed ones, as in Step-3.7."""
    shared_swiglu_limit: float | None = Field(default=None, gt=0)
    """The limit of shared_activation."""
    gated: bool = True
    """Whether experts have a gate: down(act(gate(x)) * up(x)). Others are down(act(up(x))), as Nemotron-3's."""
    expert_bias: bool = False
    """Whether routed experts have biases."""
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by sigmoid(x @ g), one factor a token, as in Qwen3.5."""
    shared_scale: float = Field(default=1.0, gt=0)
    """The factor of the shared experts' output. Cohere2 MoE: 0.5, as is router.routed_scaling_factor, for the mean."""
    latent_size: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Width that routed experts read and write where it is not hidden_size: tokens are projected to it before dispatch
    and back after combine, as in Nemotron-3 Super. Router and shared experts work on hidden_size."""
    latent_norm: float | None = Field(default=None, gt=0)
    """The epsilon of an RMS norm of the summed outputs of experts in latent_size, before they are projected back, as in
    Kimi-K3; None: no norm. Needs latent_size."""
    input_norm: float | None = Field(default=None, gt=0)
    """The epsilon of an RMS norm of the layer's input, as in Gemma 4: experts read it times a weight of each feature,
    the gate times a scale of each feature and hidden_size ** -0.5. The layer is then called with the residual stream;
    None: the decoder layer has normalised it, as in most models."""
    stacks_transposed: bool = False
    """Whether tensors that hold all experts are (experts, in, out), as Qwen3-VL writes them."""
    total_params_b: float | None = Field(default=None, gt=0)
    """Parameters of the whole model in billions, for information."""
    active_params_b: float | None = Field(default=None, gt=0)
    """Parameters that one token uses, in billions, for information."""
    quant: QuantConfig = QuantConfig()

    @property
    def scored_experts(self) -> int:
        """The number of experts that the router scores."""
        return self.num_experts + self.num_zero_experts

    @property
    def shared_size(self) -> int:
        """Intermediate size of the MLP that computes all shared experts."""
        return self.shared_intermediate_size or self.num_shared_experts * self.moe_intermediate_size

    @model_validator(mode="after")
    def _limit_agrees(self) -> Self:
        stated: dict[str, tuple[str | None, float | None]] = {
            "": (self.activation, self.swiglu_limit),
            "shared_": (self.shared_activation, self.shared_swiglu_limit),
        }
        for which, (activation, limit) in stated.items():
            clamps = activation in LIMITED
            if clamps != (limit is not None) and activation != "situ":
                unclamped = "has no clamp; drop the limit or use swiglu_limit"
                needed = f"needs a {which}swiglu_limit" if clamps else unclamped
                raise ValueError(f"{which}swiglu_limit={limit} but {which}activation={activation!r} {needed}")
            if clamps and not self.gated:
                raise ValueError(
                    f"{which}activation={activation!r} multiplies a gate by up; gated=False needs another one"
                )
        if self.shared_activation is not None and not self.num_shared_experts:
            raise ValueError(f"shared_activation={self.shared_activation!r} but num_shared_experts=0; drop it")
        return self

    def of_shared(self) -> ModelConfig:
        """This section with the activation of the shared experts for all experts."""
        if self.shared_activation is None:
            return self
        return self.model_copy(update={"activation": self.shared_activation, "swiglu_limit": self.shared_swiglu_limit})

    @model_validator(mode="after")
    def _bytes_are_whole(self) -> Self:
        scheme = self.quant.weight_scheme
        # Blocks of GGUF are never partial.
        both = scheme, self.quant.down_scheme
        per_byte, per_byte_down = (s.block[1] if s.family == "gguf" and s.block else s.per_byte for s in both)
        sizes = {"latent_size" if self.latent_size else "hidden_size": (self.latent_size or self.hidden_size, per_byte)}
        sizes["moe_intermediate_size"] = self.moe_intermediate_size, per_byte_down
        # Shared experts of a GGUF file have blocks of their own.
        if self.quant.shared_scheme is None and scheme.family != "gguf":
            sizes["the shared experts' size"] = self.shared_size, per_byte_down
        odd = [f"{name}={size}" for name, (size, values) in sizes.items() if size % values]
        if odd and scheme.family == "gguf":
            raise ValueError(
                f"blocks of {self.quant.weights} hold {per_byte} values of a row, of down projections {per_byte_down}, "
                f"no divisor of {', '.join(odd)}; use a type with smaller blocks, such as q8_0"
            )
        if odd:
            raise ValueError(
                f"{self.quant.weights} weights pack {per_byte} values together, which do not divide {', '.join(odd)}; "
                "use multiples of them or another type"
            )
        return self

    @model_validator(mode="after")
    def _shared_agree(self) -> Self:
        if self.shared_gate and not self.num_shared_experts:
            raise ValueError("shared_gate=True but num_shared_experts=0; state their number, or drop the gate")
        if self.input_norm is not None and (self.num_shared_experts or self.latent_size):
            raise ValueError(
                f"input_norm={self.input_norm} but num_shared_experts={self.num_shared_experts} and latent_size="
                f"{self.latent_size}, which read other rows; a dense MLP as in Gemma 4 belongs to the decoder layer"
            )
        if self.shared_intermediate_size and not self.num_shared_experts:
            raise ValueError(
                f"shared_intermediate_size={self.shared_intermediate_size} but num_shared_experts=0; "
                "set num_shared_experts to 1 or drop the size"
            )
        return self


TRAINING_KINDS = ("noisy_topk", "expert_capacity")
"""Values of `router.kind` that layers which serve refuse."""


class RouterConfig(Settings):
    """The selection of experts for each token."""

    kind: str = "topk"
    """topk: the best experts, in one group or several. For training only (`moe_mk.lab.training`): noisy_topk adds
    trainable Gaussian noise to the logits; expert_capacity limits the tokens of each expert. Or the name of a plugin of
    `moe_mk.routers`, which reads the settings below."""
    top_k: int = Experts
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


class ParallelConfig(Settings):
    """Distribution of the layer. Groups passed to it must have these sizes; if all are 1, their sizes are used."""

    ep: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    tokens: Literal["sharded", "replicated"] = "sharded"
    """sharded: every EP rank has its own tokens. replicated: all EP ranks have the same tokens."""
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks of one host; None: the value of the device profile."""
    placement: Literal["linear", "round_robin"] | tuple[int, ...] = "linear"
    """A tuple lists the logical expert of each physical one, rank by rank; replicas are allowed."""
    on_lost_expert: Literal["raise", "drop", "renormalise"] = "raise"
    """Behaviour of calls while an expert has no live copy, because its rank was lost. raise: every call raises
    LostExpertError on every rank. drop: its assignments are skipped. renormalise: as drop, and the other weights of the
    token are scaled to keep their sum."""


def _absolute(folder: Path) -> Path:
    if not folder.is_absolute() or "\0" in str(folder):
        raise ValueError("must be an absolute path")
    return folder


Folder = Annotated[Path, AfterValidator(_absolute)]


class ResidencyConfig(Settings):
    """Experts of which only some are in memory, or on a GPU; the others come from a store when they are needed."""

    slots: int | None = Field(default=None, ge=1)
    """Experts of a layer and rank in memory; or `bytes`, or neither for a layer that is given a `ResidencyPool`."""
    bytes: int | None = Field(default=None, ge=1)
    """Memory for the experts of a layer and rank, at least one."""
    store: Folder | None = None
    """The folder of the stores, one a layer and rank, named after what is in them; an absolute path. They are written
    when a layer is loaded and used again by later processes. None: experts on a GPU come from host memory."""
    policy: str = "decayed"
    """What makes room: decayed, lru, lfu, or a plugin of `moe_mk.residency_policies`."""

    @model_validator(mode="after")
    def _names_a_size(self) -> Self:
        if self.slots is not None and self.bytes is not None:
            raise ValueError("residency takes slots or bytes, both are given")
        return self


class KernelConfig(Settings):
    """Selection of backends, and limits."""

    prepare_finalize: str = "auto"
    experts: str = "auto"
    wire: Literal["auto", "plain", "fp8", "checkpoint"] = "auto"
    """Format of dispatched tokens. auto: quantised activations if the experts consume them, else the layer's dtype.
    checkpoint requires the activation scheme of the checkpoint; fp8 requires in addition that it is FP8."""
    activations: Literal["auto", "checkpoint", "plain", "int8"] = "auto"
    """Activations of the experts' GEMMs: quantised as in the checkpoint, in the layer's dtype (more accurate), or in
    INT8 for INT4, INT8 and GGUF weights, whatever the checkpoint defines (faster)."""
    trust: tuple[str, ...] = ()
    """Experts, transports, oracles of other packages that `auto` may select without a certificate and measured time."""
    tuned_dir: Folder | None = None
    """The folder of tuned parameters, and of times and certificates of experts from outside of this package, as `moe-mk
    tune` and `moe-mk certify` write it with --tuned-dir. None: `configs/tuned` of this package."""
    fallback: bool = True
    """Whether weights that only the reference backend reads may be requantised at load; recorded in the Decision."""
    fused_router: bool = True
    """Whether the router may run as one native call, with native experts; false: torch operators."""
    threads: Literal["auto", "engine", "own"] = "auto"
    """Threads of native CPU kernels: torch's OpenMP threads (engine) or a pool (own). auto: engine if torch has any."""
    instruction_set: Literal["auto", "scalar", "avx2", "avx512_vnni", "avx512_bf16", "amx_bf16"] = "auto"
    """Of native CPU kernels. auto: by the measured rates of instructions. Bits differ; ranks must have the same."""
    cache_dir: Folder | None = None
    """The folder of compiled CPU kernels, created for this user alone. None: ~/.cache/moe_mk/kernels, or a
    private temporary folder where that cannot be used."""
    residency: ResidencyConfig | None = None
    """Experts larger than memory, with experts that support it (cpu_native, triton); None: all are in memory."""
    max_num_tokens: int = Field(default=8192, ge=1, le=2**31 - 1)
    """Maximum number of tokens per rank and call; determines the size of buffers."""
    relay_tokens: int | None = Field(default=None, ge=1)
    """Tokens per rank that are sent between nodes and relayed at a time; None: all tokens of a call."""
    tiles: int = Field(default=1, ge=1, le=64)
    """Parts of a call's tokens that are dispatched, multiplied and combined in a pipeline; 1: all at once."""
    tile_carrier: Literal["turns", "thread"] = "turns"
    """The thread that communicates. turns: the calling thread, in turns with the experts. thread: one of its own."""
    comm_units: int | None = Field(default=None, ge=1)
    """Compute units that the transport may reserve: SMs of a GPU, proxy threads on a CPU. None: its default."""
    graphs: bool = False
    """Whether calls must be capturable in a CUDA graph."""
    deterministic: bool = False
    batch_invariant: bool = False
    """Whether the bits of a token must not depend on the batch; some backends are slower for it at small batches."""
    invariant: bool = False
    """Whether the bits of a token must depend on the token and the weights alone: equal for every batch, EP size,
    placement, replica and transport, with the same experts backend and TP size. Includes deterministic and
    batch_invariant. Every assignment is sent and returned as a row of its own, up to top_k times the bytes."""
    allow_emulated: bool = False
    """Whether emulated libraries are eligible; the Decision marks them "emulated"."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a peer may be late before CommError."""
    network: str = "127.0.0.0/8"
    """The IPv4 network between hosts, such as 10.0.0.0/24: proxies listen only on this host's address in it."""
    network_link: str = "auto"
    """What carries rows between proxies. tcp: their connections. nixl: writes of the NIXL library. auto: nixl where it
    is installed and the host has an RDMA device, else tcp."""

    @property
    def rounds(self) -> bool:
        """Whether quantised activations are required."""
        return self.activations in ("checkpoint", "int8")


class MoEConfig(Settings):
    """The complete configuration of an MoE layer."""

    model: ModelConfig
    router: RouterConfig
    parallel: ParallelConfig = ParallelConfig()
    kernel: KernelConfig = KernelConfig()

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        problems = [*self._router_problems(), *self._parallel_problems(), *self._kernel_problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _router_problems(self) -> list[str]:
        experts, r = self.model.num_experts, self.router
        above = r.top_k > experts
        problems = [f"router.top_k={r.top_k} exceeds model.num_experts={experts}; lower top_k"] if above else []
        if r.topk_group > r.num_expert_group:
            problems.append(
                f"router.topk_group={r.topk_group} exceeds router.num_expert_group={r.num_expert_group}; "
                f"keep at most {r.num_expert_group} groups"
            )
        if experts % r.num_expert_group:
            nearest = min(divisors_of(experts), key=lambda g: abs(g - r.num_expert_group))
            problems.append(
                f"model.num_experts={experts} does not divide into router.num_expert_group={r.num_expert_group} "
                f"groups; use {nearest} groups"
            )
        elif r.topk_group * (experts // r.num_expert_group) < r.top_k:
            per_group = experts // r.num_expert_group
            problems.append(
                f"router.topk_group={r.topk_group} groups of {per_group} experts leave {r.topk_group * per_group} "
                f"to choose router.top_k={r.top_k} from; keep {-(-r.top_k // per_group)} groups or more"
            )
        if r.weight_on_input and r.top_k > 1:
            problems.append(
                f"router.weight_on_input=True but router.top_k={r.top_k}: a token is sent to all of its experts as one "
                "row, so that it can be multiplied by one weight only; use top_k=1"
            )
        without = {
            "router.num_expert_group": r.num_expert_group > 1, "router.hash_vocabulary": r.hash_vocabulary,
            "router.has_expert_scale": r.has_expert_scale, "router.weight_on_input": r.weight_on_input,
            "model.latent_size": self.model.latent_size, "model.input_norm": self.model.input_norm,
            "model.num_fused_shared_experts": (fused := self.model.num_fused_shared_experts),
        }  # fmt: skip
        given = [name for name, is_given in without.items() if is_given]
        if given and (zero := self.model.num_zero_experts):
            problems.append(f"model.num_zero_experts={zero} is not supported with {', '.join(given)}")
        if fused and (given := [name for name in given if name.startswith("router.num") or "hash" in name]):
            problems.append(f"model.num_fused_shared_experts={fused} is not supported with {', '.join(given)}")
        if fused >= r.top_k:
            problems.append(f"model.num_fused_shared_experts={fused} leaves none of router.top_k={r.top_k} to choose")
        return problems + self._hash_problems() + self._training_problems()

    def _training_problems(self) -> list[str]:
        experts, r = self.model.num_experts, self.router
        problems = []
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
                problems.append(f"router.kind={r.kind!r} does not support {', '.join(given)}; use kind='topk'")
        if r.num_choices is not None and not r.top_k <= r.num_choices <= experts:
            tried = f"router.num_choices={r.num_choices}"
            problems.append(f"{tried} is not in [router.top_k={r.top_k}, model.num_experts={experts}]")
        return problems

    def _hash_problems(self) -> list[str]:
        if self.router.hash_vocabulary is None:
            return []
        problems = []
        if self.router.has_correction_bias:
            what = "router.has_correction_bias=True but router.hash_vocabulary fixes the experts of every token, so a"
            problems.append(f"{what} bias has no effect; set has_correction_bias=false")
        if self.kernel.graphs:
            what = "kernel.graphs=True but router.hash_vocabulary reads token ids on the host to check their range"
            problems.append(f"{what}; set graphs=false")
        return problems

    def _parallel_problems(self) -> list[str]:
        model, p = self.model, self.parallel
        problems = []
        where = "model.num_experts" if isinstance(p.placement, str) else "the length of parallel.placement"
        physical = model.num_experts if isinstance(p.placement, str) else len(p.placement)
        if p.ep > physical:
            problems.append(
                f"parallel.ep={p.ep} exceeds {where}={physical}, which leaves ranks without experts; "
                f"use 1 to {physical} ranks"
            )
        elif not isinstance(p.placement, str) and physical % p.ep:
            problems.append(
                f"parallel.ep={p.ep} does not divide {where}={physical}; add {-physical % p.ep} replicas "
                f"or use {gcd(physical, p.ep)} ranks"
            )
        if p.tp not in (legal := legal_tp_sizes((model.moe_intermediate_size, model.shared_size), model.quant.edges)):
            widths = f"model.moe_intermediate_size={model.moe_intermediate_size}"
            if model.shared_size:
                widths += f" and {model.shared_size} of the shared experts"
            rows, columns = model.quant.edges
            edges = f" at the edges of {rows}x{columns} blocks" if (rows, columns) != (1, 1) else ""
            possible = ", ".join(map(str, legal))
            problems.append(f"parallel.tp={p.tp} does not divide {widths}{edges}; possible: {possible}")
        return problems

    def _kernel_problems(self) -> list[str]:
        kernel = self.kernel
        problems = []
        if (kernel.invariant or kernel.batch_invariant) and self.model.latent_size:
            setting = "invariant" if kernel.invariant else "batch_invariant"
            problems.append(
                f"kernel.{setting}=True but the projections of model.latent_size={self.model.latent_size} round a "
                f"token differently in other batches; set {setting}=false"
            )
        if kernel.invariant and kernel.tiles > 1:
            problems.append(f"kernel.invariant=True cannot be split into kernel.tiles={kernel.tiles}; use tiles=1")
        if kernel.invariant and kernel.wire not in ("auto", "plain"):
            what = f"kernel.wire={kernel.wire!r} rounds rows that are sent and no others; use wire='auto'"
            problems.append(f"kernel.invariant=True but {what}")
        if kernel.activations == "int8" and not self.model.quant.may_be_int8:
            what = f"are for INT4, INT8 and GGUF weights, not {self.model.quant.weights}; use auto, checkpoint or plain"
            problems.append(f"kernel.activations='int8' {what}")
        return problems

    @classmethod
    def from_hf(
        cls, path: str | Path, *, layer: int | None = None, equation: str | Path | None = None, **overrides: Any
    ) -> Self:
        """Read a `config.json` of the transformers layout, or the folder that holds it.

        A `layer_equation.json` next to it describes the layers of models of other families (`moe-mk derive`).

        layer: the layer to describe, where the lists of modules of a quantisation give layers formats of their own.
        equation: a file to read instead of that one.
        overrides: any key of `model`, `router`, `parallel` or `kernel`: experts="torch_cpu", router_dtype="model";
        settings="serve.yaml" is a file of such sections, or a mapping of them.
        Raises ConfigError for a path that does not exist, for a model type without a MoE layer, and for unknown
        overrides.
        """
        from moe_mk.config.equation import FILE, KEY
        from moe_mk.config.hf import read_config, settings_from_hf

        expect_kind("path", path, str, PathLike)
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        if not file.exists():
            what = f"{path} has no config.json" if Path(path).is_dir() else f"{path} does not exist"
            raise ConfigError(f"{what}; name the folder of a downloaded checkpoint, or a config.json")
        hf = read_config(file)
        if equation is not None:
            hf[KEY] = read_mapping(Path(equation))
        where = f"{file} with {FILE}" if KEY in hf else str(file)
        return cls.parse(settings_from_hf(hf, str(file), layer, file.parent), where).with_(**overrides)

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str) -> Self:
        if isinstance(data, Mapping) and "model" not in data and data.keys() & {"kernel", "parallel"}:
            how = "MoEConfig.from_hf(folder, settings=FILE), from_checkpoint(folder, layer, settings=FILE)"
            raise ConfigError(f"{where} states no model; take it with that of a checkpoint: {how}")
        return super().parse(data, where)

    def with_(self, **overrides: Any) -> Self:
        """A copy with some settings changed, each named by its bare key. settings=: a file, or sections of settings."""
        data, overrides = self.model_dump(), overrides_of(overrides.pop("settings", None) or {}) | overrides
        place_overrides(data, overrides, {name: field.annotation for name, field in type(self).model_fields.items()})
        return type(self).parse(data, "overrides")
