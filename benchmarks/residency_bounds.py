"""What a policy of residency could reach: reads of the experts of a layer, simulated over recorded routing.

    python benchmarks/residency_bounds.py examples/data/tiny_routing.safetensors --slots 55 --tokens 1 4

A trace of fewer experts than `--experts` is cut into streams that run side by side: stream s has experts of its own,
and each of its tokens takes the first of its recorded choices, so that 8 streams of a trace with 32 experts are a layer
of 256 that chooses 8. Two policies use information that no cache has, as bounds: the best choice
of experts that never changes, and `decayed` with the routing of the next steps.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from common import parser_of
from torch import Tensor

from moe_mk.experts.residency import POLICIES, DecayedFrequency, Policy
from moe_mk.lab.plan.residency import Belady, Machine, Recorded, simulate
from moe_mk.lab.trace.routing import RoutingTrace

AHEAD = (1, 2, 4, 8, 16, 32)


def routing_of(trace: RoutingTrace, experts: int) -> Tensor:
    """Ids [T, K] of consecutive tokens of a layer with so many experts; see the head of this file."""
    own = trace.facts.num_experts
    if experts % own:
        raise SystemExit(f"--experts {experts} is no multiple of the {own} experts of the trace")
    by_layer = [torch.cat([e.ids_TK for e in trace.forwards() if e.layer == layer]) for layer in trace.layers]
    if experts == own:
        return by_layer[0].to(torch.int32)
    streams = experts // own
    first_R = torch.cat(by_layer)[:, 0].to(torch.int32)
    length = len(first_R) // streams
    ids_SK = first_R[: length * streams].view(streams, length).T
    return (ids_SK + torch.arange(streams, dtype=torch.int32, device="cpu") * own).contiguous()


def ahead_of(column: list[tuple[int, ...]], steps: int) -> type[Policy]:
    """As `decayed`, but experts that the next steps use are kept: the routing of so many steps is known in advance."""

    class Ahead(DecayedFrequency):
        """Evicts what the next steps do not use, else what they use last."""

        def __init__(self, num_experts: int) -> None:
            super().__init__(num_experts)
            self._optimum, self._now = Belady(num_experts, column), -1

        def used(self, experts: Sequence[int]) -> None:
            super().used(experts)
            self._optimum.used(experts)
            self._now += 1

        def worth(self, expert: int) -> float:
            soon = any(expert in step for step in column[self._now + 1 : self._now + 1 + steps])
            return 1 + self._optimum.worth(expert) if soon else super().worth(expert)

    return Ahead


def in_hindsight(column: list[tuple[int, ...]]) -> type[Policy]:
    """Keeps the experts that the counted half of the steps uses most often: the best choice that never changes."""
    uses = Counter(expert for step in column[len(column) // 2 :] for expert in step)

    class InHindsight(Policy):
        """Evicts the expert with the fewest uses in the counted half."""

        def used(self, experts: Sequence[int]) -> None:
            """Nothing is learnt."""

        def worth(self, expert: int) -> float:
            return uses[expert]

    return InHindsight


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--experts", type=int, default=256, help="a multiple of those of the trace")
    parser.add_argument("--slots", type=int, default=55)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help="of a step")
    options = parser.parse_args()
    ids_RK = routing_of(RoutingTrace.read(options.trace), options.experts)
    for tokens in options.tokens:
        column = [tuple(torch.unique(each).tolist()) for each in ids_RK.split(tokens) if len(each) == tokens]
        recorded = Recorded([[each] for each in column], options.experts, ids_RK.shape[1])
        bounds = {"best fixed choice": in_hindsight(column)} | {f"{n} steps ahead": ahead_of(column, n) for n in AHEAD}
        for name, policy in bounds.items():
            POLICIES.register(f"{name}, {tokens}")(policy)
        names = {name: name for name in ("lru", "lfu", "decayed")} | {name: f"{name}, {tokens}" for name in bounds}
        belady = simulate(recorded, Machine(1, 1.0, 1.0), options.slots, "belady")
        print(f"{tokens} tokens, {options.slots} slots, belady: {belady.reads / len(belady.seconds):.2f} reads a step")
        for name, registered in names.items():
            outcome = simulate(recorded, Machine(1, 1.0, 1.0), options.slots, registered)
            reads, ratio = outcome.reads / len(outcome.seconds), outcome.reads / belady.reads
            print(f"{tokens} tokens, {options.slots} slots, {name}: {reads:.2f} reads a step, {ratio:.2f} x belady")


if __name__ == "__main__":
    main()
