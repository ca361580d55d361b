"""Search for NaN codes and invalid scales at memory speed. Reading every byte once also pages a mapped file in.

Two maxima find every non-finite number: as signed integers the positive ones are the largest, as unsigned integers the
negative ones. FP8 e4m3: 0x7f and 0xff; bf16: from 0x7f80 and 0xff80 on; and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def count_non_finite(
    tensors: Sequence[tuple[str, Tensor]], *, threads: int, on_progress: Progress | None = None
) -> dict[str, int]:
    """How many elements of each tensor are NaN or infinite; tensors without any are left out.

    Reads at most `threads` tensors' pieces at a time; on_progress is called with "check" after every piece.
    """
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    bad: dict[str, int] = defaultdict(int)
    done = 0
    pool = ThreadPoolExecutor(max_workers=max(1, threads))
    try:
        jobs = {pool.submit(_count, piece): (name, piece) for name, tensor in tensors for piece in _pieces(tensor)}
        for job in as_completed(jobs):
            name, piece = jobs[job]
            bad[name] += job.result()
            done += piece.numel() * piece.element_size()
            if on_progress is not None:
                on_progress("check", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: bad[name] for name, _ in tensors if bad[name]}


def count_bad_scales(
    scales: Sequence[tuple[str, Tensor]], *, power_of_two: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """How many scales of each tensor are not finite and positive, and how many of the others are not powers of two.

    power_of_two: whether to check the latter; else the second result is empty.
    """
    broken: dict[str, int] = defaultdict(int)
    uneven: dict[str, int] = defaultdict(int)
    for name, tensor in scales:
        wide = tensor.to(torch.float32)
        good = torch.isfinite(wide) & (wide > 0)
        broken[name] += int((~good).sum())
        uneven[name] += int((good & (torch.frexp(wide)[0] != 0.5)).sum()) if power_of_two else 0
    return {name: n for name, n in broken.items() if n}, {name: n for name, n in uneven.items() if n}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Jobs of a vector or matrix: runs of a contiguous one, bundles of rows of a slice."""
    pieces = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    step = max(1, JOB_BYTES // max(1, pieces[:1].numel() * pieces.element_size()))
    yield from (pieces[start : start + step] for start in range(0, len(pieces), step))


def _count(piece: Tensor) -> int:
    signed_type, unsigned_type, threshold = _PATTERNS[piece.dtype]
    bits: NDArray[Any] = piece.cpu().view(_INTEGER[piece.element_size()]).numpy()
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
