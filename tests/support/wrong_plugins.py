"""Plugins that each break one law of the contract."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.flight import Flight
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.tokens import BatchedTokens, ExpertOutput, OutputStage, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import Weights

PLAIN = frozenset({"plain"})


class Transport(AllToAll):
    traits = replace(AllToAll.traits, wire=PLAIN, max_ranks=2)


class Experts(ReferenceExperts):
    traits = replace(
        ReferenceExperts.traits,
        weights=PLAIN,
        computes=("plain",),
        dtypes=frozenset({"fp32"}),
        activations=frozenset({"silu"}),
        biases=False,
    )


class WrongSignature(Transport):
    def prepare(self, hidden_states: Tensor, routing: Routing, extra: int = 0) -> Flight[Tokens]:  # type: ignore[override]
        return super().prepare(hidden_states, routing)


class WeighsTwice(Transport):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        return (yield from super().finalize(replace(output, y=output.y * 0.5), tokens))


class MutatesInputs(Transport):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        x_TH.add_(1e-3)
        return tokens


class ReadsPadding(Experts):
    def _batched(self, tokens: BatchedTokens, weights: Weights) -> Tensor:
        return super()._batched(tokens, weights) + 0 * tokens.x_LSH.dequantize(torch.float32).sum()


class IgnoresNowhere(Experts):
    """Takes an id of -1 for expert 0, and a weight of 0 for a small one."""

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if isinstance(tokens, RowTokens):
            tokens = replace(tokens, ids_RK=tokens.ids_RK.clamp_min(0), weights_RK=tokens.weights_RK.clamp_min(0.1))
        return super().run(tokens, weights)


class NotDeterministic(Experts):
    calls = 0

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        self.calls += 1
        return replace(output, y=output.y * (1.0 + 1e-7 * (self.calls % 2)))


class WrongOrderHome(Transport):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        return (yield from super().finalize(output, tokens)).flip(0)


class SkipsHopsWhenIdle(Transport):
    """An idle rank does not take part in the combine: the others would wait for it."""

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        if not output.y.shape[0]:
            return torch.zeros((0, self.context.hidden_size), dtype=output.y.dtype, device=output.y.device)
        return (yield from super().finalize(output, tokens))


class WrongDtype(Experts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, y=output.y.double())


class WrongShape(Experts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, y=output.y[..., :-1]) if output.stage is OutputStage.RAW else output


class LosesTheLast(Transport):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        y_TH = yield from super().finalize(output, tokens)
        return torch.cat((y_TH[:-1], torch.zeros_like(y_TH[-1:])))


class LiesAboutItsStage(Experts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, stage=OutputStage.WEIGHTED) if output.stage is OutputStage.RAW else output


class TooLarge(Experts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, y=output.y * 1.001)


class Crashes(Experts):
    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        raise IndexError("no such tile")


# What shows only in cases with many tokens or experts.


class WrongFromRow32(Experts):
    """Of an expert, in batches."""

    row = 32

    def _batched(self, tokens: BatchedTokens, weights: Weights) -> Tensor:
        y_LSH = super()._batched(tokens, weights)
        y_LSH[:, self.row :] *= 1.01
        return y_LSH


class WrongFromRow128(WrongFromRow32):
    row = 128


class LosesTokensFrom64(Transport):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        token_T1 = torch.arange(len(x_TH))[:, None]
        return (yield from super().prepare(x_TH, replace(routing, ids_TK=routing.ids_TK.where(token_T1 < 64, -1))))


class WrongFromSlot32(Transport):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        assert isinstance(tokens, RowTokens)
        return replace(tokens, ids_RK=torch.where(tokens.ids_RK >= 0, tokens.ids_RK % 32, -1))


# What shows only from call to call, or beside something that differs.


class WrongSlot(Transport):
    """Every row goes to the expert beside its own; identity experts answer alike."""

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        assert isinstance(tokens, RowTokens)
        shifted_RK = (tokens.ids_RK + 1) % self.context.num_slots
        return replace(tokens, ids_RK=torch.where(tokens.ids_RK >= 0, shifted_RK, -1))


class SizedByItsFirstCall(Transport):
    most = 0

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        self.most = self.most or max(len(x_TH), 1)
        token_T1 = torch.arange(len(x_TH))[:, None]
        return (
            yield from super().prepare(x_TH, replace(routing, ids_TK=routing.ids_TK.where(token_T1 < self.most, -1)))
        )


class LeavesTokensBehind(Transport):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        self.__dict__.setdefault("seen", []).append(x_TH.clone())
        return (yield from super().prepare(x_TH, routing))


class TakesNowhereForFirst(Transport):
    """And writes it down where the engine reads it."""

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        tokens = yield from super().prepare(x_TH, routing)
        routing.ids_TK.clamp_(min=0)
        return tokens


class GivesUpWhenIdle(Transport):
    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        if not len(x_TH):
            raise ValueError("nothing to send")
        return (yield from super().prepare(x_TH, routing))


class OtherDevice(Transport):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        return (yield from super().finalize(output, tokens)).to("meta")


class RoundsWhatItCombines(Transport):
    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        rounded = output.y.to(torch.bfloat16).to(output.y.dtype)
        return (yield from super().finalize(replace(output, y=rounded), tokens))


class RemembersWeights(Experts):
    held: Weights | None = None

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        self.held = self.held or weights
        return super().run(tokens, self.held)


class HandsOutItsBuffer(Experts):
    held = torch.empty(0)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        if self.held.shape != output.y.shape:
            self.held = torch.empty_like(output.y)
        return replace(output, y=self.held.copy_(output.y))


class InvariantByName(Experts):
    traits = replace(Experts.traits, batch_invariant=True)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        output = super().run(tokens, weights)
        return replace(output, y=output.y * (1.0 + 1e-7 * (len(output.y) > 1)))


class KnowsSiluOnly(Experts):
    traits = replace(Experts.traits, activations=frozenset({"silu", "gelu"}))

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(replace(context, activation="silu"))
