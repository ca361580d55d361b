"""Experts larger than memory have the bits of resident ones, whatever is resident and whatever arrives first."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk import ConfigError, DeepseekV3MoE
from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import StoreError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.cpu_native.paged import PagedExperts, RecordMemory
from moe_mk.experts.paged import Cache, memory_of
from moe_mk.experts.residency import POLICIES, ResidencyPool
from moe_mk.kernels.native.packed import on_huge_pages
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.permute import permute
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_store import ExpertStore, digest_of
from tests.layer.native import NEEDS_COMPILER, built, written
from tests.support.alone import alone

pytestmark = NEEDS_COMPILER
SLOTS, SIZE = 6, 256
CPU = torch.device("cpu")


@contextmanager
def failing(bad: int) -> Iterator[None]:
    read = ExpertStore.read_piece

    def fail(self: ExpertStore, expert: int, start: int, record: memoryview) -> None:
        if expert == bad:
            raise StoreError(f"expert {bad} cannot be read")
        read(self, expert, start, record)

    with patch.object(ExpertStore, "read_piece", fail):
        yield


def forked(run: Callable[[], object]) -> int:
    """A child process, whose status is 0 if it ends within a minute and nothing is raised."""
    if child := os.fork():
        return child
    signal.alarm(60)
    with suppress(BaseException):
        run()
        os._exit(0)
    os._exit(1)


def has_ended(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def pair(
    weights: object, folder: Path, slots: int | ResidencyPool, policy: str = "decayed", **more: int
) -> tuple[Any, ...]:
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
        assert all(part.wait(60) for each in reading.values() for part in each.parts)  # type: ignore[attr-defined]
        found = sorted(draw.sample(sorted(reading), draw.randint(1, len(reading))))
        for expert in found:
            self.enter(expert, reading)  # type: ignore[arg-type]
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
    for slots in (1, 2, 4, SLOTS, SLOTS + 1):
        resident, held, paged, some = pair(given, tmp_path, slots, draw.choice(list(POLICIES)))
        size = min(slots, SLOTS) * some.cache.layout.num_bytes
        assert isinstance(some, PagedExperts) and some.num_bytes == some.cache.pool.num_bytes == size
        for _ in range(4):
            rows, top_k = draw.choice((0, 1, 2, 7, 40)), draw.randint(1, 4)
            tokens = drawn(draw.randrange(1000), rows, top_k, dropped=0.2)
            wide = [torch.empty(rows, 2, SIZE)[:, 0] for _ in range(2)]  # f32 shows the order of a sum
            for experts, own, out_RH in ((paged, some, wide[0]), (resident, held, wide[1])):
                assert experts.run(replace(tokens, out_RH=out_RH), own).y is out_RH
            assert torch.equal(*wide)
            for layout in (RowTokens, GroupedTokens, BatchedTokens):
                local = permute(tokens, (layout,))
                assert torch.equal(paged.run(local, some).y, resident.run(local, held).y), (slots, layout)
        assert some.cache.reads == some.cache.uses - some.cache.hits
        assert torch.equal(some.slot(3).down_HI.values, given.slot(3).down_HI.values)
    assert len(list(tmp_path.iterdir())) == 1  # written once, used by all


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("paged"))


@pytest.mark.row(172)
def test_a_layer_with_shared_experts_has_the_same_bits_and_states_its_memory(checkpoint: Path, tmp_path: Path) -> None:
    x_TH = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    for slots in (15, 16, 3):
        resident, paged = built(checkpoint), built(checkpoint, residency={"slots": slots, "store": str(tmp_path)})
        for part in (x_TH, x_TH[:0], *x_TH.split(2), x_TH):
            assert torch.equal(paged(part), resident(part))
        assert paged.state.experts.kernel.spans.ledger.entries == resident.state.experts.kernel.spans.ledger.entries
    assert "3 of 16 experts in memory, decayed" in paged.explain().parameters
    assert paged.memory_report().experts == paged.state.experts.weights.num_bytes < resident.memory_report().experts / 5
    assert paged.release_weights() and torch.equal(paged(x_TH), resident(x_TH))
    with pytest.raises(UnsupportedError, match="keeps all experts in memory"):
        built(checkpoint, experts="torch_cpu", residency={"slots": 3, "store": str(tmp_path)})


@pytest.mark.row(172)
def test_ranks_have_stores_of_their_own_experts_and_the_same_bits(checkpoint: Path, tmp_path: Path) -> None:
    batches = [torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).bfloat16() for count in (7, 3)]
    outputs = []
    for slots, pool in (
        (0, None),
        (2, None),
        (None, ResidencyPool(600_000)),
    ):  # of both ranks, one of which has no tokens
        residency = None if slots == 0 else {"slots": slots, "store": str(tmp_path)}
        config = built(checkpoint).config.with_(residency=residency)
        layers = [DeepseekV3MoE(config, groups=g, pool=pool) for g in virtual_groups(2, 1)]
        ranks = [layer.load_from_safetensors(checkpoint, 3) for layer in layers]
        outputs.append([each for size in (3, 0, 1) for each in run_together(ranks, [batches[0], batches[1][:size]])])
    assert all(
        torch.equal(first, each) for others in outputs[1:] for first, each in zip(outputs[0], others, strict=True)
    )
    assert len(list(tmp_path.iterdir())) == 2  # of each rank's


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
    assert layer.state.experts.weights.cache.store.path == kept and kept.stat().st_mtime_ns == written_at
    assert torch.equal(layer(x_TH), expected)


@pytest.mark.row(172)
def test_a_record_that_cannot_be_read_is_never_multiplied(checkpoint: Path, tmp_path: Path) -> None:
    x_TH = torch.randn(24, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer = built(checkpoint, residency={"bytes": 800_000, "store": str(tmp_path)})
    expected = built(checkpoint)(x_TH)
    assert torch.equal(layer(x_TH), expected) and "experts in memory, decayed" in layer.explain().parameters
    used, failed = layer.expert_load > 0, 0
    for bad in range(16):
        cache = layer.state.experts.weights.cache
        if used[bad] and bad not in cache.slot_of:
            for call in (partial(layer, x_TH), partial(layer.state.experts.weights.slot, bad)):
                with failing(bad), pytest.raises(StoreError, match=f"expert {bad} cannot be read"):
                    call()
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
    for settings_of, problem in (
        ({"store": store}, "its slots, its bytes or a ResidencyPool.* 0 are given"),
        ({"store": store, "slots": 1, "bytes": 1}, "slots or bytes, both"),
        ({"store": "relative", "slots": 1}, "store: must be an absolute path"),
        ({"store": store, "slots": 1, "policy": "lruu"}, "did you mean 'lru'"),
        ({"store": store, "bytes": 4000}, "less than one expert"),
    ):
        with pytest.raises(ConfigError, match=problem):
            built(checkpoint, residency=settings_of)
    assert not list(tmp_path.iterdir())


def pages_of_slots() -> list[int]:
    """What is resident when slots get memory, after both are written, and after one has given it back."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, seen = resident(), list[int]()
    native = SimpleNamespace(functions={"advise_huge": lambda *_: seen.append(resident() - before)})
    memory = RecordMemory(native, on_huge_pages(9, 32 << 20))  # type: ignore[arg-type]
    for slot in (3, 4):
        memory.add(slot)
        memory.records_SB[slot] = 1
    seen.append(resident() - before)
    memory.remove(3)
    assert memory == {4} and memory.records_SB[4].all()
    return [*seen, resident() - before]


