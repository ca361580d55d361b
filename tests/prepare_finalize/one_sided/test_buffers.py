"""Windows of the one-sided transport: experts write into them, layers share them, calls under way have their own."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk import CommError
from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.experts import EXPERTS
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.one_sided.buffers import OneSidedBufferPool, RegionShape
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.quant import FP32
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import Weights
from tests.support.formats import EXPERTS as NUM_EXPERTS
from tests.support.formats import FORMATS, HIDDEN, TOP_K, Format, kernels_of

CPU = torch.device("cpu")
BF16_LAYER = next(form for form in FORMATS if form.weights == "bf16" and form.dtype.name == "bf16")


class Copying(OneSided):
    """Hands over no memory of its own, so that every sum is copied into the window."""

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        assert isinstance(tokens, RowTokens) and tokens.out_RH is not None
        return replace(tokens, out_RH=None)


def kernels(form: Format, experts: str, case: RoutingCase) -> list[tuple[FusedMoEKernel, Weights]]:
    return kernels_of(form, "one_sided", case.expert_map, experts)


def run(made: list[tuple[FusedMoEKernel, Weights]], x: list[Tensor], case: RoutingCase) -> list[Tensor]:
    flights = [k.steps(own, r, w) for (k, w), own, r in zip(made, x, case.routings, strict=True)]
    return interleave(flights)


@pytest.mark.parametrize("experts", ["reference", "torch_cpu", "cpu_native"])
def test_experts_that_write_into_the_window_give_the_bits_of_those_that_are_copied(experts: str) -> None:
    if reasons := EXPERTS[experts].reasons_against(BF16_LAYER.problem()):
        pytest.skip("; ".join(map(str, reasons)))
    written = 0
    for case in hostile_routings(4, num_experts=NUM_EXPERTS, top_k=TOP_K):
        draw = torch.Generator().manual_seed(1)
        x = [torch.randn((count, HIDDEN), generator=draw).bfloat16() for count in case.num_tokens]
        ours, theirs = kernels(BF16_LAYER, experts, case), kernels(BF16_LAYER, experts, case)
        copying = [(replace(k, prepare_finalize=Copying(k.prepare_finalize.context)), w) for k, w in theirs]
        for in_window, copied in zip(run(ours, x, case), run(copying, x, case), strict=True):
            assert torch.equal(in_window, copied), case.name
        flights = [k.prepare_finalize.prepare(own, r) for (k, _), own, r in zip(ours, x, case.routings, strict=True)]
        for (kernel, weights), tokens in zip(ours, interleave(flights), strict=True):
            assert isinstance(tokens, RowTokens) and tokens.out_RH is not None
            y_RH = kernel.multiply(tokens, weights).y
            assert y_RH.shape == tokens.out_RH.shape and y_RH.data_ptr() == tokens.out_RH.data_ptr()
            written += y_RH.numel()
    assert written, "somebody wrote something"


def context(comm: Communicator, hidden: int = 8) -> TransportContext:
    expert_map = ExpertMap.linear(4, comm.size)
    return TransportContext(comm, expert_map, expert_map.tables(CPU), FP32, FP32, hidden, 2, CPU, max_num_tokens=16)


def there_and_back(transport: OneSided, x_TH: Tensor, routing: Routing, factor: float) -> Flight[Tensor]:
    """Experts of a layer that scale a row by a factor and its local weights, written where the transport wants it."""
    tokens = yield from transport.prepare(x_TH, routing)
    assert isinstance(tokens, RowTokens) and tokens.out_RH is not None
    y_RH = factor * tokens.x_RH.dequantize(torch.float32) * tokens.weights_RK.sum(dim=1, keepdim=True)
    return (yield from transport.finalize(ExpertOutput.reduced(y_RH, torch.float32, tokens.out_RH), tokens))


def batch(seed: int) -> tuple[Tensor, Routing]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, 17, (), generator=draw))
    ids_TK = torch.rand((count, 4), generator=draw).argsort(dim=1)[:, :2].to(torch.int32)
    return torch.randint(-9, 9, (count, 8), generator=draw).float(), Routing(ids_TK, torch.ones(ids_TK.shape))


@pytest.mark.row(111)
def test_sixty_one_layers_share_one_window_and_micro_batches_have_their_own() -> None:
    comms = LockstepWorld(2).communicators()
    model = [[OneSided(context(comm)) for comm in comms] for _ in range(61)]
    for number, ranks in enumerate(model):
        batches = [batch(10 * number + rank) for rank in range(2)]
        flights = [there_and_back(t, *own, number) for t, own in zip(ranks, batches, strict=True)]
        for (x_TH, routing), y_TH in zip(batches, interleave(flights), strict=True):
            assert torch.equal(y_TH, number * x_TH * routing.weights_TK.sum(dim=1, keepdim=True))
    slots = {id(transport._pool) for ranks in model for transport in ranks}
    assert len(slots) == 2, "one set on each rank"
    assert [len(transport._pool.slots) for transport in model[0]] == [1, 1]
    assert model[0][0]._pool.slots[0].epoch == 61
    # Two layers at once, two micro-batches of each: four calls under way, four slots, nothing mixed up.
    given = [(layer, batch(1000 + 2 * layer + part)) for layer in (3, 4) for part in (0, 1)]
    flights = [there_and_back(model[layer][rank], *own, layer) for rank in range(2) for layer, own in given]
    for (layer, (x_TH, routing)), y_TH in zip(given * 2, interleave(flights), strict=True):
        assert torch.equal(y_TH, layer * x_TH * routing.weights_TK.sum(dim=1, keepdim=True))
    assert [len(transport._pool.slots) for transport in model[0]] == [4, 4]
    assert not any(buffer.busy for transport in model[0] for buffer in transport._pool.slots)


def test_rows_of_another_geometry_have_windows_of_their_own() -> None:
    comm = LockstepWorld(2).communicators()[0]
    assert OneSided(context(comm))._pool is OneSided(context(comm))._pool
    assert OneSided(context(comm, hidden=16))._pool is not OneSided(context(comm))._pool
    assert set(comm.kept) == {(OneSidedBufferPool, RegionShape(16, 4 * h, 16, 4 * h)) for h in (8, 16)}


def test_a_failure_names_the_layer_that_called_and_ends_the_calls_of_all() -> None:
    comm = LockstepWorld(2).communicators()[0]
    views = [copy.copy(comm) for _ in range(2)]
    for number, view in enumerate(views):
        view.layer = f"layers.{number}"
    first, second = (OneSided(context(view)) for view in views)
    with pytest.raises(
        CommError, match="rank 0, phase 'dispatch', layer 'layers.1', peer 1: epoch 1: has made no such"
    ):
        wait(second.prepare(*batch(3)))
    again = r"layer 'layers.0', peer 1: an earlier call over this group failed on rank 1: epoch 1: .* recover\(\)"
    with pytest.raises(CommError, match=again):
        wait(first.prepare(*batch(3)))


def test_finalizing_an_output_that_lies_elsewhere_copies_only_what_others_read() -> None:
    comms = LockstepWorld(2).communicators()
    made = [OneSided(context(comm)) for comm in comms]
    batches = [batch(seed) for seed in (5, 6)]
    tokens = interleave([t.prepare(*own) for t, own in zip(made, batches, strict=True)])
    outputs = []
    for rank, each in enumerate(tokens):
        assert isinstance(each, RowTokens) and each.out_RH is not None
        each.out_RH.fill_(float("nan"))
        y_RH = each.x_RH.dequantize(torch.float32) * each.weights_RK.sum(dim=1, keepdim=True)
        outputs.append((rank, each, ExpertOutput(y_RH, OutputStage.REDUCED)))
    combined = interleave([made[rank].finalize(output, each) for rank, each, output in outputs])
    for (x_TH, routing), y_TH in zip(batches, combined, strict=True):
        assert torch.equal(y_TH, x_TH * routing.weights_TK.sum(dim=1, keepdim=True))
    assert all(bool(t.out_RH.isnan().any()) for t in tokens if isinstance(t, RowTokens) and t.out_RH is not None)
