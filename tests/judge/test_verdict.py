"""Verdicts: clean cases are right whoever computed them, wrong ones are placed, what is unknown is not named."""

from dataclasses import replace

import pytest
import torch

from moe_mk.experts.base import EXPERTS
from moe_mk.lab.judge import faults
from moe_mk.lab.judge.stages import Bench
from moe_mk.lab.judge.verdict import NONE, dependences, judge
from moe_mk.lab.testing.experts import context_of
from moe_mk.quant.plain import BF16
from moe_mk.tokens import RowTokens
from tests.support.small_engine import Layer

INTERMEDIATE = ("w13_out", "act_out", "w2_out", "rank_out", "routed_out")
FORMATS = ("bf16", "fp8_block", "int4_g32_zp", "int4_g128", "mxfp4", "int8_g32", "q4_k", "q6_k")


def layer_of(seed):
    """A layer of another format, size, distribution and router for each seed."""
    kind = FORMATS[seed % len(FORMATS)]
    tp, ep = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))[seed % 5]
    return Layer(
        kind=kind, tp=1 if kind == "q4_k" else tp, ep=ep, shared=seed % 3 == 0, groups=(1, 4)[seed % 2], seed=seed,
        tokens=(1, 5, 16)[seed % 3], quantised_rows=kind == "fp8_block" and seed % 4 > 1, top_k=(1, 2, 3)[seed % 3],
        scoring="sigmoid" if seed % 2 else "softmax", bias=bool(seed % 2), eplb=seed % 7 == 0,
        expert_bias=seed % 5 in (2, 4),
        **({"activation": "swiglu_oai", "limit": 2.0} if kind == "mxfp4" else {}),
    )  # fmt: skip


@pytest.mark.row(175)
@pytest.mark.slow
def test_clean_cases_of_an_engine_in_bf16_are_right():
    wrong = []
    for seed in range(80):
        layer = layer_of(seed)
        verdict = judge(layer.case(record=INTERMEDIATE if seed % 4 == 1 else ()).checked())
        if not verdict.right:
            wrong.append((seed, layer.kind, verdict.stage, verdict.fault))
    assert not wrong


def test_stages_behind_a_recorded_sum_over_slices_begin_with_that_sum():
    layer = layer_of(9)
    assert layer.tp == 4 and judge(layer.case(record=INTERMEDIATE)).right


def stated_otherwise():
    """Calls as other engines record them: what states that, the tensors that it changes, where to look without it."""
    call = Layer(shared=True, scoring="softmax", bias=False, tokens=3, seed=3).case(
        record=(*INTERMEDIATE, "shared_out")
    )
    places, scale = torch.arange(2 * call.model.moe_intermediate_size), torch.tensor([1.0, 2.0] * 4)
    for order, at in (("up_gate", places.roll(256)), ("interleaved", places.view(2, -1).T.flatten())):
        shared = {"shared_w13": call.shared_w13[:, at]}
        yield "activation", call, {"order": order}, {"w13": call.w13[:, at], "w13_out": call.w13_out[..., at], **shared}
    yield "gate", call, {"logit_bias": torch.full((8,), 3.0)}, {"router_logits": call.router_logits + 3}
    weights, w2_out = call.topk_weights * scale[call.topk_ids], call.w2_out / scale[call.topk_ids][..., None]
    scaled = {"topk_weights": weights, "w2_out": w2_out.bfloat16(), "w2": (call.w2 / scale[:, None, None]).bfloat16()}
    yield "weights", call, {"expert_scale": scale}, scaled
    gate, half = {"shared_gate": torch.zeros(256)}, {"model": call.model.model_copy(update={"shared_scale": 0.5})}
    for states, times in ((gate, 2), (half, 2), (gate | half, 4)):
        yield "shared", call, states, {"shared_w2": times * call.shared_w2}


