"""Tiles on a GPU: a stream that carries beside one that multiplies, and the bits of a run in turns."""

from __future__ import annotations

import pytest
import torch

from moe_mk import MoEConfig, MoELayer
from moe_mk.external.device import Queues

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
CUDA = torch.device("cuda")


def test_marks_order_streams() -> None:
    queues, total = Queues(CUDA), torch.zeros(1 << 24, device=CUDA)
    for _ in range(20):
        total += 1.0
    mark = queues.mark()
    with queues.lane("carry"):
        queues.after(mark)
        copied = total.clone()
        done = queues.mark()
    queues.after(done)
    assert bool((copied == 20.0).all())


@pytest.mark.row(42)
def test_a_carrying_stream_gives_the_bits_of_turns() -> None:
    model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "bf16"}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
    shapes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    draw = torch.Generator().manual_seed(0)
    tensors = {"gate.weight": torch.randn((8, 256), generator=draw).to(torch.bfloat16)}
    for expert in range(8):
        for name, shape in shapes.items():
            tensors[f"experts.{expert}.{name}.weight"] = (torch.randn(shape, generator=draw) / 16).to(torch.bfloat16)
    x_TH = torch.randn((512, 256), generator=draw).to(CUDA, torch.bfloat16)
    asked = [config.with_(tiles=4, tile_carrier=who) for who in ("turns", "thread")]
    by_turns, by_thread = (MoELayer(one, device=CUDA).load_weights(tensors) for one in asked)
    for _ in range(5):
        assert torch.equal(by_turns(x_TH), by_thread(x_TH))
