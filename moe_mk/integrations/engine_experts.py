"""Routed experts over weights of an engine: the common part of the adapters.

The engine computes routing and shared experts; this module computes the experts of one rank, with the backend that the
oracle selects. Given a process group, it also moves tokens to the ranks of their experts. Inference only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_mk.comm.collective import collective
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S
from moe_mk.comm.groups import ParallelGroups
from moe_mk.errors import ShapeError, UnsupportedError, WeightError
from moe_mk.layer.custom_op import Identity, Operator, is_untraced, not_copied
from moe_mk.layer.experts_of_rank import ExpertsOfRank
from moe_mk.layer.grid import Grid
from moe_mk.quant.kinds import BLOCK_KINDS
from moe_mk.quant.tensor import QuantScheme
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights
from moe_mk.weights.stamp import Stamp, storages_of

LOGGER = logging.getLogger(__name__)
LORA = (
    "LoRA on experts: a backend reads each expert as one matrix, without low-rank factors; merge the adapter into the "
    "weights (merge_and_unload() of peft) and load those"
)


@dataclass(frozen=True)
class EngineWeights:
    """Experts of one rank as engines keep them, already split over EP and TP ranks."""

    w13: Tensor
    """(L, 2I, H): gate rows, then up rows, or as `order` states; (L, I, H) if not gated."""
    w2: Tensor
    """(L, H, I)."""
    activation: str = "silu"
    gated: bool = True
    order: str = "gate_up"
    """Of w13: gate_up, up_gate or interleaved."""
    quant: str = ""
    """The name of the format, such as fp8_block; "" for weights without scales."""
    block: tuple[int, int] = (128, 128)
    """(rows, columns) under one scale, of fp8_block and int8_block."""
    tokens: str = "auto"
    """What the format rounds tokens to, see `model.quant.activations`; done where the settings ask for it."""
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_global_scale: Tensor | None = None
    w2_global_scale: Tensor | None = None
    w13_zeros: Tensor | None = None
    """uint8, the code of zero, of the shape of the scales; of formats that end in _zp."""
    w2_zeros: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    limit: float | None = None
    """The clamp of swiglu_limit and swiglu_oai."""
    alpha: float = 1.702
    """The factor inside the sigmoid of swiglu_oai."""
    dtype: torch.dtype | None = None
    """Of tokens; None: that of weights without scales, else bf16."""
    of: tuple[Tensor, ...] = ()
    """The engine's own tensors where the others were computed from them; empty: the others are the engine's."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the engine, values first."""
        given = (getattr(self, name) for name in _OF_WEIGHTS)
        return self.of or tuple(each for each in given if isinstance(each, Tensor))

    def experts(self) -> ExpertWeights | MappedExpertWeights:
        """Return views; raises ShapeError or WeightError naming the tensor, see `ExpertWeights.from_engine`."""
        return ExpertWeights.from_engine(**{name: getattr(self, name) for name in _OF_WEIGHTS})

    def model(self, scheme: QuantScheme) -> dict[str, Any]:
        """`MoEConfig.model` of these experts, without a name. scheme: that of `experts()`."""
        experts, hidden, inner = map(int, self.w2.shape)
        quant: dict[str, Any] = {"weights": self.quant or scheme.name, "activations": self.tokens}
        if self.quant in BLOCK_KINDS:
            quant["block"] = self.block
        if "ue8m0" in scheme.name:
            quant["scale"] = "ue8m0"
        return {
            "hidden_size": hidden,
            "moe_intermediate_size": scheme.logical_columns(inner),
            "num_experts": experts,
            "activation": self.activation,
            "swiglu_limit": self.limit,
            "swiglu_alpha": self.alpha,
            "expert_bias": self.w13_bias is not None,
            "quant": quant,
        }


_OF_WEIGHTS = tuple(signature(ExpertWeights.from_engine).parameters)


