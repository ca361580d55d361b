"""Experts of which only some are on the GPU; the others are in pinned host memory, or in a store on a disk.

Missing experts are copied to their slots on a separate stream, while those in slots are multiplied. A call reads
the experts of its tokens back to the host, so that it cannot be captured in a graph. All waves of a call use one tile
and write the rows of their assignments, which are added at the end in the order of the choices: the result has the bits
of a layer with all experts on the GPU.

    record of one expert
    | w13 values | w13 scales | ... | w2 values | w2 scales | ... | biases | zeros up to ALIGNMENT |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.experts.paged import Cache, HostRecords, Reading, open_store, pool_of
from moe_mk.experts.residency import READERS, ResidencyCounts
from moe_mk.experts.triton.weights import (
    LAYOUT,
    META,
    PackedWeights,
    Room,
    empty_slots,
    fill_slot,
    joined,
    zeros,
)
from moe_mk.external.device import Mark, Queues, pinned, synchronize
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.quant.tensor import QuantScheme
from moe_mk.weights.expert_store import ALIGNMENT, ExpertStore, aligned
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights, Weights, on_device
from moe_mk.weights.scan import Progress

CPU, LINE = torch.device("cpu"), 256
"""LINE: alignment of the parts of a record."""


def record_bytes(slot: SlotWeights, format: KernelFormat) -> int:
    """Bytes of the record of one expert."""
    return aligned(sum(-(-part.nbytes // LINE) * LINE for part in parts_of(empty_slots(slot, format, on_meta))))


def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One slot without memory."""
    return torch.empty((1, *shape), dtype=dtype, device="meta")


def parts_of(weights: PackedWeights) -> list[Tensor]:
    """Every tensor of the slots, in the order of a record."""
    found = [getattr(w, name) for w in (weights.w13, weights.w2) for name in ("values", "scales", "rows", "blocks")]
    found += [weights.w13.bias, weights.w2.bias]
    return [part for part in found if part is not None]


