"""Where the page beside a run listens; `test_live_page` has the whole process."""

from contextlib import closing

import pytest

from offbeat.dashboard import page_process
from offbeat.errors import PortBusyError
from offbeat.listening import bind


def test_a_port_that_is_taken_leads_to_another_one_on_this_machine() -> None:
    with closing(bind("127.0.0.1", 0, who="the test")) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with closing(page_process.bind_next(port)) as listener:
            assert listener.getsockname()[0] == "127.0.0.1" and listener.getsockname()[1] != port


def test_ports_are_tried_in_a_row_and_then_any_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def bind_only_any(host: str, port: int, *, who: str) -> object:
        asked.append(port)
        if port:
            raise PortBusyError("taken")
        return bind(host, port, who=who)

    monkeypatch.setattr(page_process, "bind", bind_only_any)
    with closing(page_process.bind_next(8765)) as listener:
        assert listener.getsockname()[1] > 0
    assert asked == [*range(8765, 8785), 0]


def test_of_two_processes_that_have_bound_a_port_only_one_gets_it() -> None:
    with closing(bind("127.0.0.1", 0, who="the test")) as early:
        port = early.getsockname()[1]
        with closing(page_process.bind_next(port)) as first, closing(page_process.bind_next(port)) as second:
            assert first.getsockname()[1] == port != second.getsockname()[1]
