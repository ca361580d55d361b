"""Policies and the division of a pool, against their definitions and by hand."""

from random import Random

import pytest

from moe_mk.errors import ConfigError
from moe_mk.experts.residency import (
    HALF_LIFE,
    POLICIES,
    DecayedFrequency,
    LeastFrequentlyUsed,
    PoolMember,
    ResidencyPool,
)


def drawn(draw: Random, experts: int) -> list[int]:
    return sorted(draw.sample(range(experts), draw.randint(0, 3)))


def worth_of(name: str, calls: list[list[int]], expert: int, half_life: float) -> float:
    """As the name of a policy is defined, from all calls so far."""
    ages = [len(calls) - 1 - at for at, used in enumerate(calls) if expert in used]
    if name == "lru":
        return 1 / (1 + min(ages)) if ages else 0.0
    weight = (lambda age: 1.0) if name == "lfu" else (lambda age: 0.5 ** (age / half_life))
    return sum(map(weight, ages)) / sum(weight(age) for age in range(len(calls)))


@pytest.mark.parametrize("name", ["lru", "lfu", "decayed"])
def test_a_policy_counts_what_its_name_states(name: str) -> None:
    assert {*POLICIES} == {"lru", "lfu", "decayed"}, "each is tested here"
    draw, policy, calls = Random(name), POLICIES[name](6), list[list[int]]()
    for _ in range(300):
        calls.append(drawn(draw, 6))
        policy.used(calls[-1])
    for expert in range(6):
        assert policy.worth(expert) == pytest.approx(worth_of(name, calls, expert, HALF_LIFE))
    resident = [4, 1, 3]
    victim = min(resident, key=lambda expert: (worth_of(name, calls, expert, HALF_LIFE), expert))
    assert policy.victim(resident) == victim


def test_counts_that_outgrow_a_float_go_on() -> None:
    class Fast(DecayedFrequency):
        growth = 2.0

    draw, policy, calls = Random(1), Fast(4), list[list[int]]()
    for _ in range(1200):  # 2^1200 is more than the largest float
        calls.append(drawn(draw, 4))
        policy.used(calls[-1])
        if len(calls) % 100 == 0:
            for expert in range(4):
                assert policy.worth(expert) == pytest.approx(worth_of("decayed", calls, expert, 1.0), abs=1e-12)


def member(pool: ResidencyPool, num_bytes: int, experts: int) -> PoolMember:
    return PoolMember(pool, num_bytes, LeastFrequentlyUsed(experts), limit_s=float("inf"))


def called(one: PoolMember, *calls: list[int]) -> None:
    for used in calls:
        one.policy.used(used)
        one.pool.called(one)


def divided(pool: ResidencyPool) -> None:
    with pool._lock:
        pool._divide()


def test_a_pool_is_divided_by_uses_of_all_calls_and_not_of_each_layer() -> None:
    # Expected uses: of one 10 5 0 0 in its 10 calls, of the other 2 2 2 0 in its 2. Each keeps its first; of the two
    # slots that are left one gets the next (5), and the other one of those of 2.
    pool = ResidencyPool(4)
    one, other = member(pool, 1, 4), member(pool, 1, 4)
    called(one, *([0, 1], [0]) * 5)
    called(other, [0, 1, 2], [0, 1, 2])
    divided(pool)
    assert (one.share, other.share) == (2, 2)
    assert (one.calls, other.calls) == (0, 0)


def test_experts_of_several_sizes_share_bytes() -> None:
    # 10 bytes. Records of 3 and of 1. Expected uses: of the large 4 3 0, of the small 4 4 2 1. One of each takes 4; of
    # the 6 bytes that are left, in order: small 4 (1 byte), large 3 (3), small 2 (1), small 1 (1).
    pool = ResidencyPool(10)
    large, small = member(pool, 3, 3), member(pool, 1, 4)
    called(large, [0, 1], [0, 1], [0, 1], [0])
    called(small, [0, 1, 2, 3], [0, 1, 2], [0, 1], [0, 1])
    divided(pool)
    assert (large.share, small.share) == (2, 4)


def filled(one: PoolMember, experts: list[int]) -> None:
    """As a call would: every expert takes a slot, of the pool or of the one that makes room."""
    for expert in experts:
        if expert in one.slot_of:
            continue
        if not one.free and not one.pool.grow(one):
            one.slot_of[expert] = one.slot_of.pop(one.policy.victim(one.slot_of))
        else:
            one.slot_of[expert] = one.free[-1]


def test_a_layer_takes_slots_from_the_one_with_the_most_bytes_beyond_its_share() -> None:
    # Records of 4 and of 1 byte, in 13 bytes. The large layer has 2 slots, the small ones 2 and 3, then shares of 1,
    # 6 and 1: the small one takes the second slot of the large one, 4 bytes, and none of the other, 2 bytes in 2 slots.
    pool = ResidencyPool(13)
    large, small, other = member(pool, 4, 3), member(pool, 1, 6), member(pool, 1, 6)
    large.share, small.share, other.share = 2, 2, 3
    for one, count in ((large, 2), (small, 2), (other, 3)):
        filled(one, list(range(count)))
    assert [len(one.slots) for one in (large, small, other)] == [2, 2, 3]
    large.share, small.share, other.share = 1, 6, 1
    filled(small, [2, 3, 4, 5])
    assert [len(one.slots) for one in (large, small, other)] == [1, 6, 3]
    assert sorted(small.slot_of) == [0, 1, 2, 3, 4, 5] and len(set(small.slot_of.values())) == 6
    assert sum(len(held) * size for size, held in pool.memory.items()) <= 13


def test_what_makes_room_for_another_layer_is_what_its_policy_keeps_least() -> None:
    pool = ResidencyPool(4)
    one, other = member(pool, 1, 4), member(pool, 1, 4)
    one.share = 3
    called(one, [0, 1, 2], [0, 2], [2])
    filled(one, [0, 1, 2])
    one.share, other.share = 1, 3
    filled(other, [0, 1, 2])
    assert sorted(one.slot_of) == [2] and len(other.slots) == 3


def test_a_layer_in_a_call_keeps_its_slots() -> None:
    pool = ResidencyPool(4)
    one, other = member(pool, 1, 4), member(pool, 1, 4)
    one.share = 3
    filled(one, [0, 1, 2])
    one.share, other.share = 1, 3
    with one.exclusive():
        assert not pool.grow(other) and sorted(one.slot_of) == [0, 1, 2]
    assert pool.grow(other) and len(one.slots) == 2


@pytest.mark.parametrize("seed", range(5))
def test_shares_never_exceed_the_memory_and_every_layer_has_one(seed: int) -> None:
    draw = Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 5))]
    pool = ResidencyPool(sum(sizes) + draw.randint(0, 30))
    members = [member(pool, size, draw.randint(1, 6)) for size in sizes]
    for _ in range(200):
        one = draw.choice(members)
        called(one, drawn(draw, min(3, one.policy.num_experts)) if one.policy.num_experts > 2 else [0])
        assert sum(each.share * each.record_bytes for each in members) <= pool.num_bytes
        assert all(1 <= each.share <= each.policy.num_experts for each in members)


def test_a_pool_of_less_than_one_expert_of_each_layer_is_refused() -> None:
    pool = ResidencyPool(5)
    held = [member(pool, 2, 3), member(pool, 2, 3)]
    with pytest.raises(ConfigError, match=r"5 bytes .*\(3 x 2 B\); give at least 6"):
        member(pool, 2, 3)
    assert [one.share for one in held] == [1, 1]
