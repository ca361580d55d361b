"""torchtitan: grouped experts of a generator that does not train, by its override.

    OverrideConfig(imports=[("moe_mk.integrations.torchtitan.inference_experts", {"experts": "torch_cpu"})])

torchtitan routes, sorts rows by expert and puts them back; the rows of one rank are multiplied here. Its trainer needs
gradients and keeps its own experts. Run with torchtitan 0.3.0 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import override
from torchtitan.models.common.moe import GroupedExperts

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights, HeldExperts

PARAMETERS = ("w1_EFD", "w2_EDF", "w3_EFD")
"""Gate, down and up, by torchtitan's names and letters."""


class MoeMkGroupedExperts(GroupedExperts):  # type: ignore[misc]
    """Parameters as torchtitan names and shards them; rows by the backend that the oracle chooses."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        """Its sizes, and settings of MoEConfig.kernel by their bare key."""

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = dict(config.settings)

    def forward(self, x_NH: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert (N, H) to (N, H). Rows beyond the counts, which padding makes, are zero."""
        held = (getattr(self, name) for name in PARAMETERS)
        gate_EIH, down_EHI, up_EIH = (each.to_local() if hasattr(each, "to_local") else each for each in held)
        if torch.is_grad_enabled() and (x_NH.requires_grad or gate_EIH.requires_grad):
            raise UnsupportedError(
                "gradients through moe_mk in torchtitan", ["activate the override in the generator, not the trainer"]
            )

        def build() -> EngineExperts:
            weights = EngineWeights(torch.cat((gate_EIH.detach(), up_EIH.detach()), dim=1), down_EHI.detach())
            return EngineExperts("torchtitan", weights, top_k=1, settings=self.settings)

        # Not an attribute of nn.Module: converted weights are not part of its state.
        converted: HeldExperts = self.__dict__.setdefault("_moe_mk_held", HeldExperts())
        experts = converted.of((gate_EIH, down_EHI, up_EIH), build)
        ids_NK = expert_of_rows(counts_E, x_NH.shape[0])
        ones_NK = torch.ones(ids_NK.shape, dtype=torch.float32, device=x_NH.device)
        with torch.no_grad():
            y_NH: Tensor = experts(x_NH.to(down_EHI.dtype), ones_NK, ids_NK)
        return y_NH.to(x_NH.dtype)


@override(target=GroupedExperts.Config, description="moe_mk experts, inference only", exact=True)  # type: ignore[untyped-decorator]
def inference_experts(config: Any, **settings: Any) -> Any:
    """Replacement of torchtitan's grouped experts. settings: of MoEConfig.kernel by key."""
    kept = {one.name: getattr(config, one.name) for one in fields(config) if not one.name.startswith("_")}
    return MoeMkGroupedExperts.Config(**kept, settings=settings)


def expert_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """(N, 1) int32: the expert of each row, -1 for rows beyond the counts."""
    end_E = counts_E.cumsum(0)
    row_N = torch.arange(num_rows, dtype=end_E.dtype, device=end_E.device)
    expert_N = torch.searchsorted(end_E, row_N, right=True)
    return torch.where(expert_N < counts_E.shape[0], expert_N, -1).to(torch.int32)[:, None]
