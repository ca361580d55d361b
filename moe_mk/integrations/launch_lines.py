"""Launch lines of other engines, read as data: vllm serve, sglang.launch_server, trtllm-serve in scripts and pages.

    for launch in read_launches(text):
        launch.engine, launch.options, launch.environment

`launch_rules` reports pitfalls of expert parallelism in them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from moe_mk.errors import ConfigError

ENGINES = ("vllm", "sglang", "trtllm")
ALIASES = {
    "vllm": {"tp": "tensor-parallel-size", "dp": "data-parallel-size", "pp": "pipeline-parallel-size",
             "ep": "enable-expert-parallel", "dpl": "data-parallel-size-local", "dpa": "data-parallel-address"},
    "sglang": {"tp": "tp-size", "dp": "dp-size", "ep": "ep-size", "expert-parallel-size": "ep-size",
               "tensor-parallel-size": "tp-size", "data-parallel-size": "dp-size"},
    "trtllm": {"tensor-parallel-size": "tp-size", "moe-expert-parallel-size": "ep-size",
               "moe-tensor-parallel-size": "moe-tp-size", "moe-cluster-parallel-size": "moe-cluster-size",
               "extra-llm-api-options": "config"},
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch line."""

    engine: str
    """One of `ENGINES`."""
    options: dict[str, str]
    """Long names with hyphens, without aliases; "" is a flag without a value."""
    environment: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    """What --eplb-config, --kv-transfer-config, or the YAML file of TensorRT-LLM holds, as far as it is in the text."""
    line: int = 1
    """Where it begins."""

    def has(self, name: str) -> bool:
        """Whether a flag is set, and not by `--no-...`."""
        return name in self.options and self.options[name].lower() not in ("false", "0")

    def number(self, name: str, default: int) -> int:
        """An option with a number; the default where it is absent or a variable of the shell."""
        text = self.options.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    def is_stated(self, name: str) -> bool:
        """Whether an option has a number."""
        return re.fullmatch(r"-?\d+", self.options.get(name, "")) is not None


def read_launches(text: str) -> list[Launch]:
    """The launch lines of a script or a page, in order; other commands are passed over.

    `export A=B` and `A=B command` set the environment; `cat <<EOF > FILE` holds a configuration for --config FILE.
    Raises ConfigError for a line with an unfinished quote.
    """
    files, text = _heredocs(text)
    exported: dict[str, str] = {}
    found = []
    for number, command in _commands(text):
        try:
            words = shlex.split(command)
        except ValueError as problem:
            raise ConfigError(f"line {number}: {problem}: {command[:60]!r}") from None
        if words[:1] == ["export"]:
            exported |= dict(word.split("=", 1) for word in words[1:] if "=" in word)
            continue
        own: dict[str, str] = {}
        while words and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", words[0], re.S):
            name, _, value = words.pop(0).partition("=")
            own[name] = value
        engine, rest = _engine_of(words)
        if engine:
            found.append(_launch(engine, rest, exported | own, files, number))
        elif not words:
            exported |= own
    return found


def _heredocs(text: str) -> tuple[dict[str, str], str]:
    """Files that the text writes by `cat <<EOF > FILE`, and the text with as many empty lines instead."""
    files: dict[str, str] = {}

    def keep(match: re.Match[str]) -> str:
        files[match["file"]] = match["body"]
        return "\n" * match[0].count("\n")

    pattern = (
        r"""cat\s*<<-?\s*['"]?(?P<end>\w+)['"]?\s*>\s*(?P<file>\S+)[^\n]*\n(?P<body>.*?)\n\s*(?P=end)[ \t]*(?=\n|$)"""
    )
    return files, re.sub(pattern, keep, text, flags=re.S)


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Commands with the number of their first line: continued lines joined, comments left out."""
    command, begins = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        if not command and not line.strip():
            continue
        begins = begins if command else number
        if line.endswith("\\"):
            command += line[:-1] + " "
            continue
        for part in re.split(r"\s*(?:&&|;|\|\|?|&)\s+", command + line):
            if part.strip():
                yield begins, part.strip().strip("`")
        command = ""
    if command.strip():
        yield begins, command.strip()


def _engine_of(words: Sequence[str]) -> tuple[str, list[str]]:
    for at, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if name == "vllm" and words[at + 1 : at + 2] == ["serve"]:
            return "vllm", list(words[at + 2 :])
        if word.startswith("vllm.entrypoints"):
            return "vllm", list(words[at + 1 :])
        if word in ("sglang.launch_server", "dynamo.sglang") or (
            name == "sglang" and words[at + 1 : at + 2] == ["serve"]
        ):
            return "sglang", list(words[at + 1 :])
        if name == "trtllm-serve":
            return "trtllm", list(words[at + 1 :])
    return "", []


def _launch(engine: str, words: Sequence[str], environment: dict[str, str], files: dict[str, str], line: int) -> Launch:
    options: dict[str, str] = {}
    config: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and rest and not re.match(r"--?[A-Za-z]", rest[0]):
            value = rest.pop(0)
        name, _, inner = name.partition(".")
        name = name.replace("_", "-")
        is_off = name.startswith("no-")
        name = ALIASES[engine].get(name.removeprefix("no-"), name.removeprefix("no-"))
        if inner:
            config[inner] = value
        else:
            options[name] = "false" if is_off else value
        if name in ("eplb-config", "kv-transfer-config") and value.startswith("{"):
            config |= _json(value)
    if engine == "trtllm" and (written := files.get(options.get("config", ""))):
        config |= _yaml(written)
    for name, value in list(config.items()) if engine == "trtllm" else []:
        options.setdefault(ALIASES[engine].get(name.replace("_", "-"), name.replace("_", "-")), str(value))
    return Launch(engine, options, environment, config, line)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
