"""What each rank of `moe-mk run` does: build, load, run, measure, and let rank 0 verify and tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.cli import environment
from moe_mk.cli.exits import MISMATCH, OK
from moe_mk.cli.inputs import DTYPES, Batch, batch_of
from moe_mk.cli.measure import time_stages
from moe_mk.cli.plan import RunPlan
from moe_mk.cli.recording import Recorded
from moe_mk.cli.report import RankReport, Report
from moe_mk.cli.screen import Screen
from moe_mk.cli.show import show_results, show_verdict
from moe_mk.cli.timeline import save_timeline
from moe_mk.cli.world import Place, groups_of, team_of, together
from moe_mk.comm.agreement import PHASE as AGREEMENT
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.traffic import LINKS, SELF, Nodes
from moe_mk.experts.base import EXPERTS
from moe_mk.external.device import describe, device_of_rank, peak_host_bytes
from moe_mk.external.library import COMPILER
from moe_mk.flight import land
from moe_mk.kernels.native import compile_and_open, is_compiled
from moe_mk.layer import DeepseekV3MoE
from moe_mk.trace.clock import now
from moe_mk.verify import Answer, faulty_router, faulty_weights, verify
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.source import SafetensorsSource


@dataclass(frozen=True)
class Rank:
    """One rank at work."""

    plan: RunPlan
    place: Place
    team: Communicator
    """All ranks of the command."""
    layer: DeepseekV3MoE
    screen: Screen
    report: Report

    @property
    def shares_tokens(self) -> bool:
        """Whether every EP rank has the same tokens."""
        return len(self.plan.counts) == 1


@torch.no_grad()
def run_rank(plan: RunPlan, place: Place) -> int:
    """Run one rank; rank 0 returns the exit code of the whole run."""
    settings = plan.settings
    torch.set_num_threads(settings.threads)
    name = f"layer {settings.layer}"
    team = team_of(place, settings.config.kernel.timeout_s, name)
    groups, screen = groups_of(place), Screen(quiet=place.rank > 0)
    device = device_of_rank(settings.device, place.local_rank)
    report = Report(plan, describe(device))
    _compile(plan, screen)
    layer = together(
        team,
        lambda: DeepseekV3MoE(settings.config, device=device, dtype=DTYPES[settings.dtype], groups=groups, name=name),
    )
    rank = Rank(plan, place, team, layer, screen, report)
    seconds = together(team, lambda: _load(rank))
    answers = _run(rank)
    _describe_ranks(rank, seconds)
    show_results(screen, report)
    code = _verify(rank, answers) if settings.verify else OK
    if place.rank == 0:
        screen.facts(report.save())
    return code


def _compile(plan: RunPlan, screen: Screen) -> None:
    """Let a person see what the first run on a machine waits for; without native experts nothing is compiled."""
    chosen = plan.decision.chosen.experts
    if chosen not in EXPERTS or EXPERTS[chosen].traits.library != COMPILER or is_compiled():
        return
    start = now()
    with screen.progress("compile", in_bytes=False) as advance:
        compile_and_open(on_unit=lambda done, total: advance("compile", done, total))
    screen.fact("compiled", f"native CPU kernels, once for this machine and version: {now() - start:.0f} s")


def _load(rank: Rank) -> tuple[float, float]:
    """Seconds until everything was read and checked, and until the experts lay as their backend wants them."""
    settings, layer = rank.plan.settings, rank.layer
    start = read = now()
    with rank.screen.progress("load") as advance:

        def tell(stage: str, done: int, total: int) -> None:
            nonlocal read
            if stage != "pack":
                read = now()
            advance(stage, done, total)

        layer.load_from_safetensors(settings.checkpoint, settings.layer, on_progress=tell)
    seconds = read - start, now() - start
    if settings.inject:
        layer.take(faulty_weights(layer.weights, settings.inject))
        layer.router = faulty_router(layer.router, settings.inject)
        if layer.hash_router is not None:
            layer.hash_router = faulty_router(layer.hash_router, settings.inject)
    return seconds


def _run(rank: Rank) -> list[Answer]:
    """Run and time prefill and decode; what they gave is for verification."""
    settings, counts, layer, report = rank.plan.settings, rank.plan.counts, rank.layer, rank.report
    batch = batch_of(settings, counts, rank.plan.batch_of(rank.place.ep_rank)).to(layer.device)
    recorded = Recorded(layer, rank.place.ep_rank, settings, len(counts))
    with recorded.step("prefill", batch.token_ids_T):
        prefill = _answer(layer, batch)
    report.decision = layer.decision.as_dict()
    sent = layer.ep.traffic.bytes_by_phase + layer.tp.traffic.bytes_by_phase
    report.traffic = {phase: count for phase, count in sent.items() if phase != AGREEMENT}
    report.links = _links(rank)
    report.expert_load = _summed(rank, layer.expert_load)
    report.prefill = time_stages(layer, batch, rank.team, settings.repeats).for_tokens(counts)
    if settings.trace is not None:
        file = settings.trace
        spans = together(rank.team, lambda: save_timeline(layer, batch, rank.team, file))
        rank.screen.fact("timeline", f"{file}, {spans} spans of one prefill of all ranks (ui.perfetto.dev)")
    with recorded.step("decode", batch.first.token_ids_T):
        decode = _answer(layer, batch.first)
    if settings.record_trace is not None:
        together(rank.team, recorded.save)
        rank.screen.fact("trace", f"{settings.record_trace}, the routing of prefill and decode")
    ones = [min(count, 1) for count in counts]
    report.decode = time_stages(layer, batch.first, rank.team, 3 * settings.repeats).for_tokens(ones)
    return [prefill, decode]


def _answer(layer: DeepseekV3MoE, batch: Batch) -> Answer:
    x_TH, ids_T = batch.x_TH, batch.token_ids_T
    return Answer(x_TH, layer(x_TH, ids_T), layer.route(x_TH, ids_T).ids_TK, ids_T)


def _verify(rank: Rank, answers: list[Answer]) -> int:
    """Gather what all ranks gave; rank 0 judges it."""
    settings, layer = rank.plan.settings, rank.layer
    whole = _whole(rank, answers)
    if rank.place.rank:
        return OK
    torch.set_num_threads(environment.usable_cores())
    everybody = range(settings.config.model.num_experts)
    source = SafetensorsSource(settings.checkpoint)
    with rank.screen.progress("check") as advance:
        weights = load_layer(source, settings.layer, layer.spec, owned=everybody, on_progress=advance)
    with rank.screen.progress("verify", in_bytes=False) as advance:
        judged = verify(whole, layer.decision, weights, advance)
    rank.report.verification = judged.as_dict()
    show_verdict(rank.screen, judged, layer.decision)
    return OK if judged.passed else MISMATCH


def _describe_ranks(rank: Rank, seconds: tuple[float, float]) -> None:
    """Loaded bytes, time and peak memory of every rank."""
    mine = [rank.layer.weights.num_bytes, peak_host_bytes(), *(round(part * 1e6) for part in seconds)]
    row = torch.tensor([mine], dtype=torch.int64, device="cpu")
    everyone = land(rank.team.all_gather(row, [1] * rank.team.size, "report")).tolist()
    experts = rank.plan.experts
    rank.report.ranks = [RankReport(r, experts[r], each[0], each[1]) for r, each in enumerate(everyone)]
    rank.report.read_seconds, rank.report.load_seconds = (max(each[i] for each in everyone) / 1e6 for i in (2, 3))


def _links(rank: Rank) -> dict[str, int]:
    """What this rank sent to others, by link; ranks of a TP group share a node."""
    ep, tp, total = rank.layer.ep, rank.layer.tp, Counter[str]()
    per_node = rank.plan.decision.problem.ep_ranks_per_node
    for comm, nodes in ((ep, Nodes.of(ep.size, per_node)), (tp, Nodes.of(tp.size))):
        phases = comm.traffic.bytes_by_phase.keys() - {AGREEMENT}
        total.update(comm.traffic.by_link(nodes, comm.rank, phases))
    return {link: total[link] for link in LINKS if link != SELF}


def _summed(rank: Rank, load_E: Tensor) -> list[int]:
    """Expert load of the whole batch: summed over EP ranks that bring different tokens."""
    if not rank.shares_tokens:
        load_E = land(rank.layer.ep.all_reduce(load_E, "report"))
    return [int(number) for number in load_E.tolist()]


def _whole(rank: Rank, answers: list[Answer]) -> Answer:
    """What all ranks were asked and gave, prefill before decode."""
    gathered = [[_gathered(rank, tensor) for tensor in answer[:3]] for answer in answers]
    x_TH, y_TH, ids_TK = (torch.cat(parts) for parts in zip(*gathered, strict=True))
    known = [_gathered(rank, answer.token_ids_T[:, None]) for answer in answers if answer.token_ids_T is not None]
    return Answer(x_TH, y_TH, ids_TK, torch.cat(known).flatten() if known else None)


def _gathered(rank: Rank, rows: Tensor) -> Tensor:
    """Rows of all batches, in rank order."""
    if rank.shares_tokens:
        return rows.cpu()
    ep = rank.layer.ep
    counts = land(ep.gather_count(rows.shape[0], "report"))
    return land(ep.all_gather(rows, counts, "report")).cpu()
