"""Layers with exact arithmetic: outputs are bitwise equal for every placement of experts. Weights and
tokens are small integers, the activation is relu(x)^2, routing weights are 1/2 and 1/4: every sum in f32 is an integer
below 2^24 or a quarter of one. A wrong, missing or doubled expert changes it; an order of adding does not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.flight import Flight, interleave, wait
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, Thresholds
from moe_mk.rebalance.transfer import HEADER, PHASE
from moe_mk.tokens import Routing
from moe_mk.weights import SlotWeights

RANKS, EXPERTS, LAYERS, HIDDEN, INNER, TOKENS = 4, 8, 2, 8, 8, 24
# Three slots a rank: eleven would make any load even, so twelve always can.
PLACEMENT = (0, 1, 4, 2, 3, 5, 4, 5, 0, 6, 7, 1)
# Placements on EP ranks whose experts are cut into slices, by their number: experts 6 and 7, when hot, are too much for
# the rank that holds both, whatever the shares.
SLICED = {2: (0, 1, 2, 3, 4, 5, 6, 7, 0, 1), 3: (0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 2, 3)}


def tensors(layer: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + layer)

    def integers(rows: int, columns: int) -> Tensor:
        return torch.randint(-1, 2, (rows, columns), generator=draw).to(torch.float32)

    made = {"gate.weight": integers(EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        made[f"experts.{e}.gate_proj.weight"] = integers(INNER, HIDDEN)
        made[f"experts.{e}.up_proj.weight"] = integers(INNER, HIDDEN)
        made[f"experts.{e}.down_proj.weight"] = integers(HIDDEN, INNER)
    return made


def tokens(rank: int) -> Tensor:
    return torch.randint(-2, 3, (TOKENS, HIDDEN), generator=torch.Generator().manual_seed(rank)).to(torch.float32)


def routing(rank: int, layer: int, hot: Sequence[int]) -> Routing:
    """Half of all first choices fall on the hot experts; one token in six drops its second choice."""
    draw = torch.Generator().manual_seed(17 * rank + layer)
    first = torch.randint(0, EXPERTS, (TOKENS,), generator=draw, dtype=torch.int32)
    first[::2] = torch.tensor([hot[i % len(hot)] for i in range(TOKENS // 2)], dtype=torch.int32)
    second = (first + 1 + torch.randint(0, EXPERTS - 1, (TOKENS,), generator=draw, dtype=torch.int32)) % EXPERTS
    second[::6] = -1
    ids_TK = torch.stack((first, second), 1)
    return Routing(ids_TK, torch.where(ids_TK >= 0, torch.tensor([0.5, 0.25]), torch.tensor(0.0)))


def expected(rank: int, layer: int, hot: Sequence[int], version: int = 0) -> Tensor:
    """The layer written down once more, in f64, one token after the other. version: of its weights."""
    weights, x_TH, routed = tensors(layer + version * LAYERS), tokens(rank).double(), routing(rank, layer, hot)
    y_TH = torch.zeros_like(x_TH)
    for t in range(TOKENS):
        for e, weight in zip(routed.ids_TK[t].tolist(), routed.weights_TK[t].tolist(), strict=True):
            if e >= 0:
                gate, up, down = (weights[f"experts.{e}.{p}_proj.weight"].double() for p in ("gate", "up", "down"))
                y_TH[t] += weight * (down @ ((gate @ x_TH[t]).relu().square() * (up @ x_TH[t])))
    return y_TH.float()


def config(**settings: object) -> MoEConfig:
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "activation": "relu2"}
    data = {"model": {**model, "quant": {"weights": "fp32"}}, "router": {"top_k": 2, "renormalize": False}}
    return MoEConfig.parse(data, "a test").with_(
        **({"placement": PLACEMENT, "experts": "torch_cpu", "on_lost_expert": "drop"} | settings)
    )


def layers_of(comm: Communicator, tp: Communicator | None = None, **settings: object) -> list[MoELayer]:
    groups = ParallelGroups(ep=comm) if tp is None else ParallelGroups(ep=comm, tp=tp)
    return [
        MoELayer(
            config(**settings), dtype=torch.float32, groups=replace(groups, kept={}), name=f"layer {x}"
        ).load_weights(tensors(x))
        for x in range(LAYERS)
    ]


def settings(**changes: object) -> RebalanceSettings:
    """Quick to react: a sync every other step, and chunks of a third of an expert (768 bytes)."""
    quick: dict[str, object] = {
        "sync_every": 2, "decay": 0.0, "bytes_per_step": 256, "backoff": 3, "inline": True,
        "thresholds": Thresholds(1.1, 1.05, dwell=10_000),
    }  # fmt: skip
    return RebalanceSettings(**(quick | changes))  # type: ignore[arg-type]


class Rank:
    """One rank that serves: forwards of all layers, then one step of the manager, over and over."""

    def __init__(
        self, comm: Communicator, hot: Sequence[int] = (6,), tp: Communicator | None = None, *,
        placement: str | tuple[int, ...] = PLACEMENT, on_lost_expert: str = "drop", original_rank: int | None = None,
        **changes: object,
    ) -> None:  # fmt: skip
        """original_rank: numbers its tokens; None: its rank in the group."""
        self.original_rank = comm.rank if original_rank is None else original_rank
        self.hot, self.version, lost = tuple(hot), 0, {"on_lost_expert": on_lost_expert}
        self.layers = (
            layers_of(comm, placement=placement, **lost)
            if tp is None
            else layers_of(comm, tp, placement=SLICED[comm.size], **lost)
        )
        self.manager = RebalanceManager(self.layers, settings(**changes))
        self.expected = [expected(self.original_rank, x, self.hot) for x in range(LAYERS)]
        self.epochs: list[tuple[int, ...]] = []
        """The epochs of all layers at each forward."""
        self.wrong: list[str] = []

    def turn_to(self, hot: Sequence[int], version: int = 0) -> None:
        """Route to other experts, which have weights of this version from now on."""
        self.hot, self.version = tuple(hot), version
        self.expected = [expected(self.original_rank, x, self.hot, version) for x in range(LAYERS)]

    def forward(self) -> Flight[list[Tensor]]:
        outputs = []
        for x, layer in enumerate(self.layers):
            routed = routing(self.original_rank, x, self.hot)
            layer.router = lambda logits, bias, routed=routed: routed
            outputs.append((yield from layer.steps(tokens(self.original_rank))))
        return outputs

    def serve(self, phase: str = "decode") -> Flight[None]:
        """One step; notes every output that is not equal to the bit to what it should be."""
        self.epochs.append(tuple(layer.epoch for layer in self.layers))
        for x, y_TH in enumerate((yield from self.forward())):
            if not torch.equal(y_TH, self.expected[x]):
                self.wrong.append(
                    f"step {len(self.epochs)}: layer {x} differs in {int((y_TH != self.expected[x]).sum())}"
                )
        yield from self.manager.steps(phase)

    def serve_alone(self, steps: int) -> None:
        """As one of several processes."""
        for _ in range(steps):
            wait(self.serve())


def serve(ranks: Sequence[Rank], steps: int) -> None:
    """All ranks in lockstep."""
    for _ in range(steps):
        interleave([rank.serve() for rank in ranks])


def touch_chunks(rank: Rank, touch: Callable[[int, Tensor], Tensor | None]) -> list[int]:
    """Let a test replace chunks of experts that arrive, numbered from 1; returns the numbers, as they come."""
    comm, chunks = rank.manager.comm, list[int]()
    receive_all = comm.all_to_all

    def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        arrived = yield from receive_all(rows, send, receive, phase)
        if phase != PHASE or not len(arrived):
            return arrived
        chunks.append(len(chunks) + 1)
        touched = touch(chunks[-1], arrived.clone())
        return arrived if touched is None else touched

    comm.all_to_all = all_to_all  # type: ignore[method-assign]
    return chunks


def damage_first(at: int = HEADER + 3) -> Callable[[int, Tensor], Tensor | None]:
    """Flip a bit of the first chunk alone."""

    def damage(chunk: int, arrived: Tensor) -> Tensor | None:
        if chunk > 1:
            return None
        arrived[at] ^= 64
        return arrived

    return damage


def lose(ranks: Sequence[Rank], dead: int) -> list[Rank]:
    """The ranks that are left, in a world of their own."""
    left = [rank for rank in ranks if rank.original_rank != dead]
    comms = LockstepWorld(len(left)).communicators()
    interleave([r.manager.rank_lost_steps(dead, c) for r, c in zip(left, comms, strict=True)])
    return left


def join(ranks: Sequence[Rank], at: int, new: Callable[[Communicator], Rank]) -> list[Rank]:
    """These ranks and one more, at a place among them, in a world of their own."""
    comms = LockstepWorld(len(ranks) + 1).communicators()
    every = [*ranks[:at], new(comms[at]), *ranks[at:]]
    interleave([rank.manager.rank_joined_steps(at, comm) for rank, comm in zip(every, comms, strict=True)])
    return every


def check_that_all_is_well(ranks: Sequence[Rank]) -> None:
    assert [rank.wrong for rank in ranks] == [[]] * len(ranks)
    assert all(rank.epochs == ranks[0].epochs for rank in ranks)
    assert all(holds_right_weights(layer, x) for rank in ranks for x, layer in enumerate(rank.layers))


def holds_right_weights(layer: MoELayer, number: int) -> bool:
    """Whether every slot of this rank holds, to the bit, what the checkpoint states of its expert."""
    weights, tp = tensors(number), layer.tp
    return all(
        matrices_equal(layer.live.export_slot(slot), weights, e, tp.rank, tp.size)
        for slot, e in enumerate(layer.expert_map.local_to_global(layer.ep.rank))
    )


def matrices_equal(slot: SlotWeights, weights: dict[str, Tensor], expert: int, part: int = 0, parts: int = 1) -> bool:
    """part: the slice of the intermediate size: rows of gate and up, columns of down."""
    assert slot.gate_IH is not None
    named = (("gate", slot.gate_IH, 0), ("up", slot.up_IH, 0), ("down", slot.down_HI, 1))
    return all(
        torch.equal(q.values, weights[f"experts.{expert}.{name}_proj.weight"].chunk(parts, axis)[part])
        for name, q, axis in named
    )
