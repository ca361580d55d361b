"""Thousands of replays of one graph with changing ids: what a launch reads early must be of this replay."""

from __future__ import annotations

import pytest
import torch

from moe_mk.experts.triton.tuning import BUILT_IN
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant import FP8_1x128, FP8_128x128
from tests.gpu.test_experts import CUDA, build, draw, of_tile

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60, method="thread")]
REPLAYS, ROUTINGS, SLOTS, ROWS, TOP_K, HIDDEN, INNER = 10_000, 16, 8, 8, 4, 1024, 512


TILES = [Tile(8, True, 4, 6, "gluon"), Tile(64, False, 4, 5, "gluon"), BUILT_IN[0][1]]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.engine}-{tile.rows}")
def test_every_replay_with_other_ids_gives_the_bits_of_its_own_routing(tile: Tile) -> None:
    backend = of_tile(build(FP8_1x128, SLOTS, HIDDEN, INNER), tile)
    stack = backend.relayout(random_experts(FP8_128x128, SLOTS, HIDDEN, INNER, CUDA))
    batches = [draw(ROWS, SLOTS, TOP_K, HIDDEN) for _ in range(ROUTINGS)]
    ids_XRK = torch.stack([each.ids_RK for each in batches])
    weights_XRK = torch.stack([each.weights_RK for each in batches])
    given, stream = batches[0], torch.cuda.Stream()
    expected = []
    for ids_RK, weights_RK in zip(ids_XRK, weights_XRK, strict=True):
        given.ids_RK.copy_(ids_RK)
        given.weights_RK.copy_(weights_RK)
        expected.append(backend.run(given, stack).y.clone())
    expected_XRH, wrong = torch.stack(expected), torch.zeros((), dtype=torch.int64, device=CUDA)
    with torch.cuda.stream(stream):
        backend.run(given, stack)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = backend.run(given, stack).y
    with torch.cuda.stream(stream):
        for replay in range(REPLAYS):
            routing = (replay * 7 + replay // ROUTINGS) % ROUTINGS
            given.ids_RK.copy_(ids_XRK[routing])
            given.weights_RK.copy_(weights_XRK[routing])
            graph.replay()
            wrong += (y != expected_XRH[routing]).any()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
