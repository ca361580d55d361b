"""Who is where: ranks asked for, ranks that a launcher started, TP neighbours."""

from unittest.mock import Mock

import pytest

from moe_mk.comm import ParallelGroups
from moe_mk.comm.single import SingleRank
from moe_mk.errors import CommError, ConfigError, UnsupportedError
from moe_mk.flight import Flight
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.exits import RanksFailed
from moe_mk.lab.cli.world import Place, groups_of, together, world_of


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 of 8, the second of four on its machine."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_there_is_one_rank_by_default() -> None:
    world = world_of(None, 1)
    assert (world.size, world.ep, world.prints) == (1, 1, True)
    assert world.threads == environment.usable_cores()
    assert groups_of(world.place(0)) == ParallelGroups()


def test_neighbours_share_a_slice() -> None:
    world = world_of(6, 2)
    assert world.ep == 3 and [world.place(rank).ep_rank for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.row(31)
def test_slices_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="--tp 4 does not divide 6 ranks; use a divisor of 6"):
        world_of(6, 4)


def test_threads_are_never_less_than_one() -> None:
    assert world_of(10_000, 1).threads == 1


@pytest.mark.usefixtures("torchrun")
def test_a_launcher_states_who_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 64)
    world = world_of(None, 2)
    assert (world.size, world.ep, world.prints) == (8, 4, False)
    assert world.place(0) == Place(rank=5, size=8, tp=2, local_rank=1)
    assert world.threads == 16


@pytest.mark.usefixtures("torchrun")
def test_a_launcher_is_not_contradicted() -> None:
    assert world_of(8, 1).size == 8
    with pytest.raises(ConfigError, match="--ranks 2, but torchrun started 8 ranks; drop --ranks"):
        world_of(2, 1)


def texts(mine: str, _: str) -> Flight[list[str]]:
    yield from ()
    return [mine, "2 first", "3 second"]


def test_a_step_alone_keeps_its_words_and_its_code() -> None:
    assert together(SingleRank(), lambda: 7) == 7
    with pytest.raises(RanksFailed, match="^cannot\n  - this\n  - that$") as caught:
        together(SingleRank(), Mock(side_effect=UnsupportedError("cannot", ["this", "that"])))
    assert caught.value.code == 3
    everyone = Mock(size=3, gather_texts=texts)
    with pytest.raises(RanksFailed, match="^rank 1: first$") as caught:
        together(everyone, lambda: 7)
    assert caught.value.code == 2
    with pytest.raises(CommError, match="gone"):
        together(SingleRank(), Mock(side_effect=CommError("gone", rank=0, phase="dispatch")))
