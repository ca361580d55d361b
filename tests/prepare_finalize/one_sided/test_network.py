"""One-sided over hosts: against all-to-all bit for bit, its messages, its memory, and when a peer dies."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from moe_mk.comm import Communicator, LockstepWorld, SingleRank
from moe_mk.comm.threads import ThreadWorld
from moe_mk.comm.traffic import Nodes
from moe_mk.errors import CommError, ConfigError, ShapeError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.one_sided.network import NetworkBufferSlot, NetworkRegion, OneSidedNetwork
from moe_mk.quant import BF16, FP32
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner import run_dual
from moe_mk.tokens import Routing
from moe_mk.trace.clock import now
from tests.support import one_sided_ranks, problems
from tests.support.one_sided_ranks import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOP_K,
    drawn,
    there_and_back,
    world_comm,
)


def context(
    comm: Communicator, *, wire: QuantScheme = FP32, dtype: Plain = FP32, experts: int = EXPERTS, hidden: int = HIDDEN,
    top_k: int = TOP_K, tokens: int = 64, per_node: int | None = None, link: str = "tcp",
) -> TransportContext:  # fmt: skip
    made = one_sided_ranks.context(comm, wire=wire, dtype=dtype, experts=experts, hidden=hidden, top_k=top_k)
    return replace(made, max_num_tokens=tokens, ranks_per_node=per_node, network_link=link)


@pytest.mark.row(157)
def test_two_ranks_by_hand_and_the_messages_that_takes() -> None:
    # Two ranks of one expert each. Token [1, 2] of rank 0 goes to expert 1 (weight 2), [3, 4] to both (1 and 10).
    # Rank 1 has none.
    world = ThreadWorld(2, timeout_s=20.0)
    made = [OneSidedNetwork(context(c, experts=2, hidden=2, top_k=2)) for c in world.communicators()]
    x_TH = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    routing = Routing(torch.tensor([[1, -1], [0, 1]], dtype=torch.int32), torch.tensor([[2.0, 0.0], [1.0, 10.0]]))
    batches = [(x_TH, routing), (x_TH[:0], Routing(routing.ids_TK[:0], routing.weights_TK[:0]))]
    jobs = [
        lambda t=t, b=b: wait(there_and_back(t, *b))  # type: ignore[misc]
        for t, b in zip(made, batches, strict=True)
    ]
    combined, empty = world.together(jobs)
    # [1, 2] * 2 and [3, 4] * (1 + 10)
    assert combined.tolist() == [[2.0, 4.0], [33.0, 44.0]] and empty.shape == (0, 2)
    traffic = [dict(transport.context.comm.traffic.bytes_by_phase) for transport in made]
    assert traffic[0]["dispatch"] == 48 and traffic[1]["combine"] == 16
    sent = []
    for transport in made:
        (buffer,) = transport._pool.slots
        assert isinstance(buffer, NetworkBufferSlot)
        sent.append(sum(buffer.heap.proxy.watch.messages.values()))
    # Rank 0: values, then tails with the flag on them, and an empty combine flag. Rank 1: an empty dispatch flag, then
    # the sums with the flag on them. A proxy that comes in between makes a message or two more of a pair.
    assert 3 <= sent[0] <= 5 and 2 <= sent[1] <= 4


def test_groups_devices_and_calls_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a SingleRank cannot wait"):
        OneSidedNetwork(context(SingleRank()))
    with pytest.raises(UnsupportedError, match="a LockstepCommunicator cannot wait"):
        OneSidedNetwork(context(LockstepWorld(2).communicators()[0]))
    comm = ThreadWorld(2).communicators()[0]
    with pytest.raises(UnsupportedError, match="runs on cpu, this device is meta"):
        OneSidedNetwork(replace(context(comm), device=torch.device("meta")))
    with pytest.raises(ConfigError, match=r"kernel.network='eth0' is no IPv4 network"):
        OneSidedNetwork(replace(context(comm), network="eth0"))
    with pytest.raises(ShapeError, match=r"x has T=7 tokens, a window holds 6 .*\[kernel.max_num_tokens\]"):
        wait(OneSidedNetwork(context(comm, tokens=6)).prepare(*drawn(0, 7, torch.float32)))


def test_a_window_has_room_for_the_sums_of_every_peer_behind_all_else() -> None:
    region = NetworkRegion(3, 100, 50, 2000, Nodes.of(4), "127.0.0.0/8")
    own = super(NetworkRegion, region).data_bytes(4)
    places = [region.brought_at(4, peer) for peer in range(5)]
    assert places[0] >= own and places[-1] == region.data_bytes(4)
    assert all(after - before >= 3 * 2000 for before, after in pairwise(places))


problem = partial(problems.problem, "tiny", max_num_tokens=64)


def test_the_oracle_takes_it_between_hosts_and_not_before_what_is_cheaper() -> None:
    assert not OneSidedNetwork.reasons_against(problem("cpu", ep=4))
    assert not OneSidedNetwork.reasons_against(problem("cpu", ep=4, ranks_per_node=2))
    assert {r.code for r in OneSidedNetwork.reasons_against(problem("h200", ep=4))} == {"device"}
    asked = problem("cpu", ep=4)
    ours, near = (PREPARE_FINALIZE[name].volume(asked) for name in ("one_sided_network", "one_sided"))
    assert (ours.dispatch_rows, ours.combine_rows) == (near.dispatch_rows, near.combine_rows)
    assert ours.collectives > PREPARE_FINALIZE["all_to_all"].volume(asked).collectives > near.collectives
    assert OneSidedNetwork.buffer_bytes(asked) > PREPARE_FINALIZE["one_sided"].buffer_bytes(asked)


# Four processes.


@pytest.fixture(scope="module")
def world(world_link: str) -> Iterator[RankWorld]:
    with RankWorld(RANKS) as ranks:
        yield ranks


WIRES = ((FP32, FP32), (BF16, BF16), (FP8_1x128, BF16))


def compare_with_all_to_all(rank: int, per_node: int, link: str, number: int = len(WIRES)) -> list[str]:
    """So many wires, with changing token counts, zero and -1 included, alone and in two micro-batches."""
    found = []
    for wire, dtype in WIRES[:number]:
        asked = context(world_comm(), wire=wire, dtype=dtype, tokens=130, per_node=per_node, link=link)
        ours, theirs = (PREPARE_FINALIZE[name](asked) for name in ("one_sided_network", "all_to_all"))
        for seed, tokens in enumerate([(3, 0, 7, 1), (0, 0, 0, 0), (9, 9, 9, 9), (130, 1, 33, 2)] * 2):
            batches = [drawn(100 * seed + rank + half, tokens[rank], dtype.dtype) for half in (0, 50)]
            together = run_dual([there_and_back(ours, *batch) for batch in batches])
            for batch, y_TH in zip(batches, together, strict=True):
                if not torch.equal(y_TH, wait(there_and_back(theirs, *batch))):
                    found.append(f"{wire.name} {tokens} {per_node}: outputs differ")
        slots = ours._pool.slots  # type: ignore[attr-defined]
        if len(slots) != 2 or any(len(buffer.heap.far) != RANKS - per_node for buffer in slots):
            found.append(f"{len(slots)} slots")
    return found


@pytest.mark.row(158)
@pytest.mark.parametrize("per_node", [2, 1])
def test_two_hosts_and_four_give_the_bits_of_all_to_all(world: RankWorld, world_link: str, per_node: int) -> None:
    assert world.call(compare_with_all_to_all, per_node, world_link) == [[]] * RANKS


def call_until_a_proxy_is_killed(rank: int, victim: int, per_node: int, within: str, link: str) -> dict[str, object]:
    """Calls with values checked; in call 10 the thread of one rank's proxy is ended. What each rank then raises."""
    comm = world_comm()
    wait(comm.recover())
    transport = OneSidedNetwork(context(comm, per_node=per_node, link=link))
    expected = PREPARE_FINALIZE["all_to_all"](context(comm, per_node=per_node))
    batches = [drawn(100 * call + rank, (3 * call + 5 * rank) % 11, torch.float32) for call in range(12)]
    wanted = [wait(there_and_back(expected, *batch)) for batch in batches]  # by all ranks, before one fails
    equal = 0
    for call, (batch, y_TH) in enumerate(zip(batches, wanted, strict=True)):
        flight = there_and_back(transport, *batch)
        if call == 10 and rank == victim:
            for _ in range(2 if within == "combine" else 0):
                next(flight)
            end_proxy_of(transport)
        start = now()
        try:
            equal += torch.equal(wait(flight), y_TH)
        except CommError as error:
            seconds = now() - start
            return {"call": call, "equal": equal, "s": seconds, "rank": error.rank, "phase": error.phase,
                    "peer": error.peer, "text": str(error)}  # fmt: skip
    return {"text": "no call failed"}


