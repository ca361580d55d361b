"""Base of all settings: frozen, no unknown keys, errors that list every problem with a suggestion."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from moe_mk.errors import ConfigError, expect_kind, unless_signalled
from moe_mk.files import read_json, read_yaml
from moe_mk.registry import did_you_mean

if TYPE_CHECKING:  # it has no public name
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

F32_LEAST, F32_MOST = 2.0**-126, 2.0**128 - 2.0**104
SHOWN = 1000
"""Characters of a wrong value in a message."""


class _Constructor(ModelMetaclass):
    """Raises ConfigError where a class is called with invalid settings; pydantic calls an `__init__` itself."""

    def __call__(cls, *args: Any, **data: Any) -> Any:
        try:
            return super().__call__(*args, **data)
        except ValidationError as problem:
            raise _in_words(cast("type[Settings]", cls), cls.__name__, problem) from None


class Settings(BaseModel, metaclass=_Constructor):
    """A frozen group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    def __setattr__(self, name: str, value: object) -> None:
        """Raises ConfigError: settings are values."""
        raise ConfigError(f"{type(self).__name__} is frozen; make a copy with {name} changed: config.with_({name}=...)")

    def __delattr__(self, name: str) -> None:
        """Raise ConfigError: settings are frozen."""
        raise ConfigError(f"{type(self).__name__} is frozen; {name} cannot be deleted")

    @field_validator("*")
    @classmethod
    def _is_of_f32(cls, value: Any) -> Any:
        """Numbers reach kernels in f32, where others are infinite, 0 or without precision."""
        if isinstance(value, float) and value and not F32_LEAST <= abs(value) <= F32_MOST:
            raise ValueError(f"must be 0 or of a size from {F32_LEAST:.3g} to {F32_MOST:.3g}, the range of f32")
        return value

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str) -> Self:
        """Build from plain data; raises ConfigError that lists every problem with its key."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where} holds a {type(data).__name__}, expected a mapping of settings")
        expect_numbers(data, where)
        try:
            return cls.model_validate(dict(data))
        except ValidationError as problem:
            raise _in_words(cls, where, problem) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML or JSON file. Raises ConfigError with every problem by its key."""
        expect_kind("path", path, str, PathLike)
        return cls.parse(read_mapping(Path(path)), str(path))


def _in_words(cls: type[Settings], where: str, problem: ValidationError) -> ConfigError:
    return ConfigError(f"{where}: " + "; ".join(_explain(cls, error) for error in problem.errors()))


def expect_numbers(data: object, where: str) -> None:
    """Raise ConfigError for whole numbers of more than 64 bits in plain data: they overflow where they are computed."""
    left: list[tuple[str, object]] = [("", data)]
    seen = set[int]()  # a value may hold itself
    while left:
        key, value = left.pop()
        if type(value) is int and value.bit_length() > 63:
            raise ConfigError(
                f"{where}: {key}: a whole number has at most 63 bits, got one of {value.bit_length()}; correct it"
            )
        if not isinstance(value, Mapping | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            left += [(f"a key of {key or 'the settings'}", name) for name in value if type(name) is int]
            left += [(f"{key}.{name}".lstrip("."), each) for name, each in value.items() if isinstance(name, str)]
        else:
            left += [(f"{key}[{at}]", each) for at, each in enumerate(value)]


def overrides_of(settings: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of sections, or of a file of them, by `section.key`. Raises ConfigError."""
    found = settings if isinstance(settings, Mapping) else read_mapping(Path(settings))
    if wrong := [str(section) for section, keys in found.items() if not isinstance(keys, Mapping)]:
        raise ConfigError(
            f"{settings}: {', '.join(wrong)} is no section of settings, such as kernel: {{experts: auto}}"
        )
    return {f"{section}.{key}": value for section, keys in found.items() for key, value in keys.items()}


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping; raises ConfigError otherwise. `moe_mk.files` has the limits."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    try:
        data = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except unless_signalled(OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, expected a mapping of settings")
    return data


def _explain(cls: type[BaseModel], error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{did_you_mean(str(error['loc'][-1]), _known_keys(cls, error['loc'][:-1]))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}, got {_shown(error['input'])}" if key else message


def _shown(value: object) -> str:
    """A value as a message shows it: short, even where a few lines of YAML stand for billions of values."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 200, 200
    short.maxdict = short.maxlist = short.maxtuple = 24
    try:
        text = short.repr(value)
    except ValueError:  # a number of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _known_keys(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = cls.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        cls = inner
    return list(cls.model_fields)
