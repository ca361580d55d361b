"""Metrics of layers for Prometheus, read on scrape, with a limit on the number of series.

    from prometheus_client import REGISTRY, start_http_server
    from moe_mk.integrations.prometheus import LayerMetrics

    REGISTRY.register(LayerMetrics(layers))
    start_http_server(9400)

A forward pass has no additional cost: the layer keeps the counters anyway. A scrape synchronises with the GPU once for
each layer. Written for prometheus-client 0.26 (`pip install 'moe-mk[metrics]'`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from moe_mk.errors import ConfigError
from moe_mk.layer import MoELayer

MOST_EXPERTS = 16
MOST_LAYERS = 128
OTHER = "other"


class LayerMetrics:
    """A collector: expert load, traffic and attestation of some layers.

    most_experts: of a layer, the busiest ones get a series each; all others share one, labelled "other". 61 layers of
    256 experts would be 15,616 series, too many for metrics systems. most_layers: more raise ConfigError.
    """

    def __init__(
        self, layers: Sequence[MoELayer], *, most_experts: int = MOST_EXPERTS, most_layers: int = MOST_LAYERS
    ) -> None:
        names = [layer.name for layer in layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = []
        if len(layers) > most_layers:
            problems.append(f"{len(layers)} layers exceed most_layers={most_layers}; export every n-th, or raise it")
        if twice:
            problems.append(f"layers share the name {', '.join(map(repr, twice))}; build them with name=")
        if most_experts < 0:
            problems.append(f"most_experts={most_experts} must not be negative")
        if problems:
            raise ConfigError("; ".join(problems))
        self.layers, self.most_experts = tuple(layers), most_experts

    def describe(self) -> list[Metric]:
        """No metrics: registration must not read a device."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current values of all series."""
        loads = {layer.name: [int(count) for count in layer.expert_load.tolist()] for layer in self.layers}
        yield self._tokens(loads)
        yield self._imbalance(loads)
        yield from self._attested()

    def _tokens(self, loads: dict[str, list[int]]) -> Metric:
        family = GaugeMetricFamily(
            "moe_mk_expert_tokens",
            "Tokens that chose an expert since the last reset; the busiest by number, the rest together",
            labels=("layer", "expert"),
        )
        for name, load in loads.items():
            busiest = sorted(range(len(load)), key=lambda expert: (-load[expert], expert))[: self.most_experts]
            for expert in sorted(busiest):
                family.add_metric((name, str(expert)), load[expert])
            if len(busiest) < len(load):
                family.add_metric((name, OTHER), sum(load) - sum(load[expert] for expert in busiest))
        return family

    def _imbalance(self, loads: dict[str, list[int]]) -> Metric:
        text = "Tokens of the busiest expert over the mean; 1 is even"
        family = GaugeMetricFamily("moe_mk_expert_load_max_over_mean", text, labels=("layer",))
        for name, load in loads.items():
            if sum(load):
                family.add_metric((name,), max(load) * len(load) / sum(load))
        return family

    def _attested(self) -> Iterator[Metric]:
        calls = GaugeMetricFamily("moe_mk_stage_calls", "Calls of a stage", labels=("layer", "stage", "backend"))
        rows = GaugeMetricFamily(
            "moe_mk_stage_bytes", "Bytes of rows that went in and came out", labels=("layer", "stage", "backend")
        )
        sent = GaugeMetricFamily("moe_mk_sent_bytes", "Bytes put on the wire", labels=("layer", "phase"))
        departures = GaugeMetricFamily(
            "moe_mk_departures", "Stages that ran another backend than decided; 0 is correct", labels=("layer",)
        )
        for layer in self.layers:
            report = layer.report()
            for run in report.stages:
                calls.add_metric((layer.name, run.stage, run.executed), run.calls)
                rows.add_metric((layer.name, run.stage, run.executed), run.num_bytes)
            for phase, count in report.sent.items():
                sent.add_metric((layer.name, phase), count)
            departures.add_metric((layer.name,), len(report.departures))
        yield from (calls, rows, sent, departures)
