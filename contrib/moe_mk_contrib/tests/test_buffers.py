"""What layers of one model share of a library, over the emulations of this distribution."""

import pytest

from tests.prepare_finalize.deepep import test_buffers as core
from tests.support.more_cases import with_cases
from tests.support.tiers import slow

EMULATED = "moe_mk_contrib.emulated"
MADE = {
    "deepep_v2": "deep_ep.ElasticBuffer",
    "deepep_v2_grouped": "deep_ep.ElasticBuffer",
    "nixl_ep": "nixl_ep.Buffer",
    "moe_ep_one_sided": "flashinfer_moe_ep.communication.MoEEpCommunication",
    "moe_ep_cake": "flashinfer_moe_ep.communication.MoEEpCommunication",
    "moe_ep_two_sided": "flashinfer_moe_ep.communication.MoEEpCommunication",
    "mori": "mori.ops.EpDispatchCombineOp",
    "nccl_ep": "nccl.ep.Group",
    "nccl_ep_ht": "nccl.ep.Group",
}
"""Transports, and what each of them makes of its library."""
SLOTS = ("moe_ep_one_sided", "moe_ep_two_sided", "mori", "nccl_ep", "nccl_ep_ht")
"""Transports that take a buffer for each call in flight."""


@pytest.fixture
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    return core.count_made(f"{EMULATED}.{MADE[request.getfixturevalue('name')]}", monkeypatch)


test_four_layers_of_one_group_make_one_buffer_a_rank = with_cases(
    core.test_four_layers_of_one_group_make_one_buffer_a_rank, "name", MADE
)
test_two_layers_and_two_micro_batches_at_once_stay_exact = with_cases(
    core.test_two_layers_and_two_micro_batches_at_once_stay_exact, "name", MADE
)
test_a_third_operation_is_refused_whichever_layer_it_is_of = with_cases(
    core.test_a_third_operation_is_refused_whichever_layer_it_is_of, "name", ["nixl_ep"]
)
test_calls_in_flight_have_slots_of_their_own_whichever_layer_they_are_of = with_cases(
    core.test_calls_in_flight_have_slots_of_their_own_whichever_layer_they_are_of, "name", SLOTS
)
test_tokens_are_finalized_once_whoever_uses_their_lane_by_then = with_cases(
    core.test_tokens_are_finalized_once_whoever_uses_their_lane_by_then,
    "name",
    [name for name in SLOTS if name != "nccl_ep"],
)
test_a_buffer_ends_with_what_its_group_keeps = with_cases(
    core.test_a_buffer_ends_with_what_its_group_keeps, "name", slow("deepep_v2", "nixl_ep")
)
test_a_layer_that_needs_more_replaces_the_buffer_and_calls_under_way_end_in_the_old_one = with_cases(
    core.test_a_layer_that_needs_more_replaces_the_buffer_and_calls_under_way_end_in_the_old_one,
    "name",
    ["deepep_v2", "deepep_v2_grouped"],
)
