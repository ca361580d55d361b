"""The python of the README and the docs runs and prints what it states."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from tests.docs.pages import PAGES, ROOT, blocks


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: `ds3`, a tiny checkpoint in the official layout."""
    folder = tmp_path_factory.mktemp("docs")
    write_checkpoint(folder / "ds3", CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))
    return folder


PAGES_THAT_RUN = [page for page in PAGES if blocks(page, "python")]


def run_python(
    *arguments: str, cwd: Path, path: Path = ROOT, timeout_s: float = 100
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.fixture(scope="module")
def problems(workplace: Path) -> dict[str, str]:
    """What goes wrong with the python of each page, by its path; a page that is right has nothing."""
    done = run_python(str(ROOT / "tests/docs/run_blocks.py"), *map(str, PAGES_THAT_RUN), cwd=workplace, timeout_s=400)
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


# A process of its own for each page: pages register backends, and those must not reach other tests.
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_it_states(page: Path, problems: dict[str, str]) -> None:
    assert not problems[str(page)], problems[str(page)]


@pytest.mark.slow
def test_pages_that_are_wrong_are_found(tmp_path: Path) -> None:
    (tmp_path / "raises.md").write_text("Some words.\n\n```python\nx = 1\n\nx.nothing\n```\n", encoding="utf-8")
    (tmp_path / "prints.md").write_text("```python\nprint(1)\n```\n```text output\n2\n```\n", encoding="utf-8")
    done = run_python(str(ROOT / "tests/docs/run_blocks.py"), "raises.md", "prints.md", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"raises.md:4: .*line 6.*no attribute 'nothing'", done.stderr, re.DOTALL), done.stderr
    assert "prints.md:5: expected\n2\nbut the block above prints\n1" in done.stderr, done.stderr


@pytest.mark.slow
def test_the_backends_of_the_page_work_from_a_wheel(tmp_path: Path) -> None:
    page = ROOT / "docs/add-a-backend.md"
    wheel, facts = tmp_path / "my_wheel", tmp_path / "my_wheel-0.1.dist-info"
    wheel.mkdir()
    facts.mkdir()
    (wheel / "__init__.py").touch()
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block.body):
            (wheel / name[1]).write_text(
                re.sub(r"^@(?:PREPARE_FINALIZE|EXPERTS)\..*\n", "", block.body, flags=re.MULTILINE)
            )
    (points,) = blocks(page, "toml")
    text = re.sub(r'\[project\.entry-points\."(.+)"\]', r"[\1]", points.body).replace('"', "")
    (facts / "entry_points.txt").write_text(text)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-wheel\nVersion: 0.1\n")
    program = (
        "from moe_mk.prepare_finalize import PREPARE_FINALIZE as T; from moe_mk.experts import EXPERTS as X;"
        "from moe_mk.external.library import LIBRARIES as L;"
        "print(T['one_by_one'].__name__, T.origin('one_by_one'), X['bf16_loop'].__name__, X.origin('bf16_loop'));"
        "print(L['their_ep'].install)"
    )
    done = run_python("-W", "error", "-c", program, cwd=tmp_path, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("OneByOne", "my-wheel", "(my_wheel.my_transport:OneByOne)"),
        *("Bf16Loop", "my-wheel", "(my_wheel.my_experts:Bf16Loop)"),
        *("pip", "install", "their-ep"),
    ]
