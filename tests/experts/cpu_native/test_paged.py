"""Experts larger than memory have the bits of resident ones, whatever is resident and whatever arrives first."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from moe_mk import ConfigError, DeepseekV3MoE
from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import StoreError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.cpu_native.paged import Cache, PagedExperts, RecordMemory, records
from moe_mk.experts.residency import POLICIES, ResidencyPool
from moe_mk.lab.plan.residency import Machine, Recorded, simulate
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


def pair(
    weights: object, folder: Path, slots: int | ResidencyPool, policy: str = "decayed", **more: int
) -> tuple[object, ...]:
    """Resident and paged experts with their weights."""
    sizes = {"num_slots": SLOTS, "hidden_size": SIZE, "intermediate_size": SIZE} | more
    own, pool = (slots, None) if isinstance(slots, int) else (None, slots)
    residency = ResidencyConfig(slots=own, store=folder, policy=policy)
    resident, paged = (
        EXPERTS["cpu_native"](ExpertsContext(BF16, BF16, "silu", device=CPU, residency=each, pool=pool, **sizes))  # type: ignore[arg-type]
        for each in (None, residency)
    )
    return resident, resident.relayout(weights), paged, paged.relayout(weights)  # type: ignore[arg-type]


def drawn(
    seed: int, rows: int, top_k: int, *, experts: int = SLOTS, hidden: int = SIZE, dropped: float = 0.0
) -> RowTokens:
    """Tokens with random weights, each with different experts; a part of its choices is dropped."""
    g = torch.Generator().manual_seed(seed)
    x = QuantTensor(torch.randn(rows, hidden, generator=g).bfloat16(), None, BF16)
    ids = torch.rand(rows, experts, generator=g).argsort(1)[:, :top_k]
    ids = torch.where(torch.rand(rows, top_k, generator=g) < dropped, -1, ids).to(torch.int32)
    return RowTokens(x, ids, torch.randn(rows, top_k, generator=g), experts)


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
            tokens = drawn(draw.randrange(1000), rows, top_k, dropped=0.2)
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
    tokens = drawn(2, 9, 1, experts=3, hidden=96)
    assert torch.equal(paged.run(tokens, some).y, resident.run(tokens, held).y)


@pytest.mark.row(172)
def test_shared_experts_are_added_last(tmp_path: Path) -> None:
    given, own = (random_experts(BF16, count, SIZE, SIZE, CPU, seed=count) for count in (SLOTS, 1))
    resident, held, paged, some = pair(given, tmp_path, 2)
    tokens, outputs = drawn(4, 9, 3), []
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
    for top_k in (2, SLOTS, 3):
        tokens = drawn(8, 7, top_k)
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
        ({"store": store}, "its slots, its bytes or a ResidencyPool.* 0 are given"),
        ({"store": store, "slots": 1, "bytes": 1}, "slots or bytes, both"),
        ({"store": "relative", "slots": 1}, "no absolute path"),
        ({"store": store, "slots": 1, "policy": "lruu"}, "did you mean 'lru'"),
        ({"store": store, "bytes": 4000}, "less than one expert"),
    ):
        with pytest.raises(ConfigError, match=problem):
            built(checkpoint, residency=given)
    assert not list(tmp_path.iterdir())


def test_slots_take_large_pages_before_they_are_written_and_give_them_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, seen = resident(), list[int]()
    native = SimpleNamespace(functions={"advise_huge": lambda *_: seen.append(resident() - before)})
    memory = RecordMemory(native, records(9, 32 << 20))  # type: ignore[arg-type]
    for slot in (3, 4):
        memory.add(slot)
        memory.records_SB[slot] = 1
    assert seen[0] < 8 << 20 and 24 << 20 < seen[1] < 40 << 20 and resident() - before > 60 << 20
    memory.remove(3)
    assert memory == {4} and resident() - before < 40 << 20 and memory.records_SB[4].all()


def in_a_pool(folder: Path, records: int, kinds: str) -> tuple[ResidencyPool, list[tuple[object, ...]]]:
    """Layers of some formats in a pool with memory for so many experts in bf16, and for some scales."""
    pool = ResidencyPool(records * 3 * SIZE * SIZE * 2 + (1 << 16))
    given = [random_experts(scheme_of_kind(kind, (128, 128)), SLOTS, SIZE, SIZE, CPU) for kind in kinds.split()]
    return pool, [pair(each, folder, pool) for each in given]


def test_layers_of_a_pool_have_the_same_bits_and_divide_its_memory_by_what_they_use(tmp_path: Path) -> None:
    # Two layers of one size and one of half of it. First all use 2 of 6 experts, then the others use 2, and 1 of 2.
    pool, layers = in_a_pool(tmp_path, 8, "bf16 bf16 int8_block")
    caches = [some.cache for *_, some in layers]  # type: ignore[attr-defined]
    assert [cache.share for cache in caches] == [3, 3, 4]

    def called(step: int) -> None:
        for number, (resident, held, paged, some) in enumerate(layers):
            tokens = drawn(step, 1, 1 + (number < 2), experts=2 if number and step > 9 else SLOTS)
            tokens = replace(tokens, num_slots=SLOTS)
            assert torch.equal(paged.run(tokens, some).y, resident.run(tokens, held).y)  # type: ignore[attr-defined]
            assert sum(len(slots) * size for size, slots in pool.memory.items()) <= pool.num_bytes

    for step in range(40):
        called(step)
    assert [cache.share for cache in caches] == [len(cache.slots) for cache in caches] == [5, 2, 2]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(called, range(40, 60)))
    late = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, pool)
    layers.append(late)
    called(60)
    with pytest.raises(ConfigError, match=r"less than one expert of each layer \(3 x .*give at least"):
        in_a_pool(tmp_path, 2, "bf16 bf16 bf16")


def test_layers_of_a_pool_read_what_the_simulator_predicts(tmp_path: Path) -> None:
    pool, layers = in_a_pool(tmp_path, 5, "bf16 bf16")
    steps, reads = list[list[tuple[int, ...]]](), [0]
    for step in range(160):
        steps.append([(step * step % 37 % (6, 2)[number],) for number in range(2)])
        for (_, _, paged, some), (expert,) in zip(layers, steps[-1], strict=True):
            ids = torch.full((1, 1), expert, dtype=torch.int32)
            paged.run(replace(drawn(step, 1, 1), ids_RK=ids), some)  # type: ignore[attr-defined]
        reads.append(sum(some.cache.reads for *_, some in layers))  # type: ignore[attr-defined]
    size = layers[0][3].cache.record_bytes  # type: ignore[attr-defined]
    predicted = simulate(Recorded(steps, SLOTS, 1), Machine(size, 1e9, 1e9), 1, "decayed", pool=pool.num_bytes // size)
    assert [each for *_, each in predicted.by_step] == [after - before for before, after in pairwise(reads)][80:]
    assert 0 < predicted.reads < simulate(Recorded(steps, SLOTS, 1), Machine(size, 1e9, 1e9), 2, "decayed").reads


def test_a_forked_child_reads_with_threads_of_its_own(tmp_path: Path) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    tokens = drawn(5, 9, 1)
    expected = resident.run(tokens, held).y
    assert torch.equal(paged.run(tokens, some).y, expected)
    some.cache.exclusive().acquire()  # as by a call of another thread, which the child does not have
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(paged.run(tokens, some).y, expected) else 1)
    some.cache.exclusive().release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interrupt_anywhere_in_a_call_loses_no_slot(tmp_path: Path) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    tokens = drawn(6, 9, 1)
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
    assert len(some.cache.free) + len(some.cache.slot_of) == 2


def test_an_interrupt_while_the_reads_of_a_failed_call_end_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, held, paged, some = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    tokens = drawn(7, 9, 1)
    expected, within = resident.run(tokens, held).y, Cache.settle.__code__

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
        assert len(some.cache.free) + len(some.cache.slot_of) == 2
