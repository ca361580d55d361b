"""The emulated NCCL EP: its signatures, its laws, and what it refuses as the library does."""

import gc
from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated.nccl import ep
from moe_mk_contrib.emulated.nccl.core import NcclInvalid
from moe_mk_contrib.emulated.nccl.ep.interop.torch import get_nccl_comm_from_group
from moe_mk_contrib.emulated.nccl.ep.state import NCCLEpError
from moe_mk_contrib.nccl_ep_limits import least_low_latency_sms, most_low_latency_top_k
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

MOST, HIDDEN, EXPERTS = 4, 128, 4

# Rank 0 has tokens a, b; rank 1 has c.   a -> experts 3 and 0   b -> expert 2, and nowhere   c -> experts 1 and 0
IDS = [torch.tensor([[3, 0], [2, -1]]), torch.tensor([[1, 0]])]
WEIGHTS = [torch.tensor([[0.25, 0.5], [1.0, 9.0]]), torch.tensor([[0.125, 0.75]])]
X = [torch.tensor([[1.0], [2.0]]).repeat(1, HIDDEN), torch.tensor([[3.0]]).repeat(1, HIDDEN)]
HIGH, LOW = ep.Algorithm.HIGH_THROUGHPUT, ep.Algorithm.LOW_LATENCY


