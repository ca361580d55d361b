"""Configurations of transformers, and models from a configuration alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from moe_mk.errors import UnsupportedError, unless_signalled

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ImportError,
            ZeroDivisionError, NotImplementedError, OSError)  # fmt: skip
"""What a class raises that is not built or called as others are."""


def config_of(path: str | PathLike[str]) -> PretrainedConfig:
    """The configuration of a config.json or of its folder, whose own code is never run.

    Raises UnsupportedError for what transformers itself cannot read.
    """
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except unless_signalled(*FAILURES) as problem:
        raise UnsupportedError(f"{path}: transformers has no such configuration", [first_line(problem)]) from None
    return found


def model_of(config: PretrainedConfig, **settings: Any) -> nn.Module:
    """A model of a configuration, by the first class that takes it. settings: of `from_config`, such as dtype.

    Models with other inputs than text, and configurations of their parts, are in no list of transformers: they are
    built by a class of the same folder. Raises UnsupportedError with the reason of every class.
    """
    reasons = []
    for name, build in _builders(config):
        try:
            return build(copy.deepcopy(config), **settings)  # type: ignore[no-any-return]
        except unless_signalled(*FAILURES) as problem:
            reasons.append(f"{name}: {first_line(problem)}")
    raise UnsupportedError(f"transformers cannot build a model of {config.model_type!r}", reasons)


def first_line(problem: BaseException) -> str:
    """What a class raised, in one line."""
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def _builders(config: PretrainedConfig) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What builds a model of a configuration: causal models, other whole models, then parts of models."""
    yield AutoModelForCausalLM.__name__, AutoModelForCausalLM.from_config
    name, found = type(config).__module__.replace(".configuration_", ".modeling_"), []
    if name.startswith("transformers.models.") and find_spec(name) is not None:
        kinds = [each for each in vars(import_module(name)).values() if isinstance(each, type)]
        found = [each for each in kinds if issubclass(each, PreTrainedModel) and each.config_class is type(config)]
    found = [each for each in found if "PreTrained" not in each.__name__]
    stated = config.architectures or ()
    for each in sorted(found, key=lambda kind: (kind.__name__ not in stated, kind.__name__)):
        if "For" in each.__name__:
            yield each.__name__, each._from_config
    yield AutoModel.__name__, AutoModel.from_config
    yield from ((each.__name__, each._from_config) for each in found if "For" not in each.__name__)
