"""The measured figures of README.md and of the pages docs/results-*.md, from `benchmarks/results/`; see pages.py.

Each table row comes from one run; ratios are formed within a round, in which one call follows the other, because the
speed of memory changes between rounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from tools.pages import filled, markdown

ROOT = Path(__file__).resolve().parent.parent
README, ENGINES_PAGE, PROCESSORS_PAGE = "README.md", "docs/results-engines.md", "docs/results-processors.md"
QUICKSTART, LAWS_PAGE = "docs/quickstart.md", "docs/laws.md"
INSTRUCTION_SETS_PAGE = "docs/results-instruction-sets.md"
RESULTS = "benchmarks/results"
HEAD = ("model, format", "case", "engine tok/s", "+ moe_mk tok/s", "ratio (min..max over rounds)")
FORMATS = {"": "bf16", "fp8": "FP8", "int4": "INT4 g128", "mxfp4": "MXFP4", "q4_k": "Q4_K"}
"""By the suffix of a contestant of benchmarks/engines.py."""
ALONE = {"vllm": ("vllm", "vllm+zentorch"), "transformers": ("transformers", "llama.cpp")}
"""Engines that those with moe_mk are compared with, if they ran in turn with it."""
PARTS = {"linears": "packed linear layers", "blocks": "whole blocks", "int8": "INT8 tokens"}
"""What moe_mk computes besides experts, and in what."""
FIRST = (
    ("engines_bf16", "vllm+moe_mk", "vllm"),
    ("engines_avx2", "vllm+moe_mk", "vllm"),
    ("engines_bf16", "vllm+moe_mk", "vllm+zentorch"),
    ("engines_transformers", "transformers+moe_mk+linears", "transformers"),
    ("engines_q4k", "transformers+moe_mk+blocks+linears:q4_k", "llama.cpp:q4_k"),
    ("engines_deepseek", "vllm+moe_mk", "vllm+zentorch"),
    ("engines_formats", "vllm+moe_mk:fp8", "vllm"),
    ("engines_formats", "vllm+moe_mk:int4", "vllm"),
)
"""Comparisons of the README: run, with moe_mk, and alone."""
SLOWER_ONLY = FIRST[5:6]
"""Comparisons that the README has for the cases in which moe_mk is slower."""
FIRST_CASES = ("batch 1", "prefill 512")
"""Cases of the README, in addition to all in which moe_mk is slower."""
INSTRUCTIONS = {"engines_avx2": "AVX2"}
DEFAULT = "AVX-512 with bf16"
"""Instructions of the processors on which engines ran."""
PROCESSORS = {
    "AMD EPYC (Zen 4), AVX-512 with bf16": (
        "experts_cpu_e8", "experts_cpu_engine", "experts_cpu_formats", "experts_cpu_int4",
    ),
    "AMD EPYC (Zen 5), AVX-512 with bf16": ("experts_cpu_e32", "experts_cpu_e256"),
    "AMD EPYC (Zen 4), kernels limited to AVX-512 VNNI": ("experts_avx512vnni", "experts_avx512vnni_int4"),
    "AMD EPYC (Zen 3), AVX2": ("experts_avx2", "experts_avx2_int4"),
    "Intel Xeon (Ice Lake), AVX-512 VNNI, then kernels limited to AVX2": ("experts_icelake", "experts_icelake_avx2"),
    "Intel Xeon, AMX": ("experts_amx", "experts_amx_int4", "experts_amx_int4_e32"),
}  # fmt: skip
"""Runs of single layers by the processor that they ran on."""
SIZES = ("experts", "hidden", "inter")
NOT_SHOWN = re.compile(r" --note '[^']*'| --into \S+")
"""Of recorded commands."""
WITHIN = 1.05
"""How much slower than the best the chosen instruction set may be."""
OTHERS = {"vllm": "vLLM"} | {name: name for name in ("zentorch", "transformers", "kt-kernel", "ggml", "ik_llama.cpp")}
"""Projects in the names of candidates."""
INTEGER_TOKENS = ("ggml", "ik_llama.cpp")
"""Those that round tokens to INT8: they are compared with both our roundings, in processor time."""


@dataclass(frozen=True)
class Comparison:
    """An engine with moe_mk and one without in one case of a run, in tokens per second."""

    run: str
    model: str
    own: str
    alone: str
    case: str
    own_rate: float
    alone_rate: float
    ratios: Sequence[float]
    """Speed with moe_mk over that without, one for each round."""

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def same_format(self) -> bool:
        return self.own.partition(":")[2] == self.alone.partition(":")[2]

    def row(self) -> tuple[str, ...]:
        """Cells below HEAD."""
        engine, _, form = self.own.partition(":")
        parts = [words for part, words in PARTS.items() if part in engine.split("+")]
        base = f" in {self.own.partition('+')[0]}" if self.own.partition("+")[0] != _engine(self.alone) else ""
        what = f"{self.model}, {FORMATS[form]}, {_engine_named(self.alone)}"
        if not self.same_format:
            what += f" in {FORMATS[self.alone.partition(':')[2]]}"
        if "zentorch" in engine:
            parts.insert(0, "zentorch")
        if parts or base:
            what += f" (moe_mk{base}{' with ' if parts else ''}{' and '.join(parts)})"
        if self.run in INSTRUCTIONS:
            what += f", {INSTRUCTIONS[self.run]}"
        spread = f"{self.ratio:.2f} ({min(self.ratios):.2f}..{max(self.ratios):.2f})"
        return what, self.case, f"{self.alone_rate:.1f}", f"{self.own_rate:.1f}", spread


def comparisons(results: Path) -> list[Comparison]:
    """Every engine with moe_mk against those without of the same run, same format against same format first."""
    found = [each for path in sorted(results.glob("engines_*.json")) for each in _comparisons_of(path)]
    return sorted(found, key=lambda each: (not each.same_format, each.run))  # stable: cases keep their order


def readme_table(results: Path) -> str:
    """Rows of `FIRST` with the machine, versions and dates."""
    everything, rows = comparisons(results), []
    for wanted in FIRST:
        of_pair = [each for each in everything if (each.run, each.own, each.alone) == wanted]
        cases = () if wanted in SLOWER_ONLY else FIRST_CASES
        rows += [each for each in of_pair if each.ratio < 1 or each.case in cases]
    runs = [_read(results, name) for name in dict.fromkeys(each.run for each in rows)]
    layers = " or ".join(sorted({str(run["layers"]) for run in runs}))
    machines = " and ".join(dict.fromkeys(run["processor"] for run in runs))
    about = (
        f"First {layers} layers of each model, random weights; {machines}, {DEFAULT} except where stated; "
        f"{_dates(runs)}; {_versions(runs)}. {_slower(everything)}"
    )
    return f"{markdown([HEAD, *(each.row() for each in rows)])}\n\n{about}\n"


ENGINES_INTRODUCTION = """\
# Results: engines

