"""Policies as plugins: registered here, from other wheels, broken ones, and ones that answer nonsense."""

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from moe_mk.errors import ConfigError, PluginWarning, UnsupportedError
from moe_mk.placement.balance import policy as home
from moe_mk.placement.eplb import EPLB_POLICIES, EplbPolicy, PlacementRequest, SlotPlacement, Topology, plan
from moe_mk.registry import Registry

LOAD = np.array([[4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 7.0]])
TOPOLOGY = Topology(2, 2, 3)


class Reversed(EplbPolicy):
    """Experts backwards, and the last ones once more."""

    summary = "experts backwards"

    def reasons_against(self, request: PlacementRequest) -> list[str]:
        return []

    def place(self, request: PlacementRequest) -> SlotPlacement:
        experts = request.load.shape[1]
        slots_P = np.arange(request.sites.num_slots)[::-1] % experts
        return SlotPlacement.of(np.tile(slots_P, (len(request.load), 1)), request, "backwards")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[type[EplbPolicy]]:
    """The built-in policies in a registry of their own, so that no test leaves one behind."""
    made: Registry[type[EplbPolicy]] = Registry("EPLB policy", EplbPolicy)
    for name, policy in EPLB_POLICIES.items():
        made.register(name)(policy)
    monkeypatch.setattr(home, "EPLB_POLICIES", made)
    return made


def test_the_built_in_ones_are_found_and_typos_are_answered() -> None:
    assert {"auto", "compat", "flat", "hybrid"} <= set(EPLB_POLICIES)
    assert all(policy.summary for _, policy in EPLB_POLICIES.items())
    with pytest.raises(ConfigError, match="no EPLB policy is called 'hybird'; did you mean 'hybrid'"):
        plan(LOAD, TOPOLOGY, policy="hybird")


def test_a_policy_of_ones_own_by_hand(registry: Registry[type[EplbPolicy]]) -> None:
    registry.register("mine", "my_wheel")(Reversed)
    placed = plan(LOAD, TOPOLOGY, policy="mine")
    # Six slots backwards: 1 0 3 | 2 1 0. Layer 0: 2 + 4 + 1 = 7 with all of 0 and 1 at home, 3 of them go to GPU 1.
    assert placed.phy2log.tolist() == [[1, 0, 3, 2, 1, 0]] * 2 and placed.policy == "mine"
    assert placed.method == ("backwards", "backwards") and placed.reason.startswith("policy mine as asked")
    assert placed.balance_X[0] == pytest.approx(1.0, abs=1e-5)
    assert placed.share.sum(1).tolist() == pytest.approx([4.0, 4.0])


def answering(answer: Callable[[PlacementRequest], SlotPlacement]) -> type[EplbPolicy]:
    class Answers(Reversed):
        def place(self, request: PlacementRequest) -> SlotPlacement:
            return answer(request)

    return Answers


def spoilt(change: Callable[[SlotPlacement], object]) -> Callable[[PlacementRequest], SlotPlacement]:
    def answer(request: PlacementRequest) -> SlotPlacement:
        placed = Reversed().place(request)
        change(placed)
        return placed

    return answer


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        (
            spoilt(lambda p: p.experts.fill(0)),
            r"6 experts are nowhere, for example \(layer, expert\) \[\[0, 1\], \[0, 2\]",
        ),
        (spoilt(lambda p: p.experts.fill(9)), "experts from 9 to 9, there are 4"),
        (spoilt(lambda p: p.shares.fill(0.9)), r"shares do not sum to 1 for \(layer, expert\)"),
        (spoilt(lambda p: p.shares.fill(np.nan)), "shares from nan to nan"),
        (spoilt(lambda p: setattr(p, "shares", p.shares[:1])), r"shares have shape \(1, 6\), needed \(2, 6\)"),
        (spoilt(lambda p: setattr(p, "method", ["once"])), "method and exported need an entry for each of 2 layers"),
        (lambda request: 1 / 0, "failed\n  - ZeroDivisionError: division by zero"),  # type: ignore[arg-type,return-value]
    ],
)
def test_an_answer_that_cannot_serve_is_refused_by_name(
    registry: Registry[type[EplbPolicy]], answer: Callable[[PlacementRequest], SlotPlacement], states: str
) -> None:
    registry.register("mine", "my_wheel")(answering(answer))
    with pytest.raises(UnsupportedError, match=rf"policy 'mine' of my_wheel(.|\n)*{states}"):
        plan(LOAD, TOPOLOGY, policy="mine")


def test_wheels_bring_policies_and_broken_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=ImportError("no module named solver"))

    class Unfinished(EplbPolicy):
        def place(self, request: PlacementRequest) -> SlotPlacement:
            return Reversed().place(request)

    wheel = {"dist": SimpleNamespace(name="my-wheel"), "value": "my_wheel.policies:Mine"}
    loads = {"mine": lambda: Reversed, "lost": missing, "half": lambda: Unfinished}
    points = [SimpleNamespace(name=name, load=load, **wheel) for name, load in loads.items()]
    found = {"moe_mk.eplb_policies": points}
    monkeypatch.setattr("moe_mk.registry.entry_points", lambda group: found[group])
    made: Registry[type[EplbPolicy]] = Registry("EPLB policy", EplbPolicy, group=EPLB_POLICIES.group)
    made.register("flat")(EPLB_POLICIES["flat"])
    monkeypatch.setattr(home, "EPLB_POLICIES", made)
    with pytest.warns(PluginWarning) as reported:
        assert plan(LOAD, TOPOLOGY, policy="mine").policy == "mine"
    assert [str(each.message).split(" skipped")[0] for each in reported] == [
        f"EPLB policy plugin {name!r} of my-wheel (my_wheel.policies:Mine)" for name in ("lost", "half")
    ]
    assert set(made.broken) == {"lost", "half"} and "reasons_against() is not implemented" in made.broken["half"]
    with pytest.raises(
        ConfigError, match=r"'lost' is installed but could not be loaded: my-wheel \(.*: ImportError: no mod"
    ):
        plan(LOAD, TOPOLOGY, policy="lost")
