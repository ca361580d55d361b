"""The old paths of modules that are now in `moe_mk.lab`; they work for one release, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    f"moe_mk.{old}": f"moe_mk.lab.{new}"
    for old, new in {
        **{room: room for room in ("cli", "plan", "testing", "tuning", "verify")},
        **{f"trace.{name}": f"trace.{name}" for name in ("chrome", "foreign", "importers", "waits")},
        **{f"weights.{name}": f"checkpoints.{name}" for name in ("checkpoint_shape", "convert", "synthesize")},
    }.items()
}
"""Old name -> new name of modules and packages; what is below a package moves with it."""
NAMES = dict.fromkeys(("CheckpointShape", "is_complete", "write_checkpoint"), "moe_mk.lab.checkpoints")
"""Names that `moe_mk.weights` exported, with their module."""


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


def moved_name(name: str) -> object:
    """A name that `moe_mk.weights` exported. Raises AttributeError for any other."""
    if name not in NAMES:
        raise AttributeError(f"module 'moe_mk.weights' has no attribute {name!r}")
    _warn(f"moe_mk.weights.{name}", f"{NAMES[name]}.{name}")
    return getattr(import_module(NAMES[name]), name)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)


if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())
