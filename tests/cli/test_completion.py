"""Shell completion: the script a shell loads, and what it offers."""

import pytest
from typer.testing import CliRunner

from moe_mk.lab.cli import app

QUIET = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script(shell: str) -> None:
    done = CliRunner().invoke(app, [], prog_name="moe-mk", env={"_MOE_MK_COMPLETE": f"source_{shell}"})
    assert done.exit_code == 0 and "moe-mk" in done.stdout and f"complete_{shell}" in done.stdout


@pytest.mark.parametrize(("words", "offered"), [
    ("moe-mk ma", {"make-checkpoint"}),
    ("moe-mk ", {"run", "explain", "doctor", "schema", "certify", "chaos", "inspect-checkpoint"}),
    ("moe-mk inspect-checkpoint --js", {"--json"}), ("moe-mk explain --nod", {"--nodes"}),
    ("moe-mk explain deepseek_v", {"deepseek_v3"}), ("moe-mk explain deepseek_v3 --device h", {"h100", "h200"}),
    ("moe-mk run x --experts cpu", {"cpu_native"}), ("moe-mk run x --device c", {"cpu", "cuda"}),
    ("moe-mk bench --prepare-finalize one", {"one_sided", "one_sided_network"}), ("moe-mk certify all", {"all_to_all"}),
])  # fmt: skip
def test_verbs_and_options_are_offered(words: str, offered: set[str]) -> None:
    env = {"_MOE_MK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = CliRunner().invoke(app, [], prog_name="moe-mk", env=QUIET | env)
    assert done.exit_code == 0 and offered <= set(done.stdout.split()), done.output
