"""The layer is one operator to torch: compiled in one graph for any number of tokens, and checked by opcheck."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ShapeError
from moe_mk.errors import UnsupportedError
from moe_mk.layer.custom_op import moe_layer
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, INNER, layer, tensors


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
    torch.library.opcheck(moe_layer, (x_TH, made.expert_load, made._entry))


def test_the_fake_answers_shape_and_dtype_without_a_layer() -> None:
    with torch._subclasses.FakeTensorMode():
        x_TH = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        y_TH = moe_layer(x_TH.t().contiguous().t(), torch.zeros(8, dtype=torch.int64), torch.tensor(0))
    assert y_TH.shape == (3, HIDDEN) and y_TH.dtype is torch.bfloat16 and y_TH.is_contiguous()


class Block(torch.nn.Module):
    """A decoder layer, as far as the compiler is concerned."""

    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.norm, self.moe = torch.nn.RMSNorm(HIDDEN, elementwise_affine=False), moe

    def forward(self, x_TH: Tensor) -> Tensor:
        out: Tensor = x_TH + self.moe(self.norm(x_TH))
        return out


@pytest.mark.thorough
@pytest.mark.parametrize("experts", ["torch_cpu", pytest.param("cpu_native", marks=NEEDS_COMPILER)])
def test_61_blocks_compiled_one_by_one_share_one_graph(experts: str) -> None:
    dtype, weights = torch.bfloat16, tensors(4, dtype=torch.bfloat16)
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 4, "quant": {"weights": "bf16"}}
    settings = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test").with_(experts=experts)
    layers = [MoELayer(settings, dtype=dtype, name=f"layer {n}").load_weights(weights) for n in range(61)]
    for number, each in enumerate(layers):  # so that a graph that calls another layer is noticed
        assert each.weights.gate_EH is not None
        each.state.backends.gate.load(each.weights.gate_EH.roll(number, 0), None)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    x_TH = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = [Block(each) for each in layers]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        found = [torch.compile(block, fullgraph=True, backend=backend)(x_TH) for block in blocks]
        assert len(graphs) == 1
        for block, y_TH in zip(blocks, found, strict=True):
            assert torch.equal(y_TH, block(x_TH))
    assert [int(each.expert_load.sum()) for each in layers] == [2 * 3 * 2] * 61


def test_a_graph_whose_layer_is_gone_says_so(made: MoELayer) -> None:
    entry, load_E = made._entry, made.expert_load
    with pytest.raises(UnsupportedError, match="behind moe_mk::moe_layer of a compiled graph is gone"):
        moe_layer(torch.randn(2, HIDDEN), load_E, entry + 10**6)
