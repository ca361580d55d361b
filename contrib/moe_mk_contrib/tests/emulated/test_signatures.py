"""The emulations have the signatures of their libraries."""

import pytest

from contrib.moe_mk_contrib.tests.emulated.signatures import PACKAGE, ROW_LIBRARIES
from tests.testing.emulated.row_library_ranks import differences


@pytest.mark.parametrize("module", ROW_LIBRARIES)
def test_signatures_are_those_of_the_libraries(module: str) -> None:
    assert differences(module, ROW_LIBRARIES, PACKAGE) == []
