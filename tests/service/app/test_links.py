"""Links that nobody can guess and that expire."""

import pytest

from offbeat.service.app import links as module
from offbeat.service.app.links import LINK_S, Links


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test may change."""
    time = [1000.0]
    monkeypatch.setattr("offbeat.service.app.links.time.time", lambda: time[0])
    return time


def test_links_lead_to_their_targets_until_they_expire(now: list[float]) -> None:
    links = Links[str]()
    token, expires = links.add("a")
    assert len(token) >= 32 and expires == now[0] + LINK_S
    assert links.find(token) == "a" and links.find("x") is None
    now[0] += LINK_S
    assert links.find(token) is None
    links.add("b")
    assert len(links) == 1


def test_an_equal_target_has_the_same_link_while_half_of_its_time_is_left(now: list[float]) -> None:
    links = Links[str]()
    first, _ = links.add("a")
    assert links.add("a")[0] == first and links.add("b")[0] != first
    now[0] += LINK_S / 2
    second, _ = links.add("a")
    assert second != first and links.find(first) == links.find(second) == "a"


def test_links_end_with_their_targets() -> None:
    links = Links[str]()
    tokens = {target: links.add(target)[0] for target in ("one", "two")}
    links.end_links(lambda target: target == "one")
    assert links.find(tokens["one"]) is None and links.find(tokens["two"]) == "two"
    assert links.add("one")[0] != tokens["one"]


def test_links_do_not_grow_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 3)
    links = Links[int]()
    tokens = [links.add(target)[0] for target in range(5)]
    assert [links.find(token) for token in tokens] == [None, None, 2, 3, 4] and len(links) == 3
