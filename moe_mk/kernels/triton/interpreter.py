"""What the interpreter of Triton 3.6 needs to run beside NumPy 2.4; imported by nothing unless it is in use.

NOTE: it turns a scalar into a Python integer with int(array of one element), which NumPy 2.4 refuses. `.item()`
does not care. Without this no loop can run to a bound that is an argument.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def let_scalars_be_loop_bounds() -> None:
    """Let the interpreter read a one-element array as an integer. Calling it twice changes nothing more."""
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "reads_items", False):
        return

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch_lang_tensor.reads_items = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch_lang_tensor
