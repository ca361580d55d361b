"""A group of `torch.distributed`: gloo between CPU processes, NCCL between GPUs. The group is given, never created.

Over gloo all data is sent in messages that identify their call (`comm.messages`), with a deadline, because gloo's own
is 30 minutes. NCCL collectives have agreed sizes, are ordered on the stream and guarded by the watchdog of the group;
the counts before them are sent in messages where the group has gloo for the host. gloo does not support CUDA tensors in
every operation: those are staged through the host. Counts and digests, made on the host, are staged through the GPU
where a group has only NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.communicator import Communicator, even_parts, offsets, summing_dtype
from moe_mk.comm.failure import Failure, GroupStatus, describe
from moe_mk.comm.header import EAGER_BYTES, Arrival, Caller, Envelope
from moe_mk.comm.messages import GroupMessages
from moe_mk.comm.single import SingleRank
from moe_mk.comm.traffic import COUNT_BYTES
from moe_mk.errors import CommError, ConfigError, MoEMKError, Suppress, unless_signalled
from moe_mk.flight import Flight, InFlight

DEFAULT_TIMEOUT_S = 120.0

# torch 2.13 renamed the function, and warns of the name that 2.11 and 2.12 know.
_gather_into = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class DistributedCommunicator(Communicator):
    """One rank of a process group. timeout_s: how long a peer may be late before CommError. layer: for messages."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        layer: str = "",
        kept: dict[Hashable, object] | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """members: ranks of the process group that take part, see `without`; None: all of them."""
        if dist.get_rank(group) < 0:
            raise ConfigError("this process is not a member of the group it was given; pass its own group")
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._messages = GroupMessages.of(group) if self._backends.get("cpu") == "gloo" else None
        super().__init__(kept, GroupStatus() if self._messages is None else self._messages.status)
        if self._messages is not None:
            self.lock = self._messages.lock
        self.group, self.timeout_s, self.layer = group, timeout_s, layer
        self._members = list(range(dist.get_world_size(group)) if members is None else members)
        """The rank in the process group of each rank."""
        self._rank_of = {member: rank for rank, member in enumerate(self._members)}
        self.rank, self.size = self._rank_of[dist.get_rank(group)], len(self._members)
        self._is_whole = self._members == list(range(self.size))
        """Whether ranks have the same numbers in the process group."""
        self.eager_bytes = 0 if self._messages is None else EAGER_BYTES
        self._made_caller: Caller | None = None

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """A message to each rank that gets rows; what stays here is copied."""
        self._count_sent(phase, rows, send)
        staged = self._stage(rows)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
        yield from self._exchange(received, staged, send, receive, phase)
        return received.to(rows.device)

    def all_to_others(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        """Exchange rows with the other ranks, written directly into `received`."""
        self._count_sent(phase, rows, send)
        staged = self._stage(rows)
        arrival = received if received.device == staged.device else torch.empty_like(received, device=staged.device)
        yield from self._exchange(arrival, staged, self._to_others(send), self._to_others(receive), phase)
        if arrival is not received:
            received.copy_(arrival)

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """A message to each rank; by NCCL into one tensor, padded to the longest rank."""
        if rows.shape[0] != counts[self.rank]:
            text = f"brings {rows.shape[0]} rows, after it announced {counts[self.rank]}"
            raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=self.rank)
        self._count_sent(phase, rows, [rows.shape[0]] * self.size)
        staged = self._stage(rows)
        received = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
        starts = offsets(counts)
        if self._by_messages(staged):
            received[starts[self.rank] : starts[self.rank + 1]] = staged
            parts = {peer: received[starts[peer] : starts[peer + 1]] for peer in self._others()}
            yield from self._swap(dict.fromkeys(self._others(), staged), parts, phase)
            return received.to(rows.device)
        longest = max(counts)
        padded = torch.zeros((longest, *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
        padded[: len(staged)] = staged
        every = torch.empty((self.size * longest, *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
        yield from self._fly(lambda: _gather_into(every, padded, group=self.group, async_op=True), phase)
        for peer, part in enumerate(every.view(self.size, longest, *rows.shape[1:])):
            received[starts[peer] : starts[peer + 1]] = part[: counts[peer]]
        return received.to(rows.device)

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum 16-bit numbers in f32 and round once. Over gloo each rank adds up its part in rank order for all."""
        total = self._stage(x).to(summing_dtype(x.dtype), copy=True)
        self._count_reduced(phase, x)
        if not self._by_messages(total):
            yield from self._fly(lambda: dist.all_reduce(total, group=self.group, async_op=True), phase)
            return total.to(device=x.device, dtype=x.dtype)
        lengths = even_parts(total.numel(), self.size)
        theirs = dict(enumerate(torch.split(total.view(-1), lengths)))
        mine = theirs.pop(self.rank)
        parts = mine.new_empty((self.size, len(mine)))
        parts[self.rank] = mine
        yield from self._swap(theirs, {peer: parts[peer] for peer in theirs}, phase)
        mine.copy_(parts[0])
        for part in parts[1:]:
            mine += part
        yield from self._swap(dict.fromkeys(theirs, mine), theirs, phase)
        return total.to(device=x.device, dtype=x.dtype)

    def exchange_counts(self, counts: Sequence[int], phase: str) -> Flight[list[int]]:
        """Counts are sent in the headers of messages."""
        if self._messages is None:
            return (yield from super().exchange_counts(counts, phase))
        self.traffic.sent(phase, [COUNT_BYTES] * self.size, self.rank)
        theirs = yield from self._swap({}, dict.fromkeys(self._others()), phase, dict(enumerate(counts)))
        return [counts[peer] if peer == self.rank else theirs[peer] for peer in range(self.size)]

    def swap_eager(
        self, outgoing: Mapping[int, Envelope], awaited: Mapping[int, int], phase: str
    ) -> Flight[dict[int, Arrival]]:
        """One message to each peer; gloo takes a shorter one into a larger receive, so no size is agreed on."""
        messages = self._messages
        assert messages is not None
        self._check_members(phase)
        if self._is_whole:
            with self.abort_on_error(drops=False):
                return (yield from messages.exchange_eager(self._caller, phase, outgoing, awaited))
        of = self._members
        going = {of[peer]: envelope for peer, envelope in outgoing.items()}
        sizes = {of[peer]: num_bytes for peer, num_bytes in awaited.items()}
        with self.abort_on_error(drops=False):
            arrived = yield from messages.exchange_eager(self._caller, phase, going, sizes)
        return {self._rank_of[member]: arrival for member, arrival in arrived.items()}

    def swap_now(
        self,
        outgoing: Mapping[int, Envelope],
        awaited: Mapping[int, int],
        phase: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Arrival]:
        """Without a generator: its steps, in cold caches, cost as much as the message."""
        if not self._is_whole:
            return super().swap_now(outgoing, awaited, phase, meanwhile)
        messages = self._messages
        assert messages is not None
        self._check_members(phase)
        try:
            return messages.exchange_now(self._caller, phase, outgoing, awaited, meanwhile)
        except BaseException as error:
            self.fail(error)
            raise

    def give_back(self, arrivals: Iterable[Arrival]) -> None:
        """The next messages go there."""
        assert self._messages is not None
        self._messages.give_back(arrivals)

    def skip(self, phase: str) -> Flight[None]:
        """Calls are counted by every rank."""
        self._check_members(phase)
        if self._messages is not None:
            self._messages.skip_call()
        yield InFlight(phase)

    def library_group(self) -> dist.ProcessGroup:
        """The group itself. Raises ConfigError for some of its ranks."""
        if self.size < dist.get_world_size(self.group):
            raise ConfigError(f"{self.size} ranks of a process group are left; libraries need a group of these alone")
        return self.group

    def without(self, ranks: Collection[int]) -> Flight[Communicator]:
        """Over gloo, while connections between the others are intact, as they are after a process died; or one rank."""
        lost = sorted(set(ranks))
        wrong = [rank for rank in lost if not 0 <= rank < self.size or rank == self.rank]
        if wrong or not lost:
            raise ConfigError(f"ranks {wrong or lost} out of range: others than rank {self.rank}, below {self.size}")
        if len(lost) == self.size - 1:  # there is no rank to agree with
            if self._messages is not None:
                self._messages.connections.leave_out([self._members[rank] for rank in lost])
            yield InFlight("recovery")
            return SingleRank()
        if self._messages is None or dist.get_world_size(self.group) > MOST_MEMBERS:
            yield from super().without(ranks)
        assert self._messages is not None
        epoch = self.status.epoch
        try:
            self._messages.connections.leave_out([self._members[rank] for rank in lost])
            members = [member for rank, member in enumerate(self._members) if rank not in lost]
            left = DistributedCommunicator(self.group, timeout_s=self.timeout_s, layer=self.layer, members=members)
            yield from left.recover()
        except BaseException as error:
            if not isinstance(error, MoEMKError):  # as in `comm.collective`
                self.fail(error)
                if self.status.epoch == epoch:
                    self.fail_recovery(error)
            raise
        return left

    def number_layer(self) -> None:
        """The next number of the group, of whichever layers it serves."""
        if self._messages is not None:
            self.layer_number = self._messages.next_layer()

    def _report(self, failure: Failure) -> None:
        if self._messages is not None:
            culprit = None if failure.culprit is None else self._members[failure.culprit]
            self._messages.connections.report(replace(failure, culprit=culprit))

    def fail_recovery(self, error: BaseException) -> None:
        if self._messages is not None and self.size > 1:
            with Suppress(Exception):
                self._messages.connections.report_recovery(f"its recovery failed: {describe(error)}")

    def _recover(self, number: int) -> Flight[int]:
        if self._messages is None:
            text = "a group without gloo for the host cannot agree to go on; build the layer over a new group"
            raise CommError(text, rank=self.rank, phase="recovery", layer=self.layer)
        return (yield from self._messages.recover(self._caller, number))

    @property
    def _caller(self) -> Caller:
        """Made again if a field has changed."""
        made = self._made_caller
        if made is None or made.layer_number != self.layer_number or made.layer is not self.layer:
            made = self._made_caller = Caller(self.layer, self.layer_number, self.timeout_s, self._rank_of)
        return made if made.timeout_s == self.timeout_s else replace(made, timeout_s=self.timeout_s)

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _stage(self, x: Tensor) -> Tensor:
        return x.contiguous().to(staging_device(x.device, self._backends))

    def _by_messages(self, staged: Tensor) -> bool:
        return self._messages is not None and self._backends.get(staged.device.type) == "gloo"

    def _exchange(
        self, received: Tensor, staged: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        if not self._by_messages(staged):
            splits = list(receive), list(send)
            yield from self._fly(
                lambda: dist.all_to_all_single(received, staged, *splits, group=self.group, async_op=True), phase
            )
            return
        if send[self.rank] != receive[self.rank]:
            text = f"keeps {send[self.rank]} rows, after it announced {receive[self.rank]}"
            raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, peer=self.rank)
        at, received_at = offsets(send), offsets(receive)
        outgoing = {peer: staged[at[peer] : at[peer + 1]] for peer in range(self.size) if send[peer]}
        incoming = {
            peer: received[received_at[peer] : received_at[peer + 1]] for peer in range(self.size) if receive[peer]
        }
        if self.rank in outgoing:
            incoming.pop(self.rank).copy_(outgoing.pop(self.rank))
        yield from self._swap(outgoing, incoming, phase)

    def _swap(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor | None],
        phase: str,
        counts: Mapping[int, int] | None = None,
    ) -> Flight[dict[int, int]]:
        """Messages to and from peers, see `GroupMessages.exchange`; by default each with its number of rows."""
        assert self._messages is not None
        self._check_members(phase)
        numbers = {peer: len(rows) for peer, rows in outgoing.items()} if counts is None else dict(counts)
        numbers.pop(self.rank, None)
        of = self._members
        full = {of[peer]: rows for peer, rows in outgoing.items() if rows.numel()}
        places = {of[peer]: rows if rows is not None and rows.numel() else None for peer, rows in incoming.items()}
        numbers = {of[peer]: number for peer, number in numbers.items()}
        with self.abort_on_error(drops=False):
            received = yield from self._messages.exchange(self._caller, phase, numbers, full, places)
        return {self._rank_of[member]: number for member, number in received.items()}

    def _check_members(self, phase: str) -> None:
        """Raise CommError if an earlier call failed, or if ranks of this view were left out."""
        self.check(phase)
        if self._messages is None or not self._messages.connections.left_out:
            return
        if gone := self._messages.connections.left_out.intersection(self._members):
            text = f"ranks {sorted(gone)} of the process group were left out; use the view that without() returned"
            raise CommError(text, rank=self.rank, phase=phase, layer=self.layer, on_all_ranks=True)

    def _fly(self, post: Callable[[], dist.Work], phase: str) -> Flight[None]:
        """A collective on the stream of the device."""
        self.check(phase)
        with self.abort_on_error(drops=False):
            try:
                work = post()
                yield InFlight(phase)
                work.wait()
            except unless_signalled(RuntimeError) as problem:
                first_line = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
                text = f"a peer of {self.size} is dead or later than the group's own timeout: {first_line}"
                raise CommError(text, rank=self.rank, phase=phase, layer=self.layer) from problem


MOST_MEMBERS = 62
"""Maximum size of a group that can continue without some ranks: excluded ranks are sent as bits of a number."""


def staging_device(device: torch.device, backends: Mapping[str, str]) -> torch.device:
    """The device from which a tensor can be sent: its own, unless gloo needs it on the host, or the group needs a GPU.

    backends: the backend of the group for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.
    """
    backend = backends.get(device.type)
    if backend is None:
        return torch.device("cuda" if "cuda" in backends else "cpu")
    return torch.device("cpu") if backend == "gloo" else device
