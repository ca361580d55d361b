"""Policies beside each other: how even, what moves, what crosses nodes, and which of them nothing else beats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from rich.table import Table

from moe_mk.cli.loads import Recording
from moe_mk.cli.screen import Screen, amount
from moe_mk.placement.eplb import PlacementPlan, Policy, Topology
from moe_mk.placement.traffic import NodesPerToken
from moe_mk.rebalance.ledger import Ledger
from moe_mk.rebalance.metrics import Balance


@dataclass(frozen=True)
class Placing:
    """One policy's answer and how it stands up."""

    asked: Policy
    plan: PlacementPlan
    ledger: Ledger
    balance: Balance
    later: Balance | None
    """Under the second half of a recording, where the plan was made from the first."""
    nodes: NodesPerToken | None = None
    """Nodes that tokens reach, where a trace tells."""

    @property
    def name(self) -> str:
        """What was asked, and what ran for it."""
        return self.plan.policy if self.asked == self.plan.policy else f"{self.asked}: {self.plan.policy}"

    def as_dict(self) -> dict[str, object]:
        """Numbers for JSON."""
        made = self.plan
        return {
            "policy": made.policy,
            "balance_mean": float(made.balance_X.mean()),
            "balance_worst": float(made.balance_X.min()),
            "bound_mean": float(made.bound_X.mean()),
            "step_over_ideal": self.balance.step_over_ideal,
            "later_step_over_ideal": None if self.later is None else self.later.step_over_ideal,
            "nodes_per_token": None if self.nodes is None else self.nodes.all,
            "remote_nodes_per_token": None if self.nodes is None else self.nodes.remote,
            "moved_experts": made.moves.transfers,
            "moved_bytes": made.moved_bytes,
            "rounds": made.moves.rounds,
            "lent_to_other_nodes": float(made.exported_X.mean()),
            "lost_with_worst_gpu": float(made.lost_XW.max()),
            "bytes_per_gpu": made.bytes_per_gpu.tolist(),
            "map_bytes": made.map_bytes,
            "reason": made.reason,
        }


@dataclass(frozen=True)
class Offer:
    """What one placement costs, in the three ways that can be traded; less is better in each."""

    name: str
    step_over_ideal: float
    moved_experts: int
    moved_bytes: int
    nodes: NodesPerToken | None
    best: bool = False
    """Whether no other offer is as good in every way and better in one."""

    def costs(self) -> tuple[float, ...]:
        """Time, moves, and remote nodes where they are known; times that differ by a millionth are alike."""
        remote = () if self.nodes is None else (round(self.nodes.remote, 6),)
        return (round(self.step_over_ideal, 6), float(self.moved_experts), *remote)

    def as_dict(self) -> dict[str, object]:
        """Numbers for JSON."""
        remote = None if self.nodes is None else self.nodes.remote
        return {name: value for name, value in asdict(self).items() if name != "nodes"} | {
            "remote_nodes_per_token": remote
        }


def offer_of(placing: Placing) -> Offer:
    """The costs of one policy's answer."""
    made = placing.plan
    return Offer(placing.name, placing.balance.step_over_ideal, made.moves.transfers, made.moved_bytes, placing.nodes)


def mark_best(offers: list[Offer]) -> list[Offer]:
    """Find the offers that nothing beats in every way: the Pareto front."""

    def beaten(one: Offer) -> bool:
        return any(
            other.costs() != one.costs() and all(a <= b for a, b in zip(other.costs(), one.costs(), strict=True))
            for other in offers
        )

    return [replace(each, best=not beaten(each)) for each in offers]


def show(
    screen: Screen,
    recording: Recording,
    topology: Topology,
    now: Balance,
    placings: list[Placing],
    offers: list[Offer],
    expert_bytes: int,
) -> None:
    """The machines, both sides in two lines, and a row for every policy."""
    windows, layers, experts = recording.loads_NXE.shape
    slots = sorted(set(topology.slots_W.tolist()))
    screen.fact("load", f"{layers} layers of {experts} experts, {windows} {'window' if windows == 1 else 'windows'}")
    if recording.trace is not None:
        traced, facts = recording.trace, recording.trace.facts
        ranks = f"{facts.num_ranks} {'rank' if facts.num_ranks == 1 else 'ranks'}"
        screen.fact(
            "trace", f"{traced.num_rows} rows of {facts.top_k} experts in {traced.num_forwards} forwards of {ranks}"
        )
    where = f"{topology.gpus} GPUs on {topology.nodes} {'node' if topology.nodes == 1 else 'nodes'}"
    screen.fact("machines", f"{where}, {' or '.join(map(str, slots))} slots a GPU, {topology.num_slots} in all")
    for label, each in (("before", now), ("after", placings[0].balance)):
        values = each.as_dict()
        peak, worst = values["balance.rank_max_over_mean"], values["balance.rank_max_over_mean_worst"]
        screen.fact(
            label,
            f"busiest GPU {peak:.3f} x mean, worst layer {worst:.3f} x; expert CV {values['balance.expert_cv']:.3f}",
        )
    if expert_bytes:
        held = int(placings[0].plan.bytes_per_gpu.max())
        screen.fact("memory", f"{amount(held)} of experts on a GPU, maps {amount(placings[0].plan.map_bytes)}")
    screen.console.print(comparison(placings, expert_bytes))
    if recording.trace is not None:
        screen.console.print(pareto_table(offers, expert_bytes))
    screen.fact("because", placings[0].plan.reason)


def comparison(placings: list[Placing], expert_bytes: int) -> Table:
    """A row for every policy: how even, what it costs to get there, what crosses nodes, what a lost GPU takes along."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("policy", "balance mean", "worst", "no better than", "later", "moved", "rounds", "lent", "lost with a GPU")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right")
    for each in placings:
        made = each.plan
        moved = f"{made.moves.transfers} ({amount(made.moved_bytes)})" if expert_bytes else str(made.moves.transfers)
        later = "" if each.later is None else f"{1 / each.later.step_over_ideal:.4f}"
        balance = [f"{made.balance_X.mean():.4f}", f"{made.balance_X.min():.4f}", f"{made.bound_X.mean():.4f}", later]
        lost = f"{made.lost_XW.max():.1%}"
        table.add_row(each.name, *balance, moved, str(made.moves.rounds), f"{made.exported_X.mean():.1%}", lost)
    return table


def pareto_table(offers: list[Offer], expert_bytes: int) -> Table:
    """What can be traded for what, on the trace: the starred ones are beaten by no other in every way."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("trade", "balance", "moved", "nodes a token", "remote nodes a token", "unbeaten"):
        table.add_column(head, justify="left" if head == "trade" else "right")
    for each in offers:
        moved = f"{each.moved_experts} ({amount(each.moved_bytes)})" if expert_bytes else str(each.moved_experts)
        nodes = ("", "") if each.nodes is None else (f"{each.nodes.all:.3f}", f"{each.nodes.remote:.3f}")
        table.add_row(each.name, f"{1 / each.step_over_ideal:.4f}", moved, *nodes, "*" if each.best else "")
    return table