def test_slots_take_large_pages_before_they_are_written_and_give_them_back() -> None:
    first, second, both, one = (size / 2**20 for size in alone(pages_of_slots))
    assert first < 8 and 24 < second < 40 and both > 60 and one < 40


def in_a_pool(folder: Path, records: int, kinds: str) -> tuple[ResidencyPool, list[tuple[Any, ...]]]:
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
    assert layers[0][3].num_bytes == 5 * caches[0].record_bytes and "3.21 MB for all layers" in str(caches[0])
    with pytest.raises(ConfigError, match=r"less than one expert of each layer \(3 x .*give at least"):
        in_a_pool(tmp_path, 2, "bf16 bf16 bf16")


def expect_bits(layer: tuple[Any, ...], seed: int, bad: int = -1) -> None:
    """A call has the bits of resident experts, or fails where expert `bad` cannot be read."""
    resident, held, paged, some = layer
    tokens = drawn(seed, seed % 4, 1 + seed % 5, dropped=0.1)
    try:
        assert torch.equal(paged.run(tokens, some).y, resident.run(tokens, held).y)
    except StoreError as problem:
        if f"expert {bad} cannot be read" not in str(problem) or bad in some.cache.slot_of:
            raise


STEPS = st.sampled_from("call call threads fail join leave reload fork".split())


