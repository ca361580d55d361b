"""A host may do what it likes around a layer: no environment, other defaults, settings of torch, copies, processes."""

import ast
import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, ExpertMap, MoEConfig, MoELayer, UnsupportedError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer.settings import layer_spec_of
from moe_mk.weights.stamp import storages_of
from tests.layer.any_tensors import tensors_of
from tests.layer.native import NEEDS_COMPILER
from tests.support.ambient import AMBIENT
from tests.support.layers import HIDDEN, INNER, config, layer, tensors
from tests.support.tiers import quick_where

ROOT = Path(__file__).resolve().parents[2]

BARE = """
import os, sys
sys.path.insert(0, {root!r})
assert set(os.environ) <= {{"LC_CTYPE"}}, "Python itself may set this one"
import torch
import torch.distributed as dist

reads = []

class Trap(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame and not any(part in frame.f_code.co_filename for part in ("moe_mk", "site-packages")):
            frame = frame.f_back  # the standard library reads for somebody
        if frame and "moe_mk" in frame.f_code.co_filename and "site-packages" not in frame.f_code.co_filename:
            reads.append((key, frame.f_code.co_filename))
        return super().__getitem__(key)

os.environ.__class__ = Trap
os.environ.get("nobody")
assert not reads
import moe_mk
from tests.support.layers import layer
made = layer(8, 2, experts="torch_cpu", num_shared_experts=1)
y = made(torch.ones(3, 16))
assert y.isfinite().all() and not dist.is_initialized()
print(sorted({{key for key, _ in reads}}))
"""


@pytest.mark.slow
def test_a_layer_runs_without_an_environment_and_without_a_process_group(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE.format(root=str(ROOT))], env={}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # The standard library looks once for a compiler and for the folders of the user. No variable is a setting.
    assert set(ast.literal_eval(done.stdout)) <= {"PATH", "HOME", "TMPDIR", "TEMP", "TMP"}, done.stdout


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn(6, HIDDEN, dtype=torch.float32)


def made(**settings: object) -> MoELayer:
    """Everything a layer can have: grouped routing with a bias, shared experts."""
    return layer(
        8, 2, num_shared_experts=1, has_correction_bias=True, scoring_func="sigmoid", num_expert_group=4, topk_group=2,
        experts="torch_cpu", **settings,
    )  # fmt: skip


@pytest.mark.parametrize("moved", [False, True])
def test_pickle_and_deepcopy_give_equal_layers_of_their_own(x_TH: Tensor, moved: bool) -> None:
    first = made()
    if moved:
        first.live.set_placement(ExpertMap.from_physical([5, 0, 7, 2, 1, 6, 3, 4], 1, 8))
    expected = first(x_TH)
    first.name = "layer 7"
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(twin(x_TH), expected)
        assert torch.equal(twin.expert_load, 2 * first.expert_load), "its counts went on from those of the first"
        assert twin.expert_map == first.expert_map and twin.routing.tokens == 2 * first.routing.tokens == 12
        twin.live.set_placement(ExpertMap.linear(8, 1))
        assert torch.equal(twin(x_TH), made()(x_TH)), "each expert is where its map has it"
        twin.live.set_placement(first.expert_map)
        assert twin.decision == first.decision and twin.name == "layer 7"
        assert storages_of(twin.weights).isdisjoint(storages_of(first.weights)), "gate and shared experts included"
        for slot in twin.weights.experts.slots:
            slot.up_IH.values.zero_()
        assert not torch.equal(twin(x_TH), expected)
    assert int(first.expert_load.sum()) == 12
    assert torch.equal(first(x_TH), expected), "the copies share nothing with the first"


def test_a_layer_without_weights_can_be_copied_too() -> None:
    empty = MoELayer(config(4, 2), dtype=torch.float32)
    empty.live.set_placement(ExpertMap.from_physical([2, 0, 3, 1], 1, 4))
    for twin in (copy.deepcopy(empty), pickle.loads(pickle.dumps(empty))):
        assert twin.decision == empty.decision and twin.expert_map == empty.expert_map


def test_a_pickle_holds_the_experts_of_the_layer_and_not_the_file_they_came_from(tmp_path: Path, x_TH: Tensor) -> None:
    from safetensors.torch import save_file

    mine = {f"model.layers.0.mlp.{n}": t for n, t in tensors(4).items()}
    others = {f"model.layers.1.mlp.{n}": t.repeat(1, 50) for n, t in tensors(4).items()}
    save_file({**mine, **others}, tmp_path / "model.safetensors")
    built = MoELayer(config(4, 2, experts="torch_cpu"), dtype=torch.float32).load_from_safetensors(tmp_path, 0)
    size = len(pickle.dumps(built))
    assert size < 4 * built.weights.num_bytes + 20_000 < (tmp_path / "model.safetensors").stat().st_size
    assert torch.equal(pickle.loads(pickle.dumps(built))(x_TH), built(x_TH))


def run_in_a_new_process(pickled: bytes, x_TH: Tensor, out: object) -> None:
    buffer = io.BytesIO()
    torch.save(pickle.loads(pickled)(x_TH), buffer)
    out.send_bytes(buffer.getvalue())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_spawned_process_computes_the_same(x_TH: Tensor) -> None:
    first, (here, there) = made(), multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=run_in_a_new_process, args=(pickle.dumps(first), x_TH, there)
    )
    process.start()
    assert here.poll(100), "no answer"
    got = torch.load(io.BytesIO(here.recv_bytes()), weights_only=True)
    process.join()
    torch.testing.assert_close(got, first(x_TH), atol=1e-6, rtol=0)  # threads may differ between the processes