@pytest.mark.parametrize("number", range(7))
def test_what_a_case_states_belongs_to_the_call(number):
    stage, call, states, tensors = [*stated_otherwise()][number]
    assert judge(replace(call, **states, **tensors).checked()).right
    assert judge(replace(call, **tensors).checked()).stage == stage


def experts_case(layer, backend):
    """The case with the output of an experts backend of this library."""
    case = layer.case()
    held = case.slots()
    from moe_mk.weights.expert_weights import MappedExpertWeights

    compute = layer.model.quant.activation_scheme or BF16
    context = context_of(BF16, compute, layer.model.activation, layer.experts, layer.hidden, layer.inner, case.x.device)
    context = replace(context, swiglu_limit=layer.limit, swiglu_alpha=1.702)
    own = EXPERTS[backend](context)
    weights = own.relayout(MappedExpertWeights(tuple(held[e] for e in range(layer.experts)), held[0].up_IH.scheme))
    rows = RowTokens(BF16.quantize(case.x), case.topk_ids.to(torch.int32), case.topk_weights.float(), layer.experts)
    from moe_mk.permute import permute, weight_and_reduce
    from moe_mk.tokens import OutputStage

    tokens = permute(rows, own.traits.consumes)
    y = weight_and_reduce(own.run(tokens, weights), tokens, until=OutputStage.REDUCED).y
    return replace(case, y=y[: case.size].clone())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch_cpu", "cpu_native"])
def test_clean_cases_of_our_backends_are_right(backend):
    wrong = []
    for seed in range(40):
        layer = replace_ranks(layer_of(seed))
        if backend == "torch_cpu" and layer.kind not in ("bf16", "fp8_block", "mxfp4"):
            continue
        verdict = judge(experts_case(layer, backend).checked())
        if not verdict.right:
            wrong.append((seed, layer.kind, verdict.checks[-1]))
    assert not wrong


def replace_ranks(layer):
    """The same layer on one rank, without shared experts."""
    settings = ("kind", "tokens", "experts", "top_k", "groups", "bias", "scoring", "activation", "limit", "seed")
    return Layer(**{name: getattr(layer, name) for name in settings}, quantised_rows=layer.quantised_rows)


def test_a_fault_of_recorded_stages_is_placed_by_token_expert_and_block():
    layer = Layer(seed=3)
    case = layer.case(record=INTERMEDIATE)
    w2_out = case.w2_out.clone()
    w2_out[4, 1, 130:140] += 1.0
    verdict = judge(replace(case, w2_out=w2_out))
    assert (verdict.stage, verdict.token, verdict.expert, verdict.block) == ("w2", 4, int(case.topk_ids[4, 1]), 1)
    assert verdict.fault == NONE


