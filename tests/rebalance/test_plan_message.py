"""A plan on its way to all ranks: what it carries, and how damage is found."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.placement.eplb import Topology, plan
from moe_mk.rebalance.planner import BadPlanMessage, PlanMessage

LOAD = np.array([[8.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
SLOTS = np.array([[0, 1, 0, 2, 3, 0]] * 2)


def message(topology: Topology | None = None) -> PlanMessage:
    made = plan(LOAD, topology or Topology(gpus=3, slots=2), old=SLOTS)
    return PlanMessage.of(made, plan_id=7, base=3, slots=SLOTS)


@pytest.mark.row(123)
@pytest.mark.parametrize("at", [0, 31, 40, -1])
def test_one_changed_byte_is_found(at: int) -> None:
    column = message().encode()
    column[at] ^= 1
    with pytest.raises(BadPlanMessage, match="does not have the digest it was sent with"):
        PlanMessage.decode(column)


@settings(max_examples=60)
@given(st.data())
def test_whatever_a_plan_leaves_empty_every_expert_keeps_its_tokens_once_a_rank(data: st.DataObject) -> None:
    # Slots of a plan: experts, twice on a rank too, and empty ones at any place; a dead rank has none.
    dead = data.draw(st.sampled_from([None, 0, 2]))
    alive = tuple(gpu != dead for gpu in range(3))
    made = plan(np.ones((1, 4)), Topology(gpus=3, slots=3, alive=alive), policy="flat")
    drawn = data.draw(st.lists(st.integers(-1, 3), min_size=9, max_size=9))
    serving = np.array([data.draw(st.lists(st.integers(-1, 3), min_size=9, max_size=9))])
    slots = np.array([[expert if alive[at // 3] else -1 for at, expert in enumerate(drawn)]])
    share = np.arange(1, 10, dtype=np.float32)[None]  # of empty slots too, which a planner may leave there
    planned = PlanMessage.of(replace(made, phy2log=slots, share=share), 1, 0, serving)
    message = replace(planned, full=data.draw(st.booleans()), base=data.draw(st.integers(0, 9)))
    for gpu in range(3):
        part = slice(3 * gpu, 3 * gpu + 3)
        held, taken = message.phy2log[0, part].tolist(), message.share[0, part].tolist()
        wanted = [
            s if s >= 0 or not alive[gpu] else old for s, old in zip(slots[0, part], serving[0, part], strict=True)
        ]
        assert sorted(held) == sorted(map(int, wanted))
        assert held == sorted(held, key=lambda expert: expert < 0), "empty slots come last"
        busy = [expert for expert, part_of in zip(held, taken, strict=True) if part_of > 0]
        assert len(busy) == len(set(busy)) and -1 not in busy
        for expert in range(4):
            total = sum(s for e, s in zip(held, taken, strict=True) if e == expert)
            assert total == share[0, part][slots[0, part] == expert].sum()
    again = PlanMessage.decode(message.encode())
    for each in fields(PlanMessage):
        assert np.array_equal(getattr(again, each.name), getattr(message, each.name)), each.name
    assert again.phy2log.dtype == np.int64 and again.share.dtype == np.float32
