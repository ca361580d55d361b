"""Maps from experts to slots."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.placement.balance.plan import csr_maps, dense_of_csr, small_type


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10_000))
def test_compact_and_padded_maps_of_any_placement_are_those_of_plain_loops(experts: int, num_slots: int, seed: int):
    phy2log = np.random.default_rng(seed).integers(-1, experts, (2, num_slots))
    offsets, slots = csr_maps(phy2log, experts)
    dense = dense_of_csr(offsets, slots)
    for layer, row in enumerate(phy2log.tolist()):
        held = [[slot for slot, expert in enumerate(row) if expert == e] for e in range(experts)]
        flat = [slot for each in held for slot in each]
        assert slots[layer].tolist() == flat + [-1] * (num_slots - len(flat)), "empty slots are at the end, as -1"
        assert offsets[layer].tolist() == [sum(map(len, held[:e])) for e in range(experts + 1)]
        assert [[slot for slot in each if slot >= 0] for each in dense[layer].tolist()] == held


def test_maps_are_narrow_as_long_as_their_numbers_fit():
    assert [small_type(n) for n in (0, 2**15 - 1, 2**15, 2**16)] == [np.int16, np.int16, np.int32, np.int32]
