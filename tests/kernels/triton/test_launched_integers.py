"""What the tests compile is what is launched: every integer of the GEMMs is as aligned as in a launch, and no more."""

from typing import Any

import pytest

from moe_mk.kernels.triton.tile import Tile
from tests.kernels.triton.no_driver import empty_experts, rows_through, watch_compiler
from tests.kernels.triton.sm90_gemms import ANY, SIXTEENTH, Integers, integers

pytestmark = pytest.mark.sm90

Launched = list[tuple[str, Integers]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The GEMMs that were launched, with what their integers are specialised to."""
    seen: Launched = []

    def compiled(kernel: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, *rest: Any) -> None:
        attributes, found = rest[0], dict[str, int | str]()
        for place, name in enumerate(kernel.arg_names):
            if signature[name] == "i32":
                found[name] = SIXTEENTH if attributes.get((place,)) else ANY
            elif name.islower() and constants.get((place,)) == 1:
                found[name] = 1
        if kernel.fn.__name__ in ("_w13", "_w2", "_by_hand"):
            seen.append((kernel.fn.__name__, found))

    watch_compiler(monkeypatch, compiled)
    return seen


@pytest.mark.parametrize("format", ["fp8", "plain", "int8", "w_fp8", "mxfp4"])
def test_triton_gemms_are_compiled_as_they_are_launched(format: str, launched: Launched) -> None:
    rows_through(empty_experts(format), Tile(16, True, 4, 5))
    assert launched == [(name, integers(name, format)) for name in ("_w13", "_w2")]
