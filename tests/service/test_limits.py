"""Limits: charged, released, refused for now or for good."""

import pytest

from offbeat.service.errors import OverLimitError, RequestError, TooLargeError
from offbeat.service.limits import Limits, Usage, Use

LIMITS = Limits(max_models=2, max_queued_tokens=100, max_disk_bytes=1000)


def test_what_is_charged_and_released_adds_up_for_each_owner() -> None:
    usage = Usage(lambda owner: LIMITS)
    usage.charge("alice", models=1, queued_tokens=40)
    usage.charge("alice", queued_tokens=60, disk_bytes=1000)
    usage.charge("bob", models=2)
    assert usage.of("alice") == Use(1, 100, 1000)
    usage.release_charge("alice", queued_tokens=40, disk_bytes=1000)
    assert usage.of("alice") == Use(1, 60, 0)
    assert usage.of("bob") == Use(2, 0, 0)
    assert usage.of("nobody") == Use()
    usage.release_charge("bob", models=2)
    assert set(usage._uses) == {"alice"}, "who has nothing is forgotten"


def test_a_full_queue_is_a_matter_of_time() -> None:
    usage = Usage(lambda owner: LIMITS)
    usage.charge("alice", queued_tokens=70)
    with pytest.raises(OverLimitError, match="you have 70 tokens under way and may have 100") as caught:
        usage.charge("alice", queued_tokens=31)
    assert caught.value.status == 429
    assert caught.value.retry_after_s > 0
    usage.release_charge("alice", queued_tokens=70)
    usage.charge("alice", queued_tokens=31)


def test_what_will_never_fit_is_refused_for_good() -> None:
    usage = Usage(lambda owner: LIMITS)
    with pytest.raises(TooLargeError, match="101 tokens"):
        usage.charge("alice", queued_tokens=101)
    usage.charge("alice", models=2, disk_bytes=900)
    with pytest.raises(RequestError, match="you have 2 of 2 models"):
        usage.charge("alice", models=1)
    with pytest.raises(RequestError, match="take up 900 bytes, 101 more would exceed the 1000"):
        usage.charge("alice", disk_bytes=101)


def test_memory_is_budgeted_beside_tokens() -> None:
    usage = Usage(lambda owner: Limits(max_queued_bytes=1000))
    with pytest.raises(TooLargeError, match="may take 1001 bytes of memory, but you may have at most 1000 under way; send fewer datums"):
        usage.charge("alice", queued_tokens=1, queued_bytes=1001)
    usage.charge("alice", queued_tokens=1, queued_bytes=700)
    with pytest.raises(OverLimitError, match="may take 700 bytes of memory and 1000 are allowed"):
        usage.charge("alice", queued_tokens=1, queued_bytes=301)
    usage.charge("bob", queued_bytes=1000)
    assert usage.of("alice") == Use(queued_tokens=1, queued_bytes=700)


@pytest.mark.parametrize("kind", ["sessions", "samplers"])
def test_sessions_and_samplers_are_bounded(kind: str) -> None:
    usage = Usage(lambda owner: Limits(max_sessions=2, max_samplers=2))
    usage.charge("alice", **{kind: 2})
    assert usage.is_full("alice", **{kind: 1}) and not usage.is_full("bob", **{kind: 2})
    with pytest.raises(RequestError, match=f"you have 2 of 2 {kind} that you may have"):
        usage.charge("alice", **{kind: 1})


def test_a_refused_charge_adds_nothing() -> None:
    usage = Usage(lambda owner: LIMITS)
    with pytest.raises(RequestError):
        usage.charge("alice", models=1, queued_tokens=10, disk_bytes=2000)
    assert usage.of("alice") == Use()


def test_an_owner_beyond_a_limit_may_still_do_what_it_does_not_bound() -> None:
    usage = Usage(lambda owner: LIMITS)
    usage.add("alice", models=5, disk_bytes=5000)
    usage.charge("alice", queued_tokens=100)
    usage.release_charge("alice", models=4)
    usage.charge("alice", models=1)


def test_releasing_what_was_not_charged_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="released more than was charged"):
        Usage(lambda owner: LIMITS).release_charge("alice", models=1)
