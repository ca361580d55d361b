"""The mini-sglang backend: entered by name, softmax and top-k inside, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import mini_sglang as door
from tests.integrations.engines.cases import CLOSE, EXPERTS, Tiny, call, error
from tests.integrations.engines.stand_ins import Registry, put_in


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    put_in(monkeypatch, {"minisgl.moe": {"SUPPORTED_MOE_BACKENDS": made}})
    return made


def test_it_enters_a_maker_under_its_name_once(table: Registry) -> None:
    assert door.register() and table.supported_names() == ["moe_mk"]
    assert not door.register()
    assert isinstance(table.made["moe_mk"](), door.MoeMkBackend)


@pytest.mark.parametrize(
    ("renormalize", "activation", "top_k"), [(True, "silu", 2), (False, "gelu", 3), (True, "gelu", 1)]
)
def test_it_routes_by_softmax_and_computes_what_loops_do(
    table: Registry, renormalize: bool, activation: str, top_k: int
) -> None:
    door.register("ours", experts="reference")
    backend, draw = table.made["ours"](), torch.Generator().manual_seed(2)
    layers = [replace(Tiny.drawn(inner=24 + 8 * seed, seed=seed), activation=activation) for seed in (0, 1)]
    one, other = layers[0].w13.clone(), layers[1]
    for tiny, count in ((layers[0], 7), (other, 0), (other, 2), (layers[0], 1), (replace(layers[0], w13=2 * one), 3)):
        layers[0].w13.copy_(one * (1 + (count == 3)))  # new weights in place
        w13 = layers[0].w13 if tiny is not other else other.w13
        x_TH, logits_TE = call(count)[0], torch.randn((count, EXPERTS), generator=draw)
        weights_TK, ids_TK = logits_TE.softmax(dim=-1).topk(top_k)
        if renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        got = backend.forward(
            hidden_states=x_TH, w1=w13, w2=tiny.w2, gating_output=logits_TE, topk=top_k, renormalize=renormalize,
            activation=activation, apply_router_weight_on_input=False,
        )  # fmt: skip
        assert got.shape == x_TH.shape and (not count or error(got, tiny.loops(x_TH, weights_TK, ids_TK)) < CLOSE)
    held = [experts for _, experts, _ in backend._held._held.values()]
    assert {(experts.backend, experts.of_rank.decision.problem.config.router.top_k) for experts in held} == {
        ("reference", top_k)
    }
    assert table.made["ours"]() is not backend and not table.made["ours"]()._held._held, "another model"
    first, down = layers[1].w13, layers[1].w2
    down.mul_(2.0)
    again = backend.forward(x_TH, first.requires_grad_(), down, logits_TE, top_k, renormalize, activation)
    assert error(again, other.loops(x_TH, weights_TK, ids_TK).detach()) < CLOSE and not again.requires_grad


def test_weights_applied_to_the_input_are_refused(table: Registry) -> None:
    door.register()
    tiny, (x_TH, _, _) = Tiny.drawn(), call()
    with pytest.raises(UnsupportedError, match="mini-sglang\n.*applied to the experts' input"):
        table.made["moe_mk"]().forward(
            x_TH, tiny.w13, tiny.w2, torch.zeros(7, EXPERTS), 2, True, apply_router_weight_on_input=True
        )
