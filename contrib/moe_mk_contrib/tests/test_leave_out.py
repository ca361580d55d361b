"""Transports of this distribution that go on without a rank, and what those without a rank mask answer."""

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from tests.prepare_finalize import test_leave_out as core
from tests.support.library_layers import Model
from tests.support.more_cases import with_cases

LIBRARIES = ["nixl_ep", "moe_ep_one_sided"]

test_outputs_without_a_rank_are_the_dense_ones_with_its_assignments_dropped = with_cases(
    core.test_outputs_without_a_rank_are_the_dense_ones_with_its_assignments_dropped, "name", LIBRARIES
)
test_a_rank_that_is_not_left_out_is_named_by_the_error = with_cases(
    core.test_a_rank_that_is_not_left_out_is_named_by_the_error, "name", LIBRARIES
)
test_a_rank_that_kept_its_buffer_may_come_back = with_cases(
    core.test_a_rank_that_kept_its_buffer_may_come_back, "name", ["nixl_ep"]
)
test_a_rank_left_out_of_nvlink_cannot_come_back = with_cases(
    core.test_a_rank_left_out_of_nvlink_cannot_come_back, "name", ["moe_ep_one_sided"]
)
test_the_mask_is_checked_and_changes_between_calls_only = with_cases(
    core.test_the_mask_is_checked_and_changes_between_calls_only, "name", LIBRARIES
)
test_transports_without_a_rank_mask_say_so_with_the_way_out = with_cases(
    core.test_transports_without_a_rank_mask_say_so_with_the_way_out, "name", ["deepep_v2", "nccl_ep"]
)
test_processes_go_on_without_one_that_was_killed = with_cases(
    core.test_processes_go_on_without_one_that_was_killed, "names", [LIBRARIES]
)


def test_a_disconnected_rank_is_connected_before_it_is_active() -> None:
    model = Model("nixl_ep", layers=1, ranks=3)
    transport = core.transport_of(model, 0)
    transport.disconnect([2])  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"(?s)ranks \[2\] are not connected.*connect\(\)"):
        transport.leave_out(core.mask_of(*core.ALL))
    transport.leave_out(core.mask_of(0, 1))


def test_traits_name_every_transport_that_masks_ranks() -> None:
    foreign = {name for name in PREPARE_FINALIZE if PREPARE_FINALIZE.origin(name).startswith("moe-mk-contrib ")}
    assert {n for n in foreign if PREPARE_FINALIZE[n].traits.masks_ranks} == {*LIBRARIES, "moe_ep_cake"}
