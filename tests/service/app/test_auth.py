"""Who may ask."""

from contextlib import nullcontext

import pytest
from starlette.requests import Request

from offbeat.service.app.auth import LOCAL_NAMES, HostNames, authenticate, demand_local
from offbeat.service.errors import NameRefusedError, UnknownError, UnknownKeyError
from offbeat.service.keys import Keys


def request(headers: dict[str, str], client: str = "127.0.0.1") -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": (client, 1)})


def test_a_key_is_an_owner_and_no_key_is_nobody():
    keys = Keys.open_house()
    caller = authenticate(request({"x-api-key": "tml-a"}), keys)
    assert caller == authenticate(request({"x-api-key": "tml-a"}), keys) != authenticate(request({"x-api-key": "tml-b"}), keys)
    for bearer in ("Bearer tml-a", "bearer  tml-a"):
        assert authenticate(request({"authorization": bearer}), keys) == caller
    assert authenticate(request({"x-api-key": "tml-a", "authorization": "Bearer tml-b"}), keys) == caller
    for headers in ({}, {"authorization": "Basic tml-a"}, {"authorization": "tml-a"}, {"authorization": "Bearer "}):
        with pytest.raises(UnknownKeyError, match="requires an API key; set TINKER_API_KEY"):
            authenticate(request(headers), keys)
    with pytest.raises(UnknownKeyError):
        authenticate(request({"x-api-key": "sk-a"}), keys)


def test_what_is_for_this_machine_is_refused_to_others():
    demand_local(request({"host": "localhost"}, "::1"), LOCAL_NAMES, public=False)
    demand_local(request({"host": "127.0.0.1:8000"}, "10.1.2.3"), LOCAL_NAMES, public=True)
    with pytest.raises(UnknownError, match="--public-status"):
        demand_local(request({}, "10.1.2.3"), LOCAL_NAMES, public=False)


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-proto", "via"])
def test_what_a_proxy_passes_on_is_not_this_machines_whatever_it_says(header: str):
    with pytest.raises(UnknownError, match="--public-status"):
        demand_local(request({header: "127.0.0.1"}), LOCAL_NAMES, public=False)


@pytest.mark.parametrize(("host", "local", "anywhere"), [
    ("localhost:80", True, True), ("127.0.0.1", True, True), ("[::1]:9", True, True), ("LOCALHOST.", True, True),
    ("Proxy.Example", True, True),
    ("10.0.0.7:80", False, True), ("[2001:db8::1]", False, True), ("evil.example", False, False), ("127.0.0.1.evil.example", False, False),
    ("10.0.0.7.evil.example", False, False), ("[::1", False, False), ("localhost@evil.example", False, False)])
def test_names_of_a_server_are_those_that_can_mean_no_other(host: str, local: bool, anywhere: bool):
    for any_address, allowed in ((False, local), (True, anywhere)):
        names = HostNames(["proxy.example"], any_address=any_address)
        with nullcontext() if allowed else pytest.raises(NameRefusedError, match=r"serve\.allowed_hosts"):
            names.demand(request({"host": host}))
