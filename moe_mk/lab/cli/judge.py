"""`moe-mk judge CASE...`: the verdict on recorded calls of MoE layers. Exit codes: 0 right, 1 wrong, 2 not a case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from moe_mk.errors import ConfigError, UnsupportedError, unless_signalled
from moe_mk.files import write_text
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.judge.casefile import Case, read_case
from moe_mk.lab.judge.verdict import Dependence, Verdict, dependences, judge, same_layer
from moe_mk.layer.settings import config_of, layer_spec_of
from moe_mk.oracle.expected_error import ONE_TOKEN
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.source import in_memory


def judge_cases(
    screen: Screen, files: Sequence[Path], checkpoint: Path | None, html: Path | None, *, as_json: bool
) -> int:
    """Judge each file and print the verdicts; files of the same layer are compared with each other.

    Raises WeightError, ConfigError or ShapeError for a file that is no case or cannot be judged.
    """
    try:
        cases = [read_case(file) for file in files]
        weights = [_weights_of(file, case, checkpoint) for file, case in zip(files, cases, strict=True)]
    except UnsupportedError as problem:
        raise ConfigError(str(problem)) from problem
    verdicts = [
        judge(case, *own, others=[other for other in cases if other is not case and same_layer(case, other)])
        for case, own in zip(cases, weights, strict=True)
    ]
    depends = dependences(cases)
    if html is not None:
        try:
            write_text(html, page_of(list(zip(map(str, files), cases, verdicts, strict=True))))
        except unless_signalled(OSError) as problem:
            raise ConfigError(f"{html} cannot be written: {problem}; name another file") from problem
    if as_json:
        listed = zip(files, verdicts, depends, strict=True)
        print_json([{"file": str(f)} | v.as_dict() | {"depends": [asdict(d) for d in ds]} for f, v, ds in listed])
    else:
        for file, case, verdict in zip(files, cases, verdicts, strict=True):
            _show(screen, file, case, verdict)
        for file, found in zip(files, depends, strict=True):
            for each in found:
                screen.fact("depends on", _stated(file, files[each.other], each))
    return OK if all(verdict.right for verdict in verdicts) else MISMATCH


def _stated(file: Path, other: Path, found: Dependence) -> str:
    return (
        f"{found.law}: {found.differing} of {found.rows} equal tokens of {file} and {other} differ first at "
        f"{found.stage} ({found.tensor}), by {found.error:.1e}; no stage permits a difference"
    )


def _weights_of(
    file: Path, case: Case, checkpoint: Path | None
) -> tuple[dict[int, SlotWeights] | None, SlotWeights | None]:
    """The hit experts and the shared ones of a checkpoint, for a case without weights; None where it has its own."""
    if case.w13 is not None:
        return None, None
    if checkpoint is None or case.layer < 0 or case.topk_ids is None:
        raise ConfigError(
            f"{file} holds no weights: name the folder of {case.checkpoint or 'its checkpoint'} with --checkpoint "
            f"(the case has layer {case.layer} and {'no ' if case.topk_ids is None else ''}topk_ids)"
        )
    hit = [expert for expert in sorted(set(case.topk_ids.flatten().tolist())) if expert >= 0]
    source = open_source(checkpoint)
    read = load_layer(source, case.layer, layer_spec_of(config_of(checkpoint, case.layer)), owned=hit)
    slots = {expert: slot.changed(in_memory) for expert, slot in zip(hit, read.experts.slots, strict=True)}
    return slots, None if read.shared is None else read.shared.changed(in_memory)


def _show(screen: Screen, file: Path, case: Case, verdict: Verdict) -> None:
    screen.fact("case", f"{file}: {case.size} tokens" + (f", {case.layer_name}" if case.layer_name else ""))
    if case.versions:
        screen.fact("recorded by", ", ".join(f"{name} {version}" for name, version in case.versions.items()))
    table = table_of(("stage", "tensor", "rows", "wrong", "error", "deviations", "worst row"), left=("stage", "tensor"))
    for check in verdict.checks:
        numbers = f"{check.error:.2e}", f"{check.deviations:.2f}", f"{check.worst_row:.2f}"
        table.add_row(check.stage, check.tensor, str(check.rows), str(check.wrong_rows), *numbers)
    screen.console.print(table)
    if verdict.not_judged:
        screen.fact("not judged", f"{verdict.not_judged} tokens, which are not finite in the replay either")
    if verdict.right:
        screen.fact("verdict", "right within the limits of its number formats: 1.5 deviations, 3 for one row")
        return
    expert = "" if verdict.expert < 0 else f", expert {verdict.expert}"
    where = f"token {verdict.token}{expert}, columns from {128 * verdict.block}"
    stage = verdict.stage or f"one of {', '.join(verdict.span)}"
    screen.fact("verdict", f"wrong. First stage that departs: {stage}; worst: {where}")
    screen.fact("fault", verdict.fault)
    for explanation in verdict.explanations[:4]:
        names = " and ".join(
            name + (f" ({detail})" if detail else "")
            for name, detail in zip(explanation.faults, explanation.details, strict=True)
        )
        within = "within the limits" if explanation.within else "beyond the limits"
        screen.fact("explanation", f"{names}: removes {explanation.removed:.2%} of the error, the rest is {within}")


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .6rem;border-bottom:1px solid #d8dee4;text-align:right}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}.wrong{color:#b3261e}.right{color:#1a6b34}
.map{overflow-x:auto}.map td{width:1.6rem;height:1.2rem;padding:0;border:1px solid #fff}.map th{font-weight:400;
text-align:center;font-size:12px;border:0;padding:0 .3rem}footer{color:#59636e;font-size:13px}"""
MOST_CELLS = 65_536


