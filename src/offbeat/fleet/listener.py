"""Hears what happens to engines: the record of a run, or nobody. Torch-free.

The pool holds the listener, and all that works with the pool tells it.
"""

from typing import Any

from offbeat.telemetry.record import RunRecord


class FleetListener:
    """Hears of everything and does nothing; subclasses do."""

    def quarantined(self, engine: str, reason: str) -> None:
        """An engine has left service."""

    def failed(self, engine: str, reason: str) -> None:
        """An engine has failed a request."""

    def busy(self, engine: str, start_s: float, end_s: float) -> None:
        """An engine had requests for a stretch of wall-clock time; a switch of versions ends one stretch and begins the next."""

    def waits(self, text: str) -> None:
        """The first caller begins to wait for engines; a sentence for the user."""

    def event(self, kind: str, **fields: Any) -> None:
        """Something has happened, such as "adapter_loaded" with engine, adapter and seconds."""


class FleetRecord(FleetListener):
    """Writes all of it to a run's record."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def quarantined(self, engine: str, reason: str) -> None:
        self._record.events.record("quarantine", engine=engine, reason=reason)
        self._record.console.note(f"{engine} is quarantined: {reason}")

    def failed(self, engine: str, reason: str) -> None:
        self._record.events.record("engine_failed", engine=engine, reason=reason)

    def busy(self, engine: str, start_s: float, end_s: float) -> None:
        self._record.on_span("generate", engine, start_s, end_s)

    def waits(self, text: str) -> None:
        self._record.console.note(text)

    def event(self, kind: str, **fields: Any) -> None:
        self._record.events.record(kind, **fields)


class HealingRecord(FleetRecord):
    """Shows engines that are healed, too."""

    def event(self, kind: str, **fields: Any) -> None:
        super().event(kind, **fields)
        if kind == "healed":
            self._record.console.note(f"{fields['engine']} is healed after {fields['seconds']:.1f} s and serves again")