@pytest.mark.row(172)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 999)), max_size=30))
def test_any_steps_of_the_layers_of_a_pool_keep_bits_and_budget(steps: list[tuple[str, int]]) -> None:
    schemes = [scheme_of_kind(kind, (128, 128)) for kind in ("bf16", "int8_block")]
    kinds = [random_experts(scheme, SLOTS, SIZE, SIZE, CPU) for scheme in schemes]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        pool = ResidencyPool(4 * 3 * SIZE * SIZE * 2 + (1 << 15))
        layers = [(pair(each, Path(folder), pool), each) for each in kinds]
        for step, seed in steps:
            layer, given = layers[at := seed % len(layers)]
            if step == "call":
                expect_bits(layer, seed)
            elif step == "threads":
                list(threads.map(expect_bits, [each for each, _ in layers * 2], range(seed, seed + 2 * len(layers))))
            elif step == "fail":
                with failing(seed % SLOTS):
                    expect_bits(layer, seed, seed % SLOTS)
            elif step == "leave" and len(layers) > 1:
                del layers[at]
            elif step == "fork":
                assert has_ended(forked(partial(expect_bits, layer, seed)))
            elif step in ("join", "reload"):
                with suppress(ConfigError):  # there may be no memory for one expert of one layer more
                    new = pair(given, Path(folder), pool), given
                    layers = [*layers, new] if step == "join" else [*layers[:at], new, *layers[at + 1 :]]
            del layer
            taken = list[tuple[int, int]]()
            for (*_, some), _ in layers:
                cache = some.cache  # type: ignore[attr-defined]
                cache.settle()  # threads may still write for a call that failed
                held = [*cache.free, *cache.slot_of.values(), *cache.being_read()]
                assert sorted(held) == sorted(cache.slots) != []
                taken += [(cache.record_bytes, slot) for slot in cache.slots]
                for expert, slot in cache.slot_of.items():  # nothing half-read, nothing of another layer
                    assert digest_of(memory_of(cache.records_SB[slot])) == cache.store._digests[expert]
            assert len(taken) == len(set(taken)) and all(slot in pool.memory[size] for size, slot in taken)
            assert sum(len(held) * size for size, held in pool.memory.items()) <= pool.num_bytes


@pytest.mark.row(172)
def test_processes_share_a_store_and_those_that_are_killed_harm_none(tmp_path: Path) -> None:
    _, layers = in_a_pool(tmp_path, 5, "bf16 bf16")

    def calls(seeds: Iterable[int]) -> None:
        for seed in seeds:
            for layer in layers:
                expect_bits(layer, seed)

    calls(range(2))
    with layers[0][3].cache.exclusive():  # as by a call of another thread, which the children do not have
        endless, other = forked(lambda: calls(count())), forked(lambda: calls(range(30)))
    calls(range(30))
    os.kill(endless, signal.SIGKILL)
    assert not has_ended(endless) and has_ended(other)
    calls(range(3))


