"""`moe-mk doctor`: versions, devices, libraries, and every backend with the reasons against running on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from moe_mk.comm.network.link import LINKS
from moe_mk.config.problem import Problem
from moe_mk.config.shipped import load_config
from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.experts.residency import POLICIES
from moe_mk.external.device import describe, profile_here, usable_device
from moe_mk.external.library import LIBRARIES, emulated, installed, installed_version
from moe_mk.kernels.native import instruction_set, threads
from moe_mk.kernels.native.selfcheck import is_compiled, loaded
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.report import versions
from moe_mk.lab.cli.screen import Screen
from moe_mk.oracle.base import ORACLES
from moe_mk.oracle.trust import reasons_of
from moe_mk.placement.eplb import EPLB_POLICIES
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.quant.plain import BF16
from moe_mk.registry import Registry
from moe_mk.router.router import ROUTERS


def examine(screen: Screen, overrides: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the findings. Exit code 0."""
    facts = findings(overrides)
    if as_json:
        return print_json(facts)
    libraries = [
        (name, library["version"] or f"not installed: {library['install']}")
        for name, library in facts["libraries"].items()
    ]
    judged = (
        "backends",
        "checked for DeepSeek-V3 on the best device of this machine, each with its minimum number of ranks",
    )
    screen.facts([*facts["versions"].items(), *facts["devices"].items(), *libraries, judged])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("kind", "backend", "works", "details"):
        table.add_column(column, no_wrap=column != "details", overflow="fold")
    for backend in facts["backends"]:
        why = "; ".join(backend["reasons"]) or backend["summary"]
        state = ("no", "yellow") if backend["reasons"] else ("yes", "green")
        if backend["broken"]:
            state = ("broken", "red")
        elif backend["by_name"]:
            state = ("by name", "yellow")
        table.add_row(backend["kind"], backend["name"], Text(*state), Text(why))
    screen.console.print(table)
    return OK


def findings(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The findings as JSON values. overrides: settings of the layers that backends are checked for."""
    return {
        "versions": versions(),
        "devices": _devices(overrides or {}),
        "libraries": {
            name: {"version": installed_version(name), "purpose": lib.purpose, "install": lib.install}
            for name, lib in LIBRARIES.items()
        },
        "backends": _backends(overrides or {}),
        "oracles": list(ORACLES),
    }


def _devices(overrides: Mapping[str, Any]) -> dict[str, str]:
    found = {"cpu": describe(torch.device("cpu"))}
    found["cpu kernels"] = f"{threads.described()}; {_instruction_sets(overrides)}"
    try:
        found["cuda"] = describe(usable_device("cuda"))
    except UnsupportedError as problem:
        found["cuda"] = "; ".join(problem.reasons)
    return found


def _instruction_sets(overrides: Mapping[str, Any]) -> str:
    """List the instruction sets of experts by format; compiles no kernels."""
    kernel = load_config("deepseek_v3").with_(**overrides).kernel
    try:
        if not is_compiled(kernel.cache_dir):
            return "instruction sets are known once they are compiled"
        native = loaded(kernel.cache_dir).configured(own_threads=False, instruction_set=kernel.instruction_set)
        refused: dict[str, list[str]] = {}
        for isa, why in native.refused.items():
            refused.setdefault(why, []).append(isa.name)
        against = [f"not {', '.join(names)}: {why}" for why, names in refused.items()]
        return "; ".join([instruction_set.described(native), *against])
    except UnsupportedError as problem:
        return "; ".join([problem.what, *problem.reasons])


def _backends(overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every registered backend, checked for DeepSeek-V3 on the best device, with its minimum number of ranks."""
    try:
        device = usable_device("cuda")
    except UnsupportedError:
        device = torch.device("cpu")
    profile, rows = profile_here(device), []
    libraries = installed(load_config("deepseek_v3").with_(**overrides).kernel.cache_dir)
    for registry in (PREPARE_FINALIZE, EXPERTS, MONOLITHIC):
        for name, backend in registry.items():
            needs = getattr(backend.traits, "min_ranks", 1)
            tokens = next(iter(getattr(backend.traits, "tokens", {"sharded"})))
            config = load_config("deepseek_v3").with_(**{"ep": needs, "tokens": tokens, **overrides})
            reasons = reasons_of(registry, name, Problem(config, profile, BF16, 128, libraries, emulated()))
            rows.append(
                _row(registry.kind, name, backend.traits.summary, list(map(str, reasons)), registry.origin(name))
                | {"by_name": any(reason.code == "trust" for reason in reasons)}
            )
    for name, policy in EPLB_POLICIES.items():
        rows.append(_row(EPLB_POLICIES.kind, name, policy.summary, [], EPLB_POLICIES.origin(name)))
    plugins: tuple[Registry[Any], ...] = (PREPARE_FINALIZE, EXPERTS, EPLB_POLICIES, ORACLES, POLICIES, LINKS, ROUTERS)
    for each in plugins:
        list(each)  # loads them
        for name, reason in each.broken.items():
            rows.append(_row(each.kind, name, "", [reason], "plugin", broken=True))
    return rows


def _row(
    kind: str, name: str, summary: str, reasons: list[str], origin: str, *, broken: bool = False
) -> dict[str, Any]:
    return {
        "kind": kind.removesuffix(" backend"),
        "name": name,
        "summary": summary,
        "reasons": reasons,
        "origin": origin,
        "broken": broken,
        "by_name": False,
    }
