"""Array types of the balancer. X layers or rows, W GPUs, P slots of all GPUs, S slots of one, E experts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ShapeError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]


def tensor_of(load: Tensor | NDArray[np.generic]) -> Tensor:
    """Loads as a tensor. Raises ShapeError for what is no array of real numbers."""
    try:
        tensor = load if isinstance(load, Tensor) else torch.from_numpy(np.asarray(load))
    except (TypeError, ValueError) as problem:
        raise ShapeError(f"a load must be an array of numbers, [layers, experts]: {problem}") from problem
    if tensor.is_complex():
        raise ShapeError(f"a load is {tensor.dtype}; tokens are counted in real numbers")
    return tensor
