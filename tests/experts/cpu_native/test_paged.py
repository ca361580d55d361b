"""Experts larger than memory have the bits of resident ones, whatever is resident and whatever arrives first."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from moe_mk import ConfigError, DeepseekV3MoE
from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import StoreError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.cpu_native.paged import Cache, PagedExperts, records
from moe_mk.experts.residency import POLICIES
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.permute import permute
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_store import ExpertStore
from tests.experts.cpu_native.test_experts import weights as with_biases
from tests.layer.interrupted_ranks import Interrupts
from tests.layer.native import built, written

pytestmark = [
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
    )
]
SLOTS, SIZE = 6, 256
CPU = torch.device("cpu")


def pair(weights: object, folder: Path, slots: int, policy: str = "decayed", **more: int) -> tuple[object, ...]:
    """Resident and paged experts with their weights."""
    sizes = {"num_slots": SLOTS, "hidden_size": SIZE, "intermediate_size": SIZE} | more
    residency = ResidencyConfig(slots=slots, store=folder, policy=policy)
    resident, paged = (
        EXPERTS["cpu_native"](ExpertsContext(BF16, BF16, "silu", device=CPU, residency=each, **sizes))  # type: ignore[arg-type]
        for each in (None, residency)
    )
    return resident, resident.relayout(weights), paged, paged.relayout(weights)  # type: ignore[arg-type]


def in_any_order(draw: Random) -> object:
    """Experts arrive one or some at a time, in a drawn order."""

    def arrived(self: Cache, reading: dict[int, object]) -> list[int]:
        wait([part for each in reading.values() for part in each.parts])  # type: ignore[attr-defined]
        found = sorted(draw.sample(sorted(reading), draw.randint(1, len(reading))))
        for expert in found:
            reading[expert].check()  # type: ignore[attr-defined]
            self.slot_of[expert] = reading.pop(expert).slot  # type: ignore[attr-defined]
        return found

    return arrived


@pytest.mark.row(172)
@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "fp8_channel", "int8_block", "mxfp4", "nvfp4", "int4_g32_zp"])
def test_any_calls_have_the_bits_of_resident_experts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Random(kind)
    monkeypatch.setattr(Cache, "_arrived", in_any_order(draw))
    given = random_experts(scheme_of_kind(kind, (128, 128)), SLOTS, SIZE, SIZE, CPU)
    for slots in (1, 2, 4, SLOTS):
        resident, held, paged, some = pair(given, tmp_path, slots, draw.choice(list(POLICIES)))
        assert isinstance(some, PagedExperts) and some.num_bytes == slots * some.cache.layout.num_bytes
        for _ in range(4):
            rows, top_k = draw.choice((0, 1, 2, 7, 40)), draw.randint(1, 4)
            g = torch.Generator().manual_seed(draw.randrange(1000))
            x = QuantTensor(torch.randn(rows, SIZE, generator=g).bfloat16(), None, BF16)
            ids = torch.stack([torch.randperm(SLOTS, generator=g)[:top_k] for _ in range(max(rows, 1))])[:rows]
            ids = torch.where(torch.rand(rows, top_k, generator=g) < 0.2, -1, ids).to(torch.int32)
            tokens = RowTokens(x, ids, torch.randn(rows, top_k, generator=g), SLOTS)
            wide = [replace(tokens, out_RH=torch.empty(rows, SIZE)) for _ in range(2)]  # f32 shows the order of a sum
            assert torch.equal(paged.run(wide[0], some).y, resident.run(wide[1], held).y)
            for layout in (RowTokens, GroupedTokens, BatchedTokens):
                local = permute(tokens, (layout,))
                assert torch.equal(paged.run(local, some).y, resident.run(local, held).y), (slots, layout)
        assert some.cache.reads == some.cache.uses - some.cache.hits
        assert torch.equal(some.slot(3).down_HI.values, given.slot(3).down_HI.values)
    assert len(list(tmp_path.iterdir())) == 1  # written once, used by all


@pytest.mark.row(172)
def test_biases_are_in_the_records(tmp_path: Path) -> None:
    sizes = {"num_slots": 3, "hidden_size": 96, "intermediate_size": 64}
    resident, held, paged, some = pair(with_biases(biases=True), tmp_path, 2, **sizes)
    g = torch.Generator().manual_seed(2)
    x, ids = torch.randn(9, 96, generator=g).bfloat16(), torch.randint(3, (9, 1), generator=g, dtype=torch.int32)
    tokens = RowTokens(QuantTensor(x, None, BF16), ids, torch.rand(9, 1, generator=g), 3)
    assert torch.equal(paged.run(tokens, some).y, resident.run(tokens, held).y)


@pytest.mark.row(172)
def test_shared_experts_are_added_last(tmp_path: Path) -> None:
    given, own = (random_experts(BF16, count, SIZE, SIZE, CPU, seed=count) for count in (SLOTS, 1))
    resident, held, paged, some = pair(given, tmp_path, 2)
    g = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(SLOTS, generator=g)[:3] for _ in range(9)]).to(torch.int32)
    x = QuantTensor(torch.randn(9, SIZE, generator=g).bfloat16(), None, BF16)
    tokens = RowTokens(x, ids, torch.rand(9, 3, generator=g), SLOTS)
    outputs = []
    for experts, routed in ((resident, held), (paged, some)):
        fused = experts.fuse_shared_experts(routed, resident.relayout(own))
        outputs.append(experts.run(replace(tokens, out_RH=torch.empty(9, SIZE)), fused).y)
    assert torch.equal(*outputs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("paged"))


@pytest.mark.row(172)
def test_a_layer_with_shared_experts_has_the_same_bits_and_states_its_memory(checkpoint: Path, tmp_path: Path) -> None:
    x_TH = torch.randn(24, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    resident, paged = built(checkpoint), built(checkpoint, residency={"slots": 3, "store": str(tmp_path)})
    for tokens in (24, 1, 0, 5):
        assert torch.equal(paged(x_TH[:tokens]), resident(x_TH[:tokens]))
    assert "3 of 16 experts in memory, decayed" in paged.explain().parameters
    assert paged.memory_report().experts == paged.state.laid_out.num_bytes < resident.memory_report().experts / 5
    assert paged.release_weights() and torch.equal(paged(x_TH), resident(x_TH))
    with pytest.raises(UnsupportedError, match="keeps all experts in memory"):
        built(checkpoint, experts="torch_cpu", residency={"slots": 3, "store": str(tmp_path)})


@pytest.mark.row(172)
def test_ranks_have_stores_of_their_own_experts_and_the_same_bits(checkpoint: Path, tmp_path: Path) -> None:
    batches = [torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).bfloat16() for count in (7, 3)]
    outputs = []
    for more in ({}, {"residency": {"slots": 2, "store": str(tmp_path)}}):
        config = built(checkpoint, **more).config
        ranks = [DeepseekV3MoE(config, groups=g).load_from_safetensors(checkpoint, 3) for g in virtual_groups(2, 1)]
        outputs.append(run_together(ranks, batches))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert len(list(tmp_path.iterdir())) == 3  # of all experts, and of each rank's


@pytest.mark.row(172)
def test_stores_of_passing_placements_take_no_room_once_they_are_replaced(checkpoint: Path, tmp_path: Path) -> None:
    x_TH = torch.randn(9, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    layer = built(checkpoint, residency={"slots": 3, "store": str(tmp_path)})
    expected, first = layer(x_TH), layer.expert_map
    (kept,) = tmp_path.iterdir()
    written_at = kept.stat().st_mtime_ns
    order = list(range(16))
    for seed in range(3):
        Random(seed).shuffle(order)
        layer.live.set_placement(ExpertMap.from_physical(order, 1, 16))
        assert torch.equal(layer(x_TH), expected)
        assert list(tmp_path.iterdir()) == [kept]
    layer.live.set_placement(first)
    assert layer.state.laid_out.cache.store.path == kept and kept.stat().st_mtime_ns == written_at
    assert torch.equal(layer(x_TH), expected)


@pytest.mark.row(172)
def test_once_all_experts_are_in_memory_a_call_reads_nothing_and_is_that_of_a_resident_layer(tmp_path: Path) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, SLOTS)
    g = torch.Generator().manual_seed(8)
    x = QuantTensor(torch.randn(7, SIZE, generator=g).bfloat16(), None, BF16)
    for top_k in (2, SLOTS, 3):
        ids = torch.stack([torch.randperm(SLOTS, generator=g)[:top_k] for _ in range(7)]).to(torch.int32)
        tokens = RowTokens(x, ids, torch.rand(7, top_k, generator=g), SLOTS)
        outputs = [
            each.run(replace(tokens, out_RH=torch.empty(7, SIZE)), weights).y
            for each, weights in ((resident, held), (paged, some))
        ]
        assert torch.equal(*outputs)
    assert some.cache.is_whole and some.cache.slot_of == {expert: expert for expert in range(SLOTS)}
    assert some.cache.reads == SLOTS == some.cache.uses - some.cache.hits and len(some.whole) == 1


@pytest.mark.row(172)
def test_a_record_that_cannot_be_read_is_never_multiplied(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TH = torch.randn(24, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer = built(checkpoint, residency={"bytes": 800_000, "store": str(tmp_path)})
    expected, read = built(checkpoint)(x_TH), ExpertStore.read_piece
    assert torch.equal(layer(x_TH), expected)
    used, failed = layer.expert_load > 0, 0
    for bad in range(16):
        with monkeypatch.context() as patched:

            def failing(self: ExpertStore, expert: int, start: int, record: memoryview, bad: int = bad) -> None:
                if expert == bad:
                    raise StoreError(f"expert {bad} cannot be read")
                read(self, expert, start, record)

            patched.setattr(ExpertStore, "read_piece", failing)
            cache = layer.state.laid_out.cache
            if used[bad] and bad not in cache.slot_of:
                with pytest.raises(StoreError, match=f"expert {bad} cannot be read"):
                    layer(x_TH)
                assert bad not in cache.slot_of
                failed += 1
        assert torch.equal(layer(x_TH), expected)  # the slot is free, the next call reads again
    assert failed >= 4
    # A flipped bit in the file of a layer that is loaded later.
    (file,) = tmp_path.iterdir()
    whole = bytearray(file.read_bytes())
    whole[-5000] ^= 4
    file.write_bytes(whole)
    with pytest.raises(StoreError, match="damaged"):
        built(checkpoint, residency={"slots": 2, "store": str(tmp_path)})(x_TH)


def test_wrong_settings_are_refused_with_what_would_do(checkpoint: Path, tmp_path: Path) -> None:
    store = str(tmp_path)
    for given, problem in (
        ({"store": store}, "slots or bytes, neither"),
        ({"store": store, "slots": 1, "bytes": 1}, "slots or bytes, both"),
        ({"store": "relative", "slots": 1}, "no absolute path"),
        ({"store": store, "slots": 1, "policy": "lruu"}, "did you mean 'lru'"),
        ({"store": store, "bytes": 4000}, "less than one expert"),
    ):
        with pytest.raises(ConfigError, match=problem):
            built(checkpoint, residency=given)
    assert not list(tmp_path.iterdir())


def test_large_pages_are_requested_before_the_memory_of_the_slots_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, seen = resident(), list[int]()
    native = SimpleNamespace(functions={"advise_huge": lambda *_: seen.append(resident() - before)})
    held_SB = records(2, SimpleNamespace(num_bytes=32 << 20), native)  # type: ignore[arg-type]
    assert len(seen) == 2 and max(seen) < 8 << 20 and resident() - before > 60 << 20 and not held_SB.any()


def test_a_forked_child_reads_with_threads_of_its_own(tmp_path: Path) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    g = torch.Generator().manual_seed(5)
    x = QuantTensor(torch.randn(9, SIZE, generator=g).bfloat16(), None, BF16)
    tokens = RowTokens(x, torch.arange(9, dtype=torch.int32).view(9, 1) % SLOTS, torch.ones(9, 1), SLOTS)
    expected = resident.run(tokens, held).y
    assert torch.equal(paged.run(tokens, some).y, expected)
    some.cache.lock.acquire()  # as by a call of another thread, which the child does not have
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(paged.run(tokens, some).y, expected) else 1)
    some.cache.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupt_anywhere_in_a_call_loses_no_slot(tmp_path: Path) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    g = torch.Generator().manual_seed(6)
    x = QuantTensor(torch.randn(9, SIZE, generator=g).bfloat16(), None, BF16)
    tokens = RowTokens(x, torch.arange(9, dtype=torch.int32).view(9, 1) % SLOTS, torch.ones(9, 1), SLOTS)
    expected = resident.run(tokens, held).y

    def traced(interrupts: Interrupts) -> torch.Tensor:
        with interrupts.traced():
            return paged.run(tokens, some).y

    within = Cache.waves.__code__
    counted = Interrupts(within=within)
    assert torch.equal(traced(counted), expected)
    raised = 0
    for place in Random(0).sample(range(1, counted.places + 1), 40):
        try:
            traced(Interrupts(place, within))
        except KeyboardInterrupt:
            raised += 1
    assert raised > 20  # which places a call passes depends on the order of arrival
    assert torch.equal(paged.run(tokens, some).y, expected)
    assert len(some.cache._free) + len(some.cache.slot_of) == 2


def test_an_interrupt_while_the_reads_of_a_failed_call_end_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    x = QuantTensor(torch.ones(9, SIZE).bfloat16(), None, BF16)
    tokens = RowTokens(x, torch.arange(9, dtype=torch.int32).view(9, 1) % SLOTS, torch.ones(9, 1), SLOTS)
    expected, within = resident.run(tokens, held).y, Cache._end_reads.__code__

    def damaged(*_: object) -> None:
        raise StoreError("a damaged record")

    def failed(place: int | None) -> Interrupts:
        interrupts = Interrupts(place, within)
        with monkeypatch.context() as broken, interrupts.traced():
            broken.setattr(ExpertStore, "check", damaged)
            with pytest.raises((KeyboardInterrupt, StoreError)):
                paged.run(tokens, some)
        return interrupts

    places = failed(None).places
    assert places > 3
    for place in range(1, places + 1):
        assert failed(place).at
        assert torch.equal(paged.run(tokens, some).y, expected)
        assert len(some.cache._free) + len(some.cache.slot_of) == 2
