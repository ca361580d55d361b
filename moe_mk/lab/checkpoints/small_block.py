"""Small blocks like that of a layer, built as the model builds its own, and what they compute."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from moe_mk.errors import UnsupportedError, unless_signalled
from moe_mk.integrations.hf.modules import SPREADS
from moe_mk.integrations.hf.without_experts import FAILURES, first_line
from moe_mk.lab.checkpoints.block_tensors import Tensors, shapes_of, sizes_of, tensors_of_block

TOKENS = 96
WIDTHS = (24, 12, 16, 32, 48)
"""Of experts of small blocks."""


def behaviour_of(block: nn.Module, configs: Sequence[PretrainedConfig], number: int) -> object:
    """Equal for two layers with blocks that compute the same: what a small one makes of random weights and tokens.

    A block may read values by the number of its layer when it is built, or only when it is called. One that cannot be
    built or called has the reason in place of an output.
    """
    what = (type(block).__qualname__, str(shapes_of(block)))
    try:
        return *what, next(readings_of(block, configs, number, set())).output().numpy().tobytes()
    except UnsupportedError as problem:
        return *what, str(problem)


def readings_of(
    block: nn.Module, configs: Sequence[PretrainedConfig], number: int, read: set[str]
) -> Iterator[SmallBlocks]:
    """A small block of each way to read the sizes of a block."""
    sizes = sizes_of(block)
    assert sizes is not None
    origin = _origin_of(block, configs, number)
    readings = {(each.width, each.reach, each.shared_width): each for each in tensors_of_block(block, sizes)}
    for real in readings.values():
        yield SmallBlocks(origin, real, read)


@dataclass(frozen=True)
class Origin:
    """The block of a layer, and the configuration from which it is built."""

    like: nn.Module
    """The block itself, on the meta device."""
    number: int
    config: PretrainedConfig
    by_attributes: bool
    """Whether arguments that are attributes of the block have their values, and not those of the configuration."""

    def build(self, config: PretrainedConfig, sizes: Callable[[str, int], int] = lambda _, size: size) -> nn.Module:
        """A block of the class in f64. sizes: of the new block, for a size by its name."""
        cls, given = type(self.like), dict[str, Any]()
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
            own, is_needed = getattr(self.like, name, None), parameter.default is parameter.empty
            is_plain = self.by_attributes and type(own) in (int, float, bool, str)
            if name in ("config", "cfg", "configuration"):
                given[name] = config
            elif re.fullmatch(r"(layer|block|depth|index|idx)(_?(id|idx|index|num|number))?", name):
                given[name] = own if is_plain else self.number
            elif is_plain:
                given[name] = sizes(name, own) if type(own) is int else own
            elif is_needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                given[name] = getattr(config, name, config)
        try:
            return cls(**given).double().eval()
        except unless_signalled(*FAILURES) as problem:
            raise UnsupportedError(
                f"{cls.__name__} cannot be built from its configuration alone", [first_line(problem)]
            ) from None


def _origin_of(block: nn.Module, configs: Sequence[PretrainedConfig], number: int) -> Origin:
    """Find the arguments that build a block with the attributes of this one. Raises UnsupportedError."""
    own = [value for module in block.modules() for value in vars(module).values()]
    known = {id(each): each for each in (*own, *configs) if isinstance(each, PretrainedConfig)}
    held, refused = described(block), None
    for config, by_attributes in itertools.product(known.values(), (False, True)):
        origin = Origin(block, number, config, by_attributes)
        try:
            with torch.device("meta"):
                built = described(origin.build(config))
        except UnsupportedError as problem:
            refused = refused or problem
            continue
        differing = [key for key in {**held, **built} if held.get(key) != built.get(key)]
        if not differing:
            return origin
        key = differing[0]
        refused = UnsupportedError(
            f"{type(block).__name__} is not built from its configuration and the number of its layer alone",
            [f"{key} is {held.get(key)!r} in the model, {built.get(key)!r} in one that is built so"],
        )
    assert refused is not None
    raise refused


def described(block: nn.Module) -> dict[str, object]:
    """The attributes of a module and of those inside it, and the shapes of its tensors, by path."""
    found: dict[str, object] = dict(shapes_of(block))
    for path, module in block.named_modules():
        found[f"{path}:"] = type(module).__qualname__
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        found |= {f"{path}.{key}".strip("."): _plain(value) for key, value in attributes.items()}
    return found


_OF_MODULES = {*vars(nn.Module()), "_is_hf_initialized", "_no_init", "gradient_checkpointing"}
"""Attributes that every module has, and those that a model sets on its modules."""


def _plain(value: object, depth: int = 4) -> object:
    """A value that is equal for equal settings. Configurations are those that a block is built from, or others."""
    if depth == 0 or value is None or isinstance(value, int | float | str):
        return None if depth == 0 else value
    if isinstance(value, PretrainedConfig):
        return "configuration", id(value)
    if isinstance(value, Tensor):
        return tuple(value.shape) if value.device.type == "meta" else (tuple(value.shape), value.tolist())
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(each, depth - 1)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_plain(each, depth - 1) for each in value)
    if isinstance(value, functools.partial):
        return _plain([value.func, value.args, value.keywords], depth - 1)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    name = getattr(value, "__qualname__", type(value).__qualname__)
    inside = {key: each for key, each in held.items() if key not in _OF_MODULES}
    return name, _plain(cells, depth - 1), _plain(inside, depth - 1)


@dataclass
class SmallBlocks:
    """Small blocks like that of a layer."""

    origin: Origin
    real: Tensors
    """Of the real block, on the meta device."""
    read: set[str]
    """Attributes of the configuration that the block reads."""

    def build(self, number: int = 0) -> nn.Module:
        """One of them. number: of its size. Raises UnsupportedError where none has the experts of the layer."""
        num_experts, hidden, width, shared = (
            self.real.sizes.experts, self.real.sizes.hidden, self.real.width, self.real.shared_width
        )  # fmt: skip
        able = (n for n in WIDTHS if not {num_experts} & {n, 2 * n, 2 * n + 4, 2 * n + 8})
        n = next(itertools.islice(able, number, None))
        wanted = {width: n, self.real.reach: 2 * n + 4, hidden: 2 * n + 8}
        if shared not in (0, *wanted):
            wanted[shared] = n * (shared // width if shared % width == 0 else 1)

        def resized(key: str, value: int) -> int:
            if num_experts in wanted and "experts" in key and "size" not in key:
                return value
            return n if value == width and re.search("intermediate|ffn", key) else wanted.get(value, value)

        config, found = self.origin.config, list[nn.Module]()
        for kept in ("experts", "experts|layer", ""):  # lists of numbers of layers, and of experts, are no sizes
            small = copy.deepcopy(config)
            for key, value in stated(config).items():
                if type(value) is int:
                    setattr(small, key, resized(key, value))
                elif type(value) is list and not re.search(kept, key):
                    setattr(small, key, [resized(key, each) if type(each) is int else each for each in value])
            small._experts_implementation = "eager"
            small.__class__ = _recording(type(config), self.read)
            made = self.origin.build(small, resized)
            sizes = sizes_of(made)
            if sizes is not None and sizes._replace(hidden=0) == self.real.sizes._replace(hidden=0):
                found.append(made)
                if {n, 2 * n + 8} <= {side for shape in shapes_of(made).values() for side in shape}:
                    return made
        if not found:
            raise UnsupportedError("a small block of its class has other experts than the model")
        return found[0]

    @torch.no_grad()
    def output(self) -> Tensor:
        """Of tokens up to far beyond the limits of activations, with random values of all that a checkpoint stores."""
        draw = torch.Generator().manual_seed(23)
        block = self.build()
        for tensor in block.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(random(draw, *tensor.shape) * (tensor.shape[-1] if tensor.ndim else 1) ** -0.5)
        sizes = sizes_of(block)
        assert sizes is not None
        return run(block, torch.cat([random(draw, TOKENS // 4, sizes.hidden) * spread for spread in SPREADS]))

    @property
    def hints(self) -> set[int]:
        """Small numbers of the configuration."""
        values = stated(self.origin.config).values()
        numbers = itertools.chain.from_iterable(each if type(each) is list else [each] for each in values)
        return {each for each in numbers if type(each) is int and each <= self.real.sizes.experts}


def stated(config: PretrainedConfig) -> dict[str, Any]:
    """The values of a configuration by attribute."""
    return {key: value for key, value in vars(config).items() if not key.startswith("_")}


def _recording(cls: type[PretrainedConfig], read: set[str]) -> type[PretrainedConfig]:
    """The class of a configuration that notes the names of attributes that are read."""

    def note(self: PretrainedConfig, name: str) -> Any:
        if not name.startswith("_"):
            read.add(name)
        return cls.__getattribute__(self, name)  # type: ignore[no-untyped-call]

    return type(cls.__name__, (cls,), {"__getattribute__": note})


def random(draw: torch.Generator, *shape: int) -> Tensor:
    """Normal values in f64."""
    return torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")


def run(block: nn.Module, x_TH: Tensor) -> Tensor:
    """(T, H) to (T, H). Raises UnsupportedError for a block that takes or returns something else."""
    try:
        try:
            found = block(x_TH[None])
        except RuntimeError:  # it converts tokens to f32, and multiplies them with weights that it does not convert
            found = copy.deepcopy(block).float()(x_TH[None].float())
    except unless_signalled(*FAILURES) as problem:
        raise UnsupportedError("its block cannot be called with tokens alone", [first_line(problem)]) from None
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor) or found.numel() != x_TH.numel():
        raise UnsupportedError("its block does not return one tensor of the tokens' shape")
    return found.detach().reshape(x_TH.shape).double()
