"""Four real gloo processes: every collective by hand, against the lockstep twin, and with dead or late peers."""

import os
import signal
import socket
import struct
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from moe_mk.comm import Communicator, DistributedCommunicator, LockstepWorld, ParallelGroups, communicator
from moe_mk.comm.distributed import staging_device
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, interleave, wait
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from tests.support.worlds import world_of

RANKS = 4
# SEND[r][p]: rows from rank r to rank p. Rank 1 sends nothing, some pairs exchange nothing.
SEND = [[2, 0, 3, 1], [0, 0, 0, 0], [1, 4, 0, 2], [0, 1, 1, 5]]
COUNTS = [3, 0, 1, 2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64]
LAYER = "layers.3"
OverGloo = list[tuple[dict[str, Tensor], dict[str, int]]]
"""Of every rank: the results of all collectives, and its traffic."""


world = world_of(RANKS)


def world_comm(timeout_s: float = 30.0) -> DistributedCommunicator:
    group = dist.group.WORLD
    assert group is not None
    return DistributedCommunicator(group, timeout_s=timeout_s, layer=LAYER)


def rows_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Three columns: who sent the row, which of its rows it is, and a constant."""
    rows = [[rank, row, 7] for row in range(count)]
    return torch.tensor(rows, dtype=dtype, device="cpu").view(count, 3)


def expected_all_to_all(rank: int, dtype: torch.dtype) -> list[list[int]]:
    parts = []
    for peer in range(RANKS):
        start = sum(SEND[peer][:rank])
        parts.append(rows_of(peer, sum(SEND[peer]), dtype)[start : start + SEND[peer][rank]])
    return [[int(value) for value in row] for part in parts for row in part.tolist()]


def others_alone(comm: Communicator, dtype: torch.dtype) -> Flight[Tensor]:
    """Rows of others into rows that are there; what stays on a rank is not among those that are sent."""
    rows, before = rows_of(comm.rank, sum(SEND[comm.rank]), dtype), sum(SEND[comm.rank][: comm.rank])
    rows = torch.cat((rows[:before], rows[before + SEND[comm.rank][comm.rank] :]))
    receive = [SEND[peer][comm.rank] for peer in range(RANKS)]
    received = torch.full((sum(receive) - receive[comm.rank], 3), 99, dtype=dtype)
    yield from comm.all_to_others(received, rows, SEND[comm.rank], receive, "others")
    return received


def every_collective(comm: Communicator) -> Flight[dict[str, Tensor]]:
    """All collectives in all dtypes; the sums are of small integers and so exact in any order."""
    receive = [SEND[peer][comm.rank] for peer in range(RANKS)]
    results: dict[str, Tensor] = {}
    for dtype in DTYPES:
        rows = rows_of(comm.rank, sum(SEND[comm.rank]), dtype)
        results[f"all_to_all {dtype}"] = yield from comm.all_to_all(rows, SEND[comm.rank], receive, "dispatch")
        mine = rows_of(comm.rank, COUNTS[comm.rank], dtype)
        results[f"all_gather {dtype}"] = yield from comm.all_gather(mine, COUNTS, "gather")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        partial = rows_of(comm.rank, sum(COUNTS), dtype)
        results[f"reduce_scatter {dtype}"] = yield from comm.reduce_scatter(partial, COUNTS, "combine")
        results[f"all_reduce {dtype}"] = yield from comm.all_reduce(partial, "late")
        results[f"left as it was {dtype}"] = partial
    results["counts"] = torch.tensor((yield from comm.exchange_counts(SEND[comm.rank], "counts")))
    results["gathered"] = torch.tensor((yield from comm.gather_count(10 * comm.rank, "counts")))
    for dtype in DTYPES:
        results[f"others {dtype}"] = yield from others_alone(comm, dtype)
    empty = torch.empty((0, 3), dtype=torch.float32)
    results["nothing"] = yield from comm.all_to_all(empty, [0] * RANKS, [0] * RANKS, "idle")
    results["none"] = yield from comm.all_gather(empty, [0] * RANKS, "idle")
    return results


def collectives_over_gloo(rank: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    comm = world_comm()
    return wait(every_collective(comm)), dict(comm.traffic.bytes_by_phase)


@pytest.fixture(scope="module")
def over_gloo(world: RankWorld) -> OverGloo:
    return world.call(collectives_over_gloo)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_rows_land_in_rank_order_without_padding(over_gloo: OverGloo, dtype: torch.dtype) -> None:
    # Rank 1 gets nothing from 0 and 1, rows 1 2 3 4 of rank 2 (row 0 went to rank 0), row 0 of rank 3.
    first = over_gloo[1][0][f"all_to_all {dtype}"]
    assert first.tolist() == [[2, 1, 7], [2, 2, 7], [2, 3, 7], [2, 4, 7], [3, 0, 7]]
    for rank, (results, sent) in enumerate(over_gloo):
        received, gathered = results[f"all_to_all {dtype}"], results[f"all_gather {dtype}"]
        wanted = expected_all_to_all(rank, dtype)
        assert received.dtype == dtype and received.tolist() == wanted
        assert results[f"others {dtype}"].tolist() == [row for row in wanted if row[0] != rank]
        assert sent["others"] == sent["dispatch"], "what stays is counted as by an all-to-all"
        assert gathered.dtype == dtype
        assert gathered.tolist() == [[0, 0, 7], [0, 1, 7], [0, 2, 7], [2, 0, 7], [3, 0, 7], [3, 1, 7]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_sums_over_ranks_by_hand(over_gloo: OverGloo, dtype: torch.dtype) -> None:
    # Row i of every rank is (rank, i, 7): the sum is (0 + 1 + 2 + 3, 4 i, 28). Rank 2 keeps row 3, rank 1 keeps none.
    everything = [[6, 4 * row, 28] for row in range(6)]
    for rank, (results, _) in enumerate(over_gloo):
        start = sum(COUNTS[:rank])
        assert results[f"reduce_scatter {dtype}"].tolist() == everything[start : start + COUNTS[rank]]
        assert results[f"all_reduce {dtype}"].tolist() == everything
        assert results[f"all_reduce {dtype}"].dtype == dtype
        assert results[f"left as it was {dtype}"].tolist() == rows_of(rank, 6, dtype).tolist()


def test_lockstep_ranks_give_the_bits_of_gloo(over_gloo: OverGloo) -> None:
    twins = interleave([every_collective(comm) for comm in LockstepWorld(RANKS).communicators()])
    for (real, _), twin in zip(over_gloo, twins, strict=True):
        assert real.keys() == twin.keys()
        for name, tensor in real.items():
            assert tensor.dtype == twin[name].dtype and torch.equal(tensor, twin[name]), name


def test_traffic_counts_what_leaves_a_rank(over_gloo: OverGloo) -> None:
    # Bytes of an element over the five dtypes: 2 + 2 + 4 + 1 + 8 = 17, and three columns a row.
    # dispatch: rank 0 sends 0 + 3 + 1 rows to others, rank 1 none, rank 2 1 + 4 + 2, rank 3 0 + 1 + 1.
    # gather: a rank's rows to 3 peers.
    # combine (dtypes of 2 + 2 + 4 + 8 = 16): the 6 rows less one's own part.
    # late: parts of 4, 5, 4 and 5 of 18 elements; each rank sends those of others, and the sum of its own to 3 peers,
    # in f32 for three dtypes and 8 bytes for int64.
    # counts: 8 bytes to 3 peers, twice.
    for rank, (_, sent) in enumerate(over_gloo):
        assert sent["dispatch"] == [4, 0, 7, 2][rank] * 3 * 17
        assert sent["gather"] == COUNTS[rank] * 3 * 3 * 17
        assert sent["combine"] == (6 - COUNTS[rank]) * 3 * 16
        assert sent["late"] == [18 - 4 + 3 * 4, 18 - 5 + 3 * 5][rank % 2] * (4 + 4 + 4 + 8)
        assert sent["counts"] == 2 * 3 * 8 and sent["idle"] == 0


def transpose(rank: int) -> tuple[list[str], list[str]]:
    comm, ones = world_comm(), [1] * RANKS
    row = torch.tensor([[ord("ABCD"[rank]), ord(str(place))] for place in range(RANKS)], dtype=torch.uint8)
    column = wait(comm.all_to_all(row, ones, ones, "dispatch"))
    back = wait(comm.all_to_all(column, ones, ones, "combine"))
    return ["".join(map(chr, pair)) for pair in column.tolist()], ["".join(map(chr, pair)) for pair in back.tolist()]


@pytest.mark.row(32)
def test_all_to_all_is_a_transpose_and_its_own_inverse(world: RankWorld) -> None:
    # rank 0: A0 A1 A2 A3                A0 B0 C0 D0
    # rank 1: B0 B1 B2 B3                A1 B1 C1 D1
    # rank 2: C0 C1 C2 C3   -------->    A2 B2 C2 D2   -------->   as before
    # rank 3: D0 D1 D2 D3                A3 B3 C3 D3
    for rank, (column, back) in enumerate(world.call(transpose)):
        assert column == [f"{who}{rank}" for who in "ABCD"]
        assert back == [f"{'ABCD'[rank]}{place}" for place in range(RANKS)]


def groups_of_a_mesh(rank: int) -> tuple[list[tuple[int, int]], list[float]]:
    groups = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")))
    ep, tp, dp = (communicator(group) for group in (groups.ep, groups.tp, groups.dp))
    number = torch.tensor([float(10**rank)])
    sums = [float(wait(comm.all_reduce(number, "sum"))) for comm in (ep, tp, dp)]
    return [(comm.rank, comm.size) for comm in (ep, tp, dp)], sums


def test_groups_come_from_the_dimensions_of_a_device_mesh(world: RankWorld) -> None:
    # mesh  [[0, 1],   ep runs down: {0, 2} and {1, 3}
    #        [2, 3]]   tp runs right: {0, 1} and {2, 3}; there is no dp
    places = world.call(groups_of_a_mesh)
    assert [place for place, _ in places] == [
        [(0, 2), (0, 2), (0, 1)],
        [(0, 2), (1, 2), (0, 1)],
        [(1, 2), (0, 2), (0, 1)],
        [(1, 2), (1, 2), (0, 1)],
    ]
    assert [sums for _, sums in places] == [[101, 11, 1], [1010, 11, 10], [101, 1100, 100], [1010, 1100, 1000]]


def not_a_member(rank: int) -> str:
    group = dist.new_group([0, 1])
    try:
        return f"member {communicator(group).rank}"
    except ConfigError as problem:
        return str(problem)


def test_a_group_of_others_is_refused(world: RankWorld) -> None:
    answers = world.call(not_a_member)
    assert answers[:2] == ["member 0", "member 1"]
    assert all("not a member of the group in" in answer for answer in answers[2:])


LATE_S, PATIENCE_S = 2.5, 1.0


def one_is_late(rank: int) -> tuple[str, int | None, float]:
    group = dist.new_group()  # of its own: its connections end
    comm = DistributedCommunicator(group, timeout_s=30.0 if rank == 2 else PATIENCE_S, layer=LAYER)
    ones = [1] * RANKS
    wait(comm.all_to_all(torch.zeros(RANKS, 1), ones, ones, "dispatch"))
    time.sleep({1: 0.9 * PATIENCE_S, 2: LATE_S}.get(rank, 0.0))  # one that is in time leaves no more time to the next
    started = time.monotonic()
    try:
        wait(comm.all_to_all(torch.zeros(RANKS, 1), ones, ones, "combine"))
    except CommError as problem:
        return str(problem), problem.peer, time.monotonic() - started
    return "landed", None, time.monotonic() - started


def test_a_late_rank_ends_in_an_error_that_names_it_within_the_timeout(world: RankWorld) -> None:
    answers = world.call(one_is_late)
    for rank in (0, 1, 3):
        text, peer, seconds = answers[rank]
        assert text.startswith(
            f"rank {rank}, phase 'combine', layer 'layers.3', peer 2: sent nothing within 1 s [kernel.timeout_s]"
        )
        assert peer == 2
        assert seconds < PATIENCE_S + 0.8  # with GRACE_S of the group
    assert answers[2][0].startswith("rank 2, phase 'combine'") and answers[2][1] is not None


def one_is_killed(rank: int) -> str:
    comm = world_comm(timeout_s=5.0)
    wait(comm.gather_count(rank, "counts"))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        wait(comm.all_to_all(torch.zeros(RANKS, 1), [1] * RANKS, [1] * RANKS, "dispatch"))
    except CommError as problem:
        return f"{problem.rank} {problem.phase} {problem.layer} {problem.peer} {problem.detail[:11]}"
    return "landed"


def test_a_killed_rank_is_named_on_every_other(world: RankWorld) -> None:
    with pytest.raises(RankError, match=r"1 of 4 ranks failed\nrank 3: the process ended with exit code -9") as caught:
        world.call(one_is_killed)
    assert caught.value.results == {rank: f"{rank} dispatch layers.3 3 its process" for rank in (0, 1, 2)}


def test_tensors_travel_where_their_group_can_carry_them() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    gloo, nccl, both = {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}
    assert [staging_device(device, gloo) for device in (cpu, gpu)] == [cpu, cpu]
    assert [staging_device(device, nccl) for device in (cpu, gpu)] == [torch.device("cuda"), gpu]
    assert [staging_device(device, both) for device in (cpu, gpu)] == [cpu, gpu]


def received_bytes() -> int:
    """Payload that the TCP connections of this process have delivered, as the kernel counts it."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or a socket of another kind
            continue
        total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


