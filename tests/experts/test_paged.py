"""What the handler of a signal raises at any moment leaves no lock held, no slot lost and no later call hanging."""

import copy
import signal
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_mk import MoEConfig, MoELayer
from moe_mk.errors import StoreError
from moe_mk.experts.paged import Cache
from moe_mk.experts.residency import ResidencyPool
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.router.replay import RoutingCapture
from moe_mk.weights import expert_store
from moe_mk.weights.expert_store import ALIGNMENT, ExpertStore
from tests.layer.interrupted_ranks import HANDLERS, Interrupts
from tests.layer.native import NEEDS_COMPILER
from tests.support.threads import job_threads_left
from tests.support.tiers import slow

pytestmark = NEEDS_COMPILER
EXPERTS, HIDDEN, INNER, TOP_K = 6, 64, 32, 3
RECORD = 3 * HIDDEN * INNER * 2
LIMIT_S = 20.0
"""A call that takes longer hangs."""


def matrices(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    found = {"gate.weight": torch.randn((EXPERTS, HIDDEN), generator=draw).bfloat16()}
    for expert in range(EXPERTS):
        for name, shape in shapes.items():
            found[f"experts.{expert}.{name}.weight"] = (torch.randn(shape, generator=draw) / 4).bfloat16()
    return found


def built(
    folder: Path, seed: int, *, slots: int | None = None, pool: ResidencyPool | None = None, timeout_s: float = LIMIT_S
) -> MoELayer:
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_shared_experts": 0}
    data = {"model": {**model, "quant": {"weights": "bf16"}}, "router": {"top_k": TOP_K}}
    residency = None if slots is None and pool is None else {"slots": slots, "store": str(folder)}
    config = MoEConfig.parse(data, "a test").with_(
        experts="cpu_native", max_num_tokens=16, residency=residency, timeout_s=timeout_s
    )
    return MoELayer(config, dtype=torch.bfloat16, name=str(seed), pool=pool).load_weights(matrices(seed))


class Checked:
    """A layer with its weights in f64, and random calls whose outputs are worked out from them."""

    def __init__(self, layer: MoELayer, seed: int) -> None:
        self.layer, self.wide = layer, {name: each.double() for name, each in matrices(seed).items()}

    @property
    def cache(self) -> Cache:
        found: Cache = self.layer.state.experts.weights.cache  # type: ignore[union-attr]
        return found

    def drawn(self, draw: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, g = draw.choice((1, 4)), torch.Generator().manual_seed(draw.randrange(1000))
        ids = torch.rand((rows, EXPERTS), generator=g).argsort(1)[:, :TOP_K]
        return torch.randn((rows, HIDDEN), generator=g).bfloat16(), torch.rand((rows, TOP_K), generator=g), ids

    def call(self, draw: Random) -> None:
        x_TH, weights_TK, ids_TK = self.drawn(draw)
        began = time.monotonic()
        y_TH = self.layer.forward_routed(x_TH, weights_TK, ids_TK).double()
        assert time.monotonic() - began < LIMIT_S
        expected_TH = torch.zeros_like(y_TH)
        for token, (x_H, weights_K, ids_K) in enumerate(zip(x_TH.double(), weights_TK, ids_TK, strict=True)):
            for weight, expert in zip(weights_K.double(), ids_K.tolist(), strict=True):
                gate, up, down = (self.wide[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
                expected_TH[token] += weight * (down @ (torch.nn.functional.silu(gate @ x_H) * (up @ x_H)))
        assert (y_TH - expected_TH).norm() <= 2**-7 * expected_TH.norm()


class Scene:
    """Layers of one kind of memory, and everything that is done to them."""

    def __init__(self, kind: str, folder: Path) -> None:
        """kind: slots of their own, a pool, or all experts resident."""
        self.folder, self.pool = folder, ResidencyPool(5 * aligned_record()) if kind == "pool" else None
        self.slots = 2 if kind == "slots" else None
        self.layers = [Checked(self.built(seed), seed) for seed in range(2)]
        self.is_paged = kind != "resident"

    def built(self, seed: int) -> MoELayer:
        return built(self.folder, seed, slots=self.slots, pool=self.pool)

    def verbs(self) -> dict[str, Callable[[Random], object]]:
        first = self.layers[0]
        found: dict[str, Callable[[Random], object]] = {
            "call": first.call,
            "forward": lambda draw: first.layer(first.drawn(draw)[0]),
            "move": self.move,
            "swap": lambda draw: swap_backends(
                first.layer, first.drawn(draw)[0], batch_invariant=bool(draw.randrange(2))
            ),
            "load": lambda draw: first.layer.load_weights(matrices(0)),
            "copy": lambda draw: copy.deepcopy(first.layer),
            "export": lambda draw: first.layer.live.export_slot(draw.randrange(EXPERTS)),
            "stats": lambda draw: (str(first.layer.explain()), first.layer.memory_report()),
            "join and leave": lambda draw: self.built(1).forward_routed(*first.drawn(draw)),
        }
        if self.is_paged:
            found |= {
                "read back": lambda draw: first.layer.state.experts.weights.slot(draw.randrange(EXPERTS)),
                "clear": lambda draw: first.cache.clear(),
                "counts": lambda draw: first.cache.counts.hit_rate,
                "slow call": self.slow_call,
            }
        return found

    def move(self, draw: Random) -> None:
        order = draw.sample(range(EXPERTS), EXPERTS)
        self.layers[0].layer.live.set_placement(ExpertMap((tuple(order),), EXPERTS))

    def slow_call(self, draw: Random) -> None:
        """Reads take so long that a call is interrupted in its waits."""
        read = ExpertStore.read_piece

        def slow(*piece: Any) -> None:
            time.sleep(0.003)
            read(*piece)

        self.layers[0].cache.clear()
        with patch.object(ExpertStore, "read_piece", slow):
            self.layers[0].call(draw)

    def expect_sound(self, draw: Random) -> None:
        """All layers are right and in time, no lock is held, no slot is lost, and no budget is exceeded."""
        for each in self.layers:
            for _ in range(2):
                each.call(draw)
        if not self.is_paged:
            return
        for each in self.layers:
            cache = each.cache
            assert not cache.in_call and not cache.pool._lock.locked()
            until = time.monotonic() + LIMIT_S
            while cache.being_read() and time.monotonic() < until:  # threads may be at what interrupted calls left
                cache.settle()
            assert sorted([*cache.slot_of.values(), *cache.free]) == sorted(cache.slots) != []
            assert not cache.being_read() and cache.readers.count == 4
            used = sum(len(held) * size for size, held in cache.pool.memory.items())
            assert used <= cache.pool.num_bytes


def aligned_record() -> int:
    return -(-RECORD // 4096) * 4096


def expect_few_threads() -> None:
    """Threads end when they have nothing to do."""
    assert job_threads_left() == 0


def traced(verb: Callable[[Random], object], draw: Random, interrupts: Interrupts) -> None:
    def run() -> None:
        verb(draw)

    interrupts._within = run.__code__
    with interrupts.traced():
        run()


def tried_everywhere(scene: Scene, name: str, most: int) -> int:
    """Raise at so many of the places of a verb; returns how often it was raised."""
    verb, draw, raised = scene.verbs()[name], Random(name), 0
    for _ in range(2):  # the first call prepares what later ones use, at places of its own
        interrupts = Interrupts()
        traced(verb, Random(name), interrupts)
    for place in sorted(draw.sample(range(1, interrupts.places + 1), min(most, interrupts.places))):
        kind = draw.choice((KeyboardInterrupt, *HANDLERS))
        interrupts = Interrupts(place, raised=kind)
        try:
            traced(verb, Random(name), interrupts)
        except kind:
            raised += 1
            assert torch.is_grad_enabled() or name not in ("call", "forward", "slow call")
            scene.expect_sound(draw)  # while the exception, and with it every frame of the call, is alive
        try:
            scene.expect_sound(draw)
        except BaseException as error:
            error.add_note(f"{name}, place {place}: {interrupts.at}")
            raise
    return raised


CHEAP = ("call", "slow call", "forward", "clear", "export", "stats", "read back")
THOROUGH = [
    *(("pool", verb, 8) for verb in CHEAP), *(("slots", verb, 8) for verb in ("call", "slow call", "read back")),
    *(("pool", verb, 3) for verb in ("join and leave", "move", "swap", "load", "copy")),
    ("resident", "call", 8),
]  # fmt: skip
VERBS = [
    *((kind, verb) for kind, verb, _ in THOROUGH), *(("resident", verb) for verb in ("move", "swap", "load", "copy")),
    *(("slots", verb) for verb in ("forward", "clear", "join and leave", "move", "swap", "load")), ("pool", "counts"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "verb", "most"), [("pool", "call", 2), ("slots", "slow call", 2), *slow(*THOROUGH)])
def test_an_interrupt_at_any_instruction_of_a_verb_leaves_all_layers_right(
    kind: str, verb: str, most: int, tmp_path: Path
) -> None:
    assert tried_everywhere(Scene(kind, tmp_path), verb, most)
    expect_few_threads()


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "verb"), VERBS)
def test_an_interrupt_at_more_instructions(kind: str, verb: str, tmp_path: Path) -> None:
    tried_everywhere(Scene(kind, tmp_path), verb, 400)


class Fired(Exception):
    """What a watchdog's handler raises."""


class Watchdog:
    """Signals whose handler raises `Fired`."""

    def __init__(self) -> None:
        self._ran, self._main = list[int](), threading.main_thread().ident or 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        def handler(number: int, frame: object) -> None:
            self._ran.append(number)
            raise Fired

        old = signal.signal(signal.SIGUSR1, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, old)

    def during(self, verb: Callable[[], object], after_s: float) -> bool:
        """Whether a verb was left by what the handler raised; within a finaliser, Python only prints it."""

        def send() -> None:
            time.sleep(after_s)
            signal.pthread_kill(self._main, signal.SIGUSR1)

        self._ran.clear()
        start_new_thread(send, ())
        try:
            verb()
            while not self._ran:
                time.sleep(0.001)
        except Fired:
            return True
        return False


def tried_at_random(scene: Scene, seconds: float, seed: int) -> int:
    """Real signals in random verbs; returns how many of them raised."""
    draw, raised, took = Random(seed), 0, dict[str, float]()
    verbs = {name: verb for name, verb in scene.verbs().items() if name != "counts"}
    until, watchdog = time.monotonic() + seconds, Watchdog()
    with watchdog.installed():
        while time.monotonic() < until:
            name = draw.choice([*verbs, "call", "slow call" if scene.is_paged else "call"])
            if name not in took:
                began = time.monotonic()
                verbs[name](draw)
                took[name] = time.monotonic() - began
            raised += watchdog.during(partial(verbs[name], draw), draw.uniform(0, took[name]))
            if "call" not in name and name != "forward":
                torch.set_grad_enabled(True)  # torch's own contexts leave it off where they are interrupted
            scene.expect_sound(draw)
    return raised


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slots", "pool", "resident"])
def test_signals_at_random_moments_of_random_verbs_leave_all_layers_right(kind: str, tmp_path: Path) -> None:
    assert tried_at_random(Scene(kind, tmp_path), 4.0, 1) > 10
    expect_few_threads()


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["slots", "pool", "resident"])
def test_signals_for_longer(kind: str, tmp_path: Path) -> None:
    for seed in range(10):
        tried_at_random(Scene(kind, tmp_path), 30.0, seed)


def test_a_disk_that_does_not_answer_is_an_error_and_the_layer_serves_when_it_does(tmp_path: Path) -> None:
    scene, draw = Scene("slots", tmp_path), Random(1)
    layer, read, may_end = scene.layers[0], ExpertStore.read_piece, threading.Event()
    layer.cache.clear()
    layer.cache.limit_s = 0.05
    stuck = {2, 3}

    def hangs(store: ExpertStore, expert: int, *piece: Any) -> None:
        assert expert not in stuck or may_end.wait(60)
        read(store, expert, *piece)

    def call(expert: int) -> None:
        ids_TK = torch.tensor([[expert, -1, -1]])
        layer.layer.forward_routed(torch.ones((1, HIDDEN)).bfloat16(), torch.ones((1, TOP_K)), ids_TK)

    late = r"expert {} of .*\.experts was not read within 0\.05 s \[kernel\.timeout_s\]; make the call again"
    with patch.object(ExpertStore, "read_piece", hangs):
        for expert in (2, 3, 4):  # the third finds no slot to which nothing writes
            with pytest.raises(StoreError, match=late.format(expert)):
                call(expert)
        with pytest.raises(StoreError, match=late.format(2)):
            layer.layer.state.experts.weights.slot(2)
        may_end.set()
        layer.cache.limit_s = LIMIT_S
        scene.expect_sound(draw)


def test_an_error_of_any_piece_of_a_record_ends_the_call_that_needs_it(tmp_path: Path) -> None:
    scene, draw, read = Scene("slots", tmp_path), Random(0), ExpertStore.read_piece
    layer = scene.layers[0]
    with patch.object(expert_store, "PIECE", ALIGNMENT):
        starts = list(layer.cache.store.pieces())  # type: ignore[union-attr]
        assert len(starts) == 3
        for failing in starts:

            def fails(store: ExpertStore, expert: int, start: int, record: memoryview, at: int = failing) -> None:
                if start == at:
                    raise StoreError(f"piece at {at}")
                read(store, expert, start, record)

            layer.cache.clear()
            with (
                patch.object(ExpertStore, "read_piece", fails),
                pytest.raises(StoreError, match=f"piece at {failing}$"),
            ):
                layer.layer.forward_routed(*layer.drawn(draw))
            layer.call(draw)
    scene.expect_sound(draw)


def test_a_record_is_checked_when_all_of_its_pieces_have_come_in_any_order(tmp_path: Path) -> None:
    layer, draw, read = Checked(built(tmp_path, 4, slots=2), 4), Random(0), ExpertStore.read_piece
    with patch.object(expert_store, "PIECE", ALIGNMENT):
        starts = list(layer.cache.store.pieces())  # type: ignore[union-attr]
        ended = {(expert, start): threading.Event() for expert in range(EXPERTS) for start in starts}
        for last in starts:

            def late(store: ExpertStore, expert: int, start: int, record: memoryview, last: int = last) -> None:
                assert start != last or all(ended[expert, each].wait(LIMIT_S) for each in starts if each != last)
                read(store, expert, start, record)
                ended[expert, start].set()

            for each in ended.values():
                each.clear()
            layer.cache.clear()
            with patch.object(ExpertStore, "read_piece", late):
                layer.call(draw)


def test_waits_for_another_call_and_for_a_slot_have_a_limit(tmp_path: Path) -> None:
    scene = Scene("pool", tmp_path)
    first, other = scene.layers
    first.cache.limit_s = 0.05
    with first.cache.exclusive(), pytest.raises(StoreError, match=r"waited 0.05 s \[kernel.timeout_s\] for another"):
        first.layer.forward_routed(*first.drawn(Random(1)))
    with scene.pool._lock, pytest.raises(StoreError, match=r"the pool of experts was in use for 0.05 s"):  # type: ignore[union-attr]
        first.layer.forward_routed(*first.drawn(Random(1)))
    first.cache.limit_s = LIMIT_S
    for each in scene.layers:
        for seed in range(4):
            each.call(Random(seed))
    with (
        first.cache.exclusive(),
        other.cache.exclusive(),
        pytest.raises(StoreError, match="left no slot within 0.05 s"),
    ):
        built(tmp_path, 2, pool=scene.pool, timeout_s=0.05)
    scene.expect_sound(Random(2))


def test_calls_of_threads_and_of_a_joining_layer_share_a_pool(tmp_path: Path) -> None:
    scene, wrong = Scene("pool", tmp_path), list[BaseException]()

    def calls(each: Checked, seed: int) -> None:
        try:
            for number in range(15):
                each.call(Random(f"{seed} {number}"))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(each, seed)) for seed in range(2) for each in scene.layers]
    for thread in threads:
        thread.start()
    for _ in range(5):
        Checked(scene.built(1), 1).call(Random(3))
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    scene.expect_sound(Random(4))


