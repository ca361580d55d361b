"""A stream for communication and one for experts, on a GPU, with the bits of tiles in turns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.external.device import Queues

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
CUDA = torch.device("cuda")


def test_marks_order_streams() -> None:
    queues, total = Queues(CUDA), torch.zeros(1 << 24, device=CUDA)
    for _ in range(20):
        total += 1.0
    mark = queues.mark()
    with queues.on_stream("comm"):
        queues.after(mark)
        copied = total.clone()
        done = queues.mark()
    queues.after(done)
    assert bool((copied == 20.0).all())


def config_and_tensors() -> tuple[MoEConfig, dict[str, Tensor]]:
    model = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "bf16"}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
    shapes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    draw = torch.Generator().manual_seed(0)
    tensors = {"gate.weight": torch.randn((8, 256), generator=draw).to(torch.bfloat16)}
    for expert in range(8):
        for name, shape in shapes.items():
            tensors[f"experts.{expert}.{name}.weight"] = (torch.randn(shape, generator=draw) / 16).to(torch.bfloat16)
    return config, tensors


def rows(count: int, seed: int) -> Tensor:
    return torch.randn((count, 256), generator=torch.Generator().manual_seed(seed)).to(CUDA, torch.bfloat16)


@pytest.mark.row(42, 49)
def test_a_comm_stream_gives_the_bits_of_turns() -> None:
    (config, tensors), x_TH = config_and_tensors(), rows(512, 1)
    asked = [config.with_(tiles=4, tile_carrier=who) for who in ("turns", "thread")]
    by_turns, by_thread = (MoELayer(one, device=CUDA).load_weights(tensors) for one in asked)
    for _ in range(5):
        assert torch.equal(by_turns(x_TH), by_thread(x_TH))
