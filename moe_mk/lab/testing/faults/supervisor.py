"""Runs worlds of real processes with one fault each, classifies what every rank saw, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from moe_mk.errors import ConfigError
from moe_mk.lab.testing.faults.plans import DISCONNECTING, Campaign, World
from moe_mk.lab.testing.faults.ranks import FAILED, POLL_S, START_S, remove_shared_memory
from moe_mk.lab.testing.faults.report import Report, Row, WorldResult
from moe_mk.trace.clock import now

IMPORT_S = 120.0
"""How long the process that forks ranks may take to import what they need."""
LATE_S = 1.0
"""How long after the timeout an error may come."""
HANG_S = 6.0
"""How long after the timeout a call is given up."""
LOOK_S = 0.01
STACKS_S = 0.5
KEPT = 2000
"""Characters of the head and of the end of a rank's standard error that a report keeps."""
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pathlib import Path; from moe_mk.lab.testing.faults.ranks import keep; keep(Path(sys.argv[2]), sys.argv[3:])"
)


def run_worlds(
    campaign: Campaign,
    numbers: Iterable[int],
    *,
    jobs: int = 2,
    on_world: Callable[[str, int, int], None] | None = None,
    command: str = "",
) -> Report:
    """Draw the worlds with these numbers and run them; see `run_plans`."""
    plans = [campaign.world(number) for number in numbers]
    return run_plans(plans, jobs=jobs, on_world=on_world, command=command, seed=campaign.seed)


def run_plans(
    plans: Sequence[World],
    *,
    jobs: int = 2,
    on_world: Callable[[str, int, int], None] | None = None,
    command: str = "",
    seed: int = 0,
) -> Report:
    """Run worlds, `jobs` at a time, and report what every rank saw, in the order of the plans.

    Each world ends within some multiples of its timeout: what is still alive then is reported as a hang and killed. No
    process and no shared memory is left behind, when this is interrupted neither.
    on_world: called with (what has ended, done, total). Raises ConfigError if a module of the plans cannot be imported.
    """
    began = now()
    modules = tuple(dict.fromkeys(module for plan in plans for module in plan.modules))
    results: dict[int, WorldResult] = {}
    with _Keeper(modules) as keeper, ThreadPoolExecutor(max_workers=max(jobs, 1)) as pool:
        waiting: dict[Future[WorldResult], int] = {}
        try:
            for index, plan in enumerate(plans):
                waiting[pool.submit(_Watch(keeper, plan, index).run)] = index
            while waiting:
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    result = results[waiting.pop(done)] = done.result()
                    if on_world is not None:
                        on_world(result.plan.describe(), len(results), len(plans))
        except BaseException:
            keeper.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return Report(tuple(results[index] for index in range(len(plans))), now() - began, seed, command)


