"""One link between two live ranks is cut or held up in the middle of a call: the same bits, or an error on both."""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.comm.network import setup as symmetric_network_setup
from moe_mk.comm.network.tcp import Address, listen
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import CommError
from moe_mk.flight import interleave, wait
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.one_sided.network import OneSidedNetwork
from moe_mk.trace.clock import now
from tests.support.network_ends import CHOSEN
from tests.support.network_proxies import cut
from tests.support.network_relay import Relay
from tests.support.one_sided_ranks import context, drawn, there_and_back

HIDDEN, TOKENS, CALLS = 2048, 90, 12
RANKS = (0, 1)
CHANNELS = {0: 1, 1: 0}
"""The channel on which each rank sends to the other."""

pytestmark = pytest.mark.usefixtures("link")


def made(comm: Communicator, name: str = "one_sided_network") -> OneSidedNetwork:
    asked = replace(context(comm, hidden=HIDDEN), max_num_tokens=TOKENS, network_link=CHOSEN["link"])
    return PREPARE_FINALIZE[name](asked)  # type: ignore[return-value]


def batch(rank: int, call: int) -> tuple[Tensor, object]:
    return drawn(100 * call + rank, TOKENS - 7 * call, torch.float32, HIDDEN)


def expected() -> list[list[Tensor]]:
    """What `all_to_all` gives, call by call and rank by rank."""
    ranks = [made(comm, "all_to_all") for comm in LockstepWorld(2).communicators()]
    return [
        interleave([there_and_back(ranks[rank], *batch(rank, call)) for rank in RANKS])  # type: ignore[arg-type]
        for call in range(CALLS)
    ]


@pytest.mark.row(148)
@pytest.mark.parametrize("sender", RANKS, ids=["of the one that is called", "of the one that calls"])
@pytest.mark.parametrize("phase", [0, 1], ids=["dispatch", "combine"])
def test_a_link_cut_in_the_middle_of_a_call_is_resumed_and_the_results_are_the_same_bits(
    phase: int, sender: int
) -> None:
    """Rank 0 cuts the link as soon as its rows, or its sums, are handed to the proxy: 700 kB, part of it under way."""
    world, cuts = ThreadWorld(2, timeout_s=60.0), [0]

    def job(comm: Communicator) -> list[Tensor]:
        transport, outputs = made(comm), []
        for call in range(CALLS):
            flight = there_and_back(transport, *batch(comm.rank, call))  # type: ignore[arg-type]
            if comm.rank == 0 and call % 2:
                for _ in range(phase + 1):
                    next(flight)
                cuts[0] += cut(transport._pool.slots[0].heap.proxy, CHANNELS[sender], 1)  # type: ignore[attr-defined]
            outputs.append(wait(flight))
        proxy = transport._pool.slots[0].heap.proxy  # type: ignore[attr-defined]
        assert not proxy.lost and proxy.fault is None
        return outputs

    by_rank = world.together([lambda c=c: job(c) for c in world.communicators()])  # type: ignore[misc]
    for call, outputs in enumerate(expected()):
        for rank in RANKS:
            assert torch.equal(by_rank[rank][call], outputs[rank]), (call, rank)
    assert cuts[0] >= CALLS // 3, "links have to be cut for this to say anything"


@contextlib.contextmanager
def relayed(patch: pytest.MonkeyPatch) -> Iterator[list[Relay]]:
    """Whoever listens is reached through a relay."""
    relays: list[Relay] = []
    with contextlib.ExitStack() as open_relays:

        def listen_behind(network: str) -> tuple[socket.socket, Address]:
            listener, address = listen(network)
            relays.append(open_relays.enter_context(Relay(address)))
            return listener, relays[-1].address

        patch.setattr(symmetric_network_setup, "listen", listen_behind)
        yield relays


def errors_of_both(
    relays: list[Relay], do: Callable[[Relay], None], phase: int, timeout_s: float
) -> list[tuple[str, float]]:
    """What each rank is reported of a call in whose middle rank 0 does something to all links, and after how long."""
    world = ThreadWorld(2, timeout_s=timeout_s)

    def job(comm: Communicator) -> tuple[str, float]:
        transport = made(comm)
        wait(there_and_back(transport, *batch(comm.rank, 0)))  # type: ignore[arg-type]
        began = now()
        with pytest.raises(CommError) as caught:
            calls_until_error(transport, comm.rank)
        return str(caught.value), now() - began

    def calls_until_error(transport: OneSidedNetwork, rank: int) -> None:
        for call in range(1, CALLS):
            flight = there_and_back(transport, *batch(rank, call))  # type: ignore[arg-type]
            if rank == 0 and call == 2:
                for _ in range(phase + 1):
                    next(flight)
                for relay in relays:
                    do(relay)
            wait(flight)

    return world.together([lambda c=c: job(c) for c in world.communicators()])  # type: ignore[misc]


@pytest.mark.parametrize("phase", [0, 1], ids=["dispatch", "combine"])
def test_a_link_that_cannot_be_resumed_is_an_error_on_both_sides_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    monkeypatch.setattr(symmetric_network_setup, "RESUME_S", 0.5)
    with relayed(monkeypatch) as relays:
        found = errors_of_both(relays, lambda relay: relay.is_cut.set(), phase, timeout_s=300.0)
    for rank, (text, seconds) in enumerate(found):
        start = rf"rank {rank}, phase '(dispatch|combine)', peer {1 - rank}: epoch [2-4]: link [01] between ranks "
        link = rf"{rank} and {1 - rank} \(127.0.0.1:\d+\) was lost \((the connection was closed|.* reset.*)\)"
        why = "rank 1 has not called again" if rank == 0 else r"127.0.0.1:\d+ has (hung up before it|not) answered.*"
        assert re.match(rf"{start}{link} and not resumed within 0.5 s \({why}\)", text), text
        assert seconds < 150.0


@pytest.mark.parametrize("phase", [0, 1], ids=["dispatch", "combine"])
def test_a_link_that_is_held_up_is_an_error_at_the_deadline_that_names_the_peer(
    monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    with relayed(monkeypatch) as relays:
        found = errors_of_both(relays, lambda relay: relay.is_held_up.set(), phase, timeout_s=3.0)
    for rank, (text, seconds) in enumerate(found):
        start = rf"rank {rank}, phase '(dispatch|combine|put)', peer {1 - rank}: epoch [0-4]: "
        # Whoever gives up first closes its windows, and its goodbye is held up with everything else.
        assert re.match(start + r"sent nothing within 3 s \[kernel.timeout_s\]; it is dead, stuck or late", text), text
        assert seconds >= 2.5
