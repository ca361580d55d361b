"""Tensor against expert parallelism by formula, and what ranks of a real layer hold."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, interleave
from moe_mk.lab.plan.exchange import Volumes, break_even_ranks
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant.plain import FP32
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens

CPU = torch.device("cpu")


@pytest.mark.row(38)
def test_the_ratio_is_choices_over_ranks() -> None:
    # 4096 tokens of 7168 values: 2 S D = 58,720,256 values a rank, 112 MiB in bf16.
    by_ranks = {8: 58_720_256, 16: 29_360_128, 32: 14_680_064, 64: 7_340_032, 256: 1_835_008}
    for ranks, elements in by_ranks.items():
        volumes = Volumes(4096, 7168, 8, ranks)
        assert volumes.tp_elements == 58_720_256
        assert volumes.ep_elements == elements
        assert volumes.ep_over_tp == Fraction(8, ranks)
    assert [float(Volumes(4096, 7168, 8, m).ep_over_tp) for m in (8, 32)] == [1.0, 0.25]
    assert float(Volumes(4096, 7168, 8, 144).ep_over_tp) == pytest.approx(0.0556, abs=5e-5)
    assert break_even_ranks(8) == 8


@pytest.mark.row(36)
@pytest.mark.parametrize("tokens,ranks,held", [(12, 4, 3), (13, 4, 4), (3, 4, 1)])
def test_the_fullest_rank_holds_its_share_rounded_up(tokens: int, ranks: int, held: int) -> None:
    gauges = Volumes(tokens, 2, 1, ranks)
    assert (gauges.tp_resident_tokens, gauges.ep_resident_tokens) == (tokens, held)


@pytest.mark.row(36)
@pytest.mark.parametrize("name,gauge", [("replicated", "tp_resident_tokens"), ("all_to_all", "ep_resident_tokens")])
def test_ranks_hold_what_the_gauge_states(name: str, gauge: str) -> None:
    # Twelve tokens on four ranks: the same twelve on each, or three each, before an exchange and after it.
    place, tokens = ExpertMap.linear(8, 4), 12
    own = tokens if name == "replicated" else tokens // 4
    comms, held = LockstepWorld(4).communicators(), []
    for comm in comms:
        context = TransportContext(comm, place, place.tables(CPU), FP32, FP32, 2, 1, CPU)
        held.append((PREPARE_FINALIZE[name](context), torch.ones(own, 2), torch.arange(own, dtype=torch.int32) % 8))

    def there_and_back(transport: PrepareFinalize, x: Tensor, ids: Tensor) -> Flight[int]:
        arrived = yield from transport.prepare(x, Routing(ids[:, None], torch.ones(own, 1)))
        assert isinstance(arrived, RowTokens)
        output = ExpertOutput(arrived.x_RH.values, OutputStage.REDUCED)
        return len((yield from transport.finalize(output, arrived)))

    gauges = getattr(Volumes(tokens, 2, 1, 4), gauge)
    assert [gauges] * 4 == interleave([there_and_back(*each) for each in held]) == [len(x) for _, x, _ in held]


def test_sizes_are_positive() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Volumes(1, 1, 0, 1)
