"""Change the transport or the experts backend of a layer that serves, verified on its own tokens.

    report = swap_backends(layer, x_TH, prepare_finalize="one_sided")       # every rank, between two forwards

1. prepare: the new pair is chosen, built and given the weights; the old one serves meanwhile.
2. vote: where any rank could not do so, all ranks keep the old pair.
3. try out: every rank runs the new pair without tokens, and compares decisions.
4. attest: both pairs run the same tokens, and every rank compares their outputs.
5. switch: where no rank objects, all ranks use the new pair from the same step on; else they keep the old one.

Calls that are open end with the pair that they began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.collective import collective
from moe_mk.comm.failure import Change, describe
from moe_mk.errors import unless_signalled
from moe_mk.flight import Flight, wait
from moe_mk.layer.forward import steps
from moe_mk.layer.moe_layer import MoELayer, groups_of
from moe_mk.layer.serving_state import ServingState


@dataclass(frozen=True)
class SwapReport:
    """The outcome of a swap; the same on every rank."""

    old: str
    new: str
    """Names of the pairs, transport + experts; "" where none was found for the settings."""
    epoch: int
    """Of the state that serves now."""
    tokens: int
    """Tokens of this rank that both pairs ran."""
    error: float
    """Norm of the difference of both outputs over that of the old one, on this rank; 0 without tokens.

    NaN or infinite where one of them is not finite and the other differs."""
    failed_ranks: tuple[int, ...]
    """EP ranks on which the new pair could not be built or differs by more than the limit."""
    reason: str
    """Why this rank has rejected it; "" where it has not."""

    @property
    def swapped(self) -> bool:
        """Whether the new pair serves; else the old one does."""
        return not self.failed_ranks


@collective(groups_of)
def swap_backends(
    layer: MoELayer, x_TH: Tensor, *, limit: float = 0.05, token_ids_T: Tensor | None = None, **settings: object
) -> SwapReport:
    """Serve with another transport or other experts from the next forward on, or keep the old ones on all ranks.

    Every rank of the layer's groups calls it at the same step, between two forwards. x_TH: tokens of this rank on which
    both pairs run, zero or more; they are not counted in the layer's load and not passed to `on_routing`. limit: the
    largest relative error between both; 0.0 asks for equal bits, `oracle.expected_error` states what number
    formats give. token_ids_T: of the tokens, for a layer that chooses experts by token id.
    settings: of the kernel section, such as prepare_finalize and experts.
    Both pairs are in memory until it returns; weights only once, where the experts backend is the same.
    A rank that cannot build the new pair, for lack of memory for instance, is listed in the report of every rank.
    Raises CommError, with the old pair in place, where a peer is dead, late, in another call, or was interrupted: then
    `layer.recover()` ends with the same pair on all ranks, the new one if any of them had counted all votes.
    """
    return wait(swap_steps(layer, x_TH, limit=limit, settings=settings, token_ids_T=token_ids_T))


@collective(groups_of)
def swap_steps(
    layer: MoELayer,
    x_TH: Tensor,
    *,
    limit: float,
    settings: Mapping[str, object],
    token_ids_T: Tensor | None = None,
) -> Flight[SwapReport]:
    """`swap_backends` as a flight, for several ranks in one process."""
    old, groups, name, reason = layer.state, groups_of(layer), layer.decision.chosen.name, ""
    staged: ServingState | None = None
    try:
        staged = layer.live.stage(layer.expert_map, settings=settings)
    except unless_signalled(Exception) as problem:
        reason = describe(problem)
    failed = yield from _vote(layer, reason)
    if failed or staged is None:
        return SwapReport(name, "", layer.epoch, 0, 0.0, failed, reason)
    yield from layer.live.try_out(staged)
    outputs: list[Tensor] = []
    with layer.routing.unseen():
        for state in (old, staged):
            load_E = torch.zeros_like(layer.expert_load)
            outputs.append((yield from steps(state, layer.routing, x_TH, load_E, token_ids_T, None)))
    error = _relative_error(*outputs)
    reason = "" if error <= limit else f"outputs differ by {error:.3g}, the limit is {limit:.3g}"

    def switch() -> None:
        if layer.state is old:
            layer.live.flip(staged)

    def back() -> None:
        if layer.state.backends is staged.backends:
            layer.live.flip(old)

    failed = yield from groups.decide(_vote(layer, reason), Change(switch, back))
    return SwapReport(name, staged.experts.decision.chosen.name, layer.epoch, len(x_TH), error, failed, reason)


def _relative_error(before_TH: Tensor, after_TH: Tensor) -> float:
    """Norm of the difference over that of `before_TH`; numbers that are not finite must be the same in both."""
    before, after = before_TH.double(), after_TH.double()
    same = (before == after) | (before.isnan() & after.isnan())
    difference = torch.where(same, 0.0, after - before).norm()
    scale = before.nan_to_num(0.0, 0.0, 0.0).norm()
    return float(difference / scale.clamp_min(torch.finfo(torch.float64).tiny))


def _vote(layer: MoELayer, reason: str) -> Flight[tuple[int, ...]]:
    """The EP ranks that object, on any of their TP slices."""
    objects_W = yield from layer.state.experts.grid.gather(int(bool(reason)), "swap vote")
    return tuple(rank for rank, objects in enumerate(objects_W) if objects)
