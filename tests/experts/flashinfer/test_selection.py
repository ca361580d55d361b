"""How the oracle selects the experts of FlashInfer: every limit as it is stated, and two ranks that exchange codes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_mk import MoEConfig, Problem, oracle
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config import device_profile
from moe_mk.errors import LibraryMissing
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.flashinfer import trtllm as adapter
from moe_mk.experts.flashinfer.trtllm import FlashInferTrtllmExperts
from moe_mk.flight import interleave
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.experts import random_experts
from moe_mk.oracle import Parts, Verdict, assemble
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant import BF16, FP8_128x128
from moe_mk.quant.microscaling import MXFP8
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights
from moe_mk.weights.layer_weights import as_mapped

CPU = torch.device("cpu")


def context() -> ExpertsContext:
    return ExpertsContext(BF16, BF16, "silu", 2, 256, 128, CPU)


def problem(device: str, *, emulated: bool = False, installed: bool = True, **other: Any) -> Problem:
    arch, top_k, kernel = other.pop("arch", None), other.pop("top_k", 2), other.pop("kernel", {})
    model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 64} | other.pop("model", {})
    config = MoEConfig.parse({"model": model | {"quant": other}, "router": {"top_k": top_k}}, "a test")
    config = config.with_(allow_emulated=emulated, max_num_tokens=64, fallback=False, **kernel)
    profile, there = device_profile(device), frozenset({"flashinfer"})
    profile = profile if arch is None else profile.model_copy(update={"arch": arch})
    return Problem(config, profile, BF16, 64, there if installed else frozenset(), there)


ODD = {"hidden_size": 200, "moe_intermediate_size": 96}
OAI = {"activation": "swiglu_oai", "swiglu_limit": 7.0}
LIMITS: dict[str, list[tuple[str, dict[str, Any], list[str]]]] = {"flashinfer_trtllm": [
    *[("b200", {"weights": name}, []) for name in ("bf16", "fp8_block", "mxfp8", "nvfp4", "mxfp4")],
    ("b200", {"weights": "mxfp4", "activations": "mxfp8"}, []),
    ("b200", {"weights": "mxfp4", "model": OAI | {"expert_bias": True}}, []),
    (
        "b200", {"weights": "mxfp4", "model": ODD},
        ["needs sizes that are multiples of 32 for mxfp4 weights, the hidden size is 200"],
    ),
    ("h200", {"weights": "fp8_block"}, ["needs sm_100, this device is sm_90"]),
    (
        "b200", {"weights": "fp8_block", "arch": (12, 0)},
        ["has fp8_128x128 kernels up to sm_109, this device is sm_120"],
    ),
    ("b200", {"weights": "mxfp4", "activations": "mxfp8", "arch": (10, 3)}, []),
    (
        "b200", {"weights": "mxfp4", "arch": (10, 3)},
        ["has no mxfp4 kernels with bf16 rows for sm_103"],
    ),
    (
        "b200", {"weights": "mxfp4", "activations": "mxfp8", "arch": (10, 3), "kernel": {"activations": "plain"}},
        ["has no mxfp4 kernels with bf16 rows for sm_103 [kernel.activations = auto]"],
    ),
    (
        "b200", {"weights": "fp8_block", "kernel": {"activations": "plain"}},
        ["multiplies fp8_128x128 weights with FP8 activations only [kernel.activations = auto]"],
    ),
    (
        "b200", {"weights": "fp8_block", "activations": "none"},
        ["multiplies fp8_128x128 weights with FP8 activations only"],
    ),
    (
        "b200", {"weights": "fp8_block", "model": {"hidden_size": 192}},
        ["needs sizes that are multiples of 128 for fp8_128x128 weights, the hidden size is 192"],
    ),
    ("b200", {"weights": "nvfp4", "model": OAI}, ["computes silu alone for nvfp4 weights, the model needs swiglu_oai"]),
    (
        "b200", {"weights": "nvfp4", "model": {"expert_bias": True}},
        ["adds biases to mxfp4 experts only, these are nvfp4"],
    ),
    ("b200", {"weights": "bf16", "top_k": 33}, ["sorts at most 32 choices a token, router.top_k is 33"]),
    (
        "b200", {"weights": "bf16", "model": {"num_experts": 2048}},
        ["has room for 2047 experts a rank, there are 2048 [use more ranks]"],
    ),
    (
        "b200", {"weights": "bf16", "model": {"activation": "gelu"}},
        ["has silu, swiglu_limit, swiglu_oai, the model needs gelu"],
    ),
    ("mi300x", {"weights": "bf16"}, ["runs on cuda, this device is rocm"]),
], "flashinfer_cutlass": [
    ("h200", {"weights": "bf16"}, []),
    ("b200", {"weights": "bf16"}, []),
    ("h200", {"weights": "fp8_block"}, []),
    ("b200", {"weights": "fp8_block"}, ["has fp8_128x128 kernels up to sm_90, this device is sm_100"]),
    ("h200", {"weights": "fp8_tensor", "input_scale": 0.1}, []),
    (
        "h200", {"weights": "fp8_tensor"},
        ["needs a calibrated scale of activations, the checkpoint finds one a token [model.quant.input_scale = ...]"],
    ),
    ("b200", {"weights": "nvfp4"}, []),
    ("h200", {"weights": "nvfp4"}, ["has nvfp4 kernels from sm_100 on, this device is sm_90"]),
    ("b200", {"weights": "mxfp4", "activations": "mxfp8"}, []),
    ("b200", {"weights": "mxfp4"}, ["multiplies mxfp4 weights with MXFP8 activations only"]),
    (
        "h200", {"weights": "int8"},
        ["reads fp8_block, fp8_tensor, mxfp4, nvfp4, plain weights, the experts are int8_channel"],
    ),
    ("mi300x", {"weights": "bf16"}, ["runs on cuda, this device is rocm"]),
    (
        "b200", {"weights": "nvfp4", "model": {"hidden_size": 192}},
        ["needs sizes that are multiples of 128 for nvfp4 weights, the hidden size is 192"],
    ),
]}  # fmt: skip
CASES = [
    pytest.param(name, *each, id=f"{name}-{n}") for name, limits in LIMITS.items() for n, each in enumerate(limits)
]


@pytest.mark.parametrize("name,device,asked,stated", CASES)
def test_every_limit_is_stated(name: str, device: str, asked: dict[str, Any], stated: list[str]) -> None:
    assert [str(reason) for reason in EXPERTS[name].reasons_against(problem(device, **asked))] == stated


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_trtllm"])
@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_plain_weights_of_another_dtype_than_the_layer_are_refused(name: str, weights: str) -> None:
    # Their bits would be read as bf16.
    found = EXPERTS[name].reasons_against(problem("b200", weights=weights))
    assert [str(r) for r in found] == [f"reads plain weights in the layer's bf16 alone, the experts are {weights}"]
    assert EXPERTS[name].reasons_against(problem("b200", weights="bf16")) == []


@pytest.mark.parametrize("weights", ["bf16", "fp8_block", "mxfp8", "nvfp4", "mxfp4"])
def test_every_type_has_its_architectures_and_sizes(weights: str) -> None:
    asked = problem("b200", weights=weights, arch=(12, 0), model={"hidden_size": 192, "moe_intermediate_size": 320})
    found = [str(reason) for reason in EXPERTS["flashinfer_trtllm"].reasons_against(asked)]
    assert [text.split(" kernels ")[-1] for text in found[:1]] == ["up to sm_109, this device is sm_120"]
    sizes = [] if weights == "mxfp4" else ["the hidden size is 192", "the intermediate size is 320"]
    assert [text.split(", ")[-1] for text in found[1:]] == sizes, "MXFP4 is filled up"


@pytest.mark.parametrize("name", LIMITS)
def test_the_emulation_serves_only_where_it_is_allowed(name: str) -> None:
    def of(asked: Problem) -> Verdict:
        return next(v for v in oracle.select(asked).verdicts if (v.prepare_finalize, v.experts) == ("no_ep", name))

    allowed = of(problem("cpu", emulated=True, installed=False, weights="nvfp4"))
    assert not allowed.reasons and allowed.emulated and allowed.cost_source == "model; never run on a device"
    refused = of(problem("cpu", installed=False, weights="nvfp4"))
    assert {reason.code for reason in refused.reasons} == {"device", "library"}
    with pytest.raises(LibraryMissing, match=r"flashinfer.*is not installed"):
        EXPERTS[name](replace(context(), device=torch.device("meta")))


@pytest.mark.parametrize("weights", ["fp8_block", "mxfp8"])
def test_two_ranks_exchange_codes_and_agree_with_the_reference(weights: str) -> None:
    draw, x_TH = torch.Generator().manual_seed(3), torch.randn((6, 256), generator=torch.Generator().manual_seed(4))
    ids = torch.rand((6, 8), generator=draw).argsort(dim=1)[:, :2].to(torch.int32)
    stack = random_experts(FP8_128x128 if weights == "fp8_block" else MXFP8, 8, 256, 128, CPU)

    def outputs(experts: str) -> torch.Tensor:
        asked = problem("cpu", emulated=True, installed=False, weights=weights, model={"num_experts": 8})
        asked = replace(asked, config=asked.config.with_(ep=2, prepare_finalize="all_to_all", experts=experts))
        decision, flights = oracle.select(asked), []
        assert decision.wire == decision.compute and decision.wire.block is not None
        for rank, comm in enumerate(LockstepWorld(2).communicators()):
            kernel, mine = assemble(decision, Parts(ExpertMap.linear(8, 2), CPU, comm)), slice(3 * rank, 3 * rank + 3)
            assert isinstance(kernel, FusedMoEKernel)
            own = kernel.experts.relayout(stack_of(stack, 4 * rank))
            flights.append(kernel.steps(x_TH[mine].bfloat16(), Routing(ids[mine], torch.full((3, 2), 0.5)), own))
        return torch.cat(interleave(flights)).float()

    got, expected = outputs("flashinfer_trtllm"), outputs("reference")
    assert float((got - expected).norm() / expected.norm()) < 0.03


def stack_of(stack: ExpertWeights, start: int) -> MappedExpertWeights:
    mapped = as_mapped(stack)
    return replace(mapped, slots=tuple(mapped.slot(start + index) for index in range(4)))


@pytest.mark.parametrize("found", ["0.6.18", "0.6.18.dev3"])
def test_a_library_that_packs_weights_into_ids_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "installed_version", lambda name: found)
    with pytest.raises(LibraryMissing, match=rf"(?s)needs FlashInfer 0\.7 or newer.*{found} is installed"):
        FlashInferTrtllmExperts(context())


@pytest.mark.parametrize("found", [None, "unknown", "0.7.0", "1.0rc1"])
def test_others_are_not_asked_twice(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "installed_version", lambda name: found)
    assert FlashInferTrtllmExperts(context()).library.__name__.endswith("flashinfer.fused_moe.core")