@pytest.mark.parametrize("slots", [2, EXPERTS])
def test_every_call_counts_its_experts_whether_or_not_all_are_in_memory(slots: int, tmp_path: Path) -> None:
    layer, draw, uses = Checked(built(tmp_path, 3, slots=slots), 3), Random(1), 0
    for _ in range(12):
        x_TH, weights_TK, ids_TK = layer.drawn(draw)
        ids_TK[0, 0] = -1
        layer.layer.forward_routed(x_TH, weights_TK, ids_TK)
        uses += len({*ids_TK.flatten().tolist()} - {-1})
        counts = layer.cache.counts
        assert counts.uses == uses == counts.hits + counts.reads
    assert counts.reads == EXPERTS if slots == EXPERTS else counts.reads > EXPERTS
    layer.cache.clear()
    assert not any(map(layer.cache.policy.worth, range(EXPERTS))), "what was used is forgotten"


@pytest.mark.row("177")
@pytest.mark.parametrize("slots", [2, EXPERTS])
def test_a_capture_has_every_choice_whether_or_not_all_experts_are_in_memory(slots: int, tmp_path: Path) -> None:
    layer, sizes = built(tmp_path, 3, slots=slots), {"layers": 1, "num_experts": EXPERTS, "top_k": TOP_K}
    inputs = [Checked(layer, 3).drawn(Random(seed))[0] for seed in range(6)]
    with (capture := RoutingCapture(**sizes, max_num_tokens=24)).listening({0: layer}):
        for x_TH in inputs:
            layer(x_TH)
    assert torch.equal(capture.take()[:, 0].int(), torch.cat([layer.route(x_TH).ids_TK for x_TH in inputs]))
