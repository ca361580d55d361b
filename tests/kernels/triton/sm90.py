"""Compile a kernel for sm_90 on a machine without a GPU, and read what the assembler made of it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

BYTES = 16
"""Of an instruction."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack: int
    shared: int
    """Bytes of shared memory of one program."""
    scratch: int
    """Bytes of global memory that a launch has to allocate; 0 in all our kernels."""
    instructions: Counter[str]
    """How often each SASS instruction stands in the code, without its suffixes."""
    ptx: str
    spills_in_loop: int
    """Loads and stores of local memory between the first product and the last one."""
    loops: tuple[int, ...]
    """Instructions between each backward branch and its target, inclusive, in the order of the branches."""
    step: int
    """Instructions of the innermost loop with products, that of one step of the reduction; 0 without products."""
    products: int
    """Matrix instructions of that loop."""
    stores: Counter[int]
    """Stores to global memory by their bytes per thread."""
    in_step: Counter[str]
    """How often each instruction stands in that loop."""
    ttgir: str = field(repr=False)
    """The program after layouts were assigned."""

    @property
    def spills(self) -> int:
        return self.instructions["LDL"] + self.instructions["STL"]


def compile_for_hopper(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: Collection[str] = (),
    gluon: bool = False,
    arch: int = 90,
    **options: Any,
) -> Compiled:
    """signature: type of each argument that is no constant. aligned: integers that are multiples of 16."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    unknown = [name for name in kernel.arg_names if name not in signature and name not in constants]
    assert not unknown, f"neither typed nor constant: {unknown}"
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or name in aligned
    }
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    source = Source(kernel, types, constexprs=dict(constants), attrs=attributes)
    built = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
    code, usage = _disassemble(built.asm["cubin"])
    listed = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)([A-Z0-9_.]*)", code)
    names = [name for name, _ in listed]
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    scratch = getattr(built.metadata, "global_scratch_size", 0)
    products = [place for place, name in enumerate(names) if name.endswith("GMMA")]
    loop = names[products[0] : products[-1]] if products else []
    spilled = loop.count("LDL") + loop.count("STL")
    loops = _loops(code)
    inner = [(end - start + 1, names[start : end + 1]) for start, end in loops]
    steps = [(size, sum(map(is_product, body)), body) for size, body in inner if any(map(is_product, body))]
    step, num_products, within = min(steps, default=(0, 0, []))
    return Compiled(
        registers, stack, built.metadata.shared, scratch, Counter(names), built.asm["ptx"], spilled,
        tuple(size for size, _ in inner), step, num_products,
        Counter(_width(suffix) for name, suffix in listed if name == "STG"), Counter(within), built.asm["ttgir"],
    )  # fmt: skip


def is_product(name: str) -> bool:
    return name.endswith("GMMA") or name in ("HMMA", "IMMA")


def _width(suffix: str) -> int:
    """Bytes of a store, from the suffix of its instruction: 4 where it has none."""
    found = re.search(r"\.(U8|S8|U16|S16|64|128)\b", suffix)
    return {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[found[1]] if found else 4


def _loops(code: str) -> list[tuple[int, int]]:
    """First and last instruction of every loop; the branch to itself at the end of a kernel is none."""
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/[^\n;]*\bBRA\b[^\n;]*?\b0x([0-9a-f]+)", code)
    spans = [(int(to, 16) // BYTES, int(at, 16) // BYTES) for at, to in branches]
    return [(start, end) for start, end in spans if start < end]


def _disassemble(cubin: bytes) -> tuple[str, str]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        runs = [["-sass"], ["--dump-resource-usage"]]
        code, usage = (
            subprocess.run(
                [str(TOOLS / "cuobjdump"), *flags, str(file)], capture_output=True, text=True, check=True, timeout=60
            ).stdout
            for flags in runs
        )
    return code, usage
