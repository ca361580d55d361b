"""`moe-mk run` on each rank: build, load, run and measure; rank 0 verifies and prints.

`--record-trace` writes the routing of the two verified forward passes, of all batches.

`--trace` writes one prefill of all ranks on one time axis, for a viewer of Chrome traces.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_mk.comm.agreement import PHASE as AGREEMENT
from moe_mk.comm.communicator import Communicator, offsets
from moe_mk.comm.traffic import LINKS, SELF, Nodes
from moe_mk.config.equation import FILE, equation_next_to
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS
from moe_mk.external.device import describe, device_of_rank
from moe_mk.external.library import COMPILER
from moe_mk.flight import wait
from moe_mk.kernels.native.library import compile_and_open
from moe_mk.kernels.native.selfcheck import is_compiled
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.checkpoints import reading_of
from moe_mk.lab.cli.exits import MISMATCH, OK
from moe_mk.lab.cli.inputs import DTYPES, Batch, RunSettings, batch_of
from moe_mk.lab.cli.measure import recorded_by, time_stages
from moe_mk.lab.cli.plan import RunPlan
from moe_mk.lab.cli.report import RankReport, Report
from moe_mk.lab.cli.residency import measure_residency
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.cli.show import show_results, show_verdict
from moe_mk.lab.cli.world import Place, groups_of, team_of, together
from moe_mk.lab.trace.chrome import write_chrome_trace
from moe_mk.lab.trace.routing import Phase, RoutingRecorder, RoutingTrace, TracedForward, TraceFacts
from moe_mk.lab.verify import Answer, faulty_router, faulty_weights, verify
from moe_mk.layer import DeepseekV3MoE, MoELayer
from moe_mk.router.hashed import ImageRouter
from moe_mk.trace.clock import now
from moe_mk.trace.recorder import STAGES, Span
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.gguf_source import open_source

MOST_STEPS = 64
"""Steps of one token that are measured with a budget."""


def save_timeline(layer: MoELayer, batch: Batch, team: Communicator, file: Path) -> int:
    """Record one forward of every rank; rank 0 writes the file. All ranks of the team must call this.

    Returns the number of spans. Raises ConfigError if the file cannot be written.
    """
    wait(team.gather_count(0, "report"))
    met = now()
    recorder = recorded_by(layer, lambda: layer(batch.x_TH, batch.token_ids_T))
    spans_of_W, met_W = gathered(recorder.spans, met, team)
    if team.rank == 0:
        try:
            write_chrome_trace(file, spans_of_W, met_W)
        except OSError as problem:
            raise ConfigError(f"--trace {file} cannot be written: {problem}; name another file") from problem
    return sum(map(len, spans_of_W))


def gathered(spans: list[Span], met: float, team: Communicator) -> tuple[list[list[Span]], list[float]]:
    """The spans of every rank, and its clock at a common point in time."""
    rows = [[STAGES.index(span.stage), span.start, span.end, span.own] for span in spans]
    mine = torch.tensor([[-1, met, met, 0.0], *rows], dtype=torch.float64, device="cpu")
    counts = wait(team.gather_count(len(mine), "report"))
    everyone, starts = wait(team.all_gather(mine, counts, "report")).tolist(), offsets(counts)
    parts = [everyone[starts[rank] : starts[rank + 1]] for rank in range(team.size)]
    spans_of_W = [[Span(STAGES[int(stage)], *times) for stage, *times in part[1:]] for part in parts]
    return spans_of_W, [part[0][1] for part in parts]


class Recorded:
    """Records the routing of a layer on every rank, if requested; the first rank gathers all of it."""

    def __init__(self, layer: MoELayer, ep_rank: int, settings: RunSettings, batches: int) -> None:
        """batches: number of batches with different tokens; one if all ranks have the same."""
        config, self.layer, self.settings = settings.config, layer, settings
        self.facts = TraceFacts(
            config.model.num_experts, config.router.top_k, config.router.num_expert_group, batches, config.model.name
        )
        self.recorder = RoutingRecorder(self.facts, rank=ep_rank if batches > 1 else 0)

    @contextmanager
    def step(self, phase: Phase, token_ids_T: Tensor | None = None) -> Iterator[None]:
        """Record the forward passes in this context as one step."""
        if self.settings.record_trace is None:
            yield
            return
        self.recorder.next_step(phase, token_ids_T)
        with self.recorder.listening({self.settings.layer: self.layer}):
            yield

    def save(self) -> bool:
        """Gather the steps of all batches; returns whether this rank wrote the file. All ranks must call it."""
        assert self.settings.record_trace is not None
        mine = list(self.recorder.take().forwards())
        if self.facts.num_ranks > 1:
            mine = [forward for each in mine for forward in self._of_all_ranks(each)]
        writes = self.layer.ep.rank == 0 and self.layer.tp.rank == 0
        if writes:
            RoutingTrace.of(self.facts, mine).write(self.settings.record_trace)
        return writes

    def _of_all_ranks(self, mine: TracedForward) -> list[TracedForward]:
        ep, device = self.layer.ep, self.layer.device
        counts = wait(ep.gather_count(len(mine.ids_TK), "report"))
        assert mine.weights_TK is not None

        def gathered(rows: Tensor, dtype: torch.dtype) -> list[Tensor]:
            sent = rows.to(device=device, dtype=dtype)
            return list(torch.split(wait(ep.all_gather(sent, counts, "report")).cpu(), counts))

        ids, weights = gathered(mine.ids_TK, torch.int32), gathered(mine.weights_TK, torch.float32)
        known: list[Tensor | None] = [None] * len(ids)
        if mine.token_ids_T is not None:
            known = [ids_T1.flatten() for ids_T1 in gathered(mine.token_ids_T[:, None], torch.int64)]
        parts = enumerate(zip(ids, weights, known, strict=True))
        return [TracedForward(mine.step, mine.layer, rank, mine.phase, *tensors) for rank, tensors in parts]


@dataclass(frozen=True)
class Rank:
    """The state of one rank."""

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
    """Run one rank; rank 0 returns the exit code of the run."""
    settings = plan.settings
    torch.set_num_threads(settings.threads)
    name = f"layer {settings.layer}"
    team = team_of(place, settings.config.kernel.timeout_s, name)
    groups, screen = groups_of(place), Screen(quiet=settings.as_json or place.rank > 0)
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
        if settings.as_json:
            print(json.dumps(report.as_dict()))
    return code


def _compile(plan: RunPlan, screen: Screen) -> None:
    """Let a person see what the first run on a machine waits for; without native experts nothing is compiled."""
    chosen, folder = plan.decision.chosen.experts, plan.decision.problem.config.kernel.cache_dir
    if chosen not in EXPERTS or EXPERTS[chosen].traits.library != COMPILER or is_compiled(folder):
        return
    start = now()
    with screen.progress("compile", in_bytes=False) as advance:
        compile_and_open(folder, on_unit=lambda done, total: advance("compile", done, total))
    screen.fact("compiled", f"native CPU kernels, once for this machine and version: {now() - start:.0f} s")


def _load(rank: Rank) -> tuple[float, float]:
    """Seconds until everything was read and checked, and until experts were in the layout of their backend."""
    settings, layer = rank.plan.settings, rank.layer
    start = read = now()
    with rank.screen.progress("load") as advance:

        def on_progress(stage: str, done: int, total: int) -> None:
            nonlocal read
            if stage != "pack":
                read = now()
            advance(stage, done, total)

        layer.load_from_safetensors(
            settings.checkpoint, settings.layer, prefix=settings.prefix, on_progress=on_progress
        )
    seconds = read - start, now() - start
    if settings.inject:
        layer.take(faulty_weights(layer.weights, settings.inject))
        layer.router = faulty_router(layer.router, settings.inject)
        by_id = layer.hash_router
        if isinstance(by_id, ImageRouter):
            table = None if by_id.table is None else faulty_router(by_id.table, settings.inject)
            layer.hash_router = replace(by_id, scores=layer.router, table=table)
        elif by_id is not None:
            layer.hash_router = faulty_router(by_id, settings.inject)
    return seconds


def _run(rank: Rank) -> list[Answer]:
    """Run and time prefill and decode; returns their outputs for verification."""
    settings, counts, layer, report = rank.plan.settings, rank.plan.counts, rank.layer, rank.report
    batch = batch_of(settings, counts, rank.plan.batch_of(rank.place.ep_rank)).to(layer.device)
    recorded = Recorded(layer, rank.place.ep_rank, settings, len(counts))
    with recorded.step("prefill", batch.token_ids_T):
        prefill = _answer(layer, batch)
    report.decision = layer.decision.as_dict()
    sent = layer.ep.traffic.bytes_by_phase + layer.tp.traffic.bytes_by_phase
    report.traffic = {phase: count for phase, count in sent.items() if phase != AGREEMENT}
    report.links = _links(rank)
    load_E = layer.expert_load
    if not rank.shares_tokens:
        load_E = wait(layer.ep.all_reduce(load_E, "report"))
    report.expert_load = [int(number) for number in load_E.tolist()]
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
    if settings.memory is not None and (steps := min(max(counts), MOST_STEPS)) > 1:
        report.residency, _ = measure_residency([layer], [batch.token(step) for step in range(steps)], rank.team)
    return [prefill, decode]


def _answer(layer: DeepseekV3MoE, batch: Batch) -> Answer:
    x_TH, ids_T = batch.x_TH, batch.token_ids_T
    return Answer(x_TH, layer(x_TH, ids_T), layer.route(x_TH, ids_T).ids_TK, ids_T)


def _verify(rank: Rank, answers: list[Answer]) -> int:
    """Gather the outputs of all ranks; rank 0 verifies them."""
    settings, layer = rank.plan.settings, rank.layer
    gathered = [[_gathered(rank, tensor) for tensor in answer[:3]] for answer in answers]
    x_TH, y_TH, ids_TK = (torch.cat(parts) for parts in zip(*gathered, strict=True))  # prefill before decode
    known = [_gathered(rank, answer.token_ids_T[:, None]) for answer in answers if answer.token_ids_T is not None]
    if rank.place.rank:
        return OK
    answer = Answer(x_TH, y_TH, ids_TK, torch.cat(known).flatten() if known else None)
    torch.set_num_threads(environment.usable_cores())
    everybody = range(settings.config.model.num_experts)
    source = open_source(settings.checkpoint)
    with rank.screen.progress("check") as advance:
        weights = load_layer(
            source, settings.layer, layer.spec, owned=everybody, prefix=settings.prefix, on_progress=advance
        )
    with rank.screen.progress("verify", in_bytes=False) as advance:
        own = settings.against
        config = None if own is None else own.config
        judged = verify(answer, layer.decision, weights, advance, config=config)
    # The reference computes what the equation states, as the layer does.
    folder = Path(settings.checkpoint)
    equation = None if own else equation_next_to((folder if folder.is_dir() else folder.parent) / "config.json")
    origin = None if equation is None else equation.derived_from or "written by hand"
    rank.report.verification = judged.as_dict() | ({} if own is None else {"against": own.title})
    rank.report.verification |= {} if origin is None else {"unchecked": f"{FILE}: {origin}"}
    show_verdict(rank.screen, judged, layer.decision, origin)
    reading = reading_of(layer.config, settings.checkpoint, settings.layer)
    if own is None:
        rank.screen.fact("", f"  not verified, since the reference shares it: {reading}")
    else:
        rank.screen.fact("", f"  with the settings measured of {own.title}; the layer has {reading}")
        for difference in own.differences:
            rank.screen.fact("", f"  {difference}")
    return OK if judged.passed else MISMATCH


def _describe_ranks(rank: Rank, seconds: tuple[float, float]) -> None:
    """Loaded bytes, time and peak memory of every rank."""
    mine = [rank.layer.weights.num_bytes, peak_host_bytes(), *(round(part * 1e6) for part in seconds)]
    row = torch.tensor([mine], dtype=torch.int64, device="cpu")
    everyone = wait(rank.team.all_gather(row, [1] * rank.team.size, "report")).tolist()
    experts = rank.plan.experts
    rank.report.ranks = [RankReport(r, experts[r], each[0], each[1]) for r, each in enumerate(everyone)]
    rank.report.read_seconds, rank.report.load_seconds = (max(each[i] for each in everyone) / 1e6 for i in (2, 3))


def _links(rank: Rank) -> dict[str, int]:
    """Bytes this rank has sent, by link; ranks of a TP group share a node."""
    ep, tp, total = rank.layer.ep, rank.layer.tp, Counter[str]()
    per_node = rank.plan.decision.problem.ep_ranks_per_node
    for comm, nodes in ((ep, Nodes.of(ep.size, per_node)), (tp, Nodes.of(tp.size))):
        phases = comm.traffic.bytes_by_phase.keys() - {AGREEMENT}
        total.update(comm.traffic.by_link(nodes, comm.rank, phases))
    return {link: total[link] for link in LINKS if link != SELF}


def _gathered(rank: Rank, rows: Tensor) -> Tensor:
    """Rows of all batches, in rank order."""
    if rank.shares_tokens:
        return rows.cpu()
    ep = rank.layer.ep
    counts = wait(ep.gather_count(rows.shape[0], "report"))
    return wait(ep.all_gather(rows, counts, "report")).cpu()


def peak_host_bytes() -> int:
    """The most memory this process has had resident, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
