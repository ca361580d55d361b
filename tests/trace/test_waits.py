"""Who waited for whom: by hand, laws on random calls, and a delayed rank found under transports that really wait."""

import json
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.lab.testing.virtual_time import uniform_routings
from moe_mk.lab.trace.chrome import write_chrome_trace
from moe_mk.lab.trace.waits import Waits, calls_of_trace, waits_of
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import FP32
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Recorder, Span, Spans
from tests.cli.conftest import moe_mk, printed, rows_of


def test_a_matrix_by_hand() -> None:
    # Rank 1 begins 30 us after rank 0 and 20 after rank 2; then rank 0 needs 5 us, rank 1 15 and rank 2 5.
    found = waits_of({"dispatch": [[(0.0, 35.0)], [(30.0, 45.0)], [(10.0, 35.0)]]})
    assert found == Waits(((0.0, 30.0, 10.0), (0.0, 0.0, 0.0), (0.0, 20.0, 0.0)), (5.0, 15.0, 5.0), 1)
    assert found.caused_W == (0.0, 50.0, 10.0) and found.late == [1] and found.slow_to_receive == []
    slow = waits_of({"combine": [[(0.0, 5.0)], [(0.0, 5.0)], [(0.0, 50.0)]]})
    assert slow.late == [] and slow.slow_to_receive == [2]
    # Of two ranks each is compared with the other; a wait of 1 us in calls of 2000 is nothing.
    assert [waits_of({"combine": [[(0.0, 60.0)], [(at, 60.0)]]}).late for at in (50.0, 1.0)] == [[1], []]


@pytest.mark.parametrize("seed", range(20))
def test_waits_and_the_rest_are_the_time_in_each_call_and_add_up(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks, calls = int(draw.integers(2, 6)), int(draw.integers(1, 5))
    spans: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for number in range(calls):
        begins = 1000.0 * number + draw.random(ranks) * 100
        for rank in range(ranks):
            end = max(begins[rank], begins.max() + draw.random() * 100 - 50)  # some leave before the last one begins
            spans[rank].append((float(begins[rank]), float(end)))
    alone = [waits_of({"dispatch": [own[number : number + 1] for own in spans]}) for number in range(calls)]
    for number, one in enumerate(alone):
        for rank, own in enumerate(spans):
            begin, end = own[number]
            assert max(one.waited_WW[rank]) + one.rest_W[rank] == pytest.approx(end - begin)
            assert not any(min(one.waited_WW[rank][other], one.waited_WW[other][rank]) for other in range(ranks))
    found = waits_of({"dispatch": spans})
    np.testing.assert_allclose(found.waited_WW, np.sum([one.waited_WW for one in alone], 0))
    np.testing.assert_allclose(found.rest_W, np.sum([one.rest_W for one in alone], 0))


DELAY_S = 0.15


def spans_of_run(transport: str, late: int, ranks: int = 3) -> list[list[Span]]:
    """One call on ranks that are threads and really wait; one of them begins later."""
    routings = uniform_routings(ranks, 4, 6, 2, ranks_per_node=1)
    world, placed, cpu = ThreadWorld(ranks, timeout_s=60.0), ExpertMap.linear(6, ranks), torch.device("cpu")
    recorders = [Recorder() for _ in range(ranks)]

    def job(rank: int) -> None:
        comm = world.communicators()[rank]
        context = TransportContext(
            comm, placed, placed.tables(cpu), FP32, FP32, 32, 2, cpu, max_num_tokens=8, ranks_per_node=1,
            spans=Spans(recorders[rank]),
        )  # fmt: skip
        experts = IdentityExperts(ExpertsContext(FP32, FP32, "silu", 2, 32, 32, cpu))
        kernel = FusedMoEKernel(PREPARE_FINALIZE[transport](context), experts)

        def call(routing: Routing) -> None:
            wait(kernel.steps(torch.ones(4, 32), routing, NO_WEIGHTS))

        call(routings[rank])  # opens windows and connections
        recorders[rank].spans.clear()
        ready.wait()
        if rank == late:
            time.sleep(DELAY_S)
        call(routings[rank])

    ready = threading.Barrier(ranks)
    world.together([partial(job, rank) for rank in range(ranks)])
    return [recorder.spans for recorder in recorders]


@pytest.mark.row("N20")
@pytest.mark.parametrize(
    "transport, late", [("all_to_all", 0), ("all_gather", 1), ("hierarchical", 2), ("one_sided_network", 0)]
)
def test_a_delayed_rank_is_named_under_every_transport(transport: str, late: int, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_chrome_trace(file, spans_of_run(transport, late))
    found = waits_of(calls_of_trace(file))
    assert found.late == [late], found
    others = [rank for rank in range(3) if rank != late]
    assert all(found.waited_WW[rank][late] > 0.6 * DELAY_S * 1e6 for rank in others)
    assert json.loads(printed("waits", file, "--stage", "combine", "--json"))["calls"] == 1
    text, reported = printed("waits", file), json.loads(moe_mk("waits", file, "--json").stdout)
    assert f"late        rank {late}: others waited {found.caused_W[late]:.0f} us for it" in text
    assert (reported["waited_us"], reported["rest_us"]) == ([*map(list, found.waited_WW)], list(found.rest_W))
    assert (reported["late"], reported["slow_to_receive"], reported["calls"]) == ([late], found.slow_to_receive, 2)
    for rank, row in enumerate(rows_of(text, "waited, us")):
        waited = (*found.waited_WW[rank], found.rest_W[rank])
        assert [*row.values()] == [f"rank {rank}", *(f"{us:.0f}" for us in waited)]


def test_files_without_waits_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_chrome_trace(file, [[Span("combine", 0.0, end, end)] for end in (5e-6, 5e-6, 5e-5)])
    assert "slow        rank 2: 50 us after all had begun" in printed("waits", file)
    for text, words in (("[]", "no list of traceEvents"), ("{", "cannot be read"), ('{"traceEvents": []}', "0 ranks")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            waits_of(calls_of_trace(file))
    with pytest.raises(ConfigError, match=r"ranks have \[1, 0\] spans of dispatch"):
        waits_of({"dispatch": [[(0.0, 1.0)], []]})
    assert waits_of({"dispatch": [[], []]}).calls == 0
