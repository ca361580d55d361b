"""Verification of layers that choose experts by token id: the table by hand, no ties, ids that must be there."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk import ConfigError, MoEConfig, ShapeError
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.verify import Answer, verify
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.layer import DeepseekV3MoE
from moe_mk.weights import LayerWeights, SafetensorsSource, load_layer
from tests.verify.test_dense import hand_layer

VOCABULARY = 9
SHAPE = CheckpointShape(
    num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, num_groups=1, top_k_groups=1, quant="bf16",
    hash_vocabulary=VOCABULARY,
)  # fmt: skip


def with_table(rows: list[list[int]]) -> tuple[MoEConfig, LayerWeights]:
    config, weights = hand_layer(scoring_func="sqrtsoftplus")
    return config, replace(weights, table_XK=torch.tensor(rows))


def test_the_table_chooses_and_the_scores_weigh_by_hand() -> None:
    # Logits 0 1 2 3; token 1 goes to experts 0 and 2 although 3 and 2 score best: (1 a + 3 b) / (a + b) * h.
    config, weights = with_table([[3, 2], [0, 2]])
    x_TH = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    result = dense_layer(x_TH, config, weights, token_ids_T=torch.tensor([1, 0]))
    score = [math.sqrt(math.log1p(math.exp(logit))) for logit in range(4)]
    h = 2 / (1 + math.exp(-1))
    assert result.ids_TK.tolist() == [[0, 2], [3, 2]]
    first = (1 * score[0] + 3 * score[2]) / (score[0] + score[2]) * h
    second = (4 * score[3] + 3 * score[2]) / (score[3] + score[2]) * h
    assert result.y_TH[:, 0].tolist() == pytest.approx([first, second], rel=1e-6)
    # Tokens of images, from 2 on, are chosen for by their scores and a bias of their own.
    config, weights = config.with_(first_image_token=2), replace(weights, image_bias_E=torch.tensor([9.0, 8.0, 0, 0]))
    assert dense_layer(x_TH, config, weights, token_ids_T=torch.tensor([1, 2])).ids_TK.tolist() == [[0, 2], [0, 1]]


def test_an_expert_of_minus_one_adds_nothing_and_no_tokens_need_no_ids() -> None:
    config, weights = with_table([[3, -1]])
    one = dense_layer(torch.tensor([[1.0, 2.0]]), config, weights, token_ids_T=torch.tensor([0]))
    assert one.ids_TK.tolist() == [[3, -1]]
    assert float(one.y_TH[0, 0]) == pytest.approx(4 * 2 / (1 + math.exp(-1)), rel=1e-6)
    none = dense_layer(torch.zeros(0, 2), config, weights, token_ids_T=torch.zeros(0, dtype=torch.int64))
    assert none.y_TH.shape == (0, 2) and none.ids_TK.shape == (0, 2)


@pytest.mark.parametrize("ids,error,complaint", [
    (None, ShapeError, r"verified with token_ids_T, one id of each of its 1 tokens; got none"),
    (torch.tensor([0, 1]), ShapeError, r"its 1 tokens; got \[2\]"),
    (torch.tensor([2]), ConfigError, r"token_ids_T holds \[2\], the table of experts has tokens \[0, 2\)"),
    (torch.tensor([-1]), ConfigError, r"token_ids_T holds \[-1\]"),
])  # fmt: skip
def test_ids_that_are_missing_or_do_not_fit_are_refused(
    ids: torch.Tensor | None, error: type[Exception], complaint: str
) -> None:
    config, weights = with_table([[3, 2], [0, 2]])
    with pytest.raises(error, match=complaint):
        dense_layer(torch.tensor([[1.0, 2.0]]), config, weights, token_ids_T=ids)


def answered(folder: Path, seed: int = 0) -> tuple[Answer, DeepseekV3MoE, LayerWeights]:
    write_checkpoint(folder, SHAPE, seed=1)
    layer = DeepseekV3MoE.from_checkpoint(folder, 3, experts="reference")
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(20, 64, generator=draw).bfloat16()
    ids_T = torch.randint(VOCABULARY, (20,), generator=draw)
    whole = load_layer(SafetensorsSource(folder), 3, layer.spec, owned=range(8))
    return Answer(x_TH, layer(x_TH, ids_T), layer.route(x_TH, ids_T).ids_TK, ids_T), layer, whole


def test_a_layer_from_a_checkpoint_passes_and_one_that_was_reported_other_ids_does_not(tmp_path: Path) -> None:
    answer, layer, whole = answered(tmp_path)
    judged = verify(answer, layer.decision, whole)
    assert judged.passed and (judged.routing_equal, judged.routing_ties) == (20, 0)
    assert answer.token_ids_T is not None
    other = answer._replace(token_ids_T=(answer.token_ids_T + 1) % VOCABULARY)
    assert not verify(other, layer.decision, whole).passed
    with pytest.raises(ShapeError, match="token_ids_T"):
        verify(answer._replace(token_ids_T=None), layer.decision, whole)


def test_a_table_leaves_no_ties(tmp_path: Path) -> None:
    # All scores are equal, so that any choice would be a tie of scores; the table has stated otherwise.
    answer, layer, whole = answered(tmp_path)
    whole.gate_EH.zero_()
    layer.take(whole)
    y_TH = layer(answer.x_TH, answer.token_ids_T)
    wrong_TK = (answer.ids_TK + 1) % 8
    judged = verify(answer._replace(y_TH=y_TH, ids_TK=wrong_TK), layer.decision, whole)
    assert judged.routing_ties == 0 and not judged.passed
    assert verify(answer._replace(y_TH=y_TH), layer.decision, whole).passed