BYTES_RECEIVED = 128
"""Where tcpi_bytes_received is in Linux's struct tcp_info."""
TOP_K, TOKENS, WIDTH = 4, 256, 1024


def observed(rank: int, phase: str) -> tuple[int, dict[int, int]]:
    """Bytes that one call delivered to this rank, and what the traffic counter states that it sent to each other."""
    comm = world_comm()
    wait(comm.all_reduce(torch.zeros(RANKS, dtype=torch.float32), "connect"))
    draw = torch.Generator().manual_seed(rank)
    dist.barrier()
    before = received_bytes()
    if phase == "all-reduce":
        wait(comm.all_reduce(torch.randn(TOKENS, WIDTH, generator=draw), phase))
    else:  # each assignment travels to a random rank, as rows of an expert-parallel dispatch do
        to_W = torch.randint(0, RANKS, (TOKENS * TOP_K,), generator=draw).bincount(minlength=RANKS).tolist()
        receive = wait(comm.exchange_counts(to_W, "counts"))
        rows = torch.randn(sum(to_W), WIDTH, generator=draw).to(torch.bfloat16)
        wait(comm.all_to_all(rows, to_W, receive, phase))
    received = received_bytes() - before
    sent = {peer: n for peer, n in comm.traffic.bytes_by_peer[phase].items() if peer != rank}
    assert comm.traffic.bytes_by_phase[phase] == sum(sent.values()), "what stays on the rank is not sent"
    return received, sent


@pytest.mark.row(35, 37, "N17")
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux, whose kernel counts bytes by connection")
@pytest.mark.parametrize("phase", ["all-reduce", "exchange"])
def test_connections_deliver_the_bytes_that_are_counted(world: RankWorld, phase: str) -> None:
    ranks = world.call(observed, phase)
    for number, (received, sent) in enumerate(ranks):
        counted = sum(theirs.get(number, 0) for _, theirs in ranks)
        assert counted <= received < 1.01 * counted + 8192, f"rank {number}: beyond rows, headers only"
        if phase == "all-reduce":  # of a ring: 2 (N - 1) / N of the tensor, and 2 S D for many ranks
            assert sum(sent.values()) == 2 * (RANKS - 1) * TOKENS * WIDTH * 4 // RANKS
    if phase == "exchange":  # K S rows a rank, less those that stay, which draw to draw are a fourth
        left = sum(sum(sent.values()) for _, sent in ranks) / (RANKS * TOKENS * TOP_K * WIDTH * 2)
        assert left == pytest.approx(1 - 1 / RANKS, abs=0.03)
