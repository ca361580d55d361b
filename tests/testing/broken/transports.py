"""Transports that are each wrong in one way: all_to_all on two ranks, or no_ep, with one step changed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.no_ep import NoEP
from moe_mk.tokens import ExpertOutput, Routing, RowTokens, Tokens
from tests.testing.broken.corpus import breaks

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
    """A correct transport of one rank."""

    traits = replace(NoEP.traits, wire=PLAIN, graph_safe=True)


RIGHT = (Right, RightAlone)


# Tokens that are lost, moved or weighed wrongly.


@breaks("lost")
class LosesTheLast(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return torch.cat((y_TH[:-1], torch.zeros_like(y_TH[-1:])))


@breaks("lost", larger=True)
class LosesTokensFrom64(Right):
    limit = 64

    def sent(self, routing: Routing) -> Routing:
        token_T1 = torch.arange(routing.num_tokens)[:, None]
        return replace(routing, ids_TK=routing.ids_TK.where(token_T1 < self.limit, -1))


@breaks("lost", larger=True)
class LosesTokensFrom256(LosesTokensFrom64):
    limit = 256


@breaks("lost", larger=True)
class LosesTokensFrom1024(LosesTokensFrom64):
    limit = 1024


@breaks("lost", larger=True)
class LosesTheTailOfPackets(Right):
    """Rows travel in packets of 32; those after the last full one are lost, where there is a full one."""

    def combined(self, y_TH: Tensor) -> Tensor:
        full = max(len(y_TH) // 32 * 32, 32)
        return torch.cat((y_TH[:full], torch.zeros_like(y_TH[full:])))


@breaks("order")
class ReversesTokens(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH.flip(0)


@breaks("order", larger=True)
class SwapsChunksOf16(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return torch.cat((y_TH[16:32], y_TH[:16], y_TH[32:])) if len(y_TH) >= 32 else y_TH


@breaks("weighting")
class CountsOneChoiceTwice(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        weights_RK = tokens.weights_RK.clone()
        weights_RK[:, 0] *= 2
        return replace(tokens, weights_RK=weights_RK)


@breaks("weighting")
class EqualWeights(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        return replace(tokens, weights_RK=(tokens.ids_RK >= 0).float() * 0.5)


@breaks("weighting")
class DropsTheLastChoice(Right):
    def sent(self, routing: Routing) -> Routing:
        ids_TK = routing.ids_TK.clone()
        ids_TK[:, -1] = -1
        return replace(routing, ids_TK=ids_TK)


@breaks("weighting", larger=True)
class CapacityOf256(Right):
    """An expert gets at most 256 rows of a rank; the others are dropped."""

    def sent(self, routing: Routing) -> Routing:
        ids_TK = routing.ids_TK.clone()
        for expert in range(int(ids_TK.max()) + 1 if ids_TK.numel() else 0):
            token_X, k_X = torch.nonzero(ids_TK == expert, as_tuple=True)
            ids_TK[token_X[256:], k_X[256:]] = -1
        return replace(routing, ids_TK=ids_TK)


@breaks("values")
class WeightsInBf16(Right):
    def sent(self, routing: Routing) -> Routing:
        return replace(routing, weights_TK=routing.weights_TK.bfloat16().float())


@breaks("values")
class RoundsToBf16(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH.bfloat16().to(y_TH.dtype)


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


@breaks("nowhere")
class DropsTokensWithoutAFirstChoice(Right):
    def sent(self, routing: Routing) -> Routing:
        return replace(routing, ids_TK=torch.where(routing.ids_TK[:, :1] >= 0, routing.ids_TK, -1))


# Slots.


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


@breaks("slots", larger=True)
class SlotsFrom32(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        return replace(tokens, ids_RK=torch.where(tokens.ids_RK >= 0, tokens.ids_RK % 32, -1))


@breaks("slots", larger=True)
class SlotInOneByte(Right):
    def arrived(self, tokens: RowTokens) -> RowTokens:
        return replace(tokens, ids_RK=torch.where(tokens.ids_RK >= 0, tokens.ids_RK % 256, -1))


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
class AddsTheCallBefore(Right):
    held = torch.empty(0)

    def combined(self, y_TH: Tensor) -> Tensor:
        total_TH = y_TH + self.held if self.held.shape == y_TH.shape else y_TH
        self.held = y_TH
        return total_TH.clone()


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


@breaks("inputs")
class AddsToItsInput(Right):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        x_TH.add_(1e-3)
        return tokens


@breaks("inputs")
class ClampsIds(Right):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        routing.ids_TK.clamp_(min=0)
        return tokens


@breaks("inputs")
class ClearsWeights(Right):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        routing.weights_TK.zero_()
        return tokens


@breaks("shape")
class OutputInF64(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH.double()


@breaks("shape")
class PaddedOutput(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return torch.cat((y_TH, y_TH.new_zeros((-len(y_TH) % 8, y_TH.shape[1]))))


@breaks("shape")
class OtherDevice(Right):
    def combined(self, y_TH: Tensor) -> Tensor:
        return y_TH.to("meta")


@breaks("deterministic")
class LastBitByCall(Right):
    calls = 0

    def combined(self, y_TH: Tensor) -> Tensor:
        self.calls += 1
        return y_TH * (1 + torch.finfo(y_TH.dtype).eps * (self.calls % 2))


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
