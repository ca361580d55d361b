"""One layer with two pairs of backends, chosen per batch: low latency for few tokens, high throughput for many.

    moe = DecodePrefillMoE(layer, decode={"prepare_finalize": "deepep_ll"}, prefill={"prepare_finalize": "deepep_ht"})
    y_TH = moe(x_TH, most_tokens=128)

Source of the rule: DeepEP, low-latency kernels for decoding and normal kernels for prefill. Here the number of tokens
decides, at the crossover of the modelled costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from moe_mk.comm.collective import collective
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.layer.serving_state import ServingState
from moe_mk.oracle import select
from moe_mk.oracle.verdict import Decision


class DecodePrefillMoE(nn.Module):
    """A loaded layer whose transport, experts or both depend on the number of tokens.

    Both pairs are built at once; they share one copy of the weights where their experts backend is the same. After a
    rebalance or a reload of the layer they are built again before the next batch.
    """

    def __init__(
        self,
        layer: MoELayer,
        *,
        decode: Mapping[str, object],
        prefill: Mapping[str, object],
        crossover: int | None = None,
    ) -> None:
        """decode, prefill: settings of the kernel section, by name.

        crossover: number of tokens from which prefill's pair is used; None: the smallest at which it costs less in the
        model of the oracle. Equal on all ranks. Raises ConfigError, UnsupportedError with every reason, WeightError for
        a layer without weights.
        """
        super().__init__()
        self.layer, self._settings = layer, {"decode": dict(decode), "prefill": dict(prefill)}
        _ = layer.weights  # raises WeightError
        self._states: dict[str, ServingState] = {}
        self._now, self._serving = "decode", layer.state
        self._build()
        self.crossover = self._modelled() if crossover is None else crossover
        if self.crossover < 1:
            raise ConfigError(f"crossover={crossover} tokens; use 1 for prefill's pair at any size")

    def kind_of(self, most_tokens: int) -> str:
        """The pair for a batch, "decode" or "prefill"."""
        return "prefill" if most_tokens >= self.crossover else "decode"

    def explain(self) -> str:
        """Return both pairs as text, with the numbers of tokens for which each is used."""
        most = self.layer.config.kernel.max_num_tokens
        names = {kind: self._decision(kind).chosen.name for kind in self._settings}
        if self.crossover == 1:
            return f"any number of tokens: {names['prefill']}"
        if self.crossover > most:
            return f"any number of tokens up to {most}: {names['decode']}"
        return f"up to {self.crossover - 1} tokens: {names['decode']}; from {self.crossover}: {names['prefill']}"

    def forward(self, hidden_states: Tensor, most_tokens: int | None = None) -> Tensor:
        """(T, H) to (T, H). most_tokens: the most tokens that any rank has in this batch, equal on all ranks.

        None is allowed for one rank. Raises ConfigError where it is missing or fewer than T.
        """
        self._choose(hidden_states, most_tokens)
        y_TH: Tensor = self.layer(hidden_states)
        return y_TH

    def steps(self, x_TH: Tensor, most_tokens: int | None = None) -> Flight[Tensor]:
        self._choose(x_TH, most_tokens)
        return self.layer.steps(x_TH)

    def _choose(self, x_TH: Tensor, most_tokens: int | None) -> None:
        tokens, ranks = x_TH.shape[0], self.layer.ep.size
        if most_tokens is None and ranks > 1:
            raise ConfigError(f"{ranks} ranks choose alike only by most_tokens, the largest number of tokens of a rank")
        if most_tokens is not None and most_tokens < tokens:
            raise ConfigError(f"most_tokens={most_tokens} is fewer than the {tokens} tokens of this rank")
        self._use(self.kind_of(tokens if most_tokens is None else most_tokens))

    def _use(self, kind: str) -> None:
        if self.layer.state is not self._serving:
            self._build()
        if kind != self._now:
            self._states[self._now] = self.layer.live.flip(self._states[kind])
            self._now, self._serving = kind, self.layer.state

    @collective(lambda moe: moe.layer.state.experts.grid)
    def _build(self) -> None:
        layer = self.layer
        staged = {kind: layer.live.stage(layer.expert_map, settings=chosen) for kind, chosen in self._settings.items()}
        first, second = staged["decode"], staged["prefill"]
        decisions = [state.experts.decision for state in (first, second)]
        is_shared = len({(each.chosen.experts, each.compute, each.effect) for each in decisions}) == 1
        if first.weights is not None and is_shared:  # the same backend with the same settings reads them as they are
            staged["prefill"] = second.sharing(first)
        layer.live.flip(first)
        self._states, self._now, self._serving = staged, "decode", layer.state

    def _decision(self, kind: str) -> Decision:
        if kind == self._now:
            return self.layer.decision
        return self._states[kind].experts.decision

    def _modelled(self) -> int:
        """The smallest number of tokens from which prefill's pair costs less; more than the limit where it never does.

        The difference of two costs that are sums of constants and multiples of tokens changes its sign once.
        """
        low, high = 1, self.layer.config.kernel.max_num_tokens + 1
        while low < high:
            middle = (low + high) // 2
            costs = [self._cost_us(self._decision(kind), middle) for kind in ("decode", "prefill")]
            low, high = (low, middle) if costs[1] < costs[0] else (middle + 1, high)
        return low

    @staticmethod
    def _cost_us(decision: Decision, tokens: int) -> float:
        chosen, problem = decision.chosen, decision.problem
        config = problem.config.with_(prepare_finalize=chosen.prepare_finalize, experts=chosen.experts)
        cost = select(replace(problem, config=config, num_tokens=tokens)).chosen.cost_us
        assert cost is not None
        return cost
