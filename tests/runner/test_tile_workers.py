"""Workers of tiles: threads over processes, and on a device streams, whose steps wait for marks of what they need."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.comm import DistributedCommunicator
from moe_mk.errors import CommError
from moe_mk.external.device import Queues
from moe_mk.flight import Flight, wait
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.runner import MicroBatch, StageLink, TilePlan, TileRecord, TileWork, cut, on_workers, plan_for
from moe_mk.runner.tiled_kernel import TiledKernel
from moe_mk.runner.tiles import Step
from tests.runner.tile_ranks import Meeting, MeetingExperts, Ranks, Rendezvous, both_ways, in_tiles, no_thread_is_left
from tests.support.library_layers import Model, batch, expect_exact, flight_of
from tests.support.threads import job_threads_left
from tests.support.worlds import world_of


class Listed(Queues):
    """Queues of an imitated device, which say what they would do: marks are numbers, threads have their stream's name.

    `run_later` is true as on a GPU.
    """

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.broken, self._here = broken, threading.local()
        self.marks, self._lock = 0, threading.Lock()
        self.waits: dict[str, list[int]] = {}

    @property
    def run_later(self) -> bool:
        return True

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        if self.broken:
            raise RuntimeError("no more streams")
        self._here.name = name
        try:
            yield
        finally:
            self._here.name = "caller"

    def mark(self) -> Any:
        with self._lock:
            self.marks += 1
            return self.marks

    def after(self, mark: Any) -> None:
        self.waits.setdefault(getattr(self._here, "name", "caller"), []).append(mark)


def work_of(tiles: int) -> tuple[TileWork, TilePlan, Any]:
    made = Ranks("no_ep", hostile_routings(1)[0], threads=False)
    kernel, batch = made.kernels[0], MicroBatch(made.tokens()[0], made.case.routings[0])
    work = TileWork(kernel.prepare_finalize, lambda tokens: kernel.multiply(tokens, NO_WEIGHTS), cut(batch, tiles))
    return work, plan_for(kernel.prepare_finalize, tiles), made.forward([kernel])[0]


@pytest.mark.row(42, 49)
def test_streams_wait_for_marks_of_what_steps_need() -> None:
    work, plan, serial = work_of(4)
    queues, record = Listed(), TileRecord()
    outputs = wait(on_workers(work, plan, record, queues))
    assert torch.equal(torch.cat(outputs), serial) and no_thread_is_left()
    assert queues.marks == 1 + len(plan.order), "where the caller was, and the end of every step"
    assert queues.waits["comm"][0] == 1, "nothing is read before the caller has written it"
    needed = {worker: sum(len(plan.needs(step)) for step in steps) for worker, steps in plan.workers.items()}
    assert len(queues.waits["comm"]) == 1 + needed["comm"]
    # The calling thread multiplies, and waits for everything at the end.
    caller = queues.waits["caller"]
    assert len(caller) == needed["experts"] + len(plan.order) and set(caller[-len(plan.order) :]) == set(range(2, 22))
    assert len(work.kept) == 4, "outputs are not freed while another stream may read them"


def test_on_a_cpu_nothing_is_kept_and_nothing_waits() -> None:
    work, plan, serial = work_of(4)
    queues = Queues(torch.device("cpu"))
    assert torch.equal(torch.cat(wait(on_workers(work, plan, TileRecord(), queues))), serial)
    assert queues.mark() is None and not queues.run_later and not work.kept
    with queues.on_stream("comm"):
        queues.after(None)


def test_a_device_without_another_stream_is_an_error_and_not_a_hang() -> None:
    work, plan, _ = work_of(2)
    with pytest.raises(RuntimeError, match="no more streams"):
        wait(on_workers(work, plan, TileRecord(), Listed(broken=True)))
    assert no_thread_is_left()


def test_the_first_of_several_failures_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan, _ = work_of(2)
    perform, begun = work.perform, threading.Event()

    def failing(step: Step) -> Flight[None]:
        if step.kind == "M":
            begun.set()
            while job_threads_left():
                time.sleep(1e-3)
            raise RuntimeError("the experts failed after the transport")
        if step.transfer == "D1" and begun.wait(5.0):
            raise CommError("is dead", rank=0, phase="dispatch", peer=1)
        return perform(step)

    monkeypatch.setattr(work, "perform", failing)
    with pytest.raises(CommError, match="is dead"):
        wait(on_workers(work, plan, TileRecord()))


@pytest.mark.row(49)
@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll", "nvlink_two_sided", "all_to_all"])
def test_outputs_of_several_batches_are_those_of_one_after_the_other(name: str) -> None:
    model = Model(name, layers=1)

    def both(mine: list[Any], rank: int) -> None:
        kernel = mine[0]
        for count in (1, 2, 5):
            given = [batch(100 * count + 10 * number + rank) for number in range(count)]
            serial = [wait(flight_of(kernel, own)) for own in given]
            work = TileWork(
                kernel.prepare_finalize,
                lambda tokens: kernel.multiply(tokens, NO_WEIGHTS),
                [MicroBatch(x_TH, routing) for x_TH, routing in given],
            )
            outputs = wait(on_workers(work, plan_for(kernel.prepare_finalize, count), TileRecord()))
            for y_TH, one_TH, own in zip(outputs, serial, given, strict=True):
                expect_exact(y_TH, own)
                assert torch.equal(y_TH, one_TH)

    model.each(both, model.layers, range(2))
    assert no_thread_is_left()


EXPERTS, HIDDEN, INNER, TOKENS, TIMEOUT_S = 8, 128, 64, 24, 3.0
CASES = [(transport, who) for transport in ("all_to_all", "one_sided", "all_gather") for who in ("turns", "thread")]


def built(rank: int, **settings: object) -> MoELayer:
    """A layer of bf16 experts that give a row the same bits in any batch."""
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_shared_experts": 1}
    data = {"model": {**model, "quant": {"weights": "bf16"}}, "router": {"top_k": 3}}
    config = MoEConfig.parse(data, "a test").with_(batch_invariant=True, max_num_tokens=TOKENS, **settings)
    made = MoELayer(config, dtype=torch.bfloat16, groups=ParallelGroups(ep=dist.group.WORLD))
    draw = torch.Generator().manual_seed(5)
    blocks = [*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"]
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {"gate.weight": torch.randn((EXPERTS, HIDDEN), generator=draw).to(torch.bfloat16)}
    for block in blocks:
        for name, shape in shapes.items():
            tensors[f"{block}.{name}.weight"] = (torch.randn(shape, generator=draw) / 8).to(torch.bfloat16)
    return made.load_weights(tensors)


def tokens(rank: int, count: int) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def same_bits(rank: int, transport: str, who: str) -> bool:
    """Uneven ranks, an idle one, fewer tokens than tiles: bit for bit what the layer gives whole."""
    whole = built(rank, prepare_finalize=transport)
    tiled = built(rank, prepare_finalize=transport, tiles=4, tile_carrier=who)
    assert isinstance(tiled.kernel, TiledKernel)
    return all(
        torch.equal(whole(x_TH), tiled(x_TH))
        for x_TH in (tokens(rank, count) for count in (TOKENS, (0, 3)[rank], (13, 0)[rank], 0))
    )


def overlapped(rank: int, transport: str) -> list[list[str]]:
    """Pairs that were under way at once, by the order of events. M0 ends only with D1, and M2 only with C1."""
    whole, record = built(rank, prepare_finalize=transport), TileRecord()
    first, second = Meeting(2), Meeting(2)
    tiled = in_tiles(
        whole.kernel, 4, executor="thread", record=record,  # type: ignore[arg-type]
        experts=MeetingExperts(whole.kernel.experts, {"M0": first, "M2": second}),
        prepare_finalize=Rendezvous(whole.kernel.prepare_finalize, {"D1": first, "C1": second}),  # type: ignore[union-attr]
    )  # fmt: skip
    x_TH = tokens(rank, TOKENS)
    wait(tiled.steps(x_TH, whole.route(x_TH), whole.state.experts.weights))
    return [list(pair) for pair in both_ways(record)]


def sends_onward(rank: int, transport: str) -> bool:
    """Rank 0 sends finished tiles over a group of their own while both go on with theirs; rank 1 has them all."""
    whole = built(rank, prepare_finalize=transport)
    link = StageLink(DistributedCommunicator(dist.new_group([0, 1]), timeout_s=20.0))
    x_TH, arrived = tokens(rank, TOKENS), []

    def receive(tile: int, y_XH: torch.Tensor) -> Flight[None]:
        arrived.append((yield from link.receive(len(y_XH), HIDDEN, torch.bfloat16, torch.device("cpu"))))

    onward = receive if rank else link.send
    tiled = in_tiles(whole.kernel, 4, executor="thread", onward=onward)  # type: ignore[arg-type]
    y_TH = wait(tiled.steps(x_TH, whole.route(x_TH), whole.state.experts.weights))
    dist.broadcast(first_TH := y_TH.clone(), 0)
    return torch.equal(torch.cat(arrived) if rank else y_TH, first_TH) and len(arrived) == 4 * rank


def left_alone(rank: int, transports: list[str]) -> list[tuple[str, float, int]]:
    """Rank 1 dies after a whole call of each layer; rank 0 calls again: what it met, when, threads that are left."""
    settings = {"tiles": 4, "tile_carrier": "thread", "timeout_s": TIMEOUT_S}
    layers = [built(rank, prepare_finalize=transport, **settings) for transport in transports]
    x_TH = tokens(rank, TOKENS)
    for layer in layers:
        layer(x_TH)
    distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    if rank == 1:
        os._exit(9)
    return [met(layer, x_TH) for layer in layers]


def met(layer: MoELayer, x_TH: torch.Tensor) -> tuple[str, float, int]:
    """What a survivor hears, after how long, and how many threads are left then."""
    began, stated = time.monotonic(), "no error"
    try:
        layer(x_TH)
    except CommError as error:
        stated = str(error)
    took = time.monotonic() - began
    return stated, took, job_threads_left()


world = world_of(2)


@pytest.mark.row(42)
@pytest.mark.parametrize("transport,who", CASES)
def test_bits_are_those_of_a_whole_call(world: RankWorld, transport: str, who: str) -> None:
    assert world.call(same_bits, transport, who) == [True, True]


@pytest.mark.row(42)
@pytest.mark.parametrize("transport", ["all_to_all", "one_sided"])
def test_the_second_tile_travels_while_the_first_is_multiplied(world: RankWorld, transport: str) -> None:
    for pairs in world.call(overlapped, transport):
        assert ["D1", "M0"] in pairs and ["C1", "M2"] in pairs


@pytest.mark.row(42)
@pytest.mark.parametrize("transport", ["all_to_all", "one_sided"])
def test_tiles_go_on_over_another_group_meanwhile(world: RankWorld, transport: str) -> None:
    assert world.call(sends_onward, transport) == [True, True]


@pytest.mark.row(42)
def test_a_dead_peer_ends_in_an_error_and_no_thread_is_left(world: RankWorld) -> None:
    with pytest.raises(RankError, match="rank 1: the process ended with exit code 9") as died:
        world.call(left_alone, ["one_sided", "all_to_all"])
    for stated, seconds, threads in died.value.results[0]:  # type: ignore[attr-defined]
        assert "rank 0, phase" in stated and ("dead or later" in stated or "peer 1" in stated), stated
        assert seconds < TIMEOUT_S + 4.0 and threads == 0
