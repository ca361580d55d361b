"""A whole layer on an sm_90 GPU, on fake tensors: every operator and every kernel that a forward launches is counted.
Counted: operators of torch that run a kernel on a GPU, and launches of Triton kernels. Not counted: views, allocations
and whatever happens on the host. No kernel is compiled and nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_mk import MoEConfig, MoELayer
from moe_mk.config import device_profile
from moe_mk.router import Router
from moe_mk.router.topk import is_plain
from tests.kernels.triton.no_driver import FP8, HIDDEN, INNER, count_multiprocessors

pytestmark = pytest.mark.sm90

EXPERTS = 32
LAUNCH_NOTHING = ("aten.empty", "aten.detach", "aten.lift_fresh", "prim.device")
DECODE = ["_prologue", "_w13", "_w2", "_combine"]


class Launches(TorchDispatchMode):
    """Names of what was launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not str(func).startswith(LAUNCH_NOTHING):
            self.names.append(str(func).removeprefix("aten.").split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Inside: tensors on "cuda" are fake, and kernels are counted and not launched."""
    from triton.runtime.jit import JITFunction

    from moe_mk.experts.triton import experts as backend
    from moe_mk.layer import gate, module_habits, settings
    from moe_mk.weights import layer_reader

    seen, topk = Launches(), import_module("moe_mk.router.topk")
    count_multiprocessors(monkeypatch)
    for module in (backend, settings):
        monkeypatch.setattr(module, "profile_here", lambda device: device_profile("h200"))
    monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: lambda *_, **__: launched(seen, kernel))
    monkeypatch.setattr(backend, "stream_of", lambda device: 0)
    monkeypatch.setattr(module_habits, "usable_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(topk, "is_plain", lambda x: True)
    monkeypatch.setattr(topk, "has_kernels", lambda device: True)
    monkeypatch.setattr(backend, "pack_weights", packed)  # a CPU build of torch cannot index fake tensors of a GPU
    monkeypatch.setattr(backend, "joined", joined)
    # What is read on the host before the first forward: contents of the weights, a digest of the gate.
    monkeypatch.setattr(layer_reader.LayerReader, "content_problems", lambda self, on_progress: [])
    monkeypatch.setattr(gate.Gate, "notes", lambda self: {})
    identity = MoELayer._identity
    monkeypatch.setattr(MoELayer, "_identity", lambda self, gate_EH=None: identity(self))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0, raising=False)
    monkeypatch.setattr("moe_mk.shapes.is_compiling", lambda: True)  # as in a trace: tensors have no memory
    with FakeTensorMode():
        yield seen


def packed(weights: Any, format: Any, device: torch.device, *, spare: int = 0) -> Any:
    from moe_mk.experts.triton.weights import empty_slots

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((weights.num_slots, *shape), dtype=dtype, device=device)

    return empty_slots(weights.slot(0), format, room, spare)


def joined(routed: Any, shared: Any) -> Any:
    def wider(stack: torch.Tensor) -> torch.Tensor:
        return torch.empty((len(stack) + 1, *stack.shape[1:]), dtype=stack.dtype, device=stack.device)

    w13, w2 = (replace(w, values=wider(w.values), scales=wider(w.scales)) for w in (routed.w13, routed.w2))
    return replace(routed, w13=w13, w2=w2)


def launched(seen: Launches, kernel: Any) -> None:
    seen.names.append(kernel.fn.__name__)


def layer(*, router: dict[str, Any], shared: int = 0, **settings: Any) -> MoELayer:
    model = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_shared_experts": shared,
    }
    model["quant"] = {"weights": "fp8_block", "block": [128, 128]}
    config = MoEConfig.parse({"model": model, "router": router}, "a test").with_(experts="triton", **settings)
    return MoELayer(config, device="cuda").load_weights(tensors(config))


def tensors(config: MoEConfig) -> dict[str, Tensor]:
    def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device="cuda")

    made = {"gate.weight": matrix(EXPERTS, HIDDEN, torch.bfloat16)}
    if config.router.has_correction_bias:
        made["gate.e_score_correction_bias"] = torch.empty(EXPERTS, dtype=torch.float32, device="cuda")
    blocks = [f"experts.{expert}" for expert in range(EXPERTS)]
    for name in [*blocks, *(["shared_experts"] if config.model.shared_size else [])]:
        for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            made[f"{name}.{part}_proj.weight"] = matrix(rows, columns, FP8)
            made[f"{name}.{part}_proj.weight_scale_inv"] = matrix(rows // 128, columns // 128, torch.float32)
    return made


def forward(layer: MoELayer, num_tokens: int, launches: Launches) -> list[str]:
    x_TH = torch.empty((num_tokens, HIDDEN), dtype=torch.bfloat16, device="cuda")
    with launches:
        assert layer.forward_checked(x_TH, layer.expert_load).shape == x_TH.shape
    return launches.names


DEEPSEEK = {"top_k": 8, "num_expert_group": 8, "topk_group": 4, "scoring_func": "sigmoid"}
ROUTERS = {
    "DeepSeek-V3": DEEPSEEK | {"has_correction_bias": True, "routed_scaling_factor": 2.5},
    "Qwen3": {"top_k": 8, "scoring_func": "softmax"},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_decode_forward_is_six_launches(name: str, launches: Launches) -> None:
    names = forward(layer(router=ROUTERS[name]), 4, launches)
    assert names == ["mm", "_grouped_topk", *DECODE], "gate, router with load and physical ids, experts"
    assert len(names) <= 8


def test_a_decode_forward_with_one_expert_a_token_is_five_launches(launches: Launches) -> None:
    names = forward(layer(router={"top_k": 1, "scoring_func": "sigmoid"}), 4, launches)
    assert names == ["mm", "_grouped_topk", *DECODE[:-1]], "the second product writes the output"


def test_shared_experts_add_no_launch_on_one_rank(launches: Launches) -> None:
    assert len(forward(layer(router=ROUTERS["DeepSeek-V3"], shared=1), 4, launches)) == 6


@pytest.mark.parametrize("router", [Router(8), Router(8, 8, 4, "sigmoid")], ids=["plain", "grouped"])
def test_a_router_on_its_own_is_one_launch(router: Router, launches: Launches) -> None:
    logits = torch.empty((4, EXPERTS), dtype=torch.float32, device="cuda")
    with launches:
        assert router(logits).ids_TK.shape == (4, 8)
    assert launches.names == ["_grouped_topk"]


def test_scores_without_a_kernel_and_traced_tensors_take_the_reference(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.empty((4, EXPERTS), dtype=torch.float32, device="cuda")
    with launches:
        Router(8, scoring_func="sqrtsoftplus")(logits)
        monkeypatch.setattr(import_module("moe_mk.router.topk"), "is_plain", is_plain)
        Router(8)(logits)
    assert "_grouped_topk" not in launches.names and launches.names.count("argmax") == 16


def test_observers_see_logical_ids_of_the_fused_routing(launches: Launches) -> None:
    made, seen = layer(router=ROUTERS["DeepSeek-V3"]), []
    made.on_routing = seen.append
    assert len(forward(made, 4, launches)) == 6
    assert [routing.ids_TK.shape for routing in seen] == [(4, 8)]
