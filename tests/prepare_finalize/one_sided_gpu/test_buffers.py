"""How windows of GPUs are mapped: by torch's symmetric memory, its stand-in as strict, or by IPC and why."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import CommError
from moe_mk.external.device_memory import library
from moe_mk.prepare_finalize.one_sided_gpu.buffers import GpuBufferSlot, Mapped, between_gpus, map_windows
from tests.support.symmetric_standin import Handle, Meeting, StandIn

CPU, BYTES = torch.device("cpu"), 96
GPUS = ["GPU-a", "GPU-b", "GPU-c"]


def by_another_way(comm: Communicator, num_bytes: int, device: torch.device) -> Mapped:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return Mapped(own, [own.data_ptr()] * comm.size, None, "IPC")


def mapped(standins: list[Any], gpus: list[str] = GPUS) -> list[Mapped]:
    world = ThreadWorld(len(standins), timeout_s=20.0)
    jobs = [
        partial(between_gpus, comm, BYTES, CPU, gpu, standin, by_another_way)
        for comm, gpu, standin in zip(world.communicators(), gpus, standins, strict=True)
    ]
    return world.together(jobs)


def standins(ranks: int = 3) -> list[StandIn]:
    meeting = Meeting(ranks)
    return [StandIn(rank, meeting) for rank in range(ranks)]


@pytest.mark.parametrize("shifts", [(0, 0, 0), (0, 256, 512)])
def test_every_rank_has_the_address_of_every_window(shifts: tuple[int, ...]) -> None:
    made = standins()
    for standin, shift in zip(made, shifts, strict=True):
        standin.shift = shift
    windows = mapped([*made])
    assert [each.how for each in windows] == ["symmetric memory"] * 3
    bases = [each.own.data_ptr() for each in windows]
    assert all(each.addresses == bases for each in windows)
    assert all(each.own.shape == (BYTES,) and not each.own.any() for each in windows)
    assert all(isinstance(each.held, Handle) for each in windows), "the mapping must outlive its use"


def test_one_rank_that_cannot_is_enough_for_the_other_way_and_is_named() -> None:
    made = standins()
    made[1].backend = "NVSHMEM"
    windows = mapped([*made[:2], None])
    reason = (
        "IPC, not symmetric memory: rank 1: it is served by NVSHMEM here, not by CUDA; "
        "rank 2: this torch has no torch.distributed._symmetric_memory"
    )
    assert [each.how for each in windows] == [reason] * 3


def test_ranks_that_share_a_gpu_take_the_other_way() -> None:
    windows = mapped([*standins()], ["GPU-a", "GPU-b", "GPU-a"])
    assert [each.how for each in windows] == ["IPC, not symmetric memory: ranks 0, 2 share GPU GPU-a"] * 3


def test_memory_that_cannot_be_had_is_reported_in_the_words_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = standins(2)
    monkeypatch.setattr(made[0], "get_backend", lambda device: "CUDA")
    made[0].backend = None
    stated = {each.how for each in mapped([*made], GPUS[:2])}
    assert stated == {"IPC, not symmetric memory: rank 0: SymmetricMemory does not support device type cpu"}


def test_an_address_that_is_not_that_of_the_window_ends_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = standins(1)
    monkeypatch.setattr(only, "rendezvous", lambda tensor, group: Handle(0, 1, [4096], 0))
    with pytest.raises(CommError, match=r"rank 0, phase 'window set-up': .* window at 0x.* is reported at 0x1000"):
        mapped([only], GPUS[:1])


def test_the_stand_in_has_the_signatures_of_torch() -> None:
    real = library()
    assert real is not None, "torch has had it since 2.9"
    for name in ("empty", "rendezvous", "get_backend"):
        ours = list(inspect.signature(getattr(StandIn(0, Meeting(1)), name)).parameters.values())
        theirs = list(inspect.signature(getattr(real, name)).parameters.values())
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs], name
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in Handle.__dataclass_fields__)
    assert real.get_backend(CPU) is None
    with pytest.raises(RuntimeError, match="SymmetricMemory does not support device type cpu"):
        real.empty(BYTES, dtype=torch.uint8, device=CPU)


def test_ranks_of_one_process_have_one_piece() -> None:
    windows = [map_windows(comm, BYTES, CPU) for comm in LockstepWorld(2).communicators()]
    assert [each.how for each in windows] == ["one piece"] * 2
    assert windows[0].addresses == windows[1].addresses == [each.own.data_ptr() for each in windows]


def test_counts_and_ids_out_of_range_drop_rows_and_are_noted_once() -> None:
    # Rank 0 announces 5 rows of at most 4, rank 2 has an id of 9 among 8 experts, rank 3 one of -2 in its last row.
    slot = GpuBufferSlot(LockstepWorld(4).communicators()[1], 4, 16, 16, CPU)
    slot.call_1.fill_(7)
    ids_RK = torch.arange(32, dtype=torch.int32).view(16, 2) % 8
    ids_RK[[2, 9, 15], [0, 1, 0]] = torch.tensor([-1, 9, -2], dtype=torch.int32)
    counts_W = torch.tensor([5, 3, 2, 4], dtype=torch.int32)
    found = slot.checked(counts_W, ids_RK, 8)
    assert (found[:4] == -1).all() and torch.equal(found[4:7], ids_RK[4:7]) and (found[7] == -1).all()
    assert found[8:].tolist() == [[0, 1], [2, -1], [-1, -1], [-1, -1], [0, 1], [2, 3], [4, 5], [-1, 7]]
    noted = [[7, 0, 0, 0], [5, 0, 0, 0], [0, 0, 7, 7], [0, 0, 9, -2]]
    assert slot._faults_seen_4W.tolist() == noted
    slot.call_1.fill_(8)
    slot.active_W[3] = 0
    slot.checked(torch.tensor([9, 9, 0, 9], dtype=torch.int32), ids_RK, 8)
    assert slot._faults_seen_4W.tolist() == [[7, 8, 0, 0], [5, 9, 0, 0], *noted[2:]]
    with pytest.raises(CommError, match="peer 0: epoch 7: sent 5 rows into a region of 4"):
        slot.expect_punctual()
    slot._faults_seen_4W[:2] = 0
    with pytest.raises(
        CommError, match="epoch 7: a row is for expert 9, out of range .0 <= expert < 8, or -1 for none"
    ):
        slot.expect_punctual()
