"""Give the pages of memory-mapped tensors back to the system once they have been copied."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Drop the whole pages under tensors that map a FILE: they stay readable, and are read again when touched.

    Never call this on memory that is not a file mapping: its contents would be lost. Does nothing where the system has
    no such call.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        start, size = tensor.data_ptr(), _extent(tensor)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            advise(first, last - first, mmap.MADV_DONTNEED)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one, gaps of a strided view included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
