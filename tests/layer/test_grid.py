"""What ranks compare in both of their groups before a call: all of a grid end in an error where any two differ."""

import torch

from moe_mk import MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.errors import CommError
from moe_mk.flight import Flight, InFlight
from tests.support.layers import HIDDEN, layer, tensors

PLACES = [(ep, tp) for ep in range(2) for tp in range(2)]


def outcomes(layers: list[MoELayer]) -> list[str]:
    """One forward of all ranks, each of them advanced to its end: "" or its error."""
    x_TH, ended = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(1)), dict[int, str]()
    flights: list[Flight[torch.Tensor]] = [each.steps(x_TH) for each in layers]
    for _ in range(100):
        for rank, flight in enumerate(flights):
            try:
                at = next(flight, None) if rank not in ended else None
            except CommError as problem:
                ended[rank] = problem.detail
            else:
                ended.setdefault(rank, "") if not isinstance(at, InFlight) else None
    return [ended[rank] for rank in range(len(layers))]


def pairs() -> list[list[LockstepCommunicator]]:
    return [LockstepWorld(2).communicators() for _ in range(2)]


def grid() -> list[MoELayer]:
    columns, rows = pairs(), pairs()
    made = [
        layer(4, 2, ParallelGroups(ep=columns[tp][ep], tp=rows[ep][tp]), prepare_finalize="all_to_all")
        for ep, tp in PLACES
    ]
    assert outcomes(made) == [""] * 4
    return made


def test_slices_that_have_agreed_notice_a_load_in_another_group_of_ranks_too() -> None:
    layers, columns = grid(), pairs()
    for each, (ep, tp) in zip(layers, PLACES, strict=True):
        each.live.flip(each.live.stage(each.expert_map, ep=columns[tp][ep]))
    layers[0].load_weights(tensors(4))
    for refused in outcomes(layers)[:2]:
        assert "again on ranks [0] and not on ranks [1]; load them there too" in refused


def test_every_rank_of_a_grid_hears_that_one_of_them_alone_has_loaded_again() -> None:
    layers = grid()
    first = list(layers[2].state.experts.grid._loads)
    for each in layers:
        each.load_weights(tensors(4))
    assert outcomes(layers) == [""] * 4
    layers[0].load_weights(tensors(4))
    for each in layers[1:]:
        each.state.experts.grid.agreed = None  # as after a recovery: until then the calls differ
    layers[2].state.experts.grid._loads = first  # the last agreement was interrupted there
    refused = outcomes(layers)
    assert all("again on ranks [0] and not on ranks [1]; load them there too" in text for text in refused)
    for each in layers[1:]:
        each.load_weights(tensors(4))
    assert outcomes(layers) == [""] * 4
