"""Names to plugins: one short name is the identity, nothing is ever overwritten, and typos are answered.

Built-in plugins register with a decorator; third-party ones arrive by entry point. A plugin that fails to load is
remembered by name with its reason and skipped, so that `doctor` can show it. A built-in plugin that `builtin` declares
is listed without an import; its module is imported when the class is first asked for.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from threading import RLock
from typing import Generic, TypeVar

from moe_mk.errors import ConfigError, PluginWarning

R = TypeVar("R")
T = TypeVar("T", bound=type)
OWN = __name__.partition(".")[0]
"""The name of this package."""
MORE = "moe-mk-contrib"
"""The distribution with further backends, of the same repository."""


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str:
    """Say what was probably meant, and what there is."""
    near = get_close_matches(str(name), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{hint} (known: {', '.join(sorted(known))})"


def more_backends() -> str:
    """Where further backends are, as the end of a message about a name that is unknown; empty if they are installed."""
    there = find_spec(MORE.replace("-", "_")) is not None
    return "" if there else f"; further backends are in {MORE} [pip install ./contrib/moe_mk_contrib, in a clone]"


class Registry(Generic[T]):
    """Classes of one kind by short name, checked against a base class when they register.

    kind: what the entries are, for messages. base: the abstract class whose methods an entry must implement with the
    same parameters. group: the entry-point group third-party wheels use, loaded at the first look-up.
    """

    def __init__(self, kind: str, base: type, group: str = "") -> None:
        self.kind, self.base, self.group = kind, base, group
        self.broken: dict[str, str] = {}
        self.modules: list[str] = []
        """Those of the built-in entries."""
        self._entries: dict[str, T | str] = {}
        """By name; the module of a built-in one that has not been asked for."""
        self._imported: dict[str, T] = {}
        self._origin: dict[str, str] = {}
        self._distribution: dict[str, str] = {}
        self._discovered = not group
        self._discovering, self._lock = False, RLock()

    def builtin(self, modules: Mapping[str, str]) -> None:
        """Declare built-in entries in the order in which they are listed: module -> names, separated by spaces."""
        named = {name: module for module, names in modules.items() for name in names.split()}
        self._entries |= named
        self._origin |= named
        self.modules += modules

    def register(self, name: str, origin: str = "") -> Callable[[T], T]:
        """Add a class under a name; a second registration and a wrong signature raise ConfigError."""

        def add(entry: T) -> T:
            where = origin or entry.__module__
            if name in self._entries and self._entries[name] != getattr(entry, "__module__", ""):
                raise ConfigError(f"{self.kind} {name!r} is registered twice: by {self._origin[name]} and by {where}")
            try:
                problems = contract_problems(entry, self.base)
            except Exception as problem:  # of a metaclass, a descriptor or __repr__
                problems = [f"its attributes cannot be read: {_in_words(problem)}"]
            if problems:
                raise ConfigError(
                    f"{self.kind} {name!r} of {where} breaks the contract of {self.base.__name__}: "
                    + "; ".join(problems)
                )
            for advice in getattr(getattr(entry, "traits", None), "advice", ()):
                warnings.warn(f"{self.kind} {name!r} of {where} {advice}", PluginWarning, stacklevel=2)
            self._entries[name] = self._imported[name] = entry
            self._origin[name] = where
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name in self._entries:
            entry = self._entries[name]
            if isinstance(entry, str):
                import_module(entry)
                entry = self._entries[name] = self._imported[name]
            return entry
        if name in self.broken:
            raise ConfigError(f"{self.kind} {name!r} is installed but could not be loaded: {self.broken[name]}")
        known = did_you_mean(name, list(self._entries))
        raise ConfigError(f"no {self.kind} is called {name!r}{known}{more_backends() if self.group else ''}")

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(list(self._entries))

    def items(self) -> list[tuple[str, T]]:
        """All names with their classes, in order of registration."""
        return [(name, self[name]) for name in self]

    def origin(self, name: str) -> str:
        """The module or wheel an entry came from."""
        return self._origin[name]

    def distribution(self, name: str) -> str:
        """The wheel whose entry point registered an entry; empty for those of this package and of the program."""
        return self._distribution.get(name, "")

    def is_foreign(self, name: str) -> bool:
        """Whether an entry is from outside of this package: of another wheel, or of the program itself."""
        entry = self._entries[name]
        where = {OWN} if isinstance(entry, str) else {entry.__module__, self._origin.get(name, entry.__module__)}
        return {each.partition(".")[0] for each in where} != {OWN}

    def _discover(self) -> None:
        if self._discovered:
            return
        with self._lock:  # ranks may be threads: a second one waits until all are loaded
            if self._discovered or self._discovering:  # a plugin may look into the registry while it is imported
                return
            self._discovering = True
            try:
                for point in sorted(entry_points(group=self.group), key=_wheel_of):  # folders list wheels in any order
                    self._load(point)
                self._discovered = True
            finally:  # interrupted, or warnings are errors: the rest is loaded at the next look-up
                self._discovering = False

    def _load(self, point: EntryPoint) -> None:
        """Register what an entry point names, once, or keep the reason why not; only KeyboardInterrupt passes."""
        origin = _wheel_of(point)
        if self._origin.get(point.name) == origin or self.broken.get(point.name, "").startswith(f"{origin}: "):
            return
        try:
            self.register(point.name, origin)(point.load())
            self._distribution[point.name] = point.dist.name if point.dist else ""
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # a foreign wheel may fail in any way, SystemExit too: the host goes on
            self.broken[point.name] = f"{origin}: {_in_words(problem)}"
            text = f"{self.kind} plugin {point.name!r} of {origin} skipped: {_in_words(problem)}"
            warnings.warn(text, PluginWarning, stacklevel=4)


class Records(Mapping[str, R]):
    """Records of one kind by name: those of this package, and those that entry points of a group name.

    What is not built in is read when it is first needed; a record that fails to load is left out with a PluginWarning.
    """

    def __init__(self, kind: type[R], group: str, built_in: Mapping[str, R]) -> None:
        self.kind, self.group, self.built_in = kind, group, built_in

    @cached_property
    def _all(self) -> Mapping[str, R]:
        found = dict(self.built_in)
        for point in sorted(entry_points(group=self.group), key=_wheel_of):
            try:
                record = point.load()
                if not isinstance(record, self.kind) or point.name in found:
                    raise TypeError(f"must be a {self.kind.__name__} with a name of its own")
                found[point.name] = record
            except Exception as problem:  # another wheel may fail in any way
                text = f"{self.group} {point.name!r} of {_wheel_of(point)} skipped: {_in_words(problem)}"
                warnings.warn(text, PluginWarning, stacklevel=4)
        return found

    def __getitem__(self, name: str) -> R:
        return self.built_in[name] if name in self.built_in else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _wheel_of(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else '?'} ({point.value})"


def _in_words(problem: BaseException) -> str:
    """An exception with its type; without its text where the text itself raises."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception as another:
        return f"{type(problem).__name__} (its text raises {type(another).__name__})"


