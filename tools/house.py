"""Measure the house: lines by room, modules with one importer, circles and orphans.

python tools/house.py               print all measurements as JSON
python tools/house.py --check       print what exceeds a limit and exit 1; part of `make lint`

Lines are all lines of all files of the package, C++ included. An importer is a module that imports another one by name;
`from room import name` imports the module of that name, or the room's `__init__`. Importers that are an `__init__`
re-export and do not count. An orphan is reached neither from the public API (`moe_mk/__init__` and what the rooms it
opens export), nor from the command, an entry point, a registry, `python -m`, an adapter in `integrations/`, or an
import that the docstring of an `__init__` shows to users. Of the modules with one importer, the house keeps those that
are plugins (in a registry, or imported by name), verbs of the command, those of more than 250 lines, and those that
imitate the modules of another library. A test counts the frames, by `tools/decode_step.py`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "moe_mk"
CORE = (
    "layer/", "runner/", "oracle/", "router/", "prepare_finalize/", "experts/", "quant/", "config/", "kernels/triton/",
    "kernels/reference/",
)  # fmt: skip
"""Folders of the like-for-like core, beside the files of the package's root."""
LIMITS = {
    "short ones, no plugins": 23,
    "circles": 0,
    "orphans": 0,
    "core lines": 26_618,
    "library lines": 51_731,
    "test lines": 77_372,
    "tool and benchmark lines": 8_859,
    "long files": 0,
    "docstrings without a subject": 0,
    "words of docs": 45_000,
    "frames at EP=1": 8,
    "files at EP=1": 5,
    "frames at EP=2": 13,
    "files at EP=2": 8,
    "frames in vLLM": 6,
    "frames in transformers": 8,
}
"""The most of each; they may only be lowered. The library is what an engine imports, in Python: all but the lab."""
LONGEST = 500
"""Lines of a file."""
LONG = 250
"""Lines beyond which a module with one importer stays a module."""
VAGUE = ("What ", "Those ", "The same", "Both ", "It ")
"""First words of docstrings that do not state their subject; neither do docstrings of up to three words."""
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    typing: bool
    """Whether it stands under TYPE_CHECKING."""


@dataclass
class House:
    """Every module of the package and what it imports."""

    root: Path = ROOT
    paths: dict[str, Path] = field(init=False)
    """By dotted name; a package by its `__init__`."""
    trees: dict[str, ast.Module] = field(init=False)

    def __post_init__(self) -> None:
        found = sorted((self.root / PACKAGE).rglob("*.py"))
        named = {".".join(path.relative_to(self.root).with_suffix("").parts): path for path in found}
        self.paths = {name.removesuffix(".__init__"): path for name, path in named.items()}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    def is_room(self, module: str) -> bool:
        return self.paths[module].name == "__init__.py"

    @cached_property
    def imports(self) -> list[Import]:
        """All imports of our own modules, those inside functions included."""
        return [each for module in self.trees for each in self._imports_of(module) if each.target != module]

    def importers(self) -> dict[str, set[str]]:
        """Modules that import each module, `__init__` files left out."""
        found: dict[str, set[str]] = {module: set() for module in self.paths}
        for each in self.imports:
            if not self.is_room(each.module):
                found[each.target].add(each.module)
        return found

    def with_one_importer(self) -> dict[str, str]:
        """Modules that exactly one other imports, with that one."""
        found = self.importers()
        return {m: next(iter(found[m])) for m in self.paths if len(found[m]) == 1 and not self.is_room(m)}

    def short_with_one_importer(self) -> list[str]:
        """Of `with_one_importer`: no plugin, no verb, no imitation of another library, at most `LONG` lines."""
        kept = (f"{PACKAGE}.lab.testing.emulated.", f"{PACKAGE}.lab.cli.")
        by_name = {*self._doors(), *(name for module in self.paths for name in self._named_in(module))}
        return [
            module
            for module in self.with_one_importer()
            if module not in by_name and not module.startswith(kept) and _lines(self.paths[module]) <= LONG
        ]

    def circles(self) -> list[list[str]]:
        """One circle of modules that import each other, if there is any. Imports for types do not count."""
        graph: dict[str, set[str]] = {module: set() for module in self.paths}
        for each in self.imports:
            if not each.typing:
                graph[each.module].add(each.target)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as found:
            return [sorted(set(found.args[1]))]
        return []

    def orphans(self) -> list[str]:
        """Modules that nobody reaches."""
        reached, waiting = set[str](), sorted(self._doors())
        by_module: dict[str, list[str]] = {}
        for each in self.imports:
            by_module.setdefault(each.module, []).append(each.target)
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                parents = module.split(".")[:-1]
                waiting += [name for n in range(1, len(parents)) if (name := ".".join(parents[: n + 1])) in self.paths]
                waiting += by_module.get(module, [])
                waiting += self._named_in(module)
        return sorted(module for module in self.paths if module not in reached)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Lines of every source, by path."""
        folders = (PACKAGE, "contrib", "tests", "tools", "benchmarks")
        found = [path for name in folders for path in (self.root / name).rglob("*")]
        return {
            path.relative_to(self.root).as_posix(): _lines(path)
            for path in sorted(found)
            if path.suffix in SOURCES and "__pycache__" not in path.parts
        }

    def _doors(self) -> Iterator[str]:
        """Where somebody from outside comes in."""
        yield PACKAGE
        yield from (name for name in self.paths if name.endswith(".__main__"))
        yield from (
            f"{PACKAGE}.{room}" for room in _public_rooms(self.trees[PACKAGE]) if f"{PACKAGE}.{room}" in self.paths
        )
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        points = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
        yield from (point.split(":")[0] for group in points for point in group.values())
        adapters = f"{PACKAGE}.integrations"
        yield from (m for m in self.paths if m == adapters or m.rpartition(".")[0] == adapters)
        yield from (module for module, tree in self.trees.items() if _registers(tree))
        texts = (ast.get_docstring(self.trees[module]) or "" for module in self.paths if self.is_room(module))
        yield from (
            name for text in texts for name in re.findall(r"(?:from|import) ([\w.]+)", text) if name in self.paths
        )

    def _imports_of(self, module: str) -> Iterator[Import]:
        tree = self.trees[module]
        for_typing = {id(node) for branch in _typing_branches(tree) for node in ast.walk(branch)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.paths:
                        yield Import(module, alias.name, id(node) in for_typing)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if (target := full if full in self.paths else node.module) in self.paths:
                        yield Import(module, target, id(node) in for_typing)

    def _named_in(self, module: str) -> Iterator[str]:
        """Modules that a module names in a text, to import them by name: one, or all below a folder."""
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value.removesuffix(".")  # f"moe_mk.room.{name}"
                if named in self.paths and named != PACKAGE:
                    yield named
                    inner = named.count(".") > 1  # a room's name is the name of its entry points
                    yield from (name for name in self.paths if inner and name.startswith(f"{named}."))


def _without_subject(tree: ast.Module) -> Iterator[str]:
    """Docstrings of up to three words, or whose first word stands for something that is not named."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    yield from (text for text in texts if text and (len(text.split()) <= 3 or text.startswith(VAGUE)))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _typing_branches(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from node.body


