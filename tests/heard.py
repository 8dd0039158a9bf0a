"""A listener of engines, and a taker of notes, that keep what they hear."""

from offbeat.fleet.listener import FleetListener


class Heard(FleetListener):
    """Everything: `quarantines` are reasons by engine, `failures` are (engine, reason), `spans` are (engine, start_s, end_s)."""

    def __init__(self) -> None:
        self.quarantines: dict[str, str] = {}
        self.failures: list[tuple[str, str]] = []
        self.spans: list[tuple[str, float, float]] = []
        self.notes: list[str] = []
        self.events: list[dict[str, object]] = []

    def quarantined(self, engine: str, reason: str) -> None:
        self.quarantines[engine] = reason

    def failed(self, engine: str, reason: str) -> None:
        self.failures.append((engine, reason))

    def busy(self, engine: str, start_s: float, end_s: float) -> None:
        self.spans.append((engine, start_s, end_s))

    def waits(self, text: str) -> None:
        self.notes.append(text)

    def event(self, kind: str, **fields: object) -> None:
        self.events.append({"kind": kind} | fields)


class TakenNotes:
    """`Notes` of a run, as (kind, text)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.all]

    def note(self, kind: str, text: str) -> None:
        self.all.append((kind, text))
