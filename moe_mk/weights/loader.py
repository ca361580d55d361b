"""Load one layer tensor by tensor, in any order, as engines iterate over the shards of a checkpoint.

A tensor is checked when it is fed. Only this rank's share of it is copied to host memory, so that the caller may free
or overwrite it at once. The layer is changed by `finish()` alone: a loader that is dropped before leaves it as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, Suppress, WeightError, expect_kind
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect_dense
from moe_mk.weights.checkpoint import expect_order
from moe_mk.weights.completeness import name_problems, raise_if, some, transposed, wrong_dtype, wrong_shape
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.layer_reader import LayerReader
from moe_mk.weights.layer_spec import Expected, LayerSpec, expected_tensors, unnamed_parts
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.names import CONVENTIONS, Convention, Part, Role, block_prefixes, recognise
from moe_mk.weights.scan import Progress
from moe_mk.weights.source import MappingSource

SHARDS = {"w1": "gate", "w2": "down", "w3": "up"}
"""Projections by the names that engines give to the shards of an expert."""
KINDS = {"weight": "", "global_scale": "global", "input_scale": "input"} | {
    extra: extra for extra in ("scale", "bias", "zeros", "order", "shape")
}
"""`Part.extra` of the tensors of a projection, by their names in `feed_shard`."""


class LayerLoader:
    """Collects the tensors of one layer. Made by `MoELayer.loader()`; used by one thread.

    prefix: the part of names before "experts.0...", such as "model.layers.3.mlp.". Any convention that
    `load_from_safetensors` reads is accepted. Names below the prefix that the layer has no tensor for, and names with
    another prefix, are reported by `finish()`.
    """

    def __init__(
        self,
        title: str,
        spec: LayerSpec,
        use: Callable[[LayerWeights], None],
        *,
        owned: Sequence[int],
        tp: tuple[int, int] = (0, 1),
        layer: int = 0,
        prefix: str = "",
    ) -> None:
        expect_kind("prefix", prefix, str)
        expect_kind("layer", layer, int)
        self.prefix = prefix.replace("{N}", str(layer))
        self._title, self._spec, self._use, self._layer = title, spec, use, layer
        self._owned, (self._tp_rank, self._tp_size) = tuple(owned), tp
        spec.slice_of(spec.intermediate_size, *tp)
        # Packed rows of gate and up in one tensor are divided by the reader of files only.
        self._conventions = [
            c for c in CONVENTIONS.values() if not unnamed_parts(spec, c) and not (c.packing and c.fused)
        ]
        self._tables: dict[str, dict[str, Expected]] = {}
        self._experts: dict[tuple[str, Role, int | None], list[tuple[str, Expected]]] = defaultdict(list)
        self._names: dict[str, None] = {}
        self._unexpected: dict[str, None] = {}
        self._kept: dict[Part, tuple[str, Tensor]] = {}
        self._unplaced: list[tuple[Part, Tensor]] = []
        """Shards that have the shapes of several packings."""
        self._is_finished = False

    def feed(self, name: str, tensor: Tensor) -> bool:
        """Take one tensor of the checkpoint, whole, by its name; returns whether this rank keeps any of it.

        Experts of other ranks are checked and dropped, and so are calibrated input scales. Raises WeightError, naming
        the tensor, for a wrong shape or dtype and for a tensor that was fed before, ShapeError for what is no dense
        tensor; nothing is changed then.
        """
        self._expect_open()
        expect_dense(name, tensor)
        local = name.removeprefix(self.prefix) if name.startswith(self.prefix) else None
        found = None if local is None else self._find(local, tuple(tensor.shape))
        if local is None or found is None:
            self._unexpected[name if local is None else local] = None
            return False
        return self._take(name, local, *found, tensor)

    def feed_shard(self, tensor: Tensor, *, expert_id: int, shard_id: str, kind: str = "weight") -> bool:
        """Take one tensor of one projection of a routed expert, whole, without a name; else like `feed`.

        expert_id: the logical expert. shard_id: "w1" (gate), "w2" (down) or "w3" (up). kind: "weight", "scale" (of
        every block, row or tensor), "global_scale", "input_scale", "bias", or of packed integers "zeros", "order" and
        "shape".
        Raises ConfigError for other values.
        """
        if shard_id not in SHARDS:
            raise ConfigError(f"shard_id {shard_id!r} is unknown{did_you_mean(shard_id, list(SHARDS))}")
        if kind not in KINDS:
            raise ConfigError(f"kind {kind!r} is unknown{did_you_mean(kind, list(KINDS))}")
        if not 0 <= expert_id < self._spec.num_experts:
            raise ConfigError(f"expert_id={expert_id} is out of range (0 <= expert_id < {self._spec.num_experts})")
        part = Part(Role.EXPERT, SHARDS[shard_id], expert_id, KINDS[kind])
        if packings := self._packings_of(part, tuple(tensor.shape)):
            self._conventions = [c for c in self._conventions if not c.packing or c.packing in packings]
        if len(packings) > 1:
            expect_dense(f"{kind} of expert {expert_id}, {shard_id}", tensor)
            self._unplaced.append((part, _copied(tensor)))
            return expert_id in self._owned
        convention = self._spelling
        self._feed_unplaced()
        if part.extra and not convention.holds(Role.EXPERT, part.extra):
            self._unexpected[f"{kind} of expert {expert_id}, {shard_id}"] = None
            return False
        return self.feed(self.prefix + convention.spell(part), tensor)

    def _packings_of(self, part: Part, shape: tuple[int, ...]) -> set[str]:
        """The packings that are left in which a shard of packed integers has this shape; none where none has it."""
        found, first = set[str](), {c.packing: c for c in reversed(self._conventions) if c.packing and not c.stacked}
        for convention in first.values():
            if not convention.holds(Role.EXPERT, part.extra):
                continue
            with Suppress(ConfigError):  # a packing that does not hold these sizes
                want = self._table(convention).get(convention.spell(part))
                if want is not None and shape in (want.shape, *want.also):
                    found.add(convention.packing)
        return found

    def _feed_unplaced(self) -> None:
        held, self._unplaced = self._unplaced, []
        for part, tensor in held:
            self.feed(self.prefix + self._spelling.spell(part), tensor)

    def wants(self, name: str) -> bool:
        """Whether this rank needs a tensor that was not fed yet; others need not be read."""
        found = self._find(name.removeprefix(self.prefix)) if name.startswith(self.prefix) else None
        return found is not None and any(part not in self._kept for part in self._parts_of(found[1].part))

    def finish(self, on_progress: Progress | None = None) -> None:
        """Check that the layer is complete and its numbers are finite, and load it.

        Raises WeightError with all missing and all unexpected names, or with all NaN codes and invalid scales. The
        layer is unchanged then, and what is missing may still be fed. Experts of other ranks need not be fed.
        on_progress: called with ("check", bytes done, total bytes).
        """
        self._expect_open()
        self._feed_unplaced()
        raise_if(f"{self._title} cannot be loaded", self._name_problems())
        spelling, spec = self._spelling, self._spec
        here = {spelling.spell(part): tensor for part, (_, tensor) in self._kept.items()}
        whole = bool(spelling.packing)
        tp_rank, tp_size = (self._tp_rank, self._tp_size) if whole else (0, 1)
        parts = self._tp_size // tp_size
        share = replace(
            spec,
            intermediate_size=spec.intermediate_size // parts,
            shared_intermediate_size=spec.shared_intermediate_size // parts,
        )
        reader = LayerReader(MappingSource(here, "tensors that were fed"), "", spelling, share, tp_rank, tp_size)
        weights = reader.layer(self._owned, self._layer)
        raise_if(f"{self._title} is damaged", reader.content_problems(on_progress))
        facts = replace(
            weights.facts, prefix=self.prefix, tp_rank=self._tp_rank, tp_size=self._tp_size, names=tuple(self._names)
        )
        self._use(replace(weights, facts=facts))
        self._is_finished = True
        self._kept.clear()

    def _take(self, name: str, local: str, convention: Convention, want: Expected, tensor: Tensor) -> bool:
        entry = MappingSource({name: tensor}).entry(name)
        wrong = [text for text in (wrong_shape(name, entry, want), wrong_dtype(name, entry, want)) if text]
        if wrong:
            of_expert = self._experts[convention.name, want.part.role, want.part.expert]
            wrong += filter(None, [transposed({local: entry}, {local: want, **dict(of_expert)})])
            raise WeightError(f"{self._title}: {'; '.join(wrong)}")
        earlier = [self._kept[part][0] for part in self._parts_of(want.part) if part in self._kept]
        if name in self._names or earlier:
            before = f", as {earlier[0]}" if earlier and earlier[0] != name else ""
            raise WeightError(f"{self._title}: {name} was fed before{before}")
        if want.part.role is Role.EXPERT:
            expect_order(self._spec, convention)
        pieces = {part: (name, _copied(piece)) for part, piece in self._pieces(local, convention, want.part, tensor)}
        self._kept |= pieces
        self._names[name] = None
        return bool(pieces)

    def _pieces(self, local: str, convention: Convention, part: Part, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """This rank's share of a tensor, by parts of single experts, as views."""
        parts = self._parts_of(part)
        if convention.packing:  # a share of words is no share of columns: cut by `finish`
            yield from ((each, tensor[each.expert] if part.expert != each.expert else tensor) for each in parts)
            return
        is_whole = parts == [part] and (self._tp_size == 1 or part.extra == "global")
        if not parts or part.role not in (Role.EXPERT, Role.SHARED) or is_whole:
            yield from ((each, tensor) for each in parts)
            return
        # The reader of files cuts whole experts: what was not fed is one element, repeated. Not on the meta device, on
        # which the first clone of a process imports sympy for seconds.
        experts = {local: tensor}
        for other, want in self._experts[convention.name, part.role, part.expert]:
            if other != local:
                experts[other] = torch.empty((), dtype=want.dtypes[0], device="cpu").expand(want.shape)
        reader = LayerReader(MappingSource(experts), "", convention, self._spec, self._tp_rank, self._tp_size)
        slots: dict[int | None, SlotWeights] = {}
        for each in parts:
            if each.expert not in slots:
                slots[each.expert] = reader.mlp(each.expert)
            yield each, _of_slot(slots[each.expert], each)

    def _parts_of(self, part: Part) -> list[Part]:
        """The parts of single experts of this rank that a tensor consists of; none for what is dropped."""
        if part.extra == "input":
            return []
        if part.role is not Role.EXPERT:
            return [part]
        projections = ("gate", "up") if part.projection == "gate_up" else (part.projection,)
        experts = [e for e in dict.fromkeys(self._owned) if part.expert in (None, e)]
        return [replace(part, projection=p, expert=e) for e in experts for p in projections]

    def _find(self, local: str, shape: tuple[int, ...] | None = None) -> tuple[Convention, Expected] | None:
        """The convention that has a name; of several (GPTQ and AWQ share names), one in which the shape fits."""
        found, problems = [], dict[str, ConfigError]()
        for convention in self._conventions:
            try:
                if convention.parse(local) is not None and (want := self._table(convention).get(local)) is not None:
                    found.append((convention, want))
            except ConfigError as problem:  # a packing that does not hold these sizes
                problems[convention.name] = problem
        if problems and not found:
            raise next(iter(problems.values()))
        self._conventions = [c for c in self._conventions if c.name not in problems]
        fitting = [each for each in found if shape in (each[1].shape, *each[1].also)]
        if fitting and len(fitting) < len(found):
            wrong = {convention.packing for convention, _ in found} - {convention.packing for convention, _ in fitting}
            self._conventions = [c for c in self._conventions if not c.packing or c.packing not in wrong]
        return next(iter(fitting or found), None)

    def _table(self, convention: Convention) -> dict[str, Expected]:
        if convention.name not in self._tables:
            table = self._tables[convention.name] = expected_tensors(self._spec, convention)
            for name, each in table.items():
                self._experts[convention.name, each.part.role, each.part.expert].append((name, each))
        return self._tables[convention.name]

    @property
    def _spelling(self) -> Convention:
        """The convention of the names so far if it has one name for each projection, else one that has."""
        apart = [c for c in self._conventions if not (c.fused or c.stacked)]
        packing = self._recognised(self._conventions).packing
        return self._recognised([c for c in apart if c.packing == packing] or apart)

    def _recognised(self, among: Sequence[Convention]) -> Convention:
        return recognise((name.removeprefix(self.prefix) for name in self._names), among)

    def _name_problems(self) -> list[str]:
        convention = self._recognised(self._conventions)
        expected = {
            name: each
            for name, each in self._table(convention).items()
            if each.part.expert is None or each.part.expert in self._owned
        }
        have = [name for name, each in expected.items() if all(p in self._kept for p in self._parts_of(each.part))]
        lines = name_problems([*have, *self._unexpected], expected, convention)
        if foreign := [prefix for prefix in block_prefixes(self._unexpected) if prefix not in ("", self.prefix)]:
            lines.append(f"the loader has prefix={self.prefix!r}, names have {some(map(repr, foreign))}")
        return lines

    def _expect_open(self) -> None:
        if self._is_finished:
            raise WeightError(f"{self._title}: this loader is finished; call loader() again to load other weights")


def _of_slot(slot: SlotWeights, part: Part) -> Tensor:
    q, bias = slot.matrices[part.projection], slot.bias(part.projection)
    held = {"bias": bias, "scale": q.scales, "global": q.global_scale}.get(part.extra, q.values)
    assert held is not None
    return held


def _copied(piece: Tensor) -> Tensor:
    """The elements alone, in host memory: a view would keep the storage of the caller alive."""
    out = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    return out.copy_(piece.detach())
