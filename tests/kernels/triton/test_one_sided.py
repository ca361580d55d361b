"""One-sided kernels: what the compiler makes of them for sm_90."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kernels.triton.sm90 import Compiled

pytestmark = [pytest.mark.sm90, pytest.mark.slow]


def built(name: str, given: dict[str, str], constants: dict[str, Any]) -> Compiled:
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_mk.kernels.triton import one_sided
    from tests.kernels.triton.sm90 import compile_for_hopper

    kernel = getattr(one_sided, name)
    rest = [argument for argument in kernel.arg_names if argument not in constants]
    types = {name: "*i64" if name in ("bases_ptr", "call_ptr", "counts_ptr") else "*i32" for name in rest}
    types |= {name: "i32" for name in rest if not name.endswith("_ptr")} | given
    aligned = [name for name in ("width", "sum_bytes", "sums_at", "rows_at") if name in rest]
    return compile_for_hopper(kernel, types, constants, aligned=aligned, num_warps=4)


def test_rows_are_stored_sixteen_bytes_at_a_time_and_published_with_release() -> None:
    made = built("_send_rows", {}, {"ROW_WORDS": 3584, "WORDS": 1024, "FLAG": 128})
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", made.ptx) and not re.search(r"st\.global\.b(8|16)\b", made.ptx)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", made.ptx)
    assert re.search(r"atom\.global\.sys\.release\.exch\.b64|atom\.release\.sys\.global\.exch\.b64", made.ptx)
    assert re.search(r"atom\.global\.gpu\.acq_rel\.add|atom\.acq_rel\.gpu\.global\.add", made.ptx)
    assert made.instructions["STG"] and made.instructions["MEMBAR"] and not made.spills and not made.scratch


@pytest.mark.parametrize("name,given", [("_show", {}), ("_await_flags", {"counts_ptr": "*i32"})])
def test_flags_are_ordered_at_system_scope(name: str, given: dict[str, str]) -> None:
    made = built(name, given, {"FLAG": 128})
    if name == "_show":
        assert re.search(r"atom\.global\.sys\.release\.exch\.b64|atom\.release\.sys\.global\.exch\.b64", made.ptx)
    else:
        assert re.search(r"ld\.global\.sys\.acquire\.b64|ld\.acquire\.sys\.global\.b64", made.ptx), "a load, no more"
        assert "bra" in made.ptx.lower()
    assert not made.spills and not made.scratch


def test_sums_are_loaded_sixteen_bytes_at_a_time() -> None:
    made = built("_pull_sums", {"out_ptr": "*bf16"}, {"RANKS": 8, "COLUMNS": 1024})
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", made.ptx)) >= 8, "one a rank"
    assert not made.spills and not made.scratch
