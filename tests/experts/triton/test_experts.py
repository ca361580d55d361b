"""What the oracle hears about the Triton experts; what they compute is in tests/kernels/triton."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, MoEConfig, Problem, oracle
from moe_mk.config import device_profile
from moe_mk.experts import EXPERTS, ExpertsContext
from moe_mk.experts.triton import tuning as triton_tuning
from moe_mk.experts.triton.experts import kernel_format_of
from moe_mk.experts.triton.paged import page
from moe_mk.experts.triton.tuning import Case, tuned_folder
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TunedPoint, save_measured
from moe_mk.oracle import memory
from moe_mk.oracle.verdict import Verdict
from moe_mk.quant import BF16, FP32, FP8_1x128, FP8_128x128
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from tests.support.tiers import slow


def problem(device: str = "h200", dtype: Any = BF16, installed: tuple[str, ...] = ("triton",), **given: Any) -> Problem:
    quant = {"weights": given.pop("weights", "fp8_block"), "block": given.pop("block", (128, 128))}
    quant |= given.pop("quant", {})
    model = {"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts": 256, "quant": quant}
    model |= {key: given.pop(key) for key in model if key in given}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 8}}, "a test").with_(max_num_tokens=512, **given)
    return Problem(config, device_profile(device), dtype, 512, frozenset(installed))


def reasons(asked: Problem) -> list[str]:
    return [f"{reason.code}: {reason}" for reason in EXPERTS["triton"].reasons_against(asked)]


def test_an_h200_with_triton_is_served_in_fp8_and_bf16_inside_a_graph() -> None:
    assert reasons(problem(graphs=True)) == reasons(problem(weights="bf16", graphs=True)) == []


@pytest.mark.row(174)
@pytest.mark.parametrize(
    ("weights", "settings", "inner", "format"),
    [
        ("fp8_block", {}, 256, "fp8"),
        *slow(
            # Decoded to FP8 if rows are rounded and of whole groups, else to bf16, without scales of blocks.
            ("mxfp4", {"quant": {"activations": "fp8"}}, 256, "mxfp4"),
            ("mxfp4", {"quant": {"activations": "fp8"}}, 64, "w_mxfp4"),
            ("mxfp4", {"quant": {"activations": "fp8"}, "activations": "plain"}, 256, "w_mxfp4"),
            ("bf16", {}, 256, "plain"), ("nvfp4", {}, 256, "w_nvfp4"), ("int8", {}, 256, "int8"),
            ("int4_g32_zp", {}, 256, "w_int4_zero"),
        ),
    ],
)  # fmt: skip
def test_experts_below_a_gpu_are_planned_with_the_size_of_their_records(
    weights: str, settings: dict[str, Any], inner: int, format: str
) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": inner, "num_experts": 8}
    asked = problem(weights=weights, residency={"slots": 3}, **sizes, **settings)
    decision = oracle.select(asked)
    assert decision.chosen.experts == "triton" and memory.resident_experts(asked) == 3
    assert reasons(problem(weights=weights, residency={"slots": 3}, graphs=True))[0].startswith("graphs: ")
    stack = random_experts(asked.weights, 8, 512, inner, torch.device("cpu"))
    residency = asked.config.kernel.residency
    assert residency is not None
    paged = page(stack, KERNEL_FORMATS[format], residency, torch.device("cpu"), limit_s=60.0)
    assert paged.cache.record_bytes == memory.slot_bytes(asked) and paged.counts.slots == 3
    on_a_cpu = problem("cpu", weights="bf16", residency={"slots": 3}, installed=("c++",))
    named = [str(reason) for reason in EXPERTS["cpu_native"].reasons_against(on_a_cpu)]
    assert len(named) == 1 and named[0].startswith(
        "reads experts from files, and kernel.residency.store names no folder"
    )


@pytest.mark.parametrize(
    "weights,activations,compute,format",
    [
        ("fp8_block", "auto", "fp8_1x128", "fp8"), ("fp8_block", "plain", "bf16", "w_fp8"),
        ("fp8_channel", "auto", "fp8_token", "fp8_row"), ("fp8_tensor", "plain", "bf16", "w_fp8_row"),
        ("int8", "auto", "int8_token", "int8"), ("int8", "plain", "bf16", "w_int8"),
        ("int8_block", "auto", "int8_token", "int8_block"), ("int8_block", "plain", "bf16", "w_int8_block"),
        ("mxfp8", "auto", "bf16", "w_mxfp8"), ("mxfp4", "auto", "bf16", "w_mxfp4"),
        ("nvfp4", "auto", "bf16", "w_nvfp4"), ("bf16", "auto", "bf16", "plain"),
    ],
)  # fmt: skip
def test_every_type_is_served_as_it_is_stored(weights: str, activations: str, compute: str, format: str) -> None:
    asked = problem(weights=weights, activations=activations)
    decision = oracle.select(asked)
    assert decision.chosen.experts == "triton" and decision.effect is None and decision.compute.name == compute
    assert kernel_format_of(asked.weights, decision.compute).name == format


@pytest.mark.parametrize(
    "given,expected",
    [
        ({"device": "cpu"}, r"device: runs on cuda"),
        ({"device": "mi300x"}, r"device: runs on cuda"),
        ({"installed": ()}, r"library: triton is not installed \[pip install 'moe-mk\[cuda\]'\]"),
        ({"dtype": FP32}, r"dtype: computes in bf16"),
        ({"weights": "fp16"}, r"weights: reads plain weights in bf16 alone, the experts are fp16"),
        ({"weights": "int8_block", "block": (64, 64)}, r"block: reads INT8 blocks with sides 128, .* have 64x64"),
        (
            {"weights": "int8_block", "moe_intermediate_size": 192},
            r"shape: reads hidden rows in groups of 128, a rank has 192",
        ),
        (
            {"weights": "mxfp8", "activations": "checkpoint"},
            r"activations: multiplies with FP8, INT8, plain activations",
        ),
        ({"weights": "int8", "moe_intermediate_size": 200}, r"shape: reads rows in boxes .* intermediate size of 200"),
        ({"moe_intermediate_size": 192}, r"shape: reads hidden rows in groups of 128, a rank has 192"),
        ({"hidden_size": 136}, r"shape: .*a hidden size of 136"),
    ],
)
def test_it_states_what_it_cannot_do(given: dict[str, Any], expected: str) -> None:
    assert any(re.match(expected, reason) for reason in reasons(problem(**given))), reasons(problem(**given))


NEWER = "has kernels for sm_90 and sm_100, this device is sm_1{}0"
ARCHS = {(8, 0): "needs sm_90, this device is sm_80", (11, 0): NEWER.format(1), (12, 0): NEWER.format(2)}


@pytest.mark.parametrize("arch", [(9, 0), (10, 3), *ARCHS])
def test_an_architecture_whose_kernels_were_never_compiled_is_refused(arch: tuple[int, int]) -> None:
    asked = problem()
    newer = asked.device.model_copy(update={"arch": arch})
    found = EXPERTS["triton"].reasons_against(Problem(asked.config, newer, BF16, 512, frozenset({"triton"})))
    assert [str(reason) for reason in found] == ([ARCHS[arch]] if arch in ARCHS else [])


def test_generic_code_for_blackwell_is_called_so() -> None:
    source = EXPERTS["triton"].priced(problem("b200"), FP8_1x128)[1]
    assert source == (
        "model; compiled generically for sm_100; FP8 tiles of 32 and 128 rows spill registers, not yet measured"
    )


def test_blackwell_is_not_tuned_with_tiles_of_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_mk.experts.triton import experts as module

    context = ExpertsContext(BF16, FP8_1x128, "silu", 32, 7168, 2048, torch.device("cpu"), weights=FP8_128x128)
    gluon = {"rows": 8, "swap": True, "warps": 4, "stages": 6, "engine": "gluon"}
    assert gluon in EXPERTS["triton"].tuning_space(context, 8)
    monkeypatch.setattr(module, "profile_here", lambda device: device_profile("b200"))
    assert {tile["engine"] for tile in EXPERTS["triton"].tuning_space(context, 8)} == {"triton"}


@pytest.mark.sm90
def test_a_gluon_tile_is_refused_on_blackwell_before_it_fails_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_mk.experts.triton import experts as module

    backend = EXPERTS["triton"](ExpertsContext(BF16, FP8_1x128, "silu", 32, 7168, 2048, torch.device("cpu")))
    tile = {"rows": 8, "swap": True, "warps": 4, "stages": 6, "engine": "gluon"}
    assert backend.tuned_with(tile).tuned is not None
    monkeypatch.setattr(module, "profile_here", lambda device: device_profile("b200"))
    with pytest.raises(ConfigError, match=r"engine='gluon'\) has no kernel on b200, which compiles those of triton"):
        backend.tuned_with(tile)


@pytest.mark.parametrize("scale,scheme", [("float32", "fp8_1x128"), ("ue8m0", "fp8_1x128_ue8m0")])
@pytest.mark.parametrize("activations", ["auto", "checkpoint"])
def test_mxfp4_with_fp8_activations_is_multiplied_as_fp8_and_tokens_travel_so(
    activations: str, scale: str, scheme: str
) -> None:
    quant = {"activations": "fp8", "scale": scale}
    asked = problem(weights="mxfp4", quant=quant, activations=activations, ep=8, installed=("triton", "deep_ep"))
    decision = oracle.select(asked)
    assert decision.chosen.experts == "triton" and decision.effect is None
    assert decision.compute.name == decision.wire.name == scheme
    assert kernel_format_of(asked.weights, decision.compute).name == "mxfp4"
    assert f"wire {scheme}, experts compute {scheme}" in str(decision)


@pytest.mark.parametrize(
    "activations,rounded", [("plain", "fp8"), ("auto", "auto"), ("auto", "none"), ("auto", "mxfp8")]
)
def test_mxfp4_without_fp8_activations_stays_weight_only(activations: str, rounded: str) -> None:
    asked = problem(weights="mxfp4", quant={"activations": rounded}, activations=activations)
    decision = oracle.select(asked)
    assert decision.chosen.experts == "triton" and decision.compute == BF16
    assert kernel_format_of(asked.weights, decision.compute).name == "w_mxfp4"


def test_the_oracle_ranks_it_before_the_definition() -> None:
    decision = oracle.select(problem())
    assert decision.chosen.experts == "triton" and decision.graph_safe
    costs = {verdict.experts: verdict.cost_us for verdict in decision.verdicts if verdict.prepare_finalize == "no_ep"}
    assert costs["triton"] is not None and costs["reference"] is not None and costs["triton"] < costs["reference"] / 10


def test_what_never_ran_is_called_so_until_a_file_states_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict() -> Verdict:
        judged = oracle.select(problem()).verdicts
        return next(each for each in judged if (each.prepare_finalize, each.experts) == ("no_ep", "triton"))

    assert verdict().cost_source == "model; compiled, not yet measured"
    # 512 tokens of 8 choices over 256 experts are 16 rows an expert, between 4 and 64.
    files, case = tuned_folder("h200", tmp_path), Case(7168, 2048, 256, "fp8_128x128", "fp8_1x128")
    tile = asdict(Tile(16, True, 4, 5))
    points = [TunedPoint(128, tile, 1000.0), TunedPoint(2048, tile, 4000.0)]
    save_measured(files / f"{case.name(8)}.json", points, {"device": "h200"})
    monkeypatch.setattr(triton_tuning, "tuned_folder", lambda device, folder=None: files)
    assert verdict().cost_source == "measured" and verdict().cost_us == pytest.approx(2000.0)


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, moe_mk, moe_mk.experts.triton.experts; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.sm90
@pytest.mark.parametrize("expected_N,rows", [(None, 128), (2.0 * 32, 16), (16.0 * 32, 32), (200.0 * 32, 128)])
def test_the_tile_follows_the_expected_assignments_and_not_the_places_of_a_window(
    expected_N: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 8 ranks and 256 tokens has 2,048 places of 8 ids over 32 experts: 512 ids each, mostly -1."""
    chosen: list[Tile] = []

    def run(x: Any, ids: Any, weights: Any, experts: Any, tile: Tile, *_: Any, **__: Any) -> Tensor:
        chosen.append(tile)
        return x[0]

    context = ExpertsContext(BF16, FP8_1x128, "silu", 32, 128, 128, torch.device("cpu"))
    backend = EXPERTS["triton"](context)
    monkeypatch.setattr(backend.kernels, "experts_rows", run)
    q = FP8_128x128.quantize(torch.zeros((32, 256, 128)))
    weights = ExpertWeights(q, FP8_128x128.quantize(torch.zeros((32, 128, 128))))
    ids_RK = torch.full((2048, 8), -1, dtype=torch.int32)
    x_RH = BF16.quantize(torch.zeros((2048, 128), dtype=torch.bfloat16))
    backend.run(RowTokens(x_RH, ids_RK, torch.zeros(ids_RK.shape), 32, expected_N=expected_N), weights)
    assert [tile.rows for tile in chosen] == [rows]
