"""Mapped files whose pages cannot be read: code that touches one ends in SIGSEGV, as it would in SIGBUS if it was cut.

As a plugin, for the tests of any file that read nothing by themselves:

    python -m pytest -p tests.support.unreadable_mappings tests/layer/test_twin.py
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from moe_mk.weights.safetensors_header import FileState
from moe_mk.weights.source import MappedFile

PROT_NONE = 0
_opened = MappedFile.__init__


def unreadable(self: MappedFile, path: Path, state: FileState) -> None:
    """Open a file, and take away all access to its pages."""
    _opened(self, path, state)
    start, size = ctypes.c_void_p(self._octets.data_ptr()), ctypes.c_size_t(state.num_bytes)
    assert ctypes.CDLL(None).mprotect(start, size, PROT_NONE) == 0


@contextmanager
def unreadable_mappings() -> Iterator[None]:
    """For files that are opened in this context."""
    MappedFile._open.clear()
    with mock.patch.object(MappedFile, "__init__", unreadable):
        yield
    MappedFile._open.clear()


@pytest.fixture(autouse=True, scope="session")
def no_page_is_touched() -> Iterator[None]:
    """Of the plugin."""
    with unreadable_mappings():
        yield