def compare_after_recovery(rank: int, per_node: int, link: str) -> list[str]:
    wait(world_comm().recover())
    return compare_with_all_to_all(rank, per_node, link, 1)


def end_proxy_of(transport: OneSidedNetwork) -> None:
    """Raise SystemExit in every thread of a rank's proxy, wherever it is, and let it end."""
    (buffer,) = transport._pool.slots
    assert isinstance(buffer, NetworkBufferSlot)
    for worker in buffer.heap.proxy._workers:
        thread = worker._thread
        assert thread.ident is not None
        ended = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        assert ended == 1
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.row(148)
@pytest.mark.parametrize("victim,per_node,within", [(0, 1, "dispatch"), (3, 1, "combine"), (2, 2, "dispatch")])
def test_a_killed_proxy_ends_the_call_of_every_rank_in_an_error_that_names_it(
    world: RankWorld, world_link: str, victim: int, per_node: int, within: str
) -> None:
    given = (victim, per_node, within, world_link)
    last = 11 if within == "combine" else 10  # all rows of call 10 may have been sent and received before the kill
    for rank, found in enumerate(world.call(call_until_a_proxy_is_killed, *given, timeout_s=50.0)):
        text = str(found["text"])
        assert found["rank"] == rank and found["phase"] in ("dispatch", "combine") and found["peer"] != rank, text
        assert 9 <= found["call"] <= last and found["equal"] == found["call"], text
        assert found["s"] < 10.0, "the timeout is 30 s"
        if rank == victim:
            assert "the proxy of this rank has failed: SystemExit" in text
        else:
            assert found["peer"] == victim or f"rank {victim}" in text, text
    assert world.call(compare_after_recovery, per_node, world_link) == [[]] * RANKS, "the group can be used again"
