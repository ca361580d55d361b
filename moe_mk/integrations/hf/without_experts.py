"""A model of a packed checkpoint with its experts on the meta device, and everything else loaded.

transformers needs the library of each quantisation to load such a checkpoint, and expands what it cannot keep packed.
Here packed matrices outside of the experts, such as those of attention in AWQ models, are decoded to the dtype of the
model; the experts are left to `replace_experts`. Models from a configuration alone are made here too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from moe_mk.errors import UnsupportedError, WeightError, unless_signalled
from moe_mk.integrations.hf.modules import refuse_until_loaded, save_whole_or_nothing
from moe_mk.integrations.hf.packed import experts_of
from moe_mk.integrations.hf.stored import StoredParameters, stored_parameters
from moe_mk.weights.completeness import some
from moe_mk.weights.gguf_source import GgufSource, gguf_files, is_gguf

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError, ImportError,
            ZeroDivisionError, NotImplementedError, OSError, StrictDataclassError)  # fmt: skip
"""What a class raises that is not built or called as others are."""

WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of GGUF metadata that transformers does not read, by the attributes of its configurations."""


def config_of(path: str | PathLike[str]) -> PretrainedConfig:
    """Load the configuration of a config.json, given as a file or its folder, or of a GGUF file; no remote code.

    Raises UnsupportedError for what transformers itself cannot read.
    """
    files = gguf_files(Path(path)) if is_gguf(path) else []
    where, settings = (files[0].parent, {"gguf_file": files[0].name}) if files else (path, {})
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False, **settings)
    except unless_signalled(*FAILURES) as problem:
        raise UnsupportedError(f"{path}: not read by transformers", [first_line(problem)]) from None
    if files:
        source = GgufSource(path, everything=True)
        found.tie_word_embeddings = "output.weight" not in source.names()  # transformers looks into the first part only
        stated = {key.partition(".")[2]: value for key, value in source.metadata.items()}
        for key, attribute in WIDTHS.items():
            if key in stated and hasattr(found, attribute):
                setattr(found, attribute, stated[key])
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
    """Return the message of an exception in one line, without the advice that follows it."""
    first, *rest = str(problem).splitlines() or [""]
    return f"{type(problem).__name__}: {first}{' ' + rest[0].strip() if rest and first.endswith(':') else ''}"


def _builders(config: PretrainedConfig) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield functions that build a model, by name: causal models, other whole models, then parts of models."""
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


@torch.no_grad()
def model_without_experts(
    path: str | PathLike[str], *, dtype: torch.dtype = torch.bfloat16, config: PretrainedConfig | None = None
) -> Any:
    """The causal model of a checkpoint folder on the CPU, in evaluation mode, its experts on the meta device.

    Experts refuse calls until `replace_experts` has replaced them.

    path: a folder of safetensors, or a GGUF file. dtype: of all parameters, except those that the model keeps in f32.
    config: None reads config.json, or the metadata of a GGUF file.
    Raises ConfigError for a quantisation that is not supported, UnsupportedError for a model that transformers lacks or
    that has no experts, and for matrices with scales outside of the experts, WeightError listing all parameters that
    the checkpoint lacks or has in another shape.
    """
    config = copy.deepcopy(config_of(path) if config is None else config)
    if getattr(config, "quantization_config", None):
        del config.quantization_config
    with _parameters_on_meta():
        model: Any = model_of(config, dtype=dtype)
    stored = stored_parameters(path, model)
    experts = experts_of(model)
    inside = tuple(f"{name}." for name in experts)
    _load_rest(model, stored, inside, dtype)
    empty = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if empty:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be built without its experts",
            [f"{len(empty)} buffers are neither in the checkpoint nor computed from the config: {some(empty)}"],
        )
    model.tie_weights()
    if empty := [name for name, p in model.named_parameters() if p.is_meta and not name.startswith(inside)]:
        raise WeightError(f"{path} lacks {len(empty)} parameters that {type(model).__name__} shares: {some(empty)}")
    for name, module in experts.items():
        refuse_until_loaded(module, name, path)
    save_whole_or_nothing(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which modules register parameters on the meta device, and real buffers; one thread at a time."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` without a device allocates nothing: modules make their large parameters with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _load_rest(model: Any, stored: StoredParameters, inside: tuple[str, ...], dtype: torch.dtype) -> None:
    """Load everything outside of the experts; raises WeightError before the model is used."""
    wide = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    tied = set(model._tied_weights_keys or ()) if model.config.get_text_config().tie_word_embeddings else set()
    missing, wrong = [], []
    for name, held in list(model.state_dict().items()):
        if name.startswith(inside):
            continue
        owner, _, leaf = name.rpartition(".")
        kind = held.dtype if not held.is_floating_point() else torch.float32 if any(w in name for w in wide) else dtype
        try:
            tensor = stored.find(name, kind)
        except WeightError as problem:
            wrong.append(str(problem))
            continue
        if tensor is None and name not in tied:
            missing.append(name)
        elif tensor is not None and tensor.shape != held.shape:
            wrong.append(f"{name} is {list(tensor.shape)}, expected {list(held.shape)}")
        elif tensor is not None:
            module = model.get_submodule(owner)
            if leaf in module._parameters:
                # Not frozen, as transformers loads it: torch 2.13 is slow for strided batches times frozen bf16.
                module._parameters[leaf] = nn.Parameter(tensor, tensor.is_floating_point())
            else:
                module._buffers[leaf] = tensor
    problems = [f"{len(missing)} parameters are missing: {some(missing)}"] if missing else []
    problems += [f"{len(wrong)} parameters are of a wrong shape or dtype: {some(wrong)}"] if wrong else []
    if problems:
        lines = "".join(f"\n  - {line}" for line in problems)
        raise WeightError(f"{stored.where} has not all of {type(model).__name__}:{lines}")
