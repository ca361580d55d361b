"""Eight steps of a device that posts its own work, and doorbells that are lost."""

import random

import pytest

from moe_mk.comm.network.events import Actor, Step
from moe_mk.errors import CommError
from tests.support.network_device_path import DirectStep, WorkQueue


@pytest.mark.row(59)
def test_a_message_takes_eight_steps_and_none_of_them_is_the_processors() -> None:
    taken: list[tuple[int, DirectStep]] = []
    queue: WorkQueue[str] = WorkQueue(4, lambda step, number: taken.append((number, step)))
    queue.post("rows")
    assert queue.serve(lambda work: None) == 1
    steps = [step for number, step in taken if number == 0]
    assert steps == list(DirectStep) and len(steps) == 8
    assert Actor.CPU not in {step.actor for step in steps}
    assert [step.actor for step in steps] == [Actor.PRODUCER] * 4 + [Actor.CARD] * 4
    assert sum(step.actor is Actor.CPU for step in Step) == 6, "through a proxy six of twelve are"


@pytest.mark.row(60)
def test_a_lost_doorbell_costs_time_and_nothing_else() -> None:
    queue: WorkQueue[int] = WorkQueue(4)
    sent: list[int] = []
    queue.post(0)
    queue.post(1, is_doorbell_lost=True)
    assert queue.serve(sent.append) == 1 and sent == [0], "the card has not heard of the second"
    queue.replay()
    assert queue.serve(sent.append) == 1 and sent == [0, 1]
    queue.replay()
    assert queue.serve(sent.append) == 0, "the record reports nothing new"
    queue.post(2, is_doorbell_lost=True)
    queue.post(3)  # its doorbell reports of both
    assert queue.serve(sent.append) == 2 and sent == [0, 1, 2, 3]


@pytest.mark.row(60)
def test_no_work_is_lost_or_done_twice_whichever_doorbells_are_lost() -> None:
    draw = random.Random(0)
    for capacity in (1, 3, 8):
        queue: WorkQueue[int] = WorkQueue(capacity)
        sent: list[int] = []
        posted = 0
        for _ in range(2000):
            match draw.randrange(3):
                case 0 if queue.record - queue.completed < capacity:
                    queue.post(posted, is_doorbell_lost=draw.random() < 0.5)
                    posted += 1
                case 1:
                    queue.serve(sent.append)
                case 2 if draw.random() < 0.2:
                    queue.replay()
            assert sent == list(range(len(sent))) and len(sent) == queue.completed
        queue.replay()
        queue.serve(sent.append)
        assert sent == list(range(posted)) and posted > 100


def test_a_full_queue_is_an_error_and_loses_nothing() -> None:
    queue: WorkQueue[int] = WorkQueue(2)
    queue.post(0)
    queue.post(1)
    with pytest.raises(CommError, match="2 entries are queued and not completed"):
        queue.post(2)
    sent: list[int] = []
    queue.serve(sent.append)
    assert sent == [0, 1]
