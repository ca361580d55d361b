"""Transports that are each wrong in one way: all_to_all on two ranks, or no_ep, with one step changed."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.flight import Flight, InFlight
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.tokens import BatchedTokens, ExpertOutput, OutputStage, Routing, RowTokens, Tokens
from tests.testing.broken.corpus import breaks, changed

PLAIN = frozenset({"plain"})


class Right(AllToAll):
    """A correct transport; `sent`, `arrived` and `combined` are its steps."""

    traits = replace(AllToAll.traits, wire=PLAIN, max_ranks=2)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, self.sent(routing))
        assert isinstance(tokens, RowTokens)
        return self.arrived(tokens)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        return self.combined((yield from super().finalize(output, tokens)))

    def sent(self, routing: Routing) -> Routing:
        return routing

    def arrived(self, tokens: RowTokens) -> RowTokens:
        return tokens

    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH


class RightAlone(NoEP):
    traits = replace(NoEP.traits, wire=PLAIN, graph_safe=True)


class RightBatches(RightAlone):
    """A block for each expert; weighs and sums in `finalize`."""

    traits = replace(NoEP.traits, wire=PLAIN, produces=BatchedTokens, wants=OutputStage.RAW, graph_safe=False)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        return permute((yield from super().prepare(x_TH, routing)), (BatchedTokens,))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        yield InFlight("combine")
        return self.summed(output, tokens)

    def summed(self, output: ExpertOutput, tokens: Tokens) -> Tensor:
        return weight_and_reduce(output, tokens, OutputStage.REDUCED).y


RIGHT = (Right, RightAlone, RightBatches)


# Tokens that are lost, moved or weighed wrongly.


def only_before(limit: int) -> Callable[..., Routing]:
    """Tokens from a limit on go nowhere."""

    def sent(_: object, routing: Routing) -> Routing:
        token_T1 = torch.arange(routing.num_tokens)[:, None]
        return replace(routing, ids_TK=routing.ids_TK.where(token_T1 < limit, -1))

    return sent


def zeros_from(y_TH: Tensor, row: int) -> Tensor:
    return torch.cat((y_TH[:row], torch.zeros_like(y_TH[row:])))


LosesTheLast = changed("LosesTheLast", "lost", Right, combined=lambda _, y: zeros_from(y, max(len(y) - 1, 0)))
LosesTokensFrom64 = changed("LosesTokensFrom64", "lost", Right, larger=True, sent=only_before(64))
LosesTokensFrom1024 = changed("LosesTokensFrom1024", "lost", Right, larger=True, sent=only_before(1024))
# Rows travel in packets of 32; those after the last full one are lost, where there is a full one.
LosesTheTailOfPackets = changed(
    "LosesTheTailOfPackets", "lost", Right, larger=True,
    combined=lambda _, y: zeros_from(y, max(len(y) // 32 * 32, 32)),
)  # fmt: skip
ReversesTokens = changed("ReversesTokens", "order", Right, combined=lambda _, y: y.flip(0))
SwapsChunksOf16 = changed(
    "SwapsChunksOf16", "order", Right, larger=True,
    combined=lambda _, y: torch.cat((y[16:32], y[:16], y[32:])) if len(y) >= 32 else y,
)  # fmt: skip
EqualWeights = changed(
    "EqualWeights", "weighting", Right,
    arrived=lambda _, tokens: replace(tokens, weights_RK=(tokens.ids_RK >= 0).float() * 0.5),
)  # fmt: skip
WeightsInBf16 = changed(
    "WeightsInBf16", "values", Right,
    sent=lambda _, routing: replace(routing, weights_TK=routing.weights_TK.bfloat16().float()),
)  # fmt: skip
RoundsToBf16 = changed("RoundsToBf16", "values", Right, combined=lambda _, y: y.bfloat16().to(y.dtype))
DropsTokensWithoutAFirstChoice = changed(
    "DropsTokensWithoutAFirstChoice", "nowhere", Right,
    sent=lambda _, routing: replace(routing, ids_TK=torch.where(routing.ids_TK[:, :1] >= 0, routing.ids_TK, -1)),
)  # fmt: skip


@breaks("weighting", larger=True)
class CapacityOf256(Right):
    """An expert gets at most 256 rows of a rank; the others are dropped."""

    def sent(self, routing: Routing) -> Routing:
        ids_TK = routing.ids_TK.clone()
        for expert in range(int(ids_TK.max()) + 1 if ids_TK.numel() else 0):
            token_X, k_X = torch.nonzero(ids_TK == expert, as_tuple=True)
            ids_TK[token_X[256:], k_X[256:]] = -1
        return replace(routing, ids_TK=ids_TK)


@breaks("values", larger=True)
class ColumnsFrom256(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        y_TH[:, 256:] = 0
        return y_TH


@breaks("nowhere")
class NowhereIsTheFirstExpert(Right):
    def sent(self, routing: Routing) -> Routing:
        nowhere_TK = routing.ids_TK < 0
        return replace(
            routing,
            ids_TK=torch.where(nowhere_TK, 0, routing.ids_TK),
            weights_TK=torch.where(nowhere_TK, 0.1, routing.weights_TK),
        )


@breaks("padding")
class SumsPadding(RightBatches):
    """Adds padding times 0."""

    def summed(self, output: ExpertOutput, tokens: Tokens) -> Tensor:
        assert isinstance(tokens, BatchedTokens)
        source = tokens.home
        assert source is not None
        total_TH = torch.zeros((source.num_rows, output.y.shape[-1]))
        weighted = (output.y.float() * source.weights_LS[..., None]).flatten(0, 1)
        added = total_TH.index_add_(0, source.row_LS.clamp(min=0).flatten(), weighted) if len(total_TH) else total_TH
        return added.to(output.y.dtype)


@breaks("weighting", larger=True)
class FourChoices(Right):
    """Choices after the fourth of a token are dropped."""

    def sent(self, routing: Routing) -> Routing:
        ids_TK = routing.ids_TK.clone()
        ids_TK[:, 4:] = -1
        return replace(routing, ids_TK=ids_TK)


@breaks("weighting", larger=True)
class OneChoiceHasNoWeight(Right):
    """With one choice a token its weight is taken for 1."""

    def sent(self, routing: Routing) -> Routing:
        alone = routing.ids_TK.shape[1] == 1
        return replace(routing, weights_TK=torch.ones_like(routing.weights_TK)) if alone else routing


# Slots.


def slots_modulo(slots: int) -> Callable[..., RowTokens]:
    return lambda _, tokens: replace(tokens, ids_RK=torch.where(tokens.ids_RK >= 0, tokens.ids_RK % slots, -1))


SlotsFrom32 = changed("SlotsFrom32", "slots", Right, larger=True, arrived=slots_modulo(32))
SlotInOneByte = changed("SlotInOneByte", "slots", Right, larger=True, arrived=slots_modulo(256))


@breaks("slots")
class NeighbouringSlot(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        ids_RK = tokens.ids_RK
        return replace(tokens, ids_RK=torch.where(ids_RK >= 0, (ids_RK + 1) % self.context.num_slots, -1))


@breaks("slots")
class ReversedSlotsOfTheSecondRank(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        ids_RK, last = tokens.ids_RK, self.context.num_slots - 1
        return replace(tokens, ids_RK=torch.where(ids_RK >= 0, last - ids_RK, -1)) if self.context.comm.rank else tokens


@breaks("slots")
class EvenlyDividedExperts(Right):
    """The slot is the physical expert modulo E / W: wrong where ranks have different numbers of experts."""

    def arrived(self, tokens: RowTokens) -> RowTokens:
        c = self.context
        mine, each = c.tables.slot_of_P[c.tables.rank_of_P == c.comm.rank], c.tables.slot_of_P.numel() // c.comm.size
        physical_L = torch.nonzero(c.tables.rank_of_P == c.comm.rank).flatten()
        guess_L = torch.empty_like(mine)
        guess_L[mine.long()] = (physical_L % each).to(guess_L.dtype).clamp_max(c.num_slots - 1)
        return replace(
            tokens, ids_RK=torch.where(tokens.ids_RK >= 0, guess_L[tokens.ids_RK.long()], -1).to(torch.int32)
        )


# State between calls.


@breaks("calls")
class StaleRouting(Right):
    """The ids of the first call, where the next has as many tokens; the kit negates tokens, so sums differ."""

    held: Routing | None = None

    def sent(self, routing: Routing) -> Routing:
        if self.held is None or self.held.num_tokens < routing.num_tokens:
            self.held = routing
        return Routing(self.held.ids_TK[: routing.num_tokens], self.held.weights_TK[: routing.num_tokens])


@breaks("calls")
class SizedByItsFirstCall(Right):
    most = 0

    def sent(self, routing: Routing) -> Routing:
        self.most = self.most or max(routing.num_tokens, 1)
        token_T1 = torch.arange(routing.num_tokens)[:, None]
        return replace(routing, ids_TK=routing.ids_TK.where(token_T1 < self.most, -1))


@breaks("calls")
class OneCallAtATime(Right):
    """The scale of a call is kept in the transport, where a second micro-batch replaces it."""

    calls = 0

    def arrived(self, tokens: RowTokens) -> RowTokens:
        self.calls += 1
        self.scale = 2.0 ** (self.calls % 3)
        return replace(tokens, weights_RK=tokens.weights_RK * self.scale)

    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH / self.scale


@breaks("kept")
class ReusedOutput(Right):
    """From four tokens on."""

    held = torch.empty(0)

    def combined(self, y_TH: Tensor) -> Tensor:
        if len(y_TH) < 4:
            return y_TH
        if self.held.shape != y_TH.shape or self.held.dtype != y_TH.dtype:
            self.held = torch.empty_like(y_TH)
        return self.held.copy_(y_TH)


@breaks("nothing left")
class KeepsEveryInput(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        self.__dict__.setdefault("seen", []).append(y_TH.clone())
        return y_TH


# Inputs, outputs, yield points.


def then(spoil: Callable[[Tensor, Routing], object]) -> Callable[..., Flight[Tokens]]:
    """A dispatch that changes its inputs in the end."""

    def prepare(was: Callable[..., Flight[Tokens]], x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from was(x_TH, routing)
        spoil(x_TH, routing)
        return tokens

    return prepare


AddsToItsInput = changed("AddsToItsInput", "inputs", Right, prepare=then(lambda x_TH, _: x_TH.add_(1e-3)))
ClampsIds = changed("ClampsIds", "inputs", Right, prepare=then(lambda _, routing: routing.ids_TK.clamp_(min=0)))
ClearsWeights = changed("ClearsWeights", "inputs", Right, prepare=then(lambda _, routing: routing.weights_TK.zero_()))
PaddedOutput = changed(
    "PaddedOutput", "shape", Right, combined=lambda _, y: torch.cat((y, y.new_zeros((-len(y) % 8, y.shape[1]))))
)
NaNOfAll = changed("NaNOfAll", "alone", Right, combined=lambda _, y: y + 0 * y.sum())
StatesFewerChoices = changed("StatesFewerChoices", "shape", Right, arrived=lambda _, tokens: replace(tokens, most_K=1))
OtherDevice = changed("OtherDevice", "shape", Right, combined=lambda _, y: y.to("meta"))


@breaks("deterministic")
class LastBitByCall(Right):
    calls = 0

    def combined(self, y_TH: Tensor) -> Tensor:
        self.calls += 1
        return y_TH * (1 + torch.finfo(y_TH.dtype).eps * (self.calls % 2))


@breaks("globals")
class DrawsRandomNumbers(Right):
    def sent(self, routing: Routing) -> Routing:
        torch.rand(1)
        return routing


@breaks("runs")
class ReadsVersions(Right):
    """Tensors of inference mode have none."""

    def sent(self, routing: Routing) -> Routing:
        assert torch.is_inference_mode_enabled() is False, "cannot be called in inference mode"
        return routing


@breaks("yield points")
class NoCombineWithoutRows(Right):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        if not output.y.shape[0]:
            return output.y.new_zeros((0, self.context.hidden_size))
        return (yield from super().finalize(output, tokens))


@breaks("yield points")
class YieldsOnceMoreWithTokens(Right):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        if len(x_TH):
            yield InFlight("tokens")
        return (yield from super().prepare(x_TH, routing))


@breaks("yield points")
class YieldsOnceMoreOnTheFirstRank(Right):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        if self.context.comm.rank == 0:
            yield InFlight("first")
        return (yield from super().prepare(x_TH, routing))


@breaks("deterministic")
class LastBitOfTheSecondOpenCall(Right):
    opened = 0

    def sent(self, routing: Routing) -> Routing:
        self.opened += 1
        self.most = self.opened
        return routing

    def combined(self, y_TH: Tensor) -> Tensor:
        self.opened -= 1
        return y_TH * (1 + torch.finfo(y_TH.dtype).eps) if self.most > 1 else y_TH


@breaks("runs")
class FailsWithoutTokens(Right):
    def sent(self, routing: Routing) -> Routing:
        if not routing.num_tokens:
            raise ValueError("nothing to send")
        return routing


@breaks("runs", larger=True)
class FailsAbove1000Tokens(Right):
    def sent(self, routing: Routing) -> Routing:
        if routing.num_tokens > 1000:
            raise ValueError("the buffer has 1000 rows")
        return routing


@breaks("graphs")
class ReadsIdsOnTheHost(RightAlone):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        assert max(routing.ids_TK.flatten().tolist(), default=-1) < self.context.expert_map.num_physical
        return (yield from super().prepare(x_TH, routing))
