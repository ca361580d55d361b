"""Plans of the worlds of the fault harness, drawn from a seed: ranks, layers, calls, and one fault or none.

A plan depends on the seed, the transport and the number of the world alone, so that any world can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.lab.testing.faults.reference import check_supported
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE

BUILT_IN = ("all_gather", "all_to_all", "hierarchical", "one_sided", "one_sided_network")
"""What `all` stands for."""
HARMLESS = ("none", "delay", "pause")
"""Kinds of faults that no call may notice."""
DISCONNECTING = ("kill", "stop", "cut")
"""Kinds that may cost the group its connections, so that it cannot be recovered."""
KINDS: Mapping[str, int] = {
    "none": 3, "kill": 7, "stop": 3, "pause": 3, "delay": 4, "raise": 10, "micro_batch": 3, "other_layer": 3,
    "two_threads": 2, "cut": 3, "counts": 2, "proxy": 3,
}  # fmt: skip
"""Every kind with its share of the worlds.

kill: SIGKILL. stop: SIGSTOP for longer than the timeout. pause: for less. delay: a sleep below the timeout. raise: an
exception. micro_batch: one micro-batch more than the other ranks. other_layer: a call of another layer than theirs.
two_threads: two threads call two layers. cut: a connection is shut down. counts: impossible numbers of rows are sent.
proxy: the threads that execute a rank's transfers end with an exception. A kind that a built-in transport cannot have
is replaced: by "proxy" where it has one, else by "raise".
"""
ERRORS = ("ValueError", "RuntimeError", "OSError", "MemoryError", "KeyboardInterrupt", "AssertionError", "SystemExit")
"""What is raised. MemoryError, KeyboardInterrupt and SystemExit have no text."""
IN_CALLS = ("before dispatch", "within dispatch", "experts", "before combine", "within combine")
COUNTS = ("huge", "negative", "more", "none")
"""What a rank sends in place of its numbers of rows: 2^40 each, -1 each, 3 more than there are, 0."""
COUNTING = ("all_gather", "all_to_all", "hierarchical")
"""Built-in transports that exchange counts through their communicator."""
WITH_PROXIES = ("one_sided_network",)
WITH_SOCKETS = (*COUNTING, *WITH_PROXIES)
MAX_TOKENS = 16


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, which occurs once."""

    kind: str
    point: str
    """set-up, one of IN_CALLS, tear-down, or time: `at_ms` after serving began."""
    victim: int
    call: int = 0
    batch: int = 0
    """The micro-batch of the call."""
    hop: int = 0
    """Of points within a flight: the yield at which it happens; the last one where there are fewer."""
    seconds: float = 0.0
    """How long a rank is stopped or sleeps."""
    error: str = ""
    inside: bool = False
    """Whether an exception is thrown into the transport's flight, or raised where that flight is left alone."""
    at_ms: int = 0
    detail: str = ""
    """Which connections are cut ("link": those opened after the group's own, "group": the group's), which counts."""


@dataclass(frozen=True)
class Call:
    """One call of every rank."""

    layer: int
    tokens: tuple[tuple[int, ...], ...]
    """Of each micro-batch, by rank."""


