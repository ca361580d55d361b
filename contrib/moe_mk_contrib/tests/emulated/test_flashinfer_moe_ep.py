"""The emulated flashinfer.moe_ep: its signatures, its laws, and what it refuses as the library does."""

import inspect
from typing import Any

import pytest
import torch
from moe_mk_contrib.emulated import flashinfer_moe_ep as moe_ep
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.lab.testing.emulated.flashinfer.comm.trtllm_moe_alltoall import moe_a2a_active_rank_mask
from tests.testing.emulated.row_library_ranks import on_each_rank, on_ranks

MOST, HIDDEN, EXPERTS = 4, 8, 8
ONE, TWO, CAKE = moe_ep.NVLinkOneSidedConfig, moe_ep.NVLinkTwoSidedConfig, moe_ep.CakeAlltoAllConfig

# Two ranks of four experts. Rank 0 has tokens a, b; rank 1 has c.   a -> 0 and 7   b -> 5 and 4   c -> 1 and 0
IDS = [torch.tensor([[0, 7], [5, 4]], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)]
WEIGHTS = [torch.tensor([[0.5, 0.25], [1.0, 2.0]]), torch.tensor([[0.125, 0.75]])]
X = [torch.tensor([[1.0], [2.0]]).repeat(1, HIDDEN), torch.tensor([[3.0]]).repeat(1, HIDDEN)]


def opened(comm: ThreadCommunicator, config: Any = ONE, **changed: Any) -> moe_ep.MoEEpCommunication:
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "max_tokens_per_rank": MOST, "hidden_size": HIDDEN}
    options = changed.pop("options", {})
    bootstrap = {"world_size": comm.size, "rank": comm.rank, "process_group": comm, **changed.pop("bootstrap", {})}
    params = moe_ep.MoEEpCommParams(**{**sizes, "dtype": torch.float32, **changed})
    return moe_ep.create_communication(moe_ep.BootstrapConfig(**bootstrap), params, config(**options))


def sent(one: moe_ep.MoEEpCommunication, rank: int, **changed: Any) -> moe_ep.MoEEpDispatchResult:
    given: dict[str, Any] = {"hidden_states": X[rank], "topk_ids": IDS[rank], "topk_weights": WEIGHTS[rank]}
    return one.dispatch(**{**given, **changed})


def test_the_signature_of_create_communication() -> None:
    # Read at 0.7.2.post1; the snapshot has no words for **options.
    wanted = ["bootstrap", "params", "backend", "options"]
    assert list(inspect.signature(moe_ep.create_communication).parameters) == wanted


@pytest.mark.parametrize("config", [ONE, CAKE, TWO])
def test_each_token_arrives_once_with_global_ids_and_room_is_marked(config: Any) -> None:
    def job(comm: ThreadCommunicator) -> Any:
        got = sent(opened(comm, config), comm.rank)
        assert got.hidden_states.shape == (2 * MOST, HIDDEN) and got.tokens_per_rank == MOST
        assert got.topk_weights is not None
        live = (got.topk_ids >= 0).any(dim=1)
        rows = zip(got.hidden_states[live, 0].tolist(), got.topk_ids[live].tolist(), strict=True)
        return sorted(rows), bool((got.topk_ids[~live] == -1).all())

    first, second = on_ranks(2, job)
    assert [row[0] for row in first[0]] == [1.0, 3.0] and [row[0] for row in second[0]] == [1.0, 2.0]
    assert first[1] and second[1]
    own = [[[i for i in ids if 4 * rank <= i < 4 * rank + 4] for _, ids in got[0]]
           for rank, got in enumerate((first, second))]  # fmt: skip
    assert own == [[[0], [1, 0]], [[7], [5, 4]]]


@pytest.mark.parametrize("config", [ONE, TWO])
@on_each_rank(2)
def test_combine_sums_one_row_of_each_rank(comm: ThreadCommunicator, config: Any) -> None:
    one = opened(comm, config)
    got = sent(one, comm.rank)
    total = one.combine(10.0 ** (1 + comm.rank) * got.hidden_states.nan_to_num())
    assert total[:, 0].tolist() == [[110.0, 200.0], [30.0]][comm.rank]


@on_each_rank(2)
def test_rows_may_be_written_where_combine_reads_them(comm: ThreadCommunicator) -> None:
    one = opened(comm)
    got = sent(one, comm.rank)
    own = one.get_combine_input_buffer(torch.float32)
    assert own is not None and own.shape == (2 * MOST, HIDDEN)
    own.copy_(2 * got.hidden_states.nan_to_num())
    total = one.combine(own)
    assert total[:, 0].tolist() == [[4.0, 4.0], [6.0]][comm.rank]


