"""Routing of models made for tests, live and recorded, and records that are misaligned on purpose.

Hidden states mix a token's embedding with its context, less of the embedding in later layers, so that equal tokens have
similar experts, as in trained models. The live side computes in bf16, so that some percent of the choices differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_mk.lab.trace.records import ModelFacts, RecordedSequence, RoutingRecord
from moe_mk.router import Router


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the sequences that it has seen."""

    experts: int = 64
    top_k: int = 4
    layers: int = 6
    lengths: tuple[int, ...] = (120, 90, 60)
    groups: int = 1
    kept: int = 1
    scoring: str = "softmax"
    hidden: int = 64
    dense: int = 1
    """Layers without experts, before the others."""


SHAPES = {
    "small": Shape(8, 2, 3, (160, 70)),
    "Qwen3-30B-A3B": Shape(128, 8, 6, dense=0),
    "DeepSeek-V3": Shape(256, 8, 5, groups=8, kept=4, scoring="sigmoid", dense=3),
    "Kimi-K2": Shape(384, 8, 5, scoring="sigmoid"),
}


@dataclass(frozen=True)
class Rollout:
    """What one seed of a shape gives."""

    shape: Shape
    facts: ModelFacts
    record: RoutingRecord
    """What the engine has recorded, in f32: right."""
    live: RoutingRecord
    """What a trainer in bf16 chooses for the same tokens, one row more."""
    hidden_XRH: Tensor
    """bf16; rows of all sequences, one after the other."""
    gates_XEH: Tensor


