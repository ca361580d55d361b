"""Reasons that follow from traits alone."""

from dataclasses import replace
from typing import Any

import pytest

from moe_mk.config import device_profile, load_config
from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES, Traits, common_reasons, runs_emulated
from moe_mk.errors import ConfigError, PluginWarning
from moe_mk.quant import BF16
from moe_mk.registry import Registry

PICKY = Traits(
    summary="needs everything", kinds=frozenset({"cuda"}), min_arch=(9, 0), library="deep_ep", extra="build it",
    graph_safe=False, deterministic=False,
)  # fmt: skip


def problem(device: str = "h200", installed: str = "", emulated: str = "", **overrides: Any) -> Problem:
    config = load_config("tiny").with_(**overrides)
    return Problem(config, device_profile(device), BF16, 1, frozenset({installed}), frozenset({emulated}))


def codes(traits: Traits, asked: Problem) -> list[str]:
    return [reason.code for reason in common_reasons(traits, asked)]


def test_permissive_traits_are_never_against_anything() -> None:
    for device in ("cpu", "h100", "mi300x"):
        assert codes(Traits(summary="x", kinds=DEVICES), problem(device)) == []
        stated = Traits(summary="x", kinds=DEVICES, graph_safe=True, deterministic=True)
        assert codes(stated, problem(device, graphs=True, deterministic=True)) == []


def test_guarantees_that_are_not_stated_are_not_given() -> None:
    for setting in ("deterministic", "invariant"):
        *_, reason = common_reasons(Traits(summary="x", kinds=DEVICES), problem("h100", **{setting: True}))
        assert (reason.code, reason.fix) == ("deterministic", f"kernel.{setting} = false")
    assert codes(Traits(summary="x", kinds=DEVICES), problem("h100", graphs=True)) == ["graphs"]


def test_a_backend_that_states_no_kinds_of_device_is_used_on_a_cpu_only_and_warned_of() -> None:
    unstated = replace(Traits(summary="x"), deterministic=True)
    assert codes(unstated, problem("cpu")) == []
    (reason,) = common_reasons(unstated, problem("h100"))
    assert str(reason) == (
        "states no kinds of device and is used on a CPU only, this device is cuda "
        '[traits.kinds = frozenset({"cuda"}) in the backend]'
    )
    assert "state them" in unstated.advice[0] and Traits(summary="x", kinds=frozenset({"cpu"})).advice == ()
    with pytest.warns(PluginWarning, match="experts backend 'unstated' of .* states no kinds of device"):
        Registry("experts backend", object).register("unstated")(type("Unstated", (), {"traits": unstated}))


@pytest.mark.parametrize(
    ("kinds", "stated"),
    [
        (
            frozenset({"gpu"}),
            r"traits.kinds has 'gpu', no kind of device; did you mean 'cuda'\? \(known: cpu, cuda, rocm",
        ),
        (frozenset({"cpu", "cudaa"}), "has 'cudaa', no kind of device; did you mean 'cuda'"),
        ("cuda", r"traits.kinds = 'cuda' is a text; write frozenset\(\{'cuda'\}\)"),
        (frozenset(), "traits.kinds is empty; name some of cpu, cuda, rocm"),
    ],
)
def test_unknown_kinds_of_device_are_answered(kinds: Any, stated: str) -> None:
    with pytest.raises(ConfigError, match=stated):
        Traits(summary="x", kinds=kinds)


def test_every_reason_is_listed() -> None:
    asked = problem("cpu", graphs=True, deterministic=True)
    assert [str(reason) for reason in common_reasons(PICKY, asked)] == [
        "runs on cuda, this device is cpu",
        "deep_ep is not installed [build it]",
        "cannot be captured in a CUDA graph [kernel.graphs = false]",
        "is not deterministic [kernel.deterministic = false]",
    ]
    assert codes(PICKY, problem(installed="deep_ep")) == []


def test_an_older_gpu_is_named_and_other_devices_are_not_asked() -> None:
    needs_blackwell = replace(PICKY, min_arch=(10, 0), library="")
    assert [str(r) for r in common_reasons(needs_blackwell, problem("h200"))] == ["needs sm_100, this device is sm_90"]
    assert codes(needs_blackwell, problem("b200")) == []
    assert codes(replace(needs_blackwell, kinds=frozenset({"rocm"})), problem("mi300x")) == []


@pytest.mark.parametrize(
    "emulated, allowed, reasons",
    [
        ("", True, ["deep_ep is not installed [build it]"]),
        ("deep_ep", False, ["deep_ep is not installed [build it]"]),
        ("deep_ep", True, []),
    ],
)
def test_an_emulated_library_counts_only_when_allowed(emulated: str, allowed: bool, reasons: list[str]) -> None:
    asked = problem(emulated=emulated, allow_emulated=allowed)
    assert [str(reason) for reason in common_reasons(PICKY, asked)] == reasons
    assert runs_emulated(PICKY, asked) == (not reasons)
    assert not runs_emulated(PICKY, replace(asked, installed=frozenset({"deep_ep"}))), "the library itself runs"


def test_an_emulation_is_offered_only_on_its_host() -> None:
    anywhere, stated = replace(PICKY, kinds=frozenset({"cpu", "cuda"})), []
    for device in ("cpu", "h200"):
        stated += [r.fix for r in common_reasons(anywhere, problem(device, emulated="deep_ep")) if r.code == "library"]
    assert stated == ["build it, or kernel.allow_emulated = true", "build it"]


def test_without_a_recipe_pip_is_the_way() -> None:
    (reason,) = common_reasons(replace(PICKY, extra=""), problem())
    assert reason.fix == "pip install deep_ep"
