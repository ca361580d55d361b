"""Tables and a picture of what experts_cpu.py measured.

python benchmarks/experts_cpu_report.py benchmarks/results/experts_cpu_e8.json [...] [--plot figures.png]
"""

import json
from pathlib import Path
from typing import Any

from common import parser_of, write_between
from experts_cpu_peers import left_out

YARDSTICKS = ("read", "peak")
OURS = "ours fp8"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""What stands between these two lines of a page is written by --into."""


def table(results: dict[str, Any]) -> str:
    """One Markdown table, a row a batch; of the others, times ours by wall and by processor clock."""
    others = [name for name in candidates_of(results) if name != OURS]
    heads = ["tokens", "routing", "experts hit", f"{OURS}, ms", "of pure read", "of peak", *others]
    lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for case in results["cases"]:
        by_name = {line["candidate"]: line for line in case["lines"]}
        own = by_name[OURS]
        cells = [str(case["rows"]), case["skew"], str(case["experts_hit"]), milliseconds(own)]
        cells += [f"{own['of_read']:.0%}", f"{own['of_peak']:.0%}"]
        cells += [times_ours(by_name[name], own) if name in by_name else "too slow" for name in others]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def times_ours(line: dict[str, Any], own: dict[str, Any]) -> str:
    """How many times our wall time and our processor time somebody takes."""
    return f"{line['wall_ms'] / own['wall_ms']:.2f} / {line['cpu_ms'] / own['cpu_ms']:.2f}"


def milliseconds(line: dict[str, Any], clock: str = "wall_ms") -> str:
    value = line[clock]
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def candidates_of(results: dict[str, Any]) -> list[str]:
    """Everybody who was measured at least once, in the order of measuring."""
    names: dict[str, None] = {}
    for case in results["cases"]:
        names |= dict.fromkeys(line["candidate"] for line in case["lines"] if line["candidate"] not in YARDSTICKS)
    return list(names)


def described(results: dict[str, Any]) -> str:
    """Where and with what: the paragraph above a table."""
    shape = results["shape"]
    sizes = f"E={shape['experts']}, H={shape['hidden']}, I={shape['inter']}, top-{shape['top_k']}"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    note = f"; {results['note']}" if results.get("note") else ""
    note = f"; {results['threads']}{note}" if "threads" in results else note
    return f"**{sizes}**; {results['device']}; {versions}{note}.\n\n`{results['command']}`"


GGML = "ggml "
"""Prefix of the candidates of ggml."""
BLOCKS = {GGML: ("ggml", "cpu_ms"), "vllm ": ("vLLM", "cpu_ms"), "kt-kernel ": ("kt-kernel", "wall_ms")}
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


def goals(results: dict[str, Any]) -> str:
    """Which goals these figures meet; nothing where there is no other project to compare with."""
    lines = []
    for case in results["cases"]:
        by_name = {line["candidate"]: line for line in case["lines"]}
        peers = {name: line for name, line in by_name.items() if name not in YARDSTICKS and not name.startswith("ours")}
        # Others have other weights or another accuracy.
        peers = {name: line for name, line in peers.items() if name.endswith((" fp8", " bf16"))}
        if case["rows"] not in GOALS or not peers:
            continue
        own, (ahead, of_read) = by_name[OURS], GOALS[case["rows"]]
        nearest = min(peers, key=lambda name: peers[name]["wall_ms"])
        times = peers[nearest]["wall_ms"] / own["wall_ms"]
        verdict = "met" if times >= ahead and own["of_read"] >= of_read else "not met"
        wanted = f"at least {ahead:.2f} times" + (f" and {of_read:.0%} of pure read" if of_read else "")
        unit = "token" if case["rows"] == 1 else "tokens"
        lines.append(
            f"- {case['rows']} {unit}, {case['skew']}: the nearest, {nearest}, takes {times:.2f} times ours, "
            f"and ours is {own['of_read']:.0%} of pure read; the goal, {wanted}, is {verdict}."
        )
    return "\n".join(lines)


def without_rounding(name: str) -> str:
    """The name of a format without that of the tokens: q4 k of q4 k w4a8."""
    return name[:-5] if name.endswith((" w8a8", " w4a8")) else name


def four_bit_goals(results: dict[str, Any]) -> str:
    """Which goals of four-bit formats these figures meet; of those that ggml has been measured with, at equal bits."""
    lines = []
    for case in results["cases"]:
        by_name = {line["candidate"]: line for line in case["lines"]}
        if case["rows"] not in FOUR_BIT_GOALS or OURS not in by_name:
            continue
        ahead, of_fp8, of_read = FOUR_BIT_GOALS[case["rows"]]
        for candidate, own in by_name.items():
            kind = without_rounding(candidate.removeprefix("ours "))
            theirs = f"{GGML}{ALIKE.get(kind, kind)}"
            peers = [by_name[name]["cpu_ms"] for name in (theirs, f"{theirs} repacked") if name in by_name]
            if not candidate.startswith("ours ") or kind not in BITS or not peers:
                continue
            wanted = [("ggml takes {:.2f} times ours", min(peers) / own["cpu_ms"], ahead)]
            wanted.append(("our FP8 {:.2f} times", by_name[OURS]["cpu_ms"] / own["cpu_ms"], of_fp8))
            if of_read:
                wanted.append(("{:.2f} of pure read", own["of_read"] * BITS[kind] / 8, of_read))
            parts = [
                f"{text.format(value)} (goal {goal:.2f}, {'met' if value >= goal else 'not met'})"
                for text, value, goal in wanted
            ]
            unit = "token" if case["rows"] == 1 else "tokens"
            lines.append(f"- {case['rows']} {unit}, {case['skew']}, {candidate}: {', '.join(parts)}")
    return "\n".join(lines)


def at_equal_bits(results: dict[str, Any]) -> str:
    """The best variant of other projects over ours with the same blocks, and ours over our FP8; empty without them."""
    return "\n\n".join(part for prefix in BLOCKS if (part := _against(results, prefix)))


def _against(results: dict[str, Any], prefix: str) -> str:
    """The table of one project. "too slow": left out for this number of rows only."""
    project, clock = BLOCKS[prefix]
    known = candidates_of(results)
    lines: list[str] = []
    names = [name.removeprefix("ours ") for name in known if name.startswith("ours ") and name != OURS]
    names = [name for name in names if name not in COMPARED_ABOVE and f"{prefix}{without_rounding(name)}" in known]
    for case in results["cases"]:
        by_name = {line["candidate"]: line[clock] for line in case["lines"]}
        cells: dict[str, str] = {}
        for name in names:
            variants = [by_name[each] for each in _variants(prefix, name) if each in by_name]
            own = by_name.get(f"ours {name}")
            cells[name] = f"{min(variants) / own:.2f} / {by_name[OURS] / own:.2f}" if variants and own else "too slow"
        if cells:
            lines = lines or [" | ".join(["tokens", "routing", *cells]), " | ".join(["---"] * (len(cells) + 2))]
            lines.append(" | ".join([str(case["rows"]), case["skew"], *cells.values()]))
    if not lines:
        return ""
    what = f"With the same blocks, in {CLOCKS[clock]}: the best variant of {project} / ours, then our FP8 / ours."
    return f"{what}\n\n" + "\n".join(f"| {line} |" for line in lines)


def _variants(prefix: str, name: str) -> tuple[str, str]:
    """The candidates of another project that hold the same blocks as ours."""
    theirs = f"{prefix}{without_rounding(name)}"
    return theirs, f"{theirs} repacked"


def paused(results: dict[str, Any]) -> str:
    """The first call after a pause, in milliseconds, where it was measured: everybody's beside ours."""
    cases = [
        (case, {line["candidate"]: line for line in case["lines"] if "first_wall_ms" in line})
        for case in results["cases"]
    ]
    cases = [(case, by_name) for case, by_name in cases if OURS in by_name]
    if not cases:
        return ""
    names = [name for name in ("read", *candidates_of(results)) if any(name in by_name for _, by_name in cases)]
    lines = [" | ".join(["tokens", "routing", *names]), " | ".join(["---"] * (len(names) + 2))]
    for case, by_name in cases:
        times = [milliseconds(by_name[name], "first_wall_ms") if name in by_name else "too slow" for name in names]
        lines.append(" | ".join([str(case["rows"]), case["skew"], *times]))
    return "The first call after a pause, ms:\n\n" + "\n".join(f"| {line} |" for line in lines)


