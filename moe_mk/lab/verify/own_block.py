"""Settings for the reference, measured on a model's own class: they show a config.json that is misread."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.registry import did_you_mean

LIBRARIES = ("transformers",)
_OURS = {
    "name", "quant", "num_layers", "total_params_b", "active_params_b", "num_shared_experts", "stacks_transposed",
    "router_dtype",
}  # fmt: skip
"""Settings that are not a matter of what a layer computes, or that no block states."""


@dataclass(frozen=True)
class OwnBlock:
    """The settings of a model's own block."""

    title: str
    """The class and its library."""
    config: MoEConfig
    """Those of the layer, with what was measured of the block in their place."""
    differences: tuple[str, ...]
    """What the layer has otherwise, a sentence each."""


def own_block(library: str, config: MoEConfig, checkpoint: str | PathLike[str], layer: int) -> OwnBlock:
    """Measure the block of a checkpoint's layer. config: as the layer reads the checkpoint.

    Raises ConfigError for an unknown library, UnsupportedError where it is not installed, or where no settings
    describe the block; see `lab.checkpoints.derive`.
    """
    if library not in LIBRARIES:
        raise ConfigError(f"--against {library!r} is unknown{did_you_mean(library, LIBRARIES)}; known: transformers")
    try:
        from moe_mk.lab.checkpoints.derive import derive
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            "--against transformers measures the model's class",
            [f"{missing.name} is missing; pip install 'moe-mk[hf]'"],
        ) from None
    equation = derive(checkpoint, layer)
    found = MoEConfig.parse({"model": equation.model, "router": equation.router}, equation.derived_from)
    differences, changed = [], dict[str, object]()
    for ours, theirs in ((config.model, found.model), (config.router, found.router)):
        for key in sorted(type(ours).model_fields.keys() - _OURS):
            value, other = getattr(ours, key), getattr(theirs, key)
            if key == "shared_intermediate_size":
                value, other = config.model.shared_size, found.model.shared_size
            if value != other:
                changed[key] = other
                differences.append(f"{key} is {value}, and {other} in the block")
    return OwnBlock(equation.derived_from, config.with_(**changed), tuple(differences))
