"""Loads are counted without a host round trip, phases apart, padding never, and smoothed over windows."""

import pytest
import torch

from moe_mk import ConfigError
from moe_mk.rebalance import LoadHistory, LoadWindow

CPU = torch.device("cpu")


def test_counters_of_layers_count_by_what_they_gained() -> None:
    window, loads = LoadWindow(2, 3, CPU), [torch.tensor([5, 0, 0]), torch.tensor([0, 0, 1])]
    window.start_from(loads)  # what was counted before does not belong to the window
    loads[0] += torch.tensor([1, 2, 0])
    window.gather(loads, "decode")
    loads[1] += 1
    window.gather(loads, "prefill")
    assert window.close().tolist() == [[[0, 0, 0], [1, 1, 1]], [[1, 2, 0], [0, 0, 0]]]
    assert window.counts_2XE.sum() == 0 and window.counts_2XE.dtype == torch.int64


def test_a_counter_that_starts_over_takes_nothing_away() -> None:
    window, load = LoadWindow(1, 2, CPU), torch.tensor([9, 9])
    window.start_from([load])
    load.zero_()
    load[0] += 4
    window.gather([load], "decode")
    assert window.counts_2XE[1, 0].tolist() == [4, 0]


def test_an_unknown_phase_and_a_decay_that_leaves_no_room_for_what_is_new_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"phase 'decoding' is unknown.*decode"):
        LoadHistory(1, 1, decay=0.0).load("decoding")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"decay=1.0 must lie in \[0, 1\)"):
        LoadHistory(1, 1, decay=1.0)


def test_smoothing_by_hand_and_an_idle_phase_keeps_its_average() -> None:
    history = LoadHistory(1, 2, decay=0.75)
    for prefill, decode in (([8, 0], [0, 0]), ([0, 8], [4, 4]), ([0, 0], [8, 0])):
        history.add(torch.tensor([[prefill], [decode]]))
    # prefill: 8 0, .75 * (8 0) + .25 * (0 8) = 6 2, nothing. decode: 4 4, then .75 * (4 4) + .25 * (8 0) = 5 3.
    assert history.load("prefill").tolist() == [[6, 2]] and history.load("decode").tolist() == [[5, 3]]
    assert history.load("all").tolist() == [[11, 5]] and history.num_windows == 3
    for phase in ("prefill", "decode", "all"):
        history.load(phase)[:] = -1  # type: ignore[arg-type]  # what a caller does with it is no load
    assert history.load("all").tolist() == [[11, 5]] and history.load("prefill").tolist() == [[6, 2]]


@pytest.mark.gpu
def test_recording_never_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    window, load = LoadWindow(1, 8, device), torch.zeros(8, dtype=torch.int64, device=device)
    window.gather([load], "decode")
    torch.cuda.set_sync_debug_mode("error")
    try:
        load += 3
        window.gather([load], "decode")
        closed = window.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert closed[1, 0].tolist() == [3] * 8
