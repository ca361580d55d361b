"""Options that several verbs share, named like the settings of a configuration; old names stay as aliases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from moe_mk.errors import ConfigError
from moe_mk.lab.cli.words import EXPERTS, TRANSPORTS


def shipped(folder: str) -> list[str]:
    """Names of the shipped files of `configs/models` or `configs/devices`, as in `config.shipped`, without torch."""
    package = Path(__file__).resolve().parents[2]
    return sorted(
        path.stem for base in (package, package.parent) for path in (base / "configs" / folder).glob("*.yaml")
    )


def completing(names: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Return a completion for shells: the names that begin with a word."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


TRANSPORT_NAMES = completing(lambda: ["auto", *TRANSPORTS.split(", ")])
EXPERTS_NAMES = completing(lambda: ["auto", *EXPERTS.split(", ")])
BACKEND_NAMES = completing(lambda: [*TRANSPORTS.split(", "), *EXPERTS.split(", ")])
MODEL_NAMES = completing(lambda: shipped("models"))
PROFILE_NAMES = completing(lambda: shipped("devices"))
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N", autocompletion=completing(lambda: ["cpu", "cuda"]))]
PrepareFinalize = Annotated[
    str, typer.Option("--prepare-finalize", help="pin the transport", autocompletion=TRANSPORT_NAMES)
]
Experts = Annotated[
    str, typer.Option("--experts", "--experts-backend", help="pin the experts backend", autocompletion=EXPERTS_NAMES)
]
AllowEmulated = Annotated[bool, typer.Option("--allow-emulated", help="make emulated libraries eligible")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="any setting, such as kernel.timeout_s=5, or a file of them; repeatable"
    ),
]
HERE = "here"
"""The value of --installed that stands for the libraries of this machine."""


class ExplainCommand(TyperCommand):
    """A command with an --installed option that takes an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line; --installed alone means --installed=here."""
        bare = {
            at
            for at, word in enumerate(args)
            if word == "--installed" and (at + 1 == len(args) or args[at + 1].startswith("-"))
        }
        return super().parse_args(ctx, [f"{word}={HERE}" if at in bare else word for at, word in enumerate(args)])


def settings_of(words: Sequence[str] | None) -> dict[str, Any]:
    """The overrides that --set gives, for `MoEConfig.with_`; values are read as YAML. Raises ConfigError."""
    import yaml  # not by --help

    from moe_mk.config.base import overrides_of

    found: dict[str, Any] = {}
    for word in words or ():
        key, equals, text = word.partition("=")
        if not equals and Path(word).suffix in (".yaml", ".yml", ".json"):
            found |= overrides_of(word)
            continue
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {word!r} is not KEY=VALUE; write for example --set kernel.timeout_s=5, or --set FILE.yaml"
            )
        try:
            found[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as problem:
            raise ConfigError(f"--set {word!r} has a value that is not YAML: {problem}") from problem
    return found


LARGEST = 2**31 - 1
"""Larger sizes do not fit into the integers that are sent."""
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of(option: str, text: str, *, per_second: bool = False) -> int:
    """The number of bytes of a text such as 3GB, 512MiB or 3000000000, or per second of 1.1GB/s; else ConfigError."""
    found = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]i?B|B|)", text.strip().removesuffix("/s" if per_second else "")
    )
    if found is None or found[2] not in UNITS or not (value := round(float(found[1]) * UNITS[found[2]])):
        example = "1.1GB/s" if per_second else "3GB, 512MiB or 3000000000"
        raise ConfigError(f"{option} {text!r} is no amount above 0; write for example {example}")
    return value


def enough(num_bytes: int) -> str:
    """An amount of at least this many bytes that `bytes_of` reads, with three digits or a little more: 88.2MB."""
    unit = next((name for name in ("GB", "MB", "kB") if num_bytes >= UNITS[name]), "B")
    return f"{math.ceil(num_bytes / UNITS[unit] * 100) / 100:g}{unit}"


Memory = Annotated[
    str | None,
    typer.Option(help="memory for the experts on all ranks, such as 3GB; the others stay in a store"),
]
Store = Annotated[
    Path | None, typer.Option(help="folder of the store, see convert --store; default: experts.store in the checkpoint")
]
