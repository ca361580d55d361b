"""Records of behaviour: digests that see every bit, and differences that name the test."""

import json
from pathlib import Path

import pytest
import torch

from tools.behaviour import differences, digest, main


def test_a_digest_sees_dtype_shape_and_every_bit() -> None:
    x = torch.arange(6, dtype=torch.float32)
    made = [x, x.view(2, 3), x.to(torch.int32), torch.cat((x[:5], x[5:] + 1e-6)), x[:0], torch.tensor(-0.0)]
    assert len({digest([value]) for value in [*made, torch.tensor(0.0)]}) == len(made) + 1
    assert digest({"b": x, "a": [x]}) == digest({"a": [x], "b": x}) != digest({"a": x})


def test_tests_that_only_one_record_has_are_differences() -> None:
    old, new = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "3", "d": "4"}
    assert list(differences(old, new)) == [("b", "2", "3"), ("c", "3", "-"), ("d", "-", "4")]


@pytest.mark.slow
def test_what_changed_since_a_record_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, only = tmp_path / "record.json", ["tests/test_permute.py", "-n0"]
    assert main(["record", str(file), *only]) == 0
    assert main(["compare", str(file), *only]) == 0
    record = json.loads(file.read_text())
    changed = next(iter(record["bits"]))
    was, record["bits"][changed] = record["bits"][changed], "0"
    file.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["compare", str(file), *only]) == 1
    assert f"{changed}\n  was 0\n  is  {was}\n1 difference\n" in capsys.readouterr().out
    record["machine"]["torch"] = "1000"
    file.write_text(json.dumps(record))
    assert main(["compare", str(file), *only]) == 2 and "nothing is compared" in capsys.readouterr().err
