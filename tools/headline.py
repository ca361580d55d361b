"""Write the table of ratios in docs/performance.md, and its first lines into README.md, from `benchmarks/results/`.

`--check` writes nothing and fails where a table is stale.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from tools.pages import between, write_or_compare

ROOT = Path(__file__).resolve().parent.parent
README, PAGE, RESULTS = "README.md", "docs/performance.md", "benchmarks/results"
BEGIN, END = "<!-- ratios: written by `make features` -->", "<!-- end of ratios -->"
HEAD = "| moe_mk | compared with | cases | speedup |\n|---|---|---|---|\n"
PEERS = {
    "vllm fp8": "vLLM's FP8 path",
    "vllm bf16": "vLLM's bf16 path",
    "transformers grouped_mm bf16": "transformers, grouped_mm in bf16",
    "kt-kernel fp8": "kt-kernel's FP8 path, 1 worker",
    "kt-kernel bf16": "kt-kernel's bf16 path, 1 worker",
}
BLOCKS = {"q4 0": "Q4_0", "q4 k": "Q4_K", "q8 0": "Q8_0", "mxfp4": "MXFP4"}
ENGINES = {
    "vllm": ("vLLM", "vLLM, bf16"),
    "vllm+zentorch": ("vLLM, zentorch", "vLLM with zentorch, bf16"),
    "transformers": ("transformers", "transformers, grouped_mm, bf16"),
}
"""With moe_mk, and alone, by the names of benchmarks/engines.py."""
PARTS = {
    "": "",
    "+linears": " with packed linear layers",
    "+blocks+linears": " with whole blocks and packed linear layers",
}
"""What moe_mk computes besides experts."""
COLLECTIVES = {"all_to_all": "an all-to-all over gloo", "all_gather": "all-gather and reduce-scatter over gloo"}
PLANNERS = {
    "DeepSeek": "DeepSeek's implementation",
    "vLLM": "vLLM's implementation",
    "SGLang vectorised": "SGLang's vectorised implementation",
}
FIRST = (
    ("`moe_mk`, qwen3-30b-a3b, 2 layers, bf16", "vLLM, bf16"),
    ("`moe_mk` with AVX2, qwen3-30b-a3b, 3 layers, bf16", "vLLM, bf16"),
    ("`moe_mk`, qwen3-30b-a3b, 2 layers, fp8", "vLLM, bf16"),
    ("`moe_mk`, qwen3-30b-a3b, 2 layers, int4, tokens", "vLLM, bf16"),
    ("`moe_mk`, qwen3-30b-a3b, 2 layers, int4 with INT8 tokens", "vLLM, bf16"),
    ("vLLM, zentorch and `moe_mk`", "vLLM with zentorch, bf16"),
    ("`moe_mk` with packed linear layers, qwen3-30b-a3b, 2 layers, bf16", "transformers, grouped_mm, bf16"),
    ("`cpu_native`, FP8", "vLLM's FP8 path"),
    ("with AMX, FP8", "vLLM's FP8 path"),
    ("INT4 g32 experts with AMX", "vLLM's INT4 path"),
    ("combine, 2 ranks", "an all-to-all over gloo"),
    ("EPLB", "DeepSeek's implementation"),
)
"""Rows of the README: part of what is compared, and with which peer."""


@dataclass(frozen=True)
class Line:
    what: str
    compared_with: str
    cases: str
    ratios: Sequence[float]

    def __str__(self) -> str:
        ratios = " / ".join(f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.2f}" for ratio in self.ratios)
        return f"| {self.what} | {self.compared_with} | {self.cases} | {ratios} |"


def lines(results: Path) -> list[Line]:
    """The rows of the table, from result files. Raises FileNotFoundError or KeyError if a result is missing."""
    return [*_engines(results), *(line for name, rows in SOURCES.items() for line in rows(_read(results, name)))]


def table(results: Path) -> str:
    """The table, the machine and the commands."""
    found = {name: _read(results, name) for name in SOURCES}
    commands = "\n".join(each["command"] for each in found.values())
    body = "\n".join(map(str, lines(results)))
    device, torch = found["experts_cpu_e8"]["device"], found["experts_cpu_e8"]["versions"]["torch"]
    vnni, avx2, amx = (found[f"experts_{name}"]["device"] for name in ("avx512vnni", "avx2", "amx"))
    machines = f"{device}, with AVX-512 VNNI on {vnni}, with AVX2 on {avx2}, with AMX on {amx}, torch {torch}"
    return f"{HEAD}{body}\n\nMeasured in turn on {machines}; medians:\n\n```text\n{commands}\n```\n"


def first_lines(results: Path) -> str:
    """The rows of `FIRST`, in its order."""
    found = lines(results)
    return HEAD + "".join(
        f"{line}\n" for what, peer in FIRST for line in found if what in line.what and line.compared_with == peer
    )


def _read(results: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _engines(results: Path) -> Iterator[Line]:
    """Tokens per second of engines with moe_mk over those without, in every format that was measured."""
    for path in sorted(results.glob("engines_*.json")):
        found = _read(results, path.stem)
        seconds = {name: run["seconds"] for name, run in found["contestants"].items() if "seconds" in run}
        model, where = f"{found['model']}, {found['layers']} layers", " with AVX2" * ("avx2" in path.stem)
        for name, own in seconds.items():
            engine, _, form = name.partition(":")
            alone, ours, more = engine.partition("+moe_mk")
            parts = more.removesuffix("+int8")
            if ours and parts in PARTS and alone in ENGINES and alone in seconds:
                with_ours = f"{ENGINES[alone][0]} and `moe_mk`{PARTS[parts]}{where}"
                rounded = "" if parts == more else " with INT8 tokens"
                what = f"{with_ours}, {model}, {form or 'bf16'}{rounded}, tokens per second"
                # By round, in which one call follows the other: the speed of memory changes from round to round.
                ratios = [median(map(truediv, seconds[alone][case], own[case])) for case in found["cases"]]
                yield Line(what, ENGINES[alone][1], ", ".join(found["cases"]), ratios)


def _cases(found: dict[str, Any], clock: str) -> list[tuple[str, dict[str, float]]]:
    """Tokens, and milliseconds by candidate, of every case with uniform routing; of the cores in any state."""
    cases = [case for case in found["cases"] if case.get("skew", "uniform") == "uniform"]
    lines = [{each["candidate"]: each.get("states", {"all": each})["all"] for each in case["lines"]} for case in cases]
    ms = [{name: line[clock] for name, line in by_name.items()} for by_name in lines]
    return [(str(case["rows"]), each) for case, each in zip(cases, ms, strict=True)]


def _experts(found: dict[str, Any], where: str = "") -> Iterator[Line]:
    shape, cases = found["shape"], _cases(found, "wall_ms")
    names = (("hidden", "H"), ("inter", "I"), ("experts", "E"))
    hidden, inter, experts = (shape.get(name) or shape[letter] for name, letter in names)
    what = f"`cpu_native`{where}, FP8 experts {hidden} x {inter}, {experts} of them"
    for peer in PEERS:
        ratios = {rows: ms[peer] / (ms.get("ours fp8") or ms["ours"]) for rows, ms in cases if peer in ms}
        if ratios:
            yield Line(what, PEERS[peer], f"{', '.join(ratios)} tokens", list(ratios.values()))


def _blocks(found: dict[str, Any], where: str) -> Iterator[Line]:
    rows, cases = zip(*_cases(found, "cpu_ms"), strict=True)
    for kind, name in BLOCKS.items():
        theirs = [
            min((case[each] for each in (f"ggml {kind}", f"ggml {kind} repacked") if each in case), default=None)
            for case in cases
        ]
        for own, tokens in ((f"ours {kind}", ""), (f"ours {kind} w4a8", ", INT8 tokens")):
            ratios = [ms / case[own] for ms, case in zip(theirs, cases, strict=True) if ms is not None and own in case]
            if len(ratios) == len(cases):
                what, peer = f"`cpu_native`, {name} experts {where}{tokens}", "llama.cpp's ggml, its best variant, "
                yield Line(what, f"{peer}processor time", f"{', '.join(rows)} tokens", ratios)


def _int4(found: dict[str, Any]) -> Iterator[Line]:
    rows, cases = zip(*_cases(found, "wall_ms"), strict=True)
    for group in ("g32", "g128"):
        ratios = [case[f"vllm int4 {group}"] / case[f"ours int4 {group}"] for case in cases]
        what = f"`cpu_native`, INT4 {group} experts with AMX"
        yield Line(what, "vLLM's INT4 path", f"{', '.join(rows)} tokens", ratios)


def _transports(found: dict[str, Any]) -> Iterator[Line]:
    tokens = (8, 128, 1024)
    for peer, name in COLLECTIVES.items():
        for ranks in sorted({row["ranks"] for row in found["rows"]}):
            times = {row["tokens"]: row["ms"] for row in found["rows"] if row["ranks"] == ranks}
            ratios = [times[count][peer] / times[count]["one_sided"] for count in tokens]
            what = f"`one_sided`, dispatch and combine, {ranks} ranks"
            yield Line(what, name, f"{', '.join(map(str, tokens))} tokens", ratios)


def _eplb(found: dict[str, Any]) -> Iterator[Line]:
    values = {goal["what"]: goal["value"] for goal in found["goals"]}
    for peer, name in PLANNERS.items():
        name = name if peer == "DeepSeek" or peer in found.get("anchors", {}) else f"{name}, transcribed"
        ratios = [value for what, value in values.items() if what.endswith(f": times {peer}")]
        what, cases = "EPLB, identical placements", f"median of {len(ratios)} sizes"
        yield Line(what, name, cases, [median(ratios)])


SOURCES: dict[str, Callable[[dict[str, Any]], Iterable[Line]]] = {
    "experts_cpu_e8": _experts,
    "experts_cpu_int4": partial(_blocks, where="of the same sizes"),
    "experts_avx512vnni": partial(_experts, where=" with AVX-512 VNNI"),
    "experts_avx512vnni_int4": partial(_blocks, where="with AVX-512 VNNI"),
    "experts_avx2": partial(_experts, where=" with AVX2"),
    "experts_avx2_int4": partial(_blocks, where="with AVX2"),
    "experts_amx": partial(_experts, where=" with AMX"),
    "experts_amx_int4": lambda found: (*_blocks(found, "with AMX"), *_int4(found)),
    "transports_cpu": _transports,
    "eplb_cpu": _eplb,
}
"""Result files, each with the rows that it gives."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = False
    for name, written in ((README, first_lines), (PAGE, table)):
        text = between((ROOT / name).read_text(encoding="utf-8"), BEGIN, END, "\n" + written(ROOT / RESULTS))
        stale |= bool(write_or_compare(ROOT, name, text, "the table of ratios", check=check))
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
