"""Experts of which only some have a slot: in memory with the others on a disk, or on a GPU with the others below it.

A call knows its experts when it begins. Those that are in slots are multiplied while the missing ones are read, which
are multiplied as they arrive; where they are more than the slots, slots are used again in the same call. The records
of all experts are in an `ExpertStore`, or in host memory below a GPU.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import ShapeError, StoreError
from moe_mk.experts.residency import POLICIES, READERS, PoolMember, ResidencyCounts, ResidencyPool
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
        """Copy a record."""
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

    slot: int
    record_B: Tensor
    """Where it is read to."""
    parts: list[Future[None]]
    mark: Any
    """Of what was queued on the device before; None on a CPU."""


class Cache(PoolMember):
    """The slots of one layer and what is in them. One call at a time uses it.

    A backend defines where a record is read to, and how it gets from there to its slot.
    """

    where = "in memory"
    """Of the slots, in words."""
    most_reading = sys.maxsize
    """Records that may be on their way at a time."""

    def __init__(self, store: ExpertStore | HostRecords, config: ResidencyConfig, pool: ResidencyPool) -> None:
        """Raises ConfigError for memory of less than one expert of each layer."""
        self.store, self.config = store, config
        self.row_of_E = torch.full((store.num_experts,), -1, dtype=torch.int32, device="cpu")
        """The slots of experts as kernels read them; of those that are not resident any number."""
        self.uses = self.hits = self.reads = 0
        """Distinct experts of all calls, those that were resident, and records that were read."""
        self._needed, self._missing = list[int](), list[int]()
        """Of the call that was begun last."""
        self._readers: ThreadPoolExecutor | None = None
        self.ended: SimpleQueue[Future[None]] = SimpleQueue()
        """Pieces of this call that were read, or failed."""
        super().__init__(pool, store.record_bytes, POLICIES[config.policy](store.num_experts))

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
        """Whether every expert is in memory."""
        return len(self.slot_of) == len(self.row_of_E)

    def clear(self) -> None:
        """Empty the slots, and forget what was used."""
        with self.exclusive():
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
        if self.is_used:  # a call was interrupted before it had ended its reads, or this process is a fork
            self.settle()
        self.policy.used(experts)
        self.pool.called(self)
        self._needed, self._missing = experts, [expert for expert in experts if expert not in self.slot_of]
        self.uses, self.hits = self.uses + len(experts), self.hits + len(experts) - len(self._missing)
        return self._missing

    def waves(self) -> Iterator[Tensor]:
        """The experts of the call that `begin` began, bool [E + 1], in groups that are in slots while they are used.

        First those that are here, the others as they arrive; the last element is False. Raises StoreError for a record
        that cannot be read or is not what was written; the caller has not seen it then, and its slot is free. Called
        with the lock held.
        """
        self.is_used, self.ended = True, SimpleQueue()
        missing, needed, reading = self._missing, frozenset(self._needed), dict[int, Reading]()
        here = sorted(needed.difference(missing))
        try:
            self._read(missing, needed, reading)
            if here:
                yield self._wave(here)
            while missing or reading:
                self._read(missing, needed, reading, is_used=True)
                assert reading, "no slot is free, and none can be taken"
                yield self._wave(self._arrived(reading))
        except BaseException:
            self.settle()
            raise
        self.is_used = False

    def _wave(self, experts: list[int]) -> Tensor:
        in_wave_E = torch.zeros(len(self.row_of_E) + 1, dtype=torch.bool, device="cpu")
        in_wave_E[experts] = True
        return in_wave_E

    def settle(self) -> None:
        """Wait for the reads of a call that failed, wherever it did, and free every slot that holds no expert.

        A forked child has none of the threads that read, and does not wait for them.
        """
        if self._readers is not None and self._readers_of == os.getpid():
            self._readers.shutdown(cancel_futures=True)
        self._readers, self.ended = None, SimpleQueue()  # what failed refers to this object
        super().settle()

    def _read(
        self, missing: list[int], needed: Collection[int], reading: dict[int, Reading], *, is_used: bool = False
    ) -> None:
        """Begin to read missing experts, in order, as far as there are slots.

        Slots of the pool and experts that the call does not need make room first. is_used: whether the resident ones
        have been used, and may make room too; then `READERS` records are read at a time, so that the policy keeps the
        best of the others, and nothing comes from the pool.
        """
        if self._readers is None:
            self._readers_of = os.getpid()
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="moe_mk-experts")
        while missing and len(reading) < self.most_reading:
            if not self.free and (is_used or not self.pool.grow(self)):
                may_use = is_used and len(reading) < READERS
                others = [each for each in self.slot_of if each not in needed] or list(self.slot_of) * may_use
                if not others:
                    return
                self.free.append(self.slot_of.pop(self.policy.victim(others)))
            expert = missing.pop(0)
            reading[expert] = self.start(expert, self.free.pop(), self._readers)
            self.reads += 1

    def start(self, expert: int, slot: int, readers: ThreadPoolExecutor) -> Reading:
        """Begin to read a record, in pieces; the thread that reads the last one checks the whole."""
        one = Reading(slot, self.room(expert, slot), [], self.mark())
        if isinstance(self.store, HostRecords):
            return one
        record, left, lock = memory_of(one.record_B), len(self.store.pieces()), Lock()

        def read(start: int) -> None:  # it keeps this object, and with it the slot, until it has ended
            nonlocal left
            store = self.store
            assert isinstance(store, ExpertStore)
            store.read_piece(expert, start, record)
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                store.check(expert, record)

        for start in self.store.pieces():
            one.parts.append(readers.submit(read, start))
            one.parts[-1].add_done_callback(self.ended.put)
        return one

    def _arrived(self, reading: dict[int, Reading]) -> list[int]:
        """Wait for the next experts, and enter them into their slots."""
        while not (found := sorted(e for e, each in reading.items() if all(part.done() for part in each.parts))):
            self.ended.get()
        for expert in found:
            self.enter(expert, reading)
        return found

    def enter(self, expert: int, reading: dict[int, Reading]) -> None:
        """Take an expert that was read. Raises what a piece of it raised."""
        for part in reading[expert].parts:
            part.result()
        self.fill(one := reading.pop(expert))
        self.row_of_E[expert] = self.slot_of[expert] = one.slot
