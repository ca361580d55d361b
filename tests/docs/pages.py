"""The pages of the README and the docs, and what stands in them."""

import re
from pathlib import Path

from tests.docs.run_blocks import Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "capabilities.md")]


def blocks(page: Path, *kinds: str) -> list[Block]:
    return [block for block in blocks_of(page.read_text(encoding="utf-8")) if block.kind in kinds]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    """What stands between backticks in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))
