"""`flashinfer.comm.mapping`: which rank of which parallel group a process is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Degrees:
    cp_size: int = 1
    cp_config: dict[str, object] | None = field(default=None, compare=False)
    tp_size: int = 1
    pp_size: int = 1
    moe_cluster_size: int = -1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    attn_tp_size: int = -1
    attn_cp_size: int = -1
    auto_parallel: bool = False
    enable_attention_dp: bool = field(default=False, compare=False)


@dataclass
class Mapping(_Degrees):
    """Degrees of parallelism and this rank; equal if all of them are.

    Raises ValueError where they do not multiply to the world.
    """

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.moe_cluster_size == -1:
            self.moe_cluster_size = 1
        rest = self.tp_size // self.moe_cluster_size
        if self.moe_tp_size == -1 and self.moe_ep_size == -1:
            self.moe_tp_size, self.moe_ep_size = rest, 1
        elif self.moe_tp_size == -1:
            self.moe_tp_size = rest // self.moe_ep_size
        elif self.moe_ep_size == -1:
            self.moe_ep_size = rest // self.moe_tp_size
        degrees = f"{self.tp_size} * {self.pp_size} * {self.cp_size}"
        if self.tp_size * self.pp_size * self.cp_size != self.world_size:
            raise ValueError(f"world_size must equal tp_size * pp_size * cp_size: {self.world_size} != {degrees}")
        if self.moe_tp_size * self.moe_ep_size * self.moe_cluster_size != self.tp_size:
            raise ValueError(
                f"tp_size must equal moe_tp_size * moe_ep_size * moe_cluster_size: {self.tp_size} != "
                f"{self.moe_tp_size} * {self.moe_ep_size} * {self.moe_cluster_size}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"Rank should be an integer between 0 and {self.world_size - 1}, but got {self.rank}.")

    @property
    def moe_ep_rank(self) -> int:
        """The place among the ranks that share out experts: neighbours differ in it."""
        return self.rank % self.tp_size % self.moe_ep_size

    @property
    def tp_rank(self) -> int:
        """The place in the tensor-parallel group, which two-sided all-to-all takes for the expert-parallel one."""
        return self.rank % self.tp_size
