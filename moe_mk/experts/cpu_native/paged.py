"""Experts larger than memory in the native kernels: records that they read in their slots.

Every product is written in f32 and the terms of a row are added in the order of the experts, so that the result has the
bits of a layer with all experts in memory, whatever arrives first.

    record of one expert in the store and in a slot:
    | w13 values | w13 scales | ... | w2 values | w2 scales | ... | zeros up to ALIGNMENT |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.experts.cpu_native.weights import PackedExpertWeights
from moe_mk.experts.paged import Cache, memory_of
from moe_mk.experts.residency import ResidencyCounts, ResidencyPool
from moe_mk.kernels.native.experts_mode import ExpertsMode
from moe_mk.kernels.native.layer import Gating, LayerCall, PagedLayer, PreparedExperts, RowsOfExperts
from moe_mk.kernels.native.layout import MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import HUGE_PAGE, PackedMatrix
from moe_mk.weights.expert_store import ExpertStore, aligned
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


class NativeCache(Cache):
    """Slots that are records: they are read to where the kernels read them."""

    store: ExpertStore

    def __init__(
        self, native: Native, store: ExpertStore, layout: RecordLayout, config: ResidencyConfig, pool: ResidencyPool
    ) -> None:
        self.native, self.layout = native, layout
        super().__init__(store, config, pool)
        memory = pool.memory[layout.num_bytes]
        assert isinstance(memory, RecordMemory)
        self.records_SB = memory.records_SB
        self.matrices = layout.matrices(self.records_SB, self.row_of_E)

    def new_memory(self) -> set[int]:
        """The slots of all layers with records of this size."""
        return RecordMemory(self.native, records(self.pool.num_bytes // self.record_bytes, self.record_bytes))

    def room(self, expert: int, slot: int) -> Tensor:
        """The slot."""
        return self.records_SB[slot]


@dataclass(frozen=True)
class PagedExperts(PackedExpertWeights):
    """Experts of which some are in slots; `slot` reads one from the store and unpacks it, bit for bit.

    w13, w2: of all experts. Those that are not resident must not be multiplied.
    """

    cache: NativeCache = field(kw_only=True)

    @property
    def num_bytes(self) -> int:
        return self.cache.share * self.cache.record_bytes

    @property
    def counts(self) -> ResidencyCounts:
        return self.cache.counts

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format; a copy. Raises StoreError."""
        record = records(1, self.cache.record_bytes)
        self.cache.store.read(index, memory_of(record[0]))
        w13, w2 = self.cache.layout.matrices(record)
        return PackedExpertWeights(w13, w2, self.scheme, down_scheme=self.down_scheme).slot(0)


@dataclass(frozen=True)
class PagedRows:
    """The experts of a layer on one rank: `PreparedExperts`."""

    rows: RowsOfExperts
    weights: PagedExperts

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """None where an expert has several replicas, and for shared experts of other settings."""
        if shared is not None or not tables.one_to_one:
            return None
        return PagedLayer(self.rows, self.weights.cache, self.sums, gating, tables, ran)

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


def outputs(weights: PagedExperts, given: Assignments, mode: ExpertsMode) -> Tensor:
    """The output of the one expert of each row, bf16, without its weight; zeros without one. Raises StoreError."""
    y_N1H = torch.zeros((len(given.ids_RK), 1, weights.w2.layout.num_outputs), dtype=torch.bfloat16, device="cpu")
    with weights.cache.exclusive():
        weights.cache.begin(given.ids_RK)
        terms(weights, given, y_N1H, mode)
    return y_N1H


def weighted_sums(
    weights: PagedExperts, given: Assignments, weights_RK: Tensor, out_RH: Tensor | None, mode: ExpertsMode
) -> Tensor:
    """What `ExpertsCall` returns for resident experts, bit for bit. Raises StoreError."""
    shared, native, threads = weights.shared, weights.cache.native, torch.get_num_threads()
    rows, hidden = given.x_RH.shape[0], weights.w2.layout.num_outputs
    ids_RK, weights_RK = given.ids_RK, weights_RK.to(torch.float32)
    columns = ids_RK.shape[1] + (shared is not None)
    with weights.cache.exclusive():
        if not weights.cache.begin(ids_RK):
            return weights.call(native, mode)(given.x_RH, given.scales_RX, ids_RK, weights_RK, out_RH, threads)
        terms_RKH = torch.empty((rows, columns, -(-hidden // PAIR) * PAIR), dtype=torch.float32, device="cpu")
        terms(weights, given, terms_RKH, mode)
    if shared is not None:
        first = torch.zeros((rows, 1), dtype=torch.int32, device="cpu")
        ones = torch.ones((rows, 1), dtype=torch.float32, device="cpu")
        into = terms_RKH[:, -1, :hidden]
        shared.call(native, mode)(given.x_RH, given.scales_RX, first, None, into, threads)
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
    hidden, top_k = weights.w2.layout.num_outputs, given.ids_RK.shape[1]
    call = weights.call(weights.cache.native, mode, alone=True)
    flat_X = given.ids_RK.reshape(-1)
    into_XH = terms_RKH.view(-1, terms_RKH.shape[-1])[:, :hidden]
    for in_wave_E in weights.cache.waves():
        at_N = in_wave_E[flat_X.long()].nonzero().squeeze(1)  # -1 reads the last, which is in none
        row_N = at_N // top_k
        scales = None if given.scales_RX is None else given.scales_RX[row_N]
        y_NH = torch.empty((len(at_N), hidden), dtype=terms_RKH.dtype, device="cpu")
        call(given.x_RH[row_N], scales, flat_X[at_N].unsqueeze(1), None, y_NH, torch.get_num_threads())
        into_XH.index_copy_(0, row_N * terms_RKH.shape[1] + at_N % top_k, y_NH)
