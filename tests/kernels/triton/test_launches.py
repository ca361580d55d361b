"""The launches themselves, as a GPU would get them: every call of every chain is bound to its kernel's arguments and
compiled for sm_90, at the sizes of DeepSeek-V3. Only the driver is missing, and nothing runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_mk.kernels.triton.tile import SHARED_MEMORY, Tile
from tests.kernels.triton.no_driver import (
    FP8,
    HIDDEN,
    INNER,
    ROWS,
    SLOTS,
    NoDriver,
    count_multiprocessors,
    empty_experts,
    rows_through,
)
from tests.support.tiers import quick_where

pytestmark = pytest.mark.sm90


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Any]]:
    """Names, shared memory and clamps of the kernels that were launched."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    seen: list[tuple[str, int, Any]] = []

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            built = kernel.run(*given, grid=grid, warmup=True, **options)
            assert built.metadata.launch_pdl and "griddepcontrol.wait" in built.asm["ptx"], "a link of the chain"
            seen.append((kernel.fn.__name__, built.metadata.shared, options.get("LIMIT")))

        return launch

    count_multiprocessors(monkeypatch)
    monkeypatch.setattr(JITFunction, "__getitem__", compile_only)
    monkeypatch.setattr(driver, "_active", NoDriver())
    return seen


def names(launches: list[tuple[str, int, Any]]) -> list[str]:
    assert all(shared < SHARED_MEMORY for _, shared, _ in launches)
    return [name for name, _, _ in launches]


GEMMS = {
    Tile(16, True, 4, 5): ["_w13", "_w2"],
    Tile(8, True, 4, 6, "gluon"): ["_by_hand", "_by_hand"],
    Tile(64, False, 4, 5, "gluon"): ["_by_hand", "_by_hand"],
    Tile(128, False, 4, 4, "gluon"): ["_by_hand", "_by_hand"],
}


@pytest.mark.parametrize(
    "tile", quick_where(lambda tile: tile.rows == 16, GEMMS), ids=lambda tile: f"{tile.engine}-{tile.rows}"
)
def test_rows_in_bf16_take_four_launches_and_one_expert_a_row_needs_no_sum(
    tile: Tile, launches: list[tuple[str, int, Any]]
) -> None:
    y = rows_through(empty_experts(), tile)
    assert y.shape == (ROWS, HIDDEN) and y.dtype == torch.bfloat16
    assert names(launches) == (seen := ["_prologue", *GEMMS[tile], "_combine"])
    out = torch.empty((ROWS, HIDDEN), dtype=torch.bfloat16)
    assert rows_through(empty_experts(), tile, top_k=1, out=out) is out
    assert names(launches) == [*seen, "_prologue", *GEMMS[tile]]


@pytest.mark.slow
def test_outputs_that_the_second_product_does_not_write_are_summed(launches: list[tuple[str, int, Any]]) -> None:
    """Of another dtype, with a pitch, or of the routed and the shared expert of a row."""
    tile, pitched = Tile(16, True, 4, 5), torch.empty((ROWS, HIDDEN + 16), dtype=torch.bfloat16)[:, :HIDDEN]
    for more in ({"out": torch.empty((ROWS, HIDDEN))}, {"out": pitched}, {"fuse_shared": True}):
        rows_through(empty_experts(), tile, top_k=1, **more)
    assert names(launches) == 3 * ["_prologue", *GEMMS[tile], "_combine"]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [*GEMMS][::3], ids=lambda tile: f"{tile.engine}-{tile.rows}")
