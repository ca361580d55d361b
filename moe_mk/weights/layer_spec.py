"""The specification of a layer in a checkpoint: sizes and formats, and the list of required tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from moe_mk.errors import ConfigError
from moe_mk.quant import WHOLE, BlockedScheme, Plain, QuantScheme
from moe_mk.quant.gguf import Gguf
from moe_mk.quant.grouped import GROUPS, Grouped
from moe_mk.quant.kinds import edges_of, legal_tp_sizes
from moe_mk.weights.names import Convention, Part, Role
from moe_mk.weights.packed_layouts import FLOATS, INTEGERS, WORD, is_of_mlx, packed_shapes

ORDERS = ("gate_up", "up_gate", "interleaved")
"""interleaved: rows of gate and up alternate."""
MOST_EXPERTS = 2**16
"""Upper limit of the number of experts in a header: every expert is looked up by name."""
VALUE_DTYPES = {
    torch.float8_e4m3fn: (torch.float8_e4m3fn,),
    torch.int8: (torch.int8,),
    torch.uint8: (torch.uint8, torch.int8),
}
"""Dtypes of the values of a scheme in files; four-bit values are stored two per byte."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Parts of a layer in addition to the matrices of its experts."""

    has_gate_bias: bool = False
    has_logit_bias: bool = False
    has_expert_bias: bool = False
    gptq_v2: bool = False
    """Whether zero points of GPTQ are stored as they are, not less one."""
    gated: bool = True
    """Whether experts have gate projections, routed and shared ones alike."""
    has_shared_gate: bool = False
    """Whether the shared experts have a gate of one logit a token."""
    latent_size: int | None = None
    """The width that routed experts read and write; None: hidden_size."""
    has_latent_norm: bool = False
    """Whether outputs of experts are normalised in latent_size."""
    has_input_norm: bool = False
    """Whether the layer's input is normalised, with weights for the experts and for the router."""
    has_expert_scale: bool = False
    """Whether each expert has a factor of its routing weights."""
    has_image_bias: bool = False
    """Whether tokens of images have a bias of their own."""
    num_zero_experts: int = 0
    """Experts without weights that the router scores behind the others."""
    num_fused_shared_experts: int = 0
    """How many of the experts, the last ones, every token has: the bias for selection may lack them."""
    stacks_transposed: bool = False
    """Whether tensors that hold all experts are (experts, in, out), and scales of blocks likewise."""
    table: tuple[int, int] | None = None
    """(tokens of the vocabulary, experts a token) of a layer that chooses by token id."""

    @property
    def features(self) -> dict[str, Any]:
        """Return the features of a derived class, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Features)}


@dataclass(frozen=True)
class LayerSpec(Features):
    """Sizes and formats of one MoE layer.

    shared_intermediate_size: the total of all shared experts, which checkpoints store as one MLP.
    gate_up_order: the order of gate and up if one tensor holds both; other orders are converted at load.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    scheme: QuantScheme
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    gate_up_order: str = "gate_up"
    down_scheme: QuantScheme | None = None
    """The scheme of down projections; None: `scheme`."""
    shared_scheme: QuantScheme | None = None
    """The scheme of shared experts; None: those of the routed ones."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("num_experts", "hidden_size", "intermediate_size")
            if getattr(self, name) < 1
        ]
        if self.num_experts > MOST_EXPERTS:
            wrong.append(f"num_experts={self.num_experts} exceeds {MOST_EXPERTS}")
        if (self.num_shared_experts > 0) != (self.shared_intermediate_size > 0):
            wrong.append(
                f"num_shared_experts={self.num_shared_experts} and shared_intermediate_size="
                f"{self.shared_intermediate_size} must both be zero or both be positive"
            )
        if self.has_latent_norm and self.latent_size is None:
            wrong.append("a norm of the outputs (model.latent_norm) needs their width (model.latent_size)")
        if self.gate_up_order not in ORDERS:
            wrong.append(f"gate_up_order={self.gate_up_order!r} must be one of {', '.join(ORDERS)}")
        if not isinstance(self.scheme, Plain | BlockedScheme | Gguf):
            wrong.append(
                f"scheme {self.scheme.name!r} cannot be read from a checkpoint; use a plain dtype or one with blocks"
            )
        if wrong:
            raise ConfigError("; ".join(wrong))

    @property
    def expert_size(self) -> int:
        """The width that routed experts read and write."""
        return self.latent_size or self.hidden_size

    @property
    def wide(self) -> tuple[str, ...]:
        """The projections to the intermediate size, in order."""
        return ("gate", "up") if self.gated else ("up",)

    def scheme_of(self, role: Role, projection: str) -> QuantScheme:
        """The scheme of a projection of routed or shared experts."""
        if role is Role.SHARED and self.shared_scheme is not None:
            return self.shared_scheme
        return self.scheme if projection != "down" or self.down_scheme is None else self.down_scheme

    @property
    def edges(self) -> tuple[int, int]:
        """(rows, columns): where a weight may be cut, see `edges_of`."""
        roles = (Role.EXPERT, Role.SHARED) if self.num_shared_experts else (Role.EXPERT,)
        return edges_of(*([self.scheme_of(role, projection) for role in roles] for projection in ("up", "down")))

    def slice_of(self, width: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """(start, length) of a tensor-parallel rank's share of an intermediate width.

        Raises ConfigError with the possible sizes if the share is not an integer or splits a block.
        """
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tp_rank={tp_rank} is not in 0..{tp_size - 1} (tp_size={tp_size})")
        widths, (rows, columns) = (self.intermediate_size, self.shared_intermediate_size), self.edges
        if tp_size > 1 and tp_size not in (legal := legal_tp_sizes(widths, (rows, columns))):
            block = "" if (rows, columns) == (1, 1) else f" at the edges of {rows}x{columns} blocks"
            raise ConfigError(
                f"tp_size={tp_size} cannot cut the intermediate size "
                f"{' and '.join(str(width) for width in dict.fromkeys(widths) if width)}{block}; "
                f"possible: {', '.join(map(str, legal))}"
            )
        return tp_rank * (width // tp_size), width // tp_size


@dataclass(frozen=True)
class Expected:
    """The requirements of one tensor."""

    part: Part
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    also: tuple[tuple[int, ...], ...] = ()
    """Equivalent shapes."""
    optional: bool = False
    """Whether the tensor may be missing."""


def expected_tensors(spec: LayerSpec, convention: Convention) -> dict[str, Expected]:
    """Every tensor that the layer has in a convention, by local name."""
    scored, hidden, latent = spec.num_experts + spec.num_zero_experts, spec.hidden_size, spec.latent_size or 0
    router = [
        Expected(part, shape, INTEGERS if part.role is Role.TABLE else FLOATS, also, optional)
        for wanted, part, shape, also, optional in (
            (True, Part(Role.ROUTER), (scored, hidden), (), False),
            (spec.has_gate_bias, Part(Role.BIAS), (scored - spec.num_fused_shared_experts,), ((scored,),), False),
            (spec.has_image_bias, Part(Role.IMAGE_BIAS), (scored,), (), False),
            # A table leaves a bias for text without effect.
            (spec.has_image_bias and spec.table, Part(Role.BIAS), (scored,), (), True),
            (spec.has_logit_bias and convention.logit_bias, Part(Role.LOGIT_BIAS), (scored,), (), False),
            (spec.table, Part(Role.TABLE), spec.table or (), (), False),
            (spec.has_shared_gate, Part(Role.SHARED_GATE), (1, hidden), ((hidden,),), False),
            (latent, Part(Role.LATENT, "down"), (latent, hidden), (), False),
            (latent, Part(Role.LATENT, "up"), (hidden, latent), (), False),
            (spec.has_latent_norm, Part(Role.LATENT, "norm"), (latent,), (), False),
            *(
                (spec.has_input_norm, Part(Role.INPUT_NORM, which), (hidden,), (), False)
                for which in convention.input_norm
            ),
            (spec.has_expert_scale, Part(Role.EXPERT_SCALE), (spec.num_experts,), ((1,), ()), False),
        )
        if wanted
    ]
    if convention.packing == "mlx":
        router = [other for each in router for other in _as_mlx_may_pack(each)]
    of = _Matrices(spec, convention)
    experts = (
        of.fused()
        if convention.fused
        else of.mlp(Role.EXPERT, None)
        if convention.stacked
        else [e for i in range(spec.num_experts) for e in of.mlp(Role.EXPERT, i)]
    )
    if not (convention.fused or convention.stacked):  # transformers writes tensors of experts that have no weights
        experts += [replace(e, optional=True) for i in range(spec.num_experts, scored) for e in of.mlp(Role.EXPERT, i)]
    shared = of.mlp(Role.SHARED, None) if spec.num_shared_experts else []
    return {convention.spell(each.part): each for each in (*router, *experts, *shared)}


def _as_mlx_may_pack(each: Expected) -> list[Expected]:
    """A gate, plain or in affine integers of 4 or 8 bits."""
    if each.part.role not in (Role.ROUTER, Role.SHARED_GATE):
        return [each]
    rows, columns = each.shape
    words = tuple((rows, columns * bits // WORD) for bits in (4, 8))
    shape, *others = ((rows, columns // group) for group in GROUPS[:3])
    parts = (replace(each.part, extra=extra) for extra in ("scale", "zeros"))
    scales = [Expected(part, shape, FLOATS, tuple(others), optional=True) for part in parts]
    return [replace(each, dtypes=(*each.dtypes, torch.uint32), also=(*each.also, *words)), *scales]


def unnamed_parts(spec: LayerSpec, convention: Convention) -> list[str]:
    """Parts of the layer for which the convention defines no name, so that they cannot be found."""
    scheme = spec.scheme
    above = scheme.has_global_scale and not convention.packing
    shared = spec.scheme_of(Role.SHARED, "up")
    above_shared = spec.num_shared_experts > 0 and shared.has_global_scale
    routed = scheme, spec.scheme_of(Role.EXPERT, "down")
    of_mlx = all(isinstance(each, Plain) or is_of_mlx(each) for each in (*routed, shared))
    affine = any(isinstance(each, Grouped) and each.has_biases for each in (*routed, shared))
    if not of_mlx if convention.packing == "mlx" else affine:
        return [f"{convention.name} names hold no {' and '.join(dict.fromkeys(s.name for s in (*routed, shared)))}"]
    packed = scheme.family in ("wna16", "gguf") or convention.packing == "mlx"
    if not convention.packing and (which := next((s for s in (scheme, shared) if s.family in ("wna16", "gguf")), None)):
        return [f"{convention.name} names hold no packed {which.name}; those of compressed-tensors, GPTQ, AWQ, GGUF do"]
    if convention.packing and not (packed or convention.packing == "gguf"):
        return [f"{convention.name} names hold packed integers, and the layer is to have {scheme.name} experts"]
    asked = {
        f"global scales of {scheme.name}": above and not convention.holds(Role.EXPERT, "global"),
        "global scales of shared experts": above_shared and not convention.holds(Role.SHARED, "global"),
        "biases of experts (model.expert_bias)": spec.has_expert_bias and not convention.holds(Role.EXPERT, "bias"),
        "a bias of the logits (router.has_logit_bias)": spec.has_logit_bias and not convention.logit_bias,
        "experts without a gate (model.gated=False)": not spec.gated and convention.fused,
        "values of which two share a byte, in transposed stacks": spec.stacks_transposed
        and (convention.fused or convention.stacked)
        and not convention.packing
        and scheme.per_byte > 1,
    }
    return [f"{convention.name} names have none for {what}" for what, wanting in asked.items() if wanting]


@dataclass(frozen=True)
class _Matrices:
    spec: LayerSpec
    convention: Convention

    def mlp(self, role: Role, expert: int | None) -> list[Expected]:
        spec = self.spec
        width = spec.intermediate_size if role is Role.EXPERT else spec.shared_intermediate_size
        hidden = spec.expert_size if role is Role.EXPERT else spec.hidden_size
        shapes = {**dict.fromkeys(spec.wide, (width, hidden)), "down": (hidden, width)}
        stack = (spec.num_experts,) if role is Role.EXPERT and expert is None else ()
        return [each for p, (n, k) in shapes.items() for each in self.matrix(Part(role, p, expert), stack, n, k)]

    def fused(self) -> list[Expected]:
        spec, stack = self.spec, (self.spec.num_experts,)
        gate_up = self.matrix(Part(Role.EXPERT, "gate_up"), stack, 2 * spec.intermediate_size, spec.expert_size)
        return gate_up + self.matrix(Part(Role.EXPERT, "down"), stack, spec.expert_size, spec.intermediate_size)

    def matrix(self, part: Part, stack: tuple[int, ...], rows: int, columns: int) -> list[Expected]:
        scheme = self.spec.scheme_of(part.role, part.projection)
        if self.convention.packing:
            return [*self._packed(scheme, part, stack, rows, columns), *self._bias(part, stack, rows)]
        if isinstance(scheme, Plain):
            part = replace(part, extra="plain") if self.convention.holds(part.role, "plain") else part
            sides = (columns, rows) if self.spec.stacks_transposed and stack else (rows, columns)
            dtypes = tuple(dict.fromkeys((scheme.dtype, *FLOATS)))  # others are converted
            return [Expected(part, (*stack, *sides), dtypes), *self._bias(part, stack, rows)]
        assert isinstance(scheme, BlockedScheme)
        n, k = scheme.value_shape(rows, columns)
        group = scheme.held_columns(scheme.columns)
        apart = ((*stack, n, k // group, group),) if self.convention.blocks_apart and k % group == 0 else ()
        whole = scheme.per_byte == 1 and self.convention.holds(part.role, "plain")
        named = replace(part, extra="plain") if whole else part
        sides = (k, n) if self.spec.stacks_transposed and stack else (n, k)
        values = Expected(named, (*stack, *sides), VALUE_DTYPES[scheme.element.dtype], apart)
        return [values, *self._scales(scheme, part, stack, rows, columns), *self._bias(part, stack, rows)]

    def _packed(
        self, scheme: QuantScheme, part: Part, stack: tuple[int, ...], rows: int, columns: int
    ) -> list[Expected]:
        """The tensors of a packed matrix, or one plain tensor."""
        if isinstance(scheme, Plain) and self.convention.packing != "gguf":
            part = replace(part, extra="plain") if self.convention.holds(part.role, "plain") else part
            return [Expected(part, (*stack, rows, columns), FLOATS)]
        of_file = self.convention.packing == "gguf"
        decoded = part.role is Role.SHARED or (of_file and isinstance(scheme, Plain | Grouped))
        shapes = packed_shapes(self.convention.packing, scheme, rows, columns, any_type=decoded)
        whole = {extra: [(*stack, *shape) for shape in (held.shape, *held.also)] for extra, held in shapes.items()}
        return [
            Expected(replace(part, extra=extra), whole[extra][0], held.dtypes, tuple(whole[extra][1:]), held.optional)
            for extra, held in shapes.items()
        ]

    def _scales(
        self, scheme: BlockedScheme, part: Part, stack: tuple[int, ...], rows: int, columns: int
    ) -> list[Expected]:
        tall, wide = scheme.scale_shape(rows, columns)
        if part.projection == "gate_up" and scheme.rows != WHOLE:  # gate and up each begin a block
            tall = 2 * scheme.scale_shape(rows // 2, columns)[0]
        shorter = ((*stack, tall), stack) if tall == wide == 1 else ((*stack, tall),) if wide == 1 else ()
        shape: tuple[int, ...] = (*stack, tall, wide)
        if stack and self.spec.stacks_transposed:  # of one tensor, of the outputs on either axis, or of blocks
            turned = (*stack, wide, tall)
            of_rows = (shape, (turned, *shorter)) if part.projection == "down" else (turned, (shape, *shorter))
            if scheme.columns != WHOLE:
                of_rows = turned, ()
            shape, shorter = ((), ((1,), stack, shape)) if scheme.rows == WHOLE else of_rows
        tensors_of_part = [Expected(replace(part, extra="scale"), shape, scheme.stored_scale_dtypes, shorter)]
        if scheme.has_global_scale:
            tensors_of_part.append(self._scalar(part, stack, "global", optional=False))
        if self.convention.holds(part.role, "input"):
            tensors_of_part.append(self._scalar(part, stack, "input", optional=True))
        return tensors_of_part

    def _bias(self, part: Part, stack: tuple[int, ...], rows: int) -> list[Expected]:
        if not self.spec.has_expert_bias or not self.convention.holds(part.role, "bias"):
            return []
        return [Expected(replace(part, extra="bias"), (*stack, rows), FLOATS)]

    def _scalar(self, part: Part, stack: tuple[int, ...], extra: str, *, optional: bool) -> Expected:
        shape = () if self.spec.stacks_transposed else stack
        of_stack = (stack, (*stack, 1), (*stack, 1, 1)) if stack else ()
        also = (*of_stack, (), (1,), (1, 1))
        return Expected(replace(part, extra=extra), shape, FLOATS[::-1], also, optional)
