"""`moe-mk trace check RECORD`: whether a routing record fits a model and its tokens, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, unless_signalled
from moe_mk.files import named_in_utf8, read_json
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.inputs import layers_of
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.files import expect_small_header
from moe_mk.lab.trace.record_check import Report, check_record
from moe_mk.lab.trace.records import ModelFacts, RecordedSequence, RoutingRecord, Sizes, read_record
from moe_mk.lab.trace.routing_forward import TraceError
from moe_mk.layer.settings import config_of, layer_spec_of, router_of, stated
from moe_mk.router.gate import gate_logits
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.gguf_source import open_source

INPUT = re.compile(r"(?:.*\.)?layers\.(\d+)\.(hidden_states|router_logits)")


@dataclass(frozen=True)
class CheckOrder:
    """The options of a check."""

    record: Path
    checkpoint: Path | None = None
    other: Path | None = None
    inputs: Path | None = None
    """Hidden states before the gates, or router logits, by layer."""
    num_layers: int | None = None
    top_k: int | None = None


def check(screen: Screen, order: CheckOrder, *, as_json: bool) -> int:
    """Check and print; exit code 1 if the record does not fit."""
    if order.inputs is not None and (order.checkpoint is None or order.other is not None):
        raise ConfigError("--inputs needs --checkpoint, whose gates choose from them, and replaces --record")
    config, facts = (None, None) if order.checkpoint is None else facts_of(order.checkpoint)
    layers = order.num_layers or (None if facts is None else facts.num_hidden_layers or len(facts.layers))
    sizes = Sizes(layers, order.top_k or (None if facts is None else facts.top_k))
    record = read_record(order.record, sizes)
    other = None if order.other is None else read_record(order.other, sizes)
    if order.inputs is not None:
        assert config is not None and facts is not None and order.checkpoint is not None
        other = chosen_by_gates(order.checkpoint, config, facts, order.inputs, record)
        record, facts = only_layers(record, facts, other.layers or ())
    report = check_record(record, facts, other)
    if as_json:
        print_json({"record": str(order.record), "kind": record.kind, **asdict(report)})
    else:
        _show(screen, record, report)
    return MISMATCH if report.findings else OK


def facts_of(checkpoint: Path) -> tuple[MoEConfig, ModelFacts]:
    """Return the facts that records of a checkpoint must fit; reads config.json and headers. Raises ConfigError."""
    found = layers_of(checkpoint)
    config, stated = config_of(checkpoint, found[0]), read_json(checkpoint / "config.json")
    counts = [part.get("num_hidden_layers") for part in (stated, *stated.values()) if isinstance(part, dict)]
    hidden = next((count for count in counts if isinstance(count, int)), None)
    layers = tuple(each for each in found if hidden is None or each < hidden)  # later ones predict further tokens
    router = config.router
    sizes = config.model.scored_experts, router.top_k
    return config, ModelFacts(*sizes, layers or tuple(found), hidden, router.num_expert_group, router.topk_group)


def only_layers(record: RoutingRecord, facts: ModelFacts, kept: tuple[int, ...]) -> tuple[RoutingRecord, ModelFacts]:
    """The facts for some layers alone, and the record with the numbers of its layers, where they are known."""
    if record.layers is None:
        every = tuple(range(facts.num_hidden_layers or 0))
        by_count = {len(every): every, len(facts.layers): facts.layers}
        counts = {each.ids_TXK.shape[1] for each in record.sequences if each.ids_TXK is not None}
        if len(counts) != 1 or next(iter(counts)) not in by_count:
            return record, facts
        record = replace(record, layers=by_count[counts.pop()])
    return record, replace(facts, layers=kept)


def chosen_by_gates(
    checkpoint: Path, config: MoEConfig, facts: ModelFacts, inputs: Path, record: RoutingRecord
) -> RoutingRecord:
    """Return the choices of the gates from hidden states [R, H] or logits [R, E] named layers.N.hidden_states
    and layers.N.router_logits, where R are the tokens of all sequences. Raises TraceError or WeightError.
    """
    given, lengths = _inputs(inputs, facts)
    source, router, ids = open_source(checkpoint), router_of(config), dict[int, Tensor]()
    for layer, (kind, values) in sorted(given.items()):
        spec = layer_spec_of(stated(config_of(checkpoint, layer), checkpoint, layer))
        weights = load_layer(source, layer, spec, owned=())
        bias_E, logits_TE = weights.bias_E, values
        if bias_E is None and config.router.group_score == "two_best":
            bias_E = torch.zeros(facts.num_experts, dtype=torch.float32, device="cpu")
        if kind == "hidden_states":
            logits_TE = gate_logits(values.float(), weights.router_EH.float())
            if weights.logit_bias_E is not None:
                logits_TE = logits_TE + weights.logit_bias_E
        ids[layer] = router(logits_TE.float(), bias_E).ids_TK
    ids_RXK = torch.stack([ids[layer] for layer in sorted(ids)], 1)
    parts = lengths or _lengths(record, len(ids_RXK))
    if sum(parts) != len(ids_RXK) or len(parts) != len(record.sequences):
        raise TraceError(
            f"{inputs} has {len(ids_RXK)} rows for sequences of {parts[:6]} tokens, the record has "
            f"{len(record.sequences)} sequences; store the tokens of each as int64 'lengths'"
        )
    sequences = zip(record.sequences, torch.split(ids_RXK, parts), strict=True)
    made = tuple(RecordedSequence(each.name, rows_TXK, each.token_ids_T) for each, rows_TXK in sequences)
    return RoutingRecord("the gates of the checkpoint", made, tuple(sorted(ids)))


def _lengths(record: RoutingRecord, rows: int) -> list[int]:
    """The tokens of each sequence: one has all rows; else as many as were recorded of it."""
    if len(record.sequences) == 1:
        return [rows]
    return [0 if each.token_ids_T is None else len(each.token_ids_T) for each in record.sequences]


def _inputs(file: Path, facts: ModelFacts) -> tuple[dict[int, tuple[str, Tensor]], list[int]]:
    try:
        expect_small_header(file)
        with named_in_utf8(file) as named, safe_open(named, framework="pt", device="cpu") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except unless_signalled(OSError, ValueError, SafetensorError) as problem:
        raise TraceError(f"--inputs {file} cannot be read as safetensors: {problem}") from problem
    lengths = found.pop("lengths", None)
    given: dict[int, tuple[str, Tensor]] = {}
    for name, values in found.items():
        match = INPUT.fullmatch(name)
        if match and int(match[1]) in facts.layers:
            given[int(match[1])] = match[2], values
    wrong = {layer: tuple(values.shape) for layer, (_, values) in given.items() if values.dim() != 2}
    rows = {len(values) for _, values in given.values() if values.dim() == 2}
    if not given or wrong or len(rows) != 1 or not all(values.is_floating_point() for _, values in given.values()):
        raise TraceError(
            f"--inputs {file} must hold layers.N.hidden_states or layers.N.router_logits, floats [R, H] or [R, E] with "
            f"equal R, of layers {list(facts.layers)[:6]}; it has {sorted(found)[:4]}, {wrong or sorted(rows)}"
        )
    if lengths is not None and (lengths.dim() != 1 or lengths.is_floating_point()):
        raise TraceError(
            f"--inputs {file}: lengths are {lengths.dtype} {tuple(lengths.shape)}, expected int64 [sequences]"
        )
    return given, [] if lengths is None else [int(each) for each in lengths]


def _show(screen: Screen, record: RoutingRecord, report: Report) -> None:
    screen.fact("record", f"{record.kind}, {len(record.sequences)} sequences, {report.num_rows} rows")
    screen.fact("compared", f"with {report.basis}" if report.agreement_X else report.basis)
    if report.agreement_X:
        least = min(report.agreement_X, key=lambda layer: report.agreement_X[layer])
        mean = sum(report.agreement_X.values()) / len(report.agreement_X)
        undone = " once the faults below are undone" if report.findings else ""
        low = f"least in layer {least}: {100 * report.agreement_X[least]:.1f} %"
        screen.fact("agreement", f"{100 * mean:.1f} % of the choices{undone}; {low}")
    for each in report.findings:
        screen.fact("fault", f"{each.fault}: {each.where}: {each.evidence}")
    if not report.findings:
        screen.fact("verdict", "the record fits" if report.agreement_X else "no fault shows in the record alone")
