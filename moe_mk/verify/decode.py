"""Numbers as a checkpoint means them, decoded with arithmetic of its own: nothing here is shared with the schemes.

Four-bit values are read bit by bit, scales by their block, in numpy; each product is rounded to f32 once.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.tensor import QuantTensor

F32 = NDArray[np.float32]


def decoded(q: QuantTensor) -> Tensor:
    """A matrix as f64 on the CPU: values times the scale of their block, rounded to f32."""
    values = _four_bits(q.values) if q.scheme.per_byte == 2 else _f32(q.values)
    if q.scales is not None:
        values = values * _over_blocks(_f32(q.scales) if q.global_scale is None else _both_scales(q), q)
    return torch.from_numpy(values.astype(np.float64))


def _f32(tensor: Tensor) -> F32:
    return np.asarray(tensor.cpu().to(torch.float32).numpy(), dtype=np.float32)


def _four_bits(packed: Tensor) -> F32:
    """Sign, two bits of exponent with a bias of 1, one bit of mantissa; the low half of a byte comes first."""
    octets = packed.cpu().view(torch.uint8).numpy()
    codes = np.empty((octets.shape[0], 2 * octets.shape[1]), dtype=np.int32)
    codes[:, 0::2], codes[:, 1::2] = octets % 16, octets // 16
    sign, exponent, mantissa = codes // 8, codes // 2 % 4, codes % 2
    size = np.where(exponent == 0, mantissa / 2, np.exp2(exponent - 1) * (1 + mantissa / 2))
    return np.where(sign == 1, -size, size).astype(np.float32)


def _both_scales(q: QuantTensor) -> F32:
    """The scale of each block times that of its part of the rows."""
    assert q.global_scale is not None and q.scales is not None
    scales, above = _f32(q.scales), _f32(q.global_scale)
    return scales * np.repeat(above, scales.shape[0] // above.shape[0], axis=0)


def _over_blocks(scales: F32, q: QuantTensor) -> F32:
    """Each scale repeated over its block, the last of which may be cut off; one of a whole side over what there is."""
    assert q.scheme.block is not None
    out = scales
    for axis in (0, 1):
        length, side = q.shape[axis], q.scheme.block[axis]
        if side >= WHOLE:  # the matrix, or as many equal parts of it as there are scales
            side = -(-length // max(scales.shape[axis], 1))
        out = np.repeat(out, side, axis=axis)[:length] if axis == 0 else np.repeat(out, side, axis=axis)[:, :length]
    return out
