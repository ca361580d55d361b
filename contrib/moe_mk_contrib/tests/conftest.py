"""The rules of `tests/conftest.py` hold here too: seeds, leaked defaults, rows, marks."""

from tests.conftest import fixed_seeds, no_leaked_defaults, pytest_collection_modifyitems

__all__ = ["fixed_seeds", "no_leaked_defaults", "pytest_collection_modifyitems"]
