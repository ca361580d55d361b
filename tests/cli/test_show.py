"""What is printed: subsets say so, every pair has its reasons, lists of experts stay short."""

import re

import pytest
from rich.console import Console

from moe_mk.config.problem import Problem
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.lab.cli.measure import StageTimes
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.cli.show import listed, sent_bytes, show_decision, show_pairs, stage_table, subset_note
from moe_mk.oracle import select
from moe_mk.oracle.verdict import explain_pairs
from moe_mk.quant.plain import BF16


def test_fewer_experts_than_the_model_say_what_that_changes() -> None:
    config = load_config("deepseek_v3")
    assert subset_note(config) == ""
    assert subset_note(config.with_(num_experts=32)) == (
        "32 of the 256 experts of deepseek_v3, in 8 groups of 4, not 8 of 32: tokens are routed among these only"
    )
    assert subset_note(config.with_(name="of my own", num_experts=32)) == ""


def test_every_pair_that_serves_and_every_reason_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(load_config("deepseek_v3").with_(ep=4), device_profile("h200"), BF16, 128, frozenset())
    decision = select(problem)
    show_decision(Screen(), decision)
    out = " ".join(capsys.readouterr().out.split())
    assert f"decision {decision.chosen.name}: {decision.because}" in out
    assert out.count(" * ") == 1
    screen = Screen()
    screen.console.width = 72
    show_pairs(screen, decision.verdicts)
    rows = capsys.readouterr().out.splitlines()
    assert " ".join(rows).split() == " ".join(explain_pairs(decision.verdicts)).split()
    assert max(map(len, rows)) <= 72, "wrapped to the width of the terminal"
    assert len(explain_pairs(decision.verdicts)) < len(decision.verdicts), "reasons of many pairs are printed once"


def test_lists_of_experts_stay_short() -> None:
    assert listed(tuple(range(16))) == "0-15" and listed(()) == ""
    assert listed((0, 2, 4)) == "0, 2, 4"
    shortened = listed(tuple(range(0, 256, 2)))
    assert shortened.endswith(", ... (128)") and len(shortened) < 75


def test_a_table_has_a_column_for_each_kind_of_batch(capsys: pytest.CaptureFixture[str]) -> None:
    stages = {"route": 1.0, "shared": 2.0}
    Console(width=140).print(stage_table(StageTimes(stages, 3.25, (64, 0)), StageTimes(stages, 3.5, (1, 0))))
    out = capsys.readouterr().out
    assert "prefill 64+0 tok" in out and "decode 1+0 tok" in out
    assert re.search(r"shared, during dispatch +2\.00 +2\.00", out) and re.search(r"forward +3\.25 +3\.50", out)
    Console(width=140).print(stage_table(StageTimes(stages, 3.25, (64,)), None))
    assert re.search(r"shared +2\.00\n", re.sub(" +\n", "\n", capsys.readouterr().out)), "nothing travels on one rank"


def test_what_a_library_sends_by_itself_is_not_called_nothing() -> None:
    def decided(name: str) -> dict[str, dict[str, object]]:
        return {"chosen": {"prepare_finalize": name}, "bytes": {"dispatch": 7456, "combine": 14336}}

    assert sent_bytes({"dispatch": 7456}, decided("all_to_all")) == "dispatch 7.46 kB (rank 0, one prefill)"
    assert sent_bytes({}, decided("inside")) == "nothing (rank 0, one prefill)"
    planned = "planned 7.46 kB dispatch, 14.3 kB combine per rank"
    assert sent_bytes({}, decided("nvlink_one_sided")) == f"not counted (sent by flashinfer); {planned}"
