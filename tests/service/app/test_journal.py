"""What requests came to."""

import logging

import pytest
from prometheus_client import CollectorRegistry

from offbeat.service.app.journal import Journal
from offbeat.service.app.reply import Call, Endpoint, answer

NOTED = {"request_id": "r1", "owner": "alice", "seconds": 0.0123}


async def nothing(_: Call):
    return answer({})


def test_errors_are_kept_newest_first_and_bounded() -> None:
    journal = Journal(CollectorRegistry())
    for number in range(60):
        journal.note(Endpoint("POST", "/api/v1/x", nothing), "/api/v1/x", status=422, detail=f"wrong {number}", **NOTED)
    assert len(journal.troubles) == 50 and journal.troubles[0].sentence == "wrong 59"
    assert (journal.troubles[0].what, journal.troubles[0].owner) == ("POST /api/v1/x", "alice")


@pytest.mark.parametrize(("quiet", "status", "logged"), [
    (False, 200, True), (True, 200, False), (True, 408, False), (True, 429, False), (True, 404, True)])
def test_every_request_is_a_log_line_but_the_successes_of_quiet_ones(
    caplog: pytest.LogCaptureFixture, quiet: bool, status: int, logged: bool,
) -> None:
    caplog.set_level(logging.INFO)
    Journal(CollectorRegistry()).note(Endpoint("GET", "/api/v1/x/{y}", nothing, quiet=quiet), "/api/v1/x/1", status=status, **NOTED)
    assert [record.getMessage() for record in caplog.records] == ["GET /api/v1/x/1"] * logged
    if logged:
        assert caplog.records[0].fields == {"request": "r1", "owner": "alice", "status": status, "ms": 12.3}  # type: ignore[attr-defined]
