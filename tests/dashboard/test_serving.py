"""The address of the live page. That it is served until a signal comes is tested by `cli/test_watch` and `test_live_page`, as processes."""

from contextlib import closing

import pytest

from offbeat.dashboard.serving import page_url
from offbeat.listening import bind


@pytest.mark.parametrize(("host", "key", "shown"), [
    ("127.0.0.1", "", "http://127.0.0.1:{}/"), ("127.0.0.1", "secret", "http://127.0.0.1:{}/?key=secret")])
def test_the_address_is_one_that_a_browser_takes(host: str, key: str, shown: str) -> None:
    with closing(bind(host, 0, who="the test")) as listener:
        assert page_url(listener, key=key) == shown.format(listener.getsockname()[1])


def test_the_address_for_other_machines_has_the_name_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "mine")
    with closing(bind("0.0.0.0", 0, who="the test")) as listener:
        assert page_url(listener) == f"http://mine:{listener.getsockname()[1]}/"
