"""`moe-mk lint`: pitfalls of expert parallelism in launch lines of vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from moe_mk.cli.exits import MISMATCH, OK
from moe_mk.cli.screen import Screen
from moe_mk.errors import ConfigError
from moe_mk.integrations.launch_lines import read_launches
from moe_mk.integrations.launch_rules import RULES, lint, lint_together

MOST_BYTES = 1 << 20


def lint_launch_lines(screen: Screen, file: Path, *, as_json: bool) -> int:
    """Print every finding with its source; exit code 1 if there is an error. file: "-" is standard input."""
    try:
        text = sys.stdin.read(MOST_BYTES) if str(file) == "-" else file.read_text(encoding="utf-8")[:MOST_BYTES]
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} cannot be read: {problem}; name a script with launch lines, or -") from None
    launches = read_launches(text)
    if not launches:
        raise ConfigError(f"{file} holds no launch line of vllm serve, sglang.launch_server or trtllm-serve")
    found = [finding for launch in launches for finding in lint(launch)] + lint_together(launches)
    if as_json:
        lines = [{"engine": each.engine, "line": each.line} for each in launches]
        typer.echo(json.dumps({"launches": lines, "findings": [asdict(each) for each in found]}, indent=2))
    else:
        for each in launches:
            rules = sum(rule.engine == each.engine for rule in RULES)
            screen.fact("launch", f"line {each.line}: {each.engine}, {rules} rules")
        for finding in found:
            where = f"line {finding.line}, {finding.rule}"
            screen.fact(finding.severity, f"{where}: {finding.text}; {finding.fix} ({finding.source})")
        if not found:
            screen.fact("found", "nothing")
    return MISMATCH if any(each.severity == "error" for each in found) else OK


def show_rules(screen: Screen) -> int:
    """Print every rule with its engine and source."""
    for rule in RULES:
        screen.fact(rule.engine, f"{rule.name} ({rule.severity}): {rule.fix} ({rule.source})")
    return OK
