"""Kernels compiled ahead are those that a launch looks up, also after their folder was moved."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.config import MoEConfig, device_profile
from moe_mk.errors import UnsupportedError
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning.ahead import AheadOrder, _route, compile_layer
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
from moe_mk.tokens import RowTokens

pytestmark = [pytest.mark.sm90, pytest.mark.slow]
HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 8, 2
MODEL = {
    "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
    "quant": {"weights": "fp8_block", "block": [128, 128]},
}  # fmt: skip
ROUTER = {"top_k": TOP_K}


def order(**model: object) -> AheadOrder:
    config = MoEConfig.parse({"model": MODEL | model, "router": ROUTER}, "a test")
    return AheadOrder(config, device_profile("h200"), 1, (5,))


def test_a_launch_on_real_tensors_finds_every_kernel_that_was_compiled_ahead_and_moved(tmp_path: Path) -> None:
    from moe_mk.experts import ExpertsContext
    from moe_mk.experts.triton.experts import TritonExperts
    from moe_mk.experts.triton.workspace import Workspace
    from moe_mk.kernels.triton.topk import grouped_topk
    from moe_mk.lab.tuning.triton_cache import compiling, relocate

    made = compile_layer(order(), tmp_path / "here")
    assert sorted(each.name for each in made) == ["_combine", "_grouped_topk", "_prologue", "_w13", "_w2"]
    assert not any(each.was_there for each in made) and all(each.seconds > 0 for each in made)
    (tmp_path / "here").rename(tmp_path / "there")
    assert relocate(tmp_path / "there") == len(made)
    (tmp_path / "there" / "KEY").mkdir()
    for number, damage in enumerate(('{"child_', "[]", "{}")):
        (tmp_path / "there" / "KEY" / f"__grp__{number}.json").write_text(damage)
    assert relocate(tmp_path / "there") == len(made) and not list((tmp_path / "there" / "KEY").iterdir())

    cpu = torch.device("cpu")
    experts = TritonExperts(ExpertsContext(BF16, FP8_1x128, "silu", EXPERTS, HIDDEN, INNER, cpu), Workspace())
    weights = random_experts(FP8_128x128, EXPERTS, HIDDEN, INNER, cpu)
    load_E, physical_of_E = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(EXPERTS, dtype=torch.int32)
    with compiling(tmp_path / "there", 90, 132) as found:
        weights_TK, ids_TK, _ = grouped_topk(
            torch.randn(7, EXPERTS), TOP_K, 1, 1, "softmax", None, True, 1.0, torch.float32,
            (load_E, physical_of_E),
        )  # fmt: skip
        x_TH = torch.randn(7, HIDDEN).bfloat16()
        experts.run(RowTokens(BF16.quantize(x_TH), ids_TK, weights_TK, EXPERTS), experts.relayout(weights))
    assert {each.key for each in found} == {each.key for each in made}
    assert all(each.was_there for each in found)


def test_slices_of_tensor_parallel_ranks_have_the_kernels_of_their_size(tmp_path: Path) -> None:
    whole = order(moe_intermediate_size=2 * INNER)
    sliced = replace(whole, config=whole.config.with_(tp=2))
    keys = [{each.key for each in compile_layer(each, tmp_path)} for each in (order(), sliced, whole)]
    assert keys[0] == keys[1] != keys[2]


def test_the_router_is_compiled_for_the_dtype_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[torch.dtype, torch.dtype]] = []
    monkeypatch.setattr(
        "moe_mk.kernels.triton.topk.grouped_topk", lambda logits, *rest: given.append((logits.dtype, rest[7]))
    )
    for name in ("float32", "model"):
        _route(replace(order(), config=order().config.with_(router_dtype=name)), 5)
    assert given == [(dtype, dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.stress
def test_another_process_elsewhere_compiles_under_the_same_keys(tmp_path: Path) -> None:
    config, out = tmp_path / "model.yaml", tmp_path / "kernels"
    config.write_text(json.dumps({"model": MODEL, "router": ROUTER}))
    options = ["--tokens", "5", "--out", str(out), "--json"]
    command = [sys.executable, "-m", "moe_mk", "compile", str(config), *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    found = {each["key"] for each in json.loads(done.stdout)["kernels"]}
    assert found == {each.key for each in compile_layer(order(), tmp_path / "again")}
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "again").iterdir())


def test_what_cannot_be_compiled_ahead_is_refused_with_every_reason(tmp_path: Path) -> None:
    asked = order(quant={"weights": "mxfp4"})
    asked = replace(asked, device=device_profile("mi300x"), ranks=3)
    with pytest.raises(UnsupportedError) as refused:
        compile_layer(asked, tmp_path)
    text = str(refused.value)
    assert "weights are mxfp4" in text and "mi300x is not one of sm_90 and sm_100" in text
    assert "8 experts do not divide over 3 ranks" in text and not list(tmp_path.iterdir())
