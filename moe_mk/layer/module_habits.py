"""`nn.Module` methods of a layer without parameters: `to`, `state_dict`, copies and pickles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, overload

import torch
from torch import Tensor, nn

from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.external.device import is_here, usable_device
from moe_mk.layer.live import LivePlacement
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.weights.expert_weights import ReleasedSlots
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.source import in_memory, is_mapped

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer

T = TypeVar("T")
L = TypeVar("L", bound="MoELayer")

NO_PARAMETERS = (
    "its weights are no parameters; load them with load(path or tensors, layer=N) or load_weights(tensors), and "
    "leave their names out of the state_dict of the model"
)


class Part(Generic[T]):
    """An attribute that a part of an object holds, by its path: read there, and set there unless the part is frozen."""

    def __init__(self, path: str) -> None:
        holder, _, self._name = path.rpartition(".")
        self._holder = attrgetter(holder)

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        return self if owner is None else getattr(self._holder(owner), self._name)

    def __set__(self, owner: object, value: T) -> None:
        setattr(self._holder(owner), self._name, value)


def counter(shape: int | tuple[()], device: torch.device) -> Tensor:
    """int64 zeros that may be updated in inference mode and outside of it, wherever they were made."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.int64, device=device)


class WithoutParameters(nn.Module):
    """A module with weights that are no parameters: its device and dtype are fixed, and it has no state_dict."""

    name: str
    device: torch.device
    dtype: torch.dtype
    expert_load: Tensor
    built_for: torch.device
    """The device of kernel and tables: `device`, or the one assumed while that is the meta device."""

    def _build_on(self, device: torch.device, *parts: Any) -> None:
        """Choose and build everything that depends on the device; changes nothing if no backend is eligible."""
        raise NotImplementedError

    def _build_for(self, wanted: torch.device, *parts: Any) -> None:
        """Build on the wanted device; for the meta device on the CPU, or on a GPU if no backend supports the CPU."""
        if wanted.type != "meta":
            self._build_on(usable_device(wanted), *parts)
            return
        try:
            self._build_on(torch.device("cpu"), *parts)
        except UnsupportedError:
            if not is_here(torch.device("cuda")):
                raise
            self._build_on(usable_device("cuda"), *parts)
        self.device, self.expert_load = wanted, self.expert_load.to("meta")

    def _leave_meta(self, device: torch.device | str | None = None) -> None:
        """Build a module on the meta device on a device; None: torch's default device, or the CPU."""
        if self.device.type != "meta":
            return
        default = torch.get_default_device()
        device = usable_device(device or ("cpu" if default.type == "meta" else default))
        if device != self.built_for:
            self._build_on(device)
        self.device, self.expert_load = device, counter(len(self.expert_load), device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by `to`, `half`, `cuda` and so on, of the layer and of its parents.

        `to_empty(device=...)` builds a layer on the meta device on that one. Raises UnsupportedError for any other
        change of device, and of dtype: the backends were chosen for them. Counters stay as they are.
        """
        there, dtype = (
            fn(self.expert_load.new_empty(0)).device,
            fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype,
        )
        if self.device.type == "meta" and there.type != "meta":
            self._leave_meta(there)
            return self
        if there != self.device:
            raise UnsupportedError(
                f"layer {self.name!r} cannot be moved from {self.device} to {there}",
                [f"its backends were chosen for {self.device}; build it with device={str(there)!r} and load it there"],
            )
        if dtype != self.dtype:
            raise UnsupportedError(
                f"layer {self.name!r} cannot be converted from {self.dtype} to {dtype}",
                [f"its backends were chosen for {self.dtype}; build it with dtype={dtype} and load it again"],
            )
        counters = self.expert_load
        super()._apply(lambda part: part if part is counters else fn(part), recurse)  # type: ignore[no-untyped-call]
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`. Raises UnsupportedError."""
        raise UnsupportedError(
            f"layer {self.name!r} cannot be scripted", ["use torch.compile, torch.export or torch.jit.trace"]
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # it has overloads
        """The state of a parent, to which this layer adds nothing. Raises UnsupportedError when called on the layer.

        Its weights are no parameters: a backend keeps them in a layout of its own, the checkpoint is their source.
        """
        if not args and kwargs.get("destination") is None:
            raise UnsupportedError(f"layer {self.name!r} has no state_dict", [NO_PARAMETERS])
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Raises UnsupportedError: weights are loaded with `load_weights`."""
        raise UnsupportedError(
            f"layer {self.name!r} cannot load a state_dict of {len(state_dict)} tensors", [NO_PARAMETERS]
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        """Called when a parent loads a state_dict. Tensors of this layer are an error, also if not strict."""
        mine = [name for name in state_dict if name.startswith(prefix)]
        if mine:
            problems[-1].append(
                f"layer {self.name!r} cannot load {len(mine)} tensors, for example {mine[0]!r}: {NO_PARAMETERS}"
            )


def copied(layer: L, memo: dict[int, Any]) -> L:
    """A second layer over the same groups, with weights of its own."""
    weights = _kept_weights(layer)
    where = {"device": layer.device, "dtype": layer.dtype, "groups": layer.groups, "name": layer.name}
    twin = type(layer)(layer.config, **where, pool=copy.deepcopy(layer.pool, memo))  # type: ignore[arg-type]
    memo[id(layer)] = twin
    if weights is not None:  # views of files are of no layer
        memo[id(weights.experts)] = weights.experts.changed(_own)
        memo[id(weights.shared)] = None if weights.shared is None else weights.shared.changed(_own)
    state = layer.expert_map, layer.expert_load, layer.routing.counted, layer.routing.router
    return _with_state(twin, copy.deepcopy(weights, memo), *state)


def pickled(layer: MoELayer) -> tuple[Any, ...]:
    """Return settings and weights for `__reduce__`. Raises ConfigError for process groups, see `ParallelGroups`."""
    if layer.groups != ParallelGroups():
        raise ConfigError(f"layer {layer.name!r} holds process groups, which cannot be pickled; build it per process")
    weights, routing = _kept_weights(layer), layer.routing
    if weights is not None:
        weights = replace(weights, experts=weights.experts.changed(in_memory), shared=weights.shared_read)
    state = weights, layer.expert_map, layer.expert_load.clone(), routing.counted, routing.router
    where = {"device": str(layer.device), "dtype": layer.dtype, "name": layer.name, "pool": layer.pool}
    return _rebuild, (type(layer), layer.config, where, state)


def _rebuild(cls: type[L], config: MoEConfig, where: dict[str, Any], state: tuple[Any, ...]) -> L:
    return _with_state(cls(config, **where), *state)


def _with_state(
    layer: L, weights: LayerWeights | None, expert_map: ExpertMap, load_E: Tensor, counted: Any, router: Any
) -> L:
    layer.routing.use(router)
    if expert_map != layer.expert_map:
        LivePlacement(layer).set_placement(expert_map)
    if weights is not None:
        layer.take(weights)
    layer.expert_load.copy_(load_E)
    layer.routing.count_from(*counted)
    return layer


def _own(tensor: Tensor) -> Tensor:
    return tensor if is_mapped(tensor) else tensor.clone()


def _kept_weights(layer: MoELayer) -> LayerWeights | None:
    """The weights, if any, with the bias in use; raises UnsupportedError if the experts were released."""
    weights, bias_E = layer.state.weights, layer.state.backends.gate.bias_E
    if weights is None:
        return None
    if isinstance(weights.experts.slots, ReleasedSlots):
        _ = weights.experts.slots[0]
    return weights if weights.bias_E is None or bias_E is None else replace(weights, bias_E=bias_E.cpu())
