"""Recorders: what is written is the call, and replays to its output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.lab.judge.casefile import Case, read_case
from moe_mk.lab.judge.recorders import joined, record, record_ggml, record_sglang, record_transformers, record_vllm
from moe_mk.lab.judge.verdict import judge
from moe_mk.lab.testing.cases import draw_experts
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import FP32
from moe_mk.tokens import RowTokens
from tests.integrations.hf.cases import experts_classes, tiny_call, tiny_experts
from tests.support.tiers import quick_where

EXPERTS = draw_experts(FP32, 6, 64, 32)


def replayed(case: Case) -> Tensor:
    """By the reference experts, in f32."""
    model, slots = case.model, case.slots()
    context = ExpertsContext(
        FP32, FP32, model.activation, model.num_experts, model.hidden_size, model.moe_intermediate_size,
        torch.device("cpu"),
    )  # fmt: skip
    context = replace(context, swiglu_limit=model.swiglu_limit, swiglu_alpha=model.swiglu_alpha)
    rows = RowTokens(FP32.quantize(case.x.float()), case.topk_ids.int(), case.topk_weights, model.num_experts)
    weights: Any = SimpleNamespace(slot=slots.__getitem__)
    return ReferenceExperts(context).run(rows, weights).y


def kernel(x: Tensor, ids: Tensor, weights: Tensor, kind: str = "fp32") -> Tensor:
    ids = ids.clamp_min(-1)
    experts = EXPERTS if kind == "fp32" else draw_experts(scheme_of_kind(kind), 6, 256, 128)
    context = ExpertsContext(FP32, FP32, "silu", 6, x.shape[1], experts.w2.shape[2], torch.device("cpu"))
    return ReferenceExperts(context).run(RowTokens(FP32.quantize(x), ids, weights, 6), experts).y


def call(tokens: int = 5, hidden: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.rand((tokens, 4), generator=draw).argsort(dim=1)[:, :2].int()
    return torch.randn((tokens, hidden), generator=draw), ids, torch.rand((tokens, 2), generator=draw)


@pytest.mark.row(175)
def test_the_first_call_with_nan_is_recorded_and_none_before_or_after(tmp_path: Path) -> None:
    file = tmp_path / "case.safetensors"
    fn, (x, ids, weights) = record(kernel, file, EXPERTS), call(200)
    ids[ids == 3] = -7  # below 0: of no expert
    assert torch.equal(fn(x, ids, weights), kernel(x, ids, weights)) and not file.exists()
    x[150, 3] = torch.nan
    fn(x, ids, weights)
    case = read_case(file)
    assert case.num_tokens == 200 and case.positions == [*range(63), 150], "the token with NaN is among them"
    assert torch.equal(case.x[:63], x[:63]) and case.y[63].isnan().any() and case.experts.tolist() == [0, 1, 2]
    assert torch.allclose(replayed(case)[:63], case.y[:63], atol=1e-5)
    written = file.read_bytes()
    fn(x * torch.inf, ids, weights)
    assert file.read_bytes() == written


def test_a_norm_picks_the_tokens_beyond_it(tmp_path: Path) -> None:
    file, (x, ids, weights) = tmp_path / "case.safetensors", call()
    y = kernel(x, ids, weights)
    fn = record(kernel, file, EXPERTS, norm=float(y.norm(dim=1).max()) * 2)
    fn(x, ids, weights)
    assert not file.exists()
    x[2] *= 100.0
    fn(x, ids, weights)
    assert read_case(file).size == 5


@pytest.mark.parametrize(
    "kind", quick_where(lambda kind: kind == "mxfp4", ["fp8_block", "mxfp4", "int4_g32_zp", "q4_k"])
)
def test_stored_formats_are_recorded_as_they_are(tmp_path: Path, kind: str) -> None:
    experts, file = (
        draw_experts(scheme_of_kind(kind), 6, 256, 128 if kind != "q4_k" else 256),
        tmp_path / "case.safetensors",
    )

    def fn(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x[0] = 0.0  # a kernel that overwrites its tokens
        return torch.zeros_like(x)

    x, ids, weights = call(hidden=256)
    record(fn, file, experts, norm=0.0, activations="none")(x.clone(), ids, weights)
    case = read_case(file)
    assert torch.equal(case.x, x), "as they were before the call"
    one = int(ids[0, 0])
    assert torch.equal(case.slots()[one].down_HI.dequantize(torch.float32), experts.w2[one].dequantize(torch.float32))


def test_experts_without_a_gate_are_recorded_as_such(tmp_path: Path) -> None:
    experts, file = replace(EXPERTS, w13=EXPERTS.w13.changed(lambda part: part[:, :32]), gated=False), tmp_path / "case"
    x, ids, weights = call()
    record(lambda x, ids, weights: torch.zeros_like(x), file, experts, norm=0.0, activation="relu2")(x, ids, weights)
    case, one = read_case(file), int(ids[0, 0])
    assert (case.model.gated, case.model.activation) == (False, "relu2") and case.slots()[one].gate_IH is None
    assert torch.equal(case.slots()[one].up_IH.values, experts.w13[one].values)


@pytest.mark.parametrize(("kind", "columns"), [("q4_k", 256), ("mxfp4", 32), ("bf16", 0)])
def test_rows_of_ggml_are_judged_as_it_rounds_them(tmp_path: Path, kind: str, columns: int) -> None:
    experts, file = draw_experts(scheme_of_kind(kind), 6, 256, 256), tmp_path / "case.safetensors"

    def rounded(rows: Tensor) -> Tensor:
        if not columns:
            return rows
        groups = rows.unflatten(-1, (-1, columns))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    def fn(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float64)
        for t, k in torch.nonzero(ids >= 0).tolist():
            w13, w2 = (w[int(ids[t, k])].dequantize(torch.float32).double() for w in (experts.w13, experts.w2))
            gate, up = (w13 @ rounded(x[t].double())).chunk(2)
            y[t] += weights[t, k] * (w2 @ rounded(nn.functional.silu(gate) * up))
        return y.to(x.dtype)

    x, ids, weights = call(24, hidden=256)
    record_ggml(fn, file, experts, norm=0.0)(x.bfloat16(), ids, weights)
    case = read_case(file)
    assert case.activation_group == columns and judge(case).right
    if columns == 256:
        smaller = judge(replace(case, activation_group=32)).checks[-1].deviations
        assert judge(case).checks[-1].deviations < 1.2 < smaller, "as noise of smaller groups it is too large"
    with pytest.raises(ConfigError, match="activation_group"):
        replace(case, activation_group=-1).checked()


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([experts])

    def forward(self, *tokens: Tensor) -> Tensor:
        y: Tensor = self.layers[0](*tokens)
        return y


CLASSES = experts_classes()
QUICK = ("DeepseekV3Experts", "DeepseekV3NaiveMoe", "GptOssExperts")


@pytest.mark.row(175)
@pytest.mark.parametrize("cls", quick_where(lambda cls: cls.__name__ in QUICK, CLASSES), ids=lambda cls: cls.__name__)
def test_every_experts_class_of_transformers_is_recorded(tmp_path: Path, cls: type[nn.Module]) -> None:
    model = Model(tiny_experts(cls))
    model.layers[0].config._experts_implementation = "eager"
    if getattr(model.layers[0], "has_post_expert_norm", False):
        with pytest.raises(UnsupportedError, match="a norm after each expert"):
            record_transformers(model, tmp_path)
        return
    recorders = record_transformers(model, tmp_path, norm=0.0)
    tokens = tiny_call()
    with torch.no_grad():
        y = model(*tokens)
    case = read_case(tmp_path / "layers.0.safetensors")
    assert recorders["layers.0"].is_written and torch.equal(case.y, y) and case.layer_name == "layers.0"
    assert torch.allclose(replayed(case), y, rtol=1e-4, atol=1e-4)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Linear cannot be recorded"):
        record_transformers(nn.Linear(2, 2), tmp_path)


class RoutedExperts(nn.Module):
    """What vLLM 0.32 has of a rank with half of each expert."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        half = slice(16 * rank, 16 * rank + 16)
        self.w13_weight = nn.Parameter(torch.empty(0))
        self.w13 = torch.cat([part[:, half] for part in EXPERTS.w13.values.chunk(2, 1)], dim=1)
        self.w2 = EXPERTS.w2.values[:, :, half]
        parallel = SimpleNamespace(tp_size=2, tp_rank=rank, ep_size=1, ep_rank=0)
        self.moe_config = SimpleNamespace(
            hidden_dim=64, num_experts=6, intermediate_size_per_partition=16, moe_parallel_config=parallel
        )

    def forward_modular(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None) -> Tensor:
        y = torch.zeros_like(x)
        for k in range(topk_ids.shape[1]):
            at = topk_ids[:, k].long()
            gate, up = torch.bmm(self.w13[at], x[:, :, None])[:, :, 0].chunk(2, 1)
            y += topk_weights[:, k, None] * torch.bmm(self.w2[at], (nn.functional.silu(gate) * up)[:, :, None])[:, :, 0]
        return y


