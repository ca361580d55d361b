"""`moe-mk place`: from a recording of expert loads to a placement, reported, compared and drawn."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_mk.errors import ConfigError
from moe_mk.lab.cli.loads import read_loads
from moe_mk.lab.cli.place import (
    DEEPSEEK_V3_EXPERT,
    PRESETS,
    Offer,
    PlaceOrder,
    in_order,
    mark_best,
    policies_of,
    speeds_of,
    topology_of,
)
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.lab.trace.traffic import NodesPerToken
from moe_mk.placement.eplb import Topology, plan, slot_loads
from moe_mk.text import amount
from tests.cli.conftest import moe_mk, printed, rows_of, usage_error
from tests.support.routing_cases import group_limited

# Two layers of four experts; the hot one takes half of all tokens.
LOADS = [[6, 2, 2, 2], [1, 1, 1, 3]]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps({"logical_count": LOADS, "rank": 0}))
    return file


def skewed(path: Path, windows: int = 1) -> Path:
    """A look-alike of a recording: 6 layers of 256 experts, the busiest at several times the mean."""
    draw = np.random.default_rng(5)
    lasting = draw.lognormal(0.0, 0.85, (6, 256))
    np.save(path, (lasting * draw.lognormal(0.0, 0.05, (windows, 6, 256)) * 1000).round())
    return path


def test_every_format_gives_the_same_numbers(tmp_path: Path, loads: Path) -> None:
    np.save(tmp_path / "loads.npy", np.array(LOADS))
    save_file({"load": torch.tensor(LOADS)}, tmp_path / "loads.safetensors")
    (tmp_path / "bare.json").write_text(json.dumps(LOADS))
    for file in (loads, tmp_path / "loads.npy", tmp_path / "loads.safetensors", tmp_path / "bare.json"):
        assert read_loads(file).tolist() == [LOADS]


@pytest.mark.parametrize(("name", "content", "states"), [
    ("a.json", "{", "cannot be read"),
    ("a.json", '{"a": [1], "b": [2]}', r"holds \['a', 'b'\], none of them called logical_count or load"),
    ("a.json", "[[1, -2]]", "values from -2.0 to 1.0; counts are 0 or more"),
    ("a.json", "[[[[1]]]]", r"has shape \(1, 1, 1, 1\), expected"), ("a.json", "[[1], [1, 2]]", "cannot be read"),
    ("a.csv", "1", "ends in '.csv', known are .json, .npy, .safetensors"),
    ("a.pt", "1", "cannot be read as tensors and plain containers"), ("a.safetensors", "1", "cannot be read"),
])  # fmt: skip
def test_a_file_that_is_no_recording_is_refused_by_what_it_holds(
    tmp_path: Path, name: str, content: str, states: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=states):
        read_loads(tmp_path / name)


def test_a_recording_of_sglang_is_read_as_data(tmp_path: Path) -> None:
    windows = torch.tensor([LOADS, LOADS])
    torch.save({"rank": 0, "logical_count": windows, "average_utilization_rate_over_window": None}, tmp_path / "a.pt")
    assert read_loads(tmp_path / "a.pt").tolist() == windows.tolist()


def test_speeds_by_hand() -> None:
    assert speeds_of("1*2,0.5", 3) == (1.0, 1.0, 0.5) and speeds_of(None, 3) is None
    with pytest.raises(ConfigError, match="--speeds names 2 GPUs, there are 3"):
        speeds_of("1,1", 3)
    with pytest.raises(ConfigError, match="--speeds 'fast' is no list of numbers"):
        speeds_of("fast", 1)


def test_an_engine_starts_with_experts_in_order() -> None:
    # Six slots for four experts: 0 and 1 once more. 6/2 + 2/2 | 2 + 2 | 6/2 + 2/2: even by luck in layer 0.
    ledger = in_order(np.array([LOADS], np.float64), Topology(3, slots=2))
    assert ledger.phy2log[0].tolist() == [0, 1, 2, 3, 0, 1] and ledger.share[0].tolist() == [0.5, 0.5, 1, 1, 0.5, 0.5]
    with pytest.raises(ConfigError, match="3 slots cannot hold 4 experts; use --slots 2 or more on 3 GPUs"):
        in_order(np.array([LOADS], np.float64), Topology(3, slots=1))


def test_a_misspelt_policy_is_guessed() -> None:
    assert policies_of("all")[0] == "auto" and set(policies_of("all")[1]) == {"compat", "flat", "hybrid"}
    with pytest.raises(ConfigError, match="--policy 'hybird' is unknown.*hybrid"):
        policies_of("hybird")


@pytest.mark.row(124, 126)
def test_json_holds_the_placement_and_its_price(tmp_path: Path) -> None:
    stated = moe_mk("place", "--loads", skewed(tmp_path / "l.npy"), "--preset", "prefill-ep32", "--groups", 8, "--json")
    answer = json.loads(stated.output)
    assert answer["before"]["balance.rank_max_over_mean"] > 1.3
    assert answer["after"]["balance.rank_max_over_mean_worst"] < 1.01
    assert answer["slots_per_gpu"] == [9] * 32
    slots = answer["physical_to_logical"]
    assert len(slots) == 6 and all(len(row) == 288 and set(row) == set(range(256)) for row in slots)
    for row, shares in zip(slots, answer["share"], strict=True):
        assert np.bincount(row, shares) == pytest.approx(np.ones(256), abs=1e-4)
    chosen = answer["chosen"]
    assert chosen["bytes_per_gpu"] == [6 * 9 * DEEPSEEK_V3_EXPERT] * 32
    assert chosen["moved_bytes"] == chosen["moved_experts"] * DEEPSEEK_V3_EXPERT
    assert [each["policy"] for each in answer["compared"]] == ["compat", "flat", "hybrid"]


@pytest.mark.row(125)
def test_decode_over_144_gpus_reports_what_no_placement_can_beat(tmp_path: Path) -> None:
    stated = moe_mk(
        "place", "--loads", skewed(tmp_path / "l.npy"), "--preset", "decode-ep144", "--policy", "auto", "--json"
    )
    answer = json.loads(stated.output)
    assert answer["slots_per_gpu"] == [2] * 144 and answer["compared"] == []
    assert answer["chosen"]["balance_mean"] <= answer["chosen"]["bound_mean"] + 1e-9 < 1.0
    assert "would make any load even" in answer["chosen"]["reason"]


def test_the_picture_is_written(tmp_path: Path, loads: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    stated = printed("place", "--loads", loads, "--gpus", 2, "--plot", tmp_path / "before_after.png")
    assert "not hybrid" in stated and "there is only one node" in stated
    assert (tmp_path / "before_after.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_missing_or_impossible_is_reported_without_a_traceback(loads: Path) -> None:
    for words, states in (
        (("--loads", loads), "--gpus is missing"),
        (("--loads", loads, "--preset", "prefil"), "did you mean"),
        (("--loads", loads, "--gpus", 3, "--nodes", 2), "gpus=3 does not divide by nodes=2"),
        (("--loads", loads, "--gpus", 2, "--min-copies", 3), "min_copies=3 needs as many different living GPUs"),
        (("--loads", "nowhere.json", "--gpus", 2), "is not a file"),
    ):
        assert states in usage_error("place", *words)


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("given", list(product((None, 36), (None, 2), (None, 11), (None, 77))))
def test_what_is_given_goes_before_a_preset(preset: str | None, given: tuple[int | None, ...]) -> None:
    gpus, nodes, slots, size = given
    default = PRESETS[preset] if preset else (6, 1, -(-(256 + (gpus or 6) - 1) // (gpus or 6)))
    order = PlaceOrder(gpus=gpus if preset or gpus else 6, nodes=nodes, slots=slots, expert_bytes=size, preset=preset)
    topology, expert_bytes = topology_of(order, 256)
    wanted = tuple(own or other for own, other in zip((gpus, nodes, slots), default, strict=True))
    assert (topology.gpus, topology.nodes, set(topology.slots_W.tolist())) == (*wanted[:2], {wanted[2]})
    assert expert_bytes == (size or (DEEPSEEK_V3_EXPERT if preset else 0))


def routed(num_ranks: int = 1) -> RoutingTrace:
    return group_limited(experts=64, groups=4, kept=2, top_k=4, layers=2, steps=2, tokens=400, ranks=num_ranks)


WORDS = ("--gpus", 8, "--nodes", 4, "--slots", 10)


@pytest.mark.row(126)
def test_a_trace_reports_loads_groups_and_what_crosses_nodes(tmp_path: Path) -> None:
    trace = routed()
    trace.write(tmp_path / "t.safetensors")
    answer = json.loads(moe_mk("place", "--trace", tmp_path / "t.safetensors", *WORDS, "--json").output)
    same = plan(trace.loads(), Topology(8, 4, 10), groups=4, old=in_order(trace.windows(1), Topology(8, 4, 10)).phy2log,
                min_gain=0.0, move_cost=0.0)  # fmt: skip
    assert answer["physical_to_logical"] == same.phy2log.tolist() and answer["chosen"]["policy"] == "hybrid"
    found = trace.nodes_per_token(same, Topology(8, 4, 10))
    assert answer["chosen"]["remote_nodes_per_token"] == pytest.approx(found.remote)
    assert answer["chosen"]["nodes_per_token"] == pytest.approx(found.all)
    lost, exported = float(same.lost_XW.max()), float(same.exported_X.mean())
    assert (answer["chosen"]["lost_with_worst_gpu"], answer["chosen"]["lent_to_other_nodes"]) == (lost, exported)
    assert answer["chosen"]["balance_worst"] == same.balance_X.min() < same.balance_X.mean()
    moved = answer["chosen"]["moved_experts"], answer["chosen"]["rounds"], answer["chosen"]["bound_mean"]
    assert moved == (same.moves.transfers, same.moves.rounds, same.bound_X.mean())
    # Planned on the first step, judged on the second.
    first, second = (trace.filter(steps=[step]).loads() for step in trace.steps)
    gpu_XW = slot_loads(plan(first, Topology(8, 4, 10), groups=4), second).reshape(2, 8, 10).sum(2)
    later = gpu_XW.max(1).sum() / gpu_XW.mean(1).sum()
    assert answer["chosen"]["later_step_over_ideal"] == pytest.approx(later) and later > 1.0
    far = {each["policy"]: each["remote_nodes_per_token"] for each in answer["compared"]}
    assert far["hybrid"] < far["flat"] <= 3.0 + 1e-9
    pareto = {each["name"]: each for each in answer["pareto"]}
    assert list(pareto) == ["in order", "auto: hybrid", "compat", "flat"]
    assert pareto["in order"]["moved_experts"] == 0 and pareto["in order"]["best"]
    assert pareto["flat"]["step_over_ideal"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.row(126, "N11")
def test_what_is_printed_is_what_is_reported_as_json(tmp_path: Path) -> None:
    routed(num_ranks=8).write(tmp_path / "t.safetensors")
    words = ("place", "--trace", tmp_path / "t.safetensors", *WORDS, "--policy", "all", "--expert-bytes", 1000)
    text, found = printed(*words), json.loads(printed(*words, "--json"))
    assert "12800 rows of 4 experts in 32 forwards of 8 ranks" in text
    assert "2 layers of 64 experts, 2 windows" in text and "8 GPUs on 4 nodes, 10 slots per GPU, 80 in total" in text
    for label in ("before", "after"):
        of = {key.removeprefix("balance."): value for key, value in found[label].items()}
        peaks = f"{of['rank_max_over_mean']:.3f} x mean, worst layer {of['rank_max_over_mean_worst']:.3f} x"
        assert f"{label:<12}busiest GPU {peaks}; expert CV {of['expert_cv']:.3f}\n" in text
    made = [found["chosen"], *found["compared"]]
    for one, row in zip(made, rows_of(text, "policy"), strict=True):
        balance = [1 / one["later_step_over_ideal"] if key is None else one[key] for key in BALANCE]
        moved = f"{one['moved_experts']} ({amount(one['moved_bytes'])})"
        shares = [f"{one[key]:.1%}" for key in ("lent_to_other_nodes", "lost_with_worst_gpu")]
        assert list(row.values())[1:] == [*(f"{each:.4f}" for each in balance), moved, str(one["rounds"]), *shares]
    held = f"{amount(max(found['chosen']['bytes_per_gpu']))} of experts on a GPU"
    assert f"{held}, maps {amount(found['chosen']['map_bytes'])}\n" in text and found["chosen"]["reason"] in text
    nodes = {one["policy"]: one["nodes_per_token"] for one in made}
    for one, row in zip(found["pareto"], rows_of(text, "placement"), strict=True):
        moved = f"{one['moved_experts']} ({amount(one['moved_bytes'])})"
        cells = [one["name"], f"{1 / one['step_over_ideal']:.4f}", moved, f"{one['remote_nodes_per_token']:.3f}"]
        assert [row[key] for key in ("placement", "balance", "moved", "remote nodes per token")] == cells
        assert row["Pareto"] == "*" * one["best"]
        if one["name"] != "in order":
            assert row["nodes per token"] == f"{nodes[one['name'].removeprefix('auto: ')]:.3f}"


BALANCE = ("balance_mean", "balance_worst", "bound_mean", None)


def test_offers_by_hand() -> None:
    def offer(name: str, time: float, moved: int, remote: float) -> Offer:
        return Offer(name, time, moved, moved, NodesPerToken(remote + 1, remote))

    # b is beaten by a; c moves less, d is nearer; e is as good as a in every way and stays.
    offers = [offer("a", 1.0, 9, 2.0), offer("b", 1.1, 9, 2.0), offer("c", 1.2, 0, 2.0), offer("d", 1.2, 9, 1.0),
              offer("e", 1.0 + 1e-9, 9, 2.0)]  # fmt: skip
    assert [each.name for each in mark_best(offers) if each.best] == ["a", "c", "d", "e"]
    without = [Offer("a", 1.0, 9, 0, None), Offer("b", 1.1, 9, 0, None)]
    assert [each.best for each in mark_best(without)] == [True, False]


def test_a_phase_of_a_trace_is_placed_alone(tmp_path: Path) -> None:
    trace = routed()
    trace.write(tmp_path / "t.safetensors")
    one = moe_mk("place", "--trace", tmp_path / "t.safetensors", *WORDS, "--phase", "decode", "--policy", "flat")
    assert "1600 rows" not in one.output and "800 rows of 4 experts in 2 forwards of 1 rank" in one.output


def test_traces_of_other_programs_are_placed_too(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 64, (2, 50, 4))
    np.save(tmp_path / "ids.npy", ids)
    words = ("place", "--trace", tmp_path / "ids.npy", *WORDS, "--policy", "flat")
    assert "pass num_experts, 64 or more" in moe_mk(*words).output
    assert "2 layers of 64 experts, 1 window" in printed(*words, "--experts", 64)


def test_what_a_trace_cannot_be_asked_is_stated(tmp_path: Path, loads: Path) -> None:
    routed().filter(phase="prefill").write(tmp_path / "t.safetensors")
    for words, states in (
        (("--gpus", 2), "give --loads or --trace"),
        (("--loads", loads, "--trace", loads, "--gpus", 2), "--loads and --trace are both given; use one"),
        (("--loads", loads, "--phase", "decode", "--gpus", 2), "--phase only apply to --trace"),
        (("--trace", tmp_path / "t.safetensors", *WORDS, "--phase", "decode"), "has no tokens of phase decode"),
        (("--trace", tmp_path / "t.safetensors", *WORDS, "--phase", "decod"), "did you mean 'decode'"),
        (("--trace", tmp_path / "nowhere.safetensors", *WORDS), "is not there"),
    ):
        assert states in usage_error("place", *words)


@pytest.mark.row(9)
def test_a_run_writes_a_trace_that_place_reads(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    stated = moe_mk("run", tiny, "--tokens", 6, "--repeats", 1, "--record-trace", file, "--out", tmp_path / "r.json")
    assert stated.exit_code == 0, stated.output
    trace, report = RoutingTrace.read(file), json.loads((tmp_path / "r.json").read_text())
    assert [(f.step, f.layer, f.phase, len(f.ids_TK)) for f in trace.forwards()] == [
        (0, 3, "prefill", 6), (1, 3, "decode", 1),
    ]  # fmt: skip
    assert trace.filter(phase="prefill").loads()[0].tolist() == report["expert_load"]
    assert (trace.facts.num_experts, trace.facts.top_k, trace.facts.num_groups) == (32, 8, 8)
    stated = moe_mk("place", "--trace", file, "--gpus", 4, "--nodes", 2, "--json")
    assert stated.exit_code == 0 and json.loads(stated.output)["chosen"]["remote_nodes_per_token"] <= 1.0, stated.output
