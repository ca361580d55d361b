"""A number format of another distribution: the file that declares it is all that it needs.

MXFP6 of the sample wheel is stored in three bytes for four values, which no built-in format is.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.flight import interleave
from moe_mk.lab.verify.dense import decoded
from moe_mk.quant.kinds import FORMATS, scheme_of_kind
from moe_mk.weights.expert_weights import ExpertWeights
from moe_mk.weights.inspect import kind_of_scheme
from tests.support.machine import grid_of

SAMPLE = Path(__file__).resolve().parents[2] / "examples/04_custom_backend_plugin/src"
H, I, E, K = 64, 128, 8, 2
"""I is 4 blocks of 32, 2 for each of 2 tensor-parallel ranks."""


@pytest.fixture(autouse=True)
def mxfp6(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The format as its entry point of `moe_mk.number_formats` would register it."""
    monkeypatch.syspath_prepend(str(SAMPLE))
    from moe_mk_sample.mxfp6 import MXFP6

    monkeypatch.setitem(vars(FORMATS), "_all", {**FORMATS.built_in, "mxfp6_e3m2": MXFP6})
    yield MXFP6.scheme
    for name in [name for name in sys.modules if name.startswith("moe_mk_sample")]:
        del sys.modules[name]


def test_codes_by_hand(mxfp6: Any) -> None:
    # 28 = 1.75 * 2^4 is the largest, 2^-4 the least; 27 is nearer to 28; 0.09375 is between codes 1 and 2: to even.
    given = torch.tensor([[28.0, -1.0, 0.0625, 0.09375] + [0.0] * 28])
    q = mxfp6.quantize(given)
    assert q.values.shape == (1, 24) and q.shape == (1, 32) and q.scales.view(torch.uint8).tolist() == [[127]]
    # 0 111 11, 1 011 00, 0 000 01, 0 000 10 from the low bits on: 0x02 << 18 | 0x01 << 12 | 0x2c << 6 | 0x1f.
    word = 2 << 18 | 1 << 12 | 44 << 6 | 31
    assert q.values[0, :3].tolist() == [word & 255, word >> 8 & 255, word >> 16]
    assert mxfp6.dequantize(q, torch.float32)[0, :4].tolist() == [28.0, -1.0, 0.0625, 0.125]


def test_every_code_survives(mxfp6: Any) -> None:
    sizes = [m * 2.0**-4 for m in range(4)] + [(4 + m) * 2.0 ** (e - 5) for e in range(1, 8) for m in range(4)]
    values = torch.tensor([*sizes, *(-size for size in sizes)])
    assert torch.equal(mxfp6.element.decode(mxfp6.element.encode(values)), values)
    assert kind_of_scheme(mxfp6) == "mxfp6_e3m2"


def layer_of(experts: str = "auto", **changed: Any) -> MoEConfig:
    model = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "quant": {"weights": "mxfp6_e3m2"}}
    return MoEConfig.parse({"model": model | changed, "router": {"top_k": K}, "kernel": {"experts": experts}}, "a test")


