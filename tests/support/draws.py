"""Normal numbers that are the same on every run."""

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float32, device="cpu")
