"""Compile a kernel for sm_90 on a machine without a GPU, and read what the assembler made of it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One kernel for sm_90."""

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

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
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
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", code)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    scratch = getattr(built.metadata, "global_scratch_size", 0)
    products = [place for place, name in enumerate(names) if name.endswith("GMMA")]
    loop = names[products[0] : products[-1]] if products else []
    spilled = loop.count("LDL") + loop.count("STL")
    return Compiled(
        registers, stack, built.metadata.shared, scratch, Counter(names), built.asm["ptx"], spilled, _loops(code)
    )


def _loops(code: str) -> tuple[int, ...]:
    """Instructions are 16 bytes; the branch to itself at the end of a kernel is none."""
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/[^\n;]*\bBRA\b[^\n;]*?\b0x([0-9a-f]+)", code)
    spans = [int(at, 16) - int(to, 16) for at, to in branches]
    return tuple(span // 16 + 1 for span in spans if span > 0)


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
