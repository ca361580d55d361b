"""How many kernels a serving engine compiles: each distinct key of Triton's cache delays a request by seconds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_mk.experts import ExpertsContext
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128, QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from tests.kernels.triton.no_driver import FP8, watch_compiler

pytestmark = [pytest.mark.sm90, pytest.mark.slow]

HIDDEN, INNER, SLOTS, TOP_K = 512, 256, 256, 8
EMPTY = torch.empty


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Kernels with the keys under which Triton would compile them."""
    seen: set[tuple[str, str]] = set()

    def compiled(kernel: Any, key: str, *_: Any) -> None:
        seen.add((kernel.fn.__name__, key))

    watch_compiler(monkeypatch, compiled)
    return seen


def layer(**tuned: Any) -> Callable[[int], object]:
    from moe_mk.experts.triton.experts import TritonExperts
    from moe_mk.experts.triton.workspace import Workspace
    from moe_mk.kernels.triton.topk import grouped_topk

    def matrix(rows: int, columns: int) -> QuantTensor:
        scales = EMPTY((SLOTS, rows // 128, columns // 128))
        return QuantTensor(EMPTY((SLOTS, rows, columns), dtype=FP8), scales, FP8_128x128)

    context = ExpertsContext(BF16, FP8_1x128, "silu", SLOTS, HIDDEN, INNER, torch.device("cpu"))
    experts = TritonExperts(context, Workspace())
    if tuned:
        experts = experts.tuned_with(tuned)
    weights = ExpertWeights(matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER))
    load_E, physical_of_E = EMPTY(SLOTS, dtype=torch.int64), EMPTY(SLOTS, dtype=torch.int32)

    def forward(num_tokens: int) -> object:
        given = (EMPTY((num_tokens, SLOTS)), TOP_K, 8, 4, "sigmoid", EMPTY(SLOTS), True, 2.5, torch.float32)
        weights_TK, ids_TK, _ = grouped_topk(*given, (load_E, physical_of_E))
        x_TH = EMPTY((num_tokens, HIDDEN), dtype=torch.bfloat16)
        return experts.run(RowTokens(BF16.quantize(x_TH), ids_TK, weights_TK, SLOTS), weights)

    return forward


def test_every_number_of_tokens_up_to_512_meets_few_kernels(keys: set[tuple[str, str]]) -> None:
    forward = layer()
    for num_tokens in range(1, 513):
        forward(num_tokens)
    kernels = sorted(name for name, _ in keys)
    assert len(kernels) <= 13, kernels


def test_a_few_warm_up_calls_meet_all_of_them(keys: set[tuple[str, str]]) -> None:
    """The largest number that one program sorts, and the largest of each tile."""
    forward = layer()
    for num_tokens in (128, 256, 512):
        forward(num_tokens)
    warm = set(keys)
    for num_tokens in (*range(1, 24), 127, 129, 255, 257, 300, 511):
        forward(num_tokens)
    assert keys == warm