def test_a_layer_with_groups_states_why_it_cannot_be_pickled() -> None:
    grouped = layer(8, 2, groups=virtual_groups(ep=2)[0])
    with pytest.raises(
        ConfigError, match=r"layer 'moe' holds process groups, which cannot be pickled; build it per process"
    ):
        pickle.dumps(grouped)


def test_a_layer_is_not_moved_away_from_its_backends() -> None:
    here = MoELayer(config(4, 2), dtype=torch.float32)
    assert here.to("cpu") is here
    with pytest.raises(UnsupportedError, match=r"cannot be moved from cpu to meta(.|\n)*build it with device='meta'"):
        here.to("meta")


QUICK = ("autocast_bf16", "dtype_fp16", "device_meta", "inference_mode")
BACKENDS = [
    pytest.param("torch_cpu", torch.float32),
    pytest.param("torch_cpu", torch.bfloat16),
    pytest.param("torch_cpu", torch.float16),
    pytest.param("reference", torch.float32),
    pytest.param("reference_monolithic", torch.float32),
    pytest.param("cpu_native", torch.bfloat16, marks=NEEDS_COMPILER),
]
"""Every second one for settings that are not QUICK."""


def load(experts: str, dtype: torch.dtype) -> MoELayer:
    quant = {"weights": {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]}
    settings = {"has_correction_bias": True, "num_shared_experts": 1, "quant": quant, "experts": experts}
    made = MoELayer(config(8, 2, **settings), dtype=dtype, device="cpu")
    return made.load_weights(given(dtype))


@cache
def given(dtype: torch.dtype) -> dict[str, Tensor]:
    return tensors(8, shared=1, bias=True, dtype=dtype)


@cache
def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn((12, HIDDEN), generator=torch.Generator().manual_seed(3)).to(dtype)


@cache
def stacks(dtype: torch.dtype) -> EngineWeights:
    named = given(dtype)
    w13 = [torch.cat([named[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(8)]
    down = [named[f"experts.{e}.down_proj.weight"] for e in range(8)]
    assert w13[0].shape == (2 * INNER, HIDDEN)
    return EngineWeights(torch.stack(w13), torch.stack(down))


def results(made: MoELayer, engine: EngineExperts | None, dtype: torch.dtype) -> list[Tensor]:
    """All that a layer and the experts of an engine compute of the same tokens, one call of each kind."""
    x_TH = tokens(dtype)
    routing = made.route(x_TH)
    found = [routing.ids_TK, routing.weights_TK, made(x_TH), made(x_TH[:1]), made(x_TH[None])[0]]
    if engine is not None:
        assert made.state.backends.shared is not None
        found += [engine(x_TH, routing.weights_TK, routing.ids_TK), made.state.backends.shared(x_TH)]
        found += [made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)]
    return found


@cache
def expected(experts: str, dtype: torch.dtype) -> tuple[MoELayer, EngineExperts | None, list[Tensor]]:
    made = load(experts, dtype)
    alone = "monolithic" not in experts
    engine = EngineExperts("e", stacks(dtype), top_k=2, settings={"experts": experts}) if alone else None
    return made, engine, results(made, engine, dtype)


@pytest.mark.parametrize(
    "experts,dtype,name",
    [
        pytest.param(*backend.values, name, marks=[*backend.marks, *[pytest.mark.slow] * (name not in QUICK)])
        for at, name in enumerate(AMBIENT)
        for place, backend in enumerate(BACKENDS)
        if name in QUICK or (at + place) % 2
    ],
)
def test_settings_of_torch_change_no_bit(experts: str, dtype: torch.dtype, name: str) -> None:
    made, engine, wanted = expected(experts, dtype)
    with torch.no_grad(), AMBIENT[name]():
        called = results(made, engine, dtype)
        loaded = load(experts, dtype)
        if engine is not None:
            engine = EngineExperts("e", stacks(dtype), top_k=2, settings={"experts": experts})
        both = called, results(loaded, engine, dtype)
    for found in both:
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype is want.dtype and torch.equal(got, want)
    assert torch.equal(loaded(tokens(dtype)), wanted[2]), "loaded under the setting, called without it"


# The projections are torch's products, whose f32 sums are split by the number of threads (docs/embedding.md).
@pytest.mark.parametrize("name", quick_where(lambda name: name in QUICK, [n for n in AMBIENT if n != "threads"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_around_experts_and_the_gate_of_shared_experts(dtype: torch.dtype, name: str) -> None:
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_shared_experts": 1}
    parts = {"latent_size": 48, "shared_gate": True, "quant": {"weights": "fp32"}}
    stated = {"model": {**model, **parts}, "router": {"top_k": 2}, "kernel": {"experts": "torch_cpu"}}

    def made() -> MoELayer:
        layer = MoELayer(MoEConfig.parse(stated, "a test"), dtype=dtype, device="cpu")
        return layer.load_weights(given_tensors)

    given_tensors = tensors_of(layer_spec_of(MoEConfig.parse(stated, "a test")), 1)
    x_TH = torch.randn((12, 64), generator=torch.Generator().manual_seed(3)).to(dtype)
    layer = made()
    wanted = layer(x_TH)
    with torch.no_grad(), AMBIENT[name]():
        assert torch.equal(layer(x_TH), wanted) and torch.equal(made()(x_TH), wanted)
