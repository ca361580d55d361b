"""Array types of the balancer. X layers or rows, W GPUs, P slots of all GPUs, S slots of one, E experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]
