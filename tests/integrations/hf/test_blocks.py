"""Whole blocks of DeepSeek-V3's shape in our layer, and blocks that are left alone."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers

from moe_mk.errors import UnsupportedError
from moe_mk.experts.cpu_native.weights import PackedExpertWeights
from moe_mk.integrations.transformers import patch_blocks, patched_blocks, register, unpatch_blocks
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.cases import family, generate, logits, prompt, relative
from tests.layer.native import NEEDS_COMPILER
from tests.support.alone import NEEDS_PEAKS, alone, peak_above


@pytest.mark.row(65)
def test_patched_blocks_give_the_same_tokens_and_count_load() -> None:
    model, ids = tiny_model(), prompt()
    expected, wanted, names = generate(model, ids), logits(model, ids), list(model.state_dict())
    layers = patch_blocks(model)
    assert sorted(layers) == ["model.layers.1.mlp", "model.layers.2.mlp"] and list(model.state_dict()) == names
    assert generate(model, ids) == expected
    layers["model.layers.1.mlp"].reset_expert_load()
    assert float((logits(model, ids) - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert int(layers["model.layers.1.mlp"].expert_load.sum()) == ids.numel() * 2
    assert patch_blocks(model) == {}, "patched twice"
    for part in ("gate", "experts", "shared_experts"):  # trained alone, behind an embedding that is not
        model.requires_grad_(False).model.layers[2].mlp.get_submodule(part).requires_grad_()
        with pytest.raises(UnsupportedError, match="gradients through the layer"):
            model(ids)
    assert unpatch_blocks(model) == 2
    assert torch.equal(logits(model, ids), wanted)


@torch.no_grad()
def test_router_logits_are_recorded_as_before() -> None:
    model, ids = tiny_model(), prompt()
    if not hasattr(model(ids), "router_logits"):
        pytest.skip(f"DeepSeek-V3 of transformers {transformers.__version__} does not record router logits")
    wanted = model(ids, output_router_logits=True).router_logits
    with patched_blocks(model):
        got = model(ids, output_router_logits=True).router_logits
    assert len(got) == len(wanted) == 2
    assert all(torch.allclose(mine, its, atol=1e-4) for mine, its in zip(got, wanted, strict=True))


@torch.no_grad()
def test_who_listens_to_a_gate_hears_it_as_before() -> None:
    model, ids = tiny_model(), prompt()
    heard: list[Tensor] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda gate, args, output: heard.append(output[0]))
    model(ids)
    with patched_blocks(model):
        heard.clear()
        model(ids)
        (patched,) = heard
    heard.clear()
    model(ids)
    assert torch.allclose(patched, heard[0], atol=1e-4)


def test_a_block_that_routes_in_another_way_is_left_alone() -> None:
    model, ids = tiny_model(), prompt()
    gate = model.model.layers[2].mlp.gate
    own = gate.forward
    gate.forward = lambda x: (lambda out: (out[0], out[1], (out[2] + 1) % 8))(own(x))
    wanted = logits(model, ids)
    with pytest.raises(UnsupportedError, match=r"layers\.2\.mlp.*computed by a MoELayer.*selects other experts for 48"):
        patch_blocks(model)
    assert torch.equal(logits(model, ids), wanted), "nothing was patched"
    gate.forward = lambda x: (lambda out: (out[0], out[1] * 1.01, out[2]))(own(x))
    with pytest.raises(UnsupportedError, match=r"its gate gives other weights"):
        patch_blocks(model)
    with pytest.raises(UnsupportedError, match=r"has no block of a gate, experts and nothing else"):
        patch_blocks(family("qwen2_moe"))  # its shared expert has a gate


OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "glm4_moe", "minimax", "minimax_m2", "granitemoe", "ernie4_5_moe", "olmoe"]
)
def test_blocks_of_other_families_are_patched_whole(name: str) -> None:
    model, ids = family(name), prompt()
    if name in ("granitemoe", "ernie4_5_moe") and OLDER:
        with pytest.raises(UnsupportedError, match="its gate"):
            patch_blocks(model)  # gates of older releases return something else
        return
    for buffer in (b for path, b in model.named_buffers() if path.endswith("e_score_correction_bias")):
        buffer.normal_(0.0, 0.3)
    wanted, expected = logits(model, ids), generate(model, ids)
    layers = patch_blocks(model)
    assert layers and generate(model, ids) == expected
    assert relative(logits(model, ids), wanted) < 1e-5
    assert all(int(layer.expert_load.sum()) for layer in layers.values())


@pytest.mark.slow
def test_patched_blocks_compile_into_one_graph() -> None:
    model, ids = tiny_model(), prompt()
    with patched_blocks(model):
        wanted = logits(model, ids)
        assert torch.equal(logits(torch.compile(model, fullgraph=True, backend="eager"), ids), wanted)


@torch.no_grad()
@pytest.mark.parametrize("experts", ["torch_cpu", pytest.param("cpu_native", marks=NEEDS_COMPILER)])
def test_a_copy_of_a_patched_model_computes_with_its_own_weights(experts: str) -> None:
    # torch_cpu reads views of the weights, cpu_native a copy in its own layout: neither may be the first model's.
    model, ids = tiny_model(dtype=torch.bfloat16), prompt()
    patch_blocks(model, experts=experts)
    wanted = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        block, x = twin.model.layers[1].mlp, torch.ones((1, 2, 128), dtype=torch.bfloat16)
        assert torch.equal(logits(twin, ids), wanted)
        for parameter in block.parameters():
            parameter.zero_()
        assert not block(x).any() and model.model.layers[1].mlp(x).any()
        assert unpatch_blocks(twin) == 2 and not block(x).any()
    assert torch.equal(logits(model, ids), wanted)


@torch.no_grad()
@pytest.mark.parametrize("change", ["written", "replaced"])
@pytest.mark.parametrize("experts", ["torch_cpu", "minimax_m2", pytest.param("cpu_native", marks=NEEDS_COMPILER)])
def test_a_patched_block_computes_with_the_weights_of_now(experts: str, change: str) -> None:
    native, own_bias = experts == "cpu_native", experts == "minimax_m2"  # its correction bias is a buffer of the block
    model = family(experts) if own_bias else tiny_model(dtype=torch.bfloat16 if native else torch.float32)
    (path, layer), *_ = patch_blocks(model, experts="torch_cpu" if own_bias else experts).items()
    block, x = model.get_submodule(path), torch.randn(1, 9, model.config.hidden_size)
    x, close = x.to(layer.dtype), 0.02 if experts == "cpu_native" else 1e-5
    for count, (path, held) in enumerate([*block.named_parameters(), *block.named_buffers()]):
        before, values = block(x), held.detach() * -0.9 if held.any() else torch.randn_like(held)
        owner, _, name = path.rpartition(".")
        if change == "written":
            held.copy_(values)
        else:
            values = nn.Parameter(values) if isinstance(held, nn.Parameter) else values
            setattr(block.get_submodule(owner), name, values)
        assert relative(block(x), type(block).forward(block, x)) < close < relative(block(x), before), path
        assert int(layer.expert_load.sum()) == 2 * 9 * 3 * (count + 1), "the same layer, loaded again"


def test_a_model_that_is_cast_after_patching_states_what_to_do() -> None:
    model, ids = tiny_model(), prompt()
    patch_blocks(model)
    with pytest.raises(UnsupportedError, match=r"patched for torch.float32 and gets torch.bfloat16\n.*torch.autocast"):
        model.model.layers[1].mlp(torch.ones((1, 2, 128), dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"layers.1.mlp was patched with weights of fp32 on cpu and has bf16"):
        logits(model, ids)
    unpatch_blocks(model)
    patch_blocks(model)
    assert logits(model, ids).dtype is torch.bfloat16


@torch.no_grad()
def peak_of_patching(called_before: bool) -> tuple[float, int]:
    """The peak while two layers of 50 MB are patched, in bytes of their experts, and how often these are packed."""
    register()
    patch_blocks(tiny_model(dtype=torch.bfloat16), experts="cpu_native")  # the libraries are loaded
    model = tiny_model(dtype=torch.bfloat16, hidden_size=512, moe_intermediate_size=512, n_routed_experts=32)
    model.set_experts_implementation("moe_mk")
    held = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    if called_before:
        model(prompt())
    peak, _ = peak_above(lambda: patch_blocks(model, experts="cpu_native"))
    packed = [kept for kept in gc.get_objects() if type(kept) is PackedExpertWeights and kept.num_slots == 32]
    return peak / held, len(packed)


@NEEDS_PEAKS
@pytest.mark.slow
@pytest.mark.parametrize("called_before", [False, True])
@NEEDS_COMPILER
def test_the_peak_of_patching_is_one_copy_of_the_experts(called_before: bool) -> None:
    peak, packed = alone(peak_of_patching, called_before)
    assert packed == 2, "once for each layer"
    assert peak < 1.75, "and one more layer while it is compared"
