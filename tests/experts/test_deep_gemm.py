"""The DeepGEMM adapter on the emulated library: both layouts, both scales, padding, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from moe_mk import MoEConfig, Problem, oracle
from moe_mk.config import device_profile
from moe_mk.errors import LibraryMissing, UnsupportedError
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.deep_gemm import DeepGemmExperts, padded_places
from moe_mk.external.emulated import deep_gemm
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, QuantScheme
from moe_mk.testing.conformance import check_experts
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights


def test_places_by_hand() -> None:
    # Experts 0 and 2 have three and two rows and start at multiples of 4; the room is 5 + 3 x 3, up to 16.
    places, experts = padded_places(torch.tensor([3, 0, 2]), 5, 4)
    assert places.tolist() == [0, 1, 2, 4, 5]
    assert experts.tolist() == [0, 0, 0, -1, 2, 2, -1, -1, *[-1] * 8]
    assert padded_places(torch.tensor([0, 4]), 4, 4)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "weights,compute", [(FP8_128x128, FP8_1x128), (FP8_128x128_UE8M0, FP8_1x128_UE8M0)], ids=["fp8", "ue8m0"]
)
def test_the_conformance_kit(weights: QuantScheme, compute: QuantScheme) -> None:
    ran = check_experts("deep_gemm", weights, dtype=BF16, compute=compute, hidden_size=256, num_slots=3)
    assert ran == 13 * 2 * 2 * 2


def problem(*, emulated: bool, device: str = "cpu", hidden: int = 256) -> Problem:
    model = {"hidden_size": hidden, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "fp8_block"}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
    config = config.with_(allow_emulated=emulated, experts="deep_gemm", prepare_finalize="no_ep", max_num_tokens=64)
    return Problem(config, device_profile(device), BF16, 64, frozenset(), frozenset({"deep_gemm"}))


def test_the_oracle_chooses_the_emulation_only_where_it_is_allowed() -> None:
    chosen = oracle.select(problem(emulated=True)).chosen
    assert chosen.experts == "deep_gemm" and chosen.emulated
    said = [str(reason) for reason in EXPERTS["deep_gemm"].reasons_against(problem(emulated=False, device="h200"))]
    assert said == [
        "deep_gemm is not installed [pip install sgl-deep-gemm, or build it from its repository, or "
        "kernel.allow_emulated = true]"
    ]
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


def test_the_emulation_refuses_what_the_library_refuses() -> None:
    x, w = torch.zeros((128, 256)).to(torch.float8_e4m3fn), torch.zeros((2, 128, 256)).to(torch.float8_e4m3fn)
    scales, w_scales = torch.ones((128, 2)), torch.ones((2, 1, 2))
    d, ids = torch.zeros((128, 128), dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    with pytest.raises(AssertionError, match="not column-major"):
        call((x, scales), (w, w_scales), d, ids)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    call((x, aligned), (w, w_scales), d, ids)
    ids[5] = 1
    with pytest.raises(AssertionError, match="one expert"):
        call((x, aligned), (w, w_scales), d, ids)
    with pytest.raises(AssertionError, match="issue 268"):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(
            (x[None, :32], aligned[None, :32]), (w, w_scales), d[None, :32], torch.ones(1, dtype=torch.int32), 32
        )
