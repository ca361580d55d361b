"""Break the C++ kernels in small ways, and see that the quick tests of the kernels fail.

python tools/mutants_cpp.py 20 --seed 3     20 changes, one line each, and the rate

Comparisons, arithmetic, constants, indices, guards and early ends of sources in `moe_mk/kernels/csrc` that this
processor runs are changed in a copy of the repository, one at a time. Sources that a change reaches are compiled again
into the copy's prebuilt kernels. Then the tests run until one fails. A change that does not compile is replaced with
another one, one that a test or a crash ends is killed, and one that is late probably hangs. Exit code 1 if one
survives, or its tests did not run.
"""

import argparse
import importlib.util
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tools.mutants import ROOT, Mutant, Outcome, copied, run

CSRC, NATIVE = Path("moe_mk/kernels/csrc"), Path("moe_mk/kernels/native")
TESTS = (
    *(f"tests/kernels/native/test_{name}.py" for name in (
        "route", "whole", "quantize", "packed", "row_sums", "experts_numbers", "parts", "integer_rows", "int8",
        "exchange", "exchange_calls", "experts_calls", "threads",
    )),
    "tests/experts/cpu_native", "tests/router/test_native.py", "tests/layer/test_native_cpu.py",
    "tests/layer/test_exchanged.py",
)  # fmt: skip
"""What runs the kernels, the fastest first."""
LIMIT_S = 240.0
FEATURES = {"amx": "amx_tile", "avx512": "avx512_bf16", "exchange_avx512": "avx512f"}
"""What a processor must have to run sources whose name begins so, as in /proc/cpuinfo."""
CHANGES = (
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "),
    (r" % ", " / "), (r" << ", " >> "), (r" >> ", " << "), (r" & ", " | "), (r" [+|]= ", " = "),
    (r"\bif \(", "if (0 && "), (r"\bif \(", "if (1 || "), (r"\[(\w+)\]", r"[\1 + 1]"),
    (r"\b(?:return|continue|break);", ";"),
    (r"std::min\b", "std::max"), (r"std::max\b", "std::min"), (r"(?<![\w.])\d+(?![\w.])", "(1 + \\g<0>)"),
)  # fmt: skip
NO_CODE = re.compile(r"^\s*(?://|#|\*|template|using|static_assert|extern|case\b)|\bassert\(|\boperator")


def changes_of(file: Path, text: str) -> Iterator[Mutant]:
    """The changes of the code lines of a source, in their order."""
    start = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = re.split(r"//", line)[0]
        for pattern, new in CHANGES if not NO_CODE.search(code) and '"' not in code else ():
            for found in re.finditer(pattern, code):
                made = found.expand(new)
                name = f"{file}:{number}: {line.strip()}  ->  {found[0].strip()} becomes {made.strip()}"
                yield Mutant(file.name, name, str(file), found[0], made, offset=start + found.start())
        start += len(line)


def runs_here(name: str, has: Sequence[str]) -> bool:
    """Whether this processor runs a source or header."""
    stem = name.removeprefix("isa_")
    return all(not stem.startswith(prefix) or flag in has for prefix, flag in FEATURES.items())


class Kernels:
    """The compiled kernels of a copy of the repository."""

    def __init__(self, copy: Path, has: Sequence[str]) -> None:
        spec = importlib.util.spec_from_file_location("toolchain_of_copy", copy / NATIVE / "toolchain.py")
        assert spec is not None and spec.loader is not None
        self.tools: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.tools
        spec.loader.exec_module(self.tools)
        self.csrc, self.objects = copy / CSRC, copy / "objects"
        self._units = list(self.tools.units())
        # What this processor does not run has to link only, and is not optimised.
        self._compiled = [
            unit if runs_here(unit.source.name, has) else replace(unit, flags=(*unit.flags, "-O0"))
            for unit in self._units
        ]
        self.objects.mkdir()
        self.build([unit.source.name for unit in self._units])

    def build(self, changed: Sequence[str]) -> None:
        """Compile the sources that are or include one of these, and link. Raises CalledProcessError."""
        reached = set(changed)
        files = {file.name: file.read_text(encoding="utf-8") for file in self.csrc.glob("*.*")}
        while more := {n for n, text in files.items() if any(f'"{each}"' in text for each in reached)} - reached:
            reached |= more
        compiler = self.tools.find_compiler(shutil.which).path
        again = [unit for unit in self._compiled if unit.source.name in reached]
        self.tools.compile_objects(compiler, again, self.objects)
        shutil.rmtree(self.tools.PREBUILT, ignore_errors=True)
        self.tools.PREBUILT.mkdir()
        library = self.tools.PREBUILT / self.tools.prebuilt_name(self._units)
        objects = [str(self.objects / f"{unit.source.stem}.o") for unit in self._units]
        subprocess.run([compiler, *self.tools.LINK_FLAGS, "-o", str(library), *objects], check=True)
        self.tools.record_digest(library)


def judged(kernels: Kernels, mutant: Mutant, copy: Path, tests: Sequence[str]) -> Outcome | None:
    """What the tests make of a change; None where it does not compile."""
    file, name = copy / mutant.file, Path(mutant.file).name
    original = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutant.applied_to(original), encoding="utf-8")
        kernels.build([name])
        outcome = run(replace(mutant, old="", new="", offset=0), copy, tests, LIMIT_S)
    except subprocess.CalledProcessError:
        return None
    finally:
        file.write_text(original, encoding="utf-8")
        kernels.build([name])
    return replace(outcome, mutant=mutant, detail="")


def summary(states: Counter[str]) -> tuple[str, int]:
    """What became of the changes, and the exit code. Tests and crashes kill; other states are counted apart."""
    killed, total = states["killed"] + states["crashed"], states.total()
    others = "".join(f", {states[each]} {each}" for each in sorted(states) if each not in ("killed", "crashed"))
    return f"{killed} of {total} changes of the kernels killed{others}", 0 if killed + states["late"] == total else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    has = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    files = [file for file in sorted((ROOT / CSRC).glob("*.*")) if runs_here(file.name, has)]
    found = [each for file in files for each in changes_of(file.relative_to(ROOT), file.read_text(encoding="utf-8"))]
    random.Random(options.seed).shuffle(found)
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="moe-mk-mutants-") as folder:
        copy = copied(ROOT, Path(folder))
        kernels = Kernels(copy, has)
        for mutant in found:
            if states.total() == options.count:
                break
            if (outcome := judged(kernels, mutant, copy, TESTS)) is not None:
                print(outcome.line(), flush=True)
                states[outcome.state] += 1
    text, code = summary(states)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