def within(record_B: Tensor) -> Room:
    """Places of the parts of one slot in a record, in order."""
    start = 0

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal start
        part = on_meta(shape, dtype)
        view = record_B[start : start + part.nbytes].view(dtype).view(part.shape)
        start += -(-part.nbytes // LINE) * LINE
        return view

    return room


def host_records(num_records: int, num_bytes: int, device: torch.device) -> Tensor:
    """Zeros, uint8 [S, bytes], aligned for direct reads; pinned below a GPU."""
    whole = torch.zeros(num_records * num_bytes + ALIGNMENT, dtype=torch.uint8, device=CPU)
    records_SB = whole[-whole.data_ptr() % ALIGNMENT :][: num_records * num_bytes].view(num_records, num_bytes)
    return pinned(records_SB, device)


class DeviceCache(Cache):
    """Slots on a device. Records of a store are read to staging memory; those of the host are copied from there."""

    where = "on the device"

    def __init__(
        self,
        store: ExpertStore | HostRecords,
        config: ResidencyConfig,
        sample: SlotWeights,
        format: KernelFormat,
        device: torch.device,
        spare: int,
        limit_s: float,
    ) -> None:
        """sample: any of the experts. spare: slots behind the last one. limit_s: as in `Cache`."""
        pool = pool_of(config, None, store.record_bytes, store.num_experts)
        num_slots = pool.num_bytes // store.record_bytes
        self.sample, self.format, self.device, self.queues = sample, format, device, Queues(device)
        self.stack = empty_slots(sample, format, zeros(num_slots, device, spare=spare), spare)
        self._parts, start = list[tuple[Tensor, slice]](), 0
        for part in parts_of(self.stack):
            each_SB = part.flatten(1).view(torch.uint8)
            self._parts.append((each_SB, slice(start, start + each_SB.shape[1])))
            start += -(-each_SB.shape[1] // LINE) * LINE
        self.most_reading = min(num_slots, 2 * READERS)
        count = self.most_reading if isinstance(store, ExpertStore) else 0
        self._staging_SB = host_records(count, store.record_bytes, device)
        self._staging: list[Tensor] = list(self._staging_SB)
        self._copied: list[Mark] = [None] * count
        """The end of the last copy from each part of the staging memory."""
        self.last: Mark = None
        """The end of the last call, which may have been on another stream."""
        super().__init__(store, config, pool, limit_s=limit_s)

    def room(self, expert: int, slot: int) -> Tensor:
        """The record on the host, or free staging memory, after its last copy has ended."""
        if isinstance(self.store, HostRecords):
            return self.store.records_EB[expert]
        taken = {id(one.record_B) for one in self.reading}
        at = next(at for at, each in enumerate(self._staging) if id(each) not in taken)
        if (copied := self._copied[at]) is not None:
            copied.synchronize()
        return self._staging[at]

    def mark(self) -> Mark:
        """The end of what may read the slots that are filled next."""
        return self.queues.mark()

    def fill(self, one: Reading) -> None:
        """Copy the parts to the slot, behind what may read it, and let the caller's stream wait for them."""
        with self.queues.on_stream("experts"):
            self.queues.after(one.mark)
            for each_SB, place in self._parts:
                each_SB[one.slot].copy_(one.record_B[place], non_blocking=True)
            copied = self.queues.mark()
        for at, each in enumerate(self._staging):
            if each is one.record_B:
                self._copied[at] = copied
        self.queues.after(copied)

    def settle(self) -> None:
        """As in `Cache`; copies of a call that failed have ended too."""
        super().settle()
        synchronize(self.device)

    def packed(self, record_B: Tensor) -> PackedWeights:
        """A record as weights of one slot; views."""
        return empty_slots(self.sample, self.format, within(record_B))


@dataclass(frozen=True)
class PagedWeights:
    """Experts of which some are in slots; `slot` reads one from the store and unpacks it, bit for bit."""

    cache: DeviceCache
    stack: PackedWeights
    """Of the cache; behind them the shared experts, if they are fused."""
    layout: str = LAYOUT

    @property
    def num_slots(self) -> int:
        return self.cache.store.num_experts

    @property
    def scheme(self) -> QuantScheme:
        return self.stack.scheme

    @property
    def gated(self) -> bool:
        return self.stack.gated

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the slots on the device."""
        return self.stack.num_bytes

    @property
    def counts(self) -> ResidencyCounts:
        return self.cache.counts

    @property
    def is_fused(self) -> bool:
        """Whether the last slot is that of the shared experts."""
        return self.stack is not self.cache.stack

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format; a copy on the device. Raises StoreError."""
        record_B = host_records(1, self.cache.record_bytes, CPU)[0]
        self.cache.read_back(index, record_B)
        return self.cache.packed(record_B.to(self.cache.device)).slot(0)

    def fused(self, shared: Weights) -> PagedWeights | None:
        """With shared experts in the spare slot; None where they do not fit."""
        both = joined(self.cache.stack, shared)
        return replace(self, stack=both) if isinstance(both, PackedWeights) else None

    def begin(self, ids_RK: Tensor) -> tuple[Tensor, Iterator[Tensor]]:
        """The slots of assignments, and those of each wave, int32 on the device; -1: none, or not in this wave.

        Of fused shared experts one more column, which is in the first wave. Of all assignments only the sign counts.
        Called with the lock of the cache held until `end`. Raises StoreError, also while the waves are taken, and
        ShapeError for ids of no expert.
        """
        ids_RK, cache = ids_RK.to(CPU, torch.int64), self.cache
        shared = torch.full((len(ids_RK), 1), self.stack.num_slots - 1, dtype=torch.int32, device=CPU)

        def sent(slots_RK: Tensor, *, is_first: bool) -> Tensor:
            column = shared if is_first else torch.full_like(shared, -1)
            both = torch.cat((slots_RK, column), 1) if self.is_fused else slots_RK
            return both.to(cache.device, non_blocking=True)

        def waves() -> Iterator[Tensor]:
            is_first = True
            for in_wave_E in cache.waves():
                slots_RK = torch.where(in_wave_E[ids_RK], cache.row_of_E[ids_RK.clamp(min=0)], -1)
                yield sent(slots_RK, is_first=is_first)
                is_first = False
            if is_first and self.is_fused:
                yield sent(torch.full(ids_RK.shape, -1, dtype=torch.int32, device=CPU), is_first=True)

        cache.begin(ids_RK)
        cache.queues.after(cache.last)
        return sent(ids_RK.to(torch.int32), is_first=True), waves()

    def end(self) -> None:
        """Mark the end of what a call has queued."""
        self.cache.last = self.cache.queues.mark()


def page(
    weights: Weights, format: KernelFormat, config: ResidencyConfig, device: torch.device,
    on_progress: Progress | None = None, *, spare: int = 0, limit_s: float,
) -> PagedWeights:  # fmt: skip
    """Pack every expert into host memory, or into a store unless it is there, and begin with empty slots.

    MXFP4 to be multiplied as FP8 is packed as `w_mxfp4` if any expert cannot be represented exactly. spare: free slots
    on the device. limit_s: as in `Cache`. Raises ConfigError for memory of less than one expert, StoreError where the
    store cannot be used.
    """
    num, sample = weights.num_slots, weights.slot(0)
    if format.block_scales:
        scratch = empty_slots(sample, format, zeros(1, CPU))
        if not all(fill_slot(scratch, 0, weights.slot(index)) for index in range(num)):
            format = KERNEL_FORMATS["w_mxfp4"]
    size = record_bytes(sample, format)
    pool_of(config, None, size, num)
    record_SB = host_records(num if config.store is None else 1, size, device)

    def pack(expert: int) -> None:
        record_B = record_SB[expert if config.store is None else 0]
        fill_slot(empty_slots(sample, format, within(record_B)), 0, weights.slot(expert))
        if on_progress is not None:
            on_progress("pack", size * (expert + 1), size * num)

    store: ExpertStore | HostRecords
    if config.store is None:
        for expert in range(num):
            pack(expert)
        store = HostRecords(record_SB)
    else:
        facts = {"triton": str(format), "like": f"{sample.up_IH.scheme.name} {sample.up_IH.shape}"}
        store = open_store(config, weights, facts, record_SB[0], pack)
    like = on_device(MappedExpertWeights((sample,), weights.scheme), META).slot(0)
    cache = DeviceCache(store, config, like, format, device, spare, limit_s)
    return PagedWeights(cache, cache.stack)