@dataclass(frozen=True)
class World:
    """One world: what its ranks build and call, and what goes wrong."""

    seed: int
    number: int
    transport: str
    ranks: int
    config: Mapping[str, Any]
    """Of MoEConfig, without `parallel.ep`."""
    layers: int
    calls: tuple[Call, ...]
    fault: Fault | None
    timeout_s: float
    recovers: bool
    """Whether all ranks call `recover()` after a failure."""
    modules: tuple[str, ...] = ()
    """What every rank imports first, for transports that register themselves."""

    @property
    def kind(self) -> str:
        """The kind of the fault, "none" without one."""
        return self.fault.kind if self.fault else "none"

    @property
    def is_harmless(self) -> bool:
        """Whether every call must come out right on every rank."""
        return self.kind in HARMLESS

    def to_json(self) -> str:
        """The plan as its ranks read it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data["calls"] = tuple(Call(c["layer"], tuple(map(tuple, c["tokens"]))) for c in data["calls"])
        data["fault"] = None if data["fault"] is None else Fault(**data["fault"])
        return cls(**data | {"modules": tuple(data["modules"])})

    def describe(self) -> str:
        """One line for a person."""
        quant, placement = self.config["model"]["quant"]["weights"], self.config["parallel"]["placement"]
        replicas = "" if isinstance(placement, str) else f", {len(placement)} slots"
        what = f"{self.transport}, {self.ranks} ranks, {self.layers} layers, {quant}{replicas}: "
        if self.fault is None:
            return what + "no fault"
        f = self.fault
        where = f"{f.at_ms} ms after the start" if f.point == "time" else f.point
        where += f" of call {f.call}, micro-batch {f.batch}" if f.point in IN_CALLS else ""
        extra = ", ".join(filter(None, [f.error, f.detail, f"{f.seconds:.1f} s" if f.seconds else ""]))
        return what + f"{f.kind} on rank {f.victim}, {where}" + (f" ({extra})" if extra else "")


@dataclass(frozen=True)
class Campaign:
    """Transports, seed and limits from which worlds are drawn."""

    transports: tuple[str, ...]
    seed: int = 0
    timeout_s: float = 3.0
    """Of kernel.timeout_s in worlds with a fault; three times as much where every call must come out right."""
    config: MoEConfig | None = None
    """Its routing and its kernel settings are used, its sizes are cut down; None draws from two routers."""
    modules: tuple[str, ...] = ()
    kinds: Mapping[str, int] = field(default_factory=lambda: dict(KINDS))

    def world(self, number: int) -> World:
        """The plan of one world."""
        transport = self.transports[number % len(self.transports)]
        return _draw(self, transport, number, random.Random(f"{self.seed} {transport} {number}"))


def transports_of(name: str) -> tuple[str, ...]:
    """Registered transports by name, several by comma; "all" are the built-in ones that run between CPU processes.

    Raises ConfigError for unregistered names and for transports of one rank.
    """
    names = BUILT_IN if name == "all" else tuple(part.strip() for part in name.split(","))
    for one in names:
        traits = PREPARE_FINALIZE[one].traits
        if traits.max_ranks == 1 or "sharded" not in traits.tokens:
            raise ConfigError(
                f"transport {one!r} does not exchange tokens between ranks, so no fault can be tried; "
                f"use one of {', '.join(BUILT_IN)}"
            )
    return names


def _draw(campaign: Campaign, transport: str, number: int, rng: random.Random) -> World:
    ranks = _ranks_of(transport, rng)
    kind = _kind(campaign, transport, number)
    layers = 2 if kind in ("other_layer", "two_threads") or rng.random() < 0.4 else 1
    timed = kind in ("kill", "stop", "pause", "cut", "raise") and rng.random() < 0.2
    calls = _calls(ranks, layers, 14 if timed else rng.randint(3, 5), rng)
    fault = None if kind == "none" else _fault(kind, campaign, transport, ranks, calls, rng, timed=timed)
    if kind == "two_threads":
        assert fault is not None
        first, second = calls[fault.call], calls[fault.call + 1]
        alternating = replace(first, layer=0, tokens=first.tokens[:1]), replace(second, layer=1)
        calls = (*calls[: fault.call], *alternating, *calls[fault.call + 2 :])
    return World(
        seed=campaign.seed,
        number=number,
        transport=transport,
        ranks=ranks,
        config=_config(campaign, transport, ranks, rng),
        layers=layers,
        calls=calls,
        fault=fault,
        timeout_s=campaign.timeout_s * (3 if kind in HARMLESS else 1),
        recovers=rng.random() < 0.5,
        modules=campaign.modules,
    )


def _ranks_of(transport: str, rng: random.Random) -> int:
    traits = PREPARE_FINALIZE[transport].traits
    possible = [n for n in (2, 3, 4) if traits.min_ranks <= n <= (traits.max_ranks or n)]
    if not possible:
        raise ConfigError(f"transport {transport!r} serves {traits.min_ranks} ranks or more, worlds have 2 to 4")
    return rng.choice(possible)


def _kind(campaign: Campaign, transport: str, number: int) -> str:
    """Dealt from a shuffled deck, so that each kind is tried with its share in any run that is long enough."""
    deck = [kind for kind, share in campaign.kinds.items() for _ in range(share)]
    random.Random(f"{campaign.seed} kinds").shuffle(deck)
    kind = deck[number % len(deck)]
    have = {"cut": WITH_SOCKETS, "counts": COUNTING, "proxy": WITH_PROXIES}
    built_in = transport in BUILT_IN or kind == "proxy"  # a plugin may have sockets and counts
    if built_in and transport not in have.get(kind, (transport,)):
        return "proxy" if transport in WITH_PROXIES else "raise"
    return kind


def _calls(ranks: int, layers: int, count: int, rng: random.Random) -> tuple[Call, ...]:
    """Uneven numbers of tokens, zero among them; several micro-batches in some worlds."""
    several = rng.random() < 0.4
    calls = []
    for _ in range(count):
        batches = rng.choice((2, 3)) if several and rng.random() < 0.7 else 1
        tokens = tuple(tuple(rng.choice((0, 1, 2, 5, 8)) for _ in range(ranks)) for _ in range(batches))
        calls.append(Call(rng.randrange(layers), tokens))
    return tuple(calls)


def _fault(
    kind: str, campaign: Campaign, transport: str, ranks: int, calls: Sequence[Call], rng: random.Random, *, timed: bool
) -> Fault:
    call = rng.choice([0, *range(len(calls) - 1), *range(1, len(calls) - 1)])
    fault = Fault(
        kind,
        rng.choice(IN_CALLS),
        victim=rng.randrange(ranks),
        call=call,
        batch=rng.randrange(len(calls[call].tokens)),
        hop=rng.choice((0, 0, 1, 2)),
        at_ms=rng.randrange(150),
    )
    if timed:
        fault = replace(fault, point="time")
    elif kind in ("kill", "stop", "pause", "delay") and rng.random() < 0.3:
        fault = replace(fault, point=rng.choice(("set-up", "tear-down")))
    if kind == "stop":
        return replace(fault, seconds=round(campaign.timeout_s + rng.uniform(1.0, 2.0), 2))
    if kind in ("pause", "delay"):
        return replace(fault, seconds=round(rng.uniform(0.05, 0.4) * campaign.timeout_s, 2))
    if kind == "raise":
        error = "KeyboardInterrupt" if timed else rng.choice(ERRORS)
        return replace(fault, error=error, inside=rng.random() < 0.5)
    if kind == "two_threads":
        return replace(fault, point="within dispatch", call=min(call, len(calls) - 2), batch=0, hop=0)
    if kind in ("micro_batch", "other_layer"):
        return replace(fault, point="before dispatch", batch=0)
    if kind == "counts":
        return replace(fault, point="before dispatch", detail=rng.choice(COUNTS))
    if kind == "proxy":
        return replace(fault, call=max(call, 1), batch=0)  # proxies are started by the first call
    if kind == "cut":
        where = "group" if transport in COUNTING else rng.choice(("link", "link", "group"))
        return replace(fault, call=max(call, 1), batch=0, detail=where)  # links are opened by the first call
    return fault


def _config(campaign: Campaign, transport: str, ranks: int, rng: random.Random) -> dict[str, Any]:
    """A small layer over this transport: sizes and storage are drawn, routing is the campaign's."""
    stored = rng.choice(("bf16", "fp8_block"))
    hidden, inner = (rng.choice((128, 256)), 128) if stored == "fp8_block" else (
        rng.choice((64, 128, 256)), rng.choice((32, 64, 128)),
    )  # fmt: skip
    if campaign.config is None:
        grouped = rng.random() < 0.4
        base = MoEConfig.parse(_plain(grouped), "the fault harness")
    else:
        base = campaign.config
    check_supported(base)
    groups = base.router.num_expert_group
    experts = min(base.model.num_experts, max(8, 2 * groups))
    kept = base.router.topk_group * (experts // groups)
    placement: Any = _replicas(experts, ranks, rng) if rng.random() < 0.4 else "linear"
    per_node = None
    if transport in ("hierarchical", "one_sided_network"):
        per_node = rng.choice([n for n in (1, 2) if ranks % n == 0 and ranks > n])
    backend = base.kernel.experts if base.kernel.experts != "auto" else rng.choice(("auto", "torch_cpu", "reference"))
    data = base.model_dump(mode="json")
    data["model"] |= {
        "name": "custom", "hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts,
        "shared_intermediate_size": None, "quant": {"weights": stored},
    }  # fmt: skip
    data["router"] |= {"top_k": min(base.router.top_k, kept, 4), "router_dtype": "float32"}
    data["parallel"] = {"placement": placement, "ranks_per_node": per_node}
    emulated = bool(PREPARE_FINALIZE[transport].traits.library) or base.kernel.allow_emulated
    data["kernel"] |= {
        "prepare_finalize": transport, "experts": backend, "max_num_tokens": MAX_TOKENS, "allow_emulated": emulated,
        "network": "127.0.0.0/8",
    }  # fmt: skip
    return data


def _replicas(experts: int, ranks: int, rng: random.Random) -> list[int]:
    """A placement with as many slots on each rank, some of them replicas, also of experts that the rank holds."""
    order = rng.sample(range(experts), experts)
    slots = -(-experts // ranks) + 1
    placed: list[int] = []
    for rank in range(ranks):
        own = order[rank::ranks]
        placed += [*own, *rng.sample(order, slots - len(own))]
    return placed


def _plain(grouped: bool) -> dict[str, Any]:
    """Eight experts, two a token: chosen by softmax, or as DeepSeek-V3 chooses them, with a shared expert."""
    model = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_shared_experts": int(grouped)}
    if not grouped:
        return {"model": model, "router": {"top_k": 2}}
    router = {
        "top_k": 2, "scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2, "has_correction_bias": True,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return {"model": model, "router": router}
