"""A question to the oracle: derived sizes by hand, expected ranks a token against counting, and JSON."""

import copy
import json
import pickle
from dataclasses import replace
from functools import partial

import pytest

from moe_mk.config.problem import Installed
from moe_mk.errors import ConfigError
from moe_mk.quant import FP8_1x128, FP8_128x128
from tests.support import problems

problem = partial(problems.problem, device="h200", num_tokens=128)


def test_sizes_by_hand() -> None:
    # 256 experts on 32 ranks of tp 2: 8 slots a rank, 64 GPUs on 8 nodes of 8, shards of 2048 / 2.
    asked = problem(ep=32, tp=2)
    assert (asked.ranks, asked.nodes, asked.slots, asked.intermediate) == (32, 8, 8, 1024)
    assert asked.weights == FP8_128x128 and asked.activations == FP8_1x128
    assert problem(ep=12).slots == 22  # the fullest rank of 256 on 12
    assert problem(ep=4, placement=tuple(range(256)) + tuple(range(32))).slots == 72
    hosts = [problem(ep=8, tp=tp, ranks_per_node=size).ep_ranks_per_node for tp, size in ((1, None), (2, 4), (8, 4))]
    assert hosts == [8, 2, 1], "as many as TP leaves of the ranks that are stated, else of those of the profile"
    assert problem("mixtral_8x7b").activations is None and problem("mixtral_8x7b").nodes == 1
    # Each of 8 choices is a row of its own: 4,096 of 512 tokens, and 128 in a piece of 16 tokens.
    sent = problem(ep=32, invariant=True, relay_tokens=16, max_num_tokens=512).as_sent.config
    assert (sent.router.top_k, sent.kernel.max_num_tokens, sent.kernel.relay_tokens) == (1, 4096, 128)


@pytest.mark.parametrize("ranks,on_ranks,on_nodes", [(8, 3.983, 1.0), (32, 6.820, 3.133), (64, 7.471, 3.983)])
def test_four_kept_groups_of_eight_limit_ranks_and_nodes(ranks: int, on_ranks: float, on_nodes: float) -> None:
    asked = problem(ep=ranks)
    assert asked.ranks_per_token == pytest.approx(on_ranks, abs=5e-4)
    assert asked.nodes_per_token == pytest.approx(on_nodes, abs=5e-4)


def test_only_groups_that_lie_together_limit_what_a_token_visits() -> None:
    free = problem(ep=64, num_expert_group=1, topk_group=1).nodes_per_token
    assert free == pytest.approx(5.295, abs=5e-4)
    assert problem(ep=64, placement="round_robin").nodes_per_token == free
    assert problem(ep=64, hash_vocabulary=9, has_correction_bias=False).nodes_per_token == free
    assert problem(ep=2, tp=8, ranks_per_node=4).nodes == 4, "more nodes than EP ranks: a rank is on two"
    assert problem(ep=2, tp=8, ranks_per_node=4).nodes_per_token == problem(ep=2).ranks_per_token


@pytest.mark.parametrize(
    "num_tokens, text",
    [(0, "num_tokens=0 must be at least 1"), (65, "num_tokens=65 exceeds kernel.max_num_tokens=64; raise the limit")],
)
def test_batches_that_cannot_be_are_refused(num_tokens: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        problem(num_tokens=num_tokens, max_num_tokens=64)


def test_it_is_plain_data() -> None:
    asked = problem(ep=8)
    data = json.loads(json.dumps(asked.as_dict()))
    assert data["ranks"] == 8 and data["nodes"] == 1 and data["dtype"] == "bf16" and data["num_tokens"] == 128
    assert data["config"]["parallel"]["ep"] == 8 and data["device"]["name"] == "h200"
    assert asked == problem(ep=8) and hash(asked) == hash(problem(ep=8))
    found = replace(asked, installed=Installed({"a"}, {"b": "is broken"}))
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert copied == found and copied.installed.against == {"b": "is broken"}
