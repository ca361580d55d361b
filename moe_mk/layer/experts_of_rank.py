"""The routed experts of one rank: the part that `MoELayer`, the adapters of engines and transformers' experts share.

A decision, the kernel that follows from it, the weights of this rank in the layout of its backend, and the ranks with
which they are shared. `MoELayer` adds a gate, a router, counters and shared experts; an engine routes by itself and
calls `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import MoEMKError, UnsupportedError
from moe_mk.experts.base import ExpertsContext, FusedExperts
from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.experts.residency import ResidencyPool
from moe_mk.flight import Flight, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.kernels import native
from moe_mk.layer.checks import FLOATS, IDS, expect_routing, has_tangent
from moe_mk.layer.grid import Grid
from moe_mk.layer.settings import decide
from moe_mk.layer.shared import SharedExperts
from moe_mk.oracle.assemble import Parts, assemble
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import LayerParts, PrepareFinalize
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.quant.plain import Plain
from moe_mk.quant.wire import row_bytes
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import Routing, RowTokens
from moe_mk.weights.expert_weights import Weights
from moe_mk.weights.scan import Progress

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import Gating, LayerCall, PreparedExperts

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ExpertsOfRank:
    """Immutable: other weights, another placement or other ranks make another one, see `dataclasses.replace`."""

    decision: Decision
    """The backends and the reasons; with the parameters of kernels once weights are loaded."""
    kernel: FusedMoEKernel | MonolithicKernel
    grid: Grid
    """The ranks: those of EP share out the experts, those of TP hold slices of the same ones."""
    weights: Any = None
    """The weights of this rank, in the layout of the backend; None before loading."""
    routing_names: tuple[str, str] = ("topk_weights", "topk_ids")
    """The names of weights and ids in messages of `run`."""

    @classmethod
    def build(cls, decision: Decision, grid: Grid, parts: Parts) -> Self:
        """Build the experts of a decision, without weights. Raises what `assemble` does."""
        kernel, settings = assemble(decision, parts), decision.problem.config.kernel
        if settings.tiles > 1:
            from moe_mk.runner.tiled_kernel import tiled

            kernel = tiled(kernel, settings)
        return cls(decision, kernel, grid)

    @classmethod
    def of_engine(
        cls,
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
        routing_names: tuple[str, str] = routing_names,
    ) -> Self:
        """The experts of an engine that routes by itself, with the weights of this rank.

        grid: rank r of its EP ranks has ids from r L on. model: of `MoEConfig`, of one rank. settings: bare keys of
        `MoEConfig.kernel`. tokens: of `parallel`. pool: as of `MoELayer`. unregistered: makes what multiplies in place
        of the backend. Raises UnsupportedError with every reason if no backend is eligible.
        """
        ep, num_routed = grid.ep, model["num_experts"] * grid.ep.size
        described = {
            "model": dict(model) | {"num_experts": num_routed},
            "router": {"top_k": min(top_k, num_routed)},
            "parallel": {"ep": ep.size, "tokens": tokens},
        }
        config = MoEConfig.parse(described, model["name"]).with_(**settings)
        if config.kernel.prepare_finalize == "auto" and ep.size == 1:
            config = config.with_(prepare_finalize="no_ep")  # the engine moves tokens, if they are moved at all
        decision = decide(config, dtype, device)
        made = cls.build(decision, grid, Parts(ExpertMap.linear(num_routed, ep.size), device, ep, pool=pool))
        if unregistered is not None:
            kernel = made.kernel
            assert isinstance(kernel, FusedMoEKernel)
            made = replace(made, kernel=replace(kernel, experts=unregistered(kernel.experts.context)))
        return replace(made.loaded(given), routing_names=routing_names)

    def loaded(self, weights: Weights, on_progress: Progress | None = None) -> Self:
        """Return these experts with weights, converted to the layout of the backend."""
        experts, decision = self.kernel.experts, self.decision
        laid_out = experts.relayout(weights, on_progress)
        if isinstance(experts, FusedExperts):
            decision = replace(decision, parameters=experts.parameters())
        return replace(self, weights=laid_out, decision=decision)

    # What it is.

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of tokens."""
        return self.decision.problem.dtype.dtype

    @cached_property
    def hidden_size(self) -> int:
        """The width of tokens, as a call passes them."""
        return self.decision.problem.config.model.hidden_size

    @cached_property
    def num_experts(self) -> int:
        """The experts of all EP ranks."""
        return self.decision.problem.config.model.num_experts

    @cached_property
    def is_partial(self) -> bool:
        """Whether each EP rank computes only its experts' share of tokens that all EP ranks have."""
        return self.kernel.is_partial

    @cached_property
    def is_direct(self) -> bool:
        """Whether the experts read the caller's rows unchanged and their output is that of the call."""
        kernel, single = self.kernel, self.grid.ep.size == 1 and self.grid.tp.size == 1
        if not (kernel.can_be_prepared and single and isinstance(kernel, FusedMoEKernel)):
            return False
        transport = kernel.prepare_finalize
        unchanged = type(transport) is NoEP and isinstance(transport.context.wire, Plain)
        return unchanged and kernel.experts.traits.consumes[0] is RowTokens

    @cached_property
    def is_exchanged(self) -> bool:
        """Whether tokens are dispatched to other ranks, and what comes back is complete."""
        grid = self.grid
        return self.kernel.can_be_prepared and grid.tp.size == 1 < grid.ep.size and not self.is_partial

    def numerics(self) -> str:
        """Name the choice of this machine on which bits depend; "" without one or without weights."""
        experts = self.kernel.experts
        if self.weights is None or not isinstance(experts, FusedExperts):
            return ""
        return experts.numerics(self.weights)

    def notes(self) -> dict[str, str]:
        """Values that must be equal on every rank of a group, by name."""
        return {**self.decision.notes(), "numerics": self.numerics()}

    def explained(self, *shared: FusedExperts) -> Decision:
        """The decision, with the names of backends that inherit their native call. shared: further backends."""
        kernel, decision = self.kernel, self.decision
        if not isinstance(kernel, FusedMoEKernel):
            return decision
        text = inherited(type(kernel.prepare_finalize), type(kernel.experts), *map(type, shared))
        return replace(decision, by_stages=text) if text else decision

    # One native call.

    def prepare(
        self, weights: Weights | None = None, *, gating: Gating | None = None, shared: SharedExperts | None = None
    ) -> LayerCall | None:
        """One call for all stages of a layer, which counts them in the ledger of the kernel; None: the pair has none.

        weights: in place of its own, in the layout of the backend. gating: the router; None: every call is given a
        routing. shared: experts that are added in a stage of their own.
        """
        kernel, weights = self.kernel, self.weights if weights is None else weights
        if not isinstance(kernel, FusedMoEKernel):
            return None
        transport, experts, own = kernel.prepare_finalize, kernel.experts, None
        context = transport.context
        rows: PreparedExperts | None = own_hook(experts, weights, context.top_k)
        if shared is not None:
            own = own_hook(shared.experts, shared.weights, 1)
        if rows is None or (shared is not None and own is None):
            return None
        token_bytes, mine = context.hidden_size * self.dtype.itemsize, type(transport)
        sent_bytes = sum(row_bytes(each, context.hidden_size) for each in (context.wire, context.dtype))
        stages = (
            ("dispatch", mine, token_bytes),
            ("experts", type(experts if shared is None else shared.experts), 2 * token_bytes),
            ("experts", type(experts), sent_bytes),
            ("combine", mine, token_bytes),
        )
        ran = kernel.spans.ledger.meter(stages).words
        multiply = partial(kernel.multiply, weights=weights)
        return own_hook(transport, LayerParts(rows, own, gating, context.tables, ran, multiply))  # type: ignore[no-any-return]

    @cached_property
    def call(self) -> LayerCall | None:
        """The experts as one call on routed tokens; None where the pair has none, or tokens are quantised first."""
        return self.prepare() if self.is_direct or self.is_exchanged else None

    # Forward on tokens that are routed.

    def run(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """(T, H) with weights and ids (T, K) to (T, H), weighted and summed. Ids outside the experts are skipped.

        It checks its arguments, so that graphs need no guards. Whatever is raised ends the call on every rank.
        """
        plain = type(x_TH) is Tensor and x_TH.dtype is self.dtype and x_TH.layout is torch.strided and x_TH.dim() == 2
        plain, wide_TK = plain and x_TH.shape[1] == self.hidden_size and x_TH.is_cpu, weights_TK
        if plain and type(weights_TK) is Tensor and weights_TK.dtype in HALVES and weights_TK.data_ptr():
            wide_TK = weights_TK.to(torch.float32)
        fits = plain and can_be_called(x_TH, ids_TK, wide_TK)
        if not fits or x_TH.requires_grad:
            self.check(x_TH, weights_TK, ids_TK)
        x_TH, call = x_TH.resolve_neg().contiguous(), self.call
        if call is not None and self.is_direct and x_TH.is_cpu:
            if not fits:
                ids_TK, wide_TK = ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()
            if fits or can_be_called(x_TH, ids_TK, wide_TK):
                return call(x_TH, None, (ids_TK, wide_TK), native.Stage.PLACE, skip=True)
        grid = self.grid
        try:
            with torch.no_grad():
                routing = routing_of(ids_TK, weights_TK, self.num_experts)
                agreed = grid.agreed == (grid.ep.status.epoch, grid.tp.status.epoch)
                if call is not None and self.is_exchanged and agreed and call.is_ready(x_TH.shape[0]):
                    return call(x_TH, None, (routing.ids_TK, routing.weights_TK), native.Stage.DISPATCH)
                return wait(self.steps(x_TH, routing)).to(self.dtype)
        except BaseException as error:
            if not isinstance(error, MoEMKError):  # those are reported where they arise
                grid.fail(error)
            raise

    def steps(self, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
        """Run stage by stage, on checked tokens and physical experts: the bits of `run`."""
        grid, epochs = self.grid, self.grid.epochs
        try:
            yield from grid.agree(self.notes)
            y_TH = yield from self.kernel.steps(x_TH, routing, self.weights)
            return (yield from grid.late_reduce(y_TH, self.kernel.spans, partial_over_ep=self.is_partial))
        except BaseException as error:
            grid.fail(error, epochs)
            raise

    def check(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """Raise ShapeError or UnsupportedError unless `run` can take these."""
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
            name = self.decision.problem.config.model.name
            raise UnsupportedError(f"gradients through {name}", ["inference only; run under torch.no_grad()"])

    def recover(self) -> None:
        """Resume after a call failed on some rank of the group; every rank calls it, and it waits for them."""
        wait(self.grid.recover())


def routing_of(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Routing:
    """Ids outside of the experts (E or -1) become -1 with weight 0."""
    here = (topk_ids >= 0) & (topk_ids < num_experts)
    ids_TK = torch.where(here, topk_ids, -1).to(torch.int32)
    return Routing(ids_TK, topk_weights.to(torch.float32).masked_fill(~here, 0.0))


def own_hook(backend: FusedExperts | PrepareFinalize, *arguments: Any) -> Any:
    """Call `fuse_layer` if the class of the backend defines it; None for a derived class, see `inherited`."""
    hook: Callable[..., Any] = backend.fuse_layer
    return hook(*arguments) if "fuse_layer" in vars(type(backend)) else None


def inherited(*backends: type[FusedExperts] | type[PrepareFinalize]) -> str:
    """Names backends that inherit `fuse_layer`, which is not called for them: they may run otherwise. "": none does."""
    found = []
    for cls in dict.fromkeys(backends):
        owner = next(each for each in cls.__mro__ if "fuse_layer" in vars(each))
        if owner not in (cls, FusedExperts, PrepareFinalize):
            found.append(f"{cls.__name__} inherits fuse_layer of {owner.__name__}")
    return "; ".join(found)


def can_be_called(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> bool:
    """Whether a `LayerCall` reads this routing of x as it is: plain dense tensors on the CPU, integers and f32."""
    if type(ids_TK) is not Tensor or type(weights_TK) is not Tensor or weights_TK.requires_grad:
        return False
    plain = ids_TK.is_cpu and weights_TK.is_cpu and ids_TK.layout is weights_TK.layout is torch.strided
    typed = ids_TK.dtype in IDS and weights_TK.dtype is torch.float32
    if not plain or not typed or ids_TK.dim() != 2 or weights_TK.dim() != 2:
        return False
    fits = ids_TK.shape == weights_TK.shape and ids_TK.shape[0] == x_TH.shape[0]
    as_stored = not (ids_TK.is_neg() or weights_TK.is_neg()) and forward_ad._current_level < 0
    there = x_TH.data_ptr() and ids_TK.data_ptr() and weights_TK.data_ptr()  # memory may be freed
    dense = fits and as_stored and ids_TK.is_contiguous() and weights_TK.is_contiguous()
    return dense and (bool(there) or not x_TH.numel())
