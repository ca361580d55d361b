"""Imports at first use, and old names of what moved: they work for one release, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ORACLES = "fp8 gguf int8 int_wna16 mxfp4 mxfp8 nvfp4 unquantized"
_LEFT = (
    ("moe_mk", "moe_mk.lab", "cli plan testing tuning verify"),
    ("moe_mk.placement", "moe_mk.lab.trace", "traffic"),
    ("moe_mk.trace", "moe_mk.lab.trace",
     "chrome foreign importers routing routing_file routing_forward sparsity waits"),
    ("moe_mk.weights", "moe_mk.lab.checkpoints", "checkpoint_shape convert dialects synthesize"),
)  # fmt: skip
"""Packages that modules left and have gone to, with the names of the modules."""
MOVED = {
    **{f"{old}.{name}": f"{new}.{name}" for old, new, names in _LEFT for name in names.split()},
    **{f"moe_mk.oracle.{name}": "moe_mk.oracle.formats" for name in ORACLES.split()},
    "moe_mk.integrations.hf.tiny": "moe_mk.lab.checkpoints.tiny_models",
}
"""Old name -> new name of modules and packages; what is below a package moves with it."""
NAMES = dict.fromkeys(
    (f"moe_mk.weights.{name}" for name in ("CheckpointShape", "is_complete", "write_checkpoint")),
    "moe_mk.lab.checkpoints",
) | dict.fromkeys(
    (f"moe_mk.trace.{name}" for name in ("NearZero", "count_idle_units", "count_near_zero")),
    "moe_mk.lab.trace.sparsity",
)
"""Names that a package exported, each with the module that has it now."""


def at_first_use(package: str, homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], object]:
    """The `__getattr__` of a package (PEP 562) that imports a module when one of its names is first used.

    homes: module below the package -> its names, separated by spaces; a name that is also a module's would mean that
    module once it is imported. modules: those that are attributes themselves.
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        full = f"{package}.{name}"
        if name in modules or full in MOVED:
            return import_module(full)
        if full in NAMES:
            _warn(full, f"{NAMES[full]}.{name}")
        elif name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of.get(name) or NAMES[full]), name)
        if name in home_of:
            setattr(sys.modules[package], name, value)
        return value

    return get


class MovedModules(MetaPathFinder, Loader):
    """Imports a moved module by its old name: the same object under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for every name that did not move."""
        return ModuleSpec(fullname, self) if fullname.startswith("moe_mk.") and new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the empty one."""
        name = module.__name__
        _warn(name, new_name(name))
        sys.modules[name] = import_module(new_name(name))


def new_name(name: str) -> str:
    """The new name of a module that moved, "" for any other."""
    old = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), "")
    return MOVED[old] + name.removeprefix(old) if old else ""


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())
