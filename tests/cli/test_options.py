"""Every option of every verb reaches what the verb calls, under its own name: none is lost or taken for another."""

import ast
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.main import get_command

from moe_mk import lab
from moe_mk.errors import ConfigError
from moe_mk.lab.cli import app
from tests.cli.test_doors import verbs

LAB = ("cli", "checkpoints", "plan", "trace", "training", "tuning", "verify")
REAL = {"settings_of", "sizes_of", "tokens_of", "world_of", "dtype_of", "with_budget", "groups_of", "ranges"}
"""Functions that only convert what they are given."""
NAMES = {
    "replicated": "tokens", "settings": "kernel.timeout_s", "timeout": "timeout_s", "against": "library",
    "installed": "libraries", "ranks": "ep size", "experts": "num_experts", "layer": "layers", "hidden": "hidden_size",
    "intermediate": "intermediate_size", "ue8m0": "power_of_two_scales", "budget": "budget_s", "tuned_dir": "folder",
    "cases": "files", "other": "other_us", "device": "name", "links": "name_or_path", "layers": "num_layers",
}  # fmt: skip
"""What an option is called by what it reaches, where that is not its own name."""
VALUES: dict[str, tuple[object, object]] = {
    "dtype": ("float16", "float32"), "tokens": ("5,6", "7,8"), "memory": ("3GB", "4GB"), "quant": ("fp8", "bf16"),
    "settings": (["kernel.timeout_s=5"], ["kernel.timeout_s=6"]), "layer": (2, 3), "tp": (2, 4),
}  # fmt: skip
BY_KIND: dict[object, tuple[object, object]] = {
    int: (4, 8), float: (1.5, 2.5), Path: (Path("a"), Path("b")), str: ("a", "b"), bool: (False, True),
}  # fmt: skip


def called_by(verb: Callable[..., object]) -> Iterator[tuple[object, str, inspect.Signature]]:
    """The functions that a verb imports, and calls with what it was given."""
    for node in ast.walk(ast.parse(inspect.getsource(verb))):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            found = getattr(module := import_module(str(node.module)), alias.name)
            if inspect.isfunction(found) and alias.name not in REAL:
                yield module, alias.name, inspect.signature(found)


VERBS = {name: verb for name, verb in verbs(get_command(app)) if name != "derive"}  # it needs transformers
CALLED = {name: list(called_by(verb)) for name, verb in VERBS.items()}
ANSWER = MagicMock(**{"__lt__.return_value": False})


def two_values(name: str, kind: Any) -> tuple[object, object]:
    """Two values that an option may have."""
    parts = [each for each in typing.get_args(kind) if each is not type(None)] or [kind]
    items = typing.get_args(parts[0])
    if name in VALUES and not (name == "tokens" and parts[0] is int):
        found = VALUES[name]
        return found if not items or isinstance(found[0], list) else ([found[0]], [found[1]])
    found = BY_KIND[items[0] if items else parts[0]]
    return ([found[0]], [found[1]]) if items else found


def leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Names and values of all that a call is given."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(key, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(name, inner)
    else:
        yield name, repr(value) if isinstance(value, str | int | float | Path | None) else type(value).__name__


def reached(name: str, given: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """What the functions that a verb calls are given; nothing of them runs."""
    found: Counter[tuple[str, str]] = Counter()

    def call(signature: inspect.Signature, *args: object, **kwargs: object) -> object:
        found.update(leaves("", signature.bind(*args, **kwargs).arguments))
        return ANSWER

    with monkeypatch.context() as patched:
        for module, called, signature in CALLED[name]:
            patched.setattr(module, called, partial(call, signature))
        try:
            VERBS[name](**given)
        except ConfigError:
            found.clear()
    return found


def test_what_is_given_is_read() -> None:
    """Fields of orders, and arguments of functions that no protocol demands."""
    for file in (file for room in LAB for file in (Path(lab.__file__).parent / room).rglob("*.py")):
        tree, lost = ast.parse(file.read_text(encoding="utf-8")), {"frame", "more", "version"}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                given = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                assert given <= names | lost, (file, node.name)
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Order"):
                stated = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
                read = {getattr(each, "attr", getattr(each, "value", None)) for each in ast.walk(tree)}
                assert stated <= read, (file, node.name)


@pytest.mark.parametrize("name", sorted(VERBS.keys() - {"schema", "inspect", "inspect-checkpoint"}))
def test_an_option_reaches_what_the_verb_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hints, parameters = typing.get_type_hints(VERBS[name]), inspect.signature(VERBS[name]).parameters
    values = {option: two_values(option, hints[option]) for option in parameters}
    every = {option: first for option, (first, _) in values.items()}
    least = every | {key: each.default for key, each in parameters.items() if each.default is not each.empty}
    lost = {}
    for option, both in values.items():
        names, wanted = set[str](), {option, *NAMES.get(option, "").split()}
        for base in (every, least, every | ({"store": True, "to": None} if name == "convert" else {})):
            if names & wanted:
                break
            one, other = (reached(name, {**base, option: value}, monkeypatch) for value in both)
            names |= {key for key, _ in (one - other) + (other - one)} if one and other else set()
            names |= {option} if isinstance(both[0], bool) and bool(one) != bool(other) else set()
        if not names & wanted:
            lost[option] = sorted(names)
    assert not lost
