"""Who may ask."""

import pytest
from starlette.requests import Request

from offbeat.service.app.auth import authenticate, demand_local, is_loopback
from offbeat.service.errors import UnknownError, UnknownKeyError
from offbeat.service.keys import Keys


def request(headers: dict[str, str], client: str = "127.0.0.1") -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": (client, 1)})


def test_a_key_is_an_owner_and_no_key_is_nobody():
    keys = Keys.open_house()
    caller = authenticate(request({"x-api-key": "tml-a"}), keys)
    assert caller == authenticate(request({"x-api-key": "tml-a"}), keys) != authenticate(request({"x-api-key": "tml-b"}), keys)
    with pytest.raises(UnknownKeyError, match="wants an API key; set TINKER_API_KEY"):
        authenticate(request({}), keys)
    with pytest.raises(UnknownKeyError):
        authenticate(request({"x-api-key": "sk-a"}), keys)


@pytest.mark.parametrize(("host", "own"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::ffff:127.0.0.1", True),
    ("0.0.0.0", False), ("::", False), ("192.168.0.3", False), ("::ffff:10.0.0.1", False), ("example.org", False), ("", False)])
def test_only_loopback_addresses_are_this_machine(host: str, own: bool):
    assert is_loopback(host) is own


def test_what_is_for_this_machine_is_refused_to_others():
    demand_local(request({}, "::1"))
    with pytest.raises(UnknownError, match="--public-status"):
        demand_local(request({}, "10.1.2.3"))
