"""One oracle for each type of quantised weights, with the two functions that select and build a backend for it.

    decision = oracle.fp8.select_fp8_moe_backend(problem)  # UnsupportedError with every reason if no pair is eligible
    kernel = oracle.fp8.make_fp8_moe_kernel(decision, parts)

`oracle.fp8`, `oracle.gguf` and so on are this module. `moe_mk.quant.kinds.FORMATS` has the formats of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from moe_mk.oracle.assemble import assemble
from moe_mk.oracle.base import ORACLES, Oracle
from moe_mk.oracle.decide import decide
from moe_mk.quant.kinds import FORMATS


def declared(name: str, stored: Iterable[str]) -> type[Oracle]:
    """The oracle of some number formats, with the choices of the base class."""
    parts = {"name": name, "stored": frozenset(stored), "__module__": __name__}
    return type(f"Oracle_{name}", (Oracle,), parts)


_OF = {kind: each.oracle or kind for kind, each in FORMATS.built_in.items()}
BUILT_IN = {
    name: ORACLES.register(name)(declared(name, (kind for kind in _OF if _OF[kind] == name)))
    for name in sorted(set(_OF.values()))
}


def __getattr__(name: str) -> Any:
    """select_X_moe_backend and make_X_moe_kernel of every type X."""
    found = re.fullmatch(r"select_(\w+)_moe_backend|make_(\w+)_moe_kernel", name)
    if found and (found[1] or found[2]) in BUILT_IN:
        return partial(decide, oracle=BUILT_IN[found[1]]) if found[1] else assemble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