def tensors(mxfp6: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint, and its matrices in f64."""
    stored, exact = {"gate.weight": torch.randn(E, H).bfloat16()}, {}
    for e in range(E):
        for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            q = mxfp6.quantize(torch.randn(shape) / shape[1] ** 0.5)
            stored[f"experts.{e}.{name}_proj.weight"] = q.values
            stored[f"experts.{e}.{name}_proj.weight_scale"] = q.scales.view(torch.uint8)
            exact[f"{e}.{name}"] = mxfp6.dequantize(q, torch.float64)
    return stored, exact


def wanted(gate: Tensor, exact: dict[str, Tensor], x: Tensor) -> Tensor:
    scores, y = torch.softmax(x.double() @ gate.double().T, -1), torch.zeros(len(x), H, dtype=torch.float64)
    top = torch.topk(scores, K)
    for t in range(len(x)):
        for e, weight in zip(top.indices[t].tolist(), top.values[t] / top.values[t].sum(), strict=True):
            row, (first, up, down) = x[t].double(), (exact[f"{e}.{name}"] for name in ("gate", "up", "down"))
            y[t] += weight * (down @ (torch.nn.functional.silu(first @ row) * (up @ row)))
    return y


@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
def test_a_layer_computes_with_it(mxfp6: Any, experts: str) -> None:
    stored, exact = tensors(mxfp6)
    layer = MoELayer(layer_of(experts)).load_weights(stored)
    x = torch.randn(5, H).bfloat16()
    with torch.no_grad():
        y = layer(x)
    assert (y.double() - wanted(stored["gate.weight"], exact, x)).norm() < 0.02 * y.double().norm()
    assert " are held as " not in str(layer.explain())


def test_down_projections_may_have_another_format(mxfp6: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = replace(FORMATS["mxfp6_e3m2"], mixes=True)
    monkeypatch.setitem(vars(FORMATS), "_all", {**FORMATS.built_in, "mxfp6_e3m2": mixed})
    stored, exact = tensors(mxfp6)
    for e in range(E):
        del stored[f"experts.{e}.down_proj.weight_scale"]
        stored[f"experts.{e}.down_proj.weight"] = exact[f"{e}.down"].bfloat16()
        exact[f"{e}.down"] = stored[f"experts.{e}.down_proj.weight"].double()
    layer = MoELayer(layer_of(quant={"weights": "mxfp6_e3m2", "down": "bf16"})).load_weights(stored)
    assert layer.explain().chosen.experts == "torch_cpu"  # which decodes it; others would hold FP8
    x = torch.randn(5, H).bfloat16()
    with torch.no_grad():
        right = wanted(stored["gate.weight"], exact, x)
        assert (layer(x).double() - right).norm() < 0.02 * right.norm()


def test_ranks_share_it(mxfp6: Any) -> None:
    stored, exact = tensors(mxfp6)
    config = layer_of("torch_cpu").with_(ep=2, tp=2)
    layers = [MoELayer(config, groups=groups).load_weights(stored) for groups in grid_of(2, 2)]
    x = [torch.randn(3, H).bfloat16(), torch.randn(5, H).bfloat16()]
    with torch.no_grad():
        y = interleave([layer.steps(x[rank // 2]) for rank, layer in enumerate(layers)])
    for rank, part in enumerate(y):
        right = wanted(stored["gate.weight"], exact, x[rank // 2])
        assert (part.double() - right).norm() < 0.02 * right.norm(), rank


def test_an_engine_hands_over_stacks(mxfp6: Any) -> None:
    first, second = (mxfp6.quantize(torch.randn(E, *shape)) for shape in ((2 * I, H), (H, I)))
    experts = ExpertWeights.from_engine(
        w13=first.values, w2=second.values, quant="mxfp6_e3m2", w13_scale=first.scales, w2_scale=second.scales
    )
    assert experts.scheme == mxfp6 == scheme_of_kind("mxfp6_e3m2")
    with pytest.raises(ShapeError, match="w13_scale"):
        ExpertWeights.from_engine(
            w13=first.values,
            w2=second.values,
            quant="mxfp6_e3m2",
            w13_scale=first.scales[:, :, :1],
            w2_scale=second.scales,
        )


def test_the_verifier_decodes_it(mxfp6: Any) -> None:
    q = mxfp6.quantize(torch.randn(H, I))
    assert torch.equal(decoded(q), mxfp6.dequantize(q, torch.float64))


def test_what_it_cannot_be_is_refused(mxfp6: Any) -> None:
    with pytest.raises(ConfigError, match="pack 4 values of a row"):
        layer_of(moe_intermediate_size=130)
    with pytest.raises(ConfigError, match="activations='fp8' do not go with mxfp6_e3m2"):
        layer_of(quant={"weights": "mxfp6_e3m2", "activations": "fp8"})
    with pytest.raises(ConfigError, match="did you mean 'mxfp6_e3m2'"):
        layer_of(quant={"weights": "mxfp6_e3m"})
    decision = MoELayer(layer_of()).explain()
    assert decision.chosen.experts == "torch_cpu" and "cpu_native" in str(decision)