@pytest.mark.row(172)
def test_a_store_that_is_removed_or_truncated_between_calls(tmp_path: Path) -> None:
    given = random_experts(BF16, SLOTS, SIZE, SIZE, CPU)
    resident, held, paged, some = layer = pair(given, tmp_path, 2)
    expect_bits(layer, 3)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 1)
    ids = torch.tensor([[*some.cache.slot_of]], dtype=torch.int32)  # they are in memory
    here = RowTokens(drawn(1, 1, 1).x_RH, ids, torch.ones(1, 2), SLOTS)
    assert torch.equal(paged.run(here, some).y, resident.run(here, held).y)
    with pytest.raises(StoreError, match="was changed while it was in use|truncated"):
        paged.run(drawn(2, 9, 4), some)
    with pytest.raises(StoreError, match=r"is truncated.*load the layer"):
        paged.relayout(given)
    file.unlink()
    layer = resident, held, paged, paged.relayout(given)
    file.unlink()
    expect_bits(layer, 3)


@pytest.mark.row(172)
def test_a_call_that_fails_ends_while_another_layer_of_the_pool_reads(tmp_path: Path) -> None:
    _, (one, other) = in_a_pool(tmp_path, 4, "bf16 bf16")
    begun, may_end, read = Event(), Event(), ExpertStore.read_piece

    def slow(self: ExpertStore, *piece: Any) -> None:
        if self is one[3].cache.store:
            raise StoreError("a damaged record")
        begun.set()
        assert may_end.wait(60)
        read(self, *piece)

    with patch.object(ExpertStore, "read_piece", slow), ThreadPoolExecutor(1) as thread:
        reading = thread.submit(expect_bits, other, 6)
        assert begun.wait(60)
        with pytest.raises(StoreError, match="a damaged record"):
            one[2].run(drawn(3, 4, 4), one[3])
        one[3].cache.share, other[3].cache.share = 1, 3
        assert other[3].cache.pool.grow(other[3].cache), "slots of reads that have ended are free"
        may_end.set()
        reading.result(60)
    expect_bits(one, 7)


@pytest.mark.row(172)
def test_a_layer_that_is_gone_returns_its_slots_once_its_reads_have_ended(tmp_path: Path) -> None:
    _, layers = in_a_pool(tmp_path, 4, "bf16 bf16")
    cache, may_end, read = layers.pop()[3].cache, Event(), ExpertStore.read_piece

    def slow(*piece: Any) -> None:
        assert may_end.wait(60)
        read(*piece)

    with patch.object(ExpertStore, "read_piece", slow):
        cache.begin(torch.tensor([0]))
        cache._read([0], (0,), {})  # as after an interrupt that nothing has waited for
        gone, _ = ref(cache), layers[0][3].cache.clear()
        del cache
        assert gone() is not None
        may_end.set()
        until = time.monotonic() + 60
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.01)
    assert gone() is None
    for seed in range(8):
        expect_bits(layers[0], seed)
    assert len(layers[0][3].cache.slots) == 4 == layers[0][3].cache.share


def test_a_forked_child_does_not_wait_for_reads_that_nothing_makes_there(tmp_path: Path) -> None:
    layer = pair(random_experts(BF16, SLOTS, SIZE, SIZE, CPU), tmp_path, 2)
    expect_bits(layer, 1)
    begun, may_end, read, parent = Semaphore(0), Event(), ExpertStore.read_piece, os.getpid()

    def slow(*piece: Any) -> None:
        begun.release()
        assert os.getpid() != parent or may_end.wait(60)
        read(*piece)

    cache = layer[3].cache
    with patch.object(ExpertStore, "read_piece", slow):
        cache.clear()
        cache.begin(torch.tensor([3]))
        cache._read([3], (3,), {})  # threads of the parent hold the slots at the fork
        cache._read([4], (3,), {})
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60) and cache.free == [] != cache.being_read()
        child = forked(partial(expect_bits, layer, 2))
        may_end.set()
    assert has_ended(child)
