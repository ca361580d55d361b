"""The gate's tiers as a reasoned choice, and its precision as a setting."""

from importlib import import_module

import pytest
import torch

from moe_mk import oracle
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.layer.gate import Gate
from moe_mk.router import GateChoice, choose_gate_tier, gate_logits
from moe_mk.router import gate as gate_module
from moe_mk.router.gate import small_m_gemm, tier_problems
from tests.support import problems
from tests.support.draws import normal

BF16, F32 = torch.bfloat16, torch.float32
INSTALLED = frozenset({"small_m"})


def choose(
    arch: tuple[int, int] | None = (9, 0),
    num_tokens: int = 16,
    dtype: torch.dtype = BF16,
    router_dtype: str = "float32",
    available: frozenset[str] = INSTALLED,
) -> GateChoice:
    return choose_gate_tier(arch, num_tokens, dtype, router_dtype, available)


@pytest.mark.row(69)
def test_sixteen_and_seventeen_tokens_choose_different_tiers_on_sm_90() -> None:
    assert choose(num_tokens=16).tier == "small_m"
    wide = choose(num_tokens=17)
    assert wide.tier == "bf16_to_fp32"
    assert wide.reasons["small_m"] == ("serves at most 16 tokens, got 17",)
    assert "bf16_to_fp32 comes first" in wide.reasons["plain"][0]


@pytest.mark.row(69)
def test_a_kernel_that_is_not_installed_is_reported_as_missing() -> None:
    choice = choose(available=frozenset())
    assert choice.tier == "bf16_to_fp32"
    assert choice.reasons["small_m"] == ("triton is not installed",)


@pytest.mark.row(69)
def test_a_cpu_takes_the_plain_tier_and_every_reason_against_the_others_is_listed() -> None:
    choice = choose(arch=None, num_tokens=64, dtype=F32, available=frozenset())
    assert choice.tier == "plain"
    assert choice.reasons["small_m"] == (
        "needs a CUDA device of sm_90 or newer, this one has no compute capability",
        "reads torch.bfloat16, hidden states and gate weight are torch.float32",
        "serves at most 16 tokens, got 64",
        "triton is not installed",
    )
    assert len(choice.reasons["bf16_to_fp32"]) == 2
    text = str(choice)
    assert text.startswith("gate: plain") and "small_m: needs a CUDA" in text and "triton is not installed" in text


@pytest.mark.parametrize(
    "change, tier, words",
    [
        ({"arch": (8, 9)}, "bf16_to_fp32", "needs sm_90 or newer, got sm_89"),
        ({"arch": (7, 5)}, "plain", "needs sm_90 or newer, got sm_75"),
        ({"num_tokens": 17}, "bf16_to_fp32", "serves at most 16 tokens, got 17"),
        ({"dtype": torch.float16}, "plain", "reads torch.bfloat16"),
        ({"router_dtype": "model"}, "plain", "router_dtype='model' asks for logits in the model dtype"),
    ],
)
def test_each_condition_of_the_small_m_tier_alone_rejects_it(change: dict[str, object], tier: str, words: str) -> None:
    choice = choose(**change)  # type: ignore[arg-type]
    assert choice.tier == tier
    assert len(choice.reasons["small_m"]) == 1 and words in choice.reasons["small_m"][0]


def test_newer_devices_take_the_small_m_tier() -> None:
    assert choose(arch=(10, 0), num_tokens=1).tier == "small_m"


@pytest.mark.row(69)
def test_a_decision_and_the_gate_of_its_layer_choose_the_small_m_tier_where_triton_is() -> None:
    for libraries, tokens, tier in (
        ({"triton"}, 16, "small_m"),
        ({"triton"}, 17, "bf16_to_fp32"),
        (set(), 16, "bf16_to_fp32"),
    ):
        decision = oracle.select(
            problems.problem("deepseek_v3", "h200", tokens, installed=libraries, ep=8, max_num_tokens=64)
        )
        gate = Gate(decision, BF16, torch.device("cpu"))
        assert decision.gate.tier == gate._tier(tokens) == tier


@pytest.mark.row(69)
def test_the_small_m_tier_launches_its_kernel_and_leaves_other_tensors_to_the_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    few, took = import_module("moe_mk.kernels.triton.gate_logits"), []
    monkeypatch.setattr(few, "gate_logits", lambda x, w: took.append("kernel"))
    monkeypatch.setattr(gate_module, "mixed_gemm", lambda x, w: took.append("gemm"))
    x, weight = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((16, 64), (8, 64)))
    small_m_gemm(x, weight)
    small_m_gemm(x.repeat(2, 1), weight)
    small_m_gemm(x.requires_grad_(), weight)
    small_m_gemm(x.detach().T.contiguous().T, weight)
    small_m_gemm(torch.nn.Parameter(x.detach()), weight)
    assert took == ["kernel", "gemm", "gemm", "gemm", "gemm"]


def test_every_tier_but_the_chosen_one_carries_a_reason() -> None:
    for arch in (None, (8, 0), (9, 0)):
        for num_tokens in (0, 16, 17):
            for available in (INSTALLED, frozenset[str]()):
                choice = choose(arch=arch, num_tokens=num_tokens, available=available)
                assert set(choice.reasons) == {"native", "small_m", "bf16_to_fp32", "plain"} - {choice.tier}
                assert all(choice.reasons.values())


