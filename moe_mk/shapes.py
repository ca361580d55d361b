"""One legend of axis letters for the whole project, and the check at its doors.

T tokens on this rank      K experts per token            H hidden            I intermediate (this TP shard)
E logical experts          P physical experts (replicas)  L physical experts on this rank
R rows received            N assignments (row x expert)   S slots per expert in a batch
G expert groups            W ranks                        B bytes             X anything else, named where it is used

Tensors carry their letters as a suffix: `x_TH`, `ids_TK`. An id of -1 always means "goes nowhere".
GEMM-local m, n, k stay lower case inside `kernels/`.
"""

from __future__ import annotations

from math import isqrt

import torch

from moe_mk.errors import ShapeError

LEGEND = frozenset("TKHIEPLRNSGWBX")


def expect(
    name: str,
    tensor: torch.Tensor,
    axes: str,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    **sizes: int,
) -> None:
    """Check one tensor at a door: rank, named sizes, dtype and device.

    axes: letters of the legend separated by blanks, "T H". A letter without a size in `sizes` may have any size.
    Raises ShapeError that lists everything wrong with the tensor, not the first thing.
    """
    expect_dense(name, tensor)
    letters = axes.split()
    wrong: list[str] = []
    if tensor.dim() != len(letters):
        wrong.append(
            f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {len(letters)} [{', '.join(letters)}]"
        )
    else:
        for axis, (letter, size) in enumerate(zip(letters, tensor.shape, strict=True)):
            if letter in sizes and sizes[letter] != size:
                wrong.append(f"has {letter}={size} (axis {axis}), expected {letter}={sizes[letter]}")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if dtypes is not None and tensor.dtype not in dtypes:
        wrong.append(f"has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if device is not None and not same_device(tensor.device, device):
        wrong.append(f"is on {tensor.device}, expected {device}; move it with .to({str(device)!r})")
    if wrong:
        raise ShapeError(f"{name} " + "; ".join(wrong))


def expect_dense(name: str, tensor: object) -> None:
    """Raise ShapeError unless it is a tensor with strides: not a list or an array, neither sparse nor nested."""
    if not isinstance(tensor, torch.Tensor):
        given = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
        raise ShapeError(f"{name} is a {given}, expected a torch.Tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ShapeError(f"{name} has layout {layout}, expected {torch.strided}; convert it to a dense tensor")


def divisors_of(number: int) -> list[int]:
    """What divides a positive number, ascending; O(sqrt(number))."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def same_device(one: torch.device, other: torch.device) -> bool:
    """Say whether two devices are the same place; `cuda` without an index matches every index."""
    return one.type == other.type and (one.index == other.index or one.index is None or other.index is None)
