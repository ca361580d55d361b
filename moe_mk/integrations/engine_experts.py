"""Routed experts over weights of an engine: the common part of the adapters.

The engine computes routing and shared experts; this module computes the experts of one rank, with the backend that the
oracle selects. Given a process group, it also moves tokens to the ranks of their experts. Inference only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_mk.comm.collective import collective
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.experts.base import ExpertsContext, FusedExperts
from moe_mk.experts.residency import ResidencyPool
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.kernels.native.layer import Stage
from moe_mk.layer.checks import FLOATS, has_tangent
from moe_mk.layer.custom_op import Identity, Operator, is_untraced, not_copied
from moe_mk.layer.forward import can_be_called, layer_call
from moe_mk.layer.grid import Grid
from moe_mk.layer.settings import decide
from moe_mk.oracle import Decision
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant.kinds import BLOCK_KINDS
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, Weights
from moe_mk.weights.stamp import Stamp, storages_of

IDS = (torch.int32, torch.int64)
HALVES = (torch.bfloat16, torch.float16)
LOGGER = logging.getLogger(__name__)
LORA = (
    "LoRA on experts: a backend reads each expert as one matrix, without low-rank factors; merge the adapter into the "
    "weights (merge_and_unload() of peft) and load those"
)


@dataclass(frozen=True)
class EngineWeights:
    """Experts of one rank as engines keep them, already split over EP and TP ranks."""

    w13: Tensor
    """(L, 2I, H): gate rows, then up rows, or as `order` states; (L, I, H) if not gated."""
    w2: Tensor
    """(L, H, I)."""
    activation: str = "silu"
    gated: bool = True
    order: str = "gate_up"
    """Of w13: gate_up, up_gate or interleaved."""
    quant: str = ""
    """The name of the format, such as fp8_block; "" for weights without scales."""
    block: tuple[int, int] = (128, 128)
    """(rows, columns) under one scale, of fp8_block and int8_block."""
    tokens: str = "auto"
    """What the format rounds tokens to, see `model.quant.activations`; done where the settings ask for it."""
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_global_scale: Tensor | None = None
    w2_global_scale: Tensor | None = None
    w13_zeros: Tensor | None = None
    """uint8, the code of zero, of the shape of the scales; of formats that end in _zp."""
    w2_zeros: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    limit: float | None = None
    """The clamp of swiglu_limit and swiglu_oai."""
    alpha: float = 1.702
    """The factor inside the sigmoid of swiglu_oai."""
    dtype: torch.dtype | None = None
    """Of tokens; None: that of weights without scales, else bf16."""
    of: tuple[Tensor, ...] = ()
    """The engine's own tensors where the others were computed from them; empty: the others are the engine's."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the engine, values first."""
        given = (getattr(self, name) for name in _OF_WEIGHTS)
        return self.of or tuple(each for each in given if isinstance(each, Tensor))

    def experts(self) -> ExpertWeights | MappedExpertWeights:
        """The same as views; raises ShapeError or WeightError naming the tensor, see `ExpertWeights.from_engine`."""
        return ExpertWeights.from_engine(**{name: getattr(self, name) for name in _OF_WEIGHTS})

    def model(self, scheme: QuantScheme) -> dict[str, Any]:
        """`MoEConfig.model` of these experts, without a name. scheme: that of `experts()`."""
        experts, hidden, inner = map(int, self.w2.shape)
        quant: dict[str, Any] = {"weights": self.quant or scheme.name, "activations": self.tokens}
        if self.quant in BLOCK_KINDS:
            quant["block"] = self.block
        if "ue8m0" in scheme.name:
            quant["scale"] = "ue8m0"
        return {
            "hidden_size": hidden,
            "moe_intermediate_size": scheme.logical_columns(inner),
            "num_experts": experts,
            "activation": self.activation,
            "swiglu_limit": self.limit,
            "swiglu_alpha": self.alpha,
            "expert_bias": self.w13_bias is not None,
            "quant": quant,
        }


_OF_WEIGHTS = tuple(signature(ExpertWeights.from_engine).parameters)


