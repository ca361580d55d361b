"""`moe-mk plan`: text, JSON and the models beneath state the same, every option counts, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moe_mk.config import device_profile
from moe_mk.lab.cli import app
from moe_mk.lab.cli.words import SIMULATED, TIMED
from moe_mk.lab.plan.exchange import Exchange
from moe_mk.lab.plan.links import link_profile
from moe_mk.lab.plan.paths import dispatch_us
from moe_mk.lab.plan.predict import DIRECTIONS, exchange_of, held_out, predict, published_us
from moe_mk.lab.plan.timeline import LINKS, simulate
from moe_mk.lab.plan.two_level import Relay
from moe_mk.lab.testing.virtual_time import TRANSPORTS, record, uniform_routings
from moe_mk.text import amount
from tests.cli.conftest import rows_of


def stated(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


OPTIONS = {
    "exchange": "--links=p6_efa --device=h200 --ranks=64 --tokens=100 --mode=latency --num-experts=512 --top-k=4 "
    "--hidden=4096 --nodes-kept=2 --wire=bf16 --combine-wire=fp8",
    "timeline": "all_to_all_p2p --ranks=4 --ranks-per-node=2 --tokens=4 --near=ascend_hccs --far=efa --num-experts=16 "
    "--top-k=2 --hidden=128 --nodes-kept=1 --wire=fp8 --late=1=300",
    "relay": "--links=h800_cx7 --nodes=4 --tokens=100 --nodes-kept=2 --top-k=4 --hidden=4096",
    "volumes": "--tokens=100 --hidden=50 --top-k=3 --ranks=7",
    "paths": "--device=FILE --ranks=64 --tokens=100 --top-k=4 --hidden=4096",
}
"""Every option of a verb with a value that is not its default."""


def test_an_exchange_is_predicted_with_what_it_stands_on() -> None:
    words = ("exchange", *(each for each in OPTIONS["exchange"].split() if not each.startswith(("--device", "--mode"))))
    reported, text = json.loads(stated(*words, "--json").stdout), stated(*words).stdout
    asked = {"links": "p6_efa", "ranks": 64, "tokens": 100, "mode": "throughput", "wire": "bf16", "combine_wire": "fp8"}
    assert asked.items() <= reported.items()
    exchange = Exchange(100, 64, 8, 4096, 4, 512, 2, wire="bf16", combine_wire="fp8")
    for direction, wire in (("dispatch", "bf16"), ("combine", "fp8")):
        found = predict(link_profile("p6_efa"), exchange, "throughput", direction)  # type: ignore[arg-type]
        assert reported[direction] == {
            "us": found.us, "bytes": found.num_bytes, "remote_bytes": found.remote_bytes,
            "logical_gbs": found.logical_gbs, "basis": found.basis,
        }  # fmt: skip
        sent = f"{amount(found.num_bytes)} of {wire} rows ({amount(found.remote_bytes)} to other nodes)"
        assert f"{direction:<12}{found.us:.0f} us, {sent}, {found.logical_gbs:.0f} GB/s; {found.basis}\n" in text
    assert f"{link_profile('p6_efa').about}: 64 ranks on 8 nodes, 100 tokens each" in text
    latency = json.loads(stated(*words, "--mode=latency", "--json").stdout)
    assert latency["mode"] == "latency" and latency["dispatch"]["bytes"] == 100 * 4 * (2 * 4096 + 16)
    wide = json.loads(stated("exchange", "--device", "b200", "--wire", "bf16", "--ranks", "8", "--json").stdout)
    assert wide["links"] == "b200" and wide["dispatch"]["bytes"] == wide["combine"]["bytes"]


def test_tables_set_published_rows_beside_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("h100_nccl_ep", "h800_cx7", "p6_efa")
    monkeypatch.setattr("moe_mk.lab.cli.predict.shipped_links", lambda: dict.fromkeys(names))
    without = {(e.profile.name, e.row, e.direction): e for e in held_out()}
    rows, printed = json.loads(stated("tables", "--json").stdout), rows_of(stated("tables").stdout, "fabric")
    each_row = [(p, row, way) for p in map(link_profile, names) for row in p.measured for way in DIRECTIONS]
    assert len(rows) == len(printed) == len(each_row) > 30
    for (profile, row, way), one, cells in zip(each_row, rows, printed, strict=True):
        size, own = exchange_of(profile, row).num_bytes(row.mode, way), without.get((profile.name, row, way))
        us, gbs, found = row.us(way), row.gbs(way), predict(profile, exchange_of(profile, row), row.mode, way)
        real = us or (size / gbs / 1e3 if gbs else None)
        implied, error = us and gbs and us * gbs / 1e3, real and found.us / real - 1
        values = [size, us, gbs, implied, found.us, error, own and own.predicted_us / own.published_us - 1]
        names = ["bytes", "published_us", "published_gbs", "implied_mb", "line_us", "error", "held_out"]
        about = {"links": profile.name, "mode": row.mode, "ranks": row.ranks, "direction": way}
        assert one == pytest.approx(about | dict(zip(names, values, strict=True)))
        forms = [".1f", ".0f", ".0f", ".1f", ".0f", "+.1f", "+.1f"]
        scaled = [v and v * by for v, by in zip(values, [1e-6, 1, 1, 1, 1, 100, 100], strict=True)]
        assert [cell.removesuffix(" %") for cell in list(cells.values())[4:]] == [
            "-" if v is None else format(v, f) for v, f in zip(scaled, forms, strict=True)
        ]
        assert list(cells.values())[:4] == [profile.name, row.mode, str(row.ranks), way]


def test_held_out_tables_are_listed_with_what_is_missed_and_why() -> None:
    text, found = stated("held-out").stdout, held_out()
    rows, printed = json.loads(stated("held-out", "--json").stdout), rows_of(text, "table")
    assert [(r["links"], r["ranks"], r["direction"], r["predicted_us"], r["published_us"]) for r in rows] == [
        (e.profile.name, e.row.ranks, e.direction, e.predicted_us, e.published_us) for e in found
    ]
    whole = []
    for cells in printed:
        own = [row for row in rows if row["links"] == cells["table"]]
        met, worst = sum(abs(row["error"]) <= 0.2 for row in own), max((row["error"] for row in own), key=abs)
        assert cells["links"] == ", ".join(filter(None, (own[0]["near"], own[0]["far"])))
        assert (cells["values"], cells["within 20 %"]) == (str(len(own)), str(met))
        assert cells["fitted"] == ("other rows" if own[0]["table_is_fitted"] else "no")
        assert cells["worst"] == f"{100 * worst:+.1f} %"
        profile = link_profile(cells["table"])
        published = sum(published_us(profile, row, way) is not None for row in profile.measured for way in DIRECTIONS)
        whole += [profile.name] * (not own[0]["table_is_fitted"] and met == len(own) == published)
    assert {cells["table"] for cells in printed} == {row["links"] for row in rows}
    assert f"{len(whole)} tables that no constant was fitted to: {', '.join(whole)}\n" in text
    missed = [row for row in rows if abs(row["error"]) > 0.2]
    assert missed and all(row["why"] and row["source"] for row in missed)
    lines = [line for line in text.splitlines() if line.startswith("missed")]
    for row, line in zip(missed, lines, strict=True):
        times = f"published {row['published_us']:.0f} us, predicted {row['predicted_us']:.0f}, "
        assert f"{row['links']}: {row['mode']}, {row['ranks']} ranks, {row['direction']} of " in line
        assert f"{times}{100 * row['error']:+.1f} %; {row['why']}" in line
    assert stated("held-out", "--rows").stdout.count("\nmet ") == len(rows) - len(missed)


def test_a_timeline_is_simulated_and_written(tmp_path: Path) -> None:
    file, words = tmp_path / "timeline.json", ("timeline", *OPTIONS["timeline"].split())
    found, reported = stated(*words, "--trace", file), json.loads(stated(*words, "--json").stdout)
    routings = uniform_routings(4, 4, 16, 2, ranks_per_node=2, nodes_kept=1)
    recorded = record(
        "all_to_all_p2p", routings, num_experts=16, ranks_per_node=2, hidden_size=128, wire="fp8", late_us={1: 300.0}
    )
    timeline = simulate(recorded.recording, LINKS["ascend_hccs"], LINKS["efa"])
    assert reported == {"us": timeline.us, "phases": list(timeline.table()), "waits_us": timeline.waits()}
    assert json.loads(file.read_text()) == timeline.chrome() and f"{file}, for ui" in found.stdout
    for row, cells in zip(timeline.table(), rows_of(found.stdout, "phase"), strict=True):
        sizes = [amount(row[f"{link}_bytes"]) for link in ("near", "far")]
        times = [f"{row[name]:.1f}" for name in ("begins_us", "ends_us", "limit_us", "longest_wait_us")]
        assert list(cells.values()) == [row["phase"], str(row["messages"]), *sizes, *times]
    assert (
        f"{timeline.us:.1f} us: all_to_all_p2p on ascend_hccs and efa, 4 ranks on 2 nodes, 4 tokens each"
        in found.stdout
    )
    assert stated(*words, "--late", "9=1").exit_code == 2 and "--late '9=1'" in stated(*words, "--late", "9=1").stderr
    assert TIMED.split(", ") == list(TRANSPORTS) and SIMULATED.split(", ") == list(LINKS)


def test_a_relay_volumes_and_paths(tmp_path: Path) -> None:
    words, relay = ("relay", *OPTIONS["relay"].split()), Relay(link_profile("h800_cx7"), 100, 4, 4096, 4, nodes_kept=2)
    between, inside = relay.legs_us
    reported, text = json.loads(stated(*words, "--json").stdout), stated(*words).stdout
    assert reported == {
        "mesh_us": relay.mesh_us, "between_us": between, "inside_us": inside, "relayed_us": relay.relayed_us,
        "pipelined_us": relay.pipelined_us, "gain": relay.gain,
    }  # fmt: skip
    assert f"{relay.mesh_us:.1f} us for {amount(relay.mesh_bytes)}\n" in text
    assert f"{between:.1f} us between nodes + {inside:.1f} us inside = {between + inside:.1f} us\n" in text
    assert f"between {max(between, inside):.1f} and {between + inside:.1f} us\n" in text
    assert f"{relay.mesh_us / (between + inside):.2f} x\n" in text
    # 2 x 100 x 50 values of an all-reduce, 3/7 of them by expert parallelism; 100 tokens, or 15 on the fullest of 7.
    volumes = stated("volumes", *OPTIONS["volumes"].split()).stdout
    assert "10,000 values a rank, 100 tokens held" in volumes and "4,286 values a rank, 15 tokens held" in volumes
    assert "0.4286; expert parallelism sends less beyond 3 ranks" in volumes
    device = device_profile("h100").model_copy(update={"ranks_per_node": 4, "collective_us": 31.0, "launch_us": 7.0})
    (tmp_path / "x.yaml").write_text(device.model_dump_json(exclude_none=True))
    text = stated("paths", *OPTIONS["paths"].replace("FILE", str(tmp_path / "x.yaml")).split()).stdout
    wire = 100 * 4 * 4096 / device.inter_node_gbs / 1e3
    host = 3 * device.collective_us + 2 * 63 * device.launch_us + wire
    proxy, gpu = (dispatch_us(by, 100, 64, top_k=4, ranks_per_node=4) for by in ("cpu_proxy", "gpu"))  # type: ignore[arg-type]
    assert f"{proxy:.0f} us by a CPU proxy, {gpu:.0f} us by the GPU" in text
    assert f"{host:.0f} us driven by the host, {wire:.0f} us of them bytes" in text
    assert f"one-sided   {device.launch_us + wire:.0f} us" in text
    assert "CPU proxy" not in stated("paths", "--ranks", "8").stdout  # the fit starts at two nodes


@pytest.mark.parametrize("asked, reported", [
    (["exchange", "--device", "a100"], "no link profile of device 'a100'"),
    (["exchange", "--device", "h100", "--links", "p6_efa"], "both name a fabric"),
    (["exchange", "--links", "h800_cx"], "did you mean 'h800_cx7'"),
    (["exchange", "--ranks", "12"], "12 ranks do not fill nodes of 8"),
    (["exchange", "--mode", "fast"], "--mode 'fast' is unknown"),
    (["relay", "--nodes-kept", "9"], "nodes_kept=9 is not in [1, 8]"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(asked: list[str], reported: str) -> None:
    found = stated(*asked)
    assert found.exit_code == 2 and reported in found.stderr
