"""Who may look at the live page."""

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from offbeat.dashboard.access import AccessGate

KEY = "a-long-random-key-ö"


async def secret(_: Request) -> PlainTextResponse:
    return PlainTextResponse("secret")


def client(key: str, *, base_url: str = "http://127.0.0.1:8765") -> TestClient:
    routes = [Route(path, secret, methods=["GET"]) for path in ("/", "/api/runs")]
    app = Starlette(routes=routes, middleware=[Middleware(AccessGate, key=key)])
    return TestClient(app, base_url=base_url, follow_redirects=False)


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:8765", 200), ("localhost", 200), ("[::1]:8765", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403),
    ("192.168.1.7", 403)])
def test_without_a_key_only_requests_to_this_machine_s_own_names_are_answered(host: str, status: int) -> None:
    answer = client("").get("/api/runs", headers={"host": host})
    assert answer.status_code == status and ("secret" in answer.text) == (status == 200)


def test_a_key_is_demanded_of_every_path_and_method() -> None:
    http = client(KEY)
    wrong = ({"authorization": "Bearer wrong"}, {"authorization": ""}, {"cookie": "offbeat-watch-8765=wrong"}, {"host": "localhost"})
    for headers in ({}, *wrong):
        for path in ("/", "/api/runs", "/?key=wrong", "/?key=", "/nowhere"):
            answer = http.get(path, headers=headers)
            assert answer.status_code == 401 and "secret" not in answer.text
    assert http.post("/").status_code == 401
    assert http.get("/api/runs?key=" + KEY).status_code == 401, "only the page itself takes it from the address"


def test_the_key_of_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_see() -> None:
    http = client(KEY)
    answer = http.get("/", params={"key": KEY})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie


def test_the_key_is_taken_as_a_cookie_or_as_a_bearer_token() -> None:
    http = client("plain-key")
    assert http.get("/", params={"key": "plain-key"}).status_code == 303
    assert http.get("/api/runs").text == "secret"
    for scheme in ("Bearer", "bearer"):
        assert client("plain-key").get("/api/runs", headers={"authorization": f"{scheme} plain-key"}).text == "secret"


def test_every_answer_forbids_scripts_from_elsewhere_frames_and_sniffing() -> None:
    for http, path in ((client(""), "/"), (client(KEY), "/"), (client(""), "/nowhere")):
        headers = http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store" and "access-control-allow-origin" not in headers
