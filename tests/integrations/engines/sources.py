"""The Python files of an engine's wheel, read without importing it: an engine that does not install here can be read.

python -m tests.integrations.engines.sources build/engines      # what `make seams` calls: download and unpack
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SEAMS = json.loads((HERE / "seams.json").read_text(encoding="utf-8"))
UNPACKED = HERE.parents[2] / "build" / "engines"


class Sources(NamedTuple):
    """A folder that holds a package as `import` would find it."""

    root: Path

    def module(self, name: str) -> ast.Module:
        """Raises FileNotFoundError if there is no such module."""
        return _parsed(self._path(name))

    def text(self, name: str) -> str:
        return self._path(name).read_text(encoding="utf-8")

    def find(self, module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
        """A class or function that a module defines, or imports by name from another module of the package."""
        for node in ast.walk(self.module(self.defining(module, name))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
        raise LookupError(f"{module} imports {name} under another name")

    def function(self, module: str, qualified: str) -> ast.FunctionDef:
        """A function of a module, or `Class.method`, which the class defines or inherits."""
        owner, _, method = qualified.partition(".")
        found = self.find(module, owner)
        if not method:
            assert isinstance(found, ast.FunctionDef)
            return found
        assert isinstance(found, ast.ClassDef)
        for each in found.body:
            if isinstance(each, ast.FunctionDef) and each.name == method:
                return each
        for base in found.bases:
            with suppress(LookupError, FileNotFoundError):
                where = self.defining(module, owner)
                return self.function(where, f"{ast.unparse(base).rpartition('.')[2]}.{method}")
        raise LookupError(f"{module}: {owner} has no {method}")

    def defining(self, module: str, name: str) -> str:
        """The module that defines a class or function which `module` defines or imports by name."""
        for node in ast.walk(self.module(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if alias.name == "*":
                    with suppress(LookupError, FileNotFoundError):
                        return self.defining(self._imported(module, node), name)
                elif name == (alias.asname or alias.name):
                    return self.defining(self._imported(module, node), alias.name)
        raise LookupError(f"{module} has no {name}")

    def parameters(self, module: str, qualified: str) -> list[str]:
        spec = self.function(module, qualified).args
        return [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]

    def code(self, module: str, qualified: str) -> str:
        return ast.unparse(self.function(module, qualified)).replace("'", '"')

    def fields(self, module: str, owner: str, *, properties: bool = True) -> set[str]:
        """Annotated names of a class, and its properties."""
        body = self.find(module, owner).body
        stated = {
            each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        decorated = {each.name for each in body if isinstance(each, ast.FunctionDef) and each.decorator_list}
        return stated | (decorated if properties else set())

    def classes_below(self, package: str, *roots: str) -> set[str]:
        """The named classes and all that inherit from them, directly or not, by name."""
        bases = _bases(self.root / package)
        names = set(roots)
        while more := {name for name, of in bases.items() if of & names} - names:
            names |= more
        return names

    def _path(self, name: str) -> Path:
        path = self.root.joinpath(*name.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = module.split(".") if self._path(module).name == "__init__.py" else module.split(".")[:-1]
        return ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _bases(package: Path) -> dict[str, set[str]]:
    bases: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name, stated in re.findall(r"^ *class (\w+)\(([^)]*)\)", text, re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", stated))
    return bases


def main(folder: Path) -> None:
    """Download the wheels of the versions that were read and unpack their Python files into folder/PROJECT-VERSION."""
    for project, versions in SEAMS["read"].items():
        for version, distribution in versions.items():
            if (target := folder / f"{project}-{version}").is_dir():
                continue
            with tempfile.TemporaryDirectory() as wheels:
                of = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "-d", wheels]
                pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", *of]
                subprocess.run([*pip, f"{distribution}=={version}"], check=True)
                (wheel,) = Path(wheels).glob("*.whl")
                partial = folder / f"{target.name}.partial"
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(partial, [name for name in packed.namelist() if name.endswith(".py")])
                partial.rename(target)
            print(f"unpacked  {target.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
