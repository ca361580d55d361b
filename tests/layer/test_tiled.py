"""Tiles by configuration: the same layer, tile by tile."""

from collections.abc import Iterator
from threading import Event
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import CommError, ConfigError, UnsupportedError
from moe_mk.flight import interleave
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.runner.tiled_kernel import TiledKernel, tiled
from moe_mk.trace.recorder import Recorder
from tests.support.layers import HIDDEN, config, layer

TILES = 3


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn((11, HIDDEN), generator=torch.Generator().manual_seed(3))


def layers(ep: int, **settings: object) -> list[MoELayer]:
    asked = {"num_shared_experts": 1, "experts": "reference", **settings}
    return [layer(8, 2, groups, **asked) for groups in virtual_groups(ep)]


@pytest.mark.row(42)
def test_micro_batches_of_tiles_take_turns_too(x_TH: Tensor) -> None:
    whole = interleave([one.steps(x_TH) for one in layers(2)])
    made = layers(2, tiles=2)
    parts = interleave([one.steps(part) for one in made for part in x_TH.split([4, 7])])
    torch.testing.assert_close([torch.cat(parts[:2]), torch.cat(parts[2:])], whole, atol=1e-6, rtol=1e-6)


@pytest.mark.row(42)
def test_shared_experts_run_while_the_first_tile_is_on_its_way(x_TH: Tensor) -> None:
    made = layers(2, tiles=TILES, experts="torch_cpu")
    recorder = made[0].spans.recorder = Recorder()
    interleave([one.steps(x_TH) for one in made])
    spans = sorted(recorder.spans, key=lambda span: span.start)
    stages = [span.stage for span in spans if span.stage in ("dispatch", "shared", "experts", "combine")]
    assert stages[:2] == ["dispatch", "shared"] and stages.count("dispatch") == stages.count("combine") == TILES


def test_a_decision_states_that_there_are_tiles_and_who_carries_them() -> None:
    stated = {who: str(layer(8, 2, tiles=4, tile_carrier=who).explain()) for who in ("turns", "thread")}
    assert "4 tiles per call, sent by the calling thread, alternating with the experts" in stated["turns"]
    assert "4 tiles per call, sent by a separate thread" in stated["thread"]
    assert "tiles a call" not in str(layer(8, 2).explain())


def test_tiles_outlive_another_placement(x_TH: Tensor) -> None:
    (one,) = layers(1, tiles=TILES)
    before = one(x_TH)
    one.live.set_placement(ExpertMap.from_physical([7, 6, 5, 4, 3, 2, 1, 0], 1, 8))
    assert isinstance(one.kernel, TiledKernel) and one.kernel.tiles == TILES
    torch.testing.assert_close(one(x_TH), before, atol=1e-6, rtol=1e-6)


def test_the_report_counts_each_tile(x_TH: Tensor) -> None:
    (one,) = layers(1, tiles=TILES)
    one(x_TH)
    calls = {stage: entry.calls for (stage, _), entry in one.spans.ledger.entries.items()}
    moved = {stage: entry.num_bytes for (stage, _), entry in one.spans.ledger.entries.items()}
    assert calls["dispatch"] == calls["combine"] == TILES and moved["dispatch"] == x_TH.nbytes


@pytest.mark.row(42)
def test_ranks_that_disagree_about_tiles_are_reported(x_TH: Tensor) -> None:
    groups = virtual_groups(2)
    made = [layer(8, 2, groups[rank], tiles=2 + rank) for rank in range(2)]
    with pytest.raises(CommError, match=r"(?s)tiles:.*2 by turns.*3 by turns"):
        interleave([one.steps(x_TH) for one in made])


def test_ranks_of_one_thread_cannot_have_a_carrying_thread() -> None:
    with pytest.raises(ConfigError, match=r"tile_carrier = thread needs ranks that can wait.*Lockstep.*use .* = turns"):
        layer(8, 2, virtual_groups(2)[0], tiles=2, tile_carrier="thread")


@pytest.fixture
def sent() -> Iterator[Event]:
    event = Event()
    yield event
    event.set()


def test_a_tile_that_is_not_sent_is_waited_for_as_long_as_the_layer_states(x_TH: Tensor, sent: Event) -> None:
    (one,) = layers(1, tiles=2, tile_carrier="thread", timeout_s=0.01)
    late = mock.patch.object(type(one.kernel.prepare_finalize), "prepare", side_effect=lambda *_: sent.wait(5.0))
    with late, pytest.raises(CommError, match=r"waited 0\.\d+ s for another worker \[kernel.timeout_s a step\]"):
        one(x_TH)
    assert not sent.is_set()


def test_a_carrying_thread_cannot_be_captured() -> None:
    kernel = layer(8, 2).kernel
    with pytest.raises(ConfigError, match=r"tile_carrier = thread cannot be captured.*use kernel.tile_carrier = turns"):
        tiled(kernel, KernelConfig(tiles=2, tile_carrier="thread", graphs=True))
    assert isinstance(tiled(kernel, KernelConfig(tiles=2, graphs=True)), TiledKernel)


def test_a_kernel_that_is_one_piece_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"monolithic kernel cannot be split into 2 tiles \[kernel.tiles = 1\]"):
        layer(8, 2, tiles=2, prepare_finalize="inside")
    with pytest.raises(ConfigError, match=r"tiles"):
        config(8, 2, tiles=0)
