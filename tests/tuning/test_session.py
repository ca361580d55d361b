"""A tuning session: every candidate once, within its budget, and on from where a killed one stopped."""

import json
import resource
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.lab.cli.tune import TuneOrder, case_of, command_of
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TuneCase, TuneResult, load_measured, session, space_of, tune
from moe_mk.lab.tuning.session import Parts, Stopwatch, thread_counts
from moe_mk.quant.plain import FP32
from moe_mk.tokens import ExpertOutput, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights
from tests.cli.conftest import moe_mk, printed, usage_error

CASE = TuneCase("reference", 32, 16, 4, 2, FP32, FP32, FP32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores make a run slow on a busy machine; what is tested is not the time."""
    monkeypatch.setattr(session, "ROUNDS", 1)


def stack(case: TuneCase, device: torch.device) -> ExpertWeights:
    return random_experts(case.weights, case.num_slots, case.hidden_size, case.intermediate_size, device)


def run(
    path: Path, tokens: Sequence[int] = (1, 8), case: TuneCase = CASE, budget: float = 30.0, **more: Any
) -> TuneResult:
    settings: dict[str, Any] = {"cores": 3, "device": CPU, "meta": {"by": "a test"}, "stack": stack} | more
    return tune(case, tokens, path, budget_s=budget, **settings)


class Declares(ReferenceExperts):
    """A backend with two tiles, of which the wide one is for many rows only."""

    tile = "none"
    made: ClassVar[list[str]] = []

    @classmethod
    def tuning_space(cls, context: ExpertsContext, rows: int) -> Sequence[Mapping[str, str]]:
        return [{"tile": "narrow"}, {"tile": "wide"}] if rows > 4 else [{"tile": "narrow"}]

    def tuned_with(self, parameters: Mapping[str, str]) -> FusedExperts:
        self.made.append(parameters["tile"])
        return self


def test_every_candidate_is_measured_once_and_the_fastest_is_kept(tmp_path: Path) -> None:
    path, threads = tmp_path / "case.json", torch.get_num_threads()
    result = run(path)
    assert (result.complete, result.measured, result.resumed) == (True, 6, 0)  # 1, 2 and 3 threads, twice
    assert [point.tokens for point in result.points] == [1, 8]
    assert load_measured(path, "") == result.points
    assert json.loads(path.with_suffix(".meta.json").read_text())["complete"] is True
    assert not path.with_suffix(".part.jsonl").exists()
    assert torch.get_num_threads() == threads, "torch's threads are as they were"


def test_a_killed_session_is_gone_on_with(tmp_path: Path) -> None:
    path, seen = tmp_path / "case.json", []

    def killed(what: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path, on_measured=killed)
    part = path.with_suffix(".part.jsonl")
    assert len(part.read_text().splitlines()) == 4
    with part.open("a") as opened:
        opened.write('{"case": "cut off in the mid')
    with pytest.raises(KeyboardInterrupt):
        run(path, on_measured=lambda what, done, total: killed(what, done - 1, total))
    result = run(path, on_measured=lambda what, done, total: seen.append((done, total)))
    assert (result.complete, result.measured, result.resumed) == (True, 1, 5)
    assert seen == [(done, 6) for done in range(6)]


@pytest.mark.parametrize("lines", [0, 1])
def test_a_trial_that_cannot_be_written_leaves_the_lines_before_it(tmp_path: Path, lines: int) -> None:
    part, limits = tmp_path / "new" / "case.part.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    parts, before = Parts(part, "a case"), b""
    if lines:
        parts.add(0, {"tile": "narrow"}, ((1.0, 2.0),))
        before = part.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))  # stands for a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            parts.add(lines, {"tile": "narrow"}, ((1.0, 2.0),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert part.read_bytes() == before if lines else not part.parent.exists()


def test_a_spent_budget_leaves_a_file_and_states_that_more_is_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "case.json", iter(float(second) for second in range(10_000))
    monkeypatch.setattr(session, "now", lambda: next(clock))
    result = run(path, budget=3.0)
    assert not result.complete and 0 < result.measured < 6
    assert json.loads(path.with_suffix(".meta.json").read_text())["complete"] is False
    monkeypatch.undo()
    again = run(path)
    assert again.complete and again.resumed == result.measured and again.measured == 6 - result.measured


@pytest.mark.parametrize("failed", ["", "did not end in an earlier session"])
def test_points_are_those_of_tokens_whose_built_in_choice_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    """A version with other built-in parameters has measured some of the candidates, or those of now in vain."""
    known = {"threads": 3 if failed else 1}  # 3 is built in
    Parts(tmp_path / "case.part.jsonl", CASE.name).add(8, known, ((1.0, 1.0),) * (not failed), failed)
    clock = iter(float(second) for second in range(10_000))
    monkeypatch.setattr(session, "now", lambda: next(clock))
    result = run(tmp_path / "case.json", budget=3.0)
    assert not result.complete and [point.tokens for point in result.points] == [1]
    (judged,) = json.loads((tmp_path / "case.meta.json").read_text())["judged"]
    assert judged["tokens"] == 1


def test_lines_of_another_case_and_of_an_older_method_are_measured_again(tmp_path: Path) -> None:
    path, found = tmp_path / "case.json", {"tokens": 1, "parameters": {"threads": 1}}
    lines = [
        json.dumps(found | {"case": name, "rounds": [[1.0, 1.0]], "confirms": False}) for name in ("another", CASE.name)
    ]
    lines += [json.dumps(found | {"case": CASE.name, "microseconds": 1.0}), "[]", "3", ""]
    for kept, resumed in ((lines, 1), ([lines[0], *lines[2:]], 0)):
        path.with_suffix(".part.jsonl").write_text("\n".join(kept))
        assert run(path, tokens=(1,)).resumed == resumed


def test_a_backend_declares_its_own_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERTS._entries, "declares", Declares)
    Declares.made.clear()
    result = run(tmp_path / "case.json", case=replace(CASE, experts="declares"))
    assert result.complete and result.measured == 3
    # One token: narrow against itself. Eight: the same, then wide against narrow. One round decides nothing.
    assert Declares.made == ["narrow"] * 5 + ["wide"]
    assert {point.parameters["tile"] for point in result.points} == {"narrow"}


class Fails(Declares):
    """Only the first tile gives the result of the backend."""

    @classmethod
    def tuning_space(cls, context: ExpertsContext, rows: int) -> Sequence[Mapping[str, str]]:
        return [{"tile": tile} for tile in ("good", "wrong", "raises", "hangs")]

    def tuned_with(self, parameters: Mapping[str, str]) -> FusedExperts:
        made = copy(self)
        made.tile = parameters["tile"]
        return made

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if self.tile == "raises":
            raise RuntimeError("out of resources")
        output = super().run(tokens, weights)
        return replace(output, y=output.y * 1.1) if self.tile == "wrong" else output


def test_candidates_that_fail_or_differ_or_hung_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPERTS._entries, "fails", Fails)
    case = replace(CASE, experts="fails")
    Parts(tmp_path / "case.part.jsonl", case.name).add(4, {"tile": "hangs"}, (), "did not end in an earlier session")
    result = run(tmp_path / "case.json", tokens=(4,), case=case)
    assert result.complete and (result.measured, result.resumed) == (3, 1)
    assert [point.parameters["tile"] for point in result.points] == ["good"]
    (judged,) = json.loads((tmp_path / "case.meta.json").read_text())["judged"]
    assert [(each["parameters"]["tile"], each["why"].split(" away")[0]) for each in judged["failed"]] == [
        ("wrong", "ValueError: its result is 0.100"), ("raises", "RuntimeError: out of resources"),
        ("hangs", "did not end in an earlier session"),
    ]  # fmt: skip
    monkeypatch.setattr(Fails, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # of the built-in one
        run(tmp_path / "other.json", tokens=(4,), case=case)


def timed(monkeypatch: pytest.MonkeyPatch, micros: Mapping[int, float]) -> list[int]:
    """Runs take what is stated of their threads, nine rounds a candidate; returns what was run."""
    ran: list[int] = []

    def microseconds(self: Stopwatch, tuned: FusedExperts, parameters: Mapping[str, int]) -> float:
        ran.append(parameters["threads"])
        return micros[parameters["threads"]]

    monkeypatch.setattr(session, "ROUNDS", 9)
    monkeypatch.setattr(Stopwatch, "microseconds", microseconds)
    return ran


def test_a_faster_candidate_replaces_the_built_in_one_and_the_file_states_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = timed(monkeypatch, {1: 8.0, 2: 9.0, 3: 10.0})
    result = run(tmp_path / "case.json", tokens=(4,))
    assert [(point.parameters["threads"], point.microseconds) for point in result.points] == [(1, 8.0)]
    # A warm-up of both before 9 rounds: 3 against 3, 1 against 3, 2 against 3, and 1 against 3 once more.
    assert len(ran) == 4 * 20 and [ran.count(threads) for threads in (1, 2, 3)] == [20, 10, 50]
    meta = json.loads((tmp_path / "case.meta.json").read_text())
    assert "alternating rounds" in meta["rule"] and meta["by"] == "a test"
    (reported,) = meta["judged"]
    assert reported["replaced"] and reported["best"]["parameters"] == {"threads": 1}
    assert reported["best"]["ratio"] == reported["best"]["again"] == {"median": 0.8, "low": 0.8, "high": 0.8}
    assert reported["built_in"] == {
        "parameters": {"threads": 3},
        "beside_itself": {"median": 1.0, "low": 1.0, "high": 1.0},
    }


def test_a_gain_within_the_margin_keeps_what_is_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = timed(monkeypatch, {1: 9.9, 2: 30.0, 3: 10.0})
    (point,) = run(tmp_path / "case.json", tokens=(4,)).points
    assert (point.parameters, point.microseconds) == ({"threads": 3}, 10.0)
    assert ran.count(1) == 1 + 2 and ran.count(2) == 1 + 2, "given up after two rounds without a gain"


@pytest.mark.parametrize(("is_killed", "after"), [(True, 3), (False, 3), (True, 5), (False, 5)])
def test_a_session_that_ends_before_or_after_the_rounds_of_the_best_goes_on_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool, after: int
) -> None:
    """Of two sizes: three candidates each, and the best once more."""
    timed(monkeypatch, {1: 8.0, 2: 9.0, 3: 10.0})
    path, compare, compared = tmp_path / "case.json", Stopwatch.compare, list[None]()

    def counted(self: Stopwatch, *args: Any, **more: Any) -> Any:
        compared.append(None)
        if is_killed and len(compared) == after + 1:
            raise KeyboardInterrupt
        return compare(self, *args, **more)

    monkeypatch.setattr(Stopwatch, "compare", counted)
    monkeypatch.setattr(session, "now", lambda: float(len(compared)))
    with pytest.raises(KeyboardInterrupt) if is_killed else nullcontext():
        first = run(path, tokens=(4, 8), budget=30.0 if is_killed else after - 0.5)
        assert not first.complete and first.points[0].parameters == {"threads": 3 if after == 3 else 1}
    result = run(path, tokens=(4, 8))
    assert (result.complete, result.measured + result.resumed, len(compared)) == (True, 6, 8 + is_killed)
    assert result.points[0].parameters == {"threads": 1} and not path.with_suffix(".part.jsonl").exists()


def test_runs_of_one_graph_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time, context = [0.0], CASE.context(CPU)
    space = space_of(ReferenceExperts, context, 1, 1)
    watch = Stopwatch(ReferenceExperts(context), stack(CASE, CPU), space, 9, 2)
    rows = watch._rows
    assert isinstance(rows, RowTokens) and [len({*ids}) for ids in rows.ids_RK.tolist()] == [2] * 9
    monkeypatch.setattr(session, "now", lambda: time[0])
    monkeypatch.setattr(watch, "runs", 4)
    microseconds = watch.microseconds(lambda: time.__setitem__(0, time[0] + 28e-6), space.candidates[0])
    assert microseconds == pytest.approx(7.0)


def test_what_cannot_be_tuned_is_refused() -> None:
    context = ExpertsContext(FP32, FP32, "silu", 4, 32, 16, torch.device("cuda"))
    with pytest.raises(UnsupportedError, match=r"ReferenceExperts declares no tuning space\n.*tuning_space"):
        space_of(ReferenceExperts, context, 1, 2)


def test_budgets_and_sizes_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens \[\] must be positive"):
        run(tmp_path / "case.json", tokens=())
    with pytest.raises(ConfigError, match=r"budget of 0 s"):
        run(tmp_path / "case.json", budget=0.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_threads_are_powers_of_two_and_all_cores(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


@pytest.mark.parametrize(
    "weights,activations,kinds", [("mxfp4", "plain", 6), ("mxfp4", "fp8", 6), ("fp8", "fp8", 12), ("int8", "int8", 6)]
)
def test_a_dry_run_states_what_a_gpu_would_try(weights: str, activations: str, kinds: int, tmp_path: Path) -> None:
    options = (
        f"--weights {weights} --activations {activations} --slots 32 --top-k 8 --tokens 1,1024 --device cuda --dry-run"
    )
    reported = json.loads(printed("tune", "triton", *options.split(), "--tuned-dir", tmp_path))
    assert reported["candidates"]["1"] == kinds and reported["candidates"]["1024"] > 3 and not list(tmp_path.iterdir())
    assert Path(reported["path"]).parent.name == "triton" and weights in reported["case"]


def test_the_command_measures_and_its_hint_can_be_run(tmp_path: Path) -> None:
    sizes = ["--hidden", "128", "--intermediate", "128", "--slots", "4"]
    options = ["tune", "cpu_native", *sizes, "--tuned-dir", str(tmp_path)]
    reported = json.loads(printed(*options, "--tokens", "1,4", "--json"))
    assert reported["complete"] and Path(reported["path"]).is_file()
    case = case_of(TuneOrder("cpu_native", 128, 128, 4, 2, (1,), "fp8", "plain", "bfloat16", "cpu", 1.0, None, False))
    hint = command_of(case).split()
    assert hint[0] == "moe-mk"
    reported_dry = json.loads(printed(*hint[1:], "--tuned-dir", tmp_path, "--dry-run"))
    assert reported_dry.pop("candidates").keys() == {"1", "4", "16", "64", "256"}
    assert reported_dry == {"case": case.name, "path": reported["path"]}
    assert moe_mk("tune", "torch_cpx", *sizes).exit_code == 2
    assert moe_mk("tune", "cpu_native", "--weights", "int7").exit_code == 2
    assert "must be a multiple of 128 with --weights fp8" in usage_error("tune", "cpu_native", "--intermediate", "64")


def test_a_backend_without_parameters_is_refused_at_once(tmp_path: Path) -> None:
    done = moe_mk("tune", "torch_cpu", "--tuned-dir", tmp_path / "tuned")
    assert done.exit_code == 3 and "have no parameters to tune" in done.stderr and "cpu_native" in done.stderr
    assert not (tmp_path / "tuned").exists()
