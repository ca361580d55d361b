"""The one check of the numbers of weights, whoever hands them over: NaN codes, infinities and invalid scales.

It runs at memory speed. Views of files are read piece by piece, which also fills the system's page cache.

Two maxima find every non-finite number: as signed integers the positive ones are the largest, as unsigned integers the
negative ones. FP8 e4m3: 0x7f and 0xff; bf16: from 0x7f80 and 0xff80 on; and so on.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.jobs import Threads, all_results
from moe_mk.kernels.reference.quantize import block_amax
from moe_mk.quant.blocked import WHOLE, BlockedScheme
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.gguf import Gguf
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.completeness import raise_if, some
from moe_mk.weights.source import in_memory, is_mapped

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, total bytes) in the caller's thread."""

CACHE_BYTES = 512 << 10
JOB_BYTES = 8 << 20

# dtype -> (signed, unsigned, first non-finite positive pattern)
_PATTERNS: dict[torch.dtype, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass
class Contents:
    """Tensors to check, by name. Values must be finite, scales finite and positive; of blocks of zeros they may be 0.

    Scales of integers in groups and factors of GGUF count as values: they may be 0 and negative.
    """

    stacked: bool = False
    """Whether the first axis of every tensor is the expert."""
    values: list[tuple[str, Tensor]] = field(default_factory=list)
    scales: list[tuple[str, Tensor, QuantTensor, int]] = field(default_factory=list)
    """With what they are scales of, see `used_scales`."""
    codes: int = 0
    """Bytes of formats without NaN, which need no check."""
    powers: list[tuple[str, Tensor]] = field(default_factory=list)
    """Those of the scales that must be powers of two."""

    def note(self, q: QuantTensor, name: str, scale_name: str, global_name: str, halves: int = 1) -> None:
        """Add a matrix or a stack of them; names for messages. halves: parts of the rows that each begin a block."""
        if isinstance(q.scheme, Gguf):
            self.values.append((f"{name}, factors of blocks", q.scheme.factors(q.changed(in_memory))))
        if q.scheme.per_byte == 1 and q.values.dtype.is_floating_point:
            self.values.append((name, q.values))
        else:
            self.codes += q.values.numel()
        if q.scales is not None:
            if q.scheme.family == "wna16":
                self.values.append((scale_name, q.scales))
            else:
                self.scales.append((scale_name, q.scales, q, halves))
        if q.zeros is not None and q.zeros.is_floating_point():
            self.values.append((f"{name}, biases of groups", q.zeros))
        if q.global_scale is not None:
            self.scales.append((global_name, q.global_scale, q, halves))
        if isinstance(q.scheme, Fp8Block) and q.scheme.ue8m0 and q.scales is not None:
            self.powers.append((scale_name, q.scales))

    @property
    def num_bytes(self) -> int:
        held = [t for _, t in self.values] + [t for _, t, _, _ in self.scales]
        return sum(t.numel() * t.element_size() for t in held) + self.codes

    def problems(self, on_progress: Progress | None = None) -> list[str]:
        """Read everything once; one line for each kind of problem, with counts by tensor and the first bad value."""
        wild = count_non_finite(self.values, threads=torch.get_num_threads(), on_progress=on_progress)
        uneven = count_bad(self.powers, is_no_other_scale)
        scales = [(name, tensor) for name, tensor, _, _ in self.scales]
        if count_bad(scales, is_scale):  # 0 is valid over zeros
            scales = [(name, used_scales(tensor, q, halves)) for name, tensor, q, halves in self.scales]
        findings = (
            ("values are NaN or infinite", wild, self.values, torch.isfinite),
            ("scales are not finite and positive", count_bad(scales, is_scale), scales, is_scale),
            ("scales are no power of two, as UE8M0 needs,", uneven, self.powers, is_no_other_scale),
        )
        return [
            f"{sum(bad.values())} {what} in {len(bad)} tensors: {some(f'{name} ({n})' for name, n in bad.items())}; "
            f"the first is {self._first(next((name, tensor) for name, tensor in held if name in bad), is_good)}"
            for what, bad, held, is_good in findings
            if bad
        ]

    def expect_valid(self, title: str) -> None:
        """Raise WeightError with all problems, if there are any."""
        raise_if(title, self.problems())

    def _first(self, named: tuple[str, Tensor], is_good: Callable[[Tensor], Tensor]) -> str:
        name, tensor = named
        for row, part in enumerate(tensor if tensor.dim() else tensor[None]):  # a stack as f32 may not fit in memory
            wide = in_memory(part).to(torch.float32)
            bad = (~is_good(wide)).nonzero()
            if len(bad):
                place = [row, *bad[0].tolist()] if tensor.dim() else []
                expert = f" (expert {row})" if self.stacked else ""
                return f"{name}{place or ''}{expert} = {float(wide[tuple(bad[0])]):g}"
        raise AssertionError(f"{name} was counted as bad")


def used_scales(scales: Tensor, q: QuantTensor, halves: int = 1) -> Tensor:
    """The scales of a matrix or a stack, with 1 for each 0 over values that are all 0: some writers store it there.

    halves: equal parts of the rows that each begin a block.
    """
    wide = in_memory(scales).to(torch.float32, copy=True)
    unused = wide == 0
    if not bool(unused.any()):
        return scales
    assert isinstance(q.scheme, BlockedScheme)
    (tall, width), (n, k) = scales.shape[-2:], q.shape[-2:]
    parts = math.gcd(halves, tall)
    whole = scales is q.global_scale or q.scheme.rows == WHOLE
    block = n // tall if whole else q.scheme.rows, q.scheme.columns if width > 1 else WHOLE
    for at in {tuple(place[:-2]) for place in unused.nonzero().tolist()}:  # a stack in f32 may not fit in memory
        values = q.scheme.element.decode(in_memory(q.values[at]))
        blank = block_amax(values.view(parts, n // parts, k), block).view(tall, width) == 0
        wide[at] = wide[at].masked_fill(unused[at] & blank, 1.0)
    return wide


def is_scale(wide: Tensor) -> Tensor:
    """Where scales are finite and positive."""
    return torch.isfinite(wide) & (wide > 0)


def is_no_other_scale(wide: Tensor) -> Tensor:
    """Where scales are powers of two, or no scales at all."""
    return ~is_scale(wide) | (torch.frexp(wide)[0] == 0.5)


def count_non_finite(
    tensors: Sequence[tuple[str, Tensor]], *, threads: int, on_progress: Progress | None = None
) -> dict[str, int]:
    """How many elements of each tensor are NaN or infinite; tensors without any are left out.

    Reads at most `threads` tensors' pieces at a time; on_progress is called with "check" after every piece.
    """
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    bad: dict[str, int] = defaultdict(int)
    done = 0
    pieces = [(name, piece) for name, tensor in tensors for piece in _pieces(tensor)]
    left = iter(pieces)

    def counted(found: int) -> None:
        nonlocal done
        name, piece = next(left)
        bad[name] += found
        done += piece.numel() * piece.element_size()
        if on_progress is not None:
            on_progress("check", done, total)

    count = partial(_count_in, list[Tensor]())
    all_results(Threads(max(1, threads)), [partial(count, piece) for _, piece in pieces], counted)
    return {name: bad[name] for name, _ in tensors if bad[name]}


def count_bad(tensors: Sequence[tuple[str, Tensor]], is_good: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """How many elements of each tensor are not good as f32; tensors without any are left out."""
    bad: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        bad[name] += int((~is_good(in_memory(tensor).to(torch.float32))).sum())
    return {name: n for name, n in bad.items() if n}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Jobs of a tensor: runs of a contiguous one, bundles of rows of a slice, by expert of a stack of those."""
    if tensor.dim() > 2 and not tensor.is_contiguous():
        for matrix in tensor:
            yield from _pieces(matrix)
        return
    pieces = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    step = max(1, JOB_BYTES // max(1, pieces[:1].numel() * pieces.element_size()))
    yield from (pieces[start : start + step] for start in range(0, len(pieces), step))


def _count_in(spare: list[Tensor], piece: Tensor) -> int:
    """`_count`, where a piece of a file is read into memory of earlier ones.

    Not of the heap, of which every thread has its own and keeps what it took.
    """
    if not is_mapped(piece):
        return _count(piece)
    try:
        scratch = spare.pop()
    except IndexError:
        scratch = torch.frombuffer(mmap.mmap(-1, JOB_BYTES), dtype=torch.uint8)
    found = _count(in_memory(piece, scratch))
    spare.append(scratch)
    return found


def _count(piece: Tensor) -> int:
    signed_type, unsigned_type, threshold = _PATTERNS[piece.dtype]
    codes = piece.detach().view(_INTEGER[piece.element_size()])
    if not piece.is_cpu:
        return int((codes & ((1 << (8 * piece.element_size() - 1)) - 1) >= threshold).sum())
    bits: NDArray[Any] = np.from_dlpack(codes)  # codes.numpy() would make the storage one that cannot be freed
    signed, unsigned = bits.view(signed_type), bits.view(unsigned_type)
    sign = 1 << (8 * bits.itemsize - 1)
    row_bytes = bits.itemsize if bits.ndim == 1 else bits.itemsize * bits.shape[1]
    step = max(1, CACHE_BYTES // max(1, row_bytes))
    axis = 0 if bits.ndim == 1 else (0, 1)
    largest = np.maximum.reduce  # ndarray.max costs several microseconds of Python a call
    count = 0
    for start in range(0, len(bits), step):
        part = slice(start, start + step)
        if (
            largest(signed[part], axis, initial=0) >= threshold
            or largest(unsigned[part], axis, initial=0) >= threshold + sign
        ):
            count += int(((unsigned[part] & (sign - 1)) >= threshold).sum())
    return count
