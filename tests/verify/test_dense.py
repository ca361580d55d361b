"""The reference by hand, and that it shares nothing with what it judges."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_mk.config.moe import MoEConfig
from moe_mk.lab.verify import dense
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.quant.fp8 import FP8_TENSOR, Fp8Block
from moe_mk.quant.plain import FP32
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights import LayerSpec, LayerWeights, MappingSource, load_layer

FORBIDDEN = ("router", "experts", "permute", "kernels", "prepare_finalize", "kernel", "runner", "layer", "oracle")


def test_the_reference_imports_nothing_that_it_judges() -> None:
    tree = ast.parse(Path(dense.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {module.split(".")[1] for module in modules if module.startswith("moe_mk.")}
    assert ours == {"config", "errors", "quant", "weights"} and not ours & set(FORBIDDEN)
    functions = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Attribute)}  # fmt: skip
    assert not functions & {"dequantize", "quantize", "slot", "topk", "silu", "sigmoid"}


def hand_layer(**router: object) -> tuple[MoEConfig, LayerWeights]:
    """Two features, four experts of width one. Expert e: gate reads x0, up reads x1, down writes e + 1 to y0."""
    config = MoEConfig.parse(
        {
            "model": {"hidden_size": 2, "moe_intermediate_size": 1, "num_experts": 4, "quant": {"weights": "fp32"}},
            "router": {"top_k": 2, "scoring_func": "sigmoid", "renormalize": True, **router},
        },
        "by hand",
    )
    tensors = {"gate.weight": torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])}
    for e in range(4):
        tensors[f"experts.{e}.gate_proj.weight"] = torch.tensor([[1.0, 0.0]])
        tensors[f"experts.{e}.up_proj.weight"] = torch.tensor([[0.0, 1.0]])
        tensors[f"experts.{e}.down_proj.weight"] = torch.tensor([[e + 1.0], [0.0]])
    bias = torch.tensor([0.9, 0.0, 0.0, 0.0])
    if config.router.has_correction_bias:
        tensors["gate.e_score_correction_bias"] = bias
    spec = LayerSpec(4, 2, 1, FP32, has_gate_bias=config.router.has_correction_bias)
    return config, load_layer(MappingSource(tensors), 0, spec, owned=range(4), prefix="")


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_two_experts_by_hand() -> None:
    # x = (1, 2): logits 0 1 2 3, so experts 3 and 2 are chosen. silu(1) * 2 = h for each; down gives 4 h and 3 h.
    config, weights = hand_layer()
    result = dense_layer(torch.tensor([[1.0, 2.0]]), config, weights)
    a, b, h = sigmoid(3), sigmoid(2), sigmoid(1) * 2
    assert result.ids_TK.tolist() == [[3, 2]]
    assert result.y_TH[0].tolist() == pytest.approx([(4 * a + 3 * b) / (a + b) * h, 0.0], rel=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    # sigmoid(0) + 0.9 = 1.4 is the best score; its weight is the plain sigmoid(0) = 0.5. Scaled once by 2.5.
    config, weights = hand_layer(has_correction_bias=True, routed_scaling_factor=2.5)
    result = dense_layer(torch.tensor([[1.0, 2.0]]), config, weights)
    a, b, h = 0.5, sigmoid(3), sigmoid(1) * 2
    assert result.ids_TK.tolist() == [[0, 3]]
    assert float(result.y_TH[0, 0]) == pytest.approx(2.5 * (1 * a + 4 * b) / (a + b) * h, rel=1e-6)


def test_groups_are_struck_out_with_minus_infinity() -> None:
    # x = (-1, 2): scores .5 .27 .12 .05, group 0 is kept. Biases of -0.9 make all scores negative; a struck expert that
    # counted as 0 would win.
    config, weights = hand_layer(has_correction_bias=True, num_expert_group=2, topk_group=1)
    bias = torch.full((4,), -0.9)
    object.__setattr__(weights, "bias_E", bias)
    assert dense_layer(torch.tensor([[-1.0, 2.0]]), config, weights).ids_TK.tolist() == [[0, 1]]


def test_a_choice_can_be_given() -> None:
    config, weights = hand_layer()
    result = dense_layer(torch.tensor([[1.0, 2.0]]), config, weights, np.array([[0, -1]]))
    assert float(result.y_TH[0, 0]) == pytest.approx(1.0 * sigmoid(1) * 2, rel=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations_by_hand(activation: str) -> None:
    by_hand = {
        "silu": 1.5 * sigmoid(1.5),
        "gelu": 0.75 * (1 + math.erf(1.5 / math.sqrt(2))),
        "gelu_tanh": 0.75 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1.5 + 0.044715 * 1.5**3))),
        "relu2": 2.25,
    }
    assert float(dense.ACTIVATIONS[activation](torch.tensor(1.5))) == pytest.approx(by_hand[activation], rel=1e-6)


def test_scales_belong_to_blocks() -> None:
    # Blocks of 2 x 2 over 3 x 3: the last row and column are blocks of their own.
    values = torch.ones(3, 3).to(torch.float8_e4m3fn)
    q = QuantTensor(values, torch.tensor([[2.0, 3.0], [5.0, 7.0]]), Fp8Block("fp8_2x2", 2, 2))
    assert dense.decoded(q).tolist() == [[2, 2, 3], [2, 2, 3], [5, 5, 7]]


@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_a_block_that_is_cut_off_leaves_the_others_whole(length: int) -> None:
    # Blocks of 4: the second has one column of 5, or two, or three. Not two blocks of equal parts.
    values, scales = torch.ones(1, length).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]])
    q = QuantTensor(values, scales, Fp8Block("fp8_1x4", 1, 4))
    assert dense.decoded(q).tolist() == [[2.0] * 4 + [3.0] * (length - 4)]


def test_one_scale_of_a_whole_side_holds_for_its_equal_parts() -> None:
    # Two matrices of three rows above each other, gate over up, a scale each.
    values, scales = torch.ones(6, 2).to(torch.float8_e4m3fn), torch.tensor([[2.0], [3.0]])
    assert dense.decoded(QuantTensor(values, scales, FP8_TENSOR)).tolist() == [[2, 2]] * 3 + [[3, 3]] * 3
