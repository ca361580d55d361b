"""Ranks as threads, for tests of emulated libraries that move rows."""

import inspect
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from moe_mk.comm.threads import ThreadCommunicator, ThreadWorld

X = TypeVar("X")
PACKAGE = "moe_mk.lab.testing.emulated"
SNAPSHOT: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "row_library_signatures.json").read_text(encoding="utf-8")
)
"""Parameters with their defaults, as flashinfer 0.7.2.post1 has them."""


def on_ranks(ranks: int, job: Callable[[ThreadCommunicator], X], timeout_s: float = 5.0) -> list[X]:
    """What a job returns on each of so many ranks."""
    world = ThreadWorld(ranks, timeout_s=timeout_s)
    groups = [comm.library_group() for comm in world.communicators()]  # type: ignore[attr-defined]
    return world.together([partial(job, group) for group in groups])


def on_each_rank(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of what each of so many ranks does; its first argument is the group of the rank."""

    def made(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def on_all(**case: Any) -> None:
            on_ranks(ranks, partial(test, **case))

        signature = inspect.signature(test)
        on_all.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return on_all

    return made


def differences(module: str, snapshot: dict[str, dict[str, Any]] = SNAPSHOT, package: str = PACKAGE) -> list[str]:
    """Where an emulated module departs from the snapshot."""
    there = import_module(f"{package}.{module}")
    return [f"{name}: {found} is not {asked}" for name, asked in snapshot[module].items()
            if (found := _seen(there, name)) != asked]  # fmt: skip


def _seen(module: ModuleType, name: str) -> object:
    found: Any = module
    for part in name.removesuffix("(fields)").removesuffix("(members)").split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", found)
    if name.endswith("(members)"):
        return {member: int(value) for member, value in found.__members__.items()}
    if name.endswith("(fields)"):
        assert is_dataclass(found)
        return [_parameter(field.name, field.default) for field in fields(found)]
    parameters = inspect.signature(found.fget if isinstance(found, property) else found).parameters.values()
    kinds: dict[str, list[list[str]]] = {"pos": [], "kwonly": []}
    for parameter in parameters:
        if parameter.name not in ("self", "cls"):
            kind = "kwonly" if parameter.kind is parameter.KEYWORD_ONLY else "pos"
            kinds[kind].append(_parameter(parameter.name, parameter.default))
    return kinds


def _parameter(name: str, default: object) -> list[str]:
    if type(default).__name__ in ("_empty", "type") or repr(default).startswith("<dataclasses._MISSING"):
        return [name]
    return [name, str(default) if isinstance(default, Enum) else repr(default)]
