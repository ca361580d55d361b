"""The smallest changes that make a backend eligible, against an exhaustive search through the same oracle."""

import json
from functools import partial
from itertools import combinations

import pytest

from moe_mk import ConfigError, Problem
from moe_mk.lab.plan import wanted
from moe_mk.lab.plan.wanted import Change, Way, ways_to
from tests.cli.conftest import moe_mk, printed
from tests.support import problems

problem = partial(problems.problem, device="h200", num_tokens=128)


def stated(given: Problem, want: str, **limits: object) -> list[list[str]]:
    return [[str(change) for change in way.changes] for way in ways_to(given, want, **limits)[0]]  # type: ignore[arg-type]


def test_what_is_eligible_needs_no_change() -> None:
    assert stated(problem(ep=8, installed=("triton",)), "all_to_all + triton") == [[]]


def test_changes_by_hand() -> None:
    # DeepEP's low-latency kernels need their library, and windows for kernel.max_num_tokens that fit their queues.
    for batch in (128, 1024):  # a larger one is cut to the limit
        asked = problem(ep=8, installed=("triton",), num_tokens=batch)
        ways = stated(asked, "deepep_ll + triton", other_devices=False)
        assert ["kernel.max_num_tokens = 256", "install deep_ep"] in ways
        assert all("install deep_ep" in way for way in ways)
    assert stated(problem(device="cpu", ep=16), "one_sided + torch_cpu", other_devices=False)[0] == [
        "parallel.ranks_per_node = 16"
    ]
    (found,) = stated(problem(ep=8), "all_to_all + cpu_native")
    assert set(found) == {"install c++", "device cpu"}
    assert stated(problem(ep=8, graphs=True, installed=("triton",)), "all_to_all + triton") == [
        ["kernel.graphs = false"]
    ]


def test_another_device_is_no_change_where_it_is_excluded() -> None:
    ways, reasons = ways_to(problem(ep=8), "cpu_native", most_changes=2, other_devices=False)
    assert not ways and reasons == ["device: runs on cpu, this device is cuda"], "those of the nearest set"
    kinds = "setting", "package", "device"
    weights = [Way(tuple(Change(kinds[at], "") for at in each), decision=None).weight for each in ((1, 1), (0, 2))]
    assert weights == sorted(weights), "another device is the last resort"


@pytest.mark.row("N2")
@pytest.mark.parametrize("given, want", [
    ({"ep": 1, "graphs": True}, "deepep_ht + triton"),
    ({"ep": 8, "deterministic": True, "tiles": 2}, "deepep_ll + triton"),
    ({"ep": 4, "graphs": True, "invariant": True}, "replicated + triton"),
    ({"device": "mi300x", "ep": 8, "num_tokens": 2048, "graphs": True}, "deepep_ht + triton"),
    ({"device": "cpu", "ep": 1}, "hierarchical + torch_cpu"),
])  # fmt: skip
def test_no_smaller_set_suffices_and_none_of_that_size_is_missed(
    given: dict[str, object], want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        wanted, "FREE", {n: wanted.FREE[n] for n in ("graphs", "deterministic", "invariant", "wire", "tiles")}
    )
    monkeypatch.setattr(wanted, "EP_SIZES", (1, 2, 8, 16))
    asked = problem(**given)  # type: ignore[arg-type]
    pairs = list(wanted._pairs(want))
    changes = list(wanted._changes(asked, pairs, other_devices=False))
    found = {frozenset(way.changes) for way in ways_to(asked, want, most_changes=3, other_devices=False)[0]}
    for size in range(4):
        enough = {frozenset(each) for each in combinations(changes, size) if suffices(asked, each, pairs[0])}
        if enough:
            assert found == enough
            return
    assert not found


def suffices(given: Problem, changes: tuple[Change, ...], pair: tuple[str, str]) -> bool:
    """Whether the oracle serves the pinned pair after all changes, whatever their order."""
    if len({change.name for change in changes}) < len(changes):
        return False
    for change in changes:
        changed = change.of(given)
        if changed is None:
            return False
        given = changed
    if wanted._reasons(pair, given):
        return False
    return wanted._decided(given, [pair]) is not None


def test_the_command_prints_changes_and_refuses_unknown_names() -> None:
    words = ["explain", "deepseek_v3", "--device", "h200", "--ranks", "8", "--graphs", "--installed", "triton"]
    assert "change      kernel.graphs = false: all_to_all + triton" in printed(*words, "--want", "all_to_all + triton")
    reported = json.loads(moe_mk(*words, "--want", "all_to_all + triton", "--json").stdout)
    assert reported["ways"][0]["changes"] == ["kernel.graphs = false"]
    with pytest.raises(ConfigError, match="'deepep_lll' is no transport and no experts; did you mean 'deepep_ll'"):
        ways_to(problem(ep=8), "deepep_lll")
