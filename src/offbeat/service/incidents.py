"""Counts failures of ranks and engines and keeps the latest incidents, for the status page and metrics. Fed by the event log."""

from collections import Counter, deque
from typing import Any

from offbeat.service.clock import steady_time
from offbeat.service.types import Incident, IncidentCounts
from offbeat.types import Clock

_KEPT = 50


class Incidents:
    """Counts and latest incidents. Its `hear` is a listener of `offbeat.telemetry.events.EventLog`."""

    def __init__(self, clock: Clock = steady_time) -> None:
        self._clock = clock
        self._kept: deque[Incident] = deque(maxlen=_KEPT)
        self._counts: Counter[str] = Counter()

    @property
    def last(self) -> tuple[Incident, ...]:
        """Latest incidents, newest first."""
        return tuple(self._kept)

    @property
    def counts(self) -> IncidentCounts:
        return IncidentCounts(**self._counts)

    def hear(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in one event; most kinds are ignored."""
        match kind:
            case "trainers_failed":
                dead = ", ".join(fields["dead"])
                self._note("trainers", f"{dead} died" if dead else "they failed or hung", rank_deaths=len(fields["dead"]))
            case "trainers_restarted":
                self._note("trainers", f"started again in {fields['seconds']:.1f} s", trainer_restarts=1)
            case "quarantine":
                self._note(fields["engine"], f"left service: {fields['reason']}", quarantines=1)
            case "heal_attempt" if fields["by"] == "restart":
                self._note(
                    fields["engine"], f"did not restart: {fields['reason']}" if fields["reason"] else
                    f"was restarted in {fields['seconds']:.1f} s", engine_restarts=1)
            case "healed":
                self._note(fields["engine"], f"serves again after {fields['seconds']:.1f} s")
            case "load_failed":
                self._note(fields["engine"], f"could not load {fields['adapter']}: {fields['reason']}", failed_loads=1)
            case "fanout":
                for engine, told in fields["engines"].items():
                    if told["reason"]:
                        self._note(engine, f"could not load {fields['adapter']}: {told['reason']}", failed_loads=1)

    def _note(self, who: str, text: str, **counts: int) -> None:
        self._kept.appendleft(Incident(self._clock(), who, text))
        self._counts.update(counts)
