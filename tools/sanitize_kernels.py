"""Run the native CPU kernels over random layers and exchanges under AddressSanitizer and UndefinedBehaviourSanitizer.

Builds moe_mk/kernels/csrc with a driver (csrc/fuzz) into a temporary folder, once with this machine's instruction sets
and once with AMX emulated (the tiles only where the processor has AVX-512 and GFNI, on which the AMX kernels rely), and
runs both. The exchange of rows runs against peers that store any counts,
offsets, epochs and slots, before a call and while it runs. Exit status 0: clean.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe_mk.kernels.native.build import processor_has
from moe_mk.kernels.native.toolchain import SOURCES, Compiler, Unit, compile_objects, find_compiler, units

SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="random layers, routings, quantisations and exchanges")
    parser.add_argument("--seed", type=int, default=0, help="the first round's seed")
    options = parser.parse_args(arguments)
    compiler = find_compiler(shutil.which)
    if compiler is None:
        print("no C++ compiler was found (looked for c++, g++, clang++)")
        return 1
    for emulate_amx in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            driver = build(compiler, Path(folder), emulate_amx=emulate_amx)
            print("run       " + ("AMX emulated" if emulate_amx else "this machine's instruction sets"))
            ended = subprocess.run([str(driver), str(options.rounds), str(options.seed)], check=False)
        if ended.returncode != 0:
            print(f"the kernels are not clean: exit status {ended.returncode}")
            return 1
    return 0


def build(compiler: Compiler, folder: Path, *, emulate_amx: bool) -> Path:
    """Compile every source and the driver with the sanitizers on; return the program."""
    tiles_only = processor_has("gfni", "avx512_bf16", "avx512vbmi", "avx512_vnni")
    listed = list(units(emulate_amx=emulate_amx, tiles_only=tiles_only, extra=SANITIZE))
    listed += [
        Unit(SOURCES / "fuzz" / name, ("-std=c++17", "-pthread", *SANITIZE)) for name in ("main.cpp", "peers.cpp")
    ]
    objects = compile_objects(compiler.path, listed, folder)
    program = folder / "fuzz"
    subprocess.run([compiler.path, *SANITIZE, "-pthread", "-o", str(program), *map(str, objects)], check=True)
    return program


if __name__ == "__main__":
    sys.exit(main())