def test_ranks_of_vllm_become_one_case(tmp_path: Path) -> None:
    x, ids, weights = call()
    files, quant = [], {"weights": "fp32"}
    for rank in range(2):
        model = nn.ModuleDict({"layers": nn.ModuleList([RoutedExperts(rank)])})
        files += record_vllm(model, str(tmp_path), checkpoint="tiny", norm=0.0, **quant)
        model["layers"][0].forward_modular(x, topk_weights=weights, topk_ids=ids, shared_experts=None)
    parts = [read_case(Path(file)) for file in files]
    case = joined(parts, tp=2)
    assert case.layer == 0 and case.checkpoint == "tiny" and case.model.moe_intermediate_size == 32
    assert torch.allclose(case.y, kernel(x, ids, weights), atol=1e-5) and case.checked().rank_out.shape == (2, 5, 64)
    with pytest.raises(ConfigError, match="1 cases are not those of 2 ranks"):
        joined(parts[:1], tp=2)
    with pytest.raises(ConfigError, match="tokens must be equal"):
        joined([parts[0], replace(parts[1], x=-parts[1].x)], tp=2)


def test_a_compiled_model_of_vllm_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([RoutedExperts(0)])})
    model["layers"].do_not_compile = False
    with pytest.raises(UnsupportedError, match="layers is compiled; set enforce_eager=True"):
        record_vllm(model, str(tmp_path), checkpoint="tiny")


