"""Tables of what experts_cpu.py measured.

python benchmarks/experts_cpu_report.py benchmarks/results/experts_cpu_e8.json [...]
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import parser_of
from experts_cpu_peers import left_out

from tools.pages import markdown

YARDSTICKS = ("read", "peak")
OURS = "ours fp8"
Line = dict[str, Any]
Results = dict[str, Any]


def cases_of(results: Results, figure: str = "wall_ms") -> Iterator[tuple[Line, dict[str, Line]]]:
    """Cases in which ours has a figure, with the lines that have it, by candidate."""
    for case in results["cases"]:
        by_name = {line["candidate"]: line for line in case["lines"] if figure in line}
        if OURS in by_name:
            yield case, by_name


def batch_of(case: Line) -> str:
    return f"{case['rows']} {'token' if case['rows'] == 1 else 'tokens'}, {case['skew']}"


def table(results: Results) -> str:
    """One Markdown table, a row a batch; of the others, times ours by wall and by processor clock."""
    others = [name for name in candidates_of(results) if name != OURS]
    rows = [["tokens", "routing", "experts hit", f"{OURS}, ms", "of pure read", "of peak", *others]]
    for case, by_name in cases_of(results):
        own = by_name[OURS]
        cells = [case["rows"], case["skew"], case["experts_hit"], milliseconds(own)]
        cells += [f"{own['of_read']:.0%}", f"{own['of_peak']:.0%}"]
        rows.append([*cells, *(times_ours(by_name[name], own) if name in by_name else "too slow" for name in others)])
    return markdown(rows)


def times_ours(line: Line, own: Line) -> str:
    """How many times our wall time and our processor time somebody takes."""
    return f"{line['wall_ms'] / own['wall_ms']:.2f} / {line['cpu_ms'] / own['cpu_ms']:.2f}"


def milliseconds(line: Line, clock: str = "wall_ms") -> str:
    value = line[clock]
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def candidates_of(results: Results) -> list[str]:
    """Everybody who was measured at least once, in the order of measuring."""
    measured = [line["candidate"] for case in results["cases"] for line in case["lines"]]
    return [name for name in dict.fromkeys(measured) if name not in YARDSTICKS]


def described(results: Results) -> str:
    """Where and with what: the paragraph above a table."""
    shape = results["shape"]
    sizes = f"E={shape['experts']}, H={shape['hidden']}, I={shape['inter']}, top-{shape['top_k']}"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    notes = [results[key] for key in ("instruction sets", "threads", "note") if results.get(key)]
    return f"**{sizes}**; {'; '.join([results['device'], versions, *notes])}.\n\n`{results['command']}`"


GGML = "ggml "
"""Prefix of the candidates of ggml."""
BLOCKS = {
    GGML: ("ggml", "cpu_ms"),
    "ik_llama.cpp ": ("ik_llama.cpp", "cpu_ms"),
    "vllm ": ("vLLM", "cpu_ms"),
    "kt-kernel ": ("kt-kernel", "wall_ms"),
}
"""By prefix of candidates that hold the same blocks as ours of the same name: the project and the clock to compare.

