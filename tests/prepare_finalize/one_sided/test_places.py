"""Places in a window of the one-sided transport: by hand, and that no two writers ever share a byte."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moe_mk.prepare_finalize.one_sided.buffers import RegionShape, lower_of_pair


def test_rows_meet_at_the_seam_by_hand() -> None:
    # Four ranks of at most 10 rows of 8 bytes. Rank 1 owns: ranks 1 and 2 meet after 2 x 10 rows.
    shape = RegionShape(10, 8, 4, 2)
    assert [lower_of_pair(4, owner) for owner in range(4)] == [0, 1, 2, 2]
    assert shape.seam_at(4, 1) == 160
    assert shape.values_at(4, 1, 1, 3) == 160 - 24 and shape.values_at(4, 1, 2, 7) == 160
    # The area of 40 rows ends in the page of byte 320; ranks 0 and 3 have a page of their own each behind it.
    assert shape.values_at(4, 1, 0, 5) == 4096 and shape.values_at(4, 1, 3, 5) == 8192
    assert [shape.tails_at(4, source) for source in range(4)] == [12288, 16384, 20480, 24576]
    assert shape.sums_at(4) == 28672 and shape.notes_at(4) == 28672 + 256 >= 28672 + 4 * 10 * 2
    assert shape.data_bytes(4) == shape.notes_at(4) + 4 * 256
    # Sources bring 5, 3, 7 and 0 rows: 8 of them lie before the seam.
    assert shape.rows_at(4, 1, [5, 3, 7, 0]) == 160 - 64


def test_between_two_ranks_nothing_lies_apart() -> None:
    shape = RegionShape(10, 8, 4, 2)
    for owner in range(2):
        assert shape.rows_at(2, owner, [4, 6]) == shape.values_at(2, owner, 0, 4) == 80 - 32
        assert shape.values_at(2, owner, 1, 6) == 80


@given(st.data(), st.integers(2, 6), st.integers(1, 40), st.integers(1, 300), st.integers(1, 50))
def test_nobody_writes_where_another_does(data: st.DataObject, ranks: int, rows: int, values: int, tail: int) -> None:
    shape, counts = RegionShape(rows, values, tail, 6), [data.draw(st.integers(0, rows)) for _ in range(ranks)]
    for owner in range(ranks):
        begin = shape.rows_at(ranks, owner, counts)
        written = [(shape.values_at(ranks, owner, s, count), count * values) for s, count in enumerate(counts)]
        written += [(shape.tails_at(ranks, s), count * tail) for s, count in enumerate(counts)]
        written.append((shape.sums_at(ranks), sum(counts) * 6))
        pieces = sorted((at, size) for at, size in written if size)
        assert all(at + size <= after for (at, size), (after, _) in pairwise(pieces))
        assert not pieces or (pieces[0][0] >= 0 and sum(pieces[-1]) <= shape.data_bytes(ranks))
        # The two at the seam lie where they are read; rows copied around them stay off what others still write.
        starts = [begin + sum(counts[:source]) * values for source in range(ranks)]
        left = lower_of_pair(ranks, owner)
        assert [starts[s] for s in (left, left + 1)] == [written[s][0] for s in (left, left + 1)]
        apart = min([at for at, size in written if at >= ranks * rows * values], default=shape.data_bytes(ranks))
        assert begin >= 0 and begin + sum(counts) * values <= ranks * rows * values <= apart
