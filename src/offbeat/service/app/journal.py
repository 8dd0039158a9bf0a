"""Records ended requests: a log line for each, counts for /metrics, and the latest errors for the status page."""

import logging
import time
from collections import deque
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from offbeat.chat.refusals import GONE
from offbeat.service.app.reply import Endpoint

_log = logging.getLogger(__name__)
_ERRORS_KEPT, _KEPT_OF_ONE = 50, 15
_STRANGERS_KEPT, _STRANGERS_LOGGED_EVERY_S = 5, 1.0
_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_HARMLESS = (408, 429, GONE)  # a busy server answers so all day, and clients may go when they like


@dataclass(frozen=True)
class Trouble:
    """A request that was refused or failed."""

    time: float
    request_id: str
    owner: str
    what: str
    sentence: str


@dataclass(frozen=True)
class Strangers:
    """Requests without a known key: their number, and the latest ones, newest first."""

    requests: int = 0
    last: tuple[Trouble, ...] = ()


class Journal:
    """Records every request. One owner's errors cannot push all others' off the list `troubles`, newest first; strangers have their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Counts are registered in `registry`."""
        self.troubles: deque[Trouble] = deque(maxlen=_ERRORS_KEPT)
        self.strangers = Strangers()
        self._stranger_logged = 0.0
        self._requests = Counter("offbeat_http_requests", "Requests by endpoint and status", ["endpoint", "status"], registry=registry)
        self._seconds = Histogram("offbeat_http_seconds", "Time to the answer", ["endpoint"], buckets=_BUCKETS, registry=registry)

    def note(self, endpoint: Endpoint, path: str, *, request_id: str, owner: str, status: int, seconds: float, detail: str = "") -> None:
        """Record an answered request in the log, the metrics and, if it failed, the errors."""
        name = endpoint.path.removeprefix("/api/v1/")
        self._requests.labels(name, status).inc()
        self._seconds.labels(name).observe(seconds)
        failed = status >= 400 and status not in _HARMLESS
        if failed:
            self.trouble(request_id, owner, f"{endpoint.method} {path}"[:200], detail)
        if (failed or not endpoint.quiet) and (owner or self._may_log_stranger()):
            fields = {"request": request_id, "owner": owner, "status": status, "ms": round(1000 * seconds, 1)}
            _log.info("%s %s", endpoint.method, path[:300], extra={"fields": fields | ({"detail": detail} if detail else {})})

    def trouble(self, request_id: str, owner: str, what: str, sentence: str) -> None:
        """Keep an error for the status page; `owner` is empty for a stranger."""
        trouble = Trouble(time.time(), request_id, owner, what, sentence)
        if not owner:
            last = (trouble, *self.strangers.last)[:_STRANGERS_KEPT]
            self.strangers = Strangers(self.strangers.requests + 1, last)
            return
        self.troubles.appendleft(trouble)
        of_owner = [known for known in self.troubles if known.owner == owner]
        if len(of_owner) > _KEPT_OF_ONE:
            self.troubles.remove(of_owner[-1])

    def _may_log_stranger(self) -> bool:
        """Allow one line per second, as /metrics counts all of them."""
        now = time.monotonic()
        if now < self._stranger_logged + _STRANGERS_LOGGED_EVERY_S:
            return False
        self._stranger_logged = now
        return True
