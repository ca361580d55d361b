"""How an adapter talks to a library of which there are several builds: by keyword, and by what its build knows.

Builds of one library differ in which arguments they know and where those stand, so that positions and version strings
say nothing; the signature does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_mk.errors import UnsupportedError


class Call:
    """A function of a library, with what its build knows of its arguments."""

    def __init__(self, function: Callable[..., Any], needs: Sequence[str]) -> None:
        """needs: arguments without which the adapter cannot use it. Raises UnsupportedError with those it lacks."""
        parameters = inspect.signature(function).parameters
        self._function = function
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._known = frozenset(parameters)
        if lacking := [name for name in needs if not self.knows(name)]:
            what = f"{getattr(function, '__qualname__', function)} of the installed build lacks arguments"
            raise UnsupportedError(what, [f"no {name!r}" for name in lacking])

    def knows(self, argument: str) -> bool:
        """Whether this build has an argument."""
        return self._takes_all or argument in self._known

    def __call__(self, needed: Mapping[str, object], options: Mapping[str, object] | None = None) -> Any:
        """Call by keyword; options that this build does not know are left out."""
        known = {name: value for name, value in (options or {}).items() if self.knows(name)}
        return self._function(**needed, **known)
