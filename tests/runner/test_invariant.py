"""`kernel.invariant`: equal bits for every EP size, placement, transport, batch and format, on random real values."""

import shutil
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import DeepseekV3MoE, MoEConfig, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.kernels.native.toolchain import find_compiler
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import each_rank, fly_together, world_of
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.runner.invariant import InvariantKernel, add_choices
from tests.support.tiers import quick_where

EXPERTS, TOKENS = 16, 23
REPLICATED = [0, 1, 2, 3, 12, 4, 5, 6, 7, 3, 8, 9, 10, 11, 3, 12, 13, 14, 15, 7]
"""Twenty slots: expert 3 is on three ranks of four, 7 and 12 on two."""
SHUFFLED = [*range(0, EXPERTS, 2), *range(1, EXPERTS, 2)]
FORMATS = ("bf16", "fp8", "mxfp4", "int8")
TRANSPORTS = ("all_to_all", "all_gather", "hierarchical", "one_sided", "deepep_ht")

pytestmark = [
    pytest.mark.row(39, 109, 120),
    pytest.mark.skipif(not find_compiler(shutil.which), reason="batch-invariant experts on a CPU need a C++ compiler"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def written(quant: str) -> Path:
        if quant not in made:
            made[quant] = tmp_path_factory.mktemp("invariant") / quant
            shape = CheckpointShape(
                num_experts=EXPERTS, hidden_size=256, intermediate_size=128, top_k=4, num_groups=4, top_k_groups=2,
                quant=quant,
            )  # fmt: skip
            write_checkpoint(made[quant], shape)
        return made[quant]

    return written


def tokens() -> Tensor:
    return torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(5)).bfloat16()


def outputs(path: Path, ranks: int, parts: list[int], **settings: Any) -> Tensor:
    """The tokens over ranks, `parts` to each, in the order of the batch."""
    settings = {"allow_emulated": True, "experts": "cpu_native", **settings}
    config = MoEConfig.from_hf(path).with_(max_num_tokens=TOKENS, ep=ranks, **settings)
    name = settings.get("prepare_finalize", "no_ep")
    world = world_of(PREPARE_FINALIZE[name].traits, ranks)

    def layer(comm: Any) -> DeepseekV3MoE:
        made = DeepseekV3MoE(config, groups=ParallelGroups(ep=comm) if ranks > 1 else None)
        return made.load_from_safetensors(path, 3)

    layers = each_rank(world, [partial(layer, comm) for comm in world.communicators()])
    with torch.no_grad():
        if ranks == 1:
            return torch.cat([layers[0](part) for part in tokens().split(parts)])
        flights = [each.steps(part) for each, part in zip(layers, tokens().split(parts), strict=True)]
        return torch.cat(fly_together(world, flights))


CASES = [
    (quant, transport, ranks, placement)
    for quant in FORMATS
    for transport in TRANSPORTS
    for ranks, placement in ((2, "linear"), (4, SHUFFLED), (4, REPLICATED))
    if (transport, ranks) != ("hierarchical", 2)  # two hosts of two ranks
]


def is_quick(quant: str, transport: str, ranks: int, placement: object) -> bool:
    return (quant == "fp8" and placement is REPLICATED) or (quant, transport, ranks) == ("bf16", "all_to_all", 2)


def axes(quant: str, transport: str, ranks: int, placement: object) -> tuple[Hashable, ...]:
    return quant, transport, ranks, str(placement)


@pytest.mark.row("N15")
@pytest.mark.parametrize("quant,transport,ranks,placement", quick_where(is_quick, CASES, axes))
def test_bits_are_those_of_one_rank(checkpoints: Any, quant: str, transport: str, ranks: int, placement: Any) -> None:
    path = checkpoints(quant)
    alone = outputs(path, 1, [TOKENS], invariant=True)
    parts = [10, 13] if ranks == 2 else [3, 17, 0, 3]
    more = {"ranks_per_node": 2} if transport == "hierarchical" else {}
    placed = {"placement": placement, **more}
    spread = outputs(path, ranks, parts, invariant=True, prepare_finalize=transport, **placed)
    assert alone.isfinite().all() and alone.abs().sum() > 0
    assert torch.equal(alone, spread)


def test_bits_do_not_depend_on_the_batch(checkpoints: Any) -> None:
    path = checkpoints("fp8")
    whole = outputs(path, 1, [TOKENS], invariant=True)
    for parts in ([1] * TOKENS, [5, 18], [22, 1]):
        assert torch.equal(whole, outputs(path, 1, parts, invariant=True))


@pytest.mark.parametrize("settings", [{}, {"fused_router": False}, {"router_dtype": "model"}], ids=str)
def test_a_token_is_routed_with_the_same_bits_in_every_batch(checkpoints: Any, settings: dict[str, Any]) -> None:
    config = MoEConfig.from_hf(checkpoints("bf16")).with_(invariant=True, experts="cpu_native", **settings)
    layer = DeepseekV3MoE(config).load_from_safetensors(checkpoints("bf16"), 3)
    whole, rows = layer.route(tokens()), [layer.route(row) for row in tokens().split(1)]
    assert torch.equal(whole.ids_TK, torch.cat([row.ids_TK for row in rows]))
    assert torch.equal(whole.weights_TK, torch.cat([row.weights_TK for row in rows]))


def test_without_it_bits_depend_on_the_ranks(checkpoints: Any) -> None:
    path = checkpoints("fp8")
    asked = {"deterministic": True, "batch_invariant": True}
    alone = outputs(path, 1, [TOKENS], **asked)
    spread = outputs(path, 4, [3, 17, 0, 3], prepare_finalize="all_to_all", **asked)
    assert not torch.equal(alone, spread)
    torch.testing.assert_close(alone.float(), spread.float(), rtol=0.02, atol=0.02 * float(alone.abs().max()))


def test_it_is_as_accurate_as_the_layer_without_it(checkpoints: Any) -> None:
    path = checkpoints("fp8")
    exact = outputs(path, 1, [TOKENS], experts="reference").float()
    off, on = (outputs(path, 1, [TOKENS], invariant=value).float() for value in (False, True))
    assert (on - exact).norm() <= 1.1 * (off - exact).norm() + 1e-3 * exact.norm()


def test_a_layer_that_was_given_another_placement_keeps_its_bits(checkpoints: Any) -> None:
    path = checkpoints("fp8")
    world = LockstepWorld(4)
    config = MoEConfig.from_hf(path).with_(max_num_tokens=TOKENS, experts="cpu_native", invariant=True)
    config = config.with_(prepare_finalize="all_to_all")
    layers = [DeepseekV3MoE(config, groups=ParallelGroups(ep=comm)) for comm in world.communicators()]
    for each in layers:
        each.live.set_placement(ExpertMap.from_physical(REPLICATED, 4, EXPERTS))
        each.load_from_safetensors(path, 3)
    parts = tokens().split([3, 17, 0, 3])
    with torch.no_grad():
        moved = fly_together(world, [each.steps(part) for each, part in zip(layers, parts, strict=True)])
    assert torch.equal(torch.cat(moved), outputs(path, 1, [TOKENS], invariant=True))


def test_what_cannot_keep_it_is_refused_by_name(checkpoints: Any) -> None:
    config = MoEConfig.from_hf(checkpoints("bf16")).with_(invariant=True, ep=2)
    for settings, stated in (({"tiles": 2}, "kernel.tiles=2"), ({"wire": "fp8"}, "kernel.wire='fp8'")):
        with pytest.raises(ConfigError, match=stated):
            config.with_(**settings)
    for pins, stated in (
        ({"experts": "torch_cpu"}, "gives a row other bits in other batches"),
        ({"prepare_finalize": "replicated"}, "adds the parts of all ranks in one all-reduce"),
    ):
        with pytest.raises(UnsupportedError, match=stated) as refused:
            DeepseekV3MoE(config.with_(ep=1 if "experts" in pins else 2, **pins), groups=two_ranks("experts" in pins))
        assert "kernel.invariant = false" in str(refused.value)


def two_ranks(alone: bool) -> ParallelGroups | None:
    return None if alone else ParallelGroups(ep=LockstepWorld(2).communicators()[0])


def test_choices_are_added_in_their_order_and_rounded_once() -> None:
    y_TKH = torch.tensor([[256.0, 1.0, 1.0], [1.0, 2.0**30, -(2.0**30)], [-0.0, -0.0, -0.0]])[..., None].bfloat16()
    total_TH = add_choices(y_TKH, torch.ones(3, 3))
    assert total_TH[0].item() == 258.0, "256 + 1 in bf16 is 256"
    assert total_TH[1].item() == 0.0, "1 + 2^30 in f32 is 2^30; another order gives 1"
    assert total_TH[2].view(torch.int16).item() == 0, "a sum of zeros is +0, whatever their signs"


def test_its_price_is_stated(checkpoints: Any) -> None:
    config = MoEConfig.from_hf(checkpoints("bf16")).with_(ep=2, experts="cpu_native", prepare_finalize="all_to_all")
    groups = ParallelGroups(ep=LockstepWorld(2).communicators()[0])
    plain, invariant = (DeepseekV3MoE(config.with_(invariant=on), groups=groups) for on in (False, True))
    assert isinstance(invariant.kernel, InvariantKernel)
    assert [each.kernel.experts.context.batch_invariant for each in (plain, invariant)] == [False, True]
    one, other = plain.decision, invariant.decision
    assert other.combine_bytes > 1.5 * one.combine_bytes and other.dispatch_bytes > 1.5 * one.dispatch_bytes
    assert other.buffers.total > one.buffers.total
