"""Notes, their digest, and the diff of what differs."""

from moe_mk.comm import LockstepWorld, SingleRank
from moe_mk.comm.agreement import agree, digest
from moe_mk.flight import interleave, wait


def test_digest_sees_names_and_values_but_not_their_order() -> None:
    notes = {"a": "1", "b": "2"}
    assert digest(notes) == digest(dict(reversed(notes.items()))) and len(digest(notes)) == 32
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}, {"a": "1", "c": "2"}, {}]
    assert len({digest(other) for other in [notes, *others]}) == 6


def test_equal_notes_cost_one_exchange_of_32_bytes() -> None:
    comms = LockstepWorld(3).communicators()
    interleave([agree(comm, {"text": "one\nline, two = signs"}) for comm in comms])
    for comm in comms:
        assert comm.traffic.bytes_by_phase == {"agreement": 2 * 32} and comm.traffic.calls_by_phase == {"agreement": 1}


def test_one_rank_agrees_with_itself() -> None:
    wait(agree(SingleRank(), {}))
