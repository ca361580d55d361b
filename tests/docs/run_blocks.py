"""Run the python blocks of each Markdown file in order, in one namespace, and compare what they print.

python run_blocks.py FILE ...

Each file has a process of its own, forked from one that has imported torch, transformers and moe_mk, which takes longer
than most pages do. What goes wrong is reported on standard error, and by file name as JSON on standard output.
A block with the fence `python` is run. A block with the fence `text output` right after it is what it must print.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. line: of its first line of content, in the file."""

    kind: str
    body: str
    line: int


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match["kind"].strip(), match["body"], text.count("\n", 0, match.start("body")) + 1)
        for match in FENCE.finditer(text)
    ]


def run(file: Path) -> list[str]:
    """Run a file's blocks; returns what went wrong, with its line in the file."""
    blocks, namespace = blocks_of(file.read_text(encoding="utf-8")), {"__name__": "__main__"}
    for index, block in enumerate(blocks):
        if block.kind != "python":
            continue
        printed = io.StringIO()
        try:
            code = compile("\n" * (block.line - 1) + block.body, str(file), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except Exception:
            return [f"{file.name}:{block.line}: {traceback.format_exc()}"]
        following = blocks[index + 1] if index + 1 < len(blocks) else None
        stated = printed.getvalue().strip()
        if following and following.kind == "text output" and following.body.strip() != stated:
            return [f"{file.name}:{following.line}: expected\n{following.body}but the block above prints\n{stated}"]
    return []


def run_apart(file: Path) -> str:
    """What goes wrong with a file in a fork of this process, or nothing."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, "\n".join(run(file)).encode()[-60_000:])  # a pipe holds 64 KiB that nobody has read yet
        except BaseException:  # pages may exit too
            os.write(theirs, traceback.format_exc().encode()[-60_000:])
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    with os.fdopen(ours, "rb") as stated:
        problem = stated.read().decode(errors="replace")
    return problem or (f"{file.name}: its process ended with status {status}" if status else "")


if __name__ == "__main__":
    for module in ("moe_mk.layer", "moe_mk.integrations.transformers"):
        importlib.import_module(module)
    problems = {name: run_apart(Path(name)) for name in sys.argv[1:]}
    print(json.dumps(problems))
    sys.exit("\n".join(filter(None, problems.values())) or 0)
