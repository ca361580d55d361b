"""The DeepGEMM adapter on the emulated library: both layouts, every type of scales, padding, and what it refuses."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_mk import MoEConfig, Problem, oracle
from moe_mk.config import device_profile
from moe_mk.errors import LibraryMissing, UnsupportedError
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.deep_gemm import DeepGemmExperts, padded_places
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.reference.activation import activation as reference_activation
from moe_mk.kernels.reference.quantize import quantize_rows
from moe_mk.lab.testing.conformance import check_experts
from moe_mk.lab.testing.emulated import deep_gemm
from moe_mk.lab.testing.experts import random_experts
from moe_mk.oracle.expected_error import experts_error
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.tokens import GroupedTokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights


def test_places_by_hand() -> None:
    # Experts 0 and 2 have three and two rows and start at multiples of 4; the room is 5 + 3 x 3, up to 16.
    places, experts = padded_places(torch.tensor([3, 0, 2]), 5, 4)
    assert places.tolist() == [0, 1, 2, 4, 5]
    assert experts.tolist() == [0, 0, 0, -1, 2, 2, -1, -1, *[-1] * 8]
    assert padded_places(torch.tensor([0, 4]), 4, 4)[0].tolist() == [0, 1, 2, 3]
    places, experts = padded_places(torch.tensor([1, 0]), 4, 4)  # three rows of no expert
    assert places.tolist() == [0, 4, 5, 6] and experts.tolist() == [0, *[-1] * 11]


TYPES = [
    pytest.param(FP8_128x128, FP8_1x128, id="fp8"),
    pytest.param(FP8_128x128_UE8M0, FP8_1x128_UE8M0, id="ue8m0"),
    pytest.param(MXFP4, MXFP8, id="mxfp4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("weights,compute", TYPES)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    ran = check_experts("deep_gemm", weights, dtype=BF16, compute=compute, hidden_size=256, num_slots=3)
    assert ran == 13 * 2 * 2 * 2


def grouped(compute: QuantScheme) -> GroupedTokens:
    """Five rows: two of expert 0, three of expert 1."""
    x_NH = torch.randn((5, 256), generator=torch.Generator().manual_seed(2)).bfloat16()
    row_N = torch.arange(5, dtype=torch.int64)
    return GroupedTokens(compute.quantize(x_NH), torch.tensor([2, 3]), row_N, torch.ones(5), 5)


def test_on_blackwell_scales_are_packed_once_and_only_powers_of_two_come_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, rough = (FP8_128x128_UE8M0, FP8_1x128_UE8M0), (FP8_128x128, FP8_1x128)
    stacks = {pair: random_experts(pair[0], 2, 256, 128, CPU) for pair in (exact, rough)}

    def run(pair: tuple[Fp8Block, Fp8Block]) -> torch.Tensor:
        experts = backend(pair[1])
        return experts.run(grouped(pair[1]), experts.relayout(stacks[pair])).y.float()

    hopper = {pair: run(pair) for pair in stacks}
    monkeypatch.setattr(deep_gemm, "architecture", lambda group: 10)
    assert torch.equal(run(exact), hopper[exact])
    own = backend(exact[1]).relayout(stacks[exact])
    assert own.layout == "deep_gemm" and own.w13.scales is not None and own.w13.scales.dtype is torch.int32
    assert own.w13.scales.shape == (2, 256, 1), "a scale a row, four groups in an int32"
    assert backend(exact[1]).relayout(own) is own
    # Why f32 scales are refused there: the library keeps their exponents alone.
    assert float((run(rough) - hopper[rough]).norm() / hopper[rough].norm()) > 0.2


CPU = torch.device("cpu")


def backend(compute: QuantScheme, activation: str = "silu", **other: Any) -> DeepGemmExperts:
    return DeepGemmExperts(ExpertsContext(BF16, compute, activation, 2, 256, 128, CPU, **other))


@pytest.mark.parametrize("activation", ["swiglu_limit", "swiglu_oai"])
def test_clamps_are_the_references(activation: str) -> None:
    stack = random_experts(MXFP4, 2, 256, 128, CPU)
    tokens = grouped(MXFP8)
    mine = backend(MXFP8, activation, swiglu_limit=0.5, swiglu_alpha=1.702)
    exact = ReferenceExperts(replace(mine.context, dtype=FP32))
    got, expected = mine.run(tokens, mine.relayout(stack)).y.float(), exact.run(tokens, stack).y.float()
    assert float((got - expected).norm() / expected.norm()) < 2 * experts_error(BF16, MXFP8, MXFP4, 256)


@pytest.mark.parametrize("activation", ["silu", "swiglu_limit", "swiglu_oai"])
def test_hidden_rows_are_one_kernel_where_triton_has_a_gpu(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("moe_mk.kernels.triton.quantize_rows", reason="triton is not installed")
    signature, asked = inspect.signature(kernel.activation_quantize), []

    def in_its_place(*given: Any, **options: Any) -> Any:
        stated = dict(signature.bind(*given, **options).arguments)
        asked.append(stated)
        gate, up = stated["gate_up"].float().chunk(2, dim=1)
        hidden = reference_activation(stated["name"], gate, up, alpha=stated["alpha"], limit=stated["limit"])
        return quantize_rows(hidden, stated["group"], power_of_two=stated["power_of_two"])

    monkeypatch.setattr(kernel, "activation_quantize", in_its_place)
    mine = backend(FP8_1x128, activation, swiglu_limit=0.5, swiglu_alpha=1.702)
    own, tokens = mine.relayout(random_experts(FP8_128x128, 2, 256, 128, CPU)), grouped(FP8_1x128)
    elsewhere = mine.run(tokens, own).y
    assert not asked, "a CPU has no such kernel"
    mine.fused = True
    assert torch.equal(mine.run(tokens, own).y, elsewhere)
    assert [(stated["alpha"], stated["limit"]) for stated in asked] == [(1.702, 0.5)]


def problem(*, emulated: bool, device: str = "cpu", hidden: int = 256) -> Problem:
    model = {"hidden_size": hidden, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "fp8_block"}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
    config = config.with_(allow_emulated=emulated, experts="deep_gemm", prepare_finalize="no_ep", max_num_tokens=64)
    return Problem(config, device_profile(device), BF16, 64, frozenset(), frozenset({"deep_gemm"}))


def test_the_oracle_chooses_the_emulation_only_where_it_is_allowed() -> None:
    chosen = oracle.select(problem(emulated=True)).chosen
    assert chosen.experts == "deep_gemm" and chosen.emulated
    stated = [str(reason) for reason in EXPERTS["deep_gemm"].reasons_against(problem(emulated=False, device="h200"))]
    assert stated == ["deep_gemm is not installed [pip install sgl-deep-gemm, or build it from its repository]"], (
        "an emulation runs on the host"
    )
    narrow = EXPERTS["deep_gemm"].reasons_against(problem(emulated=True, hidden=192))
    assert [str(reason) for reason in narrow] == ["multiplies whole blocks of 128, the hidden size is 192"]


def test_experts_of_several_sizes_are_refused_by_them() -> None:
    def slot(inner: int) -> SlotWeights:
        wide, tall = (FP8_128x128.quantize(torch.ones(shape)) for shape in ((inner, 256), (256, inner)))
        return SlotWeights(wide, wide, tall)

    backend = DeepGemmExperts(ExpertsContext(BF16, FP8_1x128, "silu", 2, 256, 256, torch.device("cpu")))
    with pytest.raises(UnsupportedError, match="intermediate sizes 128, 256, deep_gemm holds equal ones"):
        backend.relayout(MappedExpertWeights((slot(128), slot(256)), FP8_128x128))


def test_a_gpu_never_gets_the_emulation() -> None:
    context = ExpertsContext(BF16, FP8_1x128, "silu", 2, 256, 128, torch.device("meta"))
    with pytest.raises(LibraryMissing, match=r"deep_gemm.*is not installed"):
        DeepGemmExperts(context)


def asked(device: str, arch: tuple[int, int] | None = None, **quant: Any) -> list[str]:
    model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": quant}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test").with_(max_num_tokens=64)
    profile = device_profile(device)
    profile = profile if arch is None else profile.model_copy(update={"arch": arch})
    there = frozenset({"deep_gemm"})
    return [str(r) for r in EXPERTS["deep_gemm"].reasons_against(Problem(config, profile, BF16, 64, there, there))]


LIMITS: list[tuple[str, tuple[int, int] | None, dict[str, Any], list[str]]] = [
    ("h200", None, {"weights": "fp8_block"}, []),
    ("b200", None, {"weights": "fp8_block"}, ["takes scales as powers of two on sm_100, those of fp8_128x128 are f32"]),
    ("b200", None, {"weights": "fp8_block", "scale": "ue8m0"}, []),
    ("b200", None, {"weights": "mxfp4", "activations": "mxfp8"}, []),
    ("b200", None, {"weights": "mxfp4"}, ["multiplies with FP8, MXFP8 activations only"]),
    (
        "h200", None, {"weights": "mxfp4", "activations": "mxfp8"},
        ["has mxfp4 kernels for sm_100, this device is sm_90"],
    ),
    (
        "b200", (12, 0), {"weights": "fp8_block", "scale": "ue8m0"},
        ["has kernels for sm_90 and sm_100, this device is sm_120"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("device,arch,quant,stated", LIMITS)
def test_every_architecture_has_its_limits(
    device: str, arch: tuple[int, int] | None, quant: dict[str, Any], stated: list[str]
) -> None:
    assert asked(device, arch, **quant) == stated


def test_an_older_library_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(deep_gemm, "m_grouped_fp8_fp4_gemm_nt_masked")
    with pytest.raises(LibraryMissing, match=r"(?s)too old.*no m_grouped_fp8_fp4_gemm_nt_masked.*April 2026"):
        backend(FP8_1x128)


PARAMETERS = {
    "m_grouped_fp8_fp4_gemm_nt_contiguous": "a b d grouped_layout recipe recipe_a recipe_b compiled_dims "
    "disable_ue8m0_cast use_psum_layout ensure_zero_padding expected_m_for_psum_layout",
    "m_grouped_fp8_fp4_gemm_nt_masked": "a b d masked_m expected_m recipe recipe_a recipe_b compiled_dims "
    "disable_ue8m0_cast",
    "transform_sf_into_required_layout": "sf mn k recipe num_groups is_sfa disable_ue8m0_cast",
}
"""Of sgl-deep-gemm 0.1.5; DeepGEMM 2.6.1 has `psum_layout` behind the last."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_library(name: str) -> None:
    assert " ".join(inspect.signature(getattr(deep_gemm, name)).parameters) == PARAMETERS[name]


