"""The ratios in the README and in docs/performance.md are those of the result files, computed by hand here once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.headline import BEGIN, END, PAGE, README, RESULTS, ROOT, first_lines, lines, table
from tools.pages import between


@pytest.fixture
def results(tmp_path: Path) -> Path:
    walls = {"ours fp8": 2.0, "vllm fp8": 3.0, "vllm bf16": 5.0, "transformers grouped_mm bf16": 100.0}
    cpu = {
        "command": "measure experts",
        "device": "a processor",
        "versions": {"torch": "2.13.0"},
        "shape": {"hidden": 64, "inter": 32, "experts": 8},
        "cases": [
            {"rows": 1, "skew": "uniform", "lines": [{"candidate": n, "wall_ms": ms} for n, ms in walls.items()]},
            {"rows": 1, "skew": "zipf", "lines": []},
        ],
    }
    ms = {"one_sided": 2.0, "all_to_all": 12.0, "all_gather": 9.0}
    rows = [{"ranks": 2, "tokens": tokens, "ms": ms} for tokens in (8, 128, 1024)]
    peers, sizes = ("DeepSeek", "vLLM", "SGLang vectorised"), {"a": 10.0, "b": 30.0, "c": 90.0}
    planned = [{"what": f"{size}: times {peer}", "value": sizes[size]} for size in sizes for peer in peers]
    cpu_ms = {f"{who} {kind}": ms for kind in ("q4 k", "q8 0", "mxfp4") for who, ms in (("ours", 4.0), ("ggml", 8.0))}
    spent = [
        {"candidate": name, "cpu_ms": ms, "wall_ms": ms} for name, ms in {**cpu_ms, "ggml mxfp4 repacked": 6.0}.items()
    ]
    blocks = {"command": "measure blocks", "cases": [{"rows": 1, "lines": spent}]}
    walls = {"ours int4 g32": 2.0, "vllm int4 g32": 5.0, "ours int4 g128": 1.0, "vllm int4 g128": 3.0}
    four = [{"candidate": name, "cpu_ms": 0.0, "wall_ms": ms} for name, ms in walls.items()]
    both = {"command": "measure blocks with tiles", "cases": [{"rows": 1, "lines": [*spent, *four]}]}
    waited = {"ours": 2.0, "vllm fp8": 4.0, "vllm bf16": 7.0, "kt-kernel fp8": 12.0}
    most = {"ours": 2.0, "vllm fp8": 8.0, "vllm bf16": 3.0}  # where a call of kt-kernel takes too long
    tiles = {
        "command": "measure tiles",
        "device": "another processor",
        "shape": {"E": 8, "H": 64, "I": 32},
        "cases": [
            {"rows": rows, "lines": [{"candidate": n, "states": {"all": {"wall_ms": ms}}} for n, ms in case.items()]}
            for rows, case in ((1, waited), (1024, most))
        ],
    }
    halved = [
        {"candidate": n, "wall_ms": ms} for n, ms in {"ours fp8": 4.0, "vllm bf16": 6.0, "kt-kernel bf16": 20.0}.items()
    ]
    avx2 = cpu | {"command": "measure registers", "cases": [{"rows": 1, "skew": "uniform", "lines": halved}]}
    wide = [{"candidate": n, "wall_ms": ms} for n, ms in {"ours fp8": 5.0, "vllm bf16": 11.0}.items()]
    vnni = cpu | {"command": "measure wide registers", "cases": [{"rows": 1, "skew": "uniform", "lines": wide}]}
    rounds = ([5.0, 10.0, 10.0], [2.0, 2.0, 40.0])
    alone, ours = ({"seconds": {"batch 1": each, "prefill 512": each}} for each in rounds)
    engines = {"vllm": alone, "vllm+moe_mk": ours, "vllm+zentorch+moe_mk": ours, "vllm+moe_mk+int8:int4": ours}
    engines |= {"transformers": alone, "transformers+moe_mk+linears": ours, "transformers+moe_mk+blocks": ours}
    model = {"model": "qwen3-30b-a3b", "layers": 2, "cases": {"batch 1": [], "prefill 512": []}}
    for name, found in (
        ("engines_bf16", model | {"contestants": engines}),
        ("experts_cpu_e8", cpu),
        ("experts_avx512vnni", vnni),
        ("experts_avx512vnni_int4", blocks | {"command": "measure wide blocks"}),
        ("experts_avx2", avx2),
        ("experts_avx2_int4", blocks | {"command": "measure small blocks"}),
        ("experts_cpu_int4", blocks),
        ("experts_amx", tiles),
        ("experts_amx_int4", both),
        ("transports_cpu", {"command": "measure transports", "rows": rows}),
        ("eplb_cpu", {"command": "measure plans", "goals": planned}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_ratios_are_the_other_time_over_ours(results: Path) -> None:
    found = [list(line.ratios) for line in lines(results)]
    # The median of 5/2, 10/2 and 10/40 for engines that have another run; 3/2, 5/2 and 100/2 for experts, 8/4 and the
    # best of 8/4 and 6/4 for blocks; 11/5 and these blocks with VNNI; 6/4, 20/4 and these blocks with AVX2; 4/2 and
    # 8/2, 7/2 and 3/2, and 12/2 with tiles, the same blocks, 5/2 and 3/1 for INT4; 12/2 and 9/2 for each number of
    # tokens; the median of 10, 30 and 90.
    blocks = [[2.0], [2.0], [1.5]]
    experts = [
        [2.5, 2.5], [2.5, 2.5], [2.5, 2.5], [1.5], [2.5], [50.0], *blocks, [2.2], *blocks, [1.5], [5.0], *blocks,
        [2.0, 4.0], [3.5, 1.5], [6.0], *blocks, [2.5], [3.0],
    ]  # fmt: skip
    assert found == [*experts, [6.0] * 3, [4.5] * 3, [30.0], [30.0], [30.0]]
    assert "| 1.50 |" in str(lines(results)[3]) and "| 50 |" in str(lines(results)[5])


def test_the_table_takes_the_place_of_an_older_one(results: Path) -> None:
    once = between(f"before\n{BEGIN}old\n{END}\nafter\n", BEGIN, END, table(results))
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    measured = (
        "experts", "blocks", "wide registers", "wide blocks", "registers", "small blocks", "tiles", "blocks with tiles",
        "transports", "plans",
    )  # fmt: skip
    assert "\n".join(f"measure {what}" for what in measured) in once
    assert between(once, BEGIN, END, table(results)) == once


def test_the_readme_has_one_row_of_each_kind(results: Path) -> None:
    rows = first_lines(results).splitlines()[2:]
    ratios = [row.split("|")[4].strip() for row in rows]
    assert ratios == [*["2.50 / 2.50"] * 3, "1.50", "2.00 / 4.00", "2.50", "6.00 / 6.00 / 6.00", "30"]


@pytest.mark.row("N24")
@pytest.mark.parametrize(("page", "written"), [(README, first_lines), (PAGE, table)], ids=("readme", "performance"))
def test_a_page_shows_the_results_that_are_here(page: str, written: Callable[[Path], str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert between(text, BEGIN, END, "\n" + written(ROOT / RESULTS)) == text, "run `make features`"
