"""Backends from outside of this package: which of them `auto` may select.

What another wheel or the program registers is selected where the configuration names it, in `kernel.trust` or as a pin.
Otherwise an experts backend is selected on a CPU if `kernel.tuned_dir` has its certificate for this machine
(`moe-mk certify`) and its time for this layer (`moe-mk tune`); what it states of its speed does not count, and none of
its code is called before. A certificate holds for one version of the backend and of this package, and one processor:

    <tuned_dir>/<processor>/<backend>/certificate.json
    <tuned_dir>/<processor>/<backend>/<case>.json
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from moe_mk.config.problem import Problem, Reason
from moe_mk.config.shipped import config_folder
from moe_mk.config.tuned import MALFORMED, WEIGHTS, Case, Tuned, tune_command, tuned_path
from moe_mk.errors import ConfigError, unless_signalled
from moe_mk.experts.base import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.external.device import processor
from moe_mk.files import read_json
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import OWN, Registry

CONTRACT = 4
"""Of backends: incremented when a conforming one could become non-conforming."""
REGISTRIES: tuple[tuple[Registry[Any], str], ...] = (
    (PREPARE_FINALIZE, "kernel.prepare_finalize"),
    (EXPERTS, "kernel.experts"),
    (MONOLITHIC, "kernel.experts"),
)
"""The registries of backends, and the setting that pins one."""


_distributions = cache(packages_distributions)
"""Wheels by the packages that they install; it reads the list of files of every wheel."""


@dataclass(frozen=True)
class Identity:
    """Identity for which a certificate holds: the code of a backend, this package, and the processor."""

    name: str
    distribution: str
    """Name and version of the wheel that the module of the class is from; empty: of none."""
    code: str
    """SHA-256 of the files of the class and of its base classes from outside of this package."""
    moe_mk: str
    contract: int
    processor: str

    @classmethod
    def of(cls, name: str, backend: type) -> Identity:
        """The identity of a backend here. Raises ConfigError for a class that is not from a file."""
        modules = dict.fromkeys(base.__module__ for base in backend.__mro__)
        code = hashlib.sha256()
        for module in modules:
            if (package := module.partition(".")[0]) in (OWN, *sys.stdlib_module_names) and package != "__main__":
                continue
            file = getattr(sys.modules.get(module), "__file__", None)
            if file is None:
                raise ConfigError(f"{backend.__qualname__} is of module {module}, which is no file")
            code.update(Path(file).read_bytes())
        wheels = sorted(set(_distributions().get(backend.__module__.partition(".")[0], ())))
        stated = ", ".join(f"{wheel} {version(wheel)}" for wheel in wheels)
        return cls(name, stated, code.hexdigest(), _own_version(), CONTRACT, processor())


def _own_version() -> str:
    try:
        return version("moe-mk")
    except PackageNotFoundError:  # sources on the path
        return "source"


def certificate_path(name: str, folder: Path | None) -> Path:
    """Where the certificate of a backend for this machine is. folder: as `kernel.tuned_dir`."""
    return tuned_path(processor(), name, "certificate", folder)


def is_named(registry: Registry[Any], name: str, problem: Problem) -> bool:
    """Whether an entry is of this package, or named by the configuration: by its name, or by that of its wheel."""
    kernel = problem.config.kernel
    pins = [getattr(kernel, pin.removeprefix("kernel.")) for each, pin in REGISTRIES if each is registry]
    if not registry.is_foreign(name) or name in (*kernel.trust, *pins):
        return True
    return bool(wheel := registry.distribution(name)) and wheel in kernel.trust


def reason_against(
    registry: Registry[Any], name: str, problem: Problem, compute: QuantScheme | None = None
) -> Reason | None:
    """Why `auto` does not select an entry from outside of this package; None: it may.

    compute: the scheme in which experts compute; None: their time is not looked up.
    """
    if is_named(registry, name, problem):
        return None
    against, commands = _not_proven(registry, name, problem, compute)
    if not against:
        return None
    pins = [f"{pin} = {name}" for each, pin in REGISTRIES if each is registry]
    ways = [f"kernel.trust = [{name}]", *pins, *commands]
    text = f"is not of this package but of {registry.origin(name)}, and {against}"
    return Reason("trust", text, " or ".join(ways))


def reasons_of(registry: Registry[Any], name: str, problem: Problem) -> list[Reason]:
    """All reasons against a backend; the code of one that `auto` does not select is not called."""
    if reason := reason_against(registry, name, problem):
        return [reason]
    if not registry.is_foreign(name):
        return list(registry[name].reasons_against(problem))
    try:
        return list(registry[name].reasons_against(problem))
    except unless_signalled(Exception) as problem_of_it:
        return [failed("reasons_against", problem_of_it)]


def failed(what: str, error: Exception) -> Reason:
    """The reason against a backend from outside of this package that raises."""
    return Reason("plugin", f"its {what} raised {type(error).__name__}: {error}")


def measured_us(name: str, problem: Problem, compute: QuantScheme) -> float | None:
    """Microseconds that `moe-mk tune` has measured of a backend from outside of this package; None: not this layer.

    Raises ConfigError for a damaged file.
    """
    hidden, weights = problem.config.model.hidden_size, problem.weights.name
    case = Case(hidden, problem.intermediate, problem.slots, weights, compute.name)
    folder = certificate_path(name, problem.config.kernel.tuned_dir).parent
    points = Tuned[dict[str, Any]].load(folder, case, dict, ((math.inf, {}),), f"moe-mk tune {name}")
    return points.microseconds(problem.rows_an_expert)


def _not_proven(
    registry: Registry[Any], name: str, problem: Problem, compute: QuantScheme | None
) -> tuple[str, list[str]]:
    """Missing parts of certificate and time, and the commands that make them."""
    if registry is not EXPERTS:
        return "the configuration does not name it", []
    if problem.device.kind != "cpu":
        return f"is neither certified nor timed on {problem.device.name}", []
    folder = problem.config.kernel.tuned_dir or config_folder() / "tuned"
    missing, commands, stated = [], list[str](), f" --tuned-dir {folder}"
    if against := _not_certified(name, folder):
        missing.append(against)
        commands.append(f"moe-mk certify {name}{stated}")
    if compute is not None:
        try:
            timed = measured_us(name, problem, compute) is not None
            against = "" if timed else f"has no measured time of this layer at {problem.num_tokens} tokens"
        except ConfigError as damaged:
            timed, against = False, str(damaged)
        if not timed:
            missing.append(against)
            commands += [f"{each} --tokens {problem.num_tokens}{stated}" for each in _tuning(name, problem, compute)]
    return " and ".join(missing), [" and ".join(commands)] if commands else []


def _tuning(name: str, problem: Problem, compute: QuantScheme) -> list[str]:
    """The command that times a layer; none for formats that it does not have."""
    model, top_k = problem.config.model, problem.config.router.top_k
    stored = isinstance(problem.weights, Plain) or problem.weights in WEIGHTS.values()
    shape = model.hidden_size, problem.intermediate, problem.slots, top_k
    dtype = str(problem.dtype.dtype).removeprefix("torch.")
    return [f"{tune_command(name, shape, problem.weights, compute)} --dtype {dtype}"] if stored else []


def _not_certified(name: str, folder: Path | None) -> str:
    """Problems with the certificate of experts for this machine; empty: it holds."""
    path = certificate_path(name, folder)
    try:
        held = read_json(path)
        whose, complete = dict(held["identity"]), held["passed"] is True and held["quick"] is False
        now = asdict(Identity.of(name, EXPERTS[name]))
    except FileNotFoundError:
        return f"has no certificate for this machine ({path})"
    except (*MALFORMED, ConfigError) as problem:
        return f"has no certificate that holds ({path}: {type(problem).__name__}: {problem})"
    if not complete:
        return f"was refused, or certified with --quick alone ({path})"
    changed = [
        f"{key} {whose.get(key)!r} there, {value!r} here" for key, value in now.items() if whose.get(key) != value
    ]
    return f"has the certificate of another version or machine ({path}: {'; '.join(changed)})" if changed else ""
