"""Scratch memory grows to the largest run, is not asked for again, and arenas never share it."""

import gc

import pytest
import torch

from moe_mk.experts.triton.workspace import ALIGNMENT, Arena, Workspace, workspace_of

CPU = torch.device("cpu")


def run(arena: Arena, *sizes: int) -> list[torch.Tensor]:
    with arena.frame(CPU) as empty:
        return [empty((size,), dtype=torch.float32, device=CPU) for size in sizes]


@pytest.mark.row(111)
def test_the_first_run_allocates_and_later_ones_do_not() -> None:
    arena = Arena()
    # 10 and 100 floats are 40 and 400 B: 256 + 512 B once aligned.
    run(arena, 10, 100)
    assert (arena.high_water, arena.allocations) == (768, 3)
    one, two = run(arena, 10, 100)
    assert arena.allocations == 3 and two.data_ptr() - one.data_ptr() == ALIGNMENT
    run(arena, 5)
    assert (arena.high_water, arena.allocations) == (768, 3)


def test_pieces_of_one_run_do_not_overlap_and_keep_shape_and_dtype() -> None:
    arena = Arena()
    for _ in range(2):
        with arena.frame(CPU) as empty:
            a = empty((3, 5), dtype=torch.float8_e4m3fn, device=CPU)
            b = empty((2, 7), dtype=torch.int32, device=CPU)
            nothing = empty((0, 4), dtype=torch.bfloat16, device=CPU)
            b.fill_(-1)
            a.view(torch.uint8).fill_(0)
        assert a.shape == (3, 5) and b.tolist() == [[-1] * 7] * 2 and nothing.shape == (0, 4)
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0


def test_memory_that_was_outgrown_stays_where_a_captured_graph_knows_it() -> None:
    arena = Arena()
    run(arena, 64)
    (small,) = run(arena, 64)
    small.fill_(7.0)
    run(arena, 4096)
    (large,) = run(arena, 4096)
    large.fill_(1.0)
    assert arena.high_water == 4 * 4096 and small.tolist() == [7.0] * 64


@pytest.mark.row(111)
def test_layers_share_a_lane_and_micro_batches_in_flight_do_not() -> None:
    workspace = Workspace()
    assert workspace.arena(1) is workspace.arena(1) is not workspace.arena(2)
    pieces = []
    for key in (1, 2):
        run(workspace.arena(key), 100)
        pieces += run(workspace.arena(key), 100)
    pieces[0].fill_(1.0)
    pieces[1].fill_(2.0)
    assert pieces[0].unique().tolist() == [1.0] and workspace.high_water == 1024


@pytest.mark.row(111)
def test_all_layers_of_a_device_share_one_workspace_and_it_goes_with_them() -> None:
    device = torch.device("meta")
    one, other = workspace_of(device), workspace_of(torch.device("meta"))
    assert one is other is not workspace_of(CPU)
    one.arena("mark")
    del one, other
    gc.collect()
    assert "mark" not in workspace_of(device).arenas
