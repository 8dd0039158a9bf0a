"""Refusals."""

import pytest

from offbeat.errors import OffbeatError, UserError
from offbeat.service import errors
from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, SlowBodyError

REFUSALS = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", REFUSALS)
def test_every_refusal_has_a_status_that_clients_do_not_repeat_for_minutes_unless_they_should(kind: type[OffbeatError]) -> None:
    status: int = kind.status  # type: ignore[attr-defined]
    assert str(kind("a sentence")) == "a sentence" and 400 <= status < 500 and status != 409
    assert (status == 408) is (kind is SlowBodyError)
    assert issubclass(kind, RequestError if kind is not OverLimitError else OffbeatError)


def test_a_refusal_is_the_users_to_mend_but_for_a_full_queue_which_passes() -> None:
    assert issubclass(BadRequestError, UserError) and issubclass(BadRequestError, ValueError)
    assert not issubclass(OverLimitError, UserError) and OverLimitError("later", retry_after_s=3.0).retry_after_s == 3.0
