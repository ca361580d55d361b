"""Freeze the bits of what the library computes, and compare them with a later state of the code.

python tools/behaviour.py record FILE       write the digests as JSON
python tools/behaviour.py compare FILE      compute them again; print what differs as (name, old, new) and exit 1

A digest is the SHA-256 of outputs (dtype, shape, bytes): transports, experts, pairs, whole layers, routers, number
formats, written checkpoints, real processes. They depend on the processor, on torch and on the number of threads, which
are kept as the `machine` of a record: where it differs, nothing is compared and the program exits 2. Decisions, prices
and what verbs print are recorded by tests: tests/oracle/golden.yaml, tests/architecture/behaviour.json, tests/cli.

One core computes everything in about two minutes. The code under test is the `moe_mk` that Python finds.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import moe_mk
from moe_mk import DeepseekV3MoE, MoELayer, ParallelGroups, UnsupportedError
from moe_mk.experts import EXPERTS
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.cli import app
from moe_mk.layer import SequenceParallelMoE
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.quant import BF16, FP32, SCHEMES, Plain, QuantScheme
from moe_mk.router import Router, grouped_topk, topk
from moe_mk.runner import run_dual

# Everything imported from deeper than a room; corrected here when modules move.
from moe_mk.flight import wait  # isort: skip
from moe_mk.lab.training.router import route_with_capacity  # isort: skip
from moe_mk.lab.training.router import noisy_topk  # isort: skip
from moe_mk.lab.testing.cases import hostile_routings  # isort: skip
from moe_mk.lab.testing.on_ranks import (  # isort: skip
    outputs_of_experts, outputs_of_transport, outputs_on_processes, run_ranks,
)  # fmt: skip
from moe_mk.lab.testing.transports import each_rank, fly_together, run_together, virtual_groups, world_of  # isort: skip
from tests.conformance import test_pairs as conformance  # isort: skip
from tests.support.formats import FORMATS, HIDDEN, INNER, MORE_FORMATS, MORE_PAIRS  # isort: skip
from tools.pages import of_this_repository  # isort: skip

ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
"""Of verbs."""
PATIENCE_S = 600.0
"""What processes may take on a machine with other work."""
WIRES = {
    "plain": ["fp32", "bf16"],
    "fp8": ["fp8_1x128", "fp8_1x128_ue8m0"],
    "int8": ["int8_token"],
    "mxfp8": ["mxfp8"],
    "nvfp4": ["nvfp4_1x16"],
}
"""Schemes of each family that a transport declares it carries."""
Entry = tuple[str, Callable[[], object]]
"""A name, and what computes its value: tensors, or JSON of what has none."""


def bits(folder: Path) -> Iterator[Entry]:
    """Everything that computes. folder: empty, for checkpoints."""
    yield from transports()
    yield from experts()
    yield from pairs()
    yield from schemes()
    yield from routers()
    yield from checkpoints(folder)
    yield from layers(folder)
    yield from processes(folder)


def transports() -> Iterator[Entry]:
    """Every transport that can run here, in every scheme it carries, around experts that return what they get."""
    for name, kind in sorted(of_this_repository(PREPARE_FINALIZE)):
        traits = kind.traits
        wires = [(family, wire) for family in sorted(traits.wire) for wire in WIRES[family]]
        for ranks, (_, wire) in product((1, 2, 4), wires):
            dtype = FP32 if wire == "fp32" else BF16
            fits = traits.min_ranks <= ranks <= (traits.max_ranks or ranks)
            seldom = traits.blocking and ranks == 4 and wire not in ("bf16", "fp8_1x128")
            if fits and not seldom and serves(kind, ranks, dtype):
                call = partial(outputs_of_transport, name, ranks, SCHEMES[wire], dtype)
                yield f"transport/{name}/{ranks}/{wire}", call
    for name, wire in product(("hierarchical", "one_sided_network"), ("bf16", "fp8_1x128")):
        call = partial(outputs_of_transport, name, 4, SCHEMES[wire], BF16, ranks_per_node=2)
        yield f"transport/{name}/4 on 2 nodes/{wire}", call


def serves(kind: type[PrepareFinalize], ranks: int, dtype: Plain) -> bool:
    """Whether a transport can run on this machine, emulated if need be."""
    form, tokens = next(form for form in FORMATS if form.dtype is dtype), next(iter(kind.traits.tokens))
    asked = form.problem(ep=ranks, tokens=tokens, allow_emulated=True)
    return not {reason.code for reason in kind.reasons_against(asked)} & {"device", "library", "dtype"}


def experts() -> Iterator[Entry]:
    """Every experts backend in every format it reads, over every hostile case and layout."""
    for (name, kind), form in product(sorted(of_this_repository(EXPERTS)), [*FORMATS, *MORE_PAIRS, *MORE_FORMATS]):
        problem = form.problem()
        if not kind.reasons_against(problem):
            compute = problem.activations if form.activations == "checkpoint" else form.dtype
            assert compute is not None
            call = partial(outputs_of_experts, name, problem.weights, form.dtype, compute, (HIDDEN, INNER))
            yield f"experts/{name}/{form}", call


def pairs() -> Iterator[Entry]:
    """Every pair of tests/conformance: the kernel that the oracle hands out, on ranks of one process."""
    yield from ((f"pair/{pair} {pair.tokens}", partial(outputs_of_pair, pair)) for pair in conformance.PAIRS)


def outputs_of_pair(pair: conformance.Pair) -> list[Tensor]:
    """Every case that its test tries; one also with other work and as two micro-batches."""
    outputs: list[Tensor] = []
    for name in conformance.cases_of(pair.ranks):
        if pair.every_case or name in conformance.IN_EVERY_PAIR:
            case, tokens, logits, _ = conformance.asked(pair.form, pair.ranks, pair.tokens, pair.inside, name)
            ranks = conformance.Ranks(pair.decision, case, conformance.stored(pair.form))
            outputs += fly_together(ranks.world, ranks.flights(tokens, logits))
            if name == "uneven":
                outputs += conformance.run_with(ranks, tokens, logits) + conformance.run_dual(ranks, tokens, logits)
    return outputs


def schemes() -> Iterator[Entry]:
    """What every number format makes of a matrix and of rows."""

    def there_and_back(scheme: QuantScheme) -> list[Tensor]:
        x = drawn(64, 256, seed=2)
        x[3] *= 1e4
        x[5] = 0.0
        q = scheme.quantize(x)
        parts = [part for part in (q.values, q.scales, q.global_scale) if part is not None]
        return [*parts, q.dequantize(torch.float32), q.dequantize(torch.bfloat16)]

    yield from ((f"scheme/{name}", partial(there_and_back, scheme)) for name, scheme in SCHEMES.items())


def routers() -> Iterator[Entry]:
    """Every choice of experts: ties, infinities and one token among the logits."""
    logits_TE = drawn(33, 16, seed=5)
    logits_TE[1], logits_TE[2, 3:9], logits_TE[3, 4] = 0.25, 2.0, -torch.inf
    bias_E = drawn(16, seed=6) * 0.3 - 0.8
    for scoring, renormalize, bias in product(("sigmoid", "softmax", "sqrtsoftplus"), (True, False), (None, bias_E)):
        what = f"{scoring}{' renormalized' * renormalize}{' bias' * (bias is not None)}"
        yield f"router/topk/{what}", partial(topk, logits_TE, 4, scoring, renormalize, 2.5, bias)
        for dtype in ("float32", "model"):
            router = Router(4, 4, 2, scoring, renormalize, 2.5, "model" if dtype == "model" else "float32")
            yield f"router/Router/{what} {dtype}", partial(router, logits_TE, bias)
        for score_dtype in (torch.float32, torch.bfloat16):
            chosen = partial(
                grouped_topk, logits_TE, 4, 4, 2, scoring, bias, renormalize, 1.0, score_dtype=score_dtype
            )  # fmt: skip
            yield f"router/grouped_topk/{what} {score_dtype}".replace("torch.", ""), chosen
    x_TH, gate_EH, noise_EH = drawn(9, 32, seed=1), drawn(16, 32, seed=2), drawn(16, 32, seed=3)
    for std in (0.0, 1.0):
        draw = torch.Generator().manual_seed(4)
        yield f"router/noisy_topk/{std}", partial(noisy_topk, x_TH, gate_EH, noise_EH, 3, noise_std=std, generator=draw)
    for capacity in (0, 3, 9):
        scores_TE = logits_TE.softmax(-1)
        yield f"router/capacity/{capacity}", partial(route_with_capacity, scores_TE, 3, capacity, 5)


SMALL = CheckpointShape(
    num_experts=16, top_k=4, num_groups=4, top_k_groups=2, hidden_size=256, intermediate_size=128, quant="fp8"
)  # fmt: skip
SHAPES = {
    **{
        quant: replace(SMALL, quant=quant)
        for quant in ("fp8", "bf16", "fp8_channel", "int8", "mxfp8", "mxfp4", "nvfp4")
    },
    "ue8m0": replace(SMALL, power_of_two_scales=True),
    "wide": replace(SMALL, intermediate_size=256, num_shared_experts=2),
    "unshared": replace(SMALL, num_shared_experts=0),
    "hashed": replace(SMALL, num_groups=1, top_k_groups=1, hash_vocabulary=50, routed_scaling_factor=1.5),
}
"""Checkpoints that are written and loaded, by the names of their folders."""
LAYER = 3


def checkpoints(folder: Path) -> Iterator[Entry]:
    def written(name: str) -> dict[str, str]:
        write_checkpoint(folder / name, SHAPES[name], threads=1)
        return files_in(folder / name)

    def converted(to: str) -> dict[str, str]:
        words = ("convert", folder / "fp8", folder / f"to {to}", "--to", to)
        done = CliRunner(env=ENVIRONMENT).invoke(app, [str(word) for word in words])
        return {"exit": str(done.exit_code), **files_in(folder / f"to {to}")}

    yield from ((f"checkpoint/{name}", partial(written, name)) for name in SHAPES)
    yield from ((f"convert/fp8 to {to}", partial(converted, to)) for to in ("bf16", "int8", "mxfp4", "nvfp4"))


def files_in(folder: Path) -> dict[str, str]:
    """Digest of each file, by name."""
    return {path.name: sha256(path) for path in sorted(folder.glob("*.*"))}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def layers(folder: Path) -> Iterator[Entry]:
    """Whole layers from the written checkpoints: one rank, ranks of a grid, and settings that change the way."""
    one: dict[str, dict[str, Any]] = {
        "auto": {},
        **{f"{e} {a}": {"experts": e, "activations": a} for e, a in product(
            ("reference", "torch_cpu", "cpu_native", "reference_monolithic"), ("plain", "checkpoint"))},
        "batch invariant": {"experts": "cpu_native", "batch_invariant": True},
        "plain gate": {"experts": "cpu_native", "fused_router": False},
        "router in bf16": {"experts": "cpu_native", "router_dtype": "model"},
        "tiles": {"experts": "cpu_native", "tiles": 3},
    }  # fmt: skip
    for (name, settings), shape in product(one.items(), ("fp8", "hashed")):
        yield f"layer/{shape}/1/{name}", partial(outputs_of_one, folder / shape, **settings)
    for shape, (dtype, experts) in product(SHAPES, ((torch.bfloat16, "auto"), (torch.float32, "torch_cpu"))):
        yield f"layer/{shape}/1/{experts} {dtype}", partial(outputs_of_one, folder / shape, dtype, experts=experts)
    grids = [(2, 1), (4, 1), (2, 2), (1, 2)]
    for (ep, tp), shape in product(grids, ("wide", "hashed", "bf16")):
        if tp > 1 and shape == "hashed":
            continue
        yield f"layer/{shape}/ep{ep} tp{tp}/auto", partial(outputs_of_grid, folder / shape, ep, tp)
    ways: dict[str, dict[str, Any]] = {
        **{name: {"prepare_finalize": name} for name in (
            "all_gather", "all_to_all", "all_to_all_v", "all_to_all_p2p", "one_sided", "one_sided_network")},
        "hierarchical": {"prepare_finalize": "hierarchical", "ranks_per_node": 2},
        "relayed in parts": {"prepare_finalize": "hierarchical", "ranks_per_node": 2, "relay_tokens": 2},
        "replicated": {"prepare_finalize": "replicated", "tokens": "replicated"},
        "inside": {"experts": "reference_monolithic"},
        "wire plain": {"prepare_finalize": "all_to_all", "wire": "plain"},
        "wire checkpoint": {"prepare_finalize": "one_sided", "wire": "checkpoint", "activations": "checkpoint"},
        "tiles": {"prepare_finalize": "all_to_all", "tiles": 3},
        "tiles one_sided": {"prepare_finalize": "one_sided", "tiles": 2},
        "round_robin": {"placement": "round_robin"},
        "torch_cpu": {"experts": "torch_cpu"},
        "reference": {"experts": "reference", "activations": "checkpoint"},
    }  # fmt: skip
    for (name, settings), ep in product(ways.items(), (2, 4)):
        if ep == 4 or "ranks_per_node" not in settings:
            yield f"layer/fp8/ep{ep} tp1/{name}", partial(outputs_of_grid, folder / "fp8", ep, 1, **settings)
    yield "layer/fp8/ep2 tp1/sequence parallel", partial(outputs_of_sequence_parallel, folder / "fp8")
    yield "layer/fp8/ep2 tp1/another placement", partial(outputs_of_placement, folder / "fp8")


COUNTS = (0, 1, 5, 33)
"""Tokens of a call."""


def load(
    path: Path, groups: ParallelGroups | None = None, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> MoELayer:
    settings = {"max_num_tokens": 64, "timeout_s": PATIENCE_S} | settings
    return DeepseekV3MoE.from_checkpoint(path, LAYER, groups=groups, dtype=dtype, **settings)


def outputs_of_one(path: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> list[object]:
    """Called, as a flight, beside another micro-batch; what was routed and counted."""
    layer, made = load(path, None, dtype, **settings), list[object]()
    for count in COUNTS:
        x_TH, ids_T = tokens(count, dtype), ids(count)
        made += [layer(x_TH, ids_T), wait(layer.steps(x_TH, token_ids_T=ids_T)), layer.route(x_TH, ids_T)]
    flights = [layer.steps(tokens(count, dtype), token_ids_T=ids(count)) for count in COUNTS]
    return [*made, *run_dual(flights), layer.expert_load]


def outputs_of_grid(path: Path, ep: int, tp: int, **settings: Any) -> list[object]:
    """Two calls of every rank's layer: uneven tokens, then one token of the first rank."""
    name = settings.get("prepare_finalize", "auto")
    if name != "auto" and PREPARE_FINALIZE[name].traits.blocking:
        return outputs_of_threads(path, ep, **settings)
    built = [load(path, groups, **settings) for groups in virtual_groups(ep, tp)]
    made, same = list[object](), settings.get("tokens") == "replicated"
    for most in (7, 1):
        counts = [most if same else brought(rank // tp, most) for rank in range(ep * tp)]
        given = [tokens(count, seed=0 if same else rank // tp) for rank, count in enumerate(counts)]
        made += run_together(built, given, [ids(count) for count in counts])
    return [*made, *(layer.expert_load for layer in built)]


def outputs_of_threads(path: Path, ep: int, **settings: Any) -> list[object]:
    """The same where calls of a transport wait for peers."""
    world = world_of(PREPARE_FINALIZE[settings["prepare_finalize"]].traits, ep)
    jobs = [partial(load, path, ParallelGroups(ep=comm), **settings) for comm in world.communicators()]
    built, made = each_rank(world, jobs), list[object]()
    for most in (7, 1):
        flights = [layer.steps(tokens(brought(rank, most), seed=rank)) for rank, layer in enumerate(built)]
        made += fly_together(world, flights)
    return [*made, *(layer.expert_load for layer in built)]


def brought(rank: int, most: int) -> int:
    """Tokens of a rank: all, none, one or a few; of one token only the first rank's."""
    return (most, 0, 1, most - 2)[rank % 4] if most > 1 else int(rank == 0)


def outputs_of_sequence_parallel(path: Path) -> list[Tensor]:
    """Ranks that have tokens in common compute each of them once."""
    built = [(load(path, groups), groups.ep) for groups in virtual_groups(2)]
    return run_dual([SequenceParallelMoE(layer, group).steps(tokens(9)) for layer, group in built])


def outputs_of_placement(path: Path) -> list[Tensor]:
    """Before and after experts moved and one got a second copy, read again from the checkpoint."""
    built, made = [load(path, groups, prepare_finalize="all_to_all") for groups in virtual_groups(2)], list[Tensor]()
    given = [tokens(7), tokens(3, seed=1)]
    made += run_together(built, given)
    case = next(case for case in hostile_routings(2, num_experts=16, top_k=4) if case.name == "replicas")
    sources = [load(path, experts="reference") for _ in built]
    for rank, (layer, source) in enumerate(zip(built, sources, strict=True)):
        wanted = enumerate(case.expert_map.local_to_global(rank))
        layer.live.set_placement(case.expert_map, {slot: source.live.read_expert(expert) for slot, expert in wanted})
    return made + run_together(built, given)


def processes(folder: Path) -> Iterator[Entry]:
    """Real processes over gloo: transports alone, whole layers, and the verb `run` with its report."""
    for name in ("all_to_all", "one_sided"):
        yield f"processes/transport/{name}", partial(outputs_on_processes, name, 2)
    yield "processes/layers", lambda: run_ranks(layers_of_rank, 2, str(folder / "fp8"), timeout_s=PATIENCE_S)
    for ranks in (1, 2):
        yield f"processes/run/{ranks}", partial(outputs_of_run, folder, ranks)


def layers_of_rank(rank: int, path: str) -> list[Tensor]:
    """Outputs of one process of a world, of whole layers in several settings."""
    ways: list[dict[str, Any]] = [
        {"prepare_finalize": "all_to_all"},
        {"prepare_finalize": "one_sided"},
        {"prepare_finalize": "one_sided", "experts": "torch_cpu"},
        {"prepare_finalize": "one_sided_network"},
        {"prepare_finalize": "all_to_all", "tiles": 3, "tile_carrier": "thread"},
        {"prepare_finalize": "replicated", "tokens": "replicated"},
    ]
    made = []
    for settings in ways:
        layer = load(Path(path), ParallelGroups(ep=dist.group.WORLD), **settings)
        same = settings.get("tokens") == "replicated"
        made += [
            layer(tokens(count, seed=0 if same else rank)) for count in ((7, 1) if same else ((7, 1), (3, 0))[rank])
        ]
    return made


def outputs_of_run(folder: Path, ranks: int) -> object:
    """The report of `moe-mk run` without what a clock measured, and what it recorded of the routing."""
    report, recorded = folder / f"run{ranks}.json", folder / f"run{ranks}.safetensors"
    words = ("--tokens", "6", "--repeats", "1", "--out", report, "--record-trace", recorded)
    done = subprocess.run(
        [sys.executable, "-m", "moe_mk", "run", *map(str, (folder / "fp8", "--ranks", ranks, *words))],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(report.read_text(encoding="utf-8"))
    kept = ("tokens", "expert_load", "sent_bytes", "sent_bytes_by_link")
    return {key: found[key] for key in kept} | {"trace": digest(load_file(recorded))}


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return drawn(count, SMALL.hidden_size, seed=100 + seed).to(dtype)


def ids(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64) * 7 % 50


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def digest(value: object) -> object:
    """SHA-256 over dtype, shape and bytes of all tensors in a value; a value without any is kept as it is."""
    found = list(tensors_in(value))
    if not found:
        return value
    total = hashlib.sha256()
    for tensor in found:
        flat = tensor.detach().cpu().contiguous()
        total.update(f"{flat.dtype} {tuple(flat.shape)} ".encode())
        total.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors of nested sequences, mappings, routings and other dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from tensors_in(value[key])
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def machine() -> dict[str, str]:
    """What bits depend on beside the code."""
    model = (
        re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else None
    )
    return {
        "processor": model[1] if model else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def computed(match: str = "") -> dict[str, Any]:
    """A record. match: a regular expression; only entries with a matching name are recorded."""
    torch.set_num_threads(1)
    made, began = dict[str, object](), time.perf_counter()
    print(f"behaviour of {Path(moe_mk.__file__ or '').parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="behaviour-") as place:
        for name, compute in bits(Path(place)):
            if re.search(match, name):
                torch.manual_seed(0)
                torch.set_num_threads(1)  # verbs change it
                made[name] = value_of(name, compute)
            elif name.startswith("checkpoint/"):
                compute()  # layers are loaded from it
    print(f"{len(made)} values in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return dict(json.loads(json.dumps({"machine": machine(), "bits": made})))


def value_of(name: str, compute: Callable[[], object]) -> object:
    """The digest of an entry; an error is a value too, by its type."""
    try:
        with torch.no_grad():
            return digest(compute())
    except Exception as error:
        if not isinstance(error, UnsupportedError):
            print(f"{name} raises", *traceback.format_exception(error)[-3:], file=sys.stderr)
        return f"raises {type(error).__name__}"


def differences(old: object, new: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Leaves that differ, by their path."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key, "-"), new.get(key, "-"), f"{name} > {key}" if name else key)
    elif old != new:
        yield name, old, new


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--match", default="", help="a regular expression: only entries whose names have it")
    options = parser.parse_args(arguments)
    if options.what == "record":
        text = json.dumps(computed(options.match), indent=1, sort_keys=True)
        options.file.write_text(text + "\n", encoding="utf-8")
        return 0
    old = json.loads(options.file.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    if old["machine"] != machine():
        print(f"nothing is compared: recorded on {old['machine']}, this is {machine()}", file=sys.stderr)
        return 2
    recorded = {name: value for name, value in old["bits"].items() if re.search(options.match, name)}
    found = list(differences(recorded, computed(options.match)["bits"]))
    for name, was, is_now in found:
        print(f"{name}\n  was {was}\n  is  {is_now}")
    print(f"{len(found)} difference{'s' * (len(found) > 1)}" if found else "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    from tools import behaviour  # ranks that are processes find `layers_of_rank` by this name

    sys.exit(behaviour.main())
