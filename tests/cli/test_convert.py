"""`moe-mk convert`: what it states, what it writes, and its exit code."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Invoke


def test_a_conversion_reports_sizes_and_errors(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    done = invoke("convert", tiny, tmp_path / "out", "--to", "nvfp4")
    assert done.exit_code == 0, done.stderr
    assert (
        "experts in nvfp4" in done.stdout
        and "relative change of 33 experts: mean" in done.stdout
        and "maximum" in done.stdout
    )
    looked = invoke("inspect-checkpoint", tmp_path / "out")
    assert looked.exit_code == 0 and "sound" in looked.stdout


def test_a_type_that_does_not_exist_is_refused(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    refused = invoke("convert", tiny, tmp_path / "out", "--to", "int5")
    assert refused.exit_code == 2 and "'int5'" in refused.stderr and not (tmp_path / "out").exists()
