"""The table of faults: written from the committed result, and never stale."""

import json
from pathlib import Path

import pytest

from tools import docs_faults

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_committed_result() -> None:
    assert docs_faults.main(["--check"]) == 0, "run python tools/docs_faults.py"


def test_a_report_replaces_the_result_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (docs_faults.PAGE, docs_faults.RESULT):
        (tmp_path / name).parent.mkdir(parents=True)
    result = json.loads((ROOT / docs_faults.RESULT).read_text())
    line = result["by_transport"][0]
    line["outcomes"] = dict.fromkeys(line["outcomes"], 0) | {"right": 12345, "hang": 2, "WRONG": 1}
    report = tmp_path / "report.json"
    report.write_text(json.dumps(result | {"worlds": ["not committed"]}))
    page = tmp_path / docs_faults.PAGE
    page.write_text(f"before\n{docs_faults.BEGIN}\n{docs_faults.END}\nafter\n")
    assert docs_faults.main([str(report), "--root", str(tmp_path)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert f"| {line['key']} | {line['worlds']} | 12345 |" in text and "| 2 hang, 1 WRONG |" in text
    assert "worlds" not in json.loads((tmp_path / docs_faults.RESULT).read_text())
    assert docs_faults.main(["--check", "--root", str(tmp_path)]) == 0
    page.write_text(text.replace("12345", "12346"))
    assert docs_faults.main(["--check", "--root", str(tmp_path)]) == 1
    assert "stale; run `python tools/docs_faults.py`" in capsys.readouterr().err
