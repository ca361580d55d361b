"""The interface of a communication backend: `prepare` dispatches tokens, `finalize` combines outputs.

One file, one class, one decorator make a backend:

    @PREPARE_FINALIZE.register("my_transport")
    class MyTransport(PrepareFinalize):
        traits = TransportTraits(summary="...", produces=RowTokens, wants=OutputStage.REDUCED, ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.config.moe import KernelConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.traits import Traits, common_reasons
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.flight import Flight
from moe_mk.placement.expert_map import ExpertMap, PlacementTables
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.registry import Registry
from moe_mk.shapes import expect
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens
from moe_mk.trace.recorder import Spans

if TYPE_CHECKING:
    from moe_mk.kernels.native.layer import Gating, LayerCall, PreparedExperts


@dataclass(frozen=True, kw_only=True)
class TransportTraits(Traits):
    """Facts of a transport."""

    ANY_WIRE: ClassVar[frozenset[str]] = frozenset({"plain", "fp8", "int8", "mxfp8", "nvfp4"})
    """All formats, for transports that carry values and scales as bytes."""
    produces: type
    """The layout that `prepare` returns: RowTokens, GroupedTokens or BatchedTokens."""
    wants: OutputStage
    """The stage that an output must have reached for `finalize`."""
    wire: frozenset[str] = frozenset({"plain"})
    """Formats of dispatched rows: "plain", "fp8" (values and scales as bytes)."""
    min_ranks: int = 1
    max_ranks: int | None = None
    one_node: bool = False
    """Whether all ranks must share a node."""
    max_top_k: int | None = None
    """The most experts of a token that its kernels are built for; None: any number."""
    tokens: frozenset[str] = frozenset({"sharded"})
    """Whether EP ranks may have different tokens ("sharded"), the same ones ("replicated"), or both."""
    partial: bool = False
    """Whether the output is a partial sum that the layer must still all-reduce over EP."""
    gathers: bool = False
    """Whether every rank receives the rows of all ranks, so that one scale for all rows is known everywhere."""
    uneven: bool = True
    """Whether ranks may own different numbers of experts."""
    blocking: bool = False
    """Whether its calls wait for peers inside a library; ranks of one process then need one thread each."""
    open_calls: int | None = None
    """How many calls may be dispatched and not yet combined at once; None: any number."""
    in_flight: int | None = None
    """How many operations may be issued and not yet received at once; None: any number."""
    comm_unit: Literal["", "SMs", "CUs", "threads"] = ""
    """What `kernel.comm_units` counts; empty: the transport does not support it."""
    masks_ranks: bool = False
    """Whether calls can continue in the same group without dead ranks, see `PrepareFinalize.leave_out`."""
    met: str = ""
    """What of its library it has run with; empty: nothing, the transport was tested against an emulation alone."""


@dataclass(frozen=True)
class Budget:
    """Compute units that a transport reserves for communication."""

    unit: str
    """"SMs", "CUs" (AMD) or "threads"."""
    count: int | None
    """None: the library decides at run time."""
    source: str
    """Where the number comes from: kernel.comm_units, a default, a formula."""

    def __str__(self) -> str:
        return f"{self.unit if self.count is None else f'{self.count} {self.unit}'}: {self.source}"


@dataclass(frozen=True)
class LinkChoice:
    """The link that carries rows between the proxies of a transport."""

    name: str
    because: str
    """The setting, or why the others are not used."""

    def __str__(self) -> str:
        return f"{self.name}: {self.because}"


@dataclass(frozen=True)
class Volume:
    """Rows that one rank is expected to send to others in one call, and the number of collectives."""

    dispatch_rows: float
    combine_rows: float
    collectives: int
    far_rows: float | None = None
    """Rows each way that cross nodes, the others being relayed inside a node; None: rows go to all peers directly."""
    pipelined: bool = False
    """Whether relays forward rows while others still cross, so that both kinds of link are busy at once."""


@dataclass(frozen=True)
class TransportPlan:
    """Memory a transport needs and the limits that a problem exceeds, computed without allocations or imports."""

    buffer_bytes: int
    """Bytes that the transport or its library allocates on one rank."""
    reasons: tuple[Reason, ...]
    """Every limit that the problem exceeds; empty if the transport supports it."""


@dataclass(frozen=True)
class TransportContext:
    """Everything a transport is built from; transports use no default process group and no globals."""

    comm: Communicator
    """The EP ranks; every wait for a peer is through it."""
    expert_map: ExpertMap
    """Which rank holds which expert, on the host."""
    tables: PlacementTables
    """The same on the device: `rank_of_P` and `slot_of_P`, by physical expert."""
    wire: QuantScheme
    """The scheme of dispatched rows, for `encode`."""
    dtype: Plain
    """The dtype of outputs, in which rows come back."""
    hidden_size: int
    """H, the width of rows."""
    top_k: int
    """K, the choices of a token."""
    device: torch.device
    """Where tokens are."""
    spans: Spans = field(default_factory=Spans)
    """Records times of stages."""
    max_num_tokens: int = KernelConfig.model_fields["max_num_tokens"].default
    """Maximum number of tokens of this rank in one call; determines the size of windows."""
    ranks_per_node: int | None = None
    """Ranks of this group on one host; None: all ranks share one."""
    relay_tokens: int | None = None
    """Tokens that are relayed between nodes at a time; None: all of a call."""
    comm_units: int | None = None
    """Compute units that the transport may reserve; None: its default."""
    allow_emulated: bool = False
    """Whether an emulation may replace the library, see `external.library.load`."""
    network: str = KernelConfig.model_fields["network"].default
    """The built-in network transport listens on addresses of this network, such as 10.0.0.0/24."""
    network_link: str = KernelConfig.model_fields["network_link"].default
    """What carries rows between its proxies: a network link, or "auto"."""

    @property
    def num_slots(self) -> int:
        return self.expert_map.num_slots(self.comm.rank)

    @cached_property
    def share(self) -> float:
        """The part of the physical experts that this rank holds."""
        return self.num_slots / max(len(self.expert_map.rank_of_physical), 1)


Multiply = Callable[[Tokens], ExpertOutput]
"""The part of a layer between dispatch and combine."""


@dataclass(frozen=True)
class LayerParts:
    """Parts of a layer from which a transport builds one native call."""

    experts: PreparedExperts
    """Of this rank, on received rows."""
    shared: PreparedExperts | None
    """Experts of one slot for every token of this rank, whose output is added to that of the others; None: there are
    none, or they are among the others."""
    gating: Gating | None
    """The router; None where the call is given every routing, and where an expert has several replicas."""
    tables: PlacementTables
    ran: Any
    """int64 [4, 2] of a `WorkMeter`, to which the call adds what it does."""
    multiply: Multiply
    """`FusedMoEKernel.multiply`."""


class PrepareFinalize(ABC):
    """A communication backend: sends tokens to the ranks of their experts, and returns the sums."""

    traits: ClassVar[TransportTraits]
    collectives: ClassVar[int] = 2
    """Collectives, launches or flags that ranks wait for in one call, for `volume`."""
    default_units: ClassVar[int | None] = None
    """Compute units that the library takes by default; None: it decides at run time."""
    relays: ClassVar[bool] = False
    """Whether a token crosses to each node once and is forwarded there while others still cross, for `volume`."""
    pads_rows: ClassVar[bool] = False
    """Whether `prepare` returns room for kernel.max_num_tokens tokens of each rank, whatever the routing."""

    def __init__(self, context: TransportContext) -> None:
        self.context = context

    @abstractmethod
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Dispatch tokens to the ranks of their experts. routing.ids_TK: physical experts, -1 for none."""

    @abstractmethod
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Combine outputs: (T, H) in the layer's dtype, in the order of x_TH. tokens: as returned by `prepare`."""

    def fuse_layer(self, parts: LayerParts) -> LayerCall | None:
        """One call for all stages of a layer; None: not supported.

        Not inherited, as `FusedExperts.fuse_layer`. Bit-identical to the separate steps, between any ranks: peers may
        run them.
        """
        return None

    def leave_out(self, active_W: Tensor) -> None:
        """Continue without some ranks. active_W: int32 or bool; 0 for ranks that no rank sends to or waits for.

        Assignments to experts of those ranks add nothing to the output; the weights of the others are not changed.
        Every active rank calls it with the same value between two calls, before any call has failed, once for each
        group of layers that share a buffer; repeating it changes nothing.
        Raises UnsupportedError where the transport or the installed build of its library has no rank mask, or inside
        a call; ConfigError if this rank is not active; ShapeError for a wrong shape or dtype.
        Host sync. A captured CUDA graph must be captured again where the transport's documentation requires it.
        """
        active = self.active_ranks(active_W)
        if all(active):
            return
        name = next((n for n, kind in PREPARE_FINALIZE.items() if kind is type(self)), type(self).__name__)
        library = f" of the installed {self.traits.library}" if self.traits.library else ""
        raise UnsupportedError(
            f"transport '{name}' cannot leave out ranks {[rank for rank, on in enumerate(active) if not on]}",
            [f"it has no rank mask{library}; form a group of the other ranks and call RebalanceManager.rank_lost()"],
        )

    def active_ranks(self, active_W: Tensor) -> list[bool]:
        """The mask of `leave_out` as Python values, checked as described there."""
        comm = self.context.comm
        expect("active_W", active_W, "W", (torch.int32, torch.bool), W=comm.size)
        active = [bool(value) for value in active_W.tolist()]
        if not active[comm.rank]:
            raise ConfigError(f"rank {comm.rank} cannot leave out itself; leave it out on the other ranks")
        return active

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """Return the rows that one call moves under uniform routing, for the plan.

        By default a row for each distinct other rank of a token, a sum back from each, and `collectives`; where it
        `relays` between nodes, a row for each distinct other node, and there for each distinct other rank.
        """
        tokens, ranks, nodes = problem.num_tokens, problem.ranks, min(problem.nodes, problem.ranks)
        if nodes == 1 or not cls.relays:
            remote = tokens * problem.ranks_per_token * (ranks - 1) / ranks
            return Volume(remote, remote, cls.collectives)
        per_node = ranks / nodes
        far = tokens * problem.nodes_per_token * (nodes - 1) / nodes
        near = tokens * problem.ranks_per_token * (per_node - 1) / per_node
        return Volume(far + near, far + near, cls.collectives, far_rows=far, pipelined=True)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """R of the worst routing. By default every token of every rank has an expert on this one, see `pads_rows`."""
        return problem.ranks * (problem.config.kernel.max_num_tokens if cls.pads_rows else problem.num_tokens)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Bytes that the transport or its library keeps between calls on one rank; excludes the rows of a call."""
        del problem
        return 0

    @classmethod
    def budget(cls, problem: Problem) -> Budget | None:
        """The compute units reserved for communication, as set or by default; None where they cannot be set."""
        asked = problem.config.kernel.comm_units
        if not cls.traits.comm_unit or problem.ranks == 1:
            return None
        return cls.own_budget(problem) if asked is None else Budget(cls.traits.comm_unit, asked, "kernel.comm_units")

    @classmethod
    def own_budget(cls, problem: Problem) -> Budget:
        """The budget if kernel.comm_units is not set, for transports with a `comm_unit`."""
        del problem
        source = "chosen by the library" if cls.default_units is None else "the library's default"
        return Budget(cls.traits.comm_unit, cls.default_units, source)

    @classmethod
    def link(cls, problem: Problem) -> LinkChoice | None:
        """Return the link between proxies; None for transports without, and where no rank needs one."""
        del problem
        return None

    @classmethod
    def plan(cls, problem: Problem) -> TransportPlan:
        """Bytes and every exceeded limit, from the problem alone; no library is needed."""
        return TransportPlan(cls.buffer_bytes(problem), tuple(cls.reasons_against(problem)))

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every reason why this backend does not support the problem; empty if it does."""
        return [*common_reasons(cls.traits, problem), *_fabric_reasons(cls.traits, problem)]

    def encode(self, x_TH: Tensor) -> QuantTensor:
        """Quantise tokens to the wire scheme."""
        with self.context.spans.span("quantise"):
            return self.context.wire.quantize(x_TH)

    def local_rows(
        self, x_RH: QuantTensor, physical_RK: Tensor, weights_RK: Tensor, handle: object, expected_N: float | None
    ) -> RowTokens:
        """Rows with the slots of this rank; assignments to experts of other ranks become -1 with weight 0."""
        c = self.context
        slots_RK, mine = c.tables.local_slots(physical_RK, c.comm.rank), c.num_slots
        weights_RK = torch.where(slots_RK >= 0, weights_RK, 0.0)
        return RowTokens(x_RH, slots_RK, weights_RK, mine, handle, expected_N=expected_N, most_K=self.most_K)

    def window_rows(
        self, x_RH: QuantTensor, slots_RK: Tensor, weights_RK: Tensor, handle: object, num_tokens: int
    ) -> RowTokens:
        """Rows of a window with the slots of this rank, -1 for others; num_tokens: of this rank's own call."""
        return RowTokens(
            x_RH, slots_RK, torch.where(slots_RK >= 0, weights_RK, 0.0), self.context.num_slots, handle,
            expected_N=self.expected_in_window(num_tokens), most_K=self.most_K,
        )  # fmt: skip

    def expect_room(self, x_TH: Tensor) -> None:
        """Raise ShapeError where a call brings more tokens than a window holds."""
        most = self.context.max_num_tokens
        if x_TH.shape[0] > most:
            raise ShapeError(
                f"x has T={x_TH.shape[0]} tokens, a window holds {most} of each rank "
                "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
            )

    @property
    def most_K(self) -> int:
        """The most experts of one token on this rank: a router chooses distinct ones."""
        return min(self.context.top_k, self.context.num_slots)

    def expected_of_tokens(self, num_tokens: int) -> float:
        """Assignments to expect on this rank of all tokens of the group, under uniform routing."""
        return num_tokens * self.context.top_k * self.context.share

    def expected_in_window(self, num_tokens: int) -> float | None:
        """`expected_of_tokens` where other ranks' token counts are on the device: assumes this rank's count for each.

        None for a rank without tokens, which may receive any number.
        """
        return self.expected_of_tokens(num_tokens * self.context.comm.size) or None

    def expected_of_rows(self, num_rows: int) -> float:
        """Return the expected assignments of received rows, each of a token with an expert on this rank."""
        return self.expected_of_tokens(num_rows) / self._share_with_experts if self.context.num_slots else 0.0

    @cached_property
    def _share_with_experts(self) -> float:
        """The part of all tokens that have at least one expert on this rank, under uniform routing."""
        c, physical = self.context, len(self.context.expert_map.rank_of_physical)
        # A token's experts are distinct: the part of tokens without one here falls with every choice.
        without = prod(max(physical - c.num_slots - k, 0) / max(physical - k, 1) for k in range(c.top_k))
        return 1.0 - without


