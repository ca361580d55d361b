"""The mini-sglang backend: entered by name, softmax and top-k inside, and what it refuses."""

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import mini_sglang as door
from tests.integrations.engines.cases import CLOSE, EXPERTS, TOP_K, Tiny, call, error
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


@pytest.mark.parametrize("renormalize", [True, False])
def test_it_routes_by_softmax_and_computes_what_loops_do(table: Registry, renormalize: bool) -> None:
    door.register(experts="torch_cpu")
    tiny, (x_TH, _, _) = Tiny.drawn(), call()
    logits_TE = torch.randn((x_TH.shape[0], EXPERTS), generator=torch.Generator().manual_seed(2))
    weights_TK, ids_TK = logits_TE.softmax(dim=-1).topk(TOP_K)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    got = table.made["moe_mk"]().forward(
        hidden_states=x_TH, w1=tiny.w13, w2=tiny.w2, gating_output=logits_TE, topk=TOP_K, renormalize=renormalize,
        activation="silu", apply_router_weight_on_input=False,
    )  # fmt: skip
    assert error(got, tiny.loops(x_TH, weights_TK, ids_TK)) < CLOSE


def test_two_layers_of_a_model_have_experts_of_their_own(table: Registry) -> None:
    door.register()
    backend, (x_TH, _, _) = table.made["moe_mk"](), call()
    logits_TE = torch.zeros(x_TH.shape[0], EXPERTS)
    logits_TE[:, 3] = 100.0
    for seed in (0, 1, 0):
        tiny = Tiny.drawn(seed=seed)
        got = backend.forward(x_TH, tiny.w13, tiny.w2, logits_TE, 1, True)
        assert error(got, tiny.loops(x_TH, torch.ones(7, 1), torch.full((7, 1), 3))) < CLOSE


def test_weights_applied_to_the_input_are_refused(table: Registry) -> None:
    door.register()
    tiny, (x_TH, _, _) = Tiny.drawn(), call()
    with pytest.raises(UnsupportedError, match="mini-sglang\n.*applied to the experts' input"):
        table.made["moe_mk"]().forward(
            x_TH, tiny.w13, tiny.w2, torch.zeros(7, EXPERTS), 2, True, apply_router_weight_on_input=True
        )