def page_of(verdicts: Sequence[tuple[str, Case, Verdict]]) -> str:
    """One self-contained page; every text of a case is escaped."""
    body = "".join(_section(name, case, verdict) for name, case, verdict in verdicts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>moe-mk judge</title>'
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style></head><body>{body}"
        "<footer>moe-mk judge. Deviations: the error over what the number formats cause.</footer></body></html>\n"
    )


def _section(name: str, case: Case, verdict: Verdict) -> str:
    kind, state = ("right", "right") if verdict.right else ("wrong", "wrong")
    layer = f"{escape(case.layer_name)}, " if case.layer_name else ""
    facts = [f"<h1>{escape(name)}</h1><p>{layer}{case.size} of "
             f"{max(case.num_tokens, case.size)} tokens, {escape(case.model.quant.weights)} weights, "
             f"TP {case.tp}, EP {case.ep}</p>"]  # fmt: skip
    versions = ", ".join(f"{escape(k)} {escape(v)}" for k, v in case.versions.items())
    facts.append(f"<p>{versions}</p>" if versions else "")
    where = ""
    if not verdict.right:
        expert = f", expert {verdict.expert}" if verdict.expert >= 0 else ""
        stage = verdict.stage or "one of " + ", ".join(verdict.span)
        where = (
            f": {escape(stage)}, worst at token {verdict.token}{expert}, columns from {128 * verdict.block}. "
            f"Fault: {escape(verdict.fault)}"
        )
    facts.append(f'<h2 class="{kind}">{state}{where}</h2>')
    rows = [
        (check.stage, check.tensor, str(check.rows), str(check.wrong_rows), f"{check.error:.2e}",
         f"{check.deviations:.2f}", f"{check.worst_row:.2f}") for check in verdict.checks
    ]  # fmt: skip
    facts.append(_table(("stage", "tensor", "rows", "wrong", "error", "deviations", "worst row"), rows))
    if verdict.explanations:
        facts.append("<h3>Explanations</h3>")
        lines = [
            (" and ".join(e.faults), " and ".join(filter(None, e.details)), e.stage, f"{e.removed:.2%}",
             "yes" if e.within else "no") for e in verdict.explanations
        ]  # fmt: skip
        facts.append(_table(("fault", "detail", "stage", "removes", "within limits"), lines))
    return "<section>" + "".join(facts) + _map(verdict) + "</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    lines = ("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _map(verdict: Verdict) -> str:
    """Tokens down, experts across; red begins at the limit of a row."""
    grid = verdict.error_map
    if not grid or len(grid) * len(grid[0]) > MOST_CELLS:
        return ""
    heads = [f"<th>{expert}</th>" for expert in verdict.experts] or ["<th>deviations</th>"]
    lines = [f"<tr><th>token \\ expert</th>{''.join(heads)}</tr>"]
    for token, row in zip(verdict.tokens, grid, strict=True):
        cells = "".join(f'<td style="background:{_colour(v)}" title="{v:.2f}"></td>' for v in row)
        lines.append(f"<tr><th>{token}</th>{cells}</tr>")
    return f"<h3>Deviations by token and expert</h3><div class=map><table>{''.join(lines)}</table></div>"


def _colour(deviations: float) -> str:
    """White for none, blue up to the limit, red above it, darker with each factor of ten."""
    if deviations <= 0:
        return "#f3f5f7"
    if deviations <= ONE_TOKEN:
        return f"hsl(210 60% {95 - 25 * deviations / ONE_TOKEN:.0f}%)"
    decades = 4.0 if math.isinf(deviations) else min(4.0, math.log10(deviations / ONE_TOKEN))
    return f"hsl(5 70% {70 - 12 * decades:.0f}%)"