class RankExperts:
    """Experts of one rank over tensors of an engine: a decision, a kernel, and weights in the layout of the backend."""

    routing_names = "topk_weights", "topk_ids"
    """What messages call the arguments."""

    def __init__(
        self,
        given: Weights,
        grid: Grid,
        model: Mapping[str, Any],
        *,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device,
        settings: Mapping[str, Any],
        tokens: str = "sharded",
        pool: ResidencyPool | None = None,
        unregistered: Callable[[ExpertsContext], FusedExperts] | None = None,
    ) -> None:
        """grid: its EP ranks share out the experts, rank r has ids from r L on. model: of `MoEConfig`, of one rank.

        tokens: of `parallel`. pool: as of `MoELayer`. unregistered: makes what multiplies in place of the backend.
        Raises UnsupportedError with every reason if no backend is eligible.
        """
        self.name, self.grid, ep = model["name"], grid, grid.ep
        self.hidden_size, self.num_experts = model["hidden_size"], model["num_experts"]
        self.num_routed = self.num_experts * ep.size
        described = {
            "model": dict(model) | {"num_experts": self.num_routed},
            "router": {"top_k": min(top_k, self.num_routed)},
            "parallel": {"ep": ep.size, "tokens": tokens},
        }
        config = MoEConfig.parse(described, self.name).with_(**settings)
        if config.kernel.prepare_finalize == "auto" and ep.size == 1:
            config = config.with_(prepare_finalize="no_ep")  # the engine routes, and moves tokens if anyone does
        self.decision: Decision = decide(config, dtype, device)
        kernel = assemble(self.decision, Parts(ExpertMap.linear(self.num_routed, ep.size), device, ep, pool=pool))
        assert isinstance(kernel, FusedMoEKernel)
        if unregistered is not None:
            kernel = FusedMoEKernel(kernel.prepare_finalize, unregistered(kernel.experts.context))
        self.kernel, self.dtype = kernel, dtype
        self.weights: Weights = kernel.experts.relayout(given)
        self.decision = replace(self.decision, parameters=kernel.experts.parameters())
        transport = kernel.prepare_finalize
        unmoved = type(transport) is NoEP and isinstance(transport.context.wire, Plain)
        self._routed = layer_call(kernel, self.weights, dtype=dtype) if unmoved else None
        """The experts as one call on routed tokens; None where these move, are quantised, or the backend has none."""
        self._exchange = None if ep.size == 1 or kernel.is_partial else layer_call(kernel, self.weights, dtype=dtype)

    def notes(self) -> dict[str, str]:
        """Values that must be equal on every rank of a group, by name."""
        return {**self.decision.notes(), "numerics": self.kernel.experts.numerics(self.weights)}

    def _check(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        if (
            type(x_TH) is type(ids_TK) is type(weights_TK) is Tensor
            and x_TH.layout is ids_TK.layout is weights_TK.layout is torch.strided
            and x_TH.dtype is self.dtype
            and x_TH.dim() == 2
            and x_TH.shape[1] == self.hidden_size
            and ids_TK.dim() == weights_TK.dim() == 2
            and ids_TK.dtype in IDS
            and ids_TK.shape[0] == x_TH.shape[0]
            and weights_TK.dtype in FLOATS
            and weights_TK.shape == ids_TK.shape
            and weights_TK.device == ids_TK.device == x_TH.device
            and not (x_TH.requires_grad or weights_TK.requires_grad or forward_ad._current_level >= 0)
            and all(each.data_ptr() for each in (x_TH, weights_TK, ids_TK))
        ):
            return
        for name, each in zip(("hidden_states", *self.routing_names), (x_TH, weights_TK, ids_TK), strict=True):
            expect_dense(name, each)
        expect("hidden_states", x_TH, "T H", self.dtype, H=self.hidden_size)
        expect_routing(x_TH, weights_TK, ids_TK, self.routing_names)
        followed = torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad)
        if followed or has_tangent(x_TH) or has_tangent(weights_TK):
            raise UnsupportedError(f"gradients through {self.name}", ["inference only; run under torch.no_grad()"])

    def run(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """(T, H) with weights and ids (T, K) to (T, H). It checks its arguments, so that graphs need no guards."""
        plain = type(x_TH) is Tensor and x_TH.dtype is self.dtype and x_TH.layout is torch.strided and x_TH.dim() == 2
        plain, wide_TK = plain and x_TH.shape[1] == self.hidden_size and x_TH.is_cpu, weights_TK
        if plain and type(weights_TK) is Tensor and weights_TK.dtype in HALVES and weights_TK.data_ptr():
            wide_TK = weights_TK.to(torch.float32)
        fits = plain and can_be_called(x_TH, ids_TK, wide_TK)
        if not fits or x_TH.requires_grad:
            self._check(x_TH, weights_TK, ids_TK)
        x_TH = x_TH.resolve_neg().contiguous()
        if self._routed is not None and x_TH.is_cpu:
            if not fits:
                ids_TK, wide_TK = ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()
            if fits or can_be_called(x_TH, ids_TK, wide_TK):
                return self._routed(x_TH, None, (ids_TK, wide_TK), Stage.PLACE, skip=True)
        call, grid = self._exchange, self.grid
        try:
            with torch.no_grad():
                routing = routing_of(ids_TK, weights_TK, self.num_routed)
                agreed = grid.agreed == (grid.ep.status.epoch, grid.tp.status.epoch)
                if call is not None and agreed and call.is_ready(x_TH.shape[0]):
                    return call(x_TH, None, (routing.ids_TK, routing.weights_TK), Stage.DISPATCH)  # as `_steps` does
                return wait(self._steps(x_TH, routing)).to(self.dtype)
        except BaseException as error:
            if not isinstance(error, MoEMKError):  # those are reported where they arise
                grid.fail(error)
            raise

    def _steps(self, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
        grid, epochs = self.grid, self.grid.epochs
        try:
            yield from grid.agree(self.notes)
            y_TH = yield from self.kernel.steps(x_TH, routing, self.weights)
            return (yield from grid.late_reduce(y_TH, self.kernel.spans, partial_over_ep=self.kernel.is_partial))
        except BaseException as error:
            grid.fail(error, epochs)
            raise


class EngineExperts(RankExperts):
    """The experts of one layer on one rank, with a selected backend and converted weights.

    Where the backend reads the engine's tensors directly, they must not be modified. Where it keeps a copy in its own
    layout, both remain in memory until `release()`: one warning is logged per process, and one line per layer at level
    info.

    name: for messages. settings: bare keys of `MoEConfig.kernel`, for instance experts="torch_cpu".
    release: call `release()` at once where there is a copy. groups: `ep`, over which the ranks of an engine, each with
    tokens of its own, share out the experts: rank r has ids from r L on, and every rank makes every call.
    Raises ShapeError for inconsistent weights, WeightError for invalid numbers in them, UnsupportedError with every
    reason if no backend is eligible.
    """

    def __init__(
        self,
        name: str,
        weights: EngineWeights,
        *,
        top_k: int,
        settings: Mapping[str, Any] | None = None,
        release: bool = False,
        groups: ParallelGroups | None = None,
    ) -> None:
        if any(is_released(tensor) for tensor in weights.tensors):
            raise UnsupportedError(f"the weights of {name} were released", ["load them into the engine again"])
        try:
            given = weights.experts()
        except (ShapeError, WeightError) as problem:
            raise type(problem)(f"{name}.{problem}") from None
        settings = settings or {}
        super().__init__(
            given,
            Grid(ParallelGroups.of(groups), settings.get("timeout_s", DEFAULT_TIMEOUT_S), name),
            weights.model(given.scheme) | {"name": name},
            top_k=top_k,
            dtype=weights.dtype or (weights.w2.dtype if not weights.quant else torch.bfloat16),
            device=weights.w2.device,
            settings=settings,
        )
        in_use, self._given = storages_of(self.weights), weights.tensors
        self._unused = [t for t in weights.tensors if t.untyped_storage().data_ptr() not in in_use]
        is_copy = bool(weights.of) or any(t is weights.w13 or t is weights.w2 for t in self._unused)
        self.copied_bytes = self.weights.num_bytes if is_copy else 0
        """Bytes in the layout of the backend that are in addition to the engine's tensors; 0 where it reads those."""
        if self.copied_bytes and release:
            self.release()
        elif self.copied_bytes:
            _warn_of_copies(self.backend)
        LOGGER.info(self.note)
        described = self.decision.problem.config
        identity = Identity.of(name, (described.model, described.router, self.dtype))
        self._entry = EXPERTS_OF_ENGINES.enter(self, identity)

    __reduce__ = not_copied

    @property
    def backend(self) -> str:
        """The experts backend that multiplies."""
        return self.decision.chosen.experts

    @property
    def is_released(self) -> bool:
        """Whether the engine's tensors were freed, so that nothing can be converted again."""
        return not self._given

    @property
    def note(self) -> str:
        """What the weights occupy, in one line."""
        held = sum(tensor.nbytes for tensor in self._given)
        if not self.copied_bytes:
            return f"{self.name}: {self.backend} reads the engine's weights, {held:,} B"
        text = f"{self.name}: {self.backend} keeps the weights in its own layout, {self.copied_bytes:,} B"
        if not held:
            return f"{text}; the engine's were released"
        return f"{text}, in addition to the engine's {held:,} B; release() frees those"

    def explain(self) -> str:
        """The decision, with every backend's cost or rejection reasons, and what the weights occupy."""
        return f"{self.decision}\n{self.note}"

    def release(self) -> int:
        """Free the engine's tensors, which keep their shape but have no data; returns the number of bytes.

        Reading them raises a RuntimeError of torch, so the engine can neither save nor move them. To load other
        weights, the engine allocates them again. Raises UnsupportedError, and frees nothing, where the backend reads
        them, and where a tensor shares its storage with others.
        """
        if not self.copied_bytes:
            raise UnsupportedError(
                f"the weights of {self.name} cannot be released",
                [f"{self.backend} reads them, there is no second copy; pin kernel.experts to another backend"],
            )
        shared = [t for t in self._unused if t.untyped_storage().nbytes() != t.nbytes]
        if shared:
            raise UnsupportedError(
                f"the weights of {self.name} cannot be released",
                [f"{len(shared)} of {len(self._unused)} tensors share their storage with others"],
            )
        freed = sum(tensor.nbytes for tensor in self._unused)
        for tensor in self._unused:
            tensor.untyped_storage().resize_(0)
        self._given, self._unused = (), []
        return freed

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """(T, H) with weights (T, K) and ids (T, K) of this rank's experts to (T, H), weighted and summed.

        Over a group, ids are those of all ranks. Ids outside these are skipped. Weights must be normalised and scaled.
        """
        if is_untraced(hidden_states):
            return self.run(hidden_states, topk_weights, topk_ids)
        if not isinstance(hidden_states, Tensor) or hidden_states.requires_grad or forward_ad._current_level >= 0:
            self._check(hidden_states, topk_weights, topk_ids)
        return EXPERTS_OF_ENGINES.traced(hidden_states, topk_weights, topk_ids, self._entry)

    @collective(lambda experts: experts.grid, recovers=True)
    def recover(self) -> None:
        """Go on after a call failed on some rank of the group, see `MoELayer.recover`; every rank calls it."""
        wait(self.grid.recover())


EXPERTS_OF_ENGINES: Operator[EngineExperts] = Operator(
    "engine_experts", "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor entry) -> Tensor",
    lambda experts, *given: experts.run(*given),
)  # fmt: skip
"""(T, H), weights (T, K) and ids (T, K) to (T, H): one node of a graph, so that engines can compile around it."""
engine_experts = EXPERTS_OF_ENGINES.call


def routing_of(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Routing:
    """Ids outside of the experts (E or -1) become -1 with weight 0."""
    here = (topk_ids >= 0) & (topk_ids < num_experts)
    ids_TK = torch.where(here, topk_ids, -1).to(torch.int32)
    return Routing(ids_TK, topk_weights.to(torch.float32).masked_fill(~here, 0.0))


def expect_routing(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, names: tuple[str, str]) -> None:
    """Raise ShapeError unless these are weights and ids of the tokens. names: of the two arguments."""
    expect(names[1], ids_TK, "T K", IDS, x_TH.device, T=x_TH.shape[0])
    expect(names[0], weights_TK, "T K", FLOATS, x_TH.device)
    if weights_TK.shape != ids_TK.shape:
        raise ShapeError(f"{names[0]} is {tuple(weights_TK.shape)}, {names[1]} is {tuple(ids_TK.shape)}")


class HeldExperts:
    """For engines that pass their weights with every call: converted once, and again when they change.

    What was made of weights that the engine has replaced is dropped once each of the others was used `KEPT` times.
    """

    KEPT = 8

    def __init__(self, *, release: bool = False) -> None:
        """release: whether `build` frees the engine's tensors where the backend keeps a copy."""
        self.release, self._calls = release, 0
        self._held: dict[tuple[int, int], tuple[Stamp, EngineExperts, int]] = {}
        """With the number of the last call, in the order of these numbers. Keys: storage and offset in it."""

    def of(self, tensors: Sequence[Tensor], build: Callable[[], EngineExperts]) -> EngineExperts:
        key, self._calls = (tensors[0].untyped_storage()._cdata, int(tensors[0].storage_offset())), self._calls + 1
        held = self._held.pop(key, None)
        if held is None or not (held[0].is_of(tensors) or (self.release and is_released(tensors[0]))):
            self._held = {at: other for at, other in self._held.items() if not other[0].is_gone}
            held = Stamp(tensors), build(), 0
        self._held[key] = held[0], held[1], self._calls
        oldest, (_, unused, last) = next(iter(self._held.items()))
        if self._calls - last > self.KEPT * len(self._held) and not unused.is_released:
            del self._held[oldest]
        return held[1]


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor has elements but no data."""
    return tensor.numel() > 0 and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() == 0


@cache
def _warn_of_copies(backend: str) -> None:
    """Log once per process that weights are in memory twice: every layer of a model has the same backend."""
    LOGGER.warning(
        "%s keeps weights in its own layout, in addition to those of the engine, for every layer; release(), or the "
        "adapter's release_weights, frees the engine's",
        backend,
    )
