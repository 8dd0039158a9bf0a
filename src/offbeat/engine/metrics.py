"""The engine's metrics for Prometheus, read on request. Used by `server`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from offbeat.engine.engine import EmbeddedEngine


class EngineCollector(Collector):
    """Reads an engine's plain numbers; they may be one step apart from each other."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("offbeat_engine_running", "Samples being decoded.", value=engine.num_running)
        yield GaugeMetricFamily("offbeat_engine_waiting", "Requests waiting for slots.", value=engine.num_waiting)
        yield GaugeMetricFamily("offbeat_engine_scores_waiting", "Requests waiting to be scored.", value=engine.num_scores_waiting)
        yield GaugeMetricFamily("offbeat_engine_weight_version", "Version of the weights that serve.", value=engine.version)
        yield GaugeMetricFamily("offbeat_engine_switch_seconds", "Duration of the last weight switch.", value=engine.switch_s)
        yield GaugeMetricFamily("offbeat_engine_cache_bytes", "Memory of the key and value cache.", value=engine.cache_bytes)
        yield CounterMetricFamily("offbeat_engine_prompt_tokens", "Tokens of prompts.", value=engine.num_prompt_tokens)
        cached = engine.num_cached_tokens
        yield CounterMetricFamily("offbeat_engine_cached_prompt_tokens", "Those of them that were computed before.", value=cached)
        yield CounterMetricFamily("offbeat_engine_generated_tokens", "Tokens sampled.", value=engine.num_generated_tokens)
        yield GaugeMetricFamily("offbeat_engine_adapters", "Adapters that requests may use.", value=len(engine.adapters.names))
        evicted = engine.adapters.num_evicted
        yield CounterMetricFamily("offbeat_engine_adapter_evictions", "Adapters that made room for another.", value=evicted)
        samples = CounterMetricFamily("offbeat_engine_samples", "Samples finished, by reason.", labels=["reason"])
        for reason, count in sorted(engine.finished.items()):
            samples.add_metric([reason], count)
        yield samples


def registry_of(engine: EmbeddedEngine) -> CollectorRegistry:
    """Return a registry of this engine alone, for `generate_latest`."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry
