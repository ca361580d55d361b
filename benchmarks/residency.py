"""Experts larger than memory on the real forward, against the disk, the simulator and a mapping of the same records.

    python benchmarks/residency.py examples/data/tiny_routing.safetensors --json benchmarks/results/residency_cpu.json
    python benchmarks/residency.py examples/data/tiny_routing.safetensors --inter 256 --memory 900MB --tokens 1

A layer of random FP8 experts of DeepSeek-V3's width with recorded routing. A trace of fewer experts than `--experts` is
cut into streams that run side by side: stream s has experts of its own, and each of its tokens takes the first of its
recorded choices, so that 8 streams of a trace with 32 experts are a layer of 256 that chooses 8. The first half of the
steps fills the slots, the second is measured. Each measured step runs in turn, some times over with the same experts
missing, and the least time of each counts:

    forward    with what is resident; the missing experts are read
    compute    the same call again, with its experts resident (where they fit the slots)
    read       the records that the forward has read, into the same slots, by as many threads in requests of that size
    mapped     the same kernels on a mapping of the same file

The memory of the process is limited by RLIMIT_DATA, and the slots take what the process leaves of it. Reads are
direct: the page cache holds nothing. The mapping may have as many bytes of the page cache as there are slots; before
each of its calls the least recently used experts make room, which is not counted: nothing is charged for reclaim.
Steps that need more experts than fit are not run on it. The outputs of both are compared bit for bit.
"""

import argparse
import ctypes
import math
import mmap
import os
import resource
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import about, parser_of, with_output, write
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.experts.cpu_native import experts as experts_of_cpu
from moe_mk.experts.cpu_native.paged import NativeCache, PagedExperts, RecordMemory
from moe_mk.experts.paged import memory_of
from moe_mk.experts.residency import POLICIES, READERS
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import on_huge_pages
from moe_mk.kernels.native.prepared import ExpertsCall
from moe_mk.lab.cli.fit import bytes_of
from moe_mk.lab.plan.residency import Machine, Recorded, Step, simulate
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_store import PIECE, ExpertStore
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights
from moe_mk.weights.layer_weights import LayerWeights, LoadFacts

BLOCK, CPU = 128, torch.device("cpu")
SPARE = 200 << 20
"""Of the memory, what is left for buffers of a call and the checks."""
LEAST_STEPS = 8
POLICY = "decayed"


def routing_of(trace: RoutingTrace, experts: int) -> Tensor:
    """Ids [T, K] of consecutive tokens of a layer with so many experts; see the head of this file."""
    own = trace.facts.num_experts
    if experts % own:
        raise SystemExit(f"--experts {experts} is no multiple of the {own} experts of the trace")
    by_layer = [torch.cat([e.ids_TK for e in trace.forwards() if e.layer == layer]) for layer in trace.layers]
    if experts == own:
        return by_layer[0].to(torch.int32)
    streams = experts // own
    first_R = torch.cat(by_layer)[:, 0].to(torch.int32)
    length = len(first_R) // streams
    ids_SK = first_R[: length * streams].view(streams, length).T
    return (ids_SK + torch.arange(streams, dtype=torch.int32, device="cpu") * own).contiguous()


def layer_of(options: argparse.Namespace, experts: int, top_k: int, residency: dict[str, Any] | None) -> MoELayer:
    model = {
        "num_experts": experts, "hidden_size": options.hidden, "moe_intermediate_size": options.inter,
        "num_shared_experts": 0, "quant": {"weights": "fp8_block"},
    }  # fmt: skip
    kernel = {"experts": "cpu_native", "activations": "plain", "max_num_tokens": 256, "residency": residency}
    return MoELayer(MoEConfig.parse({"model": model, "router": {"top_k": top_k}, "kernel": kernel}, "benchmark"))


