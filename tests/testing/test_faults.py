"""The fault harness: each wrong answer to a fault has its outcome, a right transport none; nothing is left behind."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.lab.cli import app
from moe_mk.lab.cli.chaos import ChaosOrder, show_report
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.testing import certify_checks
from moe_mk.lab.testing.certificate import Failed, Passed
from moe_mk.lab.testing.certify import _tried
from moe_mk.lab.testing.faults import (
    BUILT_IN,
    KINDS,
    Call,
    Campaign,
    Fault,
    Report,
    World,
    run_plans,
    supervisor,
    transports_of,
)
from moe_mk.lab.testing.faults.inject import error_named
from moe_mk.lab.testing.faults.plans import ERRORS
from moe_mk.lab.testing.faults.ranks import _difference
from moe_mk.lab.testing.faults.reference import ReferenceLayer
from moe_mk.lab.testing.faults.supervisor import _RankSeen, _Watch
from moe_mk.layer import MoELayer
from moe_mk.oracle.expected_error import ONE_TOKEN, error_of
from moe_mk.prepare_finalize import PREPARE_FINALIZE

BROKEN = "tests.testing.broken_transports"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def broken_transports_are_registered_here_alone() -> Iterator[None]:
    before = dict(PREPARE_FINALIZE._entries)
    importlib.import_module(BROKEN)
    yield
    PREPARE_FINALIZE._entries.clear()
    PREPARE_FINALIZE._entries.update(before)


CALLS = (Call(0, ((2, 5),)), Call(0, ((3, 0),)), Call(0, ((1, 4),)))
TIMEOUT_S = 10.0
"""Connections of a dead process close at once, so that only a hang waits for it; a busy machine is late."""
KILL = Fault("kill", "before combine", victim=1, call=1)


def world(transport: str, fault: Fault | None, number: int = 0, **changes: object) -> World:
    """A small world of two ranks over a transport, with this fault."""
    plan = Campaign((transport,), modules=(BROKEN,)).world(number)
    while plan.ranks != 2:
        number += 1
        plan = Campaign((transport,), modules=(BROKEN,)).world(number)
    return replace(plan, number=number, layers=1, calls=CALLS, fault=fault, timeout_s=TIMEOUT_S, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report() -> Report:
    """One run for all: each broken transport and a right one, each with the same kill, a right one without, and with
    other faults."""
    names = ("broken_hangs", "broken_changes_type", "broken_aborts", "broken_swallows", "right_after_all")
    plans = [world(name, KILL) for name in names]
    plans += [world("right_after_all", None), world("right_after_all", replace(KILL, call=99))]
    proxy = Fault("proxy", "within dispatch", victim=1, call=1)
    interrupt = Fault("raise", "time", victim=1, error="KeyboardInterrupt", at_ms=0)  # while its first tokens are drawn
    plans.append(world("one_sided_network", proxy, recovers=True))
    return run_plans([*plans, world("right_after_all", interrupt, recovers=True)])


@pytest.mark.row("N9")
@pytest.mark.parametrize(("transport", "outcome"), [
    ("broken_hangs", "hang"), ("broken_changes_type", "untyped error"), ("broken_aborts", "abort"),
    ("broken_swallows", "WRONG"),
])  # fmt: skip
def test_each_wrong_answer_to_a_dead_peer_gets_its_outcome(report: Report, transport: str, outcome: str) -> None:
    (result,) = (one for one in report.worlds if one.plan.transport == transport)
    assert {row.outcome for row in result.bad} == {outcome}, result.bad
    assert {row.rank for row in result.bad} == {0} and result.bad[0].stage == "serve" and result.bad[0].call == 1
    assert result.fired and not report.passed


@pytest.mark.row("N9")
def test_a_right_transport_ends_in_typed_errors_in_time(report: Report) -> None:
    result = report.worlds[4]
    assert not result.bad and result.fired
    seen = {(row.rank, row.stage, row.call): row for row in result.rows}
    assert seen[0, "serve", 0].outcome == seen[1, "serve", 0].outcome == "right"
    error = seen[0, "serve", 1]
    assert error.outcome == "typed error" and error.error == "CommError" and error.named is not None
    assert error.delay_s is not None and error.delay_s < TIMEOUT_S
    assert (1, "serve", 1) not in seen, "the victim was killed in that call"
    assert seen[0, "after", 2].outcome == "typed error" and seen[0, "after", 2].cause is not None


@pytest.mark.row(148, "N9")
def test_a_rank_that_loses_its_proxy_ends_calls_in_errors_in_time_and_the_group_recovers(report: Report) -> None:
    result = report.worlds[7]
    assert result.fired and not result.bad, result.bad
    seen = {(row.rank, row.stage, row.call): row for row in result.rows}
    failed = [
        min((row for row in result.rows if row.rank == rank and row.error), key=lambda row: row.call) for rank in (0, 1)
    ]
    assert [row.error for row in failed] == ["CommError"] * 2 and "rank 1" in failed[0].text
    assert "the proxy of this rank has failed: SystemExit" in failed[1].text
    assert {seen[rank, "recover", 0].outcome for rank in (0, 1)} == {"right"}
    assert {row.outcome for row in result.rows if row.stage == "again"} == {"right"}


def test_a_hang_is_reported_with_the_stack_that_hangs(report: Report) -> None:
    (row,) = report.worlds[0].bad
    assert "in serve 1" in row.text and "broken_transports.py" in row.text and " in hang" in row.text


def test_a_world_without_a_fault_is_right(report: Report) -> None:
    result = report.worlds[5]
    assert {row.outcome for row in result.rows} == {"right"} and len(result.rows) == 2 * (1 + len(CALLS) + 1)


def test_an_interrupt_that_comes_between_calls_is_raised_in_the_next_one(report: Report) -> None:
    result = report.worlds[8]
    assert result.fired and not result.bad, result.bad
    assert {row.outcome for row in result.rows if row.stage in ("recover", "again")} == {"right"}


def test_a_rank_that_is_slow_between_calls_does_not_hang(tmp_path: Path) -> None:
    watch = _Watch(SimpleNamespace(root=tmp_path), world("right_after_all", None), 0)  # type: ignore[arg-type]
    watch._opened["serve"] = 10.0
    seen = _RankSeen(rows=[{"ended": 30.0}], gate="serve", gates={"serve"})
    assert watch._busy_since(0, seen) == (30.0, "after gate serve")


def test_a_fault_that_is_not_reached_is_no_success(report: Report) -> None:
    result = report.worlds[6]
    assert not result.fired and [row.outcome for row in result.bad] == ["not injected"]


def test_the_table_counts_what_the_worlds_saw(report: Report) -> None:
    lines = {line["key"]: line for line in report.table()}
    assert lines["broken_aborts"]["outcomes"]["abort"] == 1 and lines["broken_aborts"]["failed_worlds"] == 1
    assert lines["right_after_all"]["worlds"] == 4 and lines["right_after_all"]["delay_max_s"] < TIMEOUT_S
    assert json.loads(json.dumps(report.as_dict()))["failed"] == [one.plan.number for one in report.worlds if one.bad]


def test_failed_worlds_are_printed_with_the_command_that_repeats_them(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *others) = report.worlds
    marked = replace(first, rows=(replace(first.bad[0], text="[/a/path.cc:537] is no markup"), *first.rows))
    shown = replace(report, worlds=(marked, *others))
    order = ChaosOrder(None, "broken_hangs,right_after_all", 7, 0, modules=(BROKEN,))
    show_report(Screen(), order, shown)
    printed = capsys.readouterr().out
    assert "rank 0, serve 1: hang  [/a/path.cc:537] is no markup" in printed and "FAIL" in printed
    assert f"--worlds 7 --seed 0 --timeout 3 --import {BROKEN} --only {first.plan.number}" in printed
    assert "rank 0, serve 1: WRONG" in printed and "rank 0, serve 1: untyped error RuntimeError" in printed


def test_a_plan_depends_on_seed_transport_and_number_alone() -> None:
    one, other = Campaign(BUILT_IN, seed=3), Campaign(("one_sided",), seed=3)
    number = next(n for n in range(9) if one.world(n).transport == "one_sided")
    assert one.world(number) == other.world(number) == World.from_json(one.world(number).to_json())
    assert one.world(number) != Campaign(BUILT_IN, seed=4).world(number)


def test_every_kind_of_fault_is_drawn_and_its_plan_holds_together() -> None:
    plans = [Campaign(BUILT_IN).world(number) for number in range(400)]
    assert {plan.kind for plan in plans[:60]} == set(KINDS), "of the 60 worlds of `make chaos`"
    assert {plan.transport for plan in plans if plan.kind == "proxy"} == {"one_sided_network"}
    assert {plan.fault.error for plan in plans if plan.fault} >= set(ERRORS)
    for plan in plans:
        fault = plan.fault
        assert 2 <= plan.ranks <= 4 and all(len(batch) == plan.ranks for call in plan.calls for batch in call.tokens)
        if fault is not None:
            assert fault.victim < plan.ranks and fault.batch < len(plan.calls[fault.call].tokens), plan.describe()
        if plan.kind in ("other_layer", "two_threads"):
            assert plan.layers == 2
        if plan.kind == "stop":
            assert fault is not None and fault.seconds > plan.timeout_s
        if plan.kind in ("pause", "delay"):
            assert fault is not None and fault.seconds < plan.timeout_s / 2


def test_the_reference_agrees_with_a_layer_of_one_rank_and_finds_a_wrong_row() -> None:
    for number in range(8):
        plan = Campaign(("all_to_all",)).world(number)
        config = MoEConfig.parse(plan.config, "a test").with_(prepare_finalize="auto", experts="reference")
        if not isinstance(config.parallel.placement, str):
            config = config.with_(placement="linear")
        reference = ReferenceLayer(config, number)
        x_TH = reference.tokens(7, number)
        layer = MoELayer(config).load_weights(reference.tensors)
        y_TH, want_TH, error = layer(x_TH), reference.expected(x_TH), error_of(layer.decision)
        assert _difference(y_TH, want_TH, error) == "", plan.describe()
        y_TH[3] = y_TH[4]
        assert f"limit is {ONE_TOKEN * error:.2e}" in _difference(y_TH, want_TH, error)
        assert "shape" in _difference(y_TH[:5], want_TH, error)
        assert reference.expected(reference.tokens(0, number)).shape == (0, config.model.hidden_size)


def test_exceptions_without_text_are_among_those_that_are_raised() -> None:
    assert str(error_named("MemoryError")) == str(error_named("KeyboardInterrupt")) == ""
    assert {type(error_named(name)).__name__ for name in ERRORS} == set(ERRORS)


def test_transports_that_exchange_nothing_are_refused() -> None:
    assert transports_of("all") == BUILT_IN and transports_of("one_sided, all_gather") == ("one_sided", "all_gather")
    with pytest.raises(ConfigError, match="'no_ep' does not exchange tokens between ranks.*use one of all_gather"):
        transports_of("no_ep")
    with pytest.raises(ConfigError, match="nowhere"):
        transports_of("nowhere")


def test_modules_that_ranks_cannot_import_are_named() -> None:
    with pytest.raises(ConfigError, match="ranks cannot import no_such_module: ModuleNotFoundError"):
        run_plans([replace(world("all_to_all", None), modules=("no_such_module",))])


def test_imports_that_take_too_long_are_no_failed_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "IMPORT_S", 0.0)
    with pytest.raises(ConfigError, match="importing .* for ranks takes more than 0 s"):
        run_plans([world("all_to_all", None)])


def test_only_repeats_a_world_bit_for_bit(tmp_path: Path) -> None:
    number = str(next(n for n in range(99) if Campaign(("all_to_all",), seed=5).world(n).kind == "delay"))
    file = tmp_path / "report"
    arguments = ["chaos", "--transport", "all_to_all", "--seed", "5", "--only", number, "--only", number]
    done = CliRunner().invoke(app, [*arguments, "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert f"world {number}" in done.output and "rank 1, serve 0: right" in done.output
    worlds = json.loads(file.read_text())["worlds"]
    first, again = ([(row["rank"], row["stage"], row["call"], row.get("digest")) for row in w["rows"]] for w in worlds)
    assert first == again and sum(bool(digest) for *_, digest in first) >= 6


def processes_of_session(session: int) -> list[str]:
    """What still runs in a session, or in one that a process of it began; zombies are not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(its_session) == session and state not in "ZX":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.stress)])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, ending: signal.Signals) -> None:
    script = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from moe_mk.lab.cli import app\n"
        "app(['chaos', '--transport', 'one_sided', '--worlds', '200', '--seed', '1', '--out', sys.argv[1] + '/report'])"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], start_new_session=True)
    try:
        keeper = wait_for(lambda: keeper_of(run.pid))
        wait_for(lambda: list(tmp_path.glob("moe-mk-chaos-*/world0/rank0.log")))
        run.send_signal(ending)
        assert run.wait(timeout=30) in (130, -ending)
        wait_for(lambda: not processes_of_session(keeper) and not list(tmp_path.iterdir()))
    finally:
        run.kill()
        run.wait()


