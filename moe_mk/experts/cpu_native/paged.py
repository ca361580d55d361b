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
from moe_mk.experts.paged import Cache
from moe_mk.experts.residency import ResidencyCounts, ResidencyPool
from moe_mk.kernels.native.experts_mode import ExpertsMode
from moe_mk.kernels.native.instruction_set import choice
from moe_mk.kernels.native.layer import Gating, LayerCall, PreparedExperts, PreparedPagedCall, RowsOfExperts
from moe_mk.kernels.native.layout import MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import PackedMatrix, on_huge_pages
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
        return [*layout.parts_of_slot, (layout.num_outputs * (1 + layout.gated) * self.biased, torch.float32)]

    @property
    def num_bytes(self) -> int:
        """Bytes of a record, a multiple of the alignment of direct reads."""
        parts = [*self.sizes(self.layout13), *self.sizes(self.layout2)]
        return aligned(sum(-(-count * dtype.itemsize // LINE) * LINE for count, dtype in parts))

    def matrices(self, records_SB: Tensor, row_of_E: Tensor | None = None) -> tuple[PackedMatrix, PackedMatrix]:
        """Return w13 and w2 as views of records. row_of_E: the record of each expert; None: they are in order."""
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
        """Return the facts with which a store must have been written."""
        return {"w13": str(self.layout13), "w2": str(self.layout2), "biased": str(self.biased)}


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
        self, native: Native, store: ExpertStore, layout: RecordLayout, config: ResidencyConfig, pool: ResidencyPool,
        *, limit_s: float,
    ) -> None:  # fmt: skip
        self.native, self.layout = native, layout
        super().__init__(store, config, pool, limit_s=limit_s)
        memory = pool.memory[layout.num_bytes]
        assert isinstance(memory, RecordMemory)
        self.records_SB = memory.records_SB
        self.matrices = layout.matrices(self.records_SB, self.row_of_E)

    def new_memory(self) -> set[int]:
        """The slots of all layers with records of this size."""
        return RecordMemory(self.native, on_huge_pages(self.pool.num_bytes // self.record_bytes, self.record_bytes))

    def room(self, expert: int, slot: int) -> Tensor:
        """Return the memory of a slot for an expert."""
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
        record = on_huge_pages(1, self.cache.record_bytes)
        self.cache.read_back(index, record[0])
        w13, w2 = self.cache.layout.matrices(record)
        return PackedExpertWeights(w13, w2, self.scheme, down_scheme=self.down_scheme).slot(0)

    def sums(
        self, native: Native, mode: ExpertsMode, x_RH: Tensor, scales_RX: Tensor | None, ids_RK: Tensor,
        weights_RK: Tensor | None, out_RH: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the sums of `ExpertsCall` for resident experts, bit for bit. Raises StoreError."""
        shared, threads, (rows, top_k), hidden = (
            self.shared,
            torch.get_num_threads(),
            ids_RK.shape,
            self.w2.layout.num_outputs,
        )
        with self.cache.exclusive():
            if not self.cache.begin(ids_RK):
                return super().sums(native, mode, x_RH, scales_RX, ids_RK, weights_RK, out_RH)
            isa = choice(native, self.w13.layout.format, mode.quantize).isa
            columns = top_k + (shared is not None)
            terms_RKH = torch.empty((rows, columns, -(-hidden // PAIR) * PAIR), dtype=torch.float32, device="cpu")
            flat_X, into_XH = ids_RK.reshape(-1), terms_RKH.view(rows * columns, -1)[:, :hidden]
            for in_wave_E in self.cache.waves():
                at_N = in_wave_E[flat_X.long()].nonzero().squeeze(1)  # -1 reads the last, which is in none
                row_N = at_N // top_k
                scales = None if scales_RX is None else scales_RX[row_N]
                y_NH = torch.empty((len(at_N), hidden), dtype=torch.float32, device="cpu")
                call = self.call(native, mode, alone=True)
                call(x_RH[row_N], scales, flat_X[at_N].unsqueeze(1), None, y_NH, threads)
                into_XH.index_copy_(0, row_N * columns + at_N % top_k, y_NH)
        ones = torch.ones((rows, 1), dtype=torch.float32, device="cpu")
        weights_RK = ones.expand(ids_RK.shape) if weights_RK is None else weights_RK.to(torch.float32)
        if shared is not None:
            first, into = torch.zeros((rows, 1), dtype=torch.int32, device="cpu"), terms_RKH[:, -1, :hidden]
            shared.call(native, mode, isa=isa)(x_RH, scales_RX, first, None, into, threads)
            ids_RK = torch.cat((ids_RK, torch.full_like(first, self.num_slots)), 1)
            weights_RK = torch.cat((weights_RK, ones), 1)
        out_RH = torch.empty((rows, hidden), dtype=torch.bfloat16, device="cpu") if out_RH is None else out_RH
        ids_RK, weights_RK = ids_RK.contiguous(), weights_RK.contiguous()
        sums_RH = out_RH if out_RH.is_contiguous() else torch.empty_like(out_RH, memory_format=torch.contiguous_format)
        native.call(
            "sum_terms", terms_RKH.data_ptr(), ids_RK.data_ptr(), weights_RK.data_ptr(), rows, columns, hidden,
            terms_RKH.stride(1), sums_RH.data_ptr(), int(sums_RH.dtype is torch.float32), native.threads(threads),
            int(isa),
        )  # fmt: skip
        return sums_RH if sums_RH is out_RH else out_RH.copy_(sums_RH)


@dataclass(frozen=True)
class PagedRows:
    """The experts of a layer on one rank: `PreparedExperts`."""

    rows: RowsOfExperts
    weights: PagedExperts

    def alone(self, shared: PreparedExperts | None, gating: Gating | None, tables: Any, ran: Any) -> LayerCall | None:
        """None where an expert has several replicas, and for shared experts of other settings."""
        if shared is not None or not tables.one_to_one:
            return None

        def sums(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
            mode = self.rows.mode_of_rows(len(x_TH))
            return self.weights.sums(self.rows.native, mode, x_TH, None, slots_TK, weights_TK)

        return PreparedPagedCall(self.rows, self.weights.cache, sums, gating, tables, ran)
