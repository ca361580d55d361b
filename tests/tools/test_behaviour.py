"""What the frozen behaviour is made of: digests that see every bit, and differences that name the place."""

import json
from pathlib import Path

import pytest
import torch

from tools.behaviour import differences, digest, golden, main, numbers_of, verbs


def test_a_digest_sees_dtype_shape_and_every_bit() -> None:
    x = torch.arange(6, dtype=torch.float32)
    made = [x, x.view(2, 3), x.to(torch.int32), torch.cat((x[:5], x[5:] + 1e-6)), x[:0], torch.tensor(-0.0)]
    assert len({digest([value]) for value in [*made, torch.tensor(0.0)]}) == len(made) + 1
    assert digest({"b": x, "a": [x]}) == digest({"a": [x], "b": x}) != digest({"a": x})
    assert digest({"exit": 1}) == {"exit": 1}


def test_differences_are_named_to_the_leaf_and_texts_by_line() -> None:
    old = {"a": {"b": [1, 2], "c": 1.5}, "text": "one\ntwo\nthree"}
    new = {"a": {"b": [1, 2], "d": 1.5}, "text": "one\n2\nthree"}
    assert list(differences(old, new)) == [
        ("a > c", 1.5, "-"),
        ("a > d", "-", 1.5),
        ("text", "two", "-"),
        ("text", "-", "2"),
    ]
    assert list(differences(old, old)) == []


def test_decisions_keep_names_and_numbers_and_leave_sentences() -> None:
    assert numbers_of({"a": 1, "why": "because of b", "names": ["x", "a b"], "in": {"c": None}}) == {
        "a": 1,
        "names": ["x"],
        "in": {"c": None},
    }


def test_a_problem_of_the_golden_table_becomes_prices_and_codes() -> None:
    value = golden({"device": "cpu", "model": "tiny", "num_tokens": 16, "dtype": "fp32"})
    assert isinstance(value, dict)
    assert value["chosen"] == "no_ep + torch_cpu" == value["order"][0]
    assert value["refused"]["all_to_all + reference"] == "ranks" and "because" not in value


def test_every_verb_is_found() -> None:
    assert {(), ("run",), ("plan",), ("plan", "exchange")} <= set(verbs())


def test_what_changed_since_a_record_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, only = tmp_path / "record.json", ["--only", "decisions", "--match", "^golden/00[01]"]
    assert main(["record", str(file), *only]) == 0
    assert main(["compare", str(file), *only]) == 0
    record = json.loads(file.read_text())
    assert list(record["decisions"]) == ["golden/000", "golden/001"]
    record["decisions"]["golden/001"]["wire"] = "bf16"
    file.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["compare", str(file), *only]) == 1
    assert "golden/001 > wire\n  was bf16\n  is  fp32\n1 difference" in capsys.readouterr().out
