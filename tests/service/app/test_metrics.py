"""Prometheus metrics."""

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from http_serving import Client, Serve
from offbeat.service.app.metrics import StatusCollector, scrape
from protocol import session_of
from service_status import busy_status


def test_the_standing_of_the_service_is_told_in_prometheus_terms() -> None:
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: busy_status(time.time())))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode()) for sample in family.samples}
    assert found["offbeat_trained_tokens_total",] == 8_200_000 and found["offbeat_trainers_alive",] == 1
    assert found["offbeat_models", "resident"] == 12 and found["offbeat_models", "parked"] == 4
    assert found["offbeat_queue_jobs", "sampling"] == 112 and found["offbeat_queue_oldest_wait_seconds", "training"] == 1.25
    assert found["offbeat_engine_up", "engine 0"] == 1 and found["offbeat_engine_up", "engine 1"] == 0
    assert found["offbeat_owner_checkpoints", "owner-3"] == 9 and found["offbeat_owner_samplers", "owner-3"] == 3
    assert found["offbeat_rank_deaths_total",] == found["offbeat_failed_loads_total",] == 1 and found["offbeat_engine_restarts_total",] == 0
    assert found["offbeat_process_memory_bytes", "rank 0"] == 1650 << 20
    assert found["offbeat_engine_adapters", "engine 0"] == 9 and found["offbeat_owner_disk_bytes", "owner-3"] == 39_000_000


def test_a_scrape_is_plain_text() -> None:
    assert scrape(CollectorRegistry()).headers["content-type"].startswith("text/plain")


def test_a_real_service_is_scraped_without_a_key(serve: Serve) -> None:
    async def body(client: Client) -> None:
        await session_of(client)
        text = (await client.of("").ask("GET", "/metrics")).body.decode()
        assert 'offbeat_http_requests_total{endpoint="create_session",status="200"} 1.0' in text and "offbeat_sampled_tokens_total" in text

    serve(body)
