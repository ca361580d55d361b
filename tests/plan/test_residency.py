"""The simulator of experts larger than memory, by hand and against brute force."""

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
import torch

from moe_mk.errors import ConfigError
from moe_mk.experts.residency import POLICIES
from moe_mk.lab.cli.options import bytes_of, enough
from moe_mk.lab.plan.residency import Machine, Outcome, Recorded, Step, compare, simulate, simulate_page_cache, steps_of
from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceError, TraceFacts
from tests.cli.conftest import moe_mk, rows_of, usage_error

MACHINE = Machine(expert_bytes=100, disk=100.0, memory=1000.0)
"""A read takes 1 s, a multiplication 0.1 s."""


def recorded(uses: list[tuple[int, ...]], experts: int = 4) -> Recorded:
    """One layer, from cold slots: the half before what is counted has empty steps."""
    nothing: list[Step] = [[()]] * len(uses)
    return Recorded([*nothing, *([use] for use in uses)], experts, 1)


def drawn(seed: int, layers: int = 1, steps: int = 40, experts: int = 6) -> Recorded:
    """Skewed random uses of one to three experts."""
    draw = torch.Generator("cpu").manual_seed(seed)
    chance = torch.rand(layers, experts, generator=draw) ** 3 + 0.01
    uses: list[Step] = [
        [
            tuple(sorted(torch.multinomial(chance[layer], 1 + (step + seed) % 3, generator=draw).tolist()))
            for layer in range(layers)
        ]
        for step in range(steps)
    ]
    return Recorded(uses, experts, 3)


@pytest.mark.row(173)
def test_policies_evict_what_they_promise() -> None:
    # Two slots, uses 0 0 1 2 0: lru evicts 0 for 2 and misses it; lfu evicts 1 and hits 0; so does the optimum.
    uses = [(0,), (0,), (1,), (2,), (0,)]
    hits = {name: simulate(recorded(uses), MACHINE, 2, name).hits for name in ("lru", "lfu", "decayed", "belady")}
    assert hits == {"lru": 1, "lfu": 2, "decayed": 2, "belady": 2}
    # Among equals, not the one that was read first: a run again evicts the same.
    assert {POLICIES[name](3).victim(held) for name in POLICIES for held in ([1, 2], [2, 1])} == {1}


@pytest.mark.row(173)
def test_no_policy_and_no_brute_force_beats_the_clairvoyant_optimum() -> None:
    for seed in range(12):
        trace = recorded([tuple(step[0]) for step in drawn(seed, steps=9, experts=5).steps], 5)
        for slots in (3, 4):
            outcomes = {name: simulate(trace, MACHINE, slots, name) for name in (*POLICIES, "belady")}
            fewest = _fewest_reads([step[0] for step in trace.steps[trace.half :]], slots)
            assert outcomes["belady"].reads == fewest, (seed, slots)
            assert all(one.reads >= fewest for one in outcomes.values())