class _Keeper:
    """Our end of the process that forks ranks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.stopped = threading.Event()
        self._modules, self._lock = modules, threading.Lock()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="moe-mk-chaos-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name)
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path), str(self.root), *self._modules]
        # In a session of its own: Ctrl-C is for this process, which ends the others.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank and the keeper."""
        self.stopped.set()
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_shared_memory(self.root)
        self._folder.cleanup()

    def start(self, folder: Path, ranks: int) -> None:
        """Fork the ranks of a world."""
        self._ask({"start": str(folder), "ranks": ranks})

    def signal(self, folder: Path, rank: int, number: int) -> None:
        """Send a signal to a rank, unless it has ended."""
        self._ask({"signal": number, "folder": str(folder), "rank": rank})

    def _ask(self, request: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            if not self._process.stdin.closed:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()

    def _await_ready(self) -> None:
        until = now() + IMPORT_S
        while not (self.root / "ready").exists():
            failed, names = self.root / "failed", ", ".join(self._modules) or "moe_mk"
            if failed.exists() or self._process.poll() is not None:
                why = failed.read_text(encoding="utf-8") if failed.exists() else "its process ended, see above"
                raise ConfigError(f"ranks cannot import {names}: {why}; name modules that a new interpreter finds")
            if now() > until:
                raise ConfigError(f"importing {names} for ranks takes more than {IMPORT_S:g} s; free the processor")
            time.sleep(POLL_S)


@dataclass
class _RankSeen:
    """One rank as its supervisor sees it."""

    read: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    open: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The call that each thread is in."""
    gate: str = ""
    gates: set[str] = field(default_factory=set)
    ended: dict[str, Any] | None = None
    hung: str = ""
    """What was given up, with stacks."""
    dumped: float | None = None
    resumed: float | None = None
    is_stopped: bool = False
    is_left: bool = False


class _Watch:
    """One world under way: follows what ranks write, opens gates, sends signals, gives up what hangs."""

    def __init__(self, keeper: _Keeper, plan: World, index: int) -> None:
        self.keeper, self.plan = keeper, plan
        self.folder = keeper.root / f"world{index}"
        self.ranks = [_RankSeen() for _ in range(plan.ranks)]
        self.fault_at: float | None = None
        self.cut = 0
        self._opened: dict[str, float] = {}
        self._sent = self._continued = False

    def run(self) -> WorldResult:
        """Run the world to its end."""
        self._began = began = now()
        if self.keeper.stopped.is_set():
            raise InterruptedError("the run was stopped")
        self.folder.mkdir()
        (self.folder / "plan.json").write_text(self.plan.to_json(), encoding="utf-8")
        self.keeper.start(self.folder, self.plan.ranks)
        while any(rank.ended is None for rank in self.ranks):
            if self.keeper.stopped.wait(LOOK_S):
                raise InterruptedError("the run was stopped")
            self._look()
        for number in range(self.plan.ranks):
            self._read(number)
        rows = [row for number in range(self.plan.ranks) for row in _Judge(self, number).rows()]
        left = remove_shared_memory(self.folder)
        fired = self.fault_at is not None and (self.plan.kind != "cut" or self.cut > 0)
        if not fired and (f := self.plan.fault) is not None and f.point != "time" and f.kind not in ("cut", "counts"):
            rows.append(Row(f.victim, "end", f.call, "not injected", text=f"{f.point} was not reached"))
        return WorldResult(self.plan, tuple(rows), fired, now() - began, len(left))

    def _look(self) -> None:
        for number, rank in enumerate(self.ranks):
            self._read(number)
            note = self.folder / f"rank{number}.ended"
            if rank.ended is None and note.exists():
                rank.ended = json.loads(note.read_text(encoding="utf-8"))
        self._open_gates()
        self._inject()
        for number, rank in enumerate(self.ranks):
            if rank.ended is None:
                self._give_up(number, rank)

    def _read(self, number: int) -> None:
        file, rank = self.folder / f"rank{number}.log", self.ranks[number]
        if not file.exists():
            return
        with file.open("rb") as log:
            log.seek(rank.read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        rank.read += len(whole)
        for line in whole.splitlines():
            self._take(number, rank, json.loads(line))

    def _take(self, number: int, rank: _RankSeen, note: dict[str, Any]) -> None:
        match note.get("event"):
            case "begin":
                rank.open[note["thread"]] = note
            case "row":
                rank.open.pop(note["thread"], None)
                rank.rows.append(note)
            case "gate":
                rank.gates.add(note["gate"])
                rank.gate = note["gate"]
            case "fault":
                self.fault_at = note["at"]
                rank.is_stopped = self.plan.kind in ("stop", "pause")
            case "resumed":
                rank.resumed, rank.is_stopped = note["at"], False
            case "cut":
                self.cut += note["connections"]
            case "left":
                rank.is_left = True

    def _open_gates(self) -> None:
        for gate in ("serve", "after", "recovered", "leave"):
            alive = [rank for rank in self.ranks if rank.ended is None]
            if gate in self._opened or not alive or not all(gate in rank.gates for rank in alive):
                continue
            rows = [row for rank in self.ranks for row in rank.rows]
            recovered = [row["result"] == "right" for row in rows if row["stage"] == "recover"]
            answer = {
                "failed": any(row["result"] != "right" for row in rows) or any(rank.ended for rank in self.ranks),
                "go": bool(recovered) and all(recovered) and len(recovered) == self.plan.ranks,
            }
            partial = self.folder / f".go-{gate}"
            partial.write_text(json.dumps(answer), encoding="utf-8")
            partial.replace(self.folder / f"go-{gate}")
            self._opened[gate] = now()

    def _inject(self) -> None:
        """Signals at a time, and the end of a stop."""
        f = self.plan.fault
        if f is None:
            return
        victim = self.ranks[f.victim]
        due = "serve" in self._opened and now() - self._opened["serve"] >= f.at_ms / 1000
        if f.point == "time" and due and not self._sent and victim.ended is None:
            self._sent = True
            by_kind = {"kill": signal.SIGKILL, "cut": signal.SIGUSR2, "raise": signal.SIGINT}
            number = by_kind.get(f.kind, signal.SIGSTOP)
            if f.kind != "raise":  # the rank notes when it is in a call
                self.fault_at = now()
            victim.is_stopped = number == signal.SIGSTOP
            self.keeper.signal(self.folder, f.victim, number)
        if f.kind not in ("stop", "pause") or self.fault_at is None or self._continued:
            return
        if now() - self.fault_at >= f.seconds:
            self._continued = True
            self.keeper.signal(self.folder, f.victim, signal.SIGCONT)
            if f.point == "time":
                victim.resumed, victim.is_stopped = now(), False

    def _give_up(self, number: int, rank: _RankSeen) -> None:
        """Dump the stacks of a rank that is in something for too long, and then kill it."""
        if rank.dumped is not None:
            if now() - rank.dumped > STACKS_S:
                self.keeper.signal(self.folder, number, signal.SIGKILL)
            return
        if rank.is_stopped:
            return
        since, what = self._busy_since(number, rank)
        patience = self.plan.timeout_s + HANG_S + (START_S if what.startswith("build") else 0.0)
        patience = 2 * START_S if what == "start" else patience
        if since is None or now() - max(since, self._last_change(number)) <= patience:
            return
        rank.dumped, rank.hung = now(), what
        self.keeper.signal(self.folder, number, signal.SIGUSR1)

    def _busy_since(self, number: int, rank: _RankSeen) -> tuple[float | None, str]:
        if rank.open:
            note = min(rank.open.values(), key=lambda note: float(note["began"]))
            return float(note["began"]), f"{note['stage']} {note['call']}"
        if rank.is_left:
            return max([self._opened.get("leave", 0.0), *(row["ended"] for row in rank.rows)]), "its end"
        if not rank.gates:
            return self._began, "start"
        if rank.gate in self._opened:  # between two calls: time goes into inputs and the reference
            return max([self._opened[rank.gate], *(row["ended"] for row in rank.rows)]), f"after gate {rank.gate}"
        return None, ""

    def _last_change(self, number: int) -> float:
        """The time from which a rank may be expected to come to an end."""
        own = self.ranks[number].resumed if self.plan.fault and number == self.plan.fault.victim else None
        slept = self.plan.fault.seconds if self.plan.fault and self.plan.kind in ("delay", "pause", "stop") else 0.0
        at = self.fault_at + (slept if self.plan.kind != "stop" else 0.0) if self.fault_at is not None else 0.0
        return max(at, own or 0.0)


class _Judge:
    """The rows of one rank: outcomes from what it wrote, how it ended, and what its world is about."""

    def __init__(self, watch: _Watch, number: int) -> None:
        self.watch, self.number, self.plan = watch, number, watch.plan
        self.rank = watch.ranks[number]
        fault = watch.plan.fault
        self.is_victim = fault is not None and fault.victim == number
        self.first: dict[str, Any] | None = None

    def rows(self) -> list[Row]:
        """One for each call, and one for an end that the supervisor did not bring about."""
        made = [self._row(note) for note in self.rank.rows]
        return [*made, *self._end()]

    def _row(self, note: Mapping[str, Any]) -> Row:
        place = self.number, note["stage"], note["call"]
        slept = self.plan.fault.seconds if self.plan.fault is not None and self.is_victim else 0.0
        if note["result"] == "right":
            slow = note["stage"] == "tear-down" and self._delay(note) > self.plan.timeout_s + LATE_S + slept
            return Row(*place, "late" if slow else "right", digest=note.get("digest", ""), thread=note["thread"])
        if note["result"] == "wrong":
            # A rank that sends wrong rows loses its own; no other rank may.
            is_own = self.is_victim and self.plan.kind == "counts" and note["stage"] == "serve"
            return Row(*place, "own" if is_own else "WRONG", text=note["text"], thread=note["thread"])
        delay = self._delay(note)
        named = cause = None
        if note["result"] != "own" and not self.is_victim and self.plan.fault is not None:
            victim = self.plan.fault.victim
            named = note["peer"] == victim or bool(re.search(rf"\b(ranks?|peers?)\W+{victim}\b", note["text"]))
        if self.first is None:
            self.first = dict(note)
        elif note["stage"] == "after" and note["result"] != "own":
            cause = self._carries_first(note)
        text = note["text"] if note["typed"] or note["result"] == "own" else f"{note['text']}\n{note['where']}"
        return Row(
            *place,
            self._outcome(note, delay),
            error=note["type"],
            text=text,
            delay_s=round(delay, 4),
            named=named,
            cause=cause,
            thread=note["thread"],
        )

    def _outcome(self, note: Mapping[str, Any], delay: float) -> str:
        if note["result"] == "own":
            return "own"
        if not note["typed"]:
            return "untyped error"
        before = self.watch.fault_at is None or note["ended"] < self.watch.fault_at
        if self.plan.is_harmless or before:
            return "false alarm"
        if note["stage"] == "again" or (note["stage"] == "recover" and self.plan.kind not in DISCONNECTING):
            return "not recovered"
        return "late" if delay > self.plan.timeout_s + LATE_S else "typed error"

    def _delay(self, note: Mapping[str, Any]) -> float:
        starts = [note["began"], self.watch.fault_at or 0.0]
        if self.is_victim and self.rank.resumed is not None:
            starts.append(self.rank.resumed)
        return float(max(note["ended"] - max(start for start in starts if start <= note["ended"]), 0.0))

    def _carries_first(self, note: Mapping[str, Any]) -> bool:
        """Whether an error repeats what the first one stated behind its place, or names the same peer."""
        assert self.first is not None
        if self.first["peer"] is not None and self.first["peer"] == note["peer"]:
            return True
        stated = self.first["text"].rpartition(": ")[2] or self.first["type"]
        return stated[:60] in note["text"] or (self.first["result"] == "own" and self.first["type"] in note["text"])

    def _end(self) -> list[Row]:
        """Nothing for a rank that left, or that was killed as planned."""
        ended, rank = self.rank.ended, self.rank
        assert ended is not None
        if rank.hung:
            return [self._ending("hang", "", f"in {rank.hung}")]
        if ended["signal"]:
            planned = self.is_victim and self.plan.kind == "kill" and ended["signal"] == signal.SIGKILL
            if planned and self.watch.fault_at is not None:
                return []
            return [self._ending("abort", signal.Signals(ended["signal"]).name)]
        if ended["code"] == FAILED:
            return [self._ending("untyped error", "harness")]
        return [] if rank.is_left else [self._ending("abort", f"exit code {ended['code']}")]

    def _ending(self, outcome: str, error: str, where: str = "") -> Row:
        """An unplanned end, with what the rank was in and the head and the end of its standard error."""
        notes = list(self.rank.open.values())
        stage, call = (notes[0]["stage"], notes[0]["call"]) if notes else ("end", 0)
        errors = self.watch.folder / f"rank{self.number}.err"
        stated = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
        if len(stated) > 2 * KEPT:
            stated = f"{stated[:KEPT]}\n...\n{stated[-KEPT:]}"
        return Row(self.number, stage, call, outcome, error=error, text=f"{where or f'in {stage} {call}'}\n{stated}")
