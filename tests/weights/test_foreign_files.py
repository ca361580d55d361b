"""Every format in every layout and at odd sizes, from a writer that shares no code with the reader."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.vllm import kind_of
from moe_mk.layer.settings import config_of, layer_spec_of, stated
from moe_mk.quant.kinds import legal_tp_sizes
from moe_mk.weights import LayerLoader, LayerWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from tests.weights.foreign import FORMS, GGUF_FORMS, Draw, Written, layouts_of, write, write_gguf
from tests.weights.one_layer import wide


def read(folder: Path, owned: range | list[int], tp: tuple[int, int] = (0, 1)) -> LayerWeights:
    """Layer 0 as `from_checkpoint` reads it."""
    config = stated(config_of(folder, 0), folder, 0)
    return load_layer(open_source(folder), 0, layer_spec_of(config), owned=owned, tp_rank=tp[0], tp_size=tp[1])


def outputs(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, up, down = gate.double(), up.double(), down.double()
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    form = draw(st.sampled_from([*FORMS]))
    layout = draw(st.sampled_from(layouts_of(form)))
    gptq, fp8 = form.startswith("gptq"), form == "fp8_block"
    return Draw(
        form, layout, experts=draw(st.integers(2, 3)), hidden=draw(st.sampled_from((64, 128, 160))),
        # Widths that end within a block, multiples of what every format packs.
        inner=draw(st.sampled_from((64, 128, 320))),
        seed=draw(st.integers(0, 999)), zero_block=draw(st.booleans()), scalar=draw(st.integers(0, 2)),
        flat=draw(st.booleans()), scale_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        symmetric=draw(st.booleans()), g_idx=draw(st.booleans()), ordered=gptq and draw(st.booleans()),
        block=draw(st.sampled_from((32, 128))) if fp8 else 128,
        options={"checkpoint_format": "gptq_v2"} if gptq and draw(st.booleans()) else {},
    )  # fmt: skip


def expect_read(draw: Draw, root: Path) -> None:
    """The folder is described, and every way of reading it gives the weights that it holds."""
    written = write_gguf(draw, root) if draw.layout.startswith("gguf") else write(draw, root)
    facts, quant = inspect_checkpoint(root), stated(config_of(root, 0), root, 0).model.quant
    assert facts.sound, [*facts.problems, *facts.layers[0].problems]
    assert (facts.layers[0].kind, facts.layers[0].gptq_v2) == (quant.weights, quant.gptq_v2)
    x, owned = torch.randn(3, draw.hidden, generator=torch.Generator().manual_seed(1)).double(), [draw.experts - 1, 0]
    whole, parts = read(root, owned), None
    spec = layer_spec_of(stated(config_of(root, 0), root, 0))
    if 2 in legal_tp_sizes([draw.inner], spec.edges):
        parts = [read(root, owned, (rank, 2)).experts for rank in range(2)]
    fed: list[LayerWeights] = []
    source = open_source(root)
    loader = LayerLoader("a layer", spec, fed.append, owned=owned, prefix=whole.facts.prefix)
    for name in sorted(source.names(), key=lambda name: hash((draw.seed, name[::-1]))):
        loader.feed(name, source.open(name))
    loader.finish()
    for at, expert in enumerate(owned):
        got, want = wide(whole.experts.slots[at]), written.experts[expert]
        if not draw.ordered:  # else rows of gate and up follow the columns of down
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=4e-7, atol=1e-9)
        torch.testing.assert_close(outputs(x, *got), outputs(x, *want), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(wide(fed[0].experts.slots[at]), got, strict=True))
        if parts is not None:
            gate, up, down = zip(*(wide(part.slots[at]) for part in parts), strict=True)
            assert all(
                torch.equal(a, b)
                for a, b in zip((torch.cat(gate), torch.cat(up), torch.cat(down, 1)), got, strict=True)
            )


ONCE = [(form, layout) for form in FORMS for layout in layouts_of(form)]
ODD: dict[str, dict[str, Any]] = {
    "zero blocks": {"zero_block": True, "flat": True},
    "scalars of two axes": {"scalar": 2, "scale_dtype": torch.bfloat16},
    "widths within a block": {"inner": 320, "hidden": 160, "scalar": 1},
    "without g_idx": {"g_idx": False, "symmetric": False}, "ordered": {"ordered": True, "symmetric": False},
    "zero points as they are": {"symmetric": False, "options": {"checkpoint_format": "gptq_v2"}},
}  # fmt: skip


CASES = [(*each, odd) for each in ONCE for odd in [*ODD][: 6 if each[0].startswith("gptq") else 3]]


@pytest.mark.parametrize("form,layout,odd", CASES)
def test_every_format_is_read_in_every_layout(form: str, layout: str, odd: str, tmp_path: Path) -> None:
    expect_read(Draw(form, layout, **ODD[odd]), tmp_path)


BIASED = [
    *((form, "official") for form in ("gptq4", "awq", "ct4", "bf16", "fp8_block", "fp8_tensor", "nvfp4")),
    ("gptq8", "mixtral"), ("bf16", "stacked"),
]  # fmt: skip


@pytest.mark.parametrize("form,layout", BIASED)
def test_biases_follow_the_rows_of_their_matrices_over_ranks(form: str, layout: str, tmp_path: Path) -> None:
    """Also where columns of down are ordered by activation: rows of gate and up follow them, and so do biases."""
    gptq = form.startswith("gptq")
    draw = Draw(form, layout, ordered=gptq, symmetric=not gptq, biased=True, inner=320 if form == "bf16" else 256)
    written = write(draw, tmp_path)
    spec = replace(layer_spec_of(stated(config_of(tmp_path, 0), tmp_path, 0)), has_expert_bias=True)
    x = torch.randn(3, draw.hidden, generator=torch.Generator().manual_seed(1)).double()
    for size in (1, 2):
        got = torch.zeros_like(x)
        for rank in range(size):
            read = load_layer(open_source(tmp_path), 0, spec, owned=[2], tp_rank=rank, tp_size=size)
            (slot,) = read.experts.slots
            biases = slot.biases
            assert biases is not None and biases.gate_I is not None
            gate, up, down = (m.double() for m in wide(slot))
            h = torch.nn.functional.silu(x @ gate.T + biases.gate_I) * (x @ up.T + biases.up_I)
            got += h @ down.T + biases.down_H
        (gate, up, down), (b_gate, b_up, b_down) = written.experts[2], written.biases[2]
        h = torch.nn.functional.silu(x @ gate.T + b_gate) * (x @ up.T + b_up)
        torch.testing.assert_close(got, h @ down.T + b_down, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel", "auto_round:auto_gptq"])
def test_auto_round_states_by_its_packing_how_zero_points_are_stored(
    packing: str, symmetric: bool, tmp_path: Path
) -> None:
    """`auto_round` is what it writes of asymmetric weights; gptqmodel alone has g_idx."""
    options, g_idx = {"packing_format": packing}, packing.endswith("model")
    expect_read(Draw("gptq4", symmetric=symmetric, g_idx=g_idx, options=options), tmp_path)


@pytest.mark.parametrize("layout", ["gguf", "gguf_one_by_one"])
@pytest.mark.parametrize("form", GGUF_FORMS)
def test_blocks_of_ggml_are_read_as_the_gguf_package_writes_them(form: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the files")
    expect_read(Draw(form, layout, hidden=160, inner=320, zero_block=True), tmp_path)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(draws())
def test_what_is_read_is_what_was_written(draw: Draw) -> None:
    with tempfile.TemporaryDirectory() as root:
        expect_read(draw, Path(root))


def dense(written: Written, x: Tensor, gate_EH: Tensor) -> Tensor:
    """The layer in f64: the softmax of two experts a token, renormalised."""
    top, y = torch.softmax(x @ gate_EH.double().T, -1).topk(2), torch.zeros_like(x)
    for e, matrices in enumerate(written.experts):
        t, k = (top.indices == e).nonzero(as_tuple=True)
        weights = (top.values / top.values.sum(-1, keepdim=True))[t, k]
        y.index_add_(0, t, weights[:, None] * outputs(x[t], *matrices))
    return y


VALUES = ("weight", "qweight", "weight_packed")
SHARD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.mark.parametrize("order", ["first", "last", "named"])
@pytest.mark.parametrize("form", ["gptq4", "gptq8", "awq", "ct4", "fp8_block", "nvfp4", "bf16"])
def test_shards_without_names_are_placed_by_their_shapes(form: str, order: str, tmp_path: Path) -> None:
    """As engines feed them. Words of a square matrix have one shape in AWQ and in compressed-tensors.

    order: when tensors next to words are fed, or that they are fed with their names.
    """
    written = write(Draw(form, experts=2, symmetric=False, g_idx=order == "last"), tmp_path)
    fed: list[LayerWeights] = []
    spec = layer_spec_of(stated(config_of(tmp_path, 0), tmp_path, 0))
    loader = LayerLoader("a layer", spec, fed.append, owned=[1])
    for name in sorted(written.tensors, key=lambda name: name.endswith(VALUES) == (order == "first")):
        given = written.tensors[name].clone()
        if name == "gate.weight" or (order == "named" and not name.endswith(VALUES)):
            kept = loader.feed(name, given)
        else:
            _, of, projection, end = name.split(".")
            kind, shard_id = kind_of(f"experts.w13_{end}"), SHARD[projection]
            kept = loader.feed_shard(given, expert_id=int(of), shard_id=shard_id, kind=kind)
        assert kept == (name == "gate.weight" or (".1." in name and "input" not in name)), name
        given.zero_()  # the caller's buffer
    loader.finish()
    for one, other in zip(wide(fed[0].experts.slots[0]), written.experts[1], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("form,layout", ONCE)
def test_layers_compute_what_a_file_holds_at_odd_widths(form: str, layout: str, tmp_path: Path) -> None:
    """Zero blocks under scales of 0, and widths that end within a block, in every backend of a CPU that serves them."""
    draw, served = Draw(form, layout, experts=3, inner=320, hidden=160, zero_block=True, symmetric=False), 0
    written, x = write(draw, tmp_path), torch.randn(33, 160, generator=torch.Generator().manual_seed(3)).bfloat16()
    for experts in ("reference", "torch_cpu", "cpu_native"):
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            try:
                layer = MoELayer.from_checkpoint(tmp_path, 0, experts=experts, dtype=dtype, activations="plain")
            except UnsupportedError:
                continue
            want, served = dense(written, x.double(), layer.weights.gate_EH), served + 1
            error = float((layer(x.to(dtype)).double() - want).norm() / want.norm())
            assert error < limit, (experts, dtype, error)
    assert served >= 4
