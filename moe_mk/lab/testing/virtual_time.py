"""Transports under a simulated clock: they run as they are, on virtual ranks, and their messages are recorded.

    recording = record("hierarchical", routings, num_experts=256, ranks_per_node=8, hidden_size=7168)
    timeline = simulate(recording, LINKS["nvlink"], LINKS["ibgda"])

Rows really move, in one process and one thread; what is recorded is each message with its bytes, and for which messages
each rank waits. Messages are recorded where they are sent: a collective of the communicator gives one to each peer that
gets bytes; `one_sided_network` packs commands of its proxies, and each is one message, with the size of its put or of
a flag. In place of its proxies stands a card that carries out commands at once and in order; its windows are real.

`plan.timeline` gives messages their times afterwards, so that two recordings of one call are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.network.command import Op, TransferCommand
from moe_mk.comm.network.heap import CHUNK_BYTES, NetworkHeap, Staging
from moe_mk.comm.network.proxy import Proxy
from moe_mk.comm.symmetric.flags import WORD_BYTES, WaitingInLockstep, Words, words_of
from moe_mk.comm.symmetric.heap import FLAG_BYTES, WindowShape, aligned
from moe_mk.comm.symmetric.memory import Memory
from moe_mk.comm.threads import ThreadCommunicator, ThreadWorld
from moe_mk.comm.traffic import Nodes
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.plan.exchange import WIRES
from moe_mk.lab.plan.timeline import Recording, Work
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.one_sided.network import NetworkBufferPool, NetworkBufferSlot
from moe_mk.quant.plain import BF16
from moe_mk.registry import did_you_mean
from moe_mk.tokens import ExpertOutput, Routing, Tokens
from moe_mk.weights.expert_weights import Weights

TRANSPORTS = ("all_to_all", "all_to_all_p2p", "all_to_all_v", "all_gather", "hierarchical", "one_sided_network")
"""Transports that are recorded: they move bytes by the communicator or by commands of the network."""


@dataclass(frozen=True)
class Recorded:
    """A recorded call of dispatch and combine on every rank."""

    recording: Recording
    outputs: list[Tensor]
    """Of each rank: what the transport really returned."""


class VirtualWorld(ThreadWorld):
    """Ranks of one thread whose messages are recorded."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(len(nodes.node_of_W), timeout_s=0.0)
        self.recording = Recording(nodes)
        self.windows: dict[int, _Window] = {}
        self.sent: dict[tuple[int, int], dict[int, int]] = {}
        """By call and rank: the message of each peer that sends it bytes."""

    def communicators(self) -> list[VirtualCommunicator]:  # type: ignore[override]
        return [VirtualCommunicator(self, rank) for rank in range(self.size)]


class VirtualCommunicator(ThreadCommunicator):
    """One rank: posts record messages, and taking from the mail box records the wait."""

    world: VirtualWorld

    def _post(self, outgoing: Sequence[Tensor], phase: str) -> int:
        call = super()._post(outgoing, phase)
        for peer, part in enumerate(outgoing):
            if peer != self.rank and part.nbytes:
                number = self.world.recording.post(self.rank, peer, part.nbytes, phase)
                self.world.sent.setdefault((call, peer), {})[self.rank] = number
        return call

    def _inbox(self, phase: str, call: int) -> dict[int, tuple[str, Tensor]]:
        inbox = super()._inbox(phase, call)
        self.world.recording.wait(self.rank, sorted(self.world.sent.pop((call, self.rank), {}).values()), phase)
        return inbox


@dataclass
class _Window:
    """Memory of one rank that a simulated network card may write."""

    registered: Tensor
    words: Words
    base: int
    """Where its flags begin."""
    stored: dict[int, int]
    """The message that stored each flag last."""


class _Ring:
    """Commands are done when they are committed."""

    head = tail = 0
    has_room = True


class _Card:
    """Carries out the commands of one rank at once, and records each as a message."""

    def __init__(self, world: VirtualWorld, rank: int, data_bytes: int) -> None:
        self.world, self.rank, self.phase = world, rank, "dispatch"
        self.channels = [SimpleNamespace(ring=_Ring(), is_idle=True, taken=())]
        self.window = SimpleNamespace(data_bytes=data_bytes)
        self.lost: Mapping[int, str] = {}
        self.left: Mapping[int, str] = {}
        self.fault = None

    def commit(self, channel: int, command: TransferCommand) -> bool:
        """One command. Raises UnsupportedError for a get: no transport waits for one."""
        own, peer = self.world.windows[self.rank], self.world.windows[command.peer]
        recording, ring = self.world.recording, self.channels[channel].ring
        if command.op is Op.PUT:
            rows = own.registered[command.source : command.source + command.size]
            peer.registered[command.at : command.at + command.size] = rows
            recording.post(self.rank, command.peer, command.size, self.phase)
        elif command.op is Op.STORE:
            peer.words.store(peer.base + command.flag * FLAG_BYTES, command.value)
            number = recording.post(self.rank, command.peer, WORD_BYTES, f"{self.phase} flags")
            peer.stored[command.flag] = number
        else:
            raise UnsupportedError(f"command {command.op.name} is not recorded", ["puts and flags are"])
        ring.head += 1
        ring.tail = ring.head
        return True

    def close(self, patience_s: float) -> None:
        """Nothing is under way."""
        del patience_s


class _VirtualHeap(NetworkHeap):
    """The windows of one rank; waits are recorded."""

    card: _Card

    def wait_until(self, flags: Mapping[int, int], epoch: int, phase: str) -> dict[int, int]:
        counts = super().wait_until(flags, epoch, phase)
        window, recording = self.card.world.windows[self.rank], self.card.world.recording
        recording.wait(self.rank, [window.stored[flag] for flag in flags.values()], f"{phase} flags")
        return counts


