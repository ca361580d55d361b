"""A whole layer on a GPU: routed, multiplied and summed there, one operator to torch, equal to itself on the host."""

from __future__ import annotations

import pytest
import torch

from moe_mk import MoEConfig, MoELayer
from moe_mk.layer.custom_op import moe_layer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 8, 2


def made(experts: str, device: str) -> MoELayer:
    model = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "quant": {"weights": "bf16"},
    }
    config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "a test").with_(experts=experts)
    draw = torch.Generator().manual_seed(1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn((rows, columns), generator=draw) * columns**-0.5).bfloat16()

    tensors = {"gate.weight": normal(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        tensors[f"experts.{expert}.gate_proj.weight"] = normal(INNER, HIDDEN)
        tensors[f"experts.{expert}.up_proj.weight"] = normal(INNER, HIDDEN)
        tensors[f"experts.{expert}.down_proj.weight"] = normal(HIDDEN, INNER)
    return MoELayer(config, dtype=torch.bfloat16, device=torch.device(device)).load_weights(tensors)


@pytest.mark.parametrize("count", [0, 1, 33])
def test_a_layer_on_the_gpu_equals_the_reference_on_the_host(count: int) -> None:
    x_TH = torch.randn(count, HIDDEN).bfloat16()
    ours, reference = made("triton", "cuda"), made("reference", "cpu")
    assert ours.decision.chosen.experts == "triton"
    got, expected = ours(x_TH.cuda()).cpu().float(), reference(x_TH).float()
    assert got.shape == expected.shape
    if count:
        far = (got - expected).norm(dim=1) / expected.norm(dim=1)
        assert float((far > 0.03).float().mean()) <= 0.1, "a tie of two scores in bf16 may send a token elsewhere"


def test_opcheck_is_clean() -> None:
    layer = made("triton", "cuda")
    x_TH = torch.randn(5, HIDDEN, device="cuda").bfloat16()
    torch.library.opcheck(moe_layer, (x_TH, layer.expert_load, layer._entry))


def test_a_compiled_layer_equals_the_eager_one() -> None:
    layer = made("triton", "cuda")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (1, 17):
        x_TH = torch.randn(count, HIDDEN, device="cuda").bfloat16()
        assert torch.equal(compiled(x_TH), layer(x_TH))
