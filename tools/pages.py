"""Generated parts of pages, between two marks."""

from __future__ import annotations


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with a text on the lines between two marks. Raises ValueError unless each is there once."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one line {begin} and one line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
