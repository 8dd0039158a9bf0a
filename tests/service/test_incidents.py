"""What went wrong with ranks and engines is kept and counted."""

from pathlib import Path

from offbeat.service.incidents import Incidents
from offbeat.service.types import Incident, IncidentCounts
from offbeat.telemetry.events import EventLog


def test_what_the_record_hears_is_told_and_counted() -> None:
    log, incidents = EventLog(None), Incidents(clock=lambda: 5.0)
    log.listeners.append(incidents.hear)
    log.record("threads", rank=1, engine=1)
    log.record("trainers_failed", dead=("rank 0", "rank 1"))
    log.record("trainers_failed", dead=())
    log.record("trainers_restarted", seconds=2.25)
    log.record("quarantine", engine="engine 0", reason="it does not answer")
    log.record("heal_attempt", engine="engine 0", attempt=1, by="reload", reason="no", seconds=0.1)
    log.record("heal_attempt", engine="engine 0", attempt=1, by="restart", reason="", seconds=3.0)
    log.record("heal_attempt", engine="engine 0", attempt=2, by="restart", reason="no memory", seconds=3.0)
    log.record("healed", engine="engine 0", attempts=2, seconds=6.1)
    log.record("load_failed", engine="engine 1", adapter="a@1", reason="rank 64 is too large")
    log.record("fanout", adapter="b@2", total_s=1.0, num_bytes=5, engines={
        "engine 0": {"seconds": 1.0, "retries": 0, "reason": ""}, "engine 1": {"seconds": 1.0, "retries": 0, "reason": "disk full"}})
    assert incidents.counts == IncidentCounts(rank_deaths=2, trainer_restarts=1, quarantines=1, engine_restarts=2, failed_loads=2)
    assert incidents.last == tuple(Incident(5.0, who, text) for who, text in (
        ("engine 1", "could not load b@2: disk full"), ("engine 1", "could not load a@1: rank 64 is too large"),
        ("engine 0", "serves again after 6.1 s"), ("engine 0", "did not restart: no memory"), ("engine 0", "was restarted in 3.0 s"),
        ("engine 0", "left service: it does not answer"), ("trainers", "started again in 2.2 s"), ("trainers", "they failed or hung"),
        ("trainers", "rank 0, rank 1 died")))


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    incidents, log = Incidents(), EventLog(tmp_path / "events.jsonl")
    log.listeners.append(incidents.hear)
    for i in range(200):
        log.record("quarantine", engine=f"engine {i}", reason="x")
    log.close()
    assert len(incidents.last) == 50 and incidents.last[0].who == "engine 199" and incidents.counts.quarantines == 200
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 200
