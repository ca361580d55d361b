"""Simulated links by hand, the laws of any timeline on random programs, and what is refused."""

from collections import defaultdict

import numpy as np
import pytest

from moe_mk.comm.traffic import INTRA_NODE, Nodes
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.timeline import LINKS, Recording, SimulatedLink, Timeline, Wait, Work, simulate, simulated_link

FAST = SimulatedLink("fast", 100.0, 1.0, 0.5, "made up")
SLOW = SimulatedLink("slow", 10.0, 5.0, 2.0, "made up")


def test_two_messages_by_hand() -> None:
    # 100 kB over 10 GB/s are 10 us. Both are posted by rank 0, at 2 and 4 us. They share its port from 4 us on: of the
    # first 2 us are done, 8 are left, at half the rate until 20; the second has 8 of 10 us by then, and ends at 22.
    recording = Recording(Nodes((0, 1, 2)))
    first, second = recording.post(0, 1, 100_000, "a"), recording.post(0, 2, 100_000, "a")
    recording.wait(1, [first], "a")
    recording.wait(2, [second], "a")
    found = simulate(recording, FAST, SLOW)
    assert [(t.posted_us, t.begins_us, t.ends_us, t.arrives_us) for t in found.transfers] == [
        pytest.approx((2.0, 2.0, 20.0, 25.0)), pytest.approx((4.0, 4.0, 22.0, 27.0)),
    ]  # fmt: skip
    assert found.ends_us == pytest.approx((0.0, 25.0, 27.0)) and found.limit_us() == pytest.approx(20.0)
    assert found.waits()[2] == pytest.approx([27.0, 0.0, 0.0])


def random_recording(seed: int) -> Recording:
    """Rounds in which ranks send random messages and wait for some of those sent to them."""
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 7))
    recording = Recording(Nodes.of(ranks, int(draw.integers(1, 4))))
    for step in range(3):
        sent: dict[int, list[int]] = defaultdict(list)
        for rank in range(ranks):
            if draw.random() < 0.3:
                recording.steps_of_W[rank].append(Work(float(draw.integers(0, 20)), "work"))
            for _ in range(int(draw.integers(0, 5))):
                peer = int((rank + draw.integers(1, ranks)) % ranks)
                sent[peer].append(recording.post(rank, peer, int(draw.integers(1, 1_000_000)), f"step {step}"))
        for rank in range(ranks):
            recording.wait(rank, [n for n in sent[rank] if draw.random() < 0.8], f"step {step}")
    return recording


def check_laws(found: Timeline) -> None:
    """What holds of every timeline: no faster than bytes, ordered, nothing lost, and no rank goes on too early."""
    recording = found.recording
    assert [t.message for t in found.transfers] == recording.messages
    on_port: dict[tuple[int, str, str], list[tuple[float, float, float]]] = defaultdict(list)
    ended: dict[tuple[int, int], float] = {}
    posted: dict[tuple[int, str], float] = defaultdict(float)
    for t in found.transfers:
        m, link = t.message, found.near if t.link == INTRA_NODE else found.far
        alone = m.num_bytes / (link.gbs * 1e3)
        posted[m.source, t.link] = max(posted[m.source, t.link], t.issued_us) + link.message_us
        assert t.posted_us == posted[m.source, t.link], "posts on one kind of link are one after the other"
        assert t.begins_us == max(t.posted_us, ended.get((m.source, m.peer), 0.0)), "messages of a pair queue up"
        assert t.ends_us - t.begins_us >= alone - 1e-6, "never faster than bytes over the rate"
        assert t.arrives_us == pytest.approx(t.ends_us + link.latency_us)
        ended[m.source, m.peer] = t.ends_us
        for port in ((m.source, t.link, "out"), (m.peer, t.link, "in")):
            on_port[port].append((t.begins_us, t.ends_us, alone))
    for spans in on_port.values():
        for begin, _, _ in spans:
            for _, end, _ in spans:
                inside = sum(us for first, until, us in spans if begin <= first and until <= end)
                assert inside <= max(end - begin, 0.0) + 1e-6, "a port moves no more than its rate in any interval"
    arrived = {t.message.number: t.arrives_us for t in found.transfers}
    assert max(arrived.values(), default=0.0) + 1e-6 >= found.limit_us()
    for pause in found.pauses:
        assert pause.ends_us == arrived[pause.for_message] > pause.begins_us
    for rank, steps in enumerate(recording.steps_of_W):
        awaited = [arrived[number] for step in steps if isinstance(step, Wait) for number in step.messages]
        assert found.ends_us[rank] >= max(awaited, default=0.0) - 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_laws_of_timelines(seed: int) -> None:
    recording = random_recording(seed)
    found = simulate(recording, FAST, SLOW)
    check_laws(found)
    assert simulate(random_recording(seed), FAST, SLOW) == found, "equal recordings, equal timelines"
    slower = simulate(recording, FAST, SimulatedLink("x", 5.0, 5.0, 2.0, "made up"))
    assert max(t.arrives_us for t in slower.transfers) >= max(t.arrives_us for t in found.transfers) - 1e-6


def test_the_chrome_trace_has_every_message_on_the_port_of_its_rank() -> None:
    found = simulate(random_recording(4), FAST, SLOW)
    spans = [event for event in found.chrome()["traceEvents"] if event["ph"] == "X" and event["tid"] > 0]
    assert sorted((e["pid"], e["args"]["to"], e["args"]["bytes"]) for e in spans) == sorted(
        (m.source, m.peer, m.num_bytes) for m in found.recording.messages
    )
    assert sum(row["messages"] for row in found.table()) == len(found.recording.messages)


def test_programs_that_cannot_end_are_refused() -> None:
    stuck = Recording(Nodes((0, 0)))
    stuck.wait(1, [7], "a")
    with pytest.raises(ConfigError, match="rank 1 waits for message 7, which no rank posts"):
        simulate(stuck, FAST, SLOW)
    own = Recording(Nodes((0, 0)))
    own.post(0, 0, 8, "a")
    with pytest.raises(ConfigError, match="message 0 of rank 0 is for itself"):
        simulate(own, FAST, SLOW)
    with pytest.raises(ConfigError, match="no simulated link is called 'ibgd'; did you mean 'ibgda'"):
        simulated_link("ibgd")
    with pytest.raises(ConfigError, match="gbs must be above 0"):
        SimulatedLink("x", 0.0, 1.0, 1.0, "")
    assert all(link.source for link in LINKS.values())


def test_waits_are_all_pauses_by_rank_and_by_the_source_that_ended_them() -> None:
    most = 0
    for seed in range(8):
        found = simulate(random_recording(seed), FAST, SLOW)
        waits_WW, again = np.array(found.waits()), defaultdict[tuple[int, int], list[float]](list)
        for pause in found.pauses:
            source = found.recording.messages[pause.for_message].source
            again[pause.rank, source].append(pause.ends_us - pause.begins_us)
        for (rank, source), each in again.items():
            assert waits_WW[rank, source] == pytest.approx(sum(each))
        assert np.count_nonzero(waits_WW) <= len(again)
        most = max(most, *map(len, again.values()))
    assert most > 1, "some rank waits for another more than once"
