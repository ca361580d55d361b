"""Correct experts of small steps, which those of the corpus change one at a time."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_mk.experts.base import ExpertsTraits, FusedExperts
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import CANONICAL, MAPPED, Weights


class Right(FusedExperts):
    """A correct backend: f32, rows sorted by expert."""

    traits = ExpertsTraits(
        summary="a correct backend of small steps",
        kinds=frozenset({"cpu"}),
        emits={GroupedTokens: OutputStage.RAW},
        weights=frozenset({"plain"}),
        computes=("plain",),
        layouts=frozenset({CANONICAL}),
        activations=frozenset({"silu"}),
        dtypes=frozenset({"fp32"}),
        graph_safe=False,
        deterministic=True,
    )

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if isinstance(tokens, GroupedTokens):
            x_NH = self.rows(tokens.x_NH)
            return self.finish(self.sorted_rows(x_NH, self.counts(tokens.counts_L), weights), tokens)
        if isinstance(tokens, RowTokens):
            return ExpertOutput(self.reduced_rows(tokens, weights), OutputStage.REDUCED)
        x_LSH, y_LSH = self.rows(tokens.x_LSH), torch.zeros(tokens.x_LSH.shape)
        for slot, count in enumerate(self.counts(tokens.counts_L)):
            y_LSH[slot, :count] = self.expert(x_LSH[slot, :count], slot, weights)
        return self.finish(y_LSH, tokens)

    def sorted_rows(self, x_NH: Tensor, counts: list[int], weights: Weights) -> Tensor:
        y_NH, start = torch.zeros_like(x_NH), 0
        for slot, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                y_NH[part] = self.expert(x_NH[part], slot, weights)
            start += count
        return y_NH

    def reduced_rows(self, tokens: RowTokens, weights: Weights) -> Tensor:
        x_RH, (ids_RK, weights_RK) = self.rows(tokens.x_RH), self.choices(tokens)
        y_RH = torch.zeros_like(x_RH)
        for row, (ids, each) in enumerate(zip(ids_RK.tolist(), weights_RK.tolist(), strict=True)):
            for slot, weight in zip(ids, each, strict=True):
                if slot >= 0:
                    y_RH[row] += weight * self.expert(x_RH[row : row + 1], slot, weights)[0]
        return y_RH

    def rows(self, x: QuantTensor) -> Tensor:
        return x.dequantize(torch.float32)

    def choices(self, tokens: RowTokens) -> tuple[Tensor, Tensor]:
        return tokens.ids_RK, tokens.weights_RK

    def counts(self, counts_L: Tensor) -> list[int]:
        return [int(count) for count in counts_L]

    def expert(self, x_NH: Tensor, slot: int, weights: Weights) -> Tensor:
        w13, w2 = self.matrices(slot, weights)
        gate, up = self.product(x_NH, w13).chunk(2, dim=1)
        return self.product(silu(gate) * up, w2)

    def matrices(self, slot: int, weights: Weights) -> tuple[Tensor, Tensor]:
        one = weights.slot(slot)
        assert one.gate_IH is not None
        return torch.cat((self.decoded(one.gate_IH), self.decoded(one.up_IH))), self.decoded(one.down_HI)

    def decoded(self, weight: QuantTensor) -> Tensor:
        return weight.dequantize(torch.float32)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def finish(self, y: Tensor, tokens: Tokens) -> ExpertOutput:
        return ExpertOutput(y, OutputStage.RAW)


class RightRows(Right):
    traits = replace(Right.traits, emits={RowTokens: OutputStage.REDUCED})


class RightBatches(Right):
    traits = replace(Right.traits, emits={BatchedTokens: OutputStage.RAW})


class RightFp8(Right):
    traits = replace(Right.traits, weights=frozenset({"fp8_block"}))


class RightFp8Batches(RightBatches):
    traits = replace(RightBatches.traits, weights=frozenset({"fp8_block"}), computes=("fp8",))


class RightMapped(Right):
    traits = replace(Right.traits, layouts=frozenset({CANONICAL, MAPPED}))