def rollout(shape: Shape, seed: int, noise: float = 0.02) -> Rollout:
    """noise: of live hidden states of size 1, in addition to their rounding to bf16."""
    draw = torch.Generator().manual_seed(seed)
    embedding = torch.randn(50, shape.hidden, generator=draw)
    gates = torch.randn(shape.layers, shape.experts, shape.hidden, generator=draw) * 2.0 * shape.hidden**-0.5
    bias_E = torch.randn(shape.experts, generator=draw) * 0.02 if shape.scoring == "sigmoid" else None
    router = Router(shape.top_k, shape.groups, shape.kept, shape.scoring)
    recorded, live, hidden = [], [], []
    for number, length in enumerate(shape.lengths):
        tokens = (torch.rand(length, generator=draw) ** 2 * 50).long()  # some tokens are frequent
        h, context, states = embedding[tokens], torch.zeros(length, shape.hidden), []
        for t in range(1, length):
            context[t] = 0.8 * context[t - 1] + 0.6 * h[t - 1]
        for layer in range(shape.layers):
            mix = torch.randn(shape.hidden, shape.hidden, generator=draw) * shape.hidden**-0.5
            own = torch.randn(length, shape.hidden, generator=draw)
            states.append(0.9 ** (layer + 1) * h + 0.3 * (layer + 1) ** 0.5 * (context @ mix) + 0.3 * own)
        exact = [router(x @ gates[at].T, bias_E).ids_TK for at, x in enumerate(states)]
        # What layers in bf16 add up to is more than the rounding of one state.
        rounded = [(x + noise * torch.randn(x.shape, generator=draw)).bfloat16() for x in states]
        noisy = [router((x @ gates[at].bfloat16().T).float(), bias_E).ids_TK for at, x in enumerate(rounded)]
        name = f"sequence {number}"
        recorded.append(RecordedSequence(name, torch.stack(exact, 1)[:-1], tokens, prompt=length // 2))
        live.append(RecordedSequence(name, torch.stack(noisy, 1), tokens, prompt=length // 2))
        hidden.append(torch.stack(rounded))
    layers = tuple(range(shape.dense, shape.dense + shape.layers))
    total = shape.layers + shape.dense
    facts = ModelFacts(shape.experts, shape.top_k, layers, total, shape.groups, shape.kept)
    made = (RoutingRecord("the engine", tuple(recorded)), RoutingRecord("the trainer", tuple(live)))
    return Rollout(shape, facts, *made, torch.cat(hidden, 1), gates)


def changed(record: RoutingRecord, change: Callable[[Tensor], Tensor | None], *numbers: int) -> RoutingRecord:
    """The record with the ids of some sequences changed; none named: of all."""
    sequences = [
        replace(each, ids_TXK=change(each.ids_TXK.clone()))
        if each.ids_TXK is not None and (not numbers or at in numbers)
        else each
        for at, each in enumerate(record.sequences)
    ]
    return replace(record, sequences=tuple(sequences))


def shifted(record: RoutingRecord, rows: int) -> RoutingRecord:
    """Rows of all sequences moved along the flat batch, as a rank does that takes the rows of another one's slice."""
    parts = [each.ids_TXK for each in record.sequences if each.ids_TXK is not None]
    flat = torch.split(torch.cat(parts).roll(rows, 0), [len(part) for part in parts])
    return replace(record, sequences=tuple(replace(each, ids_TXK=flat[at]) for at, each in enumerate(record.sequences)))


def physical(record: RoutingRecord, shape: Shape, seed: int) -> RoutingRecord:
    """Ids of slots of EPLB: an order of its own in each layer, and a second copy of some experts."""
    draw = torch.Generator().manual_seed(seed + 100)
    maps = torch.stack([torch.randperm(shape.experts, generator=draw) for _ in range(shape.layers)])

    def through(ids_TXK: Tensor) -> Tensor:
        made = torch.stack([maps[at][ids_TXK[:, at].long()] for at in range(shape.layers)], 1)
        copies = torch.rand(made.shape, generator=draw) < 0.5
        return torch.where((made < shape.experts // 8) & copies, made + shape.experts, made)

    return changed(record, through)


def without(ids_TXK: Tensor, begin: int, end: int) -> Tensor:
    return torch.cat((ids_TXK[:begin], ids_TXK[end:]))


def hole(ids_TXK: Tensor, begin: int, end: int, value: int = 0) -> Tensor:
    ids_TXK[begin:end] = value
    return ids_TXK


FAULTS: dict[str, tuple[str, Callable[[Rollout, int], RoutingRecord]]] = {
    "rows lost in the middle": (
        "rows lost",
        lambda made, seed: changed(made.record, lambda ids: without(ids, 12 + 5 * seed, 16 + 6 * seed), 0),
    ),
    "rows lost at the end": ("rows lost", lambda made, seed: changed(made.record, lambda ids: ids[: -9 - seed], 1)),
    "rows of another rank": ("rows shifted", lambda made, seed: shifted(made.record, 5 + seed)),
    "rows one too early": ("rows shifted", lambda made, seed: shifted(made.record, -1)),
    "prefix of two turns twice": (
        "prefix repeated", lambda made, seed: changed(made.record, lambda ids: torch.cat((ids[: 30 + seed], ids)), 0)
    ),
    "prefix of the first turn missing": (
        "prefix missing", lambda made, seed: changed(made.record, lambda ids: ids[25 + seed :], 1)
    ),
    "holes of zeros in a prefix": (
        "cache hole", lambda made, seed: changed(made.record, lambda ids: hole(ids, 0, 24 + seed), 0)
    ),
    "a page of -1": ("cache hole", lambda made, seed: changed(made.record, lambda ids: hole(ids, 16, 32, -1), 0)),
    "physical ids": ("physical ids", lambda made, seed: physical(made.record, made.shape, seed)),
    "layers in reverse": ("layer order", lambda made, seed: changed(made.record, lambda ids: ids.flip(1))),
    "two layers exchanged": (
        "layer order", lambda made, seed: changed(made.record, lambda ids: ids[:, [1, 0, *range(2, ids.shape[1])]])
    ),
    "a layer missing": ("layer count", lambda made, seed: changed(made.record, lambda ids: ids[:, 1:])),
    "uint8": ("dtype wrap", lambda made, seed: changed(made.record, lambda ids: ids.to(torch.uint8))),
    "int8": ("dtype wrap", lambda made, seed: changed(made.record, lambda ids: ids.to(torch.int8))),
    "a field dropped": ("field dropped", lambda made, seed: changed(made.record, lambda ids: None, 1)),
    "another top-k": ("top-k", lambda made, seed: changed(made.record, lambda ids: ids[..., :-1])),
    "the shared expert as one more": (
        "top-k",
        lambda made, seed: changed(
            made.record, lambda ids: torch.cat((ids, torch.full_like(ids[..., :1], made.shape.experts)), -1)
        ),
    ),
}  # fmt: skip
"""Each: the fault that must be named, and what plants it in a right record."""


def fits(fault: str, shape: Shape) -> bool:
    """Whether a fault changes a record of this shape at all."""
    return {"uint8": shape.experts > 256, "int8": shape.experts > 128}.get(fault, True)
