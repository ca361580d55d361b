"""FP8 checkpoints run as FP8 on a CPU, and what cannot be computed is refused while loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers
from transformers.integrations import finegrained_fp8

from moe_mk.errors import UnsupportedError, WeightError
from moe_mk.integrations.transformers import cpu_fp8, explain, pack_linears, patch_blocks, register
from moe_mk.lab.checkpoints.tiny_models import write_fp8_checkpoint
from moe_mk.quant import QuantTensor, weight_scheme
from tests.integrations.hf.cases import generate, logits, prompt
from tests.layer.native import NEEDS_COMPILER


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"))


def load_fp8(folder: Path, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def test_an_fp8_checkpoint_stays_fp8_and_generates_the_same_tokens(fp8_folder: Path) -> None:
    register(activations="checkpoint")
    ids = prompt()
    with cpu_fp8():
        model = load_fp8(fp8_folder, experts_implementation="moe_mk", dtype=torch.float32)
        experts = model.model.layers[1].mlp.experts
        assert experts.down_proj.dtype is torch.float8_e4m3fn
        assert {module.scheme for module in explain(model).modules} == {"fp8_128x128"}
        got, mine = generate(model, ids), logits(model, ids)
        model.set_experts_implementation("eager")
        assert torch.equal(logits(model, ids), mine)
        assert generate(model, ids) == got
        # These add up in another order, and an ulp may round an activation to the FP8 number next to it.
        for theirs in ("grouped_mm", "batched_mm"):
            model.set_experts_implementation(theirs)
            assert float((logits(model, ids) - mine).norm() / mine.norm()) < 0.02


def test_fp8_blocks_are_patched_as_well(fp8_folder: Path) -> None:
    with cpu_fp8():
        model, ids = load_fp8(fp8_folder, dtype=torch.float32), prompt()
        wanted = logits(model, ids)
        patch_blocks(model, activations="checkpoint")
        assert float((logits(model, ids) - wanted).abs().max() / wanted.abs().max()) < 1e-4


@NEEDS_COMPILER
def test_linear_layers_in_fp8_are_packed(fp8_folder: Path) -> None:
    with cpu_fp8():
        model = load_fp8(fp8_folder, experts_implementation="moe_mk").requires_grad_(False)
    scheme, held = weight_scheme((128, 128)), dict(model.named_modules())
    held = {name: each for name, each in held.items() if isinstance(each, finegrained_fp8.FP8Linear)}
    pack_linears(model, fp8_folder)
    for name, theirs in held.items():
        packed, x = model.get_submodule(name), torch.randn(3, theirs.in_features).bfloat16()
        w = QuantTensor(theirs.weight, theirs.weight_scale_inv, scheme).dequantize(torch.float32).double()
        assert packed.format == "fp8_128x128" and "shared_experts" in " ".join(held)
        assert float((packed(x) - x.double() @ w.T).norm() / packed(x).norm()) < 2**-7
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert logits(model, prompt()).isfinite().all(), "outside of cpu_fp8 too"
    with cpu_fp8(), pytest.raises(UnsupportedError, match="no linear layer to pack"):
        pack_linears(load_fp8(fp8_folder, dtype=torch.float32), skip=["lm_head"])


def test_outside_of_it_transformers_is_as_it_was(fp8_folder: Path) -> None:
    before = finegrained_fp8._FINEGRAINED_FP8
    with cpu_fp8():
        assert finegrained_fp8._FINEGRAINED_FP8 is not before
    with pytest.raises(ZeroDivisionError), cpu_fp8():
        raise ZeroDivisionError
    assert finegrained_fp8._FINEGRAINED_FP8 is before


@pytest.mark.skipif(not hasattr(finegrained_fp8, "load_finegrained_fp8_kernel"), reason="this version has no such call")
def test_a_model_that_leaves_the_context_is_refused_with_its_name(fp8_folder: Path) -> None:
    with cpu_fp8():
        model = load_fp8(fp8_folder, dtype=torch.float32)
    for implementation in ("moe_mk", "eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with pytest.raises(
            UnsupportedError, match=r"outside of cpu_fp8\(\), in which it was loaded(.|\n)*`with cpu_fp8"
        ):
            generate(model, prompt())


def test_another_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(finegrained_fp8, "FineGrainedFP8")
    with pytest.raises(UnsupportedError, match=r"has no FineGrainedFP8; known to work with 5.16 and 5.24"), cpu_fp8():
        pass


def test_fp8_checkpoints_that_cannot_be_computed_are_refused_while_loading(fp8_folder: Path, tmp_path: Path) -> None:
    for file in fp8_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="activation_scheme is 'static'"), cpu_fp8():
        load_fp8(tmp_path)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_invalid_scales_are_refused_by_name(fp8_folder: Path, value: float) -> None:
    with cpu_fp8():
        model, ids = load_fp8(fp8_folder, experts_implementation="moe_mk", dtype=torch.float32), prompt()
        experts = next(module for module in model.modules() if hasattr(module, "down_proj_scale_inv"))
        experts.down_proj_scale_inv.data[1].fill_(value)
        with pytest.raises(WeightError, match=rf"down_proj_scale_inv\[1, 0, 0\] \(expert 1\) = {value:g}"):
            model(ids)
