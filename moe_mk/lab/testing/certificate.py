"""The certificate of a backend: passed and failed checks, environment, and digests to compare."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from operator import or_
from typing import Any

import torch

from moe_mk.external.device import describe
from moe_mk.lab.testing.cases import Sizes
from moe_mk.lab.testing.laws import LAWS
from moe_mk.oracle.trust import CONTRACT, Identity


@dataclass(frozen=True)
class Passed:
    """A check that passed, with its cases."""

    check: str
    cases: int
    digest: str
    """SHA-256 over the bits of all its outputs; empty if equal inputs need not give equal bits."""
    sizes: Sizes = field(default_factory=Sizes)
    """The largest sizes of its cases."""


@dataclass(frozen=True)
class Failed:
    """A check that failed, with the law that was violated."""

    check: str
    law: str
    text: str
    """The text of the law."""
    message: str


@dataclass(frozen=True)
class Certificate:
    """The result of certifying one backend."""

    backend: str
    kind: str
    """ "transport" or "experts"."""
    origin: str
    """The module or wheel it came from."""
    traits: dict[str, Any]
    coverage: tuple[Passed, ...]
    failures: tuple[Failed, ...]
    not_covered: tuple[str, ...] = ()
    """Traits that are not checked."""
    environment: dict[str, str] = field(default_factory=lambda: environment())
    identity: Identity | None = None
    """What it holds for; None: for nothing that can be recognised later, such as a class of an interactive session."""
    quick: bool = False
    """Whether the larger sizes were left out."""

    @property
    def passed(self) -> bool:
        """Whether there are checks and none failed."""
        return bool(self.coverage) and not self.failures

    @property
    def digest(self) -> str:
        """Over all digests of the coverage: equal certificates, equal bits."""
        lines = "\n".join(f"{one.check} {one.cases} {one.digest}" for one in self.coverage)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def sizes(self) -> Sizes:
        """The sizes up to which the backend is certified; each is reached by a passed check, not all by the same."""
        return reduce(or_, (one.sizes for one in self.coverage), Sizes())

    def as_dict(self) -> dict[str, Any]:
        """The certificate as JSON."""
        return {
            "contract": CONTRACT,
            "backend": {"name": self.backend, "kind": self.kind, "origin": self.origin, "traits": self.traits},
            "identity": None if self.identity is None else asdict(self.identity),
            "quick": self.quick,
            "environment": self.environment,
            "laws": {law.name: law.text for law in LAWS},
            "sizes": asdict(self.sizes),
            "coverage": [asdict(one) for one in self.coverage],
            "failures": [asdict(one) for one in self.failures],
            "not_covered": list(self.not_covered),
            "passed": self.passed,
            "digest": self.digest,
        }

    def __str__(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


def environment() -> dict[str, str]:
    """The environment that bits may depend on."""
    try:
        own = version("moe-mk")
    except PackageNotFoundError:  # run from a source tree
        own = "source"
    return {
        "moe_mk": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": describe(torch.device("cpu")),
        "threads": str(torch.get_num_threads()),
    }


def traits_of(traits: object) -> dict[str, Any]:
    """Traits as JSON: names for classes and stages, sorted lists for sets."""
    return {name: _plain(value) for name, value in vars(traits).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, frozenset | set):
        return sorted(value)
    if hasattr(value, "items"):
        return {_plain(key): _plain(held) for key, held in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return getattr(value, "name", value)
