"""Experts of which only some have a slot: in memory with the others on a disk, or on a GPU with the others below it.

A call knows its experts when it begins. Those that are in slots are multiplied while the missing ones are read, which
are multiplied as they arrive; where they are more than the slots, slots are used again in the same call. The records
of all experts are in an `ExpertStore`, or in host memory below a GPU.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import ShapeError, StoreError
from moe_mk.experts.residency import POLICIES, READERS, PoolMember, ResidencyCounts, ResidencyPool
from moe_mk.jobs import Bell, Job, Threads, listen
from moe_mk.text import amount
from moe_mk.weights.expert_store import ExpertStore, write_store
from moe_mk.weights.expert_weights import Weights, digest


def slots_of_rows(counts_L: Tensor, x: Tensor) -> Tensor:
    """The expert of each row of grouped (N, H) or batched (L, S, H) tokens, int32 (rows, 1), on the host; -1: none.

    Raises ShapeError for counts of more rows than there are.
    """
    counts_L = counts_L.to("cpu", torch.int64)
    slots_L = torch.arange(len(counts_L), dtype=torch.int32, device="cpu")
    if x.dim() == 3:
        is_row_LS = torch.arange(x.shape[1], dtype=torch.int64, device="cpu") < counts_L[:, None]
        return torch.where(is_row_LS, slots_L[:, None], -1).view(-1, 1)
    ids_N = torch.repeat_interleave(slots_L, counts_L)
    if len(ids_N) > len(x):
        raise ShapeError(f"counts_L sums to {len(ids_N)}, but there are {len(x)} rows")
    return torch.nn.functional.pad(ids_N, (0, len(x) - len(ids_N)), value=-1)[:, None]


def memory_of(record_B: Tensor) -> memoryview:
    """The bytes of a record, which keep its memory: a read that was not waited for may still write to it."""
    return record_B.numpy().data


def open_store(
    config: ResidencyConfig, weights: Weights, facts: Mapping[str, str], record_B: Tensor, pack: Callable[[int], None]
) -> ExpertStore:
    """Open the store of these experts in the folder of the configuration, written before if there is none.

    facts: of the layout of a record. pack: writes one expert to record_B, which is aligned for direct reads. A store
    that is written here stays for later processes; the file of experts that are `passing` has no name, and is gone once
    it is closed. Raises StoreError for a store that is damaged, foreign, or cannot be written.
    """
    name, num_experts = digest(weights), weights.num_slots
    of_layout = blake2b(repr(sorted(facts.items())).encode(), digest_size=4).hexdigest()
    facts, record_bytes = {**facts, "experts": name}, record_B.numel()
    assert config.store is not None
    path = config.store / f"{name[:32]}-{of_layout}.experts"
    passing = getattr(weights, "passing", False) and not path.exists()
    if passing:
        path = path.with_name(f"{path.name}-{token_hex(4)}")
    if not path.exists():

        def packed() -> Iterator[memoryview]:
            for expert in range(num_experts):
                pack(expert)
                yield memory_of(record_B)

        write_store(path, facts, num_experts, record_bytes, packed())
    try:
        store = ExpertStore(path)
    finally:
        if passing:
            path.unlink(missing_ok=True)
    if store.facts != facts or store.record_bytes != record_bytes or store.num_experts != num_experts:
        store.close()
        raise StoreError(
            f"the store {path} holds other experts than its name states; delete it, and load the layer again"
        )
    return store


class HostRecords:
    """The records of all experts in host memory, [E, bytes] uint8, in the place of an `ExpertStore`."""

    path = Path("host memory")

    def __init__(self, records_EB: Tensor) -> None:
        self.records_EB = records_EB
        self.num_experts, self.record_bytes = records_EB.shape

    def pieces(self) -> range:
        """None: there is nothing to read before the copy to a slot."""
        return range(0)

    def read(self, expert: int, record: memoryview) -> None:
        """Copy the record of an expert from the store."""
        record[:] = memory_of(self.records_EB[expert])


def pool_of(config: ResidencyConfig, pool: ResidencyPool | None, record_bytes: int, num_experts: int) -> ResidencyPool:
    """The pool of a layer, one of its own if it is given none. Raises ConfigError where not one expert fits."""
    if pool is None:
        given = config.bytes or record_bytes * (config.slots or 0)
        pool = ResidencyPool(given if given < record_bytes else min(given // record_bytes, num_experts) * record_bytes)
    pool.expect_room(record_bytes)
    return pool


class Reading(NamedTuple):
    """A record on its way to a slot."""

    expert: int
    slot: int
    record_B: Tensor
    """Where it is read to."""
    parts: list[Job[None]]
    mark: Any
    """Of what was queued on the device before; None on a CPU."""

    @property
    def is_over(self) -> bool:
        """Whether no thread writes to `record_B`, now or later."""
        return all(part.is_over for part in self.parts)

    def cancel(self) -> None:
        """Begin no further piece."""
        for part in self.parts:
            part.cancel()


class Cache(PoolMember):
    """The slots of one layer and what is in them. One call at a time uses it.

    A backend defines where a record is read to, and how it gets from there to its slot. A call that fails or is
    interrupted waits for nothing: a slot that a thread still writes to is used again once the thread has ended.
    """

    where = "in memory"
    """Of the slots, in words."""
    most_reading = sys.maxsize
    """Records that may be on their way at a time."""

    def __init__(
        self, store: ExpertStore | HostRecords, config: ResidencyConfig, pool: ResidencyPool, *, limit_s: float
    ) -> None:
        """limit_s: how long a call waits for a record. Raises ConfigError for memory of less than one expert of each
        layer, StoreError where calls of other layers return no slot in time.
        """
        self.store, self.config = store, config
        self.row_of_E = torch.full((store.num_experts,), -1, dtype=torch.int32, device="cpu")
        """The slots of experts as kernels read them; of those that are not resident any number."""
        self.uses = self.hits = self.reads = 0
        """Distinct experts of all calls, those that were resident, and records that were read."""
        self._needed, self._missing = list[int](), list[int]()
        """Of the call that was begun last."""
        self.reading = list[Reading]()
        """Records on their way, those of a call that did not end included."""
        self.readers = Threads(READERS)
        self._bell = Bell()
        super().__init__(pool, store.record_bytes, POLICIES[config.policy](store.num_experts), limit_s=limit_s)

    @abstractmethod
    def room(self, expert: int, slot: int) -> Tensor:
        """Host memory of a record, into which it is read; of `HostRecords` where it is."""

    def mark(self) -> Any:
        """The end of what is queued on the device; None on a CPU."""
        return None

    def fill(self, one: Reading) -> None:
        """Copy a record that was read to its slot, unless it was read there."""
        return

    def __str__(self) -> str:
        is_shared = self.config.slots is self.config.bytes is None
        of_all = f" of {amount(self.pool.num_bytes)} for all layers" if is_shared else ""
        held = f"{self.share} of {self.store.num_experts} experts {self.where}{of_all}"
        return f"{held}, {self.config.policy}; the others in {self.store.path}"

    @property
    def counts(self) -> ResidencyCounts:
        sizes = self.share, self.store.num_experts, self.record_bytes
        return ResidencyCounts(*sizes, self.uses, self.hits, self.reads)

    @property
    def is_whole(self) -> bool:
        """Whether every expert is in memory. Called with the lock held, so that they stay there."""
        with self.pool.guard(self):
            return len(self.slot_of) == len(self.row_of_E)

    def clear(self) -> None:
        """Empty the slots, and forget what was used."""
        with self.exclusive(), self.pool.guard(self):
            self.slot_of.clear()
            self.settle()
            self.policy = POLICIES[self.config.policy](self.store.num_experts)

    def begin(self, ids: Tensor) -> list[int]:
        """Count a call with these assignments, on the host, -1: none; returns the missing experts, ascending.

        Called with the lock held. Raises ShapeError for ids of no expert.
        """
        experts: list[int] = torch.unique(ids).tolist()
        if experts and not -1 <= experts[0] <= experts[-1] < len(self.row_of_E):
            raise ShapeError(f"ids are in {experts[0]} ... {experts[-1]}, expected -1 ... {len(self.row_of_E) - 1}")
        experts = experts[1:] if experts[:1] == [-1] else experts
        self.policy.used(experts)
        self.pool.called(self)
        if self.reading:  # of a call that failed or was interrupted
            self.settle()
        self._needed, self._missing = experts, [expert for expert in experts if expert not in self.slot_of]
        self.uses, self.hits = self.uses + len(experts), self.hits + len(experts) - len(self._missing)
        return self._missing

    def waves(self) -> Iterator[Tensor]:
        """The experts of the call that `begin` began, bool [E + 1], in groups that are in slots while they are used.

        First those that are here, the others as they arrive; the last element is False. Raises StoreError for a record
        that cannot be read in time or is not what was written; the caller has not seen it then, and its slot is free
        once no thread writes to it. Called with the lock held.
        """
        missing, needed, reading = self._missing, frozenset(self._needed), dict[int, Reading]()
        here = sorted(needed.difference(missing))
        try:
            self._read(missing, needed, reading)
            if here:
                yield self._wave(here)
            while missing or reading:
                self._read(missing, needed, reading, is_used=True)
                if reading:
                    yield self._wave(self._arrived(reading))
                else:
                    self._await_slot(missing[0])
        finally:
            for one in reading.values():  # of a call that did not end
                one.cancel()

    def _wave(self, experts: list[int]) -> Tensor:
        in_wave_E = torch.zeros(len(self.row_of_E) + 1, dtype=torch.bool, device="cpu")
        in_wave_E[experts] = True
        return in_wave_E

    def being_read(self) -> list[int]:
        return [one.slot for one in self.reading]

    def settle(self) -> None:
        """Give up the reads of a call that did not end, whose slots are free as soon as no thread writes to them."""
        for one in self.reading:
            one.cancel()
        self.reading = [one for one in self.reading if not one.is_over]

    def forked(self) -> None:
        self.reading = []

    def _read(
        self, missing: list[int], needed: Collection[int], reading: dict[int, Reading], *, is_used: bool = False
    ) -> None:
        """Begin to read missing experts, in order, as far as there are slots.

        Slots of the pool and experts that the call does not need make room first. is_used: whether the resident ones
        have been used, and may make room too; then `READERS` records are read at a time, so that the policy keeps the
        best of the others, and nothing comes from the pool.
        """
        while missing and len(self.reading) < self.most_reading:
            if not (free := self.free) and not is_used and self.pool.grow(self):
                free = self.free
            if not free:
                may_use = is_used and len(reading) < READERS
                others = [each for each in self.slot_of if each not in needed] or list(self.slot_of) * may_use
                if not others:
                    return
                free = [self.slot_of.pop(self.policy.victim(others))]
            expert, slot = missing[0], free[-1]
            parts, record_B = list[Job[None]](), self.room(expert, slot)
            if isinstance(self.store, ExpertStore):
                parts = self.pieces_of(expert, record_B, self._bell)
            one = reading[expert] = Reading(expert, slot, record_B, parts, self.mark())
            self.reading.append(one)  # before a thread writes to it
            missing.pop(0)
            self.reads += 1
            for part in parts:
                self.readers.put(part)

    def _arrived(self, reading: dict[int, Reading]) -> list[int]:
        """Wait for the next experts, and enter them into their slots."""
        found: list[int] = []

        def has_come() -> bool:
            found[:] = (e for e, each in reading.items() if all(part.has_ended for part in each.parts))
            return bool(found)

        self._await(has_come, min(reading))
        for expert in sorted(found):
            self.enter(expert, reading)
        return found

    def _await_slot(self, expert: int) -> None:
        """Wait until a slot that a call before this one has left to a thread is free."""

        def is_free() -> bool:
            self.reading = [one for one in self.reading if not one.is_over]
            return bool(self.free) and len(self.reading) < self.most_reading

        self._await(is_free, expert)

    def _await(self, has_come: Callable[[], bool], expert: int) -> None:
        if not listen(self._bell, has_come, self.limit_s):
            raise too_late(expert, self.store.path, self.limit_s)

    def enter(self, expert: int, reading: dict[int, Reading]) -> None:
        """Take an expert that was read. Raises what a piece of it raised."""
        for part in reading[expert].parts:
            part.result()
        self.fill(one := reading.pop(expert))
        self.row_of_E[expert] = self.slot_of[expert] = one.slot
        self.reading = [each for each in self.reading if each is not one]

    def pieces_of(self, expert: int, record_B: Tensor, bell: Bell) -> list[Job[None]]:
        """The reads of a record; the one that ends last checks the whole."""
        store, record, lock = self.store, memory_of(record_B), Lock()
        assert isinstance(store, ExpertStore)
        left = len(store.pieces())

        def read(start: int) -> None:
            nonlocal left
            store.read_piece(expert, start, record)
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                store.check(expert, record)
            assert self, "this object, and with it the slot, stays until the read has ended"

        return [Job(partial(read, start), bell) for start in store.pieces()]

    def read_back(self, expert: int, record_B: Tensor) -> None:
        """Read the record of one expert to memory of the caller. Raises StoreError, also if that takes too long."""
        if not isinstance(self.store, ExpertStore):
            self.store.read(expert, memory_of(record_B))
            return
        parts = self.pieces_of(expert, record_B, bell := Bell())
        try:
            for part in parts:
                self.readers.put(part)
            if not listen(bell, lambda: all(part.has_ended for part in parts), self.limit_s):
                raise too_late(expert, self.store.path, self.limit_s)
            for part in parts:
                part.result()
        finally:
            for part in parts:
                part.cancel()


def too_late(expert: int, path: Path, limit_s: float) -> StoreError:
    """The error of a disk that does not answer."""
    return StoreError(
        f"expert {expert} of {path} was not read within {limit_s:g} s [kernel.timeout_s]; make the call again once the "
        "disk answers, or load the layer again with kernel.residency.store in another folder"
    )