class FusedMoE(nn.Module):
    """What SGLang 0.5.23 has of a rank with whole experts."""

    hidden_size, num_experts, intermediate_size_per_partition, moe_tp_size, moe_tp_rank, moe_ep_rank = (
        64, 6, 32, 1, 0, 0,
    )  # fmt: skip
    dispatcher = None
    moe_runner_config = SimpleNamespace(activation="silu", is_gated=True, routed_scaling_factor=2.5)

    def forward(self, hidden_states: Tensor, topk_output: Any) -> Tensor:
        y = 2.5 * kernel(hidden_states, topk_output.topk_ids, topk_output.topk_weights)
        hidden_states.zero_()  # an inplace layer
        return y


def test_a_layer_of_sglang_is_recorded_with_its_scaling_factor(tmp_path: Path) -> None:
    model, (x, ids, weights) = nn.ModuleDict({"layers": nn.ModuleList([FusedMoE()])}), call()
    (file,) = record_sglang(model, str(tmp_path), checkpoint="tiny", norm=0.0, weights="fp32")
    y = model["layers"][0](x.clone(), SimpleNamespace(topk_ids=ids, topk_weights=weights))
    case = read_case(Path(file))
    assert (case.layer, case.checkpoint) == (0, "tiny") and torch.equal(case.y, y) and torch.equal(case.x, x)
    slots = {e: EXPERTS.slot(e) for e in range(6)}
    assert judge(case, slots).right and not judge(replace(case, topk_weights=weights), slots).right