def _fabric_reasons(traits: TransportTraits, problem: Problem) -> list[Reason]:
    ranks, tokens, reasons = problem.ranks, problem.config.parallel.tokens, []
    if ranks < traits.min_ranks:
        reasons.append(Reason("ranks", f"needs {traits.min_ranks} ranks or more, the group has {ranks}"))
    if traits.max_ranks is not None and ranks > traits.max_ranks:
        most = "1 rank" if traits.max_ranks == 1 else f"up to {traits.max_ranks} ranks"
        reasons.append(Reason("ranks", f"serves {most}, the group has {ranks}"))
    if traits.one_node and problem.nodes > 1:
        reasons.append(Reason("fabric", f"needs all ranks in one node, {ranks} ranks span {problem.nodes} nodes"))
    if ranks > 1 and tokens not in traits.tokens:
        have, fix = {"replicated": "the same tokens", "sharded": "their own tokens"}[tokens], next(iter(traits.tokens))
        reasons.append(Reason("tokens", f"ranks bring {have}", f"parallel.tokens = {fix}"))
    if traits.library and problem.sums != problem.dtype:
        text = f"carries rows of one dtype, and {problem.dtype.name} layers sum in {problem.sums.name}"
        reasons.append(Reason("dtype", text, "dtype = bf16"))
    asked = problem.config.kernel.comm_units
    if ranks > 1 and asked is not None and not traits.comm_unit:
        text = f"does not support kernel.comm_units (= {asked})"
        reasons.append(Reason("comm_units", text, "kernel.comm_units = null"))
    if not traits.uneven and problem.config.model.num_experts % ranks:
        reasons.append(Reason("uneven", f"{problem.config.model.num_experts} experts do not divide over {ranks} ranks"))
    top_k = problem.config.router.top_k
    if traits.max_top_k is not None and top_k > traits.max_top_k:
        text = f"the kernels take {traits.max_top_k} experts a token, this router has {top_k}"
        reasons.append(Reason("top_k", text))
    return reasons


PREPARE_FINALIZE: Registry[type[PrepareFinalize]] = Registry(
    "prepare_finalize backend", PrepareFinalize, group="moe_mk.prepare_finalize"
)
