"""Dispatch and combine through every transport between processes of this machine, in one alternating run.

    python benchmarks/transports.py --ranks 2 4 --tokens 1 8 128 1024 --output benchmarks/results/transports_cpu.json

In each round every transport carries the same tokens out and their rows home, one after the other, so that all meet
the same machine. Ranks begin together and meet nowhere else, as in a layer. A round's time is that of its slowest
rank; the table shows medians. `memcpy` copies the bytes that rank sends to others (rows out, sums home) from one warm
buffer to another, all ranks at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.flight import land
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16
from moe_mk.quant.fp8_block import FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes
from moe_mk.testing.processes import RankWorld
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from moe_mk.trace.clock import now

TRANSPORTS = ("one_sided", "all_to_all", "all_gather")
WIRES: dict[str, QuantScheme] = {"bf16": BF16, "fp8": FP8_1x128}
ROUNDS = {1: 80, 8: 80, 128: 40, 1024: 9}


def main() -> None:
    """Start a world for each number of ranks, measure, print and write."""
    options = parse()
    rows = []
    for ranks in options.ranks:
        with RankWorld(ranks) as world:
            for tokens in options.tokens:
                rounds = options.rounds or ROUNDS.get(tokens, 20)
                setting = (tokens, options.hidden, options.experts, options.top_k, options.wire, rounds)
                per_rank = world.call(measure, *setting, timeout_s=600.0)
                rows.append({"ranks": ranks, "tokens": tokens, "rounds": rounds, **figures(per_rank)})
                print(line(rows[-1]), flush=True)
    if options.output:
        report = {**about(options), "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 1024], help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--wire", choices=WIRES, default="bf16")
    parser.add_argument("--rounds", type=int, default=0, help="0: more for fewer tokens")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(
    rank: int, tokens: int, hidden: int, experts: int, top_k: int, wire: str, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round on one rank, by what was timed. The first rounds are left out."""
    assert dist.group.WORLD is not None
    comm, cpu = DistributedCommunicator(dist.group.WORLD), torch.device("cpu")
    expert_map = ExpertMap.linear(experts, comm.size)
    context = TransportContext(comm, expert_map, expert_map.tables(cpu), WIRES[wire], BF16, hidden, top_k, cpu)
    made = {name: PREPARE_FINALIZE[name](context) for name in TRANSPORTS}
    x_TH, routing = drawn(rank, tokens, hidden, experts, top_k)
    rows = remote_rows(routing, experts // comm.size, rank)
    sent_bytes = rows * (packed_row_bytes(WIRES[wire], hidden, top_k) + row_bytes(BF16, hidden))
    source, target = (torch.ones(sent_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    seconds: dict[str, list[float]] = {}
    warm = max(2, rounds // 5)
    for number in range(rounds + warm):
        outputs = []
        order = TRANSPORTS[number % 3 :] + TRANSPORTS[: number % 3]  # nobody always comes after the same one
        for name in order:
            dist.barrier()
            start = now()
            arrived = land(made[name].prepare(x_TH, routing))
            there = now()
            assert isinstance(arrived, RowTokens)
            y = ExpertOutput(arrived.x_RH.dequantize(torch.bfloat16), OutputStage.REDUCED)
            ready = now()
            home = land(made[name].finalize(y, arrived))
            note(seconds, name, there - start, now() - ready)
            if name != "all_gather":  # there every rank returns every row, asked for or not
                outputs.append(home)
        dist.barrier()
        start = now()
        target.copy_(source)
        seconds.setdefault("memcpy", []).append(now() - start)
        assert torch.equal(outputs[0], outputs[1]), "one_sided and all_to_all must agree bit for bit"
    return {"sent_bytes": [float(sent_bytes)]} | {what: times[warm:] for what, times in seconds.items()}


def drawn(rank: int, tokens: int, hidden: int, experts: int, top_k: int) -> tuple[Tensor, Routing]:
    """Uniform routing, other tokens on each rank."""
    draw = torch.Generator("cpu").manual_seed(rank)
    x_TH = torch.randn((tokens, hidden), generator=draw, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    scores_TE = torch.rand((tokens, experts), generator=draw, dtype=torch.float32, device="cpu")
    weights_TK = torch.full((tokens, top_k), 1.0 / top_k, dtype=torch.float32, device="cpu")
    return x_TH, Routing(scores_TE.topk(top_k).indices.to(torch.int32), weights_TK)


def remote_rows(routing: Routing, experts_of_a_rank: int, rank: int) -> int:
    """Pairs of a token and another rank that holds one of its experts."""
    return sum(len({e // experts_of_a_rank for e in ids} - {rank}) for ids in routing.ids_TK.tolist())


def note(seconds: dict[str, list[float]], name: str, dispatch: float, combine: float) -> None:
    """Keep the two stages of one call and their sum; what the experts would do in between is left out."""
    for what, time in ((f"{name} dispatch", dispatch), (f"{name} combine", combine), (name, dispatch + combine)):
        seconds.setdefault(what, []).append(time)


def figures(per_rank: list[dict[str, list[float]]]) -> dict[str, object]:
    """Medians over rounds of the slowest rank, in milliseconds, and what they are of each other."""
    slowest = {what: [max(times) for times in zip(*(r[what] for r in per_rank), strict=True)] for what in per_rank[0]}
    sent = slowest.pop("sent_bytes")
    middle = {what: median(times) * 1e3 for what, times in slowest.items()}
    return {
        "sent_bytes": int(sent[0]),
        "ms": {what: round(time, 4) for what, time in middle.items()},
        "times_faster": {name: round(middle[name] / middle["one_sided"], 2) for name in TRANSPORTS[1:]},
        "times_memcpy": round(middle["one_sided"] / middle["memcpy"], 2) if middle["memcpy"] else None,
    }


def line(row: dict[str, object]) -> str:
    """One setting for the eye."""
    ms, faster = row["ms"], row["times_faster"]
    assert isinstance(ms, dict) and isinstance(faster, dict)
    parts = [f"ranks {row['ranks']}  tokens {row['tokens']:>5}", f"memcpy {ms['memcpy']:8.3f} ms"]
    parts += [f"{n} {ms[n]:8.3f} ms ({ms[f'{n} dispatch']:.3f} + {ms[f'{n} combine']:.3f})" for n in TRANSPORTS]
    parts += [f"{faster[name]:.2f}x {name}" for name in faster]
    return "   ".join([*parts, f"{row['times_memcpy']}x memcpy"])


def about(options: argparse.Namespace) -> dict[str, object]:
    """What ran, on what."""
    return {
        "command": "python " + " ".join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]]),
        "device": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": {"hidden": options.hidden, "experts": options.experts, "top_k": options.top_k, "wire": options.wire},
        "unit": "ms, median over rounds of the slowest rank, one thread a rank; a transport without a stage is both",
    }


def processor() -> str:
    """The model of the first core."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
