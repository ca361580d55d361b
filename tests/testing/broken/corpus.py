"""Broken backends with the law that each violates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_mk.experts.base import EXPERTS, FusedExperts
from moe_mk.lab.testing.certificate import Certificate
from moe_mk.lab.testing.certify import certify
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.registry import Registry

Backend = TypeVar("Backend", bound="type[FusedExperts] | type[PrepareFinalize]")


@dataclass(frozen=True)
class Broken:
    cls: type[FusedExperts] | type[PrepareFinalize]
    law: str
    """The law that its certificate must name, and no other."""
    larger: bool
    """Whether it is right in the cases of `--quick`."""


CORPUS: dict[str, Broken] = {}


def breaks(law: str, *, larger: bool = False) -> Callable[[Backend], Backend]:
    def add(cls: Backend) -> Backend:
        kind = "experts" if issubclass(cls, FusedExperts) else "transports"
        CORPUS[f"{kind}.{cls.__name__}"] = Broken(cls, law, larger)
        return cls

    return add


def changed(name: str, law: str, base: Any, *, larger: bool = False, **steps: Callable[..., object]) -> Any:
    """Add a class that changes steps of a correct one. steps: functions of the step as it was and its inputs."""

    def method(step: str, change: Callable[..., object]) -> Callable[..., object]:
        return lambda self, *given: change(getattr(super(made, self), step), *given)

    methods = {step: method(step, change) for step, change in steps.items()}
    made = type(name, (base,), methods | {"__module__": base.__module__})
    return breaks(law, larger=larger)(made)


@contextmanager
def registered(cls: type[FusedExperts] | type[PrepareFinalize]) -> Iterator[str]:
    """Register a class under a name of its own for a while."""
    target: Registry[Any] = EXPERTS if issubclass(cls, FusedExperts) else PREPARE_FINALIZE
    name = "broken"
    _ = list(target)
    target._entries[name], target._origin[name] = cls, "the corpus of broken backends"
    try:
        yield name
    finally:
        del target._entries[name], target._origin[name]


def refused(name: str) -> Certificate:
    """The certificate of a broken backend. Raises AssertionError unless it names the law that the backend violates, and
    no other; and for a backend that is right in the cases of `--quick` unless it is certified with them."""
    broken = CORPUS[name]
    with registered(broken.cls) as known_as:
        certificate = certify(known_as, processes=False, quick=True)
        if broken.larger:
            if not certificate.passed:
                raise AssertionError(f"{name} fails with --quick: {certificate.failures}")
            certificate = certify(known_as, processes=False)
    laws = {failure.law for failure in certificate.failures}
    if laws != {broken.law}:
        raise AssertionError(f"{name} violates {broken.law!r}, the certificate names {certificate.failures}")
    return certificate
