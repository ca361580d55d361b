"""The input of the oracle as plain data, and the reasons against backends.

A Problem reads nothing from the machine: a laptop can plan for 18 nodes of H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_mk.comm.destinations import expected_groups
from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, expect_kind
from moe_mk.quant.plain import FP16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme


@dataclass(frozen=True)
class Reason:
    """Why a backend is not eligible. code: stable, for tests. fix: the setting or command that removes the reason."""

    code: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text} [{self.fix}]" if self.fix else self.text


class Installed(frozenset[str]):
    """Names of optional libraries of this machine, with the reasons against those that are there and do not work."""

    against: Mapping[str, str]

    def __new__(cls, names: Iterable[str], against: Mapping[str, str]) -> Installed:
        """against: by name of a library."""
        found = super().__new__(cls, names)
        found.against = against
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Installed, (tuple(self), self.against)


@dataclass(frozen=True)
class Problem:
    """One layer on one fabric, for batches of up to `num_tokens` tokens a rank."""

    config: MoEConfig
    device: DeviceProfile
    dtype: Plain
    """The layer's dtype: of inputs and outputs, and of plain experts."""
    num_tokens: int
    installed: frozenset[str] = frozenset()
    """Optional libraries that are installed, by module name."""
    emulated: frozenset[str] = frozenset()
    """Libraries that have an emulation; used only with kernel.allow_emulated."""
    token_size: int = 0
    """Width of the layer's inputs and outputs; 0: hidden_size of the config. In the config of a problem hidden_size is
    the width of the rows that are sent and that experts read, which latent projections make smaller."""

    def __post_init__(self) -> None:
        expect_kind("config", self.config, MoEConfig)
        expect_kind("device", self.device, DeviceProfile)
        expect_kind("dtype", self.dtype, Plain)
        expect_kind("num_tokens", self.num_tokens, int)
        expect_kind("installed", self.installed, frozenset)
        expect_kind("emulated", self.emulated, frozenset)
        expect_kind("token_size", self.token_size, int)
        model = self.config.model
        if not self.token_size:
            object.__setattr__(self, "token_size", model.hidden_size)
        if model.latent_size is not None:
            inner = model.model_copy(update={"hidden_size": model.latent_size, "latent_size": None})
            object.__setattr__(self, "config", self.config.model_copy(update={"model": inner}))
        if self.num_tokens < 1:
            raise ConfigError(f"num_tokens={self.num_tokens} must be at least 1")
        if self.num_tokens > self.config.kernel.max_num_tokens:
            raise ConfigError(
                f"num_tokens={self.num_tokens} exceeds kernel.max_num_tokens={self.config.kernel.max_num_tokens}; "
                "raise the limit or plan for smaller batches"
            )

    @property
    def sums(self) -> Plain:
        """Dtype in which experts compute and rows are summed and returned: f32 where an unweighted row may overflow."""
        return FP32 if self.dtype == FP16 else self.dtype

    @property
    def ranks(self) -> int:
        """W, the ranks that share out the experts."""
        return self.config.parallel.ep

    @property
    def nodes(self) -> int:
        """Nodes over which the EP ranks of one TP slice are spread."""
        return -(-self.ranks * self.config.parallel.tp // self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one host: parallel.ranks_per_node, else the value of the device profile."""
        return self.config.parallel.ranks_per_node or self.device.ranks_per_node

    @property
    def ep_ranks_per_node(self) -> int:
        """EP ranks of one host, which TP ranks share."""
        return max(self.ranks_per_node // self.config.parallel.tp, 1)

    @property
    def weights(self) -> QuantScheme:
        """The scheme of the stored experts."""
        return self.config.model.quant.weight_scheme

    @property
    def activations(self) -> QuantScheme | None:
        """The activation scheme that the checkpoint defines, or the settings instead of it; or None."""
        quant, wish = self.config.model.quant, self.config.kernel.activations
        return quant.rounded_to("int8") if wish == "int8" else quant.activation_scheme

    @property
    def slots(self) -> int:
        """L, physical experts on the rank with the most."""
        placement = self.config.parallel.placement
        physical = self.config.model.num_experts if isinstance(placement, str) else len(placement)
        return -(-physical // self.ranks)

    @property
    def intermediate(self) -> int:
        """I, the TP shard of the intermediate size."""
        return self.config.model.moe_intermediate_size // self.config.parallel.tp

    @property
    def all_tokens(self) -> int:
        """Distinct tokens of all EP ranks in one call."""
        return self.num_tokens * (1 if self.config.parallel.tokens == "replicated" else self.ranks)

    @property
    def rows_an_expert(self) -> float:
        """Mean rows of an expert in one call, under uniform routing."""
        return self.all_tokens * self.config.router.top_k / (self.ranks * self.slots)

    @property
    def ranks_per_token(self) -> float:
        """Expected distinct ranks that one token is sent to, its own included: `comm.destinations`."""
        return self._visited(self.ranks)

    @property
    def nodes_per_token(self) -> float:
        """Expected distinct nodes that one token is sent to, its own included, limited by the router's groups."""
        return self._visited(min(self.nodes, self.ranks))

    def _visited(self, groups: int) -> float:
        """Under uniform routing. Only a linear placement keeps the router's groups on one node or rank."""
        router, parallel, num_experts = self.config.router, self.config.parallel, self.config.model.num_experts
        if parallel.placement != "linear" or router.hash_vocabulary is not None:
            return expected_groups(num_experts, router.top_k, groups)
        return expected_groups(
            num_experts, router.top_k, groups, expert_groups=router.num_expert_group, kept=router.topk_group
        )

    @property
    def as_sent(self) -> Problem:
        """The problem as transports see it: with kernel.invariant each assignment is a token with one expert."""
        config = self.config
        if not config.kernel.invariant:
            return self
        top_k, kernel = config.router.top_k, config.kernel
        limits = {"max_num_tokens": top_k * kernel.max_num_tokens}
        if kernel.relay_tokens is not None:
            limits["relay_tokens"] = top_k * kernel.relay_tokens
        parts = {
            "router": config.router.model_copy(update={"top_k": 1}), "kernel": kernel.model_copy(update=limits),
        }  # fmt: skip
        return replace(self, config=config.model_copy(update=parts), num_tokens=top_k * self.num_tokens)

    def as_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "device": self.device.model_dump(mode="json"),
            "dtype": self.dtype.name,
            "num_tokens": self.num_tokens,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "installed": sorted(self.installed),
            "emulated": sorted(self.emulated),
        }
