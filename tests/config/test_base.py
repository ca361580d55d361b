"""Reading settings: files, unknown keys at any depth, every problem at once."""

from pathlib import Path

import pytest
from pydantic import Field

from moe_mk.config.base import Settings, read_mapping
from moe_mk.errors import ConfigError


class Inner(Settings):
    side: int = Field(default=128, ge=1)
    scale: float = 1.0


class Outer(Settings):
    name: str
    inner: Inner = Inner()


def test_settings_are_frozen_and_hashable() -> None:
    settings = Outer(name="x")
    with pytest.raises(ConfigError, match=r"Outer is frozen; make a copy with name changed"):
        settings.name = "y"
    with pytest.raises(ConfigError, match="Inner is frozen; make a copy with side changed"):
        settings.inner.side = 1
    with pytest.raises(ConfigError, match="Outer is frozen; make a copy with nmae changed"):
        settings.nmae = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Outer is frozen; name cannot be deleted"):
        del settings.name
    assert hash(settings) == hash(Outer(name="x"))


def test_an_unknown_key_is_answered_at_any_depth() -> None:
    with pytest.raises(ConfigError, match=r"here: unknown key 'nam'; did you mean 'name'\? \(known: inner, name\)"):
        Outer.parse({"name": "x", "nam": "y"}, "here")
    with pytest.raises(ConfigError, match=r"unknown key 'inner.sides'; did you mean 'side'\? \(known: scale, side\)"):
        Outer.parse({"name": "x", "inner": {"sides": 1}}, "here")
    with pytest.raises(ConfigError, match=r"unknown key 'inner.zzz' \(known: scale, side\)"):
        Outer.parse({"name": "x", "inner": {"zzz": 1}}, "here")


def test_every_problem_is_reported_with_its_key_and_value() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer.parse({"inner": {"side": 0, "scale": "wide"}}, "file.yaml")
    text = str(caught.value)
    assert text.startswith("file.yaml: ") and "name: Field required" in text
    assert "inner.side: Input should be greater than or equal to 1, got 0" in text
    assert "inner.scale: Input should be a valid number" in text and "got 'wide'" in text


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("a.yaml", b"- 1\n- 2\n", "holds a list, expected a mapping of settings"),
        ("a.yaml", b"", "holds a NoneType, expected a mapping"),
        ("a.json", b"[1]", "holds a list, expected a mapping"),
        ("a.json", b"{", "cannot be read: Expecting property name"),
        ("a.yaml", b"a: [", "cannot be read: "),
        ("a.yaml", b"\xff\xfe\xfa", "cannot be read: "),
        # At these the readers themselves give up.
        ("a.json", b'{"a": ' + b"1" * 5000 + b"}", "cannot be read: "),
        ("a.yaml", b"a: " + b"1" * 5000, "cannot be read: "),
        ("a.yaml", b"a: 2024-99-99", "cannot be read: "),
        ("a.json", b'{"a": ' + b"[" * 100_000, "cannot be read: "),
        ("a.yaml", b"a: " + b"[" * 400, "cannot be read: "),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_that_are_no_settings_are_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} {problem}"):
        read_mapping(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml is not a file"):
        Outer.load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is not a file"):
        read_mapping(tmp_path)
