"""Run the python blocks of one Markdown file in order, in one namespace, and compare what they print.

python run_blocks.py FILE

A block whose fence says `python` is run. A block right after it whose fence says `text output` is what it must print.
"""

from __future__ import annotations

import contextlib
import io
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
    """All fenced blocks of a Markdown text."""
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
        said = printed.getvalue().strip()
        if following and following.kind == "text output" and following.body.strip() != said:
            return [f"{file.name}:{following.line}: expected\n{following.body}but the block above prints\n{said}"]
    return []


if __name__ == "__main__":
    problems = run(Path(sys.argv[1]))
    sys.exit("\n".join(problems) if problems else 0)