def _fewest_reads(steps: list[tuple[int, ...]], slots: int) -> int:
    """The fewest reads of any choice of victims."""

    @cache
    def fewest(at: int, held: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        needed = frozenset(steps[at])
        full = held | needed
        over = max(len(full) - slots, 0)
        ways = itertools.combinations(sorted(held - needed), over)
        return len(needed - held) + min(fewest(at + 1, full - frozenset(gone)) for gone in ways)

    return fewest(0, frozenset())


def test_reads_overlap_with_resident_experts_and_arrive_in_order() -> None:
    # Step 1 reads 0 and 1 and multiplies each as it arrives: 2 s and the last product. Step 2 multiplies 0 and 1
    # (0.2 s) while 2 is read: 1 s and one product.
    outcome = simulate(recorded([(0, 1), (0, 1, 2)]), MACHINE, 4, "lru")
    assert outcome.seconds == pytest.approx([2.1, 1.1])
    # The page cache reads nothing ahead of the touch: 2 reads and 2 products, then 1 read and 3 products.
    assert simulate_page_cache(recorded([(0, 1), (0, 1, 2)]), MACHINE, 4).seconds == pytest.approx([2.2, 1.3])


def test_the_page_cache_is_lru_where_a_step_uses_one_expert() -> None:
    trace = recorded([step[0][:1] for step in drawn(3, steps=60).steps], 6)
    assert simulate_page_cache(trace, MACHINE, 4).hits == simulate(trace, MACHINE, 4, "lru").hits


def test_a_prefetch_reads_only_while_the_disk_is_idle() -> None:
    # Two layers of one expert each, resident in layer 0: while it computes for 2 s, that of layer 1 is read in 1 s.
    machine = Machine(expert_bytes=100, disk=100.0, memory=50.0)
    steps: list[Step] = [[(0,), (number % 3,)] for number in range(12)]
    trace = Recorded(steps, 3, 1)
    none, known = (simulate(trace, machine, 1, "lru", prefetch) for prefetch in ("none", "known"))
    assert none.step_s == pytest.approx(2 + 1 + 2) and known.step_s == pytest.approx(2 + 2)
    assert known.hits == known.uses and known.right == known.predicted and not known.wasted
    # Of two experts of the next layer, one slot has room for the first: one in each of two counted steps.
    assert simulate(Recorded([[(0,), (0, 1)]] * 4, 3, 1), machine, 1, "lru", "known").predicted == 2
    # Expert 1 of layer 1 is prefetched for nothing, evicted for 2, then read by a call and evicted again: wasted once.
    early, steps = ([[(), ()]] * 3 + [[(0,), (one,)] for one in each] for each in ((1, 2, 1), (2, 1, 2)))
    assert simulate(Recorded(steps, 3, 1, early=early), machine, 1, "lru", "gate").wasted == 1


PREDICTED = [(name, prefetch) for name in POLICIES for prefetch in ("none", "frequent", "table", "gate")]


@pytest.mark.parametrize("name,prefetch", PREDICTED)
def test_what_is_counted_does_not_depend_on_later_steps(name: str, prefetch: str) -> None:
    """Nor on what machines are called: twice as fast in all parts, everything takes half the time."""
    machine = Machine(100, 100.0, 300.0, other_s=0.2)
    for seed in range(3):
        steps, other = drawn(seed, layers=3).steps, drawn(seed + 9, layers=3).steps
        at = 3 * len(steps) // 4
        one, changed = ([*steps[:at], *rest[at:]] for rest in (steps, other))
        runs = [
            simulate(Recorded(each, 6, 3, early=other if prefetch == "gate" else None), machine, 2, name, prefetch)
            for each in (one, changed)
        ]
        same = at - len(steps) // 2
        assert runs[0].by_step[:same] == runs[1].by_step[:same] and runs[0].by_step != runs[1].by_step
        assert runs[0].seconds[:same] == pytest.approx(runs[1].seconds[:same])
        trace = Recorded(one, 6, 3, early=other if prefetch == "gate" else None)
        fast = simulate(trace, Machine(100, 200.0, 600.0, other_s=0.1), 2, name, prefetch)
        assert fast.seconds == pytest.approx([each / 2 for each in runs[0].seconds])
        assert fast.by_step == runs[0].by_step and fast.error == pytest.approx(runs[0].error)


@pytest.mark.parametrize("faults", [None, 50.0])
def test_the_page_cache_takes_the_time_of_its_faults_and_of_all_layers(faults: float | None) -> None:
    machine = Machine(100, 100.0, 1000.0, other_s=0.25, faults=faults)
    trace = drawn(1, layers=3)
    outcome = simulate_page_cache(trace, machine, 2)
    counted = trace.steps[trace.half :]
    assert outcome.uses == sum(len(layer) for step in counted for layer in step)
    for step, seconds, (uses, hits, reads) in zip(counted, outcome.seconds, outcome.by_step, strict=True):
        assert uses == sum(map(len, step)) and hits <= uses and reads <= uses
        assert seconds == pytest.approx(uses * 0.1 + 3 * 0.25 + reads * 100 / (faults or 100.0))


def test_the_error_is_that_of_the_mean_relative_to_it() -> None:
    # Ten runs of two steps, of which half take 1 s and half 3 s: a deviation of sqrt(10 / 9), a mean of 2.
    outcome = Outcome("", seconds=[1.0, 1.0, 3.0, 3.0] * 5)
    assert outcome.step_s == 2.0 and outcome.error == pytest.approx((10 / 9 / 10) ** 0.5 / 2)


def test_a_table_learns_which_experts_follow_which() -> None:
    steps: list[Step] = [[(number % 3,), ((number + 1) % 3,)] for number in range(30)]
    assert simulate(Recorded(steps, 3, 1), MACHINE, 1, "lru", "table").right == 15
    with pytest.raises(ConfigError, match="--gate-trace"):
        simulate(Recorded(steps, 3, 1), MACHINE, 1, "lru", "gate")
    early = Recorded(steps, 3, 1, early=steps)
    assert [one.name for one in compare(early, MACHINE, 1, ["lru"])][-2:] == [
        "lru, prefetch gate",
        "lru, prefetch known",
    ]


def test_wrong_orders_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one expert"):
        simulate(drawn(0), MACHINE, 0, "lru")
    with pytest.raises(ConfigError, match="'tabel'"):
        simulate(drawn(0), MACHINE, 1, "lru", "tabel")
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        simulate(drawn(0), MACHINE, 1, "lruu")


def test_a_trace_becomes_steps_of_some_tokens() -> None:
    facts = TraceFacts(num_experts=8, top_k=2)
    ids = torch.tensor([[0, 1], [1, 2], [5, -1]], dtype=torch.int16)
    whole = [TracedForward(0, 4, 0, "prefill", ids), TracedForward(0, 5, 0, "prefill", ids.flip(0))]
    for order in (whole, whole[::-1]):  # traces may be joined layer by layer
        assert steps_of(RoutingTrace.of(facts, order), 2) == [[(0, 1, 2), (1, 2, 5)], [(5,), (0, 1)]]
    one = TracedForward(1, 4, 0, "decode", ids)
    for more in ([one], [one, one]):
        with pytest.raises(TraceError, match="one of each of the 2 layers"):
            steps_of(RoutingTrace.of(facts, [*whole, *more]), 1)
    with pytest.raises(TraceError, match="at least 2"):
        steps_of(RoutingTrace.of(facts, whole), 8)


def test_amounts_are_read_with_their_units() -> None:
    assert bytes_of("--memory", "3GB") == 3_000_000_000 and bytes_of("--memory", "1.5 KiB") == 1536
    assert bytes_of("--memory", "512MiB") == 2**29 and bytes_of("--memory", "77") == 77
    assert bytes_of("--disk", "1.1GB/s", per_second=True) == 1_100_000_000
    for wrong in ("", "0", "GB", "-1GB", "0GB", "3GB/s", "nanGB", "3 XB"):
        with pytest.raises(ConfigError, match="--memory"):
            bytes_of("--memory", wrong)
    for count in (1, 999, 1000, 88_096_768, 44_048_384, 3 * 10**9 + 1, 7 * 10**12):
        assert count <= bytes_of("--memory", enough(count)) <= 1.01 * count


def test_fit_prints_rates_by_slots_and_the_time_of_every_policy(tmp_path: Path) -> None:
    draw = torch.Generator("cpu").manual_seed(0)
    ids = [torch.randint(16, (12, 2), generator=draw, dtype=torch.int16) for _ in range(2)]
    forwards = [TracedForward(0, layer, 0, "decode", ids_TK) for layer, ids_TK in enumerate(ids)]
    RoutingTrace.of(TraceFacts(num_experts=16, top_k=2), forwards).write(tmp_path / "trace.safetensors")
    file = str(tmp_path / "trace.safetensors")
    sizes = ("--set", "num_experts=16", "--set", "top_k=2", "--set", "num_expert_group=1", "--set", "topk_group=1")
    words = ["fit", "deepseek_v3", "--trace", file, "--memory", "800MB", *sizes, "--tokens", "2", "--other", "50"]
    words += ["--disk", "2GB/s", "--ram", "9GB/s", "--faults", "1GB/s"]
    done = moe_mk(*words)
    assert "800 MB: 9 of 16 experts a layer; disk 2 GB/s, ram 9 GB/s" in done.stdout
    stated = json.loads(moe_mk(*words, "--json").stdout)
    size = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert (stated["expert_bytes"], stated["steps"], stated["pool_slots"]) == (size, 3, 18)
    odd = json.loads(moe_mk(*words, "--memory", "90GB", "--tokens", "4", "--json").stdout)
    assert (odd["steps"], odd["pool_slots"]) == (2, 32)
    trace = Recorded(steps_of(RoutingTrace.read(file), 2), 16, 2)
    found = compare(trace, Machine(int(size), 2e9, 9e9, 5e-5, 1e9), 9, list(POLICIES), 18)
    for own, one, row in zip(found, stated["outcomes"], rows_of(done.stdout, "policy"), strict=True):
        right = own.right / max(own.predicted, 1)
        expected = [own.hit_rate, own.reads / 3, own.step_s, 2 / own.step_s, own.error, right, own.wasted]
        assert list(one.values()) == [own.name, *map(pytest.approx, expected)]
        speed = f"{2 / own.step_s:.4g} +- {100 * own.error:.0f} %", f"{found[0].step_s / own.step_s:.2f}"
        cells = [f"{100 * own.hit_rate:.1f} %", f"{own.reads / 3:.2f}", f"{1e3 * own.step_s:.4g}", *speed]
        assert list(row.values()) == [own.name, *cells, f"{100 * right:.0f} %" if own.predicted else ""]
    for (slots, rates), row in zip(stated["hit_rates_by_slots"].items(), rows_of(done.stdout, "slots"), strict=True):
        assert list(row.values()) == [f"{slots} of 16", *(f"{100 * rate:.1f} %" for rate in rates.values())]
        assert all(rates[name] == simulate(trace, MACHINE, int(slots), name).hit_rate for name in POLICIES)
    one = ("explain", "deepseek_v3", "--tokens", "1", *sizes, "--trace", file)
    for ranks, slots in ((1, 9), (4, 3)):
        residency = ("--set", f"kernel.residency={{slots: {slots}, store: /tmp}}", "--ranks", ranks)
        reads = json.loads(moe_mk(*one, *residency, "--json").stdout)["residency"]
        # Of the second half of the steps, with one token a rank: distinct experts that were not resident.
        steps = range(12 // ranks // 2, 12 // ranks)
        uses = sum(len(each[step * ranks :][:ranks].unique()) for each in ids for step in steps)
        traced, calls = reads["trace"], ranks * len(ids) * len(steps)
        assert 0 < traced["hit_rate"] < 1
        assert traced["bytes"] == pytest.approx(uses * (1 - traced["hit_rate"]) / calls * reads["slot_bytes"])
    assert f"hit rate {100 * traced['hit_rate']:.3g} %" in moe_mk(*one, *residency).stdout
    assert "of a pool: moe-mk fit" in moe_mk(*one).output
    assert "give at least 88.11MB" in usage_error("fit", "deepseek_v3", "--trace", file, "--memory", "50MB", *sizes)
    assert "--set num_experts=16" in usage_error("fit", "deepseek_v3", "--trace", file, "--memory", "3GB")
