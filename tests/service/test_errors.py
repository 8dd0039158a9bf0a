"""Refusals."""

import pytest

from offbeat.errors import OffbeatError, UserError
from offbeat.service import errors
from offbeat.service.errors import BadRequestError, FailedError, OverLimitError, RequestError, SlowBodyError, outside

REFUSALS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__ and kind is not FailedError]


@pytest.mark.parametrize("kind", REFUSALS)
def test_every_refusal_has_a_status_that_clients_do_not_repeat_for_minutes_unless_they_should(kind: type[OffbeatError]) -> None:
    status: int = kind.status  # type: ignore[attr-defined]
    assert str(kind("a sentence")) == "a sentence" and 400 <= status < 500 and status != 409
    assert (status == 408) is (kind is SlowBodyError)
    assert issubclass(kind, RequestError if kind is not OverLimitError else OffbeatError)


@pytest.mark.parametrize("sentence", [
    "the prompt has 16 tokens; shorten it", "tinker://run:train:0/weights/first was trained on org/base, where this server has org/other",
    "n must be at most the engine's max_running of 512, got 600"])
def test_a_sentence_of_the_request_alone_is_told_as_it_is(sentence: str) -> None:
    assert outside(sentence, name="m:1") == sentence


@pytest.mark.parametrize("sentence", [
    "/srv/data/checkpoints/a is no adapter", "engine 0 (http://127.0.0.1:4711) cannot be reached", "it failed:\nTraceback", "in '/etc/x'"])
def test_a_sentence_that_shows_the_servers_insides_is_for_the_log(sentence: str) -> None:
    assert outside(sentence, name="m:1") == "the server cannot do this; its log has the reason under m:1"


def test_a_refusal_is_the_users_to_mend_but_for_a_full_queue_which_passes() -> None:
    assert issubclass(BadRequestError, UserError) and issubclass(BadRequestError, ValueError)
    assert not issubclass(OverLimitError, UserError) and OverLimitError("later", retry_after_s=3.0).retry_after_s == 3.0


def test_work_that_failed_is_no_refusal_and_clients_send_it_again() -> None:
    assert FailedError.status == 503 and not issubclass(FailedError, RequestError)
