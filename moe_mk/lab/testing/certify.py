"""The conformance kit as a function and as a pytest class: every check that a backend's traits require.

certificate = certify("one_by_one")            # or an experts backend
TestOneByOne = backend_conformance("one_by_one")   # a pytest class, one test a check
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from unittest import SkipTest

from torch._subclasses.fake_tensor import UnsupportedOperatorException

from moe_mk.config.traits import Traits
from moe_mk.errors import CommError, ConfigError, UnsupportedError
from moe_mk.external.library import emulated, installed
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.certificate import Certificate, Failed, Passed, traits_of
from moe_mk.lab.testing.certify_checks import KINDS, WITHOUT_VALUES, Check, checks_of, fault_check, kind_of, untried
from moe_mk.lab.testing.laws import LOADS, RUNS, SIGNATURE, VALUES, YIELD_POINTS, Law, law_of
from moe_mk.lab.testing.limits import NonConforming
from moe_mk.oracle.trust import Identity

__all__ = ["backend_conformance", "certify", "checks_of", "kind_of"]

OnCheck = Callable[[str, int, int], None]
"""Called with (check, done, total)."""


def certify(
    name: str,
    *,
    processes: bool = True,
    quick: bool = False,
    on_check: OnCheck | None = None,
    faults: bool = False,
    modules: Sequence[str] = (),
) -> Certificate:
    """Run every check on a registered backend and collect all failures.

    processes: also run a transport on real processes over gloo, which takes seconds.
    quick: cases of at most 7 tokens and 5 experts per rank only; otherwise also up to 1025 tokens and 257 experts.
    faults: also run a transport in groups of processes with one fault each, which takes a minute or two.
    modules: imported by these processes first, for a transport that is not installed as a wheel.
    Raises ConfigError for an unknown name and for `faults` with experts, UnsupportedError for a backend that
    cannot run here at all.
    """
    kind = kind_of(name)
    if name not in KINDS[kind]:
        reason = KINDS[kind].broken[name]
        unloaded = _failed("load the plugin", SIGNATURE if law_of(reason) is SIGNATURE else LOADS, reason)
        return Certificate(name, kind, "not loaded", {}, (), (unloaded,))
    traits: Traits = KINDS[kind][name].traits
    _must_run_here(name, traits)
    passed: list[Passed] = []
    failed: list[Failed] = []
    missed = (*untried(name), *traits.advice)
    checks = checks_of(name, processes=processes, quick=quick, modules=modules)
    checks += [fault_check(name, modules)] if faults else []
    for done, check in enumerate(checks):
        if on_check is not None:
            on_check(check.name, done, len(checks))
        result = _tried(check)
        if isinstance(result, Failed):
            failed.append(result)
        elif result.cases:
            passed.append(result)
        else:
            missed = (*missed, f"{result.check}: no case applies")
    if traits.library and traits.library not in installed():
        missed = (*missed, f"{traits.library} itself: tested on its emulation")
    return Certificate(
        name, kind, KINDS[kind].origin(name), traits_of(traits), tuple(passed), tuple(failed), missed,
        identity=_identity_of(kind, name), quick=quick,
    )  # fmt: skip


def backend_conformance(name: str, *, processes: bool = False, quick: bool = False) -> type:
    """A pytest class for a registered backend, with one test per check. processes, quick: as of `certify`."""
    body: dict[str, object] = {"__doc__": f"Conformance of {name}."}
    for check in checks_of(name, processes=processes, quick=quick):
        body[f"test_{_identifier(check.name)}"] = _as_test(check)
    return type(f"TestConformanceOf_{_identifier(name)}", (), body)


def _identity_of(kind: str, name: str) -> Identity | None:
    try:
        return Identity.of(name, KINDS[kind][name])
    except ConfigError:
        return None


def _tried(check: Check) -> Passed | Failed:
    try:
        cases = check.run()
        digest = hashlib.sha256(b"".join(bits_of(*check.outputs()))).hexdigest() if check.outputs else ""
        return Passed(check.name, cases, digest, check.sizes())
    except NonConforming as problem:
        law = law_of(str(problem))
        law = (check.law or problem.law or law) if law is VALUES else law
        return _failed(check.name, law, str(problem))
    except (NotImplementedError, UnsupportedOperatorException) as problem:
        if check.name != WITHOUT_VALUES:
            return _failed(check.name, RUNS, f"{type(problem).__name__}: {problem}")
        return Passed(check.name, 0, "")  # an operator that runs on real tensors only
    except CommError as problem:
        return _failed(check.name, YIELD_POINTS, str(problem))
    except Exception as problem:  # backends may fail in any way; the certificate contains the error
        return _failed(check.name, RUNS, f"{type(problem).__name__}: {problem}")


def _failed(check: str, law: Law, message: str) -> Failed:
    return Failed(check, law.name, law.text, message)


def _must_run_here(name: str, traits: Traits) -> None:
    reasons = []
    if "cpu" not in traits.kinds and traits.library not in emulated():
        reasons.append(f"it runs on {', '.join(sorted(traits.kinds))}; certification runs on a CPU")
    if traits.library and traits.library not in installed() | emulated():
        reasons.append(f"{traits.library} is not installed: {traits.extra or f'pip install {traits.library}'}")
    if reasons:
        raise UnsupportedError(f"{name} cannot be certified here", reasons)


def _as_test(check: Check) -> Callable[[object], None]:
    def test(self: object) -> None:
        if not check.run():
            raise SkipTest("no case applies")

    test.__doc__ = check.name
    return test


def _identifier(words: Iterable[str]) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in words)