def keeper_of(pid: int) -> int:
    """The keeper that a run has started; 0 if there is none yet."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next((int(child) for child in children if os.getsid(int(child)) == int(child)), 0)


def wait_for(condition, timeout_s: float = 60.0):  # type: ignore[no-untyped-def]
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
    return found


def test_certify_refuses_a_transport_that_breaks_the_law_of_faults(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Campaign] = []

    def already_run(campaign: Campaign, numbers: range) -> Report:
        seen.append(campaign)
        (first, *_) = (one for one in report.worlds if one.plan.transport == campaign.transports[0])
        return replace(report, worlds=(first,) * len(numbers))

    monkeypatch.setattr(certify_checks, "run_worlds", already_run)
    refused = _tried(certify_checks.fault_check("broken_swallows", (BROKEN,)))
    assert isinstance(refused, Failed) and refused.law == "faults" and "rank 0: WRONG" in refused.message
    passed = _tried(certify_checks.fault_check("right_after_all", (BROKEN,)))
    assert isinstance(passed, Passed) and passed.cases == certify_checks.FAULT_WORLDS and seen[0].modules == (BROKEN,)
    with pytest.raises(ConfigError, match="torch_cpu is an experts backend"):
        certify_checks.fault_check("torch_cpu")


def test_tokens_are_drawn_alike_on_every_rank() -> None:
    config = MoEConfig.parse(Campaign(("all_to_all",)).world(1).config, "a test")
    one, other = ReferenceLayer(config, 7), ReferenceLayer(config, 7)
    assert torch.equal(one.tokens(5, 3), other.tokens(5, 3)) and not torch.equal(one.tokens(5, 3), one.tokens(5, 4))
    assert one.tensors.keys() == other.tensors.keys()