class _VirtualBufferSlot(NetworkBufferSlot):
    """The buffer of `one_sided_network` over recorded windows; every other rank is reached by commands."""

    heap: _VirtualHeap

    def _open(self, comm: Communicator) -> NetworkHeap:
        assert isinstance(comm, VirtualCommunicator)
        self._received = {}
        size, rank, data_bytes = comm.size, comm.rank, aligned(self.region.data_bytes(comm.size))
        staging = max(size * self.region.rows * (self.region.value_bytes + self.region.tail_bytes), CHUNK_BYTES) * 2
        shape = WindowShape(size, 2 * size, data_bytes + aligned(staging))
        memory = Memory(shape.total_bytes)
        words, base = words_of(memory.bytes), rank * shape.window_bytes
        registered = memory.bytes[base + shape.data_at : base + shape.data_at + shape.data_bytes]
        comm.world.windows[rank] = _Window(registered, words, base, {})
        card = _Card(comm.world, rank, data_bytes)
        heap = _VirtualHeap(
            memory, words, shape, rank, lambda phase, epoch, layer: WaitingInLockstep(rank, phase, epoch, layer),
            proxy=cast(Proxy, card), far=frozenset(range(size)) - {rank},
            staging=Staging(data_bytes, aligned(staging), lambda channel, place: True), layer=comm.layer,
        )  # fmt: skip
        heap.card = card
        return heap

    def serve(self, comm: Communicator) -> None:
        super().serve(comm)
        self.heap.card.phase = "dispatch"

    def show_sums(self, peer: int, first: int) -> None:
        self.heap.card.phase = "combine"
        super().show_sums(peer, first)


class _TimedExperts(IdentityExperts):
    """Identity, with a time that the recording notes."""

    world: VirtualWorld
    rank: int
    us: float

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if self.us:
            self.world.recording.steps_of_W[self.rank].append(Work(self.us, "experts"))
        return super().run(tokens, weights)


def record(
    transport: str,
    routings: Sequence[Routing],
    *,
    num_experts: int,
    ranks_per_node: int,
    hidden_size: int,
    wire: str = "bf16",
    late_us: Mapping[int, float] | None = None,
    experts_us: float = 0.0,
) -> Recorded:
    """Run one dispatch and combine of a transport on a virtual rank for each routing, and record its messages.

    routings: of each rank, experts placed linearly. wire: one of `plan.exchange.WIRES`. late_us: ranks that begin so
    much later. experts_us: time of the experts of every rank. Raises ConfigError for a transport that is not recorded.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport {transport!r} is not recorded{did_you_mean(transport, TRANSPORTS)}")
    size, top_k, cpu = len(routings), routings[0].ids_TK.shape[1], torch.device("cpu")
    world = VirtualWorld(Nodes.of(size, ranks_per_node))
    placed = ExpertMap.linear(num_experts, size)
    tables, most = placed.tables(cpu), max(max(len(r.ids_TK) for r in routings), 1)
    kernels, comms = [], world.communicators()
    for comm in comms:
        context = TransportContext(
            comm, placed, tables, WIRES[wire], BF16, hidden_size, top_k, cpu, max_num_tokens=most,
            ranks_per_node=ranks_per_node,
        )  # fmt: skip
        experts = _TimedExperts(ExpertsContext(BF16, BF16, "silu", num_experts // size, hidden_size, hidden_size, cpu))
        experts.world, experts.rank, experts.us = world, comm.rank, experts_us
        kernels.append(FusedMoEKernel(PREPARE_FINALIZE[transport](context), experts))
    for comm in comms:
        for pool in [each for each in comm.kept.values() if isinstance(each, NetworkBufferPool)]:

            def make(comm: Communicator = comm, pool: NetworkBufferPool = pool) -> NetworkBufferSlot:
                with torch.inference_mode(False):
                    return _VirtualBufferSlot(comm, pool.geometry)

            pool.add(comm, "dispatch", make)
    for rank, us in (late_us or {}).items():
        world.recording.steps_of_W[rank].append(Work(us, "late"))
    draws = [torch.Generator("cpu").manual_seed(rank) for rank in range(size)]
    tokens = [
        torch.randn((len(r.ids_TK), hidden_size), generator=draw, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        for r, draw in zip(routings, draws, strict=True)
    ]
    outputs = interleave([k.steps(x, r, NO_WEIGHTS) for k, x, r in zip(kernels, tokens, routings, strict=True)])
    return Recorded(world.recording, outputs)


def uniform_routings(
    ranks: int, tokens: int, num_experts: int, top_k: int, *, ranks_per_node: int, nodes_kept: int | None = None,
    seed: int = 0,
) -> list[Routing]:  # fmt: skip
    """Random routings of every rank; nodes_kept: each token goes to the nodes of its best scores, at most so many."""
    nodes = -(-ranks // ranks_per_node)
    made = []
    for rank in range(ranks):
        draw = torch.Generator("cpu").manual_seed(seed * 65_537 + rank)
        scores_TE = torch.rand((tokens, num_experts), generator=draw, dtype=torch.float32, device="cpu")
        if nodes_kept is not None and nodes_kept < nodes:
            best_TX = scores_TE.view(tokens, nodes, -1).amax(2).topk(nodes_kept, 1).indices
            keep_TX = torch.zeros((tokens, nodes), dtype=torch.bool, device="cpu").scatter_(1, best_TX, True)
            scores_TE = scores_TE * keep_TX.repeat_interleave(num_experts // nodes, 1)
        weights_TK, ids_TK = scores_TE.topk(top_k, 1)
        made.append(Routing(ids_TK.to(torch.int32), weights_TK / weights_TK.sum(1, keepdim=True)))
    return made
