"""One call of the experts: by hand, without tokens, with dropped assignments, and wrong."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")


from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.integrations.hf import plan as plans
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.cases import deepseek, experts_of, prompt
from tests.integrations.hf.classes import EXPERTS, HIDDEN, tiny_call


def test_one_token_by_hand() -> None:
    # Weights of ones times c: gate = up = c * sum(x); y = weight * c * I * silu(c s) * c s.
    module = deepseek()
    with torch.no_grad():
        module.gate_up_proj.fill_(0.5)
        module.down_proj.fill_(0.25)
        x_TH = torch.full((1, HIDDEN), 0.125)  # s = 32 / 8 = 4, so gate = up = 2
        y_TH = module(x_TH, torch.tensor([[2]]), torch.tensor([[3.0]]))
    silu_of_2 = 2.0 / (1.0 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(y_TH, 3.0 * 0.25 * 24 * silu_of_2 * 2.0 * torch.ones(1, HIDDEN))


@pytest.mark.parametrize("name", ["DeepseekV3Experts", "GptOssExperts"])
def test_no_tokens_one_token_and_dropped_assignments(name: str) -> None:
    module = experts_of(name)
    x_TH, ids_TK, weights_TK = tiny_call()
    with torch.no_grad():
        assert module(x_TH[:0], ids_TK[:0], weights_TK[:0]).shape == (0, HIDDEN)
        whole = module(x_TH, ids_TK, weights_TK)
        assert torch.allclose(module(x_TH[:1], ids_TK[:1], weights_TK[:1]), whole[:1], atol=1e-5)
        # Hosts mark "not here" with E or -1; what the weight beside it states must not matter.
        kept = module(x_TH, ids_TK, weights_TK.clone().index_fill_(1, torch.tensor([1]), 0.0))
        for nowhere in (EXPERTS, -1, 2**31 - 1):
            ids = ids_TK.clone().index_fill_(1, torch.tensor([1]), nowhere)
            assert torch.allclose(module(x_TH, ids, weights_TK), kept, atol=1e-5)
        assert not module(x_TH, torch.full_like(ids_TK, EXPERTS), weights_TK).any()


def test_inputs_stay_as_they_were_and_ids_may_be_int32() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    before = [tensor.clone() for tensor in (x_TH, ids_TK, weights_TK)]
    with torch.no_grad():
        y_TH = module(x_TH, ids_TK, weights_TK)
        assert torch.equal(module(x_TH, ids_TK.int(), weights_TK), y_TH)
    assert all(torch.equal(one, other) for one, other in zip(before, (x_TH, ids_TK, weights_TK), strict=True))


def test_wrong_calls_are_refused_with_names() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    with pytest.raises(ShapeError, match=r"top_k_index .*dtype torch.float32"):
        module(x_TH, weights_TK, weights_TK)
    with pytest.raises(ShapeError, match=r"top_k_weights is \(7, 2\), top_k_index is \(7, 3\)"):
        module(x_TH, ids_TK, weights_TK[:, :2])
    with pytest.raises(UnsupportedError, match=r"DeepseekV3Experts is called with more"):
        module(x_TH, ids_TK, weights_TK, process_group=None)


def test_a_backward_pass_states_that_there_is_none() -> None:
    model = tiny_model()
    model.set_experts_implementation("moe_mk")
    ids = prompt()
    loss = model(ids, labels=ids).loss
    with pytest.raises(UnsupportedError, match=r"gradients through experts_implementation='moe_mk'\n.*inference"):
        loss.backward()


def test_the_operator_keeps_the_rules_of_torch() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    tensors = [module.gate_up_proj.detach(), module.down_proj.detach()]
    arguments = (x_TH, ids_TK, weights_TK, tensors, plans.enter(module), "{}")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_mk.hf_experts, arguments, test_utils=tests)
