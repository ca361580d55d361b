"""Compiled kernels of the tests go to a folder of the run, never into the tree or the home of whoever runs them."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels_are_cached_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture(scope="session", autouse=True)
def the_interpreter_does_nothing_in_vain() -> Iterator[None]:
    """Skip what has no effect and takes half of the time of interpreted kernels. Triton 3.6 searches its language for
    builtins at each call of a device function, though the launch has replaced them, and computes for each sum of
    integers whether it overflows, which it reports in debug mode only."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import knobs, language
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        yield
        return
    patch, options = interpreter._patch_lang, interpreter.interpreter_builder.options
    assert not options.debug

    def patch_where_needed(fn: Any) -> Any:
        seen = [each for each in (language, language.core) if any(each is value for value in fn.__globals__.values())]
        if not seen or any(language.core.is_builtin(each.arange) for each in seen):
            return patch(fn)
        return interpreter._LangPatchScope()

    load = interpreter.interpreter_builder.create_masked_load

    def load_unknown(pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        """Without `other`, what a mask leaves out of a block is undefined on a GPU: here NaN, or a number not meant."""
        if other is None and pointers.data.size > 1:
            kind, shape = pointers.get_element_ty(), pointers.data.shape
            bits = np.full(shape, -1 if kind.is_floating() else 77).view(interpreter._get_np_dtype(kind))
            other = interpreter.TensorHandle(bits.reshape(*shape, -1)[..., 0].copy(), kind)
        return load(pointers, mask, other, *rest, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_where_needed)
        patched.setattr(interpreter.interpreter_builder, "create_masked_load", load_unknown)
        patched.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        yield