def _traits_problems(entry: type, base: type) -> list[str]:
    """Whether traits are there, and of the class that the base class states."""
    if not hasattr(entry, "traits"):
        return ["the class attribute `traits` is missing"]
    stated = re.search(r"\[(\w+)\]", str(base.__annotations__["traits"]))
    wanted = vars(sys.modules[base.__module__]).get(stated[1]) if stated else None
    if wanted is None or isinstance(entry.traits, wanted):
        return []
    return [f"`traits` is a {type(entry.traits).__name__}, not {wanted.__name__}(...)"]


def contract_problems(entry: type, base: type) -> list[str]:
    """List how a class departs from its base: not a subclass, missing methods or traits, other parameters."""
    if not (isinstance(entry, type) and issubclass(entry, base)):
        return [f"{entry!r} is not a subclass of {base.__name__}"]
    missing = sorted(getattr(entry, "__abstractmethods__", ()))
    problems = [f"{name}() is not implemented" for name in missing]
    if "traits" in getattr(base, "__annotations__", {}):
        problems += _traits_problems(entry, base)
    overridden = [n for n, m in vars(base).items() if inspect.isfunction(m) and not n.startswith("_")]
    overridden = [name for name in overridden if getattr(entry, name) is not getattr(base, name)]
    for name in sorted({*getattr(base, "__abstractmethods__", ()), *overridden}.difference(missing)):
        if not callable(getattr(entry, name)):
            problems.append(f"{name} is a {type(getattr(entry, name)).__name__}, not a method")
            continue
        ours, theirs = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (base, entry))
        if ours != theirs:
            problems.append(f"{name}({', '.join(theirs)}) should be {name}({', '.join(ours)})")
    return problems
