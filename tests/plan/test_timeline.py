"""Simulated links by hand, the laws of any timeline on random programs, and what is refused."""

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from moe_mk.comm.traffic import INTRA_NODE, Nodes
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.timeline import (
    LINKS,
    Post,
    Recording,
    SimulatedLink,
    Timeline,
    Wait,
    Work,
    simulate,
    simulated_link,
)

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
    """What holds of every timeline: ports are shared evenly, ordered, nothing lost, and no rank goes on too early."""
    recording = found.recording
    assert [t.message for t in found.transfers] == recording.messages
    ended: dict[tuple[int, int], float] = {}
    posted: dict[tuple[int, str], float] = defaultdict(float)
    for t in found.transfers:
        m, link = t.message, found.near if t.link == INTRA_NODE else found.far
        posted[m.source, t.link] = max(posted[m.source, t.link], t.issued_us) + link.message_us
        assert t.posted_us == posted[m.source, t.link], "posts on one kind of link are one after the other"
        assert t.begins_us == max(t.posted_us, ended.get((m.source, m.peer), 0.0)), "messages of a pair queue up"
        assert t.arrives_us == pytest.approx(t.ends_us + link.latency_us)
        ended[m.source, m.peer] = t.ends_us
    moved = [0.0] * len(found.transfers)
    for begin, until in pairwise(sorted({time for t in found.transfers for time in (t.begins_us, t.ends_us)})):
        active = [t for t in found.transfers if t.begins_us <= begin < t.ends_us]
        busy = Counter((end, getattr(t.message, end), t.link) for t in active for end in ENDS)
        for t in active:
            shared = max(busy[end, getattr(t.message, end), t.link] for end in ENDS)
            moved[t.message.number] += (until - begin) / shared
    for t, us in zip(found.transfers, moved, strict=True):
        link = found.near if t.link == INTRA_NODE else found.far
        assert us == pytest.approx(t.message.num_bytes / (link.gbs * 1e3), abs=1e-6), "its share of both ports"
    arrived = {t.message.number: t.arrives_us for t in found.transfers}
    assert found.us == max(found.ends_us) and max(arrived.values(), default=0.0) + 1e-6 >= found.limit_us()
    for pause in found.pauses:
        assert pause.ends_us == arrived[pause.for_message] > pause.begins_us
    for rank, steps in enumerate(recording.steps_of_W):  # run once more, with the times of arrival
        now, pauses = 0.0, [(p.begins_us, p.ends_us, p.phase) for p in found.pauses if p.rank == rank]
        works = [(work, begin) for each, work, begin in found.works if each == rank]
        for step in steps:
            if isinstance(step, Wait) and (until := max(arrived[number] for number in step.messages)) > now:
                assert pauses.pop(0) == (now, until, step.phase)
                now = until
            elif isinstance(step, Work):
                assert works.pop(0) == (step, now)
                now += step.us
            elif isinstance(step, Post):
                assert found.transfers[step.message].issued_us == now
        assert found.ends_us[rank] == now and not pauses and not works


ENDS = ("source", "peer")


@pytest.mark.parametrize("seed", range(30))
def test_laws_of_timelines(seed: int) -> None:
    recording = random_recording(seed)
    found = simulate(recording, FAST, SLOW)
    check_laws(found)
    assert simulate(random_recording(seed), FAST, SLOW) == found, "equal recordings, equal timelines"
    slower = simulate(recording, FAST, SimulatedLink("x", 5.0, 5.0, 2.0, "made up"))
    assert max(t.arrives_us for t in slower.transfers) >= max(t.arrives_us for t in found.transfers) - 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_the_chrome_trace_tables_and_waits_have_every_message_pause_and_work(seed: int) -> None:
    found = simulate(random_recording(seed), FAST, SLOW)
    messages, ranks = found.recording.messages, len(found.ends_us)
    expected = [
        (t.message.phase, t.message.source, 1 + (t.link != INTRA_NODE), t.begins_us, t.ends_us - t.begins_us,
         {"to": t.message.peer, "bytes": t.message.num_bytes, "posted": t.posted_us, "arrives": t.arrives_us})
        for t in found.transfers
    ]  # fmt: skip
    waits_WW = np.zeros((ranks, ranks))
    for p in found.pauses:
        about = {"for": messages[p.for_message].source}
        waits_WW[p.rank, about["for"]] += p.ends_us - p.begins_us
        expected.append((f"wait {p.phase}", p.rank, 0, p.begins_us, p.ends_us - p.begins_us, about))
    expected += [(work.what, rank, 0, begin, begin + work.us - begin, {}) for rank, work, begin in found.works]
    assert found.waits() == [pytest.approx(row) for row in waits_WW.tolist()]
    events = found.chrome()["traceEvents"]
    keys = ("name", "pid", "tid", "ts", "dur", "args")
    spans = [tuple(event[key] for key in keys) for event in events if event["ph"] == "X"]
    assert sorted(map(str, spans)) == sorted(map(str, expected))
    rows = list(found.table())
    assert [row["begins_us"] for row in rows] == sorted(row["begins_us"] for row in rows)
    assert {row["phase"] for row in rows} == {message.phase for message in messages}
    for row in rows:
        own = [t for t in found.transfers if t.message.phase == row["phase"]]
        near = [t.message.num_bytes for t in own if t.link == INTRA_NODE]
        waited, busy = defaultdict[int, float](float), defaultdict[tuple[object, ...], float](float)
        for p in found.pauses:
            waited[p.rank] += (p.ends_us - p.begins_us) * (p.phase == row["phase"])
        for t in own:
            for end in ENDS:
                link = FAST if t.link == INTRA_NODE else SLOW
                busy[end, getattr(t.message, end), t.link] += t.message.num_bytes / link.gbs / 1e3
        sizes = sum(near), sum(t.message.num_bytes for t in own) - sum(near)
        assert (row["messages"], row["near_bytes"], row["far_bytes"]) == (len(own), *sizes)
        assert (row["begins_us"], row["ends_us"]) == (min(t.issued_us for t in own), max(t.arrives_us for t in own))
        assert row["limit_us"] == pytest.approx(max(busy.values())) == found.limit_us(row["phase"])
        assert row["longest_wait_us"] == pytest.approx(max(waited.values(), default=0.0))


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
