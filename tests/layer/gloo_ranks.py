"""What each process of the gloo world does; results are tensors, numbers and texts."""

import importlib.util
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from moe_mk import CommError, DeepseekV3MoE, MoEConfig, ParallelGroups
from moe_mk.comm import rank_groups
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.flight import wait
from moe_mk.lab.cli.measure import own_seconds
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.testing.transports import yield_points_of
from moe_mk.layer import SequenceParallelMoE, swap_backends
from moe_mk.oracle import Parts, assemble, select
from moe_mk.trace.recorder import Recorder
from moe_mk.weights.expert_weights import ExpertWeights
from tests.support.formats import EXPERTS, HIDDEN, INNER, TOP_K, Format

CPU = torch.device("cpu")
VOCABULARY = 16
"""Of the model in `walk`."""


def form_of(weights: str, activations: str) -> Format:
    from moe_mk.quant import BF16, FP32

    return Format(weights, "float32", FP32 if weights == "fp32" else BF16, activations)


def hostile_cases(rank: int, transport: str, weights: str, activations: str) -> dict[str, dict[str, Any]]:
    """Every hostile case through one transport and the reference experts: output and hops by case."""
    comm = DistributedCommunicator(dist.group.WORLD, timeout_s=30.0)
    return {
        case.name: run_case(rank, comm, number, transport, form_of(weights, activations))
        for number, case in enumerate(hostile_routings(4, num_experts=EXPERTS, top_k=TOP_K))
    }


def run_case(rank: int, comm: Any, number: int, transport: str, form: Format) -> dict[str, Any]:
    flight, hops = case_flight(rank, comm, number, transport, form)
    return {"y": wait(flight), "hops": hops}


def case_flight(rank: int, comm: Any, number: int, transport: str, form: Format) -> tuple[Any, list[str]]:
    """One rank's part of one case, on any communicator of four ranks."""
    tokens = "replicated" if transport == "replicated" else "sharded"
    case = hostile_routings(4, num_experts=EXPERTS, top_k=TOP_K)[number]
    case = case.replicated() if tokens == "replicated" else case
    decision = select(form.problem(ep=4, tokens=tokens, prepare_finalize=transport, experts="reference"))
    kernel = assemble(decision, Parts(case.expert_map, CPU, comm))
    draw = torch.Generator().manual_seed(0 if tokens == "replicated" else rank)
    x_TH = torch.randn((case.num_tokens[rank], HIDDEN), generator=draw).to(form.dtype.dtype)
    stack = random_experts(form.problem().weights, EXPERTS, HIDDEN, INNER, CPU)
    own = torch.tensor(case.expert_map.local_to_global(rank))
    weights = ExpertWeights(stack.w13[own], stack.w2[own])
    hops: list[str] = []
    return yield_points_of(kernel.steps(x_TH, case.routings[rank], weights), hops), hops


def layer_forward(
    rank: int, path: str, tokens: list[Tensor], grid: str, layer: int, dtype: torch.dtype, settings: dict[str, Any]
) -> dict[str, Any]:
    """One forward of a layer on a grid of the four ranks."""
    built = DeepseekV3MoE(MoEConfig.from_hf(path, **settings), dtype=dtype, groups=_groups(rank, grid), name="layer 3")
    built.load_from_safetensors(path, layer)
    recorder = built.spans.recorder = Recorder()
    y_TH = built(tokens[rank])
    hops: list[str] = []
    again = wait(yield_points_of(built.steps(tokens[rank]), hops))
    started = sorted(recorder.spans, key=lambda span: span.start)
    return {
        "y": y_TH,
        "again": again,
        "hops": hops,
        "ids": built.route(tokens[rank]).ids_TK,
        "load": built.expert_load.clone(),
        "slots": built.expert_map.num_slots(built.ep.rank),
        "ep_bytes": dict(built.ep.traffic.bytes_by_phase),
        "ep_calls": dict(built.ep.traffic.calls_by_phase),
        "tp_calls": dict(built.tp.traffic.calls_by_phase),
        "wire": built.decision.wire.name,
        "stages": [span.stage for span in started],
        "own": sum(own_seconds(recorder).values()),
        "open": _union([(span.start, span.end) for span in started]),
    }


