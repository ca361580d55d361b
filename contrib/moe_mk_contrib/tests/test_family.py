"""What the core asks of DeepEP's family and of interleaved micro-batches, of the transports of this distribution."""

from tests.prepare_finalize.deepep import test_common, test_processes
from tests.runner import test_tile_workers
from tests.support.more_cases import with_cases

FAMILY = ["deepep_v2", "deepep_v2_grouped", "nixl_ep"]
world = test_processes.world

test_rows_that_kernels_do_not_know_are_refused_when_a_layer_is_built = with_cases(
    test_common.test_rows_that_kernels_do_not_know_are_refused_when_a_layer_is_built, "name", FAMILY
)
test_processes_carry_tokens_and_one_may_be_idle = with_cases(
    test_processes.test_processes_carry_tokens_and_one_may_be_idle, "name", FAMILY
)
test_layers_of_one_model_share_a_buffer = with_cases(
    test_processes.test_layers_of_one_model_share_a_buffer, "names", [FAMILY]
)
test_outputs_of_several_batches_are_those_of_one_after_the_other = with_cases(
    test_tile_workers.test_outputs_of_several_batches_are_those_of_one_after_the_other, "name", ["deepep_v2", "mori"]
)
