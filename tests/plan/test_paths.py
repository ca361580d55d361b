"""Records of ways to move bytes: asked by field, and the cost of a small copy."""

from __future__ import annotations

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.paths import MOVERS, mover, movers, small_copy_us


@pytest.mark.row(63)
def test_five_ways_are_asked_by_what_drives_them_and_how_far_they_reach() -> None:
    assert set(MOVERS) == {"nccl", "cuda_memcpy", "nvshmem", "gdrcopy", "mpi"}
    assert [each.name for each in movers(needs_cpu=False)] == ["nvshmem"]
    assert {each.name for each in movers(scope="cluster")} == {"nccl", "nvshmem", "mpi"}
    assert {each.name for each in movers(gpu_direct=False)} == {"mpi"}
    with pytest.raises(ConfigError, match="needs_cpu"):
        movers(needs_cpus=True)
    with pytest.raises(ConfigError, match="nvshmem"):
        mover("nvshmen")


@pytest.mark.row(57)
def test_small_copies_through_a_window_and_through_the_driver() -> None:
    assert small_copy_us("cuda_memcpy", 0, 12.0) / small_copy_us("gdrcopy", 0, 12.0) == 7.0
    # 12 kB at 12 GB/s are one microsecond for both
    assert small_copy_us("cuda_memcpy", 12_000, 12.0) == 8.0 and small_copy_us("gdrcopy", 12_000, 12.0) == 2.0
    with pytest.raises(ConfigError, match="no small-copy cost is published for mpi; use gdrcopy or cuda_memcpy"):
        small_copy_us("mpi", 8, 12.0)
