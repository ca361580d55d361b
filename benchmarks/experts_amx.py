"""The native experts on a processor with AMX against other projects: experts_cpu.py for so many minutes.

    python benchmarks/experts_amx.py [--vllm vllm] [--kt kt] --json out.json

Takes the options of experts_cpu.py. Refuses to run on a processor without AMX.
"""

import sys
from collections.abc import Sequence

from experts_cpu import main as experts_cpu

from moe_mk.errors import UnsupportedError
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import load

SETTINGS = "--rows 1 4 8 16 32 64 256 1024 --rounds 3 --minutes 7"


def main(arguments: Sequence[str], native: Native | None = None) -> int:
    native = native or load(progress=print)
    try:
        native.isa_or_best(Isa.AMX_BF16)
    except UnsupportedError as refusal:
        print(refusal)
        return 1
    experts_cpu([*SETTINGS.split(), *arguments], native)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
