"""The Gluon GEMMs on tensors: the Python of the kernels runs on a CPU, one thread for each partition. Layouts have no
effect here, copies complete at once, and products are sums in f32. What is computed is what the kernel computes: which
rows, columns and scales meet, what the epilogue makes of the sums, and where it is stored. Other orders of events are
those of `ring_model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from contrib.moe_mk_contrib.tests.kernels.ring_model import NOTHING, Language, plain_kernel
from moe_mk.kernels.reference.activation import activation

WAITING = 20.0
"""Seconds until a wait without an end fails."""


class Value(Tensor):
    """A tensor with the methods of Triton's that torch has in another form."""

    def split(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self.unbind(-1)


class Integer(int):
    """One of Python, which may be a bound or a coordinate."""

    def to(self, dtype: Any) -> int:
        return self


def value(tensor: Tensor) -> Any:
    """What a kernel gets of a tensor."""
    if tensor.dim() == 0 and not tensor.is_floating_point():
        return Integer(tensor)
    return tensor.as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Elements of the memory of a tensor."""

    memory: Tensor
    """One-dimensional."""
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


def pointer(tensor: Tensor) -> Pointer:
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return Pointer(flat, tensor.storage_offset())


@dataclass(frozen=True)
class Boxes:
    """A row-major matrix, copied in boxes of rows x 128 columns; beyond its end they are zeros."""

    matrix: Tensor
    rows: int
    layout: Any = NOTHING

    def at(self, row: int, column: int) -> Tensor:
        box = torch.zeros((self.rows, 128), dtype=self.matrix.dtype)
        part = self.matrix[row : row + self.rows, column : column + 128]
        box[: part.shape[0], : part.shape[1]] = part
        return box


@dataclass(frozen=True)
class Shared:
    """A view of shared memory."""

    data: Tensor

    def index(self, at: int) -> Shared:
        return Shared(self.data[at])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.data.view(tuple(shape)))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: Any) -> Any:
        return value(self.data.clone())


@dataclass
class Barrier:
    """An mbarrier. Phases are complete when nothing is missing and no byte is expected."""

    count: int = 0
    missing: int = 0
    expected: int = 0
    phases: int = 0

    def index(self, at: int) -> Barrier:
        return self


@dataclass
class Machine:
    """One program after the other, with what it has allocated."""

    program: int
    threads: int
    """Arrivals of a gathering partition for one stage."""
    changed: Condition = field(default_factory=Condition)
    failures: list[BaseException] = field(default_factory=list)

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype is torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return barriers[0] if len(shape) == 1 else SimpleNamespace(index=lambda at: barriers[at])
        return Shared(torch.full(tuple(shape), torch.nan).to(dtype))

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def change(self, barrier: Barrier, arrivals: int, size: int = 0) -> None:
        with self.changed:
            barrier.missing, barrier.expected = barrier.missing - arrivals, barrier.expected + size
            assert barrier.missing >= 0, "more arrivals than a phase takes"
            if barrier.missing == barrier.expected == 0:
                barrier.missing, barrier.phases = barrier.count, barrier.phases + 1
                self.changed.notify_all()

    def wait(self, barrier: Barrier, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.failures or barrier.phases % 2 != parity, WAITING)
            assert done and not self.failures, "a wait without an end"

    def copy(self, boxes: Boxes, corner: Sequence[int], barrier: Barrier, view: Shared) -> None:
        view.store(boxes.at(*corner))
        self.change(barrier, 0, -view.data.numel())

    def specialize(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        def guarded(partition: Callable[..., None], given: tuple[Any, ...]) -> None:
            try:
                partition(*given)
            except BaseException as problem:  # reported by the test's thread
                self.failures.append(problem)

        threads = [Thread(target=guarded, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def modules(self) -> dict[str, Any]:
        gl = Language(
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize, static_range=range,
            program_id=lambda axis: self.program, minimum=min, maximum=torch.maximum, load=load, store=store,
            arange=lambda start, end, layout: value(torch.arange(start, end)), abs=torch.abs,
            zeros=lambda shape, dtype, layout: value(torch.zeros(tuple(map(int, shape)), dtype=dtype)),
            max=torch.amax, expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout, **more: x, int64=torch.int64, int32=torch.int32, float32=torch.float32,
            bfloat16=torch.bfloat16, float8e4nv=torch.float8_e4m3fn,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            init=self.init, MBarrierLayout=NOTHING, wait=self.wait, arrive=lambda barrier: self.change(barrier, 1),
            expect=lambda barrier, size: self.change(barrier, 1, size),
        )  # fmt: skip
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=lambda view, given, mask: view.store(load(given, mask)),
            mbarrier_arrive=lambda barrier, increment_count: self.change(barrier, self.threads),
        )
        return {
            "gl": gl, "mbarrier": mbarrier, "async_copy": async_copy, "fence_async_shared": NOTHING,
            "thread_barrier": NOTHING,
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy), "warpgroup_mma": product,
            "warpgroup_mma_wait": lambda pending, sums: sums if len(sums) > 1 else sums[0],
            "gdc_wait": NOTHING, "gdc_launch_dependents": NOTHING, "row_pieces": NOTHING, "pinned": lambda x: x,
            "as_scale": as_scale, "hidden_of": hidden_of, "scale_of": scale_of,
        }  # fmt: skip


def load(given: Pointer, mask: Any = None, other: float = 0, **more: Any) -> Any:
    at, inside = torch.broadcast_tensors(*map(torch.as_tensor, (given.at, True if mask is None else mask)))
    found = indexable(given.memory)[at.where(inside, 0)]
    found = found if mask is None else found.where(inside, torch.full_like(found, other))
    return value(found.view(given.memory.dtype))


def store(given: Pointer, what: Tensor, mask: Any = None) -> None:
    at, what, inside = torch.broadcast_tensors(
        torch.as_tensor(given.at), what.as_subclass(Tensor), torch.as_tensor(True if mask is None else mask)
    )
    assert what.dtype == given.memory.dtype
    indexable(given.memory)[at[inside]] = indexable(what)[inside]


def indexable(tensor: Tensor) -> Tensor:
    """Codes as bytes: torch does not index all of their types."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def product(a: Shared, b: Shared, sums: Tensor, *, use_acc: bool, is_async: bool) -> Any:
    assert not use_acc and is_async and sums.shape == (a.data.shape[0], b.data.shape[1])
    return value(a.data.float() @ b.data.float())


def as_scale(codes: Tensor) -> Tensor:
    return (codes.int() << 23).view(torch.float32) if codes.dtype is torch.uint8 else codes


def hidden_of(gate: Tensor, up: Tensor, name: str, alpha: float, limit: float, gated: bool) -> Any:
    assert gated
    return value(activation(name, gate, up, alpha=alpha, limit=limit or None))


def scale_of(amax: Tensor, power_of_two: bool) -> Any:
    scale = amax.clamp_min(1e-10) / 448.0
    return value(scale.log2().ceil().exp2() if power_of_two else scale)


class Kernel:
    """In place of the Gluon kernel: a launch runs its programs one after the other."""

    def __init__(self, jitted: Any) -> None:
        self.fn = jitted.fn
        self.names = tuple(inspect.signature(jitted.fn).parameters)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int, **constants: Any) -> None:
            arguments = dict(zip(self.names, given, strict=False))
            pointers = {name: pointer(each) for name, each in arguments.items() if isinstance(each, Tensor)}
            for program in range(*grid):
                machine = Machine(program, 128 if constants["ROWS"] == 128 else 32)
                plain_kernel(machine.modules())(**arguments | pointers | constants)

        return launch


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, the Gluon GEMMs run on tensors of the CPU."""
    from moe_mk_contrib.gluon import gluon_gemms

    before = gluon_gemms._by_hand, gluon_gemms.code_boxes
    gluon_gemms._by_hand, gluon_gemms.code_boxes = Kernel(before[0]), Boxes
    try:
        yield
    finally:
        gluon_gemms._by_hand, gluon_gemms.code_boxes = before