def test_blocks_that_came_in_fp8_with_scales_of_one_byte(tile: Tile, launches: list[tuple[str, int, Any]]) -> None:
    from moe_mk.kernels.triton.experts import experts_batched

    x = torch.empty((SLOTS, 9, HIDDEN), dtype=FP8)
    scales = torch.empty((SLOTS, 9, HIDDEN // 128), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    counts = torch.zeros(SLOTS, dtype=torch.int64)
    assert experts_batched((x, scales), counts, empty_experts(), tile, torch.empty).shape == x.shape
    assert names(launches) == ["_tile_map", *GEMMS[tile]]


@pytest.mark.slow
def test_what_the_kernels_by_hand_do_not_compute_goes_to_their_twins(launches: list[tuple[str, int, Any]]) -> None:
    from moe_mk.kernels.triton.experts import experts_grouped

    x, counts = torch.empty((ROWS, HIDDEN), dtype=torch.bfloat16), torch.zeros(SLOTS, dtype=torch.int64)
    experts_grouped((x, None), counts, empty_experts("plain"), Tile(16, True, 4, 3, "gluon"), torch.empty)
    assert names(launches) == ["_tile_map", "_w13", "_w2"]


@pytest.mark.slow
def test_clamps_are_passed_to_the_kernels_by_hand_and_biases_go_to_their_twins(
    launches: list[tuple[str, int, Any]],
) -> None:
    from moe_mk.kernels.triton.experts import experts_grouped

    x, counts = torch.empty((ROWS, HIDDEN), dtype=torch.bfloat16), torch.zeros(SLOTS, dtype=torch.int64)
    clamped, tile = {"activation": "swiglu_limit", "limit": 7.0}, Tile(8, True, 4, 6, "gluon")
    experts_grouped((x, None), counts, empty_experts(**clamped), tile, torch.empty)
    assert [(name, limit) for name, _, limit in launches[-2:]] == [("_by_hand", 7.0), ("_by_hand", 0.0)]
    biases = {"b13": torch.empty((SLOTS, 2 * INNER)), "b2": torch.empty((SLOTS, HIDDEN))}
    experts_grouped((x, None), counts, empty_experts(**clamped, **biases), Tile(32, True, 4, 4, "gluon"), torch.empty)
    assert [(name, limit) for name, _, limit in launches[-2:]] == [("_w13", 7.0), ("_w2", None)]


def test_many_assignments_are_sorted_in_four_launches(launches: list[tuple[str, int, Any]]) -> None:
    from moe_mk.kernels.triton.align import align

    align(torch.zeros((4096, 8), dtype=torch.int32), 256, 128)
    assert names(launches) == ["_count", "_prefix_over_chunks", "_prefix_over_slots", "_place"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["w_fp8", "w_nvfp4", "int8", "mxfp4"])
def test_weights_of_every_type_take_the_same_way(format: str, launches: list[tuple[str, int, Any]]) -> None:
    assert rows_through(empty_experts(format), Tile(16, True, 4, 5)).shape == (ROWS, HIDDEN)
    rounded = ["_quantize_tokens"] if format == "int8" else []
    first = "_prologue" if format == "mxfp4" else "_align_small"  # one launch aligns and quantises
    assert names(launches) == [first, *rounded, "_w13", *rounded, "_w2", "_combine"]


def test_shared_experts_cost_no_launch(launches: list[tuple[str, int, Any]]) -> None:
    rows_through(empty_experts(), Tile(8, True, 4, 6, "gluon"), fuse_shared=True)
    assert names(launches) == ["_prologue", "_by_hand", "_by_hand", "_combine"]


@pytest.mark.slow
def test_fp8_rows_at_an_odd_pitch_are_copied_for_the_asynchronous_loads(launches: list[tuple[str, int, Any]]) -> None:
    """Rows that start at no multiple of 16 bytes cannot be gathered by cp.async, nor read as boxes."""
    x, scales = torch.empty((ROWS, HIDDEN + 8), dtype=FP8)[:, :HIDDEN], torch.empty((ROWS, HIDDEN // 128))
    assert rows_through(empty_experts(), Tile(8, True, 4, 6, "gluon"), x, scales).shape == (ROWS, HIDDEN)
    assert names(launches) == ["_align_small", "_by_hand", "_by_hand", "_combine"]


@pytest.mark.parametrize("pitch,start", [(HIDDEN, 0), (HIDDEN + 16, 32), (HIDDEN + 8, 0), (HIDDEN + 16, 8)])
def test_rows_are_copied_only_where_they_are_not_aligned(pitch: int, start: int) -> None:
    from moe_mk.kernels.triton.experts import _contiguous

    x = torch.arange(3 * pitch + start, dtype=torch.int32).to(torch.uint8)[start:].view(3, pitch)[:, :HIDDEN]
    aligned = pitch % 16 == start % 16 == 0
    assert torch.equal(_contiguous(x), x) and (_contiguous(x) is x) == aligned
    assert _contiguous(x).stride(0) % 16 == _contiguous(x).storage_offset() % 16 == 0


def test_the_driver_is_asked_once_for_the_multiprocessors_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    from moe_mk.kernels.triton import launch

    asked: list[int] = []

    class Utils:
        def get_device_properties(self, index: int) -> dict[str, int]:
            asked.append(index)
            return {"multiprocessor_count": 132 - index}

    class Driver(NoDriver):
        utils = Utils()

    monkeypatch.setattr(driver, "_active", Driver())
    launch._multiprocessors.cache_clear()
    found = [launch.resident_programs(torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    launch._multiprocessors.cache_clear()
    assert (found, asked) == ([132, 131, 132, 131], [0, 1])