class Rank:
    """A group and a handle of one rank, with a call that may be changed."""

    def __init__(self, comm: ThreadCommunicator, algorithm: ep.Algorithm = LOW, **settings: Any) -> None:
        self.rank, self.high = comm.rank, algorithm == HIGH
        sizes = {"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "max_token_bytes": 4 * HIDDEN}
        sizes |= {"max_recv_tokens_per_rank": comm.size * MOST, **settings}
        self.group = ep.Group.create(get_nccl_comm_from_group(comm), ep.GroupConfig(algorithm=algorithm, **sizes))
        self.size = comm.size
        self.ids = IDS[comm.rank].clone()
        layout = ep.Layout.FLAT if self.high else ep.Layout.EXPERT_MAJOR
        self.total = torch.full((1,), -5, dtype=torch.int32)
        info = ep.LayoutInfo(recv_total_counter=ep.Tensor(self.total)) if self.high else None
        self.handle = self.group.create_handle(layout, ep.Tensor(self.ids), layout_info=info, stream=0)
        if self.high:
            self.rows = torch.zeros(self.size * MOST, HIDDEN)
            self.weights_out, self.ids_out = torch.zeros(len(self.rows), 2), torch.zeros(len(self.rows), 2).long()
        else:
            self.rows = torch.zeros(EXPERTS // self.size, self.size * MOST, HIDDEN)
            self.counts = torch.full((EXPERTS // self.size,), -5, dtype=torch.int32)

    def dispatch(self, x: Tensor | None = None, *, send_only: int = 0, **changed: Any) -> None:
        given: dict[str, Any] = {"tokens": ep.Tensor(X[self.rank] if x is None else x)}
        out: dict[str, Any] = {"tokens": ep.Tensor(self.rows)}
        info: Any = None
        if self.high:
            given["topk_weights"] = ep.Tensor(WEIGHTS[self.rank])
            out |= {"topk_weights": ep.Tensor(self.weights_out), "topk_idx": ep.Tensor(self.ids_out)}
        else:
            info = ep.LayoutInfo(expert_counters=ep.Tensor(self.counts))
        given |= changed.pop("inputs", {})
        out |= changed.pop("outputs", {})
        info = changed.pop("layout_info", info)
        config = ep.DispatchConfig(send_only=send_only, **changed)
        inputs, outputs = ep.DispatchInputs(**given), ep.DispatchOutputs(**out)
        self.handle.dispatch(inputs, outputs, layout_info=info, config=config, stream=0)

    def combine(self, y: Tensor, *, send_only: int = 0, weights: Tensor | None = None, **changed: Any) -> Tensor:
        total = torch.zeros(len(self.ids), y.shape[-1], dtype=y.dtype)
        out: dict[str, Any] = {"tokens": ep.Tensor(total)}
        if not self.high:
            out["topk_weights"] = ep.Tensor(WEIGHTS[self.rank] if weights is None else weights)
        inputs = ep.CombineInputs(**{"tokens": ep.Tensor(y), **changed.pop("inputs", {})})
        out |= changed.pop("outputs", {})
        config = ep.CombineConfig(send_only=send_only, **changed)
        self.handle.combine(inputs, ep.CombineOutputs(**out), config=config, stream=0)
        return total


@on_each_rank(2)
def test_low_latency_rows_lie_at_the_front_of_the_blocks_of_their_experts(comm: ThreadCommunicator) -> None:
    one = Rank(comm)
    one.dispatch()
    live = [sorted(block[:count, 0].tolist()) for block, count in zip(one.rows, one.counts.tolist(), strict=True)]
    behind = all(bool(block[count:].isnan().all()) for block, count in zip(one.rows, one.counts, strict=True))
    # Experts 0, 1 on rank 0 get a and c, and c; experts 2, 3 on rank 1 get b, and a.
    assert (live, behind) == [([[1.0, 3.0], [3.0]], True), ([[2.0], [1.0]], True)][comm.rank]


@on_each_rank(2)
def test_what_is_sent_only_arrives_with_complete(comm: ThreadCommunicator) -> None:
    one = Rank(comm)
    one.dispatch(send_only=1)
    early = [bool(one.rows.isnan().all()), bool((one.counts < 0).all())]
    one.handle.complete(stream=0)
    late = not bool(one.rows[:, 0].isnan().all())
    total = one.combine(one.rows, send_only=1)
    waits = bool(total.isnan().all())
    one.handle.complete(stream=0)
    one.handle.complete(stream=0)  # where nothing waits it does nothing
    assert [*early, late, waits, not bool(total.isnan().any())] == [True] * 5


def test_a_group_has_one_operation_between_its_halves() -> None:
    def job(comm: ThreadCommunicator) -> None:
        one = Rank(comm)
        one.dispatch(send_only=1)
        one.combine(one.rows)

    with pytest.raises(RuntimeError, match="send_in_flight == 0"):
        on_ranks(2, job)


def test_low_latency_reads_ids_again_in_combine() -> None:
    def freed(comm: ThreadCommunicator) -> None:
        one = Rank(comm)
        one.dispatch()
        one.ids = torch.zeros(len(one.ids), 2)
        gc.collect()
        one.combine(one.rows)

    with pytest.raises(RuntimeError, match="freed before the library was done"):
        on_ranks(2, freed)

    def other_ids(comm: ThreadCommunicator) -> bool:
        one = Rank(comm)
        one.dispatch()
        one.ids.fill_(1)
        return bool(one.combine(one.rows.nan_to_num()).isnan().any())

    assert on_ranks(2, other_ids) == [True, False]


@on_each_rank(2)
def test_weights_are_read_when_a_combine_completes(comm: ThreadCommunicator) -> None:
    one = Rank(comm)
    one.dispatch()
    weights = WEIGHTS[comm.rank].clone()
    total = one.combine(one.rows.nan_to_num(), send_only=1, weights=weights)
    weights.zero_()
    one.handle.complete(stream=0)
    assert float(total.abs().sum()) == 0.0


@on_each_rank(2)
def test_strides_are_not_part_of_a_descriptor(comm: ThreadCommunicator) -> None:
    one = Rank(comm)
    wide = torch.cat([X[comm.rank], torch.full_like(X[comm.rank], 7.0)], dim=1)
    one.dispatch(wide[:, :HIDDEN])  # the second row that the library reads is the second half of the first
    assert bool((one.rows == 7.0).any()) == [False, True][comm.rank]


def test_high_throughput_rows_lie_at_the_front_with_local_ids_by_rising_number() -> None:
    def job(comm: ThreadCommunicator) -> Any:
        one = Rank(comm, HIGH)
        one.dispatch()
        total = int(one.total)
        rows = [(float(x[0]), ids, w) for x, ids, w in
                zip(one.rows, one.ids_out.tolist(), one.weights_out.tolist(), strict=True)][:total]  # fmt: skip
        behind = bool(one.rows[total:].isnan().all()) and bool((one.ids_out[total:] < -1).all())
        return sorted(rows), behind

    first, second = on_ranks(2, job)
    assert first == ([(1.0, [0, -1], [0.5, 0.0]), (3.0, [0, 1], [0.75, 0.125])], True)
    assert second == ([(1.0, [1, -1], [0.25, 0.0]), (2.0, [0, -1], [1.0, 0.0])], True)


@on_each_rank(2)
def test_high_throughput_numbers_ids_locally_or_globally(comm: ThreadCommunicator) -> None:
    one = Rank(comm, HIGH)
    one.dispatch(layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL))
    assert sorted(one.ids_out[: int(one.total)].tolist()) == [[[0, -1], [0, 1]], [[2, -1], [3, -1]]][comm.rank]


@on_each_rank(2)
def test_high_throughput_combine_adds_one_row_of_each_rank(comm: ThreadCommunicator) -> None:
    one = Rank(comm, HIGH)
    one.dispatch()
    one.ids.fill_(0)  # a copy was taken
    assert one.combine(10.0 ** (1 + comm.rank) * one.rows)[:, 0].tolist() == [[110.0, 200.0], [30.0]][comm.rank]


def test_forwarded_scales_lie_in_the_slots_of_their_rows() -> None:
    def job(comm: ThreadCommunicator) -> Any:
        one = Rank(comm)
        values = X[comm.rank].to(torch.float8_e4m3fn)
        scales = (10 * X[comm.rank][:, :1]).to(torch.uint8).repeat(1, 16)
        rows = torch.zeros(2, 2 * MOST, HIDDEN, dtype=torch.float8_e4m3fn)
        out = torch.zeros(2, 2 * MOST, 16, dtype=torch.uint8)
        recipe = ep.DispatchQuantizationRecipe.FWD
        inputs = {"tokens": ep.Tensor(values), "scales": ep.Tensor(scales)}
        outputs = {"tokens": ep.Tensor(rows), "scales": ep.Tensor(out)}
        one.dispatch(inputs=inputs, outputs=outputs, quantization_recipe=recipe)
        return [[(float(x[0]), int(s[0])) for x, s in zip(rows[e], out[e], strict=True)][: int(one.counts[e])]
                for e in range(2)]  # fmt: skip

    first, second = on_ranks(2, job)
    assert [sorted(block) for block in first] == [[(1.0, 10), (3.0, 30)], [(3.0, 30)]]
    assert second == [[(2.0, 20)], [(1.0, 10)]]


@pytest.mark.parametrize(
    "algorithm,changed,error,message",
    [
        (LOW, {"x": X[0].double()}, NCCLEpError, "dtype must match"),
        (LOW, {"inputs": {"scales": ep.Tensor(torch.zeros(2, 16))}}, NCCLEpError, "must be null for NONE"),
        (LOW, {"x": X[0][:1]}, AssertionError, "as many rows as topk_idx"),
        (LOW, {"x": X[0].repeat(1, 2)}, AssertionError, "exceed max_token_bytes"),
        (LOW, {"layout_info": None}, AssertionError, "expert_counters is required"),
        (LOW, {"inputs": {"topk_weights": ep.Tensor(WEIGHTS[0])}}, AssertionError, "topk_weights_in == nullptr"),
        (LOW, {"outputs": {"tokens": ep.Tensor(torch.zeros(4, 4, HIDDEN + 16))}}, AssertionError, "recv_x is"),
        (LOW, {"quantization_recipe": ep.DispatchQuantizationRecipe.FWD}, NCCLEpError, "are required"),
        (HIGH, {"inputs": {"topk_weights": None}}, NCCLEpError, "topk_weights is required"),
        (HIGH, {"inputs": {"topk_weights": ep.Tensor(WEIGHTS[0].half())}}, AssertionError, "f32"),
        (HIGH, {"outputs": {"topk_idx": ep.Tensor(torch.zeros(4, 2).int())}}, AssertionError, "int64"),
        (HIGH, {"outputs": {"tokens": ep.Tensor(torch.zeros(3, HIDDEN))}}, NCCLEpError, "must cover"),
    ],
)
def test_dispatch_refuses(algorithm: ep.Algorithm, changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, lambda comm: Rank(comm, algorithm).dispatch(**changed))


@pytest.mark.parametrize(
    "scales,message",
    [
        (torch.zeros(2, 3), "16-byte aligned"),
        (torch.zeros(1, 16), r"\[tokens, scales\]"),
        (torch.zeros(2, 2, dtype=torch.int64), "raw dtype"),
        (torch.zeros(2, 128), "token-byte limit"),
    ],
)
@on_each_rank(1)
def test_forwarded_scales_are_refused(comm: ThreadCommunicator, scales: Tensor, message: str) -> None:
    inputs = {"scales": ep.Tensor(scales)}
    outputs = {"scales": ep.Tensor(torch.zeros(4, 4, scales.shape[1], dtype=scales.dtype))}
    one, recipe = Rank(comm), ep.DispatchQuantizationRecipe.FWD
    with pytest.raises(NCCLEpError, match=message):
        one.dispatch(inputs=inputs, outputs=outputs, quantization_recipe=recipe)


@pytest.mark.parametrize(
    "algorithm,settings,error,message",
    [
        (LOW, {"num_experts": 0}, AssertionError, "num_experts"),
        (LOW, {"max_num_sms": 133}, NCCLEpError, "device_sm_count"),
        (LOW, {"max_num_sms": 2, "num_experts": 32}, NCCLEpError, "insufficient comm SM count"),
        (LOW, {"rdma_buffer_size": 1000}, NCCLEpError, "bytes but has 1000"),
        (HIGH, {"max_token_bytes": 24}, NCCLEpError, "multiple of 16"),
        (HIGH, {"max_recv_tokens_per_rank": 3}, AssertionError, "max_recv_tokens_per_rank >="),
    ],
)
def test_a_group_refuses_sizes(
    algorithm: ep.Algorithm, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, lambda comm: Rank(comm, algorithm, **settings))


def test_ranks_must_agree_on_sizes() -> None:
    with pytest.raises(AssertionError, match="must be identical across ranks"):
        on_ranks(2, lambda comm: Rank(comm, max_dispatch_tokens_per_rank=4 + comm.rank, max_recv_tokens_per_rank=10))


def test_layouts_and_top_k_are_checked_by_algorithm() -> None:
    def created(comm: ThreadCommunicator, layout: ep.Layout, top_k: int) -> None:
        config = ep.GroupConfig(num_experts=64, max_dispatch_tokens_per_rank=MOST, max_token_bytes=512)
        group = ep.Group.create(get_nccl_comm_from_group(comm), config)
        group.create_handle(layout, ep.Tensor(torch.zeros(1, top_k).long()), stream=0)

    for layout, top_k, error, message in (
        (ep.Layout.UNSET, 2, AssertionError, "set explicitly"),
        (ep.Layout.FLAT, 2, AssertionError, "not one of this algorithm"),
        (ep.Layout.EXPERT_MAJOR, 33, NCCLEpError, r"must be in \[1, 32\]"),
        (ep.Layout.EXPERT_MAJOR, 32, NCCLEpError, "geometry is unsupported"),
    ):
        with pytest.raises(error, match=message):
            on_ranks(1, lambda comm, layout=layout, top_k=top_k: created(comm, layout, top_k))  # type: ignore[misc]
    # 132 blocks of 32 warps: 64 experts have a block each, 31 warps forward. 256 experts: two a block, 16 warps each.
    # 400 experts, 4 a block, 8 warps each; 14 groups of 2 warps are the most: 27 forward.
    assert [most_low_latency_top_k(e, 132) for e in (64, 256, 400, 14 * 132)] == [31, 31, 31, 27]
    assert least_low_latency_sms(256) == 19


@on_each_rank(1)
def test_calls_on_what_was_destroyed_are_refused(comm: ThreadCommunicator) -> None:
    one = Rank(comm)
    one.handle.destroy()
    with pytest.raises(NcclInvalid, match="Cannot dispatch"):
        one.dispatch()
    one.group.destroy()
    with pytest.raises(NcclInvalid, match="Cannot create_handle"):
        one.group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(one.ids), stream=0)
