"""A bad value for any option of any verb is one message and a documented code, no traceback, and writes nothing."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from moe_mk.lab.cli import app
from tests.cli.conftest import moe_mk
from tests.support.tiers import quick_where

SIZES = ("--hidden", "128", "--intermediate", "128")
BASES: dict[str, tuple[str, ...]] = {
    "run": ("{tiny}", "--tokens", "1", "--repeats", "1"), "bench": ("{tiny}", "--tokens", "1", "--repeats", "1"),
    "explain": ("deepseek_v3",), "derive": ("{tiny}",), "fit": ("{tiny}", "--trace", "{routing}", "--memory", "100kB"),
    "place": ("--trace", "{routing}", "--gpus", "2"), "doctor": (),
    "make-checkpoint": ("{new}", "--experts", "8", *SIZES), "convert": ("{tiny}", "{new}", "--to", "bf16"),
    "inspect-checkpoint": ("{tiny}",), "inspect": ("{tiny}",), "certify": ("no_such_backend",), "chaos": ("{new}",),
    "tune": ("cpu_native", *SIZES, "--dry-run"), "compile": ("{new}", "--out", "{new}"),
    "bisect": ("reference", "reference", "--tokens", "2", *SIZES), "judge": ("{trace}",), "waits": ("{trace}",),
    "demo": ("no_such_host",), "plan layout": ("ep",),
}  # fmt: skip
"""A quick call of each verb. {tiny}: a checkpoint, {trace}, {routing}: of a run of it, {new}: where nothing is."""
BAD = {
    "word": "no such thing", "negative": "-1", "zero": "0", "huge": str(10**23), "long": "9" * 5000, "fraction": "1.5",
    "nan": "nan", "inf": "inf", "empty": "", "space": " ", "unicode": "ﬁ̈ \U0001f4a5", "surrogate": "\udcff",
    "dash": "-", "list": "1,,2", "letters": "1,x", "missing": "{folder}/no/such/file", "folder": "{folder}",
    "below a file": "{file}/x", "a file": "{file}", "unreadable": "/proc/1/mem", "device": "/dev/full",
    "tilde": "~nobody_here/x", "loop": "{loop}", "null": "a\0b", "key": "kernel.nothing=1",
    "value": "kernel.timeout_s=1e39", "yaml": "a=[",
}  # fmt: skip
LONG_WORK = {"--repeats", "--worlds", "--budget", "--timeout", "--keep", "--late", "--only"}
"""Options whose large values are right, and take long."""
CODES = (0, 1, 2, 3)


@cache
def options() -> list[tuple[str, str]]:
    """Every (verb, option or position of an argument)."""
    found = []

    def walk(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*path, name))
        if not hasattr(command, "commands"):
            arguments = 0
            for parameter in command.params:
                if parameter.param_type_name == "argument":
                    found.append((" ".join(path), str(arguments)))
                    arguments += 1
                elif not parameter.is_flag:
                    found.append((" ".join(path), parameter.opts[0]))

    walk(get_command(app), ())
    return found


def cases() -> list[tuple[str, str, str]]:
    """All (verb, option, kind of value), in a fixed random order."""
    made = [
        (*each, kind) for each in options() for kind in BAD if (each[1], kind) not in {(o, "huge") for o in LONG_WORK}
    ]
    random.Random(0).shuffle(made)
    return made


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recorded")
    made = {"trace": folder / "trace.json", "routing": folder / "routing.safetensors"}
    done = moe_mk("run", tiny, "--tokens", 4, "--trace", made["trace"], "--record-trace", made["routing"])
    assert done.exit_code == 0, done.output
    return made


@pytest.fixture
def places(tmp_path: Path, tiny: Path, recorded: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    names = {name: tmp_path / name for name in ("folder", "file", "loop", "new", "here")}
    for name in ("folder", "here"):
        names[name].mkdir()
    names["file"].write_text("mine")
    names["loop"].symlink_to(names["loop"])
    monkeypatch.chdir(names["here"])
    return names | recorded | {"tiny": tiny}


def files(places: dict[str, Path]) -> list[str]:
    root = places["here"].parent
    return sorted(f"{path}: {path.lstat().st_size}" for path in root.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("part", quick_where(lambda part: part == 0, range(20)))
def test_a_bad_value_is_one_message_and_a_code(places: dict[str, Path], part: int) -> None:
    wrong = []
    for verb, option, kind in cases()[part * 20 : part * 20 + 20]:
        value = BAD[kind].format(**places)
        words = [word.format(**places) for word in BASES.get(verb, ())]
        if option.isdigit():
            words[int(option) : int(option) + 1] = [value]
        else:
            words += [f"{option}={value}"]
        before = files(places)
        done = moe_mk(*verb.split(), *words)
        case = f"moe-mk {verb} {' '.join(words)!r:.300} [{kind}]"
        typed = done.exception is None or isinstance(done.exception, SystemExit)
        if not typed or done.exit_code not in CODES or "Traceback" in done.output:
            wrong.append(f"{case}: {done.exit_code} {done.exception!r} {done.output[-300:]}")
        elif done.exit_code in (2, 3) and (files(places) != before or not done.stderr.strip()):
            wrong.append(f"{case}: {done.exit_code}, wrote {set(files(places)) - set(before)}; {done.stderr}")
        elif done.exit_code in (2, 3) and done.stderr.count("moe-mk: ") > 1:
            wrong.append(f"{case}: printed twice: {done.stderr}")
    assert not wrong, f"{len(wrong)} of 20:\n" + "\n".join(wrong)