def test_float32_logits_are_the_f32_product_of_bf16_inputs() -> None:
    # 1 + 2^-7 is exact in bf16, its square 1 + 2^-6 + 2^-14 is not.
    x = torch.tensor([[1 + 2**-7]], dtype=BF16)
    assert gate_logits(x, x, "float32").tolist() == [[1 + 2**-6 + 2**-14]]
    model = gate_logits(x, x, "model")
    assert model.dtype == BF16 and model.tolist() == [[1 + 2**-6]]


def test_float32_logits_equal_transformers_formula_and_take_a_weight_converted_before() -> None:
    x, weight = normal(33, 64).to(BF16), normal(16, 64, seed=1).to(BF16)
    expected = torch.nn.functional.linear(x.float(), weight.float())
    assert torch.equal(gate_logits(x, weight), expected)
    assert torch.equal(gate_logits(x, weight.float()), expected)


def test_a_weight_converted_before_is_used_without_a_copy() -> None:
    # 4 MiB of weight against 2 KiB of everything else: a copy of the weight cannot hide.
    x, weight = normal(1, 1024).to(BF16), normal(1024, 1024, seed=1)
    with torch.profiler.profile(profile_memory=True) as profile:
        gate_logits(x, weight)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert largest < weight.nbytes / 8
    with torch.profiler.profile(profile_memory=True) as profile:
        gate_logits(x, weight.to(BF16))
    assert max(event.self_cpu_memory_usage for event in profile.key_averages()) >= weight.nbytes


def test_model_dtype_and_float32_choose_different_experts_for_some_tokens() -> None:
    from moe_mk.router import Router

    x, weight = normal(1024, 512).to(BF16), (normal(256, 512, seed=1) / 16).to(BF16)
    chosen = []
    for router_dtype in ("float32", "model"):
        router = Router(8, 8, 4, "sigmoid", router_dtype=router_dtype)
        chosen.append(router(gate_logits(x, weight, router_dtype)).ids_TK.sort(-1).values)
    differ = (chosen[0] != chosen[1]).any(-1).float().mean().item()
    assert 0.005 < differ < 0.5


def test_no_tokens_and_strided_input() -> None:
    x, weight = normal(64, 8).T[:, ::2], normal(4, 32, seed=1)
    limit = 2 * 32 * 2**-24 * (x.abs() @ weight.abs().T)  # a GEMM may sum in another order for other strides
    assert ((gate_logits(x, weight) - gate_logits(x.contiguous(), weight)).abs() <= limit).all()
    assert gate_logits(x[:0], weight).shape == (0, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a CUDA device")
def test_every_tensor_and_the_logits_may_stand_in_the_way_of_the_mixed_gemm() -> None:
    low, high = torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4)
    alone = tier_problems("bf16_to_fp32", low, low, "float32")
    assert [text.partition(",")[0] for text in alone] == ["torch.mm(out_dtype=) needs a CUDA device"]
    for given, text in (
        ((high, low, "float32"), "reads torch.bfloat16, x is torch.float32; use tier='plain'"),
        ((low, high, "float32"), "reads torch.bfloat16, gate weight is torch.float32; use tier='plain'"),
        ((low, low, "bfloat16"), "writes float32 logits, router_dtype is 'bfloat16'; use tier='plain'"),
    ):
        assert tier_problems("bf16_to_fp32", *given) == [*alone, text]


def test_tiers_that_cannot_run_here_say_why() -> None:
    with pytest.raises(
        UnsupportedError, match=r"(?s)needs a CUDA device, x is on cpu.*x is torch.float32.*gate weight is"
    ):
        gate_logits(normal(2, 8), normal(4, 8), tier="bf16_to_fp32")
    with pytest.raises(
        UnsupportedError, match=r"(?s)small_m.*needs a CUDA device, x is on cpu.*at most 16 tokens, got 17"
    ):
        gate_logits(normal(17, 8), normal(4, 8), tier="small_m")


def test_the_mixed_gemm_tier_gives_f32_logits_of_the_right_shape() -> None:
    # Meta tensors carry no values, so this proves the call and its types on a machine without a GPU.
    from moe_mk.router.gate import mixed_gemm

    x, weight = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((5, 64), (16, 64)))
    logits = mixed_gemm(x, weight)
    assert (logits.shape, logits.dtype) == ((5, 16), F32)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"router_dtype='flaot32' is unknown; did you mean 'float32'"):
        gate_logits(normal(2, 8), normal(4, 8), "flaot32")
    with pytest.raises(ConfigError, match=r"router_dtype='fp32' is unknown"):
        choose(router_dtype="fp32")
    with pytest.raises(ConfigError, match=r"gate tier 'plane' is unknown; did you mean 'plain'"):
        gate_logits(normal(2, 8), normal(4, 8), tier="plane")
    with pytest.raises(ShapeError, match=r"gate weight has H=9 \(axis 1\), expected H=8"):
        gate_logits(normal(2, 8), normal(4, 9))
    with pytest.raises(ShapeError, match=r"gate weight has dtype torch.float32, expected torch.bfloat16"):
        gate_logits(normal(2, 8).to(BF16), normal(4, 8), "model")
    with pytest.raises(ShapeError, match=r"x has 3 dimensions"):
        gate_logits(normal(2, 3, 8), normal(4, 8))
