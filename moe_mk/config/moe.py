"""The configuration of an MoE layer: the model, its router, how the layer is distributed, and how it is computed.

`with_` assigns settings given by their bare key to the section that has the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from moe_mk.config.base import Settings, overrides_of, read_mapping
from moe_mk.config.quant import QuantConfig
from moe_mk.config.router import RouterConfig, router_problems
from moe_mk.errors import ConfigError, expect_kind
from moe_mk.quant.kinds import legal_tp_sizes
from moe_mk.registry import did_you_mean

Size = Field(ge=1, le=2**31 - 1)
"""Limited by 32-bit counters in kernels."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_limit", "swiglu_oai", "silu_limit", "situ"]
LIMITED = ("swiglu_limit", "swiglu_oai", "silu_limit", "situ")
"""Activations with a swiglu_limit, that of situ optional."""


class ModelConfig(Settings):
    """The shape of one MoE layer."""

    name: str = "custom"
    hidden_size: int = Size
    moe_intermediate_size: int = Size
    num_experts: int = Field(ge=1, le=2**16)
    """Every rank holds tables of all experts."""
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
        quant, width = self.quant, "latent_size" if self.latent_size else "hidden_size"
        of_down = {"moe_intermediate_size": self.moe_intermediate_size}
        # Shared experts of a GGUF file have blocks of their own.
        if quant.shared_scheme is None and quant.weight_scheme.family != "gguf":
            of_down["the shared experts' size"] = self.shared_size
        problems = []
        for key, kind, scheme, sizes in (
            ("weights", quant.weights, quant.weight_scheme, {width: getattr(self, width)}),
            ("down" if quant.down else "weights", quant.down or quant.weights, quant.down_scheme, of_down),
        ):
            # Blocks of GGUF are never partial.
            values = scheme.block[1] if scheme.family == "gguf" and scheme.block else scheme.per_byte
            if odd := [f"{name}={size}" for name, size in sizes.items() if size % values]:
                smaller = ", such as q8_0 with blocks of 32" if values > 32 else ""
                problems.append(
                    f"{kind} weights pack {values} values of a row, which do not divide {', '.join(odd)}; use "
                    f"multiples of {values} or another model.quant.{key}{smaller}"
                )
        if problems:
            raise ValueError("; ".join(problems))
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
        if problems := [*router_problems(self), *self._parallel_problems(), *self._kernel_problems()]:
            raise ValueError("; ".join(problems))
        return self

    def _parallel_problems(self) -> Iterator[str]:
        model, p = self.model, self.parallel
        where = "model.num_experts" if isinstance(p.placement, str) else "the length of parallel.placement"
        physical = model.num_experts if isinstance(p.placement, str) else len(p.placement)
        if p.ep > physical:
            yield (
                f"parallel.ep={p.ep} exceeds {where}={physical}, which leaves ranks without experts; "
                f"use 1 to {physical} ranks"
            )
        elif not isinstance(p.placement, str) and physical % p.ep:
            yield (
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
            yield f"parallel.tp={p.tp} does not divide {widths}{edges}; possible: {possible}"

    def _kernel_problems(self) -> Iterator[str]:
        kernel = self.kernel
        if (kernel.invariant or kernel.batch_invariant) and self.model.latent_size:
            setting = "invariant" if kernel.invariant else "batch_invariant"
            yield (
                f"kernel.{setting}=True but the projections of model.latent_size={self.model.latent_size} round a "
                f"token differently in other batches; set {setting}=false"
            )
        if kernel.invariant and kernel.tiles > 1:
            yield f"kernel.invariant=True cannot be split into kernel.tiles={kernel.tiles}; use tiles=1"
        if kernel.invariant and kernel.wire not in ("auto", "plain"):
            what = f"kernel.wire={kernel.wire!r} rounds rows that are sent and no others; use wire='auto'"
            yield f"kernel.invariant=True but {what}"
        if kernel.activations == "int8" and not self.model.quant.may_be_int8:
            what = f"are for INT4, INT8 and GGUF weights, not {self.model.quant.weights}; use auto, checkpoint or plain"
            yield f"kernel.activations='int8' {what}"

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
        section_of = {key: section for section, settings in data.items() for key in settings}
        for key, value in overrides.items():
            section, dot, bare = key.rpartition(".")
            if section_of.get(bare) is None or (dot and section_of[bare] != section):
                known = [f"{group}.{each}" for each, group in section_of.items()] if dot else list(section_of)
                raise ConfigError(f"unknown setting {key!r}{did_you_mean(key, known)}")
            data[section_of[bare]][bare] = value
        return type(self).parse(data, "overrides")