class EngineExperts:
    """The experts of one layer on one rank, with a selected backend and converted weights.

    Where the backend reads the engine's tensors directly, they must not be modified. Where it keeps a copy in its own
    layout, both remain in memory until `release()`: one warning is logged per process, and one line per layer at level
    info.

    name: for messages. settings: bare keys of `MoEConfig.kernel`, for instance experts="torch_cpu".
    release: call `release()` at once where there is a copy. groups: `ep`, over which the ranks of an engine, each with
    tokens of its own, share out the experts: rank r has ids from r L on, and every rank makes every call.
    Raises ShapeError for inconsistent weights, WeightError for invalid numbers in them, UnsupportedError with every
    reason if no backend is eligible.
    """

    def __init__(
        self,
        name: str,
        weights: EngineWeights,
        *,
        top_k: int,
        settings: Mapping[str, Any] | None = None,
        release: bool = False,
        groups: ParallelGroups | None = None,
    ) -> None:
        if any(is_released(tensor) for tensor in weights.tensors):
            raise UnsupportedError(f"the weights of {name} were released", ["load them into the engine again"])
        try:
            given = weights.experts()
        except (ShapeError, WeightError) as problem:
            raise type(problem)(f"{name}.{problem}") from None
        settings = settings or {}
        self.name = name
        self.of_rank = ExpertsOfRank.of_engine(
            given,
            Grid(ParallelGroups.of(groups), settings.get("timeout_s", DEFAULT_TIMEOUT_S), name),
            weights.model(given.scheme) | {"name": name},
            top_k=top_k,
            dtype=weights.dtype or (weights.w2.dtype if not weights.quant else torch.bfloat16),
            device=weights.w2.device,
            settings=settings,
        )
        in_use, self._given = storages_of(self.of_rank.weights), weights.tensors
        self._unused = [t for t in weights.tensors if t.untyped_storage().data_ptr() not in in_use]
        is_copy = bool(weights.of) or any(t is weights.w13 or t is weights.w2 for t in self._unused)
        self.copied_bytes = self.of_rank.weights.num_bytes if is_copy else 0
        """Bytes in the layout of the backend that are in addition to the engine's tensors; 0 where it reads those."""
        if self.copied_bytes and release:
            self.release()
        elif self.copied_bytes:
            _warn_of_copies(self.backend)
        LOGGER.info(self.note)
        described = self.of_rank.decision.problem.config
        identity = Identity.of(name, (described.model, described.router, self.of_rank.dtype))
        self._entry = EXPERTS_OF_ENGINES.enter(self, identity)

    __reduce__ = not_copied

    @property
    def backend(self) -> str:
        """The experts backend that multiplies."""
        return self.of_rank.decision.chosen.experts

    @property
    def is_released(self) -> bool:
        """Whether the engine's tensors were freed, so that nothing can be converted again."""
        return not self._given

    @property
    def note(self) -> str:
        """Describe the memory of the weights in one line."""
        held = sum(tensor.nbytes for tensor in self._given)
        if not self.copied_bytes:
            return f"{self.name}: {self.backend} reads the engine's weights, {held:,} B"
        text = f"{self.name}: {self.backend} keeps the weights in its own layout, {self.copied_bytes:,} B"
        if not held:
            return f"{text}; the engine's were released"
        return f"{text}, in addition to the engine's {held:,} B; release() frees those"

    def explain(self) -> str:
        """The decision, with every backend's cost or rejection reasons, and what the weights occupy."""
        return f"{self.of_rank.explained()}\n{self.note}"

    def release(self) -> int:
        """Free the engine's tensors, which keep their shape but have no data; returns the number of bytes.

        Reading them raises a RuntimeError of torch, so the engine can neither save nor move them. To load other
        weights, the engine allocates them again. Raises UnsupportedError, and frees nothing, where the backend reads
        them, and where a tensor shares its storage with others.
        """
        if not self.copied_bytes:
            raise UnsupportedError(
                f"the weights of {self.name} cannot be released",
                [f"{self.backend} reads them, there is no second copy; pin kernel.experts to another backend"],
            )
        shared = [t for t in self._unused if t.untyped_storage().nbytes() != t.nbytes]
        if shared:
            raise UnsupportedError(
                f"the weights of {self.name} cannot be released",
                [f"{len(shared)} of {len(self._unused)} tensors share their storage with others"],
            )
        freed = sum(tensor.nbytes for tensor in self._unused)
        for tensor in self._unused:
            tensor.untyped_storage().resize_(0)
        self._given, self._unused = (), []
        return freed

    def __call__(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """(T, H) with weights (T, K) and ids (T, K) of this rank's experts to (T, H), weighted and summed.

        Over a group, ids are those of all ranks. Ids outside these are skipped. Weights must be normalised and scaled.
        """
        if is_untraced(hidden_states):
            return self.of_rank.run(hidden_states, topk_weights, topk_ids)
        if not isinstance(hidden_states, Tensor) or hidden_states.requires_grad or forward_ad._current_level >= 0:
            self.of_rank.check(hidden_states, topk_weights, topk_ids)
        return EXPERTS_OF_ENGINES.traced(hidden_states, topk_weights, topk_ids, self._entry)

    @collective(lambda experts: experts.of_rank.grid, recovers=True)
    def recover(self) -> None:
        """Go on after a call failed on some rank of the group, see `MoELayer.recover`; every rank calls it."""
        self.of_rank.recover()


EXPERTS_OF_ENGINES: Operator[EngineExperts] = Operator(
    "engine_experts", "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor entry) -> Tensor",
    lambda experts, *given: experts.of_rank.run(*given),
)  # fmt: skip
"""(T, H), weights (T, K) and ids (T, K) to (T, H): one node of a graph, so that engines can compile around it."""
engine_experts = EXPERTS_OF_ENGINES.call


class HeldExperts:
    """For engines that pass their weights with every call: converted once, and again when they change.

    What was made of weights that the engine has replaced is dropped once each of the others was used `KEPT` times.
    """

    KEPT = 8

    def __init__(self, *, release: bool = False) -> None:
        """release: whether `build` frees the engine's tensors where the backend keeps a copy."""
        self.release, self._calls = release, 0
        self._held: dict[tuple[int, int], tuple[Stamp, EngineExperts, int]] = {}
        """With the number of the last call, in the order of these numbers. Keys: storage and offset in it."""

    def of(self, tensors: Sequence[Tensor], build: Callable[[], EngineExperts]) -> EngineExperts:
        key, self._calls = (tensors[0].untyped_storage()._cdata, int(tensors[0].storage_offset())), self._calls + 1
        held = self._held.pop(key, None)
        if held is None or not (held[0].is_of(tensors) or (self.release and is_released(tensors[0]))):
            self._held = {at: other for at, other in self._held.items() if not other[0].is_gone}
            held = Stamp(tensors), build(), 0
        self._held[key] = held[0], held[1], self._calls
        oldest, (_, unused, last) = next(iter(self._held.items()))
        if self._calls - last > self.KEPT * len(self._held) and not unused.is_released:
            del self._held[oldest]
        return held[1]


def is_released(tensor: Tensor) -> bool:
    """Whether a tensor has elements but no data."""
    return tensor.numel() > 0 and tensor.device.type != "meta" and tensor.untyped_storage().nbytes() == 0


@cache
def _warn_of_copies(backend: str) -> None:
    """Log once per process that weights are in memory twice: every layer of a model has the same backend."""
    LOGGER.warning(
        "%s keeps weights in its own layout, in addition to those of the engine, for every layer; release(), or the "
        "adapter's release_weights, frees the engine's",
        backend,
    )
