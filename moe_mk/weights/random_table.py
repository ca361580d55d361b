"""A random table of experts by token id, as DeepSeek-V4's first layers have one: every token goes to other experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

DRAWS = 1 << 20
"""Random numbers drawn at a time."""


def table_strips(random: np.random.Generator, shape: tuple[int, ...], num_experts: int) -> Iterator[Tensor]:
    """Rows of the table (X, K), int64, in order: K different experts of each token, every choice equally likely."""
    vocabulary, top_k = shape
    height = max(1, DRAWS // num_experts)
    for start in range(0, vocabulary, height):
        draws = random.random((min(height, vocabulary - start), num_experts), dtype=np.float32)
        yield torch.from_numpy(np.ascontiguousarray(draws.argsort(axis=1)[:, :top_k]).astype(np.int64))
