"""`moe-mk plan`: what it states of fabrics by hand, as text and as JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moe_mk.lab.cli import app
from moe_mk.lab.cli.words import SIMULATED, TIMED
from moe_mk.lab.plan.timeline import LINKS
from moe_mk.lab.testing.virtual_time import TRANSPORTS


def stated(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_an_exchange_is_predicted_with_what_it_stands_on() -> None:
    plain = stated("exchange", "--links", "p5en_efa", "--ranks", "32", "--nodes-kept", "4")
    assert plain.exit_code == 0
    assert "32 ranks on 4 nodes, 4096 tokens each" in plain.stdout
    assert "a line within" in plain.stdout and "rates of the links" in plain.stdout
    asked = ("exchange", "--links", "h800_cx7", "--ranks", "64", "--tokens", "128", "--mode", "latency", "--json")
    reported = json.loads(stated(*asked).stdout)
    assert reported["dispatch"]["bytes"] == 1024 * 7408 and reported["combine"]["bytes"] == 1024 * 14336
    assert reported["dispatch"]["us"] == pytest.approx(178, abs=3)  # 173 were measured with ten choices masked


def test_tables_set_published_rows_beside_predictions() -> None:
    rows = json.loads(stated("tables", "--json").stdout)
    by_row = {(row["links"], row["mode"], row["ranks"], row["direction"]): row for row in rows}
    assert len(rows) > 200
    one = by_row["p6_efa", "throughput", 32, "combine"]
    assert one["implied_mb"] == pytest.approx(212.3, abs=0.1) and one["bytes"] / 1e6 == pytest.approx(212.2, abs=0.1)
    assert abs(one["error"]) < 0.01
    assert by_row["h800_cx7", "latency", 16, "dispatch"]["published_us"] == 118
    text = stated("tables", "--links", "h800_cx7").stdout
    assert len(text.splitlines()) == 1 + 20 and "h800_cx7" in text


def test_a_device_suffices_and_errors_on_other_tables_are_stated() -> None:
    text = stated("exchange", "--device", "h200", "--ranks", "32").stdout
    assert "H200" in text and "fitted to h800_cx7" in text and "no constant was fitted to" in text
    wide = json.loads(stated("exchange", "--device", "b200", "--wire", "bf16", "--ranks", "8", "--json").stdout)
    assert wide["links"] == "b200" and wide["dispatch"]["bytes"] == wide["combine"]["bytes"]


def test_held_out_tables_are_listed_with_what_is_missed_and_why() -> None:
    found = stated("held-out")
    met = next(line for line in found.stdout.splitlines() if line.startswith("all met"))
    assert "6 tables that no constant was fitted to" in met and "h100_nccl_ep" in met and "p5en_efa" not in met
    rows = json.loads(stated("held-out", "--json").stdout)
    missed = [row for row in rows if abs(row["error"]) > 0.2]
    assert missed and all(row["why"] and row["source"] for row in missed)
    assert len([line for line in found.stdout.splitlines() if line.startswith("missed")]) == len(missed)
    by_row = {
        (r["links"], r["mode"], r["ranks"], r["direction"]): r for r in json.loads(stated("tables", "--json").stdout)
    }
    assert by_row["h100_nccl_ep", "latency", 64, "combine"]["held_out"] == pytest.approx(-0.013, abs=0.001)


def test_a_timeline_is_simulated_and_written(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    words = "timeline hierarchical --ranks 4 --ranks-per-node 2 --hidden 64 --num-experts 16".split()
    found = stated(*words, "--far", "efa", "--late", "1=300", "--trace", str(file))
    assert found.exit_code == 0, found.output
    assert "relay" in found.stdout and "hierarchical on nvlink and efa, 4 ranks on 2 nodes" in found.stdout
    spans = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"dispatch", "combine", "late", "wait dispatch counts"} <= {event["name"] for event in spans}
    reported = json.loads(stated(*words, "--json").stdout)
    assert reported["us"] < 300 and len(reported["waits_us"]) == 4
    assert stated(*words, "--late", "9=1").exit_code == 2 and "--late '9=1'" in stated(*words, "--late", "9=1").stderr
    assert TIMED.split(", ") == list(TRANSPORTS) and SIMULATED.split(", ") == list(LINKS)


def test_a_relay_and_volumes() -> None:
    reported = json.loads(stated("relay", "--nodes-kept", "4", "--json").stdout)
    assert (round(reported["mesh_us"], 1), round(reported["relayed_us"], 1)) == (86.1, 46.3)
    assert "1.86 x" in stated("relay", "--nodes-kept", "4").stdout
    volumes = stated("volumes", "--ranks", "144").stdout
    assert "58,720,256 values a rank, 4,096 tokens held" in volumes and "0.05556" in volumes


def test_paths_compare_initiators_and_collectives() -> None:
    text = stated("paths", "--device", "h100", "--ranks", "32", "--tokens", "128").stdout
    assert "by a CPU proxy" in text and "driven by the host" in text and "one-sided" in text
    assert "CPU proxy" not in stated("paths", "--ranks", "8").stdout  # the fit starts at two nodes


@pytest.mark.parametrize(
    "asked, reported",
    [
        (["exchange", "--device", "a100"], "no link profile of device 'a100'"),
        (["exchange", "--device", "h100", "--links", "p6_efa"], "both name a fabric"),
        (["exchange", "--links", "h800_cx"], "did you mean 'h800_cx7'"),
        (["exchange", "--ranks", "12"], "12 ranks do not fill nodes of 8"),
        (["exchange", "--mode", "fast"], "--mode 'fast' is unknown"),
        (["relay", "--nodes-kept", "9"], "nodes_kept=9 is not in [1, 8]"),
    ],
)
def test_what_is_out_of_range_is_refused(asked: list[str], reported: str) -> None:
    found = stated(*asked)
    assert found.exit_code == 2 and reported in found.stderr
