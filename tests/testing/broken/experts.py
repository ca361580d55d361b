"""Experts that are each wrong in one way: every class changes one step of correct ones."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_mk.experts.base import ExpertsContext
from moe_mk.oracle.expected_error import experts_error
from moe_mk.quant.plain import FP32
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import MAPPED, ExpertWeights, Weights
from moe_mk.weights.scan import Progress
from tests.testing.broken.corpus import breaks, changed
from tests.testing.broken.right_experts import Right, RightBatches, RightFp8, RightFp8Batches, RightMapped, RightRows

TILE = 32
RIGHT = (Right, RightRows, RightBatches, RightFp8, RightFp8Batches)


# Weights.


def rolled(matrices: tuple[Tensor, Tensor], halves: int) -> tuple[Tensor, Tensor]:
    """Gate and up exchanged, if `halves` is odd."""
    w13, w2 = matrices
    return w13.roll(len(w13) // 2 * halves, dims=0), w2


def of_scales(weight: QuantTensor, scales: Tensor) -> QuantTensor:
    assert weight.scales is not None
    return replace(weight, scales=scales.expand_as(weight.scales))


SwappedHalves = changed("SwappedHalves", "values", Right, matrices=lambda was, slot, w: rolled(was(slot, w), 1))
SwappedHalvesOfMappedWeights = changed(
    "SwappedHalvesOfMappedWeights", "values", RightMapped,
    matrices=lambda was, slot, w: rolled(was(slot, w), w.layout == MAPPED),
)  # fmt: skip
ScaleOfTheFirstExpert = changed(
    "ScaleOfTheFirstExpert", "values", RightFp8,
    matrices=lambda was, slot, w: was(slot, replace(w, w2=of_scales(w.w2, w.w2.scales[:1]))),
)  # fmt: skip
ScaleOfTheFirstColumnOfBlocks = changed(
    "ScaleOfTheFirstColumnOfBlocks", "values", RightFp8, decoded=lambda was, w: was(of_scales(w, w.scales[..., :1]))
)
# Right up to 256 rows of a matrix.
ScaleOfTheFirstTwoRowsOfBlocks = changed(
    "ScaleOfTheFirstTwoRowsOfBlocks", "values", RightFp8, larger=True,
    decoded=lambda was, w: was(of_scales(w, w.scales[..., torch.arange(w.scales.shape[-2]).clamp_max(1), :])),
)  # fmt: skip
# The slot in one byte: expert 256 gets the weights of expert 0.
EighthBitOfSlots = changed(
    "EighthBitOfSlots", "values", Right, larger=True, matrices=lambda was, slot, w: was(slot % 256, w)
)


# Rows of an expert, and tiles.


def scaled_from(row: int, factor: float) -> Callable[..., Tensor]:
    """A step whose rows are wrong from one on."""

    def step(was: Callable[..., Tensor], *given: object) -> Tensor:
        y_NH = was(*given)
        y_NH[row:] *= factor
        return y_NH

    return step


def in_16_bits(was: Callable[..., Tensor], x: QuantTensor) -> Tensor:
    """Row times hidden size in 16 bits, as 32 bits overflow at 65,536 times as many elements."""
    values = was(x)
    flat = torch.arange(len(values))[:, None] * values.shape[1] + torch.arange(values.shape[1])
    return values.flatten()[flat % 2**16]


WrongFromRow32 = changed("WrongFromRow32", "values", Right, larger=True, expert=scaled_from(32, 1.01))
WrongFromRow128 = changed("WrongFromRow128", "values", Right, larger=True, expert=scaled_from(128, 1.01))
WrongFromRow512 = changed("WrongFromRow512", "values", Right, larger=True, expert=scaled_from(512, 1.01))
# The rows after the last full tile are not computed, where there is a full one.
TailOfTiles = changed(
    "TailOfTiles", "values", Right, larger=True,
    expert=lambda was, x, *given: scaled_from(max(len(x) // TILE * TILE, TILE), 0.0)(was, x, *given),
)  # fmt: skip
OffsetsOf16Bits = changed("OffsetsOf16Bits", "values", Right, larger=True, rows=in_16_bits)
EndsAtTheFirstEmptyExpert = changed(
    "EndsAtTheFirstEmptyExpert", "values", Right,
    counts=lambda was, counts_L: list(takewhile(bool, was(counts_L))),
)  # fmt: skip


# Products.


def columns_up_to(full: Callable[[int], int]) -> Callable[..., Tensor]:
    """A product over the first columns only. full: how many, of K."""
    return lambda was, x, weight: was(x[:, : full(x.shape[1])], weight[:, : full(x.shape[1])])


def without_tail_of_n(was: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    y = was(x, weight)
    y[:, y.shape[1] // 16 * 16 :] = 0
    return y


# Columns after the last full block of 128.
TailOfK = changed("TailOfK", "values", Right, product=columns_up_to(lambda k: k // 128 * 128))
ThirdBlockOfK = changed("ThirdBlockOfK", "values", Right, larger=True, product=columns_up_to(lambda k: 256))
# Blocks of 64 are read in pairs; the last of an odd number of them is left out, from the third pair on.
OddBlockOfK = changed(
    "OddBlockOfK", "values", Right, larger=True, product=columns_up_to(lambda k: max(k // 128 * 128, 256))
)
# Columns of a product after the last full vector of 16.
TailOfN = changed("TailOfN", "values", Right, larger=True, product=without_tail_of_n)


@breaks("values")
class OneActivation(Right):
    traits = replace(Right.traits, activations=frozenset({"silu", "gelu"}))


# Twice the expected error: within the limit of a token, and not of all together.
AllRowsAHairTooLarge = changed(
    "AllRowsAHairTooLarge", "values", Right,
    finish=lambda was, y, tokens: was(y * (1 + 2.2 * experts_error(FP32, FP32, FP32, y.shape[1])), tokens),
)  # fmt: skip


@breaks("signature")
class ReadsNoWeights(Right):
    traits = replace(Right.traits, layouts=frozenset({"of its own"}))


TenthOfAPercentTooLarge = changed(
    "TenthOfAPercentTooLarge", "values", Right, finish=lambda was, y, tokens: was(y * 1.001, tokens)
)


@breaks("invariant")
class OrderOfSumsByBatch(Right):
    """One product for one row, a sum of two for several."""

    traits = replace(Right.traits, batch_invariant=True)

    def sorted_rows(self, x_NH: Tensor, counts: list[int], weights: Weights) -> Tensor:
        self.parts = 1 if len(x_NH) <= 3 else 2
        return super().sorted_rows(x_NH, counts, weights)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.zeros((len(x), len(weight)))
        for row in range(len(x)):  # so that a product itself does not depend on the number of rows
            for some, part in zip(x[row].chunk(self.parts), weight.chunk(self.parts, dim=1), strict=True):
                y[row] += (some * part).sum(dim=1)
        return y


@breaks("invariant")
class OrderOfSumsByBatchOfRows(Right):
    """The same in the second of its layouts alone."""

    traits = replace(
        Right.traits, batch_invariant=True, emits={GroupedTokens: OutputStage.RAW, RowTokens: OutputStage.REDUCED}
    )

    def reduced_rows(self, tokens: RowTokens, weights: Weights) -> Tensor:
        y_RH = super().reduced_rows(tokens, weights)
        return y_RH if len(y_RH) <= 3 else y_RH * (1 + 1e-7)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = [(weight * row).sum(dim=1) for row in x]  # of one row at a time: independent of their number
        return torch.stack(rows) if rows else x.new_zeros((0, len(weight)))


NaNOfAll = changed("NaNOfAll", "alone", Right, sorted_rows=lambda was, *given: (y := was(*given)) + 0 * y.sum())


@breaks("globals")
class DrawsRandomNumbers(Right):
    def rows(self, x: QuantTensor) -> Tensor:
        torch.rand(1)
        return super().rows(x)


# Padding and ids of -1.


def by_largest_value(was: Callable[..., Tensor], x: QuantTensor) -> Tensor:
    """Scales a block by its largest value and back."""
    values = was(x)
    largest = values.abs().amax(dim=(1, 2), keepdim=True)
    return values * largest / largest


def by_largest_scale(was: Callable[..., Tensor], x: QuantTensor) -> Tensor:
    largest = 1.0 if x.scales is None else x.scales.float().amax(dim=(1, 2), keepdim=True)
    return was(x) * largest / largest


SumsPadding = changed("SumsPadding", "padding", RightBatches, rows=lambda was, x: (y := was(x)) + 0 * y.sum())
RangeOfPaddedBlock = changed("RangeOfPaddedBlock", "padding", RightBatches, rows=by_largest_value)
RangeOfPaddedScales = changed("RangeOfPaddedScales", "padding", RightFp8Batches, rows=by_largest_scale)
CountsOfTheNextBlock = changed(
    "CountsOfTheNextBlock", "values", RightBatches, counts=lambda was, counts_L: was(counts_L.roll(1))
)


@breaks("nowhere", larger=True)
class NowhereEndsTheRow(RightRows):
    """Ids after the first -1 are ignored."""

    def choices(self, tokens: RowTokens) -> tuple[Tensor, Tensor]:
        open_RK = (tokens.ids_RK >= 0).int().cumprod(dim=1).bool()
        return torch.where(open_RK, tokens.ids_RK, -1), tokens.weights_RK


@breaks("nowhere")
class NowhereIsTheLastExpert(RightRows):
    """An id of -1 reads the last expert, and gets what is left to a sum of 2."""

    def choices(self, tokens: RowTokens) -> tuple[Tensor, Tensor]:
        nowhere_RK = tokens.ids_RK < 0
        rest_R1 = 2 - tokens.weights_RK.sum(dim=1, keepdim=True)
        weights_RK = torch.where(nowhere_RK, rest_R1, tokens.weights_RK)
        return torch.where(nowhere_RK, tokens.num_slots - 1, tokens.ids_RK), weights_RK


@breaks("values", larger=True)
class OneChoiceHasNoWeight(RightRows):
    """With one choice a token its weight is taken for 1."""

    def choices(self, tokens: RowTokens) -> tuple[Tensor, Tensor]:
        alone = tokens.ids_RK.shape[1] == 1
        return tokens.ids_RK, torch.ones_like(tokens.weights_RK) if alone else tokens.weights_RK


@breaks("padding", larger=True)
class TakesRowsForAdjacent(RightRows):
    """Reads memory from the first row on, whatever the stride."""

    def rows(self, x: QuantTensor) -> Tensor:
        values = x.values
        return values.as_strided(values.shape, (values.shape[1], 1)) if len(values) else values


@breaks("values", larger=True)
class DividesByTheLargest(Right):
    """Rows are scaled by their largest value and back, which rows of zeros have not."""

    def rows(self, x: QuantTensor) -> Tensor:
        values = super().rows(x)
        zero_N1 = (values == 0).all(dim=1, keepdim=True) & (len(values) > 16)
        return torch.where(zero_N1, torch.nan, values)


@breaks("values", larger=True)
class ActivationOfASmallRange(Right):
    """silu from a table of [-12, 12]."""

    def expert(self, x_NH: Tensor, slot: int, weights: Weights) -> Tensor:
        w13, w2 = self.matrices(slot, weights)
        gate, up = self.product(x_NH, w13).chunk(2, dim=1)
        return self.product(silu(gate.clamp(-12, 12)) * up, w2)


# State between calls.


@breaks("calls")
class StaleCounts(Right):
    held: list[int] | None = None

    def counts(self, counts_L: Tensor) -> list[int]:
        self.held = self.held or super().counts(counts_L)
        return self.held


@breaks("calls")
class WrongTheSecondTime(Right):
    """Doubles what it returned in the call before."""

    held = torch.empty(0)

    def finish(self, y: Tensor, tokens: Tokens) -> ExpertOutput:
        again = y.numel() and self.held.shape == y.shape and torch.equal(self.held, y)
        self.held = y
        return super().finish(y * 2 if again else y, tokens)


@breaks("calls")
class SizedByItsFirstCall(Right):
    """Raises IndexError when a call is larger."""

    buffer: Tensor | None = None

    def rows(self, x: QuantTensor) -> Tensor:
        values = super().rows(x)
        if self.buffer is None:
            self.buffer = torch.empty_like(values)
        for row in range(len(values)):
            self.buffer[row] = values[row]
        return self.buffer[: len(values)]


@breaks("calls")
class WrongAfterManyRows(Right):
    """A call with less than half of the rows of the largest one before reads the wrong expert."""

    most, wrong = 0, False

    def counts(self, counts_L: Tensor) -> list[int]:
        total = int(counts_L.sum())
        self.wrong, self.most = total < self.most // 2, max(self.most, total)
        return super().counts(counts_L)

    def matrices(self, slot: int, weights: Weights) -> tuple[Tensor, Tensor]:
        return super().matrices(0 if self.wrong else slot, weights)


@breaks("calls")
class FirstWeightsForever(Right):
    held: Weights | None = None

    def matrices(self, slot: int, weights: Weights) -> tuple[Tensor, Tensor]:
        self.held = self.held or weights
        return super().matrices(slot, self.held)


@breaks("calls")
class RelayoutByShape(Right):
    """Converted weights are cached by their shape."""

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        self.cache: dict[torch.Size, Weights] = {}

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        assert isinstance(weights, ExpertWeights)
        return self.cache.setdefault(weights.w13.shape, weights)


@breaks("calls")
class NewestWeights(Right):
    """Converts each set of weights once, and multiplies by the one that was converted last."""

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        self.known: list[Weights] = []

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        if all(each is not weights for each in self.known):
            self.known.append(weights)
        return weights

    def matrices(self, slot: int, weights: Weights) -> tuple[Tensor, Tensor]:
        return super().matrices(slot, self.known[-1])


@breaks("kept")
class ReusedOutput(Right):
    held = torch.empty(0)

    def finish(self, y: Tensor, tokens: Tokens) -> ExpertOutput:
        if self.held.shape != y.shape:
            self.held = torch.empty_like(y)
        return super().finish(self.held.copy_(y), tokens)


@breaks("nothing left")
class KeepsEveryInput(Right):
    def rows(self, x: QuantTensor) -> Tensor:
        self.__dict__.setdefault("seen", []).append(super().rows(x).clone())
        return super().rows(x)


# Inputs.


@breaks("inputs")
class WeightsInPlace(Right):
    """Swaps the halves of the weights that it was given, and reads them accordingly."""

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        assert isinstance(weights, ExpertWeights)
        weights.w2.values.mul_(0.5)
        return replace(weights, w2=replace(weights.w2, values=weights.w2.values * 2))


@breaks("inputs")
class WeightsInPlaceOfACall(Right):
    """Moves one weight of experts without rows by its last bit in each call, which changes no output of that call."""

    def sorted_rows(self, x_NH: Tensor, counts: list[int], weights: Weights) -> Tensor:
        assert isinstance(weights, ExpertWeights)
        one_X = weights.w2.values[:, 0, 0]
        one_X[torch.tensor(counts) == 0] += 2**-20
        return super().sorted_rows(x_NH, counts, weights)


@breaks("inputs")
class ClearsCounts(Right):
    def counts(self, counts_L: Tensor) -> list[int]:
        counts = super().counts(counts_L)
        counts_L.zero_()
        return counts


@breaks("inputs")
class NormalisesWeights(RightRows):
    def choices(self, tokens: RowTokens) -> tuple[Tensor, Tensor]:
        before = tokens.weights_RK.clone()
        tokens.weights_RK.div_(tokens.weights_RK.sum(dim=1, keepdim=True).clamp_min(1e-9))
        return tokens.ids_RK, before


OutputInPlaceOfRows = changed(
    "OutputInPlaceOfRows", "inputs", Right, finish=lambda was, y, tokens: was(tokens.x_NH.values.copy_(y), tokens)
)


# Outputs.

OutputInF64 = changed("OutputInF64", "shape", Right, finish=lambda was, y, tokens: was(y.double(), tokens))
OutputElsewhere = changed("OutputElsewhere", "shape", Right, finish=lambda was, y, tokens: was(y.to("meta"), tokens))
PaddedOutput = changed(
    "PaddedOutput", "shape", Right,
    finish=lambda was, y, tokens: was(torch.cat((y, y.new_zeros((-len(y) % 8, y.shape[1])))), tokens),
)  # fmt: skip
ClaimsToWeigh = changed(
    "ClaimsToWeigh", "stage", Right, finish=lambda was, y, tokens: ExpertOutput(y, OutputStage.WEIGHTED)
)


@breaks("deterministic")
class LastBitByCall(Right):
    calls = 0

    def finish(self, y: Tensor, tokens: Tokens) -> ExpertOutput:
        self.calls += 1
        return super().finish(y * (1 + 1e-7 * (self.calls % 2)), tokens)


@breaks("runs")
class FailsWithoutRows(Right):
    def rows(self, x: QuantTensor) -> Tensor:
        values = super().rows(x)
        assert values.abs().max() >= 0  # of nothing: raises
        return values


@breaks("graphs")
class ReadsCountsOnTheHost(Right):
    traits = replace(Right.traits, graph_safe=True)

    def counts(self, counts_L: Tensor) -> list[int]:
        return [int(count) for count in counts_L.tolist()]


@breaks("graphs")
class SizesByValues(RightRows):
    """torch.nonzero: the size of its output is known on the host only."""

    traits = replace(RightRows.traits, graph_safe=True)

    def reduced_rows(self, tokens: RowTokens, weights: Weights) -> Tensor:
        x_RH, y_RH = self.rows(tokens.x_RH), torch.zeros(tokens.x_RH.shape)
        for slot in range(tokens.num_slots):
            row_N, k_N = torch.nonzero(tokens.ids_RK == slot, as_tuple=True)
            y_NH = self.expert(x_RH[row_N], slot, weights) * tokens.weights_RK[row_N, k_N][:, None]
            y_RH.index_add_(0, row_N, y_NH)
        return y_RH