def weights_of(options: argparse.Namespace, experts: int) -> LayerWeights:
    """Random experts. Their values are windows of one pool of twice the size of an expert: no second copy in memory."""
    draw, hidden, inter = torch.Generator(CPU).manual_seed(0), options.hidden, options.inter
    size = 3 * hidden * inter
    codes = torch.randint(256, (2 * size,), dtype=torch.uint8, generator=draw, device=CPU)
    pool = (codes & 0xBF).view(torch.float8_e4m3fn)  # none is NaN, or larger than 2
    scales = torch.rand(2 * size // BLOCK**2, generator=draw, device=CPU) * 0.01 + 0.01

    def slot(expert: int) -> SlotWeights:
        start, found = expert * (size // experts) // 64 * 64, []
        for rows, columns in ((inter, hidden), (inter, hidden), (hidden, inter)):
            count = rows * columns
            values = pool[start : start + count].view(rows, columns)
            of_blocks = scales[start // BLOCK**2 :][: count // BLOCK**2].view(rows // BLOCK, columns // BLOCK)
            found.append(QuantTensor(values, of_blocks, FP8_128x128))
            start += count
        return SlotWeights(*found)

    facts = LoadFacts("random", 0, "", "", tuple(range(experts)), 0, 1, 0, ())
    gate_EH = torch.zeros(experts, hidden, dtype=torch.bfloat16, device=CPU)
    return LayerWeights(
        gate_EH, None, None, MappedExpertWeights(tuple(slot(e) for e in range(experts)), FP8_128x128), facts
    )


class MappedRecords:
    """All records as a mapping of the store's file, of which the page cache holds the most recently used."""

    def __init__(self, cache: NativeCache, num_bytes: int) -> None:
        layout, store = cache.layout, cache.store
        self._fd = os.open(store.path, os.O_RDONLY)
        self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        size, count = layout.num_bytes, store.num_experts
        self._first = len(self._map) - size * count
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)
        self._address, self._size = whole.data_ptr() + self._first, size
        self.matrices = layout.matrices(whole[self._first :].view(count, size))
        self._used: OrderedDict[int, None] = OrderedDict()
        self._room = num_bytes // size
        self.drop(range(count))

    def make_room(self, experts: Sequence[int]) -> list[int] | None:
        """Evict the least recently used so that these fit; returns those not yet there. None if they never fit."""
        if len(experts) > self._room:
            return None
        missing = [expert for expert in experts if expert not in self._used]
        for expert in experts:
            self._used[expert] = None
            self._used.move_to_end(expert)
        gone = []
        while len(self._used) > self._room:
            gone.append(self._used.popitem(last=False)[0])
        self.drop(gone)
        return missing

    def drop(self, experts: Iterable[int]) -> None:
        """Evict these from the mapping and from the page cache."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for expert in experts:
            madvise(self._address + expert * self._size, self._size, mmap.MADV_DONTNEED)
            os.posix_fadvise(self._fd, self._first + expert * self._size, self._size, os.POSIX_FADV_DONTNEED)


class Disk:
    """Reads of records and nothing else."""

    def __init__(self, store: ExpertStore, cache: NativeCache, native: Native) -> None:
        self._store, self._threads = store, ThreadPoolExecutor(READERS)
        memory = RecordMemory(native, on_huge_pages(1, cache.record_bytes))
        memory.add(0)
        self.record, self._cache = memory_of(memory.records_SB[0]), cache

    def seconds(self, experts: Sequence[int]) -> float:
        """The time to read these records into their slots; those that have none any more into memory of its own."""
        slots, held = self._cache.slot_of, self._cache.records_SB
        into = {expert: memory_of(held[slots[expert]]) if expert in slots else self.record for expert in experts}
        began = time.perf_counter()
        parts = ((expert, start) for expert in experts for start in self._store.pieces())
        for each in [self._threads.submit(self._store.read_piece, *part, into[part[0]]) for part in parts]:
            each.result()
        return time.perf_counter() - began


Call = tuple[Tensor, Tensor, Tensor]
"""Tokens, weights and ids, as of `forward_routed`."""
WAYS = ("forward", "compute", "read", "mapped")


def summary(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Means a step, and a ratio over the steps that read something; a time of a step that was not run is NaN."""
    of = {name: np.array([step[name] for step in steps]) for name in ("experts", "reads", *WAYS)}
    both = (of["reads"] > 0) & ~np.isnan(of["mapped"])
    means = {f"{way}_ms": round(1e3 * np.nanmean(of[way]), 3) if np.isfinite(of[way]).any() else None for way in WAYS}
    ratio = round(of["mapped"][both].sum() / of["forward"][both].sum(), 3) if both.any() else None
    counts = {name: round(of[name].mean(), 2) for name in ("experts", "reads")}
    return {"steps": len(steps), **counts, **means, "mapped_over_forward": ratio}


class Bench:
    """One layer with its mapping, its disk and the resident experts of a step."""

    def __init__(self, options: argparse.Namespace, top_k: int) -> None:
        self.options, self.experts, self.top_k = options, options.experts, top_k
        self.weights = weights_of(options, self.experts)
        each = self.weights.experts.slots[0].num_bytes
        taken = _data_bytes() + SPARE
        slots = min((options.memory - taken) // each, self.experts)
        if slots < 1:
            raise SystemExit(f"--memory {options.memory} leaves no room for an expert: {taken} are taken already")
        began = time.perf_counter()
        sizes = f"random experts {options.hidden} {options.inter} {self.experts}"
        experts_of_cpu.digest = lambda _: sha256(sizes.encode()).hexdigest()  # a seed makes them: no hash of 11 GB
        residency = {"slots": slots, "store": str(options.folder.resolve()), "policy": POLICY}
        self.layer = layer_of(options, self.experts, self.top_k, residency)
        self.layer.take(self.weights)
        self.loaded_s = time.perf_counter() - began
        paged = self.layer.state.experts.weights
        assert isinstance(paged, PagedExperts)
        self.paged, self.cache = paged, paged.cache
        self.slots, self.each = slots, self.cache.layout.num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self.native: Native = self.layer.kernel.experts.native
        self.disk = Disk(self.cache.store, self.cache, self.native)
        self.draw = torch.Generator(CPU).manual_seed(1)
        self.differences = self.compared = 0
        self.cache.store._verified[:] = b"\1" * self.experts  # as in a process that has read all of them before

    def run(self, ids: list[Tensor]) -> list[dict[str, float]]:
        """Every step in turn, from empty slots; returns experts, reads and the least seconds of the second half."""
        cache, steps = self.cache, list[dict[str, float]]()
        cache.clear()
        cache.policy = POLICIES[POLICY](self.experts)
        mapping = MappedRecords(cache, self.slots * self.each)
        for number, ids_TK in enumerate(ids):
            x_TH = torch.randn(len(ids_TK), self.options.hidden, generator=self.draw, device=CPU).bfloat16()
            weights_TK = torch.rand(ids_TK.shape, generator=self.draw, device=CPU) + 0.5
            call, experts = (x_TH, weights_TK, ids_TK), torch.unique(ids_TK).tolist()
            missing, before = [e for e in experts if e not in cache.slot_of], cache.reads
            forward, y_TH = self._forward(call)
            missed = cache.reads - before
            read = missing + [e for e in experts if e not in missing][: missed - len(missing)]  # used, evicted, read
            not_mapped = mapping.make_room(experts)
            if number < len(ids) // 2:
                continue
            times: dict[str, list[float]] = {way: [] for way in WAYS} | {"forward": [forward]}
            fits = set(experts) <= set(cache.slot_of)
            for again in range(self.options.rounds if fits else 1):
                with self._unseen():
                    if again:
                        cache.free.extend(cache.slot_of.pop(expert) for expert in missing)
                        times["forward"].append(self._forward(call)[0])
                    if fits:
                        times["compute"].append(self._forward(call)[0])
                times["read"].append(self.disk.seconds(read))
                if not_mapped is not None:
                    mapping.drop(not_mapped)
                    took, expected_TH = self._mapped(call, mapping)
                    times["mapped"].append(took)
                    self.compared += 1
                    self.differences += not torch.equal(y_TH, expected_TH)
            least = {way: min(each, default=math.nan) for way, each in times.items()}
            steps.append({"experts": len(experts), "reads": missed, **least})
        return steps

    def _forward(self, call: Call) -> tuple[float, Tensor]:
        began = time.perf_counter()
        y_TH = self.layer.forward_routed(*call)
        return time.perf_counter() - began, y_TH

    def _mapped(self, call: Call, mapping: MappedRecords) -> tuple[float, Tensor]:
        x_TH, weights_TK, ids_TK = call
        experts = ExpertsCall(self.native, *mapping.matrices, None, next(iter(self.paged.calls))[0])
        began = time.perf_counter()
        y_TH = experts(x_TH, None, ids_TK, weights_TK, None, torch.get_num_threads())
        return time.perf_counter() - began, y_TH

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Calls that neither the policy nor the counts see."""
        cache = self.cache
        kept = cache.policy, cache.uses, cache.hits, cache.reads
        cache.policy = POLICIES["lru"](self.experts)
        yield
        cache.policy, cache.uses, cache.hits, cache.reads = kept


def larger_than_memory(options: argparse.Namespace) -> dict[str, Any]:
    """The steps of the trace; prints a line for each number of tokens."""
    ids_RK = routing_of(RoutingTrace.read(options.trace), options.experts)
    bench = Bench(options, ids_RK.shape[1])
    facts: dict[str, Any] = {
        "experts": bench.experts, "top_k": bench.top_k, "expert_bytes": bench.each, "slots": bench.slots,
        "store_bytes": bench.cache.store.path.stat().st_size, "load_s": bench.loaded_s, "steps": [],
    }  # fmt: skip
    print(
        f"{bench.experts} experts of {bench.each / 1e6:.1f} MB, {facts['store_bytes'] / 1e9:.2f} GB; {bench.slots} "
        f"slots; loaded in {bench.loaded_s:.0f} s",
        flush=True,
    )
    for tokens in options.tokens:
        ids = list(ids_RK.split(tokens))[: 2 * max(options.steps // tokens, LEAST_STEPS)]
        ids = [each for each in ids if len(each) == tokens]
        steps: list[Step] = [[tuple(torch.unique(each).tolist())] for each in ids]
        recorded, machine = Recorded(steps, bench.experts, bench.top_k), Machine(bench.each, disk=1e9, memory=2e10)
        found = {"tokens": tokens, "policy": POLICY, **summary(bench.run(ids))}
        for name, policy in (("simulated_reads", POLICY), ("belady_reads", "belady")):
            simulated = simulate(recorded, machine, bench.slots, policy)
            found[name] = simulated.reads / len(simulated.seconds)
        facts["steps"].append(found)
        print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts |= {"data_bytes": _data_bytes(), "peak_rss_bytes": peak * 1024, "compared_with_mapping": bench.compared}
    facts["differences_from_mapping"] = bench.differences
    print(f"{bench.differences} of {bench.compared} outputs differ from the mapping")
    return facts


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "VmStk")))


def main() -> None:
    parser = parser_of(__doc__, hidden=7168, inter=2048)
    parser.add_argument("trace", type=Path, help="routing of one rank")
    parser.add_argument("--experts", type=int, default=256, help="a multiple of those of the trace")
    parser.add_argument("--memory", type=lambda text: bytes_of("--memory", text), default=3_000_000_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16], help="of a step")
    parser.add_argument("--steps", type=int, default=100, help="measured tokens; as many before them fill the slots")
    parser.add_argument("--rounds", type=int, default=3, help="of a measured step; the least time of each counts")
    parser.add_argument("--folder", type=Path, default=Path("build/stores"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = with_output(parser, "--json").parse_args()
    torch.set_num_threads(options.threads)
    facts: dict[str, Any] = {
        **about(options),
        "threads": options.threads,
        "limit": f"RLIMIT_DATA of {options.memory} bytes; reads with O_DIRECT, {READERS} threads, {PIECE} bytes each",
    }
    with torch.no_grad():
        facts["measured"] = larger_than_memory(options)
    facts["load at the end"] = os.getloadavg()
    write(options.json, facts)


if __name__ == "__main__":
    main()
