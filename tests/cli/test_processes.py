"""Ranks as processes: they end well, fail together, die one by one, and never outlive the one that started them."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.flight import wait
from moe_mk.lab.cli.exits import RanksFailed
from moe_mk.lab.cli.processes import Rank, _verdict, _watch, run_ranks
from moe_mk.lab.cli.world import Place, World, team_of, together

TWO = World(2, 1)


def ends_with_its_rank(folder: Path, place: Place) -> int:
    (folder / str(place.rank)).write_text(f"{place.size}")
    return place.rank


def refuses_on_rank_1(folder: Path, place: Place) -> int:
    def step() -> int:
        if place.rank == 1:
            raise UnsupportedError("it cannot be", ["one reason", "another"])
        return 5

    return together(team_of(place, 20.0, "layer 3"), step)


def dies_on_rank_1(folder: Path, place: Place) -> int:
    team = team_of(place, 20.0, "layer 3")
    wait(team.gather_count(1, "first"))
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(team.gather_count(2, "second"))
    return 0


def sleeps(folder: Path, place: Place) -> int:
    (folder / f"{place.rank}.part").write_text(str(os.getpid()))
    os.replace(folder / f"{place.rank}.part", folder / str(place.rank))
    time.sleep(600)
    return 0


def test_every_rank_runs_and_the_worst_code_counts(tmp_path: Path) -> None:
    assert run_ranks(ends_with_its_rank, tmp_path, TWO, "gloo", 20.0) == 1
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "2"


def test_what_fails_on_one_rank_is_reported_once_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(refuses_on_rank_1, tmp_path, TWO, "gloo", 20.0)
    assert str(caught.value) == "rank 1: it cannot be\n  - one reason\n  - another"
    assert caught.value.code == 3
    assert capfd.readouterr().err == ""


def test_a_killed_rank_is_named_by_its_watcher_and_by_its_peer(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(dies_on_rank_1, tmp_path, TWO, "gloo", 20.0)
    died, reported = str(caught.value).split("\n", 1)
    assert died == "rank 1 was killed by SIGKILL"
    assert re.match(r"rank 0, phase 'second', layer 'layer 3', peer 1: its process \d+ has ended", reported), reported
    assert caught.value.code == 1
    assert time.monotonic() - started < 60


def test_one_rank_needs_no_process(tmp_path: Path) -> None:
    assert run_ranks(ends_with_its_rank, tmp_path, World(1, 1), "gloo", 20.0) == 0
    assert (tmp_path / "0").read_text() == "1"


SCRIPT = """
import sys
from pathlib import Path
from moe_mk.lab.cli.exits import end_in_order, with_exit_code
from moe_mk.lab.cli.processes import run_ranks
from moe_mk.lab.cli.world import World
from tests.cli.test_processes import sleeps
if __name__ == "__main__":
    import typer
    end_in_order()
    try:
        with_exit_code(run_ranks)(sleeps, Path(sys.argv[1]), World(2, 1), "gloo", 20.0)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_end_with_the_one_that_started_them(tmp_path: Path, by: signal.Signals, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (folder := tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder)}
    watcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )
    try:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        assert all(map(is_alive, pids))
        # Ctrl-C reaches every process of the terminal, a kill only the one.
        os.killpg(watcher.pid, by) if by == signal.SIGINT else watcher.send_signal(by)
        out, err = watcher.communicate(timeout=30)
        wait_until(lambda: not any(map(is_alive, pids)))
    finally:
        if watcher.poll() is None:
            watcher.kill()
    printed = {signal.SIGINT: b"moe-mk: interrupted\n", signal.SIGTERM: b"moe-mk: ended by SIGTERM\n"}.get(by, b"")
    assert (watcher.returncode, out, err) == (code, b"", printed)
    assert by == signal.SIGKILL or not list(folder.glob("moe-mk-*"))


def wait_until(holds: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Ended:
    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def join(self) -> None:
        pass


def rank_that(number: int, exitcode: int, *stated: bytes, ends: bool = True) -> Rank:
    ours, theirs = Pipe(duplex=False)
    for message in stated:
        theirs.send_bytes(message)
    if ends:
        theirs.close()
    else:
        OPEN.append(theirs)
    return Rank(number, Ended(exitcode), ours)  # type: ignore[arg-type]


OPEN: list[Any] = []


LATE = "rank 1 was still running after the others had ended, and was terminated"
HANGS = None


@pytest.mark.parametrize(
    ("ranks", "timeout_s", "message", "code"),
    [
        # Rank 0 waits for rank 1 where nothing can report it; it never speaks again.
        ([(0, HANGS), (-9,)], 600.0, "rank 1 was killed by SIGKILL", 1),
        (
            [(1, b"joined", b"1\nrank 0, phase 'x': late"), (0, b"joined", HANGS)],
            600.0,
            f"rank 0, phase 'x': late\n{LATE}",
            1,
        ),
        ([(0, b"joined", b"0\n"), (0, b"joined", HANGS)], 0.05, LATE, 1),
        ([(2, b"joined", b"2\nwrong\nin two lines")] * 4, 600.0, "wrong\nin two lines", 2),
        ([(0, b"joined", b"0\n"), (7, b"joined")], 600.0, "rank 1 ended with exit code 7", 1),
    ],
)
def test_what_ranks_meet_is_reported_once_without_a_long_wait(
    ranks: list[Any], timeout_s: float, message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ranks: the exit code of each, and what it reports."""
    monkeypatch.setattr("moe_mk.lab.cli.processes.GRACE_S", 0.05)
    made = [
        rank_that(n, exitcode, *filter(None, sent), ends=HANGS not in sent) for n, (exitcode, *sent) in enumerate(ranks)
    ]
    _watch(made, timeout_s)
    with pytest.raises(RanksFailed) as caught:
        _verdict(made)
    assert (str(caught.value), caught.value.code) == (message, code)


def test_the_first_rank_may_take_its_time_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_mk.lab.cli.processes.GRACE_S", 0.01)
    first = rank_that(0, 0, b"joined", ends=False)
    end = threading.Timer(0.3, lambda: (OPEN[-1].send_bytes(b"0\n"), OPEN[-1].close()))
    end.start()
    ranks = [first, rank_that(1, 0, b"joined", b"1\n")]
    _watch(ranks, timeout_s=0.01)
    end.join()
    assert _verdict(ranks) == 1


def late_on_rank_1(folder: Path, place: Place) -> int:
    team = team_of(place, 2.0, "layer 3")
    wait(team.gather_count(1, "first"))
    if place.rank == 1:
        time.sleep(600)
    wait(team.gather_count(2, "dispatch"))
    return 0


@pytest.mark.slow
def test_a_rank_that_sleeps_ends_the_run_within_the_timeout_with_rank_and_phase(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(late_on_rank_1, tmp_path, TWO, "gloo", 2.0)
    reported, late = str(caught.value).split("\n", 1)
    assert reported.startswith("rank 0, phase 'dispatch', layer 'layer 3', peer 1: sent nothing within 2 s"), reported
    assert late == "rank 1 was still running after the others had ended, and was terminated"
    assert caught.value.code == 1
    assert time.monotonic() - started < 60, "2 s late, 2 s of grace; the rest is starting Python twice"
