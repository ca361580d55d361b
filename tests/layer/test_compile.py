"""The layer is one operator to torch: compiled in one graph for any number of tokens, and checked by opcheck."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_mk import MoELayer, ShapeError
from moe_mk.layer.custom_op import moe_layer
from tests.support.layers import HIDDEN, layer


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def made() -> MoELayer:
    return layer(8, 2, experts="torch_cpu", num_shared_experts=1)


def test_one_graph_serves_every_number_of_tokens(made: MoELayer) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=backend)
    for count in (2, 3, 17, 64):
        x_TH = torch.randn(count, HIDDEN)
        assert torch.equal(compiled(x_TH), made(x_TH))
    assert len(graphs) == 1, "no recompilation over T"
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(call) for call in calls] == ["moe_mk.moe_layer.default"]


def test_a_compiled_layer_inside_a_model_counts_experts_and_equals_eager(made: MoELayer) -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(HIDDEN, elementwise_affine=False), made)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    x_TH = torch.randn(5, HIDDEN)
    with torch.no_grad():
        expected = model(x_TH)
        made.reset_expert_load()
        assert torch.equal(compiled(x_TH), expected)
    assert int(made.expert_load.sum()) == 10


def test_a_compiled_layer_refuses_what_an_eager_one_refuses(made: MoELayer) -> None:
    compiled = torch.compile(made, dynamic=True, backend="eager")
    with pytest.raises(ShapeError, match=r"hidden_states has H=17 \(axis 1\), expected H=16"):
        compiled(torch.randn(5, 17))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_opcheck_is_clean(made: MoELayer, count: int) -> None:
    x_TH = torch.randn(count, HIDDEN)
    torch.library.opcheck(moe_layer, (x_TH, made.expert_load, made._number))


def test_the_fake_answers_shape_and_dtype_without_a_layer() -> None:
    with torch._subclasses.FakeTensorMode():
        x_TH = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        y_TH = moe_layer(x_TH.t().contiguous().t(), torch.zeros(8, dtype=torch.int64), 0)
    assert y_TH.shape == (3, HIDDEN) and y_TH.dtype is torch.bfloat16 and y_TH.is_contiguous()
