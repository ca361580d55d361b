"""`moe-mk certify NAME`: the conformance kit on one backend, with a table and a certificate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from moe_mk.errors import ConfigError
from moe_mk.files import read_json, write_text
from moe_mk.lab.cli.chaos import import_modules
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.outputs import expect_outputs
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.files import new_folders
from moe_mk.lab.testing.certificate import Certificate
from moe_mk.lab.testing.certify import certify
from moe_mk.oracle.trust import certificate_path


@dataclass(frozen=True)
class CertifyOrder:
    """The settings of a certification."""

    name: str
    out: Path | None
    """None: NAME.certificate.json in the working directory, or in `tuned_dir`."""
    modules: tuple[str, ...] = ()
    """Modules to import first, for a backend that is not installed as a wheel."""
    against: Path | None = None
    """Another certificate, whose digests must be equal."""
    processes: bool = True
    faults: bool = False
    """Whether a transport is also tested with injected faults."""
    quick: bool = False
    """Whether cases with many tokens, many experts and further sizes are left out."""
    tuned_dir: Path | None = None
    """The folder of `kernel.tuned_dir`, where layers look the certificate up."""


def certify_backend(screen: Screen, order: CertifyOrder, *, as_json: bool) -> int:
    """Certify, write, print. Raises ConfigError for unknown names and modules, and for two places to write to."""
    if order.out is not None and order.tuned_dir is not None:
        raise ConfigError(f"--out {order.out} and --tuned-dir {order.tuned_dir} both say where to write; give one")
    kept = None if order.tuned_dir is None else certificate_path(order.name, order.tuned_dir)
    out = order.out or kept or Path(f"{order.name}.certificate.json")
    import_modules(order.modules)
    theirs = None if order.against is None else _read(order.against)
    if kept is None:
        expect_outputs({"--out": out})
    with screen.progress("certify", in_bytes=False) as advance:
        certificate = certify(
            order.name, processes=order.processes, quick=order.quick, on_check=advance, faults=order.faults,
            modules=order.modules,
        )  # fmt: skip
    facts = certificate.as_dict()
    differing = [] if theirs is None else _differing(facts, theirs)
    with new_folders(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(facts, indent=2) + "\n")
    if as_json:
        print_json(facts | {"differing": differing})
    else:
        _show(screen, certificate, out, differing)
    return OK if certificate.passed and not differing else MISMATCH


def _show(screen: Screen, certificate: Certificate, out: Path, differing: list[str]) -> None:
    screen.fact("backend", f"{certificate.backend}, {certificate.kind} of {certificate.origin}")
    where = ", ".join(f"{name} {value}" for name, value in certificate.environment.items())
    screen.fact("environment", where)
    table = table_of(("", "check", "cases", "digest"), left=("", "check", "digest"), pad_edge=False)
    for one in certificate.coverage:
        table.add_row(Text("ok", "green"), one.check, str(one.cases), one.digest[:16] or "not deterministic")
    for failure in certificate.failures:
        table.add_row(Text("FAIL", "bold red"), failure.check, "", Text(f"law {failure.law!r}: {failure.text}", "red"))
    screen.console.print(table)
    for failure in certificate.failures:
        screen.fact("violated law", f"{failure.law}: {failure.text}\n{' ' * 12}{failure.check}: {failure.message}")
    if certificate.coverage:
        screen.fact("tested up to", str(certificate.sizes))
    for claim in certificate.not_covered:
        screen.fact("not tested", claim)
    for line in differing:
        screen.fact("differs", line)
    screen.fact("certificate", str(out))
    word = Text("CERTIFIED", "bold green") if certificate.passed and not differing else Text("REFUSED", "bold red")
    screen.fact("verdict", word)


def _read(file: Path) -> dict[str, Any]:
    try:
        read = read_json(file)
        words, _ = [one[name] for one in read["coverage"] for name in ("check", "digest")], read["contract"]
        if not all(isinstance(word, str) for word in words):
            raise TypeError("checks and digests must be texts")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ConfigError(f"--against {file} is no certificate: {problem}") from problem
    return dict(read)


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Checks in only one of the certificates, and digests that differ."""
    mine, others = ({one["check"]: one["digest"] for one in facts["coverage"]} for facts in (ours, theirs))
    lines = [f"contract {ours['contract']} here, {theirs['contract']} there"] * (ours["contract"] != theirs["contract"])
    lines += [f"{check}: passed {'here' if check in mine else 'there'} only" for check in sorted(mine.keys() ^ others)]
    changed = [check for check in mine.keys() & others if mine[check] != others[check]]
    return lines + [f"{check}: other bits, {mine[check][:16]} here, {others[check][:16]} there" for check in changed]
