"""NIXL EP over its emulation: how ranks meet, and the limits that are its own."""

from functools import partial

import pytest
import torch
from moe_mk_contrib.nixl_ep import NixlEP

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.quant import FP8_1x128_UE8M0
from moe_mk.tokens import Routing
from tests.support.deepep_ranks import XB, asked, ranks_of, small
from tests.support.library_layers import CPU, Model, batch, expect_exact, flight_of
from tests.support.library_ranks import reported

NAME = "nixl_ep"


def test_ids_are_those_of_the_library_and_every_rank_is_connected() -> None:
    ranks = ranks_of(NAME, FP8_1x128_UE8M0)
    for transport in ranks.transports:
        buffer, status = transport._session.buffer.buffer, torch.full((2,), 7, dtype=torch.int32)
        buffer.query_mask_buffer(status)
        assert status.tolist() == [0, 0] and buffer.num_experts == 4
    (handle, _) = (tokens.handle for tokens in ranks.dispatched(XB))
    assert handle.ids_TK.dtype == torch.int32 and len(handle.library_handle) == 4


def test_limits_are_its_own() -> None:
    assert reported(NAME, asked()) == {} and reported(NAME, asked(num_tokens=1024)) == {}, "no queue pairs to fill"
    assert reported(NAME, small(top_k=16)) == {}
    assert "takes 16 experts a token, the router has 17" in reported(NAME, small(top_k=17))["top_k"]
    assert NixlEP.hidden_for(3200) == 3584
    assert NixlEP.buffer_bytes(small(hidden=3200)) == NixlEP.buffer_bytes(small(hidden=3584))
    assert "nixl_ep is not installed" in reported(NAME, asked(installed=()))["library"]


def go(model: Model, ranks: tuple[int, ...], seed: int, *, away: tuple[int, ...] = ()) -> None:
    """One step of some ranks; the others make no call at all. Experts of ranks that are away add nothing."""
    away_P = torch.isin(model.place.tables(CPU).rank_of_P.long(), torch.tensor(away, dtype=torch.int64))

    def step(rank: int) -> None:
        x_TH, routing = given = batch(seed + rank)
        kept = routing.ids_TK.masked_fill(away_P[routing.ids_TK.clamp_min(0).long()], -1)
        (layer,) = model.layers[rank]
        expect_exact(wait(flight_of(layer, given)), (x_TH, Routing(kept, routing.weights_TK)))

    model.world.together([partial(step, rank) for rank in ranks])


def change(model: Model, verb: str, by: tuple[int, ...], ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What each caller sees present after a change of membership."""

    def call(rank: int) -> tuple[int, ...]:
        transport = model.layers[rank][0].prepare_finalize
        getattr(transport, verb)([other for other in ranks if other != rank])
        return transport.present  # type: ignore[attr-defined, no-any-return]

    return model.world.together([partial(call, rank) for rank in by])


@pytest.mark.row(79)
def test_a_rank_leaves_the_rest_go_on_without_it_and_it_joins_again() -> None:
    model = Model(NAME, layers=1, ranks=4)
    go(model, (0, 1, 2, 3), 0)
    assert change(model, "disconnect", (0, 1, 2), (3,)) == [(0, 1, 2)] * 3
    for step in range(3):
        go(model, (0, 1, 2), 10 * step, away=(3,))
    assert change(model, "connect", (0, 1, 2, 3), (0, 1, 2, 3)) == [(0, 1, 2, 3)] * 4
    go(model, (0, 1, 2, 3), 50)


def test_membership_changes_between_steps_and_names_other_ranks() -> None:
    model = Model(NAME, layers=2, ranks=2)
    layer = model.layers[0][0].prepare_finalize
    assert isinstance(layer, NixlEP)
    with pytest.raises(ConfigError, match=r"rank 0 cannot mask \[0, 2\]; name other ranks of 0 to 1"):
        layer.mask([2, 0])
    with pytest.raises(ConfigError, match=r"ranks \[0\] cannot be disconnected: .* only the last of 2 ranks go"):
        layer.disconnect([0])

    def inside(rank: int) -> None:
        flight = flight_of(model.layers[rank][0], batch(rank))
        next(flight)
        with pytest.raises(UnsupportedError, match=r"(?s)cannot mask \[.\] inside a step.*1 operations are in flight"):
            model.layers[rank][1].prepare_finalize.mask([1 - rank])  # type: ignore[attr-defined]
        expect_exact(wait(flight), batch(rank))

    model.world.together([partial(inside, rank) for rank in range(2)])


def test_layers_of_one_group_know_alike_who_is_away() -> None:
    model = Model(NAME, layers=2, ranks=2)
    change(model, "mask", (0,), (1,))
    first, second = (layer.prepare_finalize for layer in model.layers[0])
    assert first.present == second.present == (0,)  # type: ignore[attr-defined]
    assert second._numbers_of(torch.tensor([[0, 4]])).tolist() == [[0, -1]]  # type: ignore[attr-defined]
