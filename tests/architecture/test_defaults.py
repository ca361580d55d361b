"""Defaults, constants, limits of settings and traits of backends are those recorded: a change of one is meant.

Callers rely on them without a test that names them. Names that are new or gone are no concern of this record.

python tests/architecture/test_defaults.py       writes defaults.json anew, after a change that is meant
"""

import enum
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import torch
from pydantic import BaseModel

import moe_mk
from moe_mk.experts.base import EXPERTS
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE

FILE = Path(__file__).parent / "defaults.json"
ROOMS = (
    "layer", "router", "runner", "prepare_finalize", "comm", "experts", "kernels", "quant", "weights", "placement",
    "rebalance", "oracle", "config",
)  # fmt: skip
OF_THE_MACHINE = {"moe_mk.kernels.native.threads"}
PLAIN = (bool, int, float, type(None), torch.dtype, enum.Enum)


def plain(value: object) -> bool:
    """Whether a value is numbers, dtypes and enumerations, alone or in collections."""
    if isinstance(value, tuple | list | set | frozenset):
        return len(value) > 0 and all(plain(each) or isinstance(each, str) for each in value)
    if isinstance(value, Mapping):
        return len(value) > 0 and all(plain(each) or isinstance(each, str) for each in value.values())
    return isinstance(value, PLAIN)


def text(value: object) -> str:
    return repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)


def defaults_of(name: str, made: object) -> Iterator[tuple[str, str]]:
    """(name, value) of the default of each parameter, and of the limits of each setting."""
    if inspect.isclass(made) and issubclass(made, BaseModel):
        for key, field in made.model_fields.items():
            yield (
                f"{name}.{key}",
                f"{text(field.default)} {field.metadata}" if plain(field.default) else f"{field.metadata}",
            )
        return
    try:
        parameters = inspect.signature(made).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    for each in parameters:
        if each.default not in (inspect.Parameter.empty, None) and (
            plain(each.default) or isinstance(each.default, str)
        ):
            yield f"{name}({each.name})", text(each.default)


def values_of(module: ModuleType) -> Iterator[tuple[str, str]]:
    source = inspect.getsource(module)
    for name, made in vars(module).items():
        if name.isupper() and plain(made) and re.search(rf"^(?:\w+, )*{name}\b.*=", source, re.MULTILINE):
            yield name, text(made)
        elif getattr(made, "__module__", None) == module.__name__ and callable(made):
            yield from defaults_of(name, made)
            if inspect.isclass(made):
                for key, method in vars(made).items():
                    if inspect.isfunction(method) and key != "__init__":
                        yield from defaults_of(f"{name}.{key}", method)


def of_trait(value: object) -> str:
    """Without addresses of classes."""
    if isinstance(value, Mapping):
        return text({getattr(key, "__name__", key): each for key, each in value.items()})
    if isinstance(value, tuple):
        return text(tuple(getattr(each, "__name__", each) for each in value))
    return text(value)


def found() -> dict[str, str]:
    made: dict[str, str] = {}
    for module in pkgutil.walk_packages(moe_mk.__path__, "moe_mk."):
        if module.name.split(".")[1] not in ROOMS or module.name in OF_THE_MACHINE or ".triton" in module.name:
            continue
        for name, value in values_of(importlib.import_module(module.name)):
            made[f"{module.name.removeprefix('moe_mk.')}.{name}"] = value
    for registry in (EXPERTS, PREPARE_FINALIZE):
        for backend, kind in registry.items():
            if kind.__module__.startswith("moe_mk."):
                traits = {f.name: getattr(kind.traits, f.name) for f in fields(kind.traits) if f.name != "summary"}
                made[f"traits of {backend}"] = ", ".join(f"{key}={of_trait(each)}" for key, each in traits.items())
    return made


def test_defaults_constants_and_traits_are_those_recorded() -> None:
    then, now = json.loads(FILE.read_text(encoding="utf-8")), found()
    changed = {name: (value, now[name]) for name, value in then.items() if now.get(name, value) != value}
    assert not changed, "recorded and found: " + "; ".join(f"{name} {a} -> {b}" for name, (a, b) in changed.items())
    assert len(then.keys() & now.keys()) > 700


def main() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(found().items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
