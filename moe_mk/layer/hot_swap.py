"""Change the transport or the experts backend of a layer that serves, verified on its own tokens.

    report = swap_backends(layer, x_TH, prepare_finalize="one_sided")       # every rank, between two forwards

1. prepare: the new pair is chosen, built and given the weights; the old one serves meanwhile.
2. quiesce: ranks vote; calls that are open end with the pair that they began with.
3. switch: every rank runs the new pair without tokens, compares decisions, and uses it from the same step on.
4. attest: both pairs ran the same tokens, and every rank compares their outputs.
5. roll back: where any rank has failed in 1 or 4, all ranks keep the old pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.flight import Flight, wait
from moe_mk.layer.moe_layer import MoELayer


@dataclass(frozen=True)
class SwapReport:
    """What became of a swap; the same outcome on every rank."""

    old: str
    new: str
    """Names of the pairs, transport + experts; "" where none was found for the settings."""
    epoch: int
    """Of the state that serves now."""
    tokens: int
    """Tokens of this rank that both pairs ran."""
    error: float
    """Norm of the difference of both outputs over that of the old one, on this rank; 0 without tokens."""
    failed_ranks: tuple[int, ...]
    """EP ranks on which the new pair could not be built or differs by more than the limit."""
    reason: str
    """Why this rank has rejected it; "" where it has not."""

    @property
    def swapped(self) -> bool:
        """Whether the new pair serves; else the old one does."""
        return not self.failed_ranks


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
    Raises CommError, with the old pair in place, where a peer is dead, late, or in another call.
    """
    return wait(swap_steps(layer, x_TH, limit=limit, settings=settings, token_ids_T=token_ids_T))


def swap_steps(
    layer: MoELayer,
    x_TH: Tensor,
    *,
    limit: float,
    settings: Mapping[str, object],
    token_ids_T: Tensor | None = None,
) -> Flight[SwapReport]:
    """`swap_backends` as a flight, for several ranks in one process."""
    name, staged, reason = layer.decision.chosen.name, None, ""
    try:
        staged = layer.live.stage(layer.expert_map, settings=settings)
    except MoEMKError as problem:
        reason = str(problem)
    failed = yield from _vote(layer, reason)
    if failed or staged is None:
        return SwapReport(name, "", layer.epoch, 0, 0.0, failed, reason)
    yield from layer.live.try_out(staged)
    with layer.routing.unseen():
        before_TH = yield from layer.steps(x_TH, torch.zeros_like(layer.expert_load), token_ids_T)
        old = layer.live.flip(staged)
        try:
            error, reason, failed = yield from _attest(layer, x_TH, token_ids_T, before_TH, limit)
        except BaseException:
            layer.live.flip(old)
            raise
    new = layer.decision.chosen.name
    if failed:
        layer.live.flip(old)
    return SwapReport(name, new, layer.epoch, len(x_TH), error, failed, reason)


def _attest(
    layer: MoELayer, x_TH: Tensor, token_ids_T: Tensor | None, before_TH: Tensor, limit: float
) -> Flight[tuple[float, str, tuple[int, ...]]]:
    """Run the new pair on the same tokens: this rank's error, its objection, and the ranks that object."""
    after_TH = yield from layer.steps(x_TH, torch.zeros_like(layer.expert_load), token_ids_T)
    difference, scale = (after_TH.double() - before_TH.double()).norm(), before_TH.double().norm()
    error = float(difference / scale.clamp_min(torch.finfo(torch.float64).tiny)) if len(x_TH) else 0.0
    reason = "" if error <= limit else f"outputs differ by {error:.3g}, the limit is {limit:.3g}"
    return error, reason, (yield from _vote(layer, reason))


def _vote(layer: MoELayer, reason: str) -> Flight[tuple[int, ...]]:
    """The EP ranks that object, on any of their TP slices."""
    objects_W = torch.zeros(layer.ep.size, dtype=torch.int64, device=layer.device)
    objects_W[layer.ep.rank] = int(bool(reason))
    for comm in (layer.tp, layer.ep):
        if comm.size > 1:
            with layer.tp.abort_on_error(), layer.ep.abort_on_error():
                objects_W = yield from comm.all_reduce(objects_W, "swap vote")
    return tuple(objects_W.nonzero().flatten().tolist())
