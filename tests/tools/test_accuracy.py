"""The accuracy table: complete, and what the page shows is what the tool computes."""

import re

import pytest

from moe_mk.quant.kinds import KINDS
from tools import accuracy as tool


def rows(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells[2:]}


def test_every_type_has_a_line() -> None:
    assert {case.settings.weights for case in tool.CASES} == set(KINDS) - {"fp16", "fp32"}


@pytest.mark.slow
def test_the_page_shows_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (tool.ROOT / tool.PAGE).read_text(encoding="utf-8")
    shown = rows(page.partition("accuracy: begin")[2].partition("accuracy: end")[0])
    assert list(shown) == [case.title for case in tool.CASES]
    some = [case for case in tool.CASES if case.title in ("int8 channel, W8A8 token", "nvfp4, W4A4", "mxfp4, W4A16")]
    monkeypatch.setattr(tool, "CASES", some)
    for title, computed in rows(tool.table()).items():
        for got, written in zip(computed, shown[title], strict=True):
            if re.fullmatch(r"[\d.]+%?", got) and re.fullmatch(r"[\d.]+%?", written):
                # Another CPU sums in another order: the figures agree, not their last digits.
                assert float(got.strip("%")) == pytest.approx(float(written.strip("%")), rel=0.02)
            else:
                assert got == written
