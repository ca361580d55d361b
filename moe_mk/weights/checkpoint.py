"""Load one layer: find its block, check that it is complete, map the owned experts, search for NaN codes.

All problems are reported in one error. Owned experts are views of the memory-mapped file; no other expert is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_mk.errors import ConfigError, WeightError
from moe_mk.quant import WHOLE, BlockedScheme
from moe_mk.quant.kinds import BLOCK_KINDS
from moe_mk.weights.completeness import entry_problems, name_problems, raise_if, read_entries, recognise_block, some
from moe_mk.weights.inspect import describe_block, kind_of_scheme
from moe_mk.weights.layer_reader import LayerReader
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors, unnamed_parts
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.names import Convention, block_prefixes, layer_of, local_names
from moe_mk.weights.scan import Progress
from moe_mk.weights.source import TensorSource


def load_layer(
    source: TensorSource,
    layer: int,
    spec: LayerSpec,
    *,
    owned: Sequence[int],
    tp_rank: int = 0,
    tp_size: int = 1,
    prefix: str | None = None,
    on_progress: Progress | None = None,
) -> LayerWeights:
    """Load the gate, the shared experts and the owned experts of one layer.

    owned: logical experts in slot order; a replica names its expert again. May be empty.
    tp_rank, tp_size: select the rows of gate and up and the columns of down, of routed and shared experts.
    prefix: the part of names before "experts.0..."; {N} is replaced by the layer. None: the layer's block is searched.
    Raises ConfigError for an impossible request, WeightError listing all that is missing, unexpected, half filled, of
    a wrong shape or dtype, cut off; then, after reading, all NaN codes and broken scales.
    """
    if foreign := [e for e in owned if not 0 <= e < spec.num_experts]:
        raise ConfigError(f"{len(foreign)} owned experts are not in 0..{spec.num_experts - 1}: {some(foreign)}")
    spec.slice_of(spec.intermediate_size, tp_rank, tp_size)
    prefix = find_prefix(source, layer) if prefix is None else prefix.replace("{N}", str(layer))
    local = local_names(source.names(), prefix)
    convention = recognise_block(source, prefix, local, lambda names: not unnamed_parts(spec, names))
    expect_order(spec, convention)
    title = f"layer {layer} of {source.where} ({convention.name} names under {prefix!r})"
    if nameless := unnamed_parts(spec, convention):
        raise_if(f"{title} cannot be loaded", [*nameless, *_other_format(source, prefix, spec)])
    expected = expected_tensors(spec, convention)
    problems = name_problems(local, expected, convention)
    needed, present = {*owned, None}, set(local)
    wanted = {name: each for name, each in expected.items() if name in present and each.part.expert in needed}
    entries, unreadable = read_entries(source, prefix, wanted)
    if problems := [*problems, *unreadable, *entry_problems(entries, wanted)]:
        raise_if(f"{title} cannot be loaded", [*problems, *_other_format(source, prefix, spec)])
    reader = LayerReader(source, prefix, convention, spec, tp_rank, tp_size)
    weights = reader.layer(owned, layer)
    raise_if(f"{title} is damaged", reader.content_problems(on_progress))
    return weights


def _other_format(source: TensorSource, prefix: str, spec: LayerSpec) -> list[str]:
    """The format that the tensors have and the one that was stated, where they differ."""
    stated = kind_of_scheme(spec.scheme)
    found = describe_block(source, prefix, spec.scheme.block if stated in BLOCK_KINDS else None, {}).kind
    if found in ("", stated):
        return []
    return [f"the tensors have {found} experts, the settings state {stated}: see quantization_config of config.json"]


def find_prefix(source: TensorSource, layer: int) -> str:
    """The prefix of a layer's MoE block; WeightError names the layers that have one.

    Blocks of multi-token prediction (mtp.0.mlp.) count only where no other block has the number.
    """
    prefixes = block_prefixes(source.names())
    numbered = [prefix for prefix in prefixes if layer_of(prefix) == layer]
    found = [prefix for prefix in numbered if "mtp" not in prefix.split(".")] or numbered
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightError(
            f"{source.where} has {len(found)} MoE blocks for layer {layer}: {some(map(repr, found))}; pass prefix="
        )
    layers = sorted({number for prefix in prefixes if (number := layer_of(prefix)) is not None})
    there = "no name has a part 'experts.' under a layer number; pass prefix="
    if layers:
        there = f"layers with experts: {ranges(layers)}"
    raise WeightError(f"{source.where} has no experts for layer {layer}; {there}")


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: 0, 3-60."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def expect_order(spec: LayerSpec, convention: Convention) -> None:
    """Raise ConfigError where the convention's tensors cannot be separated into gate and up."""
    if spec.gate_up_order != "gate_up" and not convention.fused:
        raise ConfigError(
            f"gate_up_order={spec.gate_up_order!r} applies where gate and up lie in one tensor; {convention.name} "
            "names distinguish them, so set gate_up_order='gate_up'"
        )
    scheme, inner = spec.scheme, spec.intermediate_size
    if not convention.fused or not isinstance(scheme, BlockedScheme) or scheme.rows == WHOLE:
        return
    apart, together = 2 * -(-inner // scheme.rows), -(-2 * inner // scheme.rows)
    if inner % scheme.rows and apart == together:
        raise ConfigError(
            f"gate_up_proj of intermediate size {inner} has {together} scale blocks of {scheme.rows} rows, and their "
            "number does not show whether up begins a block or one spans gate and up; write gate and up apart"
        )
