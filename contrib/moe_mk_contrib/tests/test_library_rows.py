"""What the core asks of transports of libraries, over the emulations of this distribution."""

from moe_mk.quant import INT8_TOKEN, MXFP8, NVFP4_TOKENS
from moe_mk.quant.fp8 import FP8_1x128
from tests.prepare_finalize import test_library_rows as core
from tests.support.more_cases import with_cases

MOE_EP = ("moe_ep_one_sided", "moe_ep_cake", "moe_ep_two_sided")
OF_ROWS = {"deepep_v2": False, **dict.fromkeys(MOE_EP, False), "mori": True, "nccl_ep_ht": True}
OF_EXPERTS = ("nixl_ep", "nccl_ep")
LATE = [
    *((name, 0, "dispatch") for name in ("moe_ep_one_sided", "mori", "nccl_ep")),
    ("nixl_ep", 0, "low-latency dispatch"),
    ("deepep_v2", 1, "elastic dispatch"),
    ("nccl_ep_ht", 0, "update"),
]
ROUNDED = [
    *((name, scheme, 256) for name in ("deepep_v2", "mori", "nccl_ep", "nccl_ep_ht") for scheme in core.FP8),
    *((f"moe_ep_{way}_sided", scheme, 200) for way in ("one", "two") for scheme in (*core.FP8, INT8_TOKEN)),
    *((name, s, 224) for name in ("moe_ep_one_sided", "nccl_ep_ht") for s in (MXFP8, NVFP4_TOKENS)),
    ("mori", MXFP8, 256),
    ("nccl_ep_ht", FP8_1x128, 320),  # 3 scales in f32 are 12 bytes, filled up to 16
]

test_each_rank_gets_each_token_once_and_sums_return = with_cases(
    core.test_each_rank_gets_each_token_once_and_sums_return, "name,consecutive", OF_ROWS.items()
)
test_each_expert_gets_its_tokens_and_padding_is_never_read = with_cases(
    core.test_each_expert_gets_its_tokens_and_padding_is_never_read, "name", OF_EXPERTS
)
test_rounded_rows_arrive_bit_for_bit = with_cases(
    core.test_rounded_rows_arrive_bit_for_bit, "name,scheme,hidden", ROUNDED
)
test_nothing_is_sent_for_tokens_that_go_nowhere = with_cases(
    core.test_nothing_is_sent_for_tokens_that_go_nowhere, "name", ["mori", "nccl_ep_ht"]
)
test_combine_is_given_the_ids_that_this_rank_dispatched = with_cases(
    core.test_combine_is_given_the_ids_that_this_rank_dispatched, "name", ["mori"]
)
test_calls_in_flight_have_workspaces_of_their_own_and_layers_share_them = with_cases(
    core.test_calls_in_flight_have_workspaces_of_their_own_and_layers_share_them, "name", ["moe_ep_one_sided"]
)
test_top_k_is_filled_up_to_one_that_the_kernels_know = with_cases(
    core.test_top_k_is_filled_up_to_one_that_the_kernels_know, "name", ["moe_ep_one_sided"]
)
test_more_tokens_than_planned_are_refused_before_any_work = with_cases(
    core.test_more_tokens_than_planned_are_refused_before_any_work, "name", [*OF_ROWS, *OF_EXPERTS]
)
test_a_peer_that_never_calls_ends_in_commerror_and_so_does_every_later_call = with_cases(
    core.test_a_peer_that_never_calls_ends_in_commerror_and_so_does_every_later_call, "name,rank,phase", LATE
)
