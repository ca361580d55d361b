"""What a layer must look like in a checkpoint: its sizes and formats, and from them every tensor it must have."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from moe_mk.errors import ConfigError
from moe_mk.quant import Fp8Block, Plain, QuantScheme
from moe_mk.weights.names import Convention, Part, Role

ORDERS = ("gate_up", "up_gate")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerSpec:
    """Sizes and formats of one MoE layer.

    shared_intermediate_size: of all shared experts together, which checkpoints store as one MLP.
    gate_up_order: which half comes first where gate and up lie in one tensor; the other order is turned round at load.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    scheme: QuantScheme
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    has_gate_bias: bool = False
    gate_up_order: str = "gate_up"

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("num_experts", "hidden_size", "intermediate_size")
            if getattr(self, name) < 1
        ]
        if (self.num_shared_experts > 0) != (self.shared_intermediate_size > 0):
            wrong.append(
                f"num_shared_experts={self.num_shared_experts} and shared_intermediate_size="
                f"{self.shared_intermediate_size} must both be zero or both be positive"
            )
        if self.gate_up_order not in ORDERS:
            wrong.append(f"gate_up_order={self.gate_up_order!r} must be one of {', '.join(ORDERS)}")
        if not isinstance(self.scheme, Plain | Fp8Block):
            wrong.append(
                f"scheme {self.scheme.name!r} cannot be read from a checkpoint; use a plain dtype or fp8 blocks"
            )
        if wrong:
            raise ConfigError("; ".join(wrong))

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) under one scale; None for plain weights."""
        return self.scheme.block

    def slice_of(self, width: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """(start, length) of a tensor-parallel rank's share of an intermediate width.

        Raises ConfigError, with the sizes that are possible, if the share is no whole number or cuts a block.
        """
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tp_rank={tp_rank} is not in 0..{tp_size - 1} (tp_size={tp_size})")
        if tp_size > 1 and tp_size not in (legal := self.legal_tp_sizes()):
            block = "" if self.block is None else f" at the edges of {self.block[0]}x{self.block[1]} blocks"
            widths = " and ".join(
                str(w) for w in dict.fromkeys((self.intermediate_size, self.shared_intermediate_size)) if w
            )
            raise ConfigError(
                f"tp_size={tp_size} cannot cut the intermediate size {widths}{block}; "
                f"possible: {', '.join(map(str, legal))}"
            )
        return tp_rank * (width // tp_size), width // tp_size

    def legal_tp_sizes(self) -> list[int]:
        """The tensor-parallel sizes that cut routed and shared experts into equal shares, at block edges."""
        common = gcd(self.intermediate_size, self.shared_intermediate_size)
        return [n for n in range(1, common + 1) if n == 1 or (common % n == 0 and self._cuts_at_edges(n))]

    def _cuts_at_edges(self, tp_size: int) -> bool:
        widths = [width for width in (self.intermediate_size, self.shared_intermediate_size) if width]
        return all((width // tp_size) % side == 0 for width in widths for side in self.block or (1,))


@dataclass(frozen=True)
class Expected:
    """What one tensor must be."""

    part: Part
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def expected_tensors(spec: LayerSpec, convention: Convention) -> dict[str, Expected]:
    """Every tensor that the layer has in a convention, by local name."""
    router = [Expected(Part(Role.ROUTER), (spec.num_experts, spec.hidden_size), FLOATS)]
    if spec.has_gate_bias:
        router.append(Expected(Part(Role.BIAS), (spec.num_experts,), FLOATS))
    experts = (
        _fused(spec) if convention.fused else [e for i in range(spec.num_experts) for e in _mlp(spec, Role.EXPERT, i)]
    )
    shared = _mlp(spec, Role.SHARED, None) if spec.num_shared_experts else []
    return {convention.spell(each.part): each for each in (*router, *experts, *shared)}


def _mlp(spec: LayerSpec, role: Role, expert: int | None) -> list[Expected]:
    width, hidden = (spec.intermediate_size if role is Role.EXPERT else spec.shared_intermediate_size), spec.hidden_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return [
        each
        for p, (rows, columns) in shapes.items()
        for each in _matrix(spec, Part(role, p, expert), (), rows, columns)
    ]


def _fused(spec: LayerSpec) -> list[Expected]:
    width, hidden, stack = spec.intermediate_size, spec.hidden_size, (spec.num_experts,)
    gate_up = _matrix(spec, Part(Role.EXPERT, "gate_up"), stack, 2 * width, hidden)
    return gate_up + _matrix(spec, Part(Role.EXPERT, "down"), stack, hidden, width)


def _matrix(spec: LayerSpec, part: Part, stack: tuple[int, ...], rows: int, columns: int) -> list[Expected]:
    if isinstance(spec.scheme, Plain):
        return [Expected(part, (*stack, rows, columns), (spec.scheme.dtype,))]
    assert isinstance(spec.scheme, Fp8Block)
    scale = Part(part.role, part.projection, part.expert, is_scale=True)
    scales = (*stack, *spec.scheme.scale_shape(rows, columns))
    return [Expected(part, (*stack, rows, columns), (torch.float8_e4m3fn,)), Expected(scale, scales, SCALE_DTYPES)]