@pytest.mark.parametrize(
    ("fault", "stage", "record", "ranks"),
    [("gate and up swapped", "w13", INTERMEDIATE, 1), ("scale squared, w2", "w2", INTERMEDIATE, 1),
     ("padding leaks", "weigh-and-sum", INTERMEDIATE, 1), ("stale weight", "w2", ["rank_out"], 2)],
)  # fmt: skip
def test_recorded_stages_place_a_fault_too(fault, stage, record, ranks):
    verdict = judge(Layer(kind="fp8_block", ep=ranks, tokens=16 // ranks, seed=2).case(fault, record=record))
    assert verdict.stage == stage and verdict.fault == fault.split(",")[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["gate and up swapped", "scale squared, w2"])
def test_explanations_of_large_layers_are_tried_on_the_worst_columns_and_a_few_others(fault, monkeypatch):
    layer, tried = Layer(kind="fp8_block", hidden=1152, inner=128, tokens=2, quantised_rows=True, seed=1), []

    def sampled(case, slots, shared, columns):
        tried.append(columns)
        return Bench(case, slots, shared, columns)

    monkeypatch.setattr(faults, "LARGE", 0)
    monkeypatch.setattr(faults, "Bench", sampled)
    verdict = judge(layer.case(fault))
    assert verdict.fault == fault.split(",")[0] and verdict.explanations[0].within
    assert {(0, 128), (512, 640), (1024, 1152)} <= set(tried[0]) and len(tried) == 1
    case = layer.case()
    y = case.y.clone()
    y[:, 256:384] *= 2.0
    assert judge(replace(case, y=y)).block == 2 and (256, 384) in tried[1]


def test_noise_is_none_of_the_named_faults():
    case = Layer(seed=4, tokens=6).case()
    noise = torch.randn(case.y.shape, generator=torch.Generator().manual_seed(1))
    verdict = judge(replace(case, y=(case.y + 0.2 * case.y.float().std() * noise).to(torch.bfloat16)))
    assert not verdict.right and verdict.fault == NONE and verdict.stage == ""
    assert verdict.span[0] == "quantise" and verdict.span[-1] == "shared"


def test_two_faults_at_once_are_a_pair():
    layer = Layer(seed=5, shared=True, tokens=8, kind="bf16")
    case = layer.case("gate and up swapped")
    twice = (case.y.float() + layer.shared_output().float()).to(torch.bfloat16)
    verdict = judge(replace(case, y=twice))
    assert set(verdict.explanations[0].faults) == {"gate and up swapped", "shared experts twice"}
    assert verdict.stage == "w13"


def test_nan_is_wrong_where_the_replay_is_finite_and_not_judged_elsewhere():
    case = Layer(seed=6, tokens=5).case()
    y = case.y.clone()
    y[2] = float("nan")
    assert judge(replace(case, y=y)).token == 2
    x = case.x.clone()
    x[2] = float("nan")
    verdict = judge(replace(case, x=x, y=y, router_logits=None, gate=None, bias=None))
    assert verdict.right and verdict.not_judged == 1


def test_stale_rows_and_weights_of_another_call_are_found_in_its_case():
    layer, before = Layer(seed=7), Layer(seed=8)
    case = layer.case()
    y = case.y.clone()
    y[5] = before.case().y[5]
    verdict = judge(replace(case, y=y), others=[before.case()])
    assert (verdict.fault, verdict.token) == ("stale row", 5)
    y = Layer(seed=8)
    y.x, y.gate, y.correction = layer.x, layer.gate, layer.correction  # the same call with the weights of before
    verdict = judge(replace(case, y=y.forward()[0]), others=[before.case()])
    assert (verdict.fault, verdict.stage) == ("stale weight", "w13")


def test_the_law_that_two_calls_break_is_named_by_what_differs_between_them():
    case = Layer(seed=3, tokens=6).case(gate=None, router_logits=None, bias=None)

    def call(tokens, **changes):
        return replace(case, **{n: getattr(case, n)[tokens] for n in ("x", "y", "topk_ids", "topk_weights")}, **changes)

    def law(one, other):
        return [each.law for each in dependences([one, other])[0]]

    wrong = replace(case, y=case.y.clone())
    wrong.y[1, 3] += 0.5
    assert law(case, call([5, 4, 3, 2, 1, 0])) == [] and law(case, wrong) == ["order of tokens"]
    assert law(call([0, 1, 2]), replace(wrong, num_tokens=3, **{n: getattr(wrong, n)[[1, 4, 5]] for n in (
        "x", "y", "topk_ids", "topk_weights")})) == ["batch-mates"]  # fmt: skip
    assert law(call([0, 1]), wrong) == ["count of tokens"]
    other = replace(wrong, topk_weights=wrong.topk_weights + 1.0)
    assert law(case, other) == [], "other weights are other tokens"


def test_positions_of_sampled_tokens_are_reported():
    case = Layer(seed=9, tokens=4).case(tokens=torch.tensor([7, 100, 300, 511]), num_tokens=512)
    y = case.y.clone()
    y[2] *= -1
    assert judge(replace(case, y=y)).token == 300
