"""By what graphs and exported programs find the layer that they call, in the same process and in another one."""

import copy
import gc
import io
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_mk import ConfigError, MoELayer, UnsupportedError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.integrations.hf.packed import PackedExperts
from moe_mk.integrations.packed_linear import PackedLinear
from moe_mk.layer import bind
from moe_mk.layer.custom_op import Identity, moe_layer
from moe_mk.quant.plain import BF16
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import HIDDEN, config, tensors

X_TH = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0))


def made(name: str = "a", weights: float = 1.0, **settings: Any) -> MoELayer:
    layer = MoELayer(config(8, 2, **({"experts": "torch_cpu"} | settings)), dtype=torch.float32, name=name)
    return layer.load_weights({name: weights * tensor for name, tensor in tensors(8).items()})


VARIANTS: dict[str, dict[str, Any]] = {
    "the name": {"name": "b"},
    "the weights": {"weights": 1.25},
    "the settings": {"routed_scaling_factor": 2.0},
}


def of_other_process(entry: Tensor) -> Tensor:
    """An entry as a program of another process holds it."""
    other = entry.clone()
    other[0] += 1
    return other


@pytest.mark.slow
def test_a_program_calls_the_layer_that_it_was_exported_from_or_none() -> None:
    """It answers as the exported layer did, or refuses with what differs in each layer that is bound."""
    first, others = made(), [made(**given) for given in VARIANTS.values()]
    wanted_TH, entry = first(X_TH), of_other_process(first._entry)
    for is_bound in (False, True):
        bind(*others) if is_bound else None
        with pytest.raises(UnsupportedError, match=r"(?s)'a' \(.*call moe_mk.layer.bind\(layer\)") as refused:
            moe_layer(X_TH, torch.zeros(8, dtype=torch.int64), entry)
        assert all((f"differs in {word}" in str(refused.value)) is is_bound for word in VARIANTS)
    others += [made(), made(experts="reference")]
    bind(*others)
    with pytest.raises(UnsupportedError, match="2 bound objects fit it; give each layer a name"):
        moe_layer(X_TH, torch.zeros(8, dtype=torch.int64), entry)
    others.pop()
    gc.collect()
    for more in ([], [made()]):  # a program keeps the layer of its first call
        bind(*more)
        assert torch.equal(moe_layer(X_TH, torch.zeros(8, dtype=torch.int64), entry), wanted_TH)


@torch.no_grad()
def test_an_exported_program_is_bound_by_hand_and_one_without_weights_takes_any() -> None:
    empty, loaded, stored = MoELayer(config(8, 2, experts="torch_cpu"), dtype=torch.float32, name="a"), made(), []
    for layer in (empty, loaded):
        stored.append(io.BytesIO())
        torch.export.save(torch.export.export(layer, (X_TH,), strict=False), stored[-1])
        stored[-1].seek(0)
    of_empty, of_loaded = (torch.export.load(each).module() for each in stored)
    assert torch.equal(of_loaded(X_TH), loaded(X_TH)), "in the process that exported it"
    del empty, loaded, layer
    gc.collect()
    other = made(weights=1.5)
    bind(nn.Sequential(nn.Identity(), other))
    assert torch.equal(of_empty(X_TH), other(X_TH))
    with pytest.raises(UnsupportedError, match="differs in the weights"):
        of_loaded(X_TH)
    right = made()
    bind(right)
    assert torch.equal(of_loaded(X_TH), right(X_TH))


def test_entries_of_processes_and_copies_differ() -> None:
    """No number is given twice, and a copy of what holds one is another object for graphs."""
    one, two = made(), made()
    assert not torch.equal(one._entry[:1], two._entry[:1]) and torch.equal(one._entry[1:], two._entry[1:])
    module = PackedExperts(one)
    entries = {int(each._entry[0]) for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)))}
    entries |= {int(copied(one)._entry[0]) for copied in (copy.copy, copy.deepcopy)}
    assert len(entries) == 5 and int(one._entry[0]) not in entries
    twin = copy.deepcopy(module)
    choice = X_TH, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    twin.layer.load_weights(made(weights=2.0).source[0]._tensors)  # type: ignore[index,attr-defined]
    assert torch.equal(torch.compile(twin, backend="eager")(*choice), twin(*choice))
    assert not torch.equal(twin(*choice), module(*choice))


@NEEDS_COMPILER
def test_experts_and_linears_of_engines_are_bound_and_not_copied() -> None:
    w = torch.randn((64, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    x_TH = w[:3].clone()
    choice = x_TH, torch.ones(3, 2), torch.tensor([[0, 1]] * 3)
    linear, w13 = PackedLinear(BF16.quantize(w), "a"), torch.stack([w] * 4)
    experts = EngineExperts("a", EngineWeights(w13, w13[:, :, :32].contiguous()), top_k=2)
    wanted = linear.run(x_TH), experts(*choice)
    for each in (linear, experts):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="can be neither copied nor pickled"):
                call(each)
    for operator, owner, args in (("packed_linear", linear, [x_TH, 64]), ("engine_experts", experts, [*choice])):
        entry = of_other_process(owner.entry if owner is linear else owner._entry)  # type: ignore[union-attr]
        args.insert(1 if owner is linear else 3, entry)
        with pytest.raises(UnsupportedError, match=f"moe_mk::{operator}"):
            getattr(torch.ops.moe_mk, operator)(*args)
        bind(owner)
        assert torch.equal(getattr(torch.ops.moe_mk, operator)(*args), wanted[owner is experts])


def test_an_identity_is_of_what_results_depend_on_and_of_nothing_else() -> None:
    first, narrow = made(), MoELayer(config(8, 2), name="a")
    others: dict[str, list[MoELayer]] = {word: [made(**given)] for word, given in VARIANTS.items()}
    others["the settings"] += [made(activation="gelu"), narrow]
    others[""] = [made(experts="reference", max_num_tokens=3), MoELayer(first.config, dtype=torch.float32, name="a")]
    asked, *held = (Identity.read(each._entry.tolist()) for each in (first, *chain(*others.values())))
    wanted = [word for word, layers in others.items() for _ in layers]
    assert [asked.differs(each) for each in held] == [each.differs(asked) for each in held] == wanted


def test_there_must_be_something_to_bind() -> None:
    for owner in (nn.Linear(2, 2), "a layer", None):
        with pytest.raises(ConfigError, match="holds no layer that a program could call"):
            bind(owner)


@pytest.mark.slow
def test_the_program_of_another_process_is_bound_by_name(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from tests.support.layers import config, tensors; from moe_mk import MoELayer\n"
        "from moe_mk.layer import bind\n"
        "torch.set_grad_enabled(False)\n"
        "folder, order, names = sys.argv[1:]\n"
        "layers = {}\n"
        "for name in names:\n"
        "    layers[name] = MoELayer(config(8, 2, experts='torch_cpu'), dtype=torch.float32, name=name)\n"
        "    layers[name].load_weights({n: t * ('abc'.index(name) + 1) for n, t in tensors(8).items()})\n"
        "x_TH = torch.ones(3, 16)\n"
        "if order == 'write':\n"
        "    torch.export.save(torch.export.export(layers['b'], (x_TH,), strict=False), folder)\n"
        "else:\n"
        "    bind(*layers.values())\n"
        "    assert torch.equal(torch.export.load(folder).module()(x_TH), layers['b'](x_TH))\n"
    )
    for order, names in (("write", "abc"), ("read", "cab")):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.pt2"), order, names], check=True)
