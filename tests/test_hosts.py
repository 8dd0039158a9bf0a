"""This machine's own names and addresses, and what only looks like them."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NoReturn

import psutil
import pytest

from offbeat.hosts import direct, is_loopback, is_this_machine, names_loopback, open_directly, open_url


@pytest.mark.parametrize(("host", "own"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True), ("", False),
    ("0.0.0.0", False), ("192.168.0.7", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False)])
def test_only_this_machine_is_its_own(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.parametrize(("authority", "own"), [
    ("127.0.0.1:8001", True), ("localhost", True), ("LOCALHOST:1", True), ("[::1]:8001", True), ("evil.example:8001", False), ("", False),
    ("127.0.0.1@evil.example", False), ("[::1", False), ("null", False)])
def test_a_port_does_not_matter_and_tricks_do_not_help(authority: str, own: bool) -> None:
    assert names_loopback(authority) is own


@pytest.mark.parametrize(("host", "own"), [
    ("LOCALHOST", True), ("::1", True), ("0.0.0.0", True), (socket.gethostname(), True), ("192.0.2.7", False), ("judge.example", False),
    ("", False)])
def test_this_machine_has_a_name_and_addresses_besides_its_loopback(host: str, own: bool) -> None:
    assert is_this_machine(host) is own
    for interface in psutil.net_if_addrs().values():
        assert all(is_this_machine(each.address) for each in interface if each.family == socket.AF_INET)


@contextmanager
def server(asked: list[tuple[str, str | None]]) -> Iterator[str]:
    """A server that notes the paths that it was asked for, with the keys it was told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def refuse(address: tuple[str, int], *_: object) -> NoReturn:
    raise OSError(f"{address[0]} was asked itself")


def test_this_machine_is_asked_directly_and_others_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[tuple[str, str | None]] = []
    proxied: list[tuple[str, str | None]] = []
    with server(own) as url, server(proxied) as proxy:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "elsewhere.invalid")
        urllib.request.install_opener(None)  # it reads the environment when it is first needed
        try:
            for ask in (open_url, open_directly):
                ask(urllib.request.Request(f"{url}/health", headers={"Authorization": "k"}), timeout_s=10).close()
            assert own == [("/health", "k")] * 2 and not proxied
            open_url(urllib.request.Request("http://judge.invalid/v1"), timeout_s=10).close()
            assert proxied == [("http://judge.invalid/v1", None)]
            monkeypatch.setattr(socket, "create_connection", refuse)
            for ask, at in ((open_url, "elsewhere.invalid"), (open_directly, "judge.invalid")):
                with pytest.raises(OSError, match=f"{at} was asked itself"):
                    ask(urllib.request.Request(f"http://{at}/v1"), timeout_s=10)
        finally:
            urllib.request.install_opener(None)


def test_clients_of_others_are_told_to_reach_this_machine_directly() -> None:
    assert direct({"no_proxy": "intra"})["NO_PROXY"] == direct({"NO_PROXY": "intra"})["no_proxy"] == "intra,127.0.0.1,localhost"
    assert direct({}, "10.0.0.7") == {"NO_PROXY": "127.0.0.1,localhost,10.0.0.7", "no_proxy": "127.0.0.1,localhost,10.0.0.7"}


def test_an_environment_without_proxies_for_any_host_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid")
    for name, value in direct({"no_proxy": "*"}).items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass("elsewhere.invalid")
