"""What the README and the docs say is true: links lead somewhere, commands and names exist."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from moe_mk.lab.cli import app
from moe_mk.lab.cli.exits import MISMATCH, OK, UNSUPPORTED, USAGE
from moe_mk.shapes import LEGEND
from tests.architecture.checks import FLOORS
from tests.docs.pages import PAGES, ROOT, blocks, inline_code, prose
from tests.docs.run_blocks import blocks_of

FENCES = {"python", "text output", "text", "text floors", "text spans", "console", "toml", "yaml", "mermaid"}
TOP = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".venv"))
CLI = typer.main.get_command(app)
pages = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


@pages
def test_every_block_states_what_it_is(page: Path) -> None:
    kinds = {block.kind for block in blocks_of(page.read_text(encoding="utf-8"))}
    assert kinds <= FENCES, kinds - FENCES


@pages
def test_a_page_has_at_most_300_lines_and_4000_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (80 if page.name == "README.md" else 300)
    assert len(text.split()) <= 4000


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


@pages
def test_paths_that_are_named_exist(page: Path) -> None:
    named = [code.split("::")[0] for code in inline_code(page) if code.split("/")[0] in TOP and "/" in code]
    for block in blocks(page, "console", "text"):
        named += re.findall(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, TOP))})/[\w./-]*\w", block.body)
    # By the commands that the pages show.
    folders = "before.json ds3 ds3-256 junit mutants residency site stores small tiny-ds3 wheels"
    made = {f"build/{name}" for name in folders.split()}
    missing = [
        path for path in named if "/".join(path.split("/")[:2]) not in made and not list(ROOT.glob(path.rstrip("/")))
    ]
    assert not missing, f"{page.name} names {missing}"


@pages
def test_a_checkpoint_that_a_command_reads_is_written_by_an_earlier_one(page: Path) -> None:
    text = "\n".join(block.body for block in blocks(page, "console"))
    for read in re.finditer(r"moe[-_]mk (?:run|bench|convert|inspect\S*) (build/\S+)", text):
        assert f"make-checkpoint {read[1]}" in text[: read.start()], f"{page.name}: {read[0]}"


@pages
def test_names_of_the_library_exist(page: Path) -> None:
    for code in inline_code(page):
        if match := re.fullmatch(r"(moe_mk(?:\.\w+)+)(?:\(.*\))?", code):
            assert resolves(match[1]), f"{page.name} names {match[1]}"


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The words of every command that a console block shows."""
    for block in blocks(page, "console"):
        for line in block.body.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def verb_and_options(words: list[str]) -> list[str] | None:
    """What follows `moe-mk`, however it is started; None for another command."""
    if words[0] == "moe-mk":
        return words[1:]
    return words[words.index("moe_mk") + 1 :] if "moe_mk" in words else None


def complaint_about(words: list[str], *, whole: bool) -> str:
    """What is wrong with a moe-mk command line. whole: arguments must be complete and options have fit values."""
    commands = getattr(CLI, "commands", {})  # of click's classes, or of typer's own in newer versions
    verb = words[0]
    if verb not in commands:
        return f"there is no moe-mk {verb}"
    command = commands[verb]
    if (inner := getattr(command, "commands", None)) is not None and len(words) > 1:  # a group: its verb comes next
        if words[1] not in inner:
            return f"there is no moe-mk {verb} {words[1]}"
        command, words = inner[words[1]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    if unknown:
        return f"moe-mk {verb} has no {', '.join(unknown)}"
    if whole:
        try:
            command.make_context(verb, words[1:])
        except Exception as problem:
            if not hasattr(problem, "format_message"):
                raise
            return f"moe-mk {shlex.join(words)}: {problem.format_message()}"
    return ""


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in shown_commands(page):
        if (rest := verb_and_options(words)) is not None:
            assert not (wrong := complaint_about(rest, whole=True)), wrong
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        else:
            assert words[0] in ("git", "cd", "pip", "python"), words
    for code in inline_code(page):
        if code.startswith("moe-mk ") and (wrong := complaint_about(shlex.split(code)[1:], whole=False)):
            raise AssertionError(f"{page.name}: {wrong}")
        if code.startswith("make "):
            assert code.split()[1] in targets, code


def test_a_wrong_command_is_found() -> None:
    assert "no moe-mk rnu" in complaint_about(["rnu"], whole=False)
    assert "has no --rank" in complaint_about(["run", "build/ds3", "--rank", "2"], whole=False)
    assert "issing argument" in complaint_about(["run", "--ranks", "2"], whole=True)
    assert "--ranks" in complaint_about(["run", "ds3", "--ranks", "two"], whole=True)


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_output_is_shown_with_the_command_that_made_it(page: str) -> None:
    for block in blocks(ROOT / page, "console"):
        assert block.body.startswith("$ "), f"{page}:{block.line} shows output without its command"


def test_the_page_on_architecture_shows_the_floors_of_the_package() -> None:
    (picture,) = blocks(ROOT / "docs/architecture.md", "text floors")
    drawn = {room: int(line.split()[0]) for line in picture.body.splitlines() for room in line.split()[2:]}
    entries = [path for path in (ROOT / "moe_mk").iterdir() if path.name not in ("__init__.py", "__main__.py")]
    rooms = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert drawn.keys() == rooms, f"not drawn: {rooms - drawn.keys()}; not there: {drawn.keys() - rooms}"
    assert drawn == {room: FLOORS[room] for room in drawn}


def test_exit_codes_in_the_docs_are_those_of_the_command() -> None:
    table = re.findall(r"^\| (\d) \| (\w+)", prose(ROOT / "docs/cli.md"), re.MULTILINE)
    assert dict(table) == {
        str(OK): "ok",
        str(MISMATCH): "mismatch",
        str(USAGE): "usage",
        str(UNSUPPORTED): "unsupported",
    }


def test_the_legend_has_every_letter() -> None:
    cells = re.findall(r"\| ([A-Z]) \|", prose(ROOT / "docs/architecture.md"))
    assert sorted(cells) == sorted(LEGEND)