def _union(intervals: list[tuple[float, float]]) -> float:
    """Seconds in which at least one interval was open."""
    total, reached = 0.0, float("-inf")
    for start, end in intervals:
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _groups(rank: int, grid: str) -> Any:
    if grid == "ep4":
        return ParallelGroups(ep=dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    if grid == "mesh":
        return mesh
    return ParallelGroups(ep=mesh.get_group("ep"), tp=mesh.get_group("tp"))


def two_layers(rank: int, path: str, tokens: list[Tensor], layer: int) -> list[Tensor]:
    """Two layers of one process over different groups and with different backends, called in turn."""
    config = MoEConfig.from_hf(path, router_dtype="float32")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    wide = DeepseekV3MoE(
        config.with_(prepare_finalize="all_gather", experts="reference"),
        dtype=torch.float32,
        groups=ParallelGroups(ep=dist.group.WORLD),
    )
    square = DeepseekV3MoE(
        config.with_(prepare_finalize="all_to_all", experts="torch_cpu"), dtype=torch.float32, groups=mesh
    )
    for built in (wide, square):
        built.load_from_safetensors(path, layer)
    return [wide(tokens[rank]), square(tokens[rank // 2]), wide(tokens[rank])]


def walk(rank: int, path: str, pairs: list[list[int]] | None) -> dict[str, Any]:
    """The model of examples/05_nano_engine.py, one block on a grid of two TP and two EP ranks. pairs: two token ids for
    each pair of ranks; None: one process, which searches them, so that the first token of every pair chooses expert 0
    and the second expert 1."""
    engine = import_path(Path(__file__).parents[2] / "examples" / "05_nano_engine.py")
    grid = None if pairs is None else _groups(rank, "grid")
    model = engine.NanoModel.load(Path(path), *(() if grid is None else (grid.ep, grid.tp)))
    layer, entered = model.moe[0], []
    model.moe[0] = lambda x_TH: (entered.append(x_TH), layer(x_TH))[1]

    def block(pair: list[int]) -> Tensor:
        return model.forward([(model.new_cache(), pair)])

    found = []
    for pair in permutations(range(VOCABULARY), 2) if pairs is None else [pairs[rank // 2]] * 2:
        recorder = model.spans.recorder = layer.spans.recorder = Recorder()  # ranks compare notes in the first call
        logits_TV = block(list(pair))
        ids = layer.route(entered[-1]).ids_TK
        started = sorted(recorder.spans, key=lambda span: span.start)
        steps = [span.stage for span in started]
        answer = {"pair": list(pair), "logits": logits_TV, "a": entered[-1], "ids": ids, "steps": steps}
        if pairs is not None or ids.tolist() == [[0], [1]]:
            found.append(answer)
        if pairs is None and len(found) == 2:
            return {"found": found}
    return {**found[-1], "heads": model.heads}


def import_path(file: Path) -> Any:
    """A script as a module, whatever it is called."""
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pipeline(rank: int, path: str, batches: list[list[Tensor]]) -> list[Tensor]:
    """Two stages of two expert-parallel ranks: stage s adds s + 1 times its layer to the rows and passes them on.
    batches: micro-batches of each data-parallel rank."""
    grid = rank_groups(4, pp=2, dp=2)
    ep = dist.new_subgroups_by_enumeration(grid["ep"])[0]  # type: ignore[no-untyped-call]
    stage = next(number for number, ranks in enumerate(grid["ep"]) if rank in ranks)
    (column,) = (ranks for ranks in grid["pp"] if rank in ranks)
    config = MoEConfig.from_hf(path, router_dtype="float32", prepare_finalize="all_to_all")
    built = DeepseekV3MoE(config, dtype=torch.float32, groups=ParallelGroups(ep=ep), name=f"stage {stage}")
    built.load_from_safetensors(path, 0)
    results = []
    for x_TH in batches[grid["ep"][stage].index(rank)]:
        rows_TH = x_TH.clone()
        if stage:
            dist.recv(rows_TH, column[stage - 1])
        rows_TH = rows_TH + (stage + 1) * built(rows_TH)
        if stage + 1 < len(column):
            dist.send(rows_TH, column[stage + 1])
        results.append(rows_TH)
    return results


def with_and_without_chunks(rank: int, path: str, batches: list[Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Layer 3 on four EP ranks whose pairs have the same tokens: each forward whole on both ranks, and in chunks."""
    config = MoEConfig.from_hf(path, router_dtype="float32", **settings)
    built = DeepseekV3MoE(config, dtype=torch.bfloat16, groups=ParallelGroups(ep=dist.group.WORLD), name="layer 3")
    built.load_from_safetensors(path, 3)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    x_TH = batches[rank // 2]
    whole_TH, computed = built(x_TH), int(built.expert_load.sum())
    chunked_TH = SequenceParallelMoE(built, pairs[rank // 2])(x_TH)
    return {"whole": whole_TH, "chunked": chunked_TH, "computed": torch.tensor([computed, built.expert_load.sum()])}


def swap_and_serve(rank: int, path: str, tokens: list[Tensor], transports: list[str]) -> dict[str, Any]:
    config = MoEConfig.from_hf(path, router_dtype="float32", prepare_finalize="all_to_all")
    built = DeepseekV3MoE(config, dtype=torch.float32, groups=ParallelGroups(ep=dist.group.WORLD), name="layer 0")
    built.load_from_safetensors(path, 0)
    outputs, served, reasons = [built(tokens[rank])], [], []
    for transport in transports:
        report = swap_backends(built, tokens[rank], limit=1e-5, prepare_finalize=transport)
        reasons.append(report.reason)
        served.append(built.decision.chosen.prepare_finalize if report.swapped else "rolled back")
        outputs.append(built(tokens[rank]))
    load = int(built.expert_load.sum())
    return {"outputs": outputs, "transports": served, "reasons": reasons, "load": load}


def disagree(rank: int, path: str, layer: int) -> str:
    """Rank 1 was given another top_k: every rank must say so."""
    settings = {"top_k": 3} if rank == 1 else {}
    config = MoEConfig.from_hf(path, router_dtype="float32", **settings)
    built = DeepseekV3MoE(config, dtype=torch.float32, groups=ParallelGroups(ep=dist.group.WORLD), name="layer 0")
    built.load_from_safetensors(path, layer)
    try:
        built(torch.zeros(2, config.model.hidden_size))
    except CommError as problem:
        return str(problem)
    return "no error"
