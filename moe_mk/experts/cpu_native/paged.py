"""Experts larger than memory: packed records in a store, and slots in memory for some of them.

A call knows its experts when it begins. Those that are resident are multiplied while threads read the missing ones,
which are multiplied as they arrive; where they are more than the slots, slots are used again in the same call. Every
product is written in f32 and the terms of a row are added in the order of the experts, so that the result has the bits
of a layer with all experts in memory, whatever arrives first.

    record of one expert in the store and in a slot:
    | w13 values | w13 scales | ... | w2 values | w2 scales | ... | zeros up to ALIGNMENT |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import StoreError
from moe_mk.experts.cpu_native.weights import LAYOUT, PackedExpertWeights
from moe_mk.experts.residency import POLICIES, READERS, PoolMember, ResidencyCounts, ResidencyPool
from moe_mk.kernels.native.experts_mode import ExpertsMode
from moe_mk.kernels.native.layer import Gating, LayerCall, PagedLayer, PreparedExperts, RowsOfExperts
from moe_mk.kernels.native.layout import MatrixLayout
from moe_mk.kernels.native.library import Native, Status
from moe_mk.kernels.native.packed import HUGE_PAGE, PackedMatrix
from moe_mk.kernels.native.prepared import ExpertsCall
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.text import amount
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_store import ExpertStore, aligned, write_store
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.source import discard_pages

LINE = 64
"""Alignment of the parts of a record."""
PAIR = 32


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of one expert are in its record."""

    layout13: MatrixLayout
    layout2: MatrixLayout
    biased: bool

    def sizes(self, layout: MatrixLayout) -> list[tuple[int, torch.dtype]]:
        """Elements and dtypes of values, scales, output scales, zeros and bias of a matrix; 0: none."""
        of_blocks = torch.uint8 if layout.format.group or layout.format.has_parts else torch.float32
        bias = layout.num_outputs * (2 if layout.gated else 1) * self.biased
        sizes = [layout.slot_bytes, layout.slot_scales, layout.slot_output_scales, layout.slot_zeros, bias]
        return list(zip(sizes, (torch.uint8, of_blocks, torch.float32, torch.uint8, torch.float32), strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of a record, a multiple of the alignment of direct reads."""
        parts = [*self.sizes(self.layout13), *self.sizes(self.layout2)]
        return aligned(sum(-(-count * dtype.itemsize // LINE) * LINE for count, dtype in parts))

    def matrices(self, records_SB: Tensor, row_of_E: Tensor | None = None) -> tuple[PackedMatrix, PackedMatrix]:
        """Both projections as views of records. row_of_E: the record of each expert; None: they are in order."""
        start, found = 0, []
        for layout in (self.layout13, self.layout2):
            views: list[Tensor | None] = []
            for count, dtype in self.sizes(layout):
                num_bytes = count * dtype.itemsize
                views.append(records_SB[:, start : start + num_bytes].view(dtype) if count else None)
                start += -(-num_bytes // LINE) * LINE
            values, scales, outputs, zeros, bias = views
            assert values is not None
            found.append(PackedMatrix(layout, values, scales, bias, outputs, zeros, row_of_E))
        return found[0], found[1]

    def facts(self) -> dict[str, str]:
        """What a store must have been written with."""
        return {"w13": str(self.layout13), "w2": str(self.layout2), "biased": str(self.biased)}


def records(num_records: int, record_bytes: int) -> Tensor:
    """Addresses of records, uint8 [S, bytes], as direct reads and large pages need them; memory once it is written."""
    size = num_records * record_bytes
    whole = torch.empty(size + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size].view(num_records, record_bytes)


class RecordMemory(set[int]):
    """The slots for records of one size; those that are in the set have memory, on large pages.

    Direct reads into scattered small pages are slower, since each page is a segment of its own for the disk.
    """

    def __init__(self, native: Native, records_SB: Tensor) -> None:
        super().__init__()
        self.native, self.records_SB = native, records_SB

    def add(self, slot: int) -> None:
        """Allocate its memory, on large pages as far as they are fast."""
        super().add(slot)
        self.native.functions["advise_huge"](self.records_SB[slot].data_ptr(), self.records_SB.shape[1])

    def remove(self, slot: int) -> None:
        """Give its memory back to the system."""
        discard_pages(self.records_SB[slot])
        super().remove(slot)


def memory_of(record_B: Tensor) -> memoryview:
    """The bytes of a record, which keep its memory: a read that was not waited for may still write to it."""
    return record_B.numpy().data


def open_store(
    config: ResidencyConfig,
    name: str,
    layout: RecordLayout,
    num_experts: int,
    pack: Callable[[int, PackedMatrix, PackedMatrix], None],
    *,
    keep: bool = True,
) -> ExpertStore:
    """Open the store of these experts in the folder of the configuration, written before if there is none.

    name: a digest of the experts in the format of the checkpoint. pack: writes one of them into slot 0. keep: whether a
    store that is written here stays for later processes; else its file has no name, and is gone once it is closed.
    Raises StoreError for a store that is damaged, foreign, or cannot be written.
    """
    of_layout = blake2b(repr(sorted(layout.facts().items())).encode(), digest_size=4).hexdigest()
    facts = layout.facts() | {"experts": name}
    path = Path(config.store) / f"{name[:32]}-{of_layout}.experts"
    passing = not keep and not path.exists()
    if passing:
        path = path.with_name(f"{path.name}-{token_hex(4)}")
    if not path.exists():
        record = records(1, layout.num_bytes).zero_()
        w13, w2 = layout.matrices(record)

        def packed() -> Iterator[memoryview]:
            for expert in range(num_experts):
                pack(expert, w13, w2)
                yield memory_of(record[0])

        write_store(path, facts, num_experts, layout.num_bytes, packed())
    try:
        store = ExpertStore(path)
    finally:
        if passing:
            path.unlink(missing_ok=True)
    if store.facts != facts or store.record_bytes != layout.num_bytes or store.num_experts != num_experts:
        store.close()
        raise StoreError(
            f"the store {path} holds other experts than its name states; delete it, and load the layer again"
        )
    return store


def pool_of(config: ResidencyConfig, pool: ResidencyPool | None, record_bytes: int, num_experts: int) -> ResidencyPool:
    """The pool of a layer, one of its own if it is given none. Raises ConfigError where not one expert fits."""
    if pool is None:
        given = config.bytes or record_bytes * (config.slots or 0)
        pool = ResidencyPool(given if given < record_bytes else min(given // record_bytes, num_experts) * record_bytes)
    pool.expect_room(record_bytes)
    return pool


class Cache(PoolMember):
    """The slots of one layer and what is in them. One call at a time uses it."""

    def __init__(
        self, native: Native, store: ExpertStore, layout: RecordLayout, config: ResidencyConfig, pool: ResidencyPool
    ) -> None:
        """Raises ConfigError for memory of less than one expert of each layer."""
        self.native, self.store, self.layout, self.config = native, store, layout, config
        super().__init__(pool, layout.num_bytes, POLICIES[config.policy](store.num_experts))
        memory = pool.memory[layout.num_bytes]
        assert isinstance(memory, RecordMemory)
        self.records_SB = memory.records_SB
        self.row_of_E = torch.full((store.num_experts,), -1, dtype=torch.int32, device="cpu")
        """The slots of experts as kernels read them; of those that are not resident any number."""
        self.matrices = layout.matrices(self.records_SB, self.row_of_E)
        self.uses = self.hits = self.reads = 0
        """Distinct experts of all calls, those that were resident, and records that were read."""
        self._needed, self._missing = list[int](), list[int]()
        """Of the call that was begun last."""
        self._readers: ThreadPoolExecutor | None = None
        self.ended: SimpleQueue[Future[None]] = SimpleQueue()
        """Pieces of this call that were read, or failed."""

    def __str__(self) -> str:
        is_shared = self.config.slots is self.config.bytes is None
        of_all = f" of {amount(self.pool.num_bytes)} for all layers" if is_shared else ""
        held = f"{self.share} of {self.store.num_experts} experts in memory{of_all}"
        return f"{held}, {self.config.policy}; the others in {self.store.path}"

    def new_memory(self) -> set[int]:
        """The slots of all layers with records of this size."""
        return RecordMemory(self.native, records(self.pool.num_bytes // self.record_bytes, self.record_bytes))

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

    def begin(self, experts: list[int]) -> list[int]:
        """Count a call with these experts, ascending; returns those that are missing. Called with the lock held."""
        if self.is_used:  # a call was interrupted before it had ended its reads, or this process is a fork
            self.settle()
        self.policy.used(experts)
        self.pool.called(self)
        self._needed, self._missing = experts, [expert for expert in experts if expert not in self.slot_of]
        self.uses, self.hits = self.uses + len(experts), self.hits + len(experts) - len(self._missing)
        return self._missing

    def waves(self) -> Iterator[list[int]]:
        """The experts of the call that `begin` began, in groups that are resident while the caller uses them.

        First those that are here, the others as they arrive. Raises StoreError for a record that cannot be read or is
        not what was written; the caller has not seen it then, and its slot is free. Called with the lock held.
        """
        self.is_used, self.ended = True, SimpleQueue()
        missing, needed, reading = self._missing, frozenset(self._needed), dict[int, _Reading]()
        here = sorted(needed.difference(missing))
        try:
            self._read(missing, needed, reading)
            if here:
                yield here
            while missing or reading:
                self._read(missing, needed, reading, is_used=True)
                assert reading, "no slot is free, and none can be taken"
                yield self._arrived(reading)
        except BaseException:
            self.settle()
            raise
        self.is_used = False

    def settle(self) -> None:
        """Wait for the reads of a call that failed, wherever it did, and free every slot that holds no expert.

        A forked child has none of the threads that read, and does not wait for them.
        """
        if self._readers is not None and self._readers_of == os.getpid():
            self._readers.shutdown(cancel_futures=True)
        self._readers, self.ended = None, SimpleQueue()  # what failed refers to this object
        super().settle()

    def _read(
        self, missing: list[int], needed: Collection[int], reading: dict[int, _Reading], *, is_used: bool = False
    ) -> None:
        """Begin to read missing experts, in order, as far as there are slots.

        Slots of the pool and experts that the call does not need make room first. is_used: whether the resident ones
        have been used, and may make room too; then `READERS` records are read at a time, so that the policy keeps the
        best of the others, and nothing comes from the pool.
        """
        if self._readers is None:
            self._readers_of = os.getpid()
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="moe_mk-experts")
        while missing:
            if not self.free and (is_used or not self.pool.grow(self)):
                may_use = is_used and len(reading) < READERS
                others = [each for each in self.slot_of if each not in needed] or list(self.slot_of) * may_use
                if not others:
                    return
                self.free.append(self.slot_of.pop(self.policy.victim(others)))
            expert = missing.pop(0)
            reading[expert] = self.start(expert, self.free.pop(), self._readers)
            self.reads += 1

    def start(self, expert: int, slot: int, readers: ThreadPoolExecutor) -> _Reading:
        """Begin to read a record into a slot, in pieces; the thread that reads the last one checks the whole."""
        record, left, lock = memory_of(self.records_SB[slot]), len(self.store.pieces()), Lock()

        def read(start: int) -> None:  # it keeps this object, and with it the slot, until it has ended
            nonlocal left
            self.store.read_piece(expert, start, record)
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                self.store.check(expert, record)

        reading = _Reading(slot, [])
        for start in self.store.pieces():
            reading.parts.append(readers.submit(read, start))
            reading.parts[-1].add_done_callback(self.ended.put)
        return reading

    def _arrived(self, reading: dict[int, _Reading]) -> list[int]:
        """Wait for the next experts, and enter them into their slots."""
        while not (found := sorted(e for e, each in reading.items() if all(part.done() for part in each.parts))):
            self.ended.get()
        for expert in found:
            self.enter(expert, reading)
        return found

    def enter(self, expert: int, reading: dict[int, _Reading]) -> None:
        """Take an expert that was read. Raises what a piece of it raised."""
        for part in reading[expert].parts:
            part.result()
        self.row_of_E[expert] = self.slot_of[expert] = reading.pop(expert).slot


class _Reading(NamedTuple):
    """A record on its way."""

    slot: int
    parts: list[Future[None]]


@dataclass(frozen=True)
class PagedExperts:
    """Experts of which some are in slots; `slot` reads one from the store and unpacks it, bit for bit."""

    cache: Cache
    w13: PackedMatrix
    """Of all experts. Those that are not resident must not be multiplied."""
    w2: PackedMatrix
    scheme: QuantScheme
    down_scheme: QuantScheme
    layout: str = LAYOUT
    shared: PackedExpertWeights | None = None
    """As in `PackedExpertWeights`."""
    calls: dict[tuple[ExpertsMode, bool], ExpertsCall] = field(default_factory=dict, init=False, compare=False)

    def call(self, mode: ExpertsMode, *, alone: bool = False) -> ExpertsCall:
        """The call of resident experts. alone: without the shared ones."""
        found = self.calls.get((mode, alone))
        if found is None:
            shared = None if alone or self.shared is None else (self.shared.w13, self.shared.w2)
            found = ExpertsCall(self.cache.native, self.w13, self.w2, shared, mode)
            self.calls[mode, alone] = found
        return found

    @property
    def num_slots(self) -> int:
        return self.cache.store.num_experts

    @property
    def gated(self) -> bool:
        return self.w13.layout.gated

    @property
    def num_bytes(self) -> int:
        return self.cache.share * self.cache.record_bytes

    @property
    def counts(self) -> ResidencyCounts:
        cache = self.cache
        sizes = cache.share, self.num_slots, cache.record_bytes
        return ResidencyCounts(*sizes, cache.uses, cache.hits, cache.reads)

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format; a copy. Raises StoreError."""
        record = records(1, self.cache.record_bytes)
        self.cache.store.read(index, memory_of(record[0]))
        w13, w2 = self.cache.layout.matrices(record)
        return PackedExpertWeights(w13, w2, self.scheme, down_scheme=self.down_scheme).slot(0)

    def begin(self, ids: Tensor) -> list[int]:
        """Begin a call with these assignments, -1: none; returns the missing experts. Called with the lock held.

        Raises ShapeError for ids of no expert.
        """
        experts: list[int] = torch.unique(ids).tolist()
        if experts and not -1 <= experts[0] <= experts[-1] < self.num_slots:
            self.cache.native.check("experts", Status.BAD_ID)
        return self.cache.begin(experts[1:] if experts[:1] == [-1] else experts)


@dataclass(frozen=True)
class PagedRows:
    """The experts of a layer on one rank: `PreparedExperts`."""

    rows: RowsOfExperts
    weights: PagedExperts

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """None where an expert has several replicas, and for shared experts of other settings."""
        if shared is not None or not tables.one_to_one:
            return None
        return PagedLayer(self.rows, self.weights.cache, self.weights.begin, self.sums, gating, tables, ran)

    def sums(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Read what is missing, and multiply."""
        mode, given = self.rows.mode_of_rows(len(x_TH)), Assignments(x_TH, None, slots_TK)
        return weighted_sums(self.weights, given, weights_TK, None, mode)


@dataclass(frozen=True)
class Assignments:
    """Rows and the expert of each assignment, [R, K]; -1: none."""

    x_RH: Tensor
    scales_RX: Tensor | None
    ids_RK: Tensor


def run_paged(
    tokens: Tokens,
    weights: PagedExperts,
    mode: ExpertsMode,
    codes: Callable[[QuantTensor], tuple[Tensor, Tensor | None]],
) -> ExpertOutput:
    """`FusedExperts.run` with experts that are read when they are needed, bit for bit. Raises StoreError.

    codes: rows and their scales as the kernels read them.
    """
    if isinstance(tokens, RowTokens):
        given = Assignments(*codes(tokens.x_RH), tokens.ids_RK)
        y = weighted_sums(weights, given, tokens.weights_RK, tokens.out_RH, mode)
        return ExpertOutput(y, OutputStage.REDUCED)
    assert weights.shared is None, "shared experts are fused for RowTokens only"
    counts = tokens.counts_L.to(torch.int64)
    if isinstance(tokens, GroupedTokens):
        x, scales = codes(tokens.x_NH)
        ids = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device="cpu"), counts)
        ids = torch.nn.functional.pad(ids, (0, x.shape[0] - ids.shape[0]), value=-1)
    else:
        x, scales = codes(tokens.x_LSH)
        slots = torch.arange(x.shape[0], dtype=torch.int32, device="cpu").unsqueeze(1)
        inside = torch.arange(x.shape[1], dtype=torch.int64, device="cpu") < counts.unsqueeze(1)
        ids = torch.where(inside, slots, -1).reshape(-1)
        scales = None if scales is None else scales.flatten(0, 1)
    hidden = weights.w2.layout.num_outputs
    y = torch.zeros((ids.shape[0], 1, hidden), dtype=torch.bfloat16, device="cpu")
    flat = x.reshape(ids.shape[0], x.shape[-1])
    given = Assignments(flat, scales, ids.unsqueeze(1))
    with weights.cache.exclusive():
        weights.begin(ids)
        terms(weights, given, y, mode)
    return ExpertOutput(y.view(*x.shape[:-1], hidden), OutputStage.RAW)


def weighted_sums(
    weights: PagedExperts, given: Assignments, weights_RK: Tensor, out_RH: Tensor | None, mode: ExpertsMode
) -> Tensor:
    """What `ExpertsCall` returns for resident experts, bit for bit. Raises StoreError."""
    shared, native, threads = weights.shared, weights.cache.native, torch.get_num_threads()
    rows, hidden = given.x_RH.shape[0], weights.w2.layout.num_outputs
    ids_RK, weights_RK = given.ids_RK, weights_RK.to(torch.float32)
    columns = ids_RK.shape[1] + (shared is not None)
    with weights.cache.exclusive():
        if not weights.begin(ids_RK):
            return weights.call(mode)(given.x_RH, given.scales_RX, ids_RK, weights_RK, out_RH, threads)
        terms_RKH = torch.empty((rows, columns, -(-hidden // PAIR) * PAIR), dtype=torch.float32, device="cpu")
        terms(weights, given, terms_RKH, mode)
    if shared is not None:
        first = torch.zeros((rows, 1), dtype=torch.int32, device="cpu")
        ones = torch.ones((rows, 1), dtype=torch.float32, device="cpu")
        into = terms_RKH[:, -1, :hidden]
        ExpertsCall(native, shared.w13, shared.w2, None, mode)(given.x_RH, given.scales_RX, first, None, into, threads)
        ids_RK = torch.cat((ids_RK, torch.full_like(first, weights.num_slots)), 1)
        weights_RK = torch.cat((weights_RK, ones), 1)
    out_RH = torch.empty((rows, hidden), dtype=torch.bfloat16, device="cpu") if out_RH is None else out_RH
    ids_RK, weights_RK = ids_RK.contiguous(), weights_RK.contiguous()
    sums_RH = out_RH if out_RH.is_contiguous() else torch.empty_like(out_RH, memory_format=torch.contiguous_format)
    native.call(
        "sum_terms", terms_RKH.data_ptr(), ids_RK.data_ptr(), weights_RK.data_ptr(), rows, columns, hidden,
        terms_RKH.stride(1), sums_RH.data_ptr(), int(sums_RH.dtype is torch.float32), native.threads(threads),
        int(native.best),
    )  # fmt: skip
    return sums_RH if sums_RH is out_RH else out_RH.copy_(sums_RH)


def terms(weights: PagedExperts, given: Assignments, terms_RKH: Tensor, mode: ExpertsMode) -> None:
    """Write the output of the expert of each assignment; of those without one nothing. terms_RKH: f32 or bf16.

    Called after `begin`, with the lock held.
    """
    hidden, top_k, call = weights.w2.layout.num_outputs, given.ids_RK.shape[1], weights.call(mode, alone=True)
    flat_X = given.ids_RK.reshape(-1)
    into_XH = terms_RKH.view(-1, terms_RKH.shape[-1])[:, :hidden]
    for wave in weights.cache.waves():
        in_wave_E = torch.zeros(weights.num_slots + 1, dtype=torch.bool, device="cpu")
        in_wave_E[wave] = True
        at_N = in_wave_E[flat_X.long()].nonzero().squeeze(1)  # -1 reads the last, which is in none
        row_N = at_N // top_k
        scales = None if given.scales_RX is None else given.scales_RX[row_N]
        y_NH = torch.empty((len(at_N), hidden), dtype=terms_RKH.dtype, device="cpu")
        call(given.x_RH[row_N], scales, flat_X[at_N].unsqueeze(1), None, y_NH, torch.get_num_threads())
        into_XH.index_copy_(0, row_N * terms_RKH.shape[1] + at_N % top_k, y_NH)
