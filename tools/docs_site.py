"""Hooks of mkdocs: pages generated from other files, and Markdown converted to what mkdocs supports.

The front page is README.md, the change log CHANGELOG.md, and the reference has one page per package, from docstrings.
Links that leave `docs/` become file names, because the site contains no sources.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "moe_mk"
NOT_FOR_READERS = frozenset({"__main__.py", "kernels"})
"""Kernels have the same names in every backend; see `moe_mk/kernels/reference`."""
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```(?P<kind>text|python) \w+$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files in `docs/`."""
    from mkdocs.structure.files import File

    pages = {"index.md": front_page(ROOT), "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}
    for name, text in (pages | reference(ROOT)).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_config(config: Any) -> Any:
    """Add every package of the reference to the navigation."""
    rooms = [{name: f"reference/{name}.md"} for name in sorted(rooms_of(ROOT))]
    (section,) = [entry["Reference"] for entry in config.nav if "Reference" in entry]
    section[2:2] = rooms  # after the public API and the index
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Reduce fences to one word, and links to those that lead to pages of the site."""
    del config
    return one_word_fences(links_on_site(markdown, page.file.src_uri, {file.src_uri for file in files}))


def front_page(root: Path) -> str:
    """README.md with links relative to `docs/`."""
    text = (root / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()docs/", r"\1", text)  # pictures

    def from_docs(link: re.Match[str]) -> str:
        leaves = "../" if not re.match(r"[a-z]+:|#|docs/", link["target"]) else ""
        return f"[{link['text']}]({leaves}{link['target'].removeprefix('docs/')})"

    return LINK.sub(from_docs, text)


def links_on_site(markdown: str, page: str, known: set[str]) -> str:
    """Links that leave the site as code, outside of fenced blocks. page, known: paths below `docs/`."""

    def kept(link: re.Match[str]) -> str:
        target = link["target"].partition("#")[0]
        if not target or re.match(r"[a-z]+:", target) or _joined(page, target) in known:
            return link[0]
        # A link that stays inside `docs/` is kept, so that a strict build fails where it leads nowhere.
        return f"`{link['text'].strip('`')}`" if _joined(page, target).startswith("../") else link[0]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(kept, part) for part in parts)


def _joined(page: str, target: str) -> str:
    """A link as a path below `docs/`; it begins with `../` where it leaves."""
    parts = page.split("/")[:-1]
    for step in target.split("/"):
        if step == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif step != ".":
            parts.append(step)
    return "/".join(parts)


def one_word_fences(markdown: str) -> str:
    """Replace `text output` and the like, which tests read, by the plain kind."""
    return FENCE.sub(lambda fence: f"```{fence['kind']}", markdown)


def rooms_of(root: Path) -> dict[str, list[str]]:
    """The public modules of every package or top-level module, as dotted names."""
    rooms: dict[str, list[str]] = {}
    package = root / PACKAGE
    for entry in sorted(package.iterdir()):
        if entry.name in NOT_FOR_READERS or entry.name.startswith("__"):
            continue
        if entry.suffix == ".py":
            rooms[entry.stem] = [f"{PACKAGE}.{entry.stem}"]
        elif (entry / "__init__.py").exists():
            rooms[entry.name] = list(_modules(root, entry))
    return rooms


def _modules(root: Path, room: Path) -> Iterator[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(room.rglob("*.py")):
        parts, body = path.relative_to(root).with_suffix("").parts, ast.parse(path.read_text(encoding="utf-8")).body
        is_public = any(isinstance(node, kinds) and not node.name.startswith("_") for node in body)
        if is_public and not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def reference(root: Path) -> dict[str, str]:
    """The pages of the reference by their path below `docs/`; mkdocstrings fills them."""
    rooms = rooms_of(root)
    lines = ["# Reference", "", "Generated from docstrings, one page per package.", ""]
    lines += [f"- [`{PACKAGE}.{room}`]({room}.md): {_summary(root, room)}" for room in sorted(rooms)]
    pages = {"reference/index.md": "\n".join([*lines, "", "## The package", "", f"::: {PACKAGE}", ""])}
    for room, modules in rooms.items():
        body = [f"# {PACKAGE}.{room}", "", _summary(root, room), ""]
        pages[f"reference/{room}.md"] = "\n".join([*body, *(f"\n::: {module}\n" for module in modules)])
    return pages


def _summary(root: Path, room: str) -> str:
    """The first sentence of a package's docstring."""
    file = root / PACKAGE / f"{room}.py"
    tree = ast.parse((file if file.exists() else root / PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
