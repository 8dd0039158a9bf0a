"""What requests came to."""

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from offbeat.service.app.journal import Journal
from offbeat.service.app.reply import Call, Endpoint, answer

NOTED: dict[str, Any] = {"request_id": "r1", "owner": "alice", "seconds": 0.0123}


def of(owner: str) -> dict[str, Any]:
    return {**NOTED, "owner": owner}


async def nothing(_: Call):
    return answer({})


X = Endpoint("POST", "/api/v1/x", nothing)


def test_errors_are_kept_newest_first_and_bounded_for_each_owner() -> None:
    journal = Journal(CollectorRegistry())
    for number in range(60):
        journal.note(X, "/api/v1/x", status=422, detail=f"wrong {number}", **of(f"owner {number % 6}"))
    assert len(journal.troubles) == 50 and journal.troubles[0].sentence == "wrong 59"
    assert (journal.troubles[0].what, journal.troubles[0].owner) == ("POST /api/v1/x", "owner 5")
    for number in range(100):
        journal.note(X, "/api/v1/x", status=422, detail=f"more {number}", **NOTED)
    owners = [trouble.owner for trouble in journal.troubles]
    assert journal.troubles[0].sentence == "more 99" and owners.count("alice") == 15 and set(owners) > {"owner 0", "owner 5"}


def test_wrong_keys_are_counted_and_push_no_owners_errors_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    journal = Journal(CollectorRegistry())
    journal.note(X, "/api/v1/x", status=422, detail="what bob should see", **of("bob"))
    for number in range(200):
        journal.note(X, "/api/v1/x", status=401, detail=f"no such key {number}", **of(""))
    assert [trouble.sentence for trouble in journal.troubles] == ["what bob should see"]
    strangers = journal.strangers
    assert strangers.requests == 200 and strangers.last[0].sentence == "no such key 199" and len(strangers.last) == 5
    assert len(caplog.records) < 10, "the log is not theirs either"


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