The processor time of kt-kernel includes a thread that spins until the others have finished."""
CLOCKS = {"cpu_ms": "processor time", "wall_ms": "wall time"}
BITS = {"int4 g32": 4.5, "int4 g128": 4.125, "int4 g32 zp": 4.75, "q4 0": 4.5, "q4 k": 4.5, "mxfp4": 4.25}
"""Four-bit formats, with the bits of a weight, scales included."""
FOUR_BIT_GOALS = {1: (1.05, 1.75, 0.85), 16: (2.0, 1.2, 0.0), 64: (2.0, 1.0, 0.0), 256: (2.0, 1.0, 0.0)}
"""By tokens: how many times our time the best variant of ggml takes at least, how many times our FP8, and our share of
pure reading."""
ALIKE = {"int4 g32": "q4 0"}
"""Formats that ggml does not have, and its format of the same bits."""
COMPARED_ABOVE = ("bf16", "int8 w8a8")
"""Formats that the first table compares already."""
GOALS = {1: (1.0, 0.88), 4: (1.05, 0.0)}
"""By tokens: how many times our time every other project takes at least, and our share of pure reading."""


def goals(results: Results) -> str:
    """Which goals these figures meet; nothing where there is no other project to compare with."""
    lines = []
    for case, by_name in cases_of(results):
        # Others have other weights or another accuracy.
        peers = [name for name in by_name if name.endswith((" fp8", " bf16")) and not name.startswith("ours")]
        if case["rows"] not in GOALS or not peers:
            continue
        own, (ahead, of_read) = by_name[OURS], GOALS[case["rows"]]
        nearest = min(peers, key=lambda name: by_name[name]["wall_ms"])
        times = by_name[nearest]["wall_ms"] / own["wall_ms"]
        verdict = "met" if times >= ahead and own["of_read"] >= of_read else "not met"
        wanted = f"at least {ahead:.2f} times" + (f" and {of_read:.0%} of pure read" if of_read else "")
        lines.append(
            f"- {batch_of(case)}: the nearest, {nearest}, takes {times:.2f} times ours, "
            f"and ours is {own['of_read']:.0%} of pure read; the goal, {wanted}, is {verdict}."
        )
    return "\n".join(lines)


def without_rounding(name: str) -> str:
    """The name of a format without that of the tokens: q4 k of q4 k w4a8."""
    return name[:-5] if name.endswith((" w8a8", " w4a8")) else name


def best_of(by_name: dict[str, Line], prefix: str, name: str, clock: str) -> float | None:
    """The time of the best variant of another project that holds the same blocks as ours; None without any."""
    theirs = f"{prefix}{without_rounding(name)}"
    return min((by_name[each][clock] for each in (theirs, f"{theirs} repacked") if each in by_name), default=None)


def four_bit_goals(results: Results) -> str:
    """Which goals of four-bit formats these figures meet; of those that ggml has been measured with, at equal bits."""
    lines = []
    for case, by_name in cases_of(results):
        for candidate, own in by_name.items() if case["rows"] in FOUR_BIT_GOALS else ():
            kind = without_rounding(candidate.removeprefix("ours "))
            best = best_of(by_name, GGML, ALIKE.get(kind, kind), "cpu_ms")
            if not candidate.startswith("ours ") or kind not in BITS or best is None:
                continue
            ahead, of_fp8, of_read = FOUR_BIT_GOALS[case["rows"]]
            wanted = [("ggml takes {:.2f} times ours", best / own["cpu_ms"], ahead)]
            wanted.append(("our FP8 {:.2f} times", by_name[OURS]["cpu_ms"] / own["cpu_ms"], of_fp8))
            if of_read:
                wanted.append(("{:.2f} of pure read", own["of_read"] * BITS[kind] / 8, of_read))
            parts = [
                f"{text.format(value)} (goal {goal:.2f}, {'met' if value >= goal else 'not met'})"
                for text, value, goal in wanted
            ]
            lines.append(f"- {batch_of(case)}, {candidate}: {', '.join(parts)}")
    return "\n".join(lines)


def at_equal_bits(results: Results) -> str:
    """The best variant of other projects over ours with the same blocks, and ours over our FP8; empty without them."""
    return "\n\n".join(part for prefix in BLOCKS if (part := _against(results, prefix)))


def _against(results: Results, prefix: str) -> str:
    """The table of one project. "too slow": left out for this number of rows only."""
    project, clock = BLOCKS[prefix]
    known = candidates_of(results)
    names = [name.removeprefix("ours ") for name in known if name.startswith("ours ") and name != OURS]
    names = [name for name in names if name not in COMPARED_ABOVE and f"{prefix}{without_rounding(name)}" in known]
    rows = [["tokens", "routing", *names]]
    for case, by_name in cases_of(results) if names else ():
        cells, fp8 = [], by_name[OURS][clock]
        for name in names:
            best, own = best_of(by_name, prefix, name, clock), by_name.get(f"ours {name}")
            cells.append(f"{best / own[clock]:.2f} / {fp8 / own[clock]:.2f}" if best and own else "too slow")
        rows.append([case["rows"], case["skew"], *cells])
    what = f"With the same blocks, in {CLOCKS[clock]}: the best variant of {project} / ours, then our FP8 / ours."
    return f"{what}\n\n{markdown(rows)}" if rows[1:] else ""


def paused(results: Results) -> str:
    """The first call after a pause, in milliseconds, where it was measured: everybody's beside ours."""
    cases, clock = list(cases_of(results, "first_wall_ms")), "first_wall_ms"
    names = [name for name in ("read", *candidates_of(results)) if any(name in by_name for _, by_name in cases)]
    rows = [["tokens", "routing", *names]]
    for case, by_name in cases:
        times = [milliseconds(by_name[name], clock) if name in by_name else "too slow" for name in names]
        rows.append([case["rows"], case["skew"], *times])
    return f"The first call after a pause, ms:\n\n{markdown(rows)}" if cases else ""


def behind_torch(results: Results) -> str:
    """Calls directly behind an operator of torch, where they were measured: everybody's beside ours."""
    names, clock = [name for name in candidates_of(results) if name != OURS], "behind_wall_ms"
    rows = [["tokens", "routing", f"{OURS}, ms", "of ours alone", *names]]
    for case, by_name in cases_of(results, clock):
        own = by_name[OURS]
        cells = [case["rows"], case["skew"], milliseconds(own, clock), f"{own[clock] / own['wall_ms']:.2f}"]
        others = [f"{by_name[name][clock] / own[clock]:.2f}" if name in by_name else "too slow" for name in names]
        rows.append([*cells, *others])
    heading = "Calls directly behind an operator of torch, as in an engine; others: wall time of such calls over ours:"
    return f"{heading}\n\n{markdown(rows)}" if rows[1:] else ""


def section(results: Results) -> str:
    parts = [part(results) for part in (described, table, goals, at_equal_bits, paused, behind_torch)]
    return "\n\n".join(part for part in (*parts, left_out(results["cases"])) if part)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of experts_cpu.py")
    print("\n\n".join(section(json.loads(path.read_text())) for path in parser.parse_args().results))


if __name__ == "__main__":
    main()