def test_the_emulation_refuses_what_the_library_refuses() -> None:
    x, w = torch.zeros((128, 256)).to(torch.float8_e4m3fn), torch.zeros((2, 128, 256)).to(torch.float8_e4m3fn)
    scales, w_scales = torch.ones((128, 2)), torch.ones((2, 1, 2))
    d, ids = torch.zeros((128, 128), dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
    call((x, scales), (w, w_scales), d, ids)
    with pytest.raises(AssertionError, match="scales"):
        call((x, scales.T.contiguous()), (w, w_scales), d, ids)
    with pytest.raises(AssertionError, match="FP4 is Blackwell's"):
        call((x, scales), (w[..., ::2].contiguous().view(torch.int8), w_scales), d, ids)
    packed = torch.zeros((128, 2), dtype=torch.int32)
    with pytest.raises(AssertionError, match="not column-major"):
        call((x, packed), (w, packed.expand(2, 128, 2)), d, ids, recipe_a=(1, 32), recipe_b=(1, 32))
    ids[5] = 1
    with pytest.raises(AssertionError, match="one expert"):
        call((x, scales), (w, w_scales), d, ids)
    with pytest.raises(AssertionError, match="issue 268"):
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
            (x.view(2, 64, 256)[:, :32].contiguous(), scales.view(2, 64, 2)[:, :32].contiguous()), (w, w_scales),
            d.view(2, 64, 128)[:, :32], torch.ones(2, dtype=torch.int32), 32,
        )  # fmt: skip
