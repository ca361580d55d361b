"""A group of `torch.distributed`: gloo between CPU processes, NCCL between GPUs. The group is passed in, never made.

gloo work is waited for with a deadline, because its own is 30 minutes; NCCL work is ordered on the stream and guarded
by the watchdog of its group. gloo cannot carry CUDA tensors in all-to-all: those are staged through the host; counts
and digests, made on the host, are staged through the GPU where a group has only NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.communicator import Communicator, summing_dtype
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, InFlight

DEFAULT_TIMEOUT_S = 120.0

# torch 2.13 renamed the function, and warns of the name that 2.11 and 2.12 know.
_gather_into = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class DistributedCommunicator(Communicator):
    """One rank of a process group. timeout_s: how long a peer may be late before CommError. layer: for messages."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        layer: str = "",
        kept: dict[Hashable, object] | None = None,
    ) -> None:
        super().__init__(kept)
        self.group, self.timeout_s, self.layer = group, timeout_s, layer
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not a member of the group it was given; pass None, or its own group")
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        """`all_to_all_single` with uneven splits."""
        self._count_sent(phase, rows, send)
        staged = self._stage(rows)
        received = torch.empty((sum(receive), *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
        yield from self._exchange(received, staged, send, receive, phase)
        return received.to(rows.device)

    def all_to_others(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        """`all_to_all_single` straight into `received`."""
        self._count_sent(phase, rows, send)
        staged = self._stage(rows)
        landing = received if received.device == staged.device else torch.empty_like(received, device=staged.device)
        yield from self._exchange(landing, staged, self._to_others(send), self._to_others(receive), phase)
        if landing is not received:
            received.copy_(landing)

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        """All-gather into one tensor, padded to the longest rank."""
        longest, mine = max(counts), rows.shape[0]
        staged = self._stage(rows)
        if mine < longest:
            padding = torch.zeros((longest - mine, *rows.shape[1:]), dtype=rows.dtype, device=staged.device)
            staged = torch.cat((staged, padding))
        self._count_sent(phase, staged, [longest] * self.size)
        shape = (self.size * longest, *rows.shape[1:])
        received = torch.empty(shape, dtype=rows.dtype, device=staged.device)
        yield from self._fly(lambda: _gather_into(received, staged, group=self.group, async_op=True), staged, phase)
        if min(counts) < longest:
            padded = received.view(self.size, longest, *rows.shape[1:])
            received = torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])
        return received.to(rows.device)

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        """Sum 16-bit numbers in f32 and round once; gloo would add them in 16 bits."""
        total = self._stage(x).to(summing_dtype(x.dtype), copy=True)
        self._count_reduced(phase, x)
        yield from self._fly(lambda: dist.all_reduce(total, group=self.group, async_op=True), total, phase)
        return total.to(device=x.device, dtype=x.dtype)

    def library_group(self) -> dist.ProcessGroup:
        """The group itself."""
        return self.group

    def _stage(self, x: Tensor) -> Tensor:
        return x.contiguous().to(carrier(x.device, self._backends))

    def _exchange(
        self, received: Tensor, staged: Tensor, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Flight[None]:
        splits = list(receive), list(send)
        yield from self._fly(
            lambda: dist.all_to_all_single(received, staged, *splits, group=self.group, async_op=True), staged, phase
        )

    def _fly(self, post: Callable[[], dist.Work], staged: Tensor, phase: str) -> Flight[None]:
        try:
            work = post()
        except RuntimeError as problem:
            raise self._error(problem, phase) from problem
        yield InFlight(phase)
        try:
            if self._backends[staged.device.type] == "gloo":
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()
        except RuntimeError as problem:
            raise self._error(problem, phase) from problem

    def _error(self, problem: RuntimeError, phase: str) -> CommError:
        first_line = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        text = f"a peer of {self.size} is dead or later than {self.timeout_s:g} s [kernel.timeout_s]: {first_line}"
        return CommError(text, rank=self.rank, phase=phase, layer=self.layer)


def carrier(device: torch.device, backends: Mapping[str, str]) -> torch.device:
    """Where a tensor must lie to travel: where it is, unless gloo would have it on the host, or the group only on GPUs.

    backends: the backend of the group for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.
    """
    backend = backends.get(device.type)
    if backend is None:
        return torch.device("cuda" if "cuda" in backends else "cpu")
    return torch.device("cpu") if backend == "gloo" else device