def _registers(tree: ast.Module) -> bool:
    """Whether a class or function of a module is put into a registry: `@PREPARE_FINALIZE.register("no_ep")`."""
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", []):
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(call, ast.Attribute) and call.attr == "register" and ast.unparse(call.value).isupper():
                return True
    return False


def _public_rooms(tree: ast.Module) -> list[str]:
    """What `_ROOMS` of the package names: rooms that open as attributes of the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ROOMS":
            texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            return " ".join(text for text in texts if isinstance(text, str)).split()
    return []


def static_measurements(house: House) -> dict[str, Any]:
    """Everything that is read from the sources, as JSON."""
    own = {path.removeprefix(f"{PACKAGE}/"): n for path, n in house.sizes.items() if path.startswith(f"{PACKAGE}/")}
    python = {path: lines for path, lines in house.sizes.items() if path.endswith(".py")}
    long = [path for path, lines in python.items() if lines > LONGEST]
    vague = [
        f"{house.paths[module].relative_to(house.root)}: {text.splitlines()[0][:60]!r} states no subject"
        for module, tree in house.trees.items()
        for text in _without_subject(tree)
    ]
    pages = [page for page in house.root.glob("docs/*.md") if page.name != "capabilities.md"]
    rooms: dict[str, dict[str, int]] = {}
    for path, lines in own.items():
        room = rooms.setdefault(path.partition("/")[0] if "/" in path else "root", {"lines": 0, "files": 0})
        room["lines"], room["files"] = room["lines"] + lines, room["files"] + 1

    def below(*folders: str, without: str = "nothing") -> int:
        return sum(n for path, n in python.items() if path.startswith(folders) and not path.startswith(without))

    return {
        "rooms": rooms,
        "lines": sum(own.values()),
        "short ones, no plugins": len(house.short_with_one_importer()),
        "short modules with one importer": house.short_with_one_importer(),
        "circles": len(house.circles()),
        "circles of modules": house.circles(),
        "orphans": len(house.orphans()),
        "orphan modules": house.orphans(),
        "core lines": sum(n for path, n in own.items() if path.startswith(CORE) or "/" not in path),
        "library lines": below(f"{PACKAGE}/", without=f"{PACKAGE}/lab/"),
        "test lines": below("tests/"),
        "tool and benchmark lines": below("tools/", "benchmarks/"),
        "words of docs": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "long files": len(long),
        "docstrings without a subject": len(vague),
        "vague docstrings": vague,
        "files that are too long": [f"{path}: {python[path]} lines" for path in long],
    }


def problems(measured: Mapping[str, Any]) -> list[str]:
    """What exceeds its limit, with the remedy."""
    over = [
        f"{name}: {measured[name]:,}, at most {limit:,}: make something smaller"
        for name, limit in LIMITS.items()
        if measured.get(name, 0) > limit
    ]
    named = ("orphan modules", "circles of modules", "files that are too long", "vague docstrings")
    return [*over, *(f"  {each}" for name in named for each in measured[name])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is exceeded")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    measured = static_measurements(House(options.root))
    if not options.check:
        print(json.dumps(measured, indent=1))
        return 0
    wrong = problems(measured)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