def behind_torch(results: dict[str, Any]) -> str:
    """Calls directly behind an operator of torch, where they were measured: everybody's beside ours."""
    names = [name for name in candidates_of(results) if name != OURS]
    lines = [" | ".join(["tokens", "routing", f"{OURS}, ms", "of ours alone", *names])]
    lines.append(" | ".join(["---"] * (len(names) + 4)))
    for case in results["cases"]:
        by_name = {line["candidate"]: line for line in case["lines"] if "behind_wall_ms" in line}
        if OURS not in by_name:
            continue
        own = by_name[OURS]["behind_wall_ms"]
        cells = [str(case["rows"]), case["skew"], milliseconds(by_name[OURS], "behind_wall_ms")]
        cells.append(f"{own / by_name[OURS]['wall_ms']:.2f}")
        cells += [f"{by_name[name]['behind_wall_ms'] / own:.2f}" if name in by_name else "too slow" for name in names]
        lines.append(" | ".join(cells))
    if len(lines) == 2:
        return ""
    heading = "Calls directly behind an operator of torch, as in an engine; others: wall time of such calls over ours:"
    return f"{heading}\n\n" + "\n".join(f"| {line} |" for line in lines)


def section(results: dict[str, Any]) -> str:
    parts = (
        described(results),
        table(results),
        goals(results),
        at_equal_bits(results),
        paused(results),
        behind_torch(results),
        left_out(results["cases"]),
    )
    return "\n\n".join(part for part in parts if part)


def plot(all_results: list[dict[str, Any]], path: Path) -> None:
    """Processor time of everybody over ours, one panel a file and routing; both axes logarithmic."""
    from matplotlib.figure import Figure

    panels = [(r, skew) for r in all_results for skew in dict.fromkeys(case["skew"] for case in r["cases"])]
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for axes, (results, skew) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in candidates_of(results):
            points = [
                (case["rows"], line["times_ours"])
                for case in results["cases"]
                for line in case["lines"]
                if case["skew"] == skew and line["candidate"] == name
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=3 if name == OURS else 1.5)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="processor time over ours")
        axes.set_title(f"{results['shape']['experts']} experts, {skew} routing\n{results['device']}", fontsize=10)
        axes.grid(which="both", alpha=0.25)
        axes.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of experts_cpu.py")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--into", type=Path, help=f"a page with the lines {BEGIN} and {END}")
    options = parser.parse_args()
    everything = [json.loads(path.read_text()) for path in options.results]
    sections = "\n\n".join(section(results) for results in everything)
    if options.into is None:
        print(sections)
    else:
        write_between(options.into, BEGIN, END, sections)
    if options.plot is not None:
        plot(everything, options.plot)


if __name__ == "__main__":
    main()
