"""The page of transports states what the registry states, and reports when it no longer does."""

from pathlib import Path

import pytest

from moe_mk.prepare_finalize import PREPARE_FINALIZE
from tools.pages import of_this_repository
from tools.transports import limits_of, limits_table, main, plan_of, render, table_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_in_the_repository_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_a_stale_page_is_reported_and_then_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "transports.md"
    assert main(["--check", "--root", str(tmp_path)]) == 1 and not page.exists()
    assert main(["--root", str(tmp_path)]) == 0 and page.read_text() == render()
    assert main(["--check", "--root", str(tmp_path)]) == 0
    page.write_text(render().replace("29,448,576", "29,448,577"))
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "-| `nvlink_one_sided`, `moe_ep_one_sided` | h200 | 29,448,577" in capsys.readouterr().err


def test_every_transport_has_its_lines() -> None:
    kinds = list(of_this_repository(PREPARE_FINALIZE))
    names = [name for name, _ in kinds]
    assert {"all_to_all", "deepep_ll", "hierarchical", "nvlink_one_sided"} <= set(names)
    assert [line.split("`")[1] for line in list(table_of(kinds))[2:]] == names
    planned = "\n".join(plan_of(kinds))
    assert all(planned.count(f"`{name}`") == 1 for name in names)
    limits = "\n".join(limits_table(kinds))
    assert all(f"`{name}`" in limits for name in names)


def test_a_plugin_of_somebody_else_is_left_out() -> None:
    plugin = type("Elsewhere", (PREPARE_FINALIZE["all_to_all"],), {"__module__": "somebody.else"})
    assert "theirs" not in dict(of_this_repository({**dict(PREPARE_FINALIZE.items()), "theirs": plugin}))


def test_bytes_are_those_of_the_plan_and_limits_those_of_the_oracle() -> None:
    # Worked by hand in tests/prepare_finalize: 128 tokens of DeepSeek-V3 on 8 ranks.
    planned = list(plan_of(list(of_this_repository(PREPARE_FINALIZE))))
    assert "| `nvlink_one_sided`, `moe_ep_one_sided` | h200 | 29,448,576 | - | 235,585,920 |" in planned
    assert list(limits_of("nvlink_one_sided", PREPARE_FINALIZE["nvlink_one_sided"])) == [
        ("32 ranks", "needs all ranks in one node, 32 ranks span 4 nodes"),
        ("96 ranks", "serves up to 64 ranks, the group has 96"),
        ("top-24", "the kernels take 22 experts a token, this router has 24"),
        ("a layer in fp16", "carries rows of one dtype, and fp16 layers sum in fp32 [dtype = bf16]"),
    ]
    assert not list(limits_of("all_to_all", PREPARE_FINALIZE["all_to_all"]))


def test_a_limit_of_several_transports_is_listed_once() -> None:
    names = ("no_ep", "nvlink_one_sided", "one_sided")
    lines = list(limits_table([(name, PREPARE_FINALIZE[name]) for name in names]))
    assert (
        "| 32 ranks | needs all ranks in one node, 32 ranks span 4 nodes | `nvlink_one_sided`, `one_sided` |" in lines
    )
