"""This machine's own names and addresses, and what only looks like them."""

import pytest

from offbeat.hosts import is_loopback, names_loopback


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
