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
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

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
    expect_dense(name, tensor, traced=True)
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


PLAIN_WAYS = {
    "DTensor": "full_tensor() gathers it, to_local() is this rank's part",
    "AsyncCollectiveTensor": "wait() returns one",
    "MaskedTensor": "to_tensor(0) returns one",
}
"""What makes a plain tensor of one, by the name of the class."""
TRACED = {"FakeTensor", "FunctionalTensor"}


def expect_dense(name: str, tensor: object, *, traced: bool = False) -> None:
    """Raise ShapeError unless it is a tensor whose memory can be read.

    Neither a list nor an array, nor sparse, nested or quantised, nor of a class with memory of another kind (DTensor),
    nor inside of torch.func, nor without memory. traced: tensors of a trace may be, for operators of torch.
    """
    if not isinstance(tensor, torch.Tensor):
        given = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
        raise ShapeError(f"{name} is a {given}, expected a torch.Tensor")
    if not is_compiling() and (why := _reason_against(tensor, traced)):
        raise ShapeError(f"{name} {why}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ShapeError(f"{name} has layout {layout}, expected {torch.strided}; convert it to a dense tensor")


def _reason_against(tensor: torch.Tensor, traced: bool) -> str:
    """Why the memory of a tensor is not that of its elements; "" if it is."""
    kind, dispatch = type(tensor), torch.Tensor.__torch_dispatch__
    if kind is not torch.Tensor:
        names = {cls.__name__ for cls in kind.__mro__}
        if is_lazy(tensor):
            return f"is a {kind.__name__}, which has no values yet"
        if getattr(kind, "__torch_dispatch__", dispatch) is not dispatch and not (traced and names & TRACED):
            ways = [way for of, way in PLAIN_WAYS.items() if of in names]
            return f"is a {kind.__name__}, expected a plain torch.Tensor; {(*ways, 'convert it to one')[0]}"
    if tensor.is_quantized:
        return "is a quantised tensor of torch; dequantize() returns a plain one"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is a tensor of torch.func (vmap, grad, jvp, functionalize), which no kernel reads; call it outside"
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested or kind is not torch.Tensor:
        return ""
    size = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if torch._is_functional_tensor(tensor) and traced:
        return ""
    if torch._is_functional_tensor(tensor) or tensor._is_zerotensor():
        return "is a tensor without memory, expected one with elements; clone it"
    room = tensor.untyped_storage().nbytes()
    if tensor.numel() and (tensor.storage_offset() + size) * tensor.element_size() > room:
        return f"has no memory any more: its storage of {room} bytes was freed or resized"
    return ""


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending; O(sqrt(number))."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def same_device(one: torch.device, other: torch.device) -> bool:
    """Say whether two devices are the same place; `cuda` without an index matches every index."""
    return one.type == other.type and (one.index == other.index or one.index is None or other.index is None)
