"""A layer loaded tensor by tensor: in any order, in every format, on every rank, strictly, without a second copy."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from moe_mk import MoELayer
from moe_mk.errors import ConfigError, StoreError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.like import tensors_of
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.quant import MXFP4, NVFP4
from moe_mk.weights import (
    CONVENTIONS,
    LayerLoader,
    LayerSpec,
    LayerWeights,
    MappingSource,
    SafetensorsSource,
    inspect_checkpoint,
    load_layer,
)
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.layer_spec import expected_tensors
from tests.support.layers import config, layer, tensors
from tests.weights.one_layer import PREFIX, StateDict

Taken = list[LayerWeights]


def loader_of(
    spec: LayerSpec, prefix: str = PREFIX, owned: tuple[int, ...] = (0, 1, 2, 3), tp: tuple[int, int] = (0, 1)
):
    taken: Taken = []
    return LayerLoader("layer 'moe'", spec, taken.append, owned=owned, tp=tp, layer=3, prefix=prefix), taken


def bits(weights: LayerWeights) -> list[Tensor]:
    slots = [*weights.experts.slots, *([weights.shared] if weights.shared is not None else [])]
    found = [weights.gate_EH, weights.bias_E, weights.logit_bias_E]
    for slot in slots:
        for q in (slot.gate_IH, slot.up_IH, slot.down_HI):
            assert q is not None
            found += [q.values, q.scales, q.global_scale]
        found += slot.biases.tensors if slot.biases else ()
    return [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in found if tensor is not None]


def same(one: LayerWeights, other: LayerWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def fed(loader: LayerLoader, state: StateDict, seed: int = 0) -> LayerLoader:
    """Every tensor, in an order that no checkpoint has, from a generator."""
    names = sorted(state)
    random.Random(seed).shuffle(names)
    for name, tensor in ((name, state[name].clone()) for name in names):
        loader.feed(name, tensor)
        tensor.reshape(-1).view(torch.uint8).zero_()  # the caller's buffer, which the next tensor overwrites
    return loader


@pytest.mark.parametrize(("owned", "tp"), [((0, 1, 2, 3), (0, 1)), ((3, 1), (1, 2))], ids=["whole", "share"])
@pytest.mark.parametrize("convention", ["official", "fused", "stacked", "mixtral", "converted"])
def test_any_order_gives_the_bits_of_the_file_under_every_convention(
    convention: str, owned: tuple[int, ...], tp: tuple[int, int], tiny: Shape, renamed: Callable[[str], StateDict]
) -> None:
    state, share = renamed(convention), {"owned": owned, "tp_rank": tp[0], "tp_size": tp[1]}
    for order in ("gate_up", "up_gate"):
        spec, prefix = replace(tiny.layer_spec(), gate_up_order=order), find_prefix(MappingSource(state), 3)
        loader, taken = loader_of(spec, prefix, owned, tp)
        if order == "up_gate" and convention != "fused":
            with pytest.raises(ConfigError, match="names distinguish them"):
                fed(loader, state)
            continue
        wanted = load_layer(MappingSource(state), 3, spec, **share)
        fed(loader, state).finish()
        official = load_layer(MappingSource(renamed("official")), 3, tiny.layer_spec(), **share)
        assert same(taken[0], wanted) and same(wanted, official) == (order == "gate_up")
        assert wanted.facts.convention == convention
        assert taken[0].facts.owned == owned and (taken[0].facts.tp_rank, taken[0].facts.tp_size) == tp


@pytest.mark.parametrize(
    "quant", ["bf16", "fp8_channel", "fp8_tensor", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4"]
)
def test_any_order_gives_the_bits_of_the_file_in_every_format(quant: str, tmp_path: Path) -> None:
    shape = Shape(4, 128, 256, layers=(3,), top_k=2, num_groups=2, top_k_groups=1, quant=quant)
    write_checkpoint(tmp_path, shape, threads=1)
    source, spec = SafetensorsSource(tmp_path), shape.layer_spec()
    wanted = load_layer(source, 3, spec, owned=(2, 0), tp_rank=1, tp_size=2)
    loader, taken = loader_of(spec, owned=(2, 0), tp=(1, 2))
    fed(loader, {name: source.open(name) for name in source.names()}).finish()
    assert same(taken[0], wanted)


def expect_bits_of_file(state: StateDict, spec: LayerSpec, tp: tuple[int, int]) -> None:
    wanted = load_layer(MappingSource(state), 0, spec, owned=(1, 2), tp_rank=tp[0], tp_size=tp[1], prefix="mlp.")
    loader, taken = loader_of(spec, "mlp.", (1, 2), tp)
    fed(loader, state).finish()
    assert same(taken[0], wanted)


@pytest.mark.parametrize("tp", [(0, 1), (1, 2)], ids=["whole", "share"])
def test_interleaved_experts_with_biases(tp: tuple[int, int]) -> None:
    spec = LayerSpec(4, 64, 64, MXFP4, has_expert_bias=True, has_logit_bias=True)
    draw = torch.Generator().manual_seed(3)
    state = {
        f"mlp.{name}": torch.randint(1, 99, each.shape, generator=draw).to(each.dtypes[0])
        for name, each in expected_tensors(spec, CONVENTIONS["gpt_oss"]).items()
    }
    expect_bits_of_file(state, spec, tp)


def test_shares_of_experts_whose_factors_are_divided_by() -> None:
    spec = LayerSpec(4, 64, 64, NVFP4, 1, 64)
    state = {f"mlp.{name}": each for name, each in tensors_of(spec, CONVENTIONS["packed"], seed=1).items()}
    expect_bits_of_file(state, spec, (1, 2))


def test_a_table_of_experts_by_token_id(tmp_path: Path) -> None:
    shape = Shape(4, 64, 64, layers=(3,), top_k=2, num_groups=1, top_k_groups=1, hash_vocabulary=9)
    write_checkpoint(tmp_path, shape, threads=1)
    source, spec = SafetensorsSource(tmp_path), shape.layer_spec()
    loader, taken = loader_of(spec, owned=(3,))
    fed(loader, {name: source.open(name) for name in source.names()}).finish()
    wanted = load_layer(source, 3, spec, owned=(3,))
    assert taken[0].table_XK is not None and wanted.table_XK is not None
    assert torch.equal(taken[0].table_XK, wanted.table_XK) and same(taken[0], wanted)


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_every_rank_of_a_layer_keeps_its_share(sizes: dict[str, int]) -> None:
    given = tensors(4, shared=1, bias=True)
    for groups in virtual_groups(**sizes):
        wanted = layer(4, 2, groups, num_shared_experts=1, has_correction_bias=True)
        moe = MoELayer(config(4, 2, num_shared_experts=1, has_correction_bias=True), dtype=torch.float32, groups=groups)
        fed(moe.loader(), given).finish()
        assert same(moe.weights, wanted.weights)
        assert moe.weights.facts.owned == wanted.weights.facts.owned


def test_shards_of_experts_without_names(tiny: Shape, tiny_state: StateDict) -> None:
    wanted = load_layer(MappingSource(dict(tiny_state)), 3, tiny.layer_spec(), owned=(2,), tp_rank=1, tp_size=2)
    spec, shards = tiny.layer_spec(), {"w1": "gate", "w2": "down", "w3": "up"}
    loader, taken = loader_of(spec, owned=(2,), tp=(1, 2))
    for expert in range(4):
        for shard, projection in shards.items():
            name = f"{PREFIX}experts.{expert}.{projection}_proj.weight"
            for kind, tensor in (("scale", tiny_state.pop(f"{name}_scale_inv")), ("weight", tiny_state.pop(name))):
                kept = loader.feed_shard(tensor, expert_id=expert, shard_id=shard, kind=kind)
                assert kept == (expert == 2), "experts of other ranks are accepted and dropped"
    fed(loader, tiny_state).finish()
    assert same(taken[0], wanted)
    loader, _ = loader_of(spec)
    for wrong in ({"shard_id": "w4"}, {"kind": "scales"}, {"expert_id": 4}):
        with pytest.raises(ConfigError, match="w4|did you mean 'scale'|expert_id=4 is out of range"):
            loader.feed_shard(torch.zeros(1), **({"expert_id": 0, "shard_id": "w1"} | wrong))
    assert loader.feed_shard(torch.zeros(1), expert_id=3, shard_id="w1", kind="order") is False
    with pytest.raises(WeightError, match=r"(?s)unexpected: order of expert 3, w1"):
        fed(loader, tiny_state).finish()


def test_all_missing_and_all_unexpected_names_are_one_error_and_may_still_be_fed(
    tiny: Shape, tiny_state: StateDict
) -> None:
    gone = ("experts.1.up_proj.weight_scale_inv", "shared_experts.down_proj.weight", "gate.weight")
    late = {PREFIX + name: tiny_state.pop(PREFIX + name) for name in gone}
    for projection in ("gate", "up", "down"):
        for ending in ("weight", "weight_scale_inv"):
            name = f"{PREFIX}experts.2.{projection}_proj.{ending}"
            late[name] = tiny_state.pop(name)
    loader, taken = loader_of(tiny.layer_spec())
    fed(loader, tiny_state)
    assert loader.wants(PREFIX + gone[0]) and not loader.wants(PREFIX + "experts.0.up_proj.weight")
    with pytest.raises(WeightError) as caught:
        loader.finish()
    for text in (
        "layer 'moe' cannot be loaded",
        "1 of 4 experts are missing: 2",
        f"expert 1 lacks {gone[0]}",
        *gone[1:],
    ):
        assert text in str(caught.value)
    loader._use = Mock(side_effect=[StoreError("the disk is full"), None])
    with pytest.raises(StoreError):
        fed(loader, late).finish()
    loader.finish()  # the disk has room again
    assert loader._use.call_count == 2
    loader, taken = loader_of(tiny.layer_spec())
    fed(
        loader,
        tiny_state | late | {f"{PREFIX}experts.4.up_proj.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)},
    )
    complaint = r"(?s)2 tensors are unexpected: experts\.4\.up_proj\.weight, lm_head.weight"
    with pytest.raises(WeightError, match=complaint) as caught:
        loader.finish()
    assert "missing" not in str(caught.value) and not taken


def test_a_loader_without_the_prefix_of_the_names_reports_both(tiny: Shape, tiny_state: StateDict) -> None:
    loader, _ = loader_of(tiny.layer_spec(), prefix="")
    with pytest.raises(WeightError, match=r"has prefix='', names have 'model\.layers\.3\.mlp\.'"):
        fed(loader, tiny_state).finish()


@pytest.mark.parametrize("second", ["fused", "stacked"])
def test_a_projection_is_fed_once(second: str, tiny: Shape, renamed: Callable[[str], StateDict]) -> None:
    first, other = renamed("official"), renamed(second)
    loader = fed(loader_of(tiny.layer_spec())[0], first)
    names = sorted({*other} - {*first})
    assert names
    for name in names:
        with pytest.raises(WeightError, match=f"{name} was fed before, as {PREFIX}"):
            loader.feed(name, other[name])


def test_a_wrong_tensor_is_refused_by_name_when_it_is_fed_and_changes_nothing(
    tiny: Shape, tiny_state: StateDict
) -> None:
    loader, taken = loader_of(tiny.layer_spec(), owned=(0, 1))
    name = f"{PREFIX}experts.1.up_proj.weight"
    with pytest.raises(WeightError, match=rf"{name} is \[31, 64\], expected \[32, 64\]"):
        loader.feed(name, tiny_state[name][1:])
    with pytest.raises(WeightError, match=rf"{name} is F32, expected float8_e4m3fn"):
        loader.feed(name, tiny_state[name].float())
    with pytest.raises(WeightError, match=rf"{name} is on the meta device"):
        loader.feed(name, tiny_state[name].to("meta"))
    other = name.replace(".1.", ".3.")
    with pytest.raises(WeightError, match=rf"{other} is \[1\], expected \[32, 64\]"):
        loader.feed(other, torch.zeros(1))  # of another rank: a wrong checkpoint all the same
    assert loader.wants(name) and not loader.wants(other)
    fed(loader, tiny_state)
    for again in (name, other):
        with pytest.raises(WeightError, match=f"{again} was fed before"):
            loader.feed(again, tiny_state[again])
    loader.finish()
    assert same(taken[0], load_layer(MappingSource(tiny_state), 3, tiny.layer_spec(), owned=(0, 1)))
    for call in (loader.finish, lambda: loader.feed(name, tiny_state[name])):
        with pytest.raises(WeightError, match="this loader is finished"):
            call()


def test_a_wrong_tensor_of_packed_experts_does_not_decide_how_they_are_packed(tmp_path: Path) -> None:
    shape = Shape(2, 128, 128, layers=(3,), top_k=2, num_groups=1, top_k_groups=1, quant="gptq")
    write_checkpoint(tmp_path, shape, threads=1)
    source, spec = SafetensorsSource(tmp_path), inspect_checkpoint(tmp_path).layers[0].layer_spec()
    loader, taken = loader_of(spec, owned=(0, 1))
    name = f"{PREFIX}experts.1.up_proj.qweight"
    with pytest.raises(WeightError, match=rf"{name} is \[15, 128\], expected"):
        loader.feed(name, source.open(name)[1:])
    fed(loader, {name: source.open(name).clone() for name in source.names()}).finish()
    assert same(taken[0], load_layer(source, 3, spec, owned=(0, 1)))


def test_nan_codes_and_broken_scales_are_found_at_the_end(tiny: Shape, tiny_state: StateDict) -> None:
    tiny_state[f"{PREFIX}experts.1.up_proj.weight"].view(torch.uint8)[0, 0] = 0x7F
    tiny_state[f"{PREFIX}experts.0.down_proj.weight_scale_inv"][0, 0] = -1.0
    loader, taken = loader_of(tiny.layer_spec())
    complaint = r"(?s)is damaged:.*experts.1.up_proj.weight \(1\).*experts.0.down_proj.weight_scale_inv"
    with pytest.raises(WeightError, match=complaint):
        fed(loader, tiny_state).finish()
    assert not taken


def test_a_layer_is_changed_by_finish_alone() -> None:
    moe = layer(8, 2, experts="torch_cpu", num_shared_experts=1, has_correction_bias=True)
    x_TH = torch.randn((5, 16), generator=torch.Generator().manual_seed(0))
    before_TH, state = moe(x_TH), {f"moe.{n}": t * 2.0 for n, t in tensors(8, shared=1, bias=True).items()}
    loader = moe.loader(prefix="moe.")
    for name in list(state)[:-1]:
        loader.feed(name, state[name])
    assert torch.equal(moe(x_TH), before_TH)
    with pytest.raises(WeightError, match="1 tensors? are missing|half filled"):
        loader.finish()
    assert torch.equal(moe(x_TH), before_TH), "an abandoned loader leaves the layer as it was"
    loader.feed(list(state)[-1], state[list(state)[-1]])
    loader.finish()
    wanted_TH = moe(x_TH)
    assert not torch.equal(wanted_TH, before_TH)
    with pytest.raises(WeightError, match="nothing can be read again"):
        moe.live.read_expert(3)
    moe.read_from(MappingSource(state), 0)
    read, held = moe.live.read_expert(3), moe.live.export_slot(3)
    assert all(map(torch.equal, read.tensors, held.tensors)), "of the names that it was fed"
    assert torch.equal(moe.load_weights(state, prefix="moe.")(x_TH), wanted_TH)


class LiveBytes(TorchFunctionMode):
    """The bytes of all storages that functions of torch made and that are still alive, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return out


