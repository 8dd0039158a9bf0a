"""Prometheus /metrics: the service's status at the time of the scrape, in addition to the counts of `journal`."""

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from offbeat.service.types import Status

MakeStatus = Callable[[], Status]
"""Returns the status of the server now."""

_COUNTS = {
    "rank_deaths": "Train ranks whose process ended", "trainer_restarts": "Restarts of all train ranks",
    "quarantines": "Engines taken out of service", "engine_restarts": "Restarts of engines that were tried",
    "failed_loads": "Adapters that an engine could not load"}
_OF_OWNERS = {
    "models": "Models of an owner", "queued_tokens": "Its tokens under way", "queued_bytes": "Memory for them",
    "sessions": "Sessions of an owner", "disk_bytes": "Its checkpoints and answers", "checkpoints": "How many", "samplers": "Its samplers"}


class StatusCollector(Collector):
    """Converts a status into samples."""

    def __init__(self, status: MakeStatus) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Return nothing, because there is no status yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        queues = {"training": status.training, "sampling": status.sampling}
        yield CounterMetricFamily("offbeat_trained_tokens", "Tokens of forward and backward passes", status.trained_tokens)
        yield CounterMetricFamily("offbeat_sampled_tokens", "Tokens that engines generated", status.sampled_tokens)
        yield GaugeMetricFamily("offbeat_trainers_alive", "1 while the train ranks run", float(status.trainers_alive))
        yield _labelled("offbeat_models", "Models", "where", {
            "resident": sum(model.resident for model in status.models), "parked": sum(not model.resident for model in status.models)})
        yield _labelled("offbeat_queue_jobs", "Work that waits or runs", "queue", {name: queue.jobs for name, queue in queues.items()})
        yield _labelled("offbeat_queue_tokens", "Its tokens", "queue", {name: queue.tokens for name, queue in queues.items()})
        yield _labelled(
            "offbeat_queue_oldest_wait_seconds", "Its longest wait", "queue", {name: q.oldest_wait_s for name, q in queues.items()})
        for name, text in _OF_OWNERS.items():
            yield _labelled(f"offbeat_owner_{name}", text, "owner", {o.owner: getattr(o, name) for o in status.owners})
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"offbeat_{name}", text, getattr(status.counts, name))
        yield _labelled("offbeat_process_memory_bytes", "Resident memory", "process", {p.name: p.memory_bytes for p in status.processes})
        yield _labelled("offbeat_engine_up", "1 while it serves", "engine", {e.name: e.state == "serving" for e in status.engines})
        yield _labelled("offbeat_engine_adapters", "Adapters held", "engine", {e.name: len(e.adapters) for e in status.engines})
        yield _labelled(
            "offbeat_engine_outstanding_tokens", "Tokens asked of it", "engine", {e.name: e.outstanding_tokens for e in status.engines})


def _labelled(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def scrape(registry: CollectorRegistry) -> Response:
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
