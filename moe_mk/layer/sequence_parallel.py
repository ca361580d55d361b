"""A layer behind tensor-parallel attention, whose ranks all have the same tokens: each token is computed once."""

from __future__ import annotations

from torch import Tensor, nn

from moe_mk.comm.groups import Group, communicator
from moe_mk.flight import Flight
from moe_mk.layer.checks import check_hidden_states
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.runner.overlap import run_alone
from moe_mk.runner.sequence_parallel import sequence_parallel


class SequenceParallelMoE(nn.Module):
    """A layer on chunks of the tokens that the ranks of `group` have in common.

    Those ranks bring the same (T, H) and get the same (T, H); T may differ between groups and may be zero. The layer's
    own groups are not touched: its EP ranks usually are those of several such groups, with parallel.tokens = sharded.
    """

    def __init__(self, layer: MoELayer, group: Group | None) -> None:
        super().__init__()
        self.layer = layer
        self.comm = communicator(group, timeout_s=layer.config.kernel.timeout_s, layer=layer.name)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(T, H) to (T, H), the same on every rank of the group."""
        return run_alone(self.steps(hidden_states))

    def steps(self, x_TH: Tensor) -> Flight[Tensor]:
        """The forward as a flight."""
        layer, model, limits = self.layer, self.layer.config.model, self.layer.config.kernel
        most = limits.max_num_tokens * self.comm.size
        check_hidden_states(x_TH, layer.dtype, layer.device, model.hidden_size, most)
        return sequence_parallel(x_TH.contiguous(), self.comm, layer.steps)