@pytest.mark.parametrize("tp_size", [1, 2])
def test_loading_needs_at_most_one_expert_more_than_what_stays(tp_size: int, tmp_path: Path) -> None:
    shape = Shape(16, 256, 256, layers=(3,), num_shared_experts=0)
    write_checkpoint(tmp_path, shape, threads=1)
    source, expert_bytes = SafetensorsSource(tmp_path), 3 * 256 * 256
    state = {name: source.open(name) for name in source.names()}
    taken: Taken = []
    with LiveBytes() as live:
        loader = LayerLoader(
            "layer", shape.layer_spec(), taken.append, owned=range(4, 8), tp=(0, tp_size), layer=3, prefix=PREFIX
        )
        for name in sorted(state, key=lambda name: name[::-1]):  # all scales, then all weights
            loader.feed(name, state[name].clone())
        loader.finish()
        del loader
        stays = live.now
    assert stays - taken[0].num_bytes in range(1024), "what stays are the weights of this rank"
    assert 4 * expert_bytes // tp_size <= stays and live.most <= stays + expert_bytes


@pytest.mark.parametrize("fused", [True, False])
def test_tensors_stored_transposed_are_refused_and_square_ones_named(fused: bool) -> None:
    down = "experts.down_proj" if fused else "experts.0.down_proj.weight"
    first = "experts.gate_up_proj" if fused else "experts.0.up_proj.weight"
    state = {name: tensor.T if "experts" in name else tensor for name, tensor in tensors(4).items()}
    if fused:  # down is square, 16 x 16
        state = {"gate.weight": state["gate.weight"], first: torch.zeros(4, 16, 32), down: torch.zeros(4, 16, 16)}
    made = MoELayer(config(4, 2, **({"moe_intermediate_size": 16} if fused else {})))
    expected = f"stored transposed, as \\(in, out\\): .*{first}"
    with pytest.raises(WeightError, match=expected) as refused:
        made.load_weights(state)
    assert (f"square ones do not show whether they are as well: {down}" in str(refused.value)) == fused
    with pytest.raises(WeightError, match=expected) as refused:
        made.loader().feed(first, state[first])
    assert (down in str(refused.value)) == fused