def test_minus_one_goes_to_rank_0_one_sided_and_nowhere_as_the_number_of_experts_two_sided() -> None:
    def arrived(config: Any, nowhere: int) -> list[list[float]]:
        def job(comm: ThreadCommunicator) -> list[float]:
            ids = torch.full_like(IDS[comm.rank], nowhere)
            got = sent(opened(comm, config), comm.rank, topk_ids=ids)
            return sorted(value for value in got.hidden_states[:, 0].tolist() if value == value)

        return on_ranks(2, job)

    assert arrived(ONE, -1) == [[1.0, 2.0, 3.0], []] and arrived(TWO, EXPERTS) == [[], []]


def test_a_masked_rank_gets_nothing_and_is_not_waited_for() -> None:
    def job(comm: ThreadCommunicator) -> Any:
        one = opened(comm, ONE, options={"enable_rank_mask": True})
        mask = moe_a2a_active_rank_mask([0], 2)
        if comm.rank == 1:
            return None
        sent(one, 0, active_rank_mask=mask)
        payload = torch.ones(2 * MOST, HIDDEN)
        return one.combine(payload, active_rank_mask=mask)[:, 0].tolist()  # type: ignore[call-arg]

    assert on_ranks(2, job)[0] == [1.0, 0.0]


@pytest.mark.parametrize("config", [ONE, TWO])
@on_each_rank(2)
def test_dispatch_and_combine_take_turns(comm: ThreadCommunicator, config: Any) -> None:
    one = opened(comm, config)
    with pytest.raises(RuntimeError, match="combine called before dispatch"):
        one.combine(torch.ones(2 * MOST, HIDDEN))
    sent(one, comm.rank)
    with pytest.raises(RuntimeError, match="twice without an intervening combine"):
        sent(one, comm.rank)


@pytest.mark.parametrize(
    "config,changed,error,message",
    [
        (ONE, {"num_experts": 7}, ValueError, "divisible by the EP size"),
        (TWO, {"num_experts": 6}, ValueError, "divisible by 4"),
        (ONE, {"top_k": 9}, ValueError, "exceeds num_experts"),
        (ONE, {"hidden_size": 0}, ValueError, "hidden_size must be a positive int"),
        (ONE, {"invalid_expert_id": 7}, ValueError, "must be outside"),
        (ONE, {"options": {"extra_payload_bytes_per_token": -1}}, ValueError, "non-negative"),
        (ONE, {"bootstrap": {"world_size": 3}}, ValueError, "has 2 ranks but the EP group has world_size=3"),
        (ONE, {"bootstrap": {"rank": 5}}, ValueError, r"rank 5 not in \[0, 2\)"),
        (ONE, {"bootstrap": {"device": -1}}, ValueError, "device must be non-negative"),
    ],
)
def test_sizes_are_refused(config: Any, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(2, lambda comm: opened(comm, config, **changed), timeout_s=1.0)


@pytest.mark.parametrize(
    "changed,error,message",
    [
        ({"max_tokens_per_rank": MOST + 1}, ValueError, r"must be in \(0, 4\]"),
        ({"hidden_states": X[0].repeat(1, 8)}, RuntimeError, "workspace size per rank insufficient"),
        ({"hidden_states": X[0][:1]}, RuntimeError, "first dimension must match"),
        ({"topk_ids": IDS[0][:, :1].contiguous()}, RuntimeError, "shape mismatch"),
        ({"active_rank_mask": moe_a2a_active_rank_mask([0], 1)}, ValueError, "enable_rank_mask"),
    ],
)
def test_dispatch_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        on_ranks(1, lambda comm: sent(opened(comm), 0, **changed))


@on_each_rank(2)
def test_equal_sizes_share_a_workspace_of_the_process(comm: ThreadCommunicator) -> None:
    made = [opened(comm, options={"extra_payload_bytes_per_token": extra}) for extra in (0, 0, 128)]
    spaces: list[Tensor] = [one.alltoall.workspace for one in made]  # type: ignore[attr-defined]
    assert spaces[0] is spaces[1], spaces[0] is spaces[2] == (True, False)


def test_backends_are_known_by_name() -> None:
    params = moe_ep.MoEEpCommParams(8, 2, 4, 8)
    with pytest.raises(KeyError, match="unknown communication backend 'nccl'.*nvlink_one_sided"):
        moe_ep.create_communication(moe_ep.BootstrapConfig(1, 0), params, "nccl")
    with pytest.raises(TypeError, match="backend_name"):
        moe_ep.create_communication(moe_ep.BootstrapConfig(1, 0), params, 3)