Written by `make features` from `benchmarks/results/engines_*.json`; do not edit. Tokens per second of whole engines
on random models of real width with the first layers of the official ones, in each run in turns; figures of different
runs are not comparable. A cell: without `moe_mk`, with it, and the ratio of the two in the same round, median
(min..max) over the rounds, which is not the quotient of the two medians. [Engines](engines.md#tokens-per-second)
describes the measurement.
"""
PROCESSORS_INTRODUCTION = """\
# Results by processor

Written by `make features` from `benchmarks/results/experts_*.json`; do not edit. One layer of E routed experts of
hidden x intermediate size, top-8, uniform routing, two threads; all implementations of a run take turns in one
process. Columns are the tokens of a call. *FORMAT, ms*: wall time of a call of `moe_mk`, of a run on one thread its
processor time. *X FORMAT*: the time of X divided by that of `moe_mk` with weights of the same format, or of the one
behind the slash; above 1, `moe_mk` is faster. ggml (llama.cpp; the faster variant of each block) and ik_llama.cpp,
which round tokens to INT8, are compared in processor time, also with `moe_mk` doing so (w4a8, w8a8), all others in wall
time. Empty: not measured. [Kernels](kernels.md) describes the kernels.
"""


def engines_page(results: Path) -> str:
    """docs/results-engines.md: a section for each run, with its command."""
    everything = comparisons(results)
    lines = [ENGINES_INTRODUCTION, _slower(everything)]
    for name in sorted({each.run for each in everything}):
        run, rows = _read(results, name), [each for each in everything if each.run == name]
        peaks = [f"`{c}` {v['peak_bytes'] / 1e9:.1f} GB" for c, v in run["contestants"].items() if "peak_bytes" in v]
        facts = (f"{run['model']}, first {run['layers']} layers", run["processor"], INSTRUCTIONS.get(name, DEFAULT))
        lines += [
            f"\n## {name.removeprefix('engines_').replace('_', ' ')}\n",
            f"{'; '.join((*facts, run['date'], _versions([run])))}. Peak memory: {', '.join(peaks)}.\n",
            markdown(_by_case(rows)),
            f"\n```text\n{run['command']}\n```",
        ]
    return "\n".join(lines) + "\n"


def _slower(everything: Iterable[Comparison]) -> str:
    """State in how many comparisons of all runs moe_mk is slower."""
    alike = [each for each in everything if each.same_format]
    slower = sum(each.ratio < 1 for each in alike)
    return f"In {slower} of {len(alike)} comparisons in the same format the ratio is below 1."


def _by_case(rows: Sequence[Comparison]) -> Iterator[Sequence[str]]:
    """The table of one run: a row for each pair of engines, a column for each case."""
    cases = list(dict.fromkeys(each.case for each in rows))
    pairs: dict[str, dict[str, str]] = {}
    for name, case, alone, own, ratio in (each.row() for each in rows):
        pairs.setdefault(name.partition(", ")[2], {})[case] = f"{alone}, {own}: {ratio}"
    yield "format, compared with", *cases
    yield from ((pair, *(cells.get(case, "") for case in cases)) for pair, cells in pairs.items())


def processors_page(results: Path) -> str:
    """docs/results-processors.md: a table for each processor that was measured."""
    lines = [PROCESSORS_INTRODUCTION]
    for processor, names in PROCESSORS.items():
        runs = [_read(results, name) for name in names]
        tokens = sorted({case["rows"] for run in runs for case in run["cases"]})
        lines += [f"## {processor}\n", f"{runs[0]['device']}, torch {runs[0]['versions']['torch']}.\n"]
        for run in runs:
            tokens = sorted({case["rows"] for case in run["cases"]})
            shape = run["shape"]
            sizes = (shape.get(name) or shape[letter] for name, letter in zip(SIZES, "EHI", strict=True))
            head = "E={}, {}x{}".format(*sizes)
            lines += [
                markdown([(head, *tokens), *_layer_rows(run, tokens)]),
                f"\n`{NOT_SHOWN.sub('', run['command'])}`\n",
            ]
    return "\n".join([*lines, *_placements(results)]) + "\n"


def _read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def _engine(contestant: str) -> str:
    return contestant.partition(":")[0].partition("+")[0]


def _engine_named(contestant: str) -> str:
    names = {"vllm": "vLLM", "vllm+zentorch": "vLLM with zentorch"}
    return names.get(contestant.partition(":")[0], contestant.partition(":")[0])


def _comparisons_of(path: Path) -> Iterator[Comparison]:
    """Compare the engines of one run in each case."""
    run = json.loads(path.read_text(encoding="utf-8"))
    timed = {name: each["seconds"] for name, each in run["contestants"].items() if "seconds" in each}
    for own in (name for name in timed if "+moe_mk" in name):
        for alone in (name for name in timed if "+moe_mk" not in name):
            if alone.partition(":")[0] not in ALONE[_engine(own)] or ("zentorch" in own and "zentorch" not in alone):
                continue
            for case, (sequences, prompt, new) in run["cases"].items():
                count = sequences * (new if new > 1 else prompt)
                own_rate, alone_rate = (count / median(timed[name][case]) for name in (own, alone))
                ratios = tuple(map(truediv, timed[alone][case], timed[own][case]))
                yield Comparison(path.stem, run["model"], own, alone, case, own_rate, alone_rate, ratios)


def _dates(runs: Iterable[Mapping[str, Any]]) -> str:
    dates = sorted({run["date"] for run in runs})
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def _versions(runs: Iterable[Mapping[str, Any]]) -> str:
    each = [c for run in runs for c in run["contestants"].values() if "version" in c]
    torch = [f"torch {c['torch']}" for c in each if "torch" in c]
    return ", ".join(dict.fromkeys([c["version"] for c in each] + torch))


def _layer_rows(run: Mapping[str, Any], tokens: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Our times in ms, then those of others over ours in the same format, or in FP8 where it was not measured."""
    wall, cpu = _times(run, "wall_ms"), _times(run, "cpu_ms")
    clock, unit = (cpu, "ms of one thread") if run["shape"].get("threads") == 1 else (wall, "ms")
    for name, times in clock.items():
        if name.startswith("moe_mk") and not name.endswith(("avx2", "avx512", "batch-invariant")):
            yield f"{name.removeprefix('moe_mk ')}, {unit}", *(_milliseconds(times.get(count)) for count in tokens)
    for name in wall:
        project, _, form = name.partition(" ")
        if project not in OTHERS or "repacked" in form or "eager" in form:
            continue
        own = f"moe_mk {form.removeprefix('grouped_mm ')}"
        integers = [each for each in (f"{own} w4a8", f"{own} w8a8") if project in INTEGER_TOKENS and each in wall]
        clock = cpu if project in INTEGER_TOKENS else wall
        variants = [clock[each] for each in (name, f"{name} repacked") if each in clock]
        for each in (own if own in wall else "moe_mk fp8", *integers):
            ratios = [_ratio(variants, clock[each], count) for count in tokens]
            same = each.endswith(f" {form.removeprefix('grouped_mm ')}")
            compared = "" if same else f" / {each.removeprefix('moe_mk ')}"
            yield f"{OTHERS[project]} {form}{compared}", *ratios


def _milliseconds(time: float | None) -> str:
    return "" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def _ratio(variants: Sequence[Mapping[int, float]], ours: Mapping[int, float], count: int) -> str:
    theirs = [times[count] for times in variants if count in times]
    return _quotient(min(theirs) / ours[count]) if theirs and count in ours else ""


def _quotient(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


def _times(run: Mapping[str, Any], clock: str) -> dict[str, dict[int, float]]:
    """Milliseconds of each candidate by tokens, with uniform routing and the cores in any state."""
    found: dict[str, dict[int, float]] = {}
    for case in run["cases"]:
        if case.get("skew", "uniform") != "uniform":
            continue
        for line in case["lines"]:
            name = {"ours": "ours fp8", "ours avx512": "ours fp8 avx512"}.get(line["candidate"], line["candidate"])
            measured = line.get("states", {"all": line})["all"]
            found.setdefault(name.replace("ours", "moe_mk"), {})[case["rows"]] = measured[clock]
    return found


def cells_table(run: Mapping[str, Any]) -> str:
    """A row for each format and its instruction set, a column for each number of rows; others as times over its own."""
    counts = list(dict.fromkeys(cell["rows"] for cell in run["cells"]))
    formats: dict[str, dict[int, str]] = {}
    for cell in run["cells"]:
        times, own = cell["wall_ms"].items(), cell["wall_ms"][cell["chosen"]]
        others = "".join(f"; {isa} {_quotient(ms / own)}" for isa, ms in times if isa != cell["chosen"])
        limit, share = max(("r", cell["of_read"]), ("p", cell["of_peak"]), key=lambda each: each[1])
        row = formats.setdefault(f"{cell['format']}, {cell['chosen']}", {})
        row[cell["rows"]] = f"{own:.3g} ({limit} {share:.2f}{others})"
    rows = ((name, *(cells.get(count, "") for count in counts)) for name, cells in formats.items())
    return markdown([("rows of an expert", *counts), *rows])


def chosen_well(run: Mapping[str, Any]) -> str:
    """How often the chosen instruction set is within 5 % of the best one, and where it is not."""
    slow = [cell for cell in run["cells"] if cell["of_best"] * WITHIN < 1]
    worst = "".join(f"; {c['format']} at {c['rows']} rows {c['of_best']:.2f}" for c in slow)
    within = f"{len(run['cells']) - len(slow)} of {len(run['cells'])}"
    return f"Chosen within {WITHIN - 1:.0%} of the best in {within} cells{worst}."


INSTRUCTION_SETS_INTRODUCTION = """\
# Results: instruction sets

Written by `make features` from `benchmarks/results/processors`; do not edit. `make bench-cpu` writes the file of a
processor. A row is a format and the instruction set that is chosen for it. A cell is a number of rows of each expert:
milliseconds, the share of the nearer limit (r: of reading the packed weights once; p: of bare multiply-adds, in f32
with AVX2, in 16-bit integers with AVX-512; products of INT8 rows exceed both), and the time of each other instruction
set, in turns, over that of the chosen one. [Kernels](kernels.md#instruction-sets) describes the choice.
"""


def instruction_sets_page(results: Path) -> str:
    """A table for each processor that benchmarks/processor.py has measured: every instruction set in every cell."""
    return "\n".join([INSTRUCTION_SETS_INTRODUCTION, *_instruction_sets(results)]) + "\n"


def _instruction_sets(results: Path) -> Iterator[str]:
    for path in sorted((results / "processors").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        yield f"## {run['processor']}, {run['model']}\n"
        yield f"{run['threads']} threads, torch {run['versions']['torch']}, {run['date']}. {run['instruction sets']}.\n"
        yield cells_table(run)
        yield f"\n{chosen_well(run)}\n\n```text\n{run['command']}\n```\n"


def _placements(results: Path) -> Iterator[str]:
    """Times of other EPLB implementations over ours, for identical placements."""
    run = _read(results, "eplb_cpu")
    found = [(goal["what"].split(": times "), goal["value"]) for goal in run["goals"] if ": times " in goal["what"]]
    peers = list(dict.fromkeys(peer for (_, peer), _ in found))
    sizes = list(dict.fromkeys(size for (size, _), _ in found))
    values = {(size, peer): value for (size, peer), value in found}
    yield "## EPLB\n\nTime of another implementation over that of `moe_mk.placement`, with identical placements.\n"
    rows = [[_quotient(values[size, peer]) if (size, peer) in values else "" for peer in peers] for size in sizes]
    yield markdown([["size", *peers], *([size, *row] for size, row in zip(sizes, rows, strict=True))])
    yield f"\n```text\n{run['command']}\n```"


def matrix_table(results: Path) -> str:
    """The quick tests by versions, as `tools/matrix.py` ran them."""
    rows: list[tuple[object, ...]] = [("Python", "torch", "numpy", "passed", "failed", "skipped", "date")]
    for run in sorted(_read(results, "matrix"), key=lambda each: str(each.get("torch"))):
        if "problem" not in run:
            failed = run["failures"] + run["errors"]
            passed = run["tests"] - failed - run["skipped"]
            rows.append((run["python"], run["torch"], run["numpy"], passed, failed, run["skipped"], run["date"]))
    return markdown(rows)


WORDS = {"kept": "yes", "broken": "**no**", "refused": "error", "died": "**dies**", "no answer": "**hangs**"}


def laws_table(results: Path) -> str:
    """The laws, the kernels that keep all of them, and for each other kernel what it does not keep."""
    run, kept, departures, absent = _read(results, "laws"), [], dict[str, list[str]](), dict[str, list[str]]()
    laws = dict.fromkeys(each["law"] for outcomes in run["peers"].values() for each in outcomes if each["law"])
    for peer, outcomes in run["peers"].items():
        if unable := [each["message"] for each in outcomes if each["law"] == ""]:
            absent.setdefault(unable[0], []).append(peer)
        elif departed := "; ".join(_departure(each) for each in outcomes if each["status"] != "kept"):
            departures.setdefault(departed, []).append(peer)
        else:
            kept.append(peer)
    rows = [("kernel", "laws that it does not keep"), *(("; ".join(names), law) for law, names in departures.items())]
    without = "\n".join(f"Not run, {why}: {', '.join(names)}." for why, names in absent.items())
    libraries = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    about = f"{libraries}; {run['device']['processor']}; `{run['command']}`"
    head = f"Laws: {', '.join(laws)}. All are kept by {'; '.join(kept)}."
    return "\n\n".join([head, markdown(rows), *([without] if without else []), about])


def _departure(outcome: Mapping[str, Any]) -> str:
    """A law that is not kept: the verdict, and the message or the signal."""
    message = re.sub(r"^.*, (signal \d+), after \d+ s$", r"\1", outcome["message"])
    return f"{outcome['law']} {WORDS[outcome['status']]}: {message}"


def pages(root: Path) -> dict[str, str]:
    """The README with its table, the pages of results, and the tables of versions and of laws."""
    results = root / RESULTS
    return {
        **filled(root, README, "figures", "\n" + readme_table(results)),
        ENGINES_PAGE: engines_page(results),
        PROCESSORS_PAGE: processors_page(results),
        INSTRUCTION_SETS_PAGE: instruction_sets_page(results),
        **filled(root, QUICKSTART, "matrix", matrix_table(results)),
        **filled(root, LAWS_PAGE, "laws", laws_table(results)),
    }
