"""Recognises names and addresses of this machine, and keeps requests to it away from proxies.

Used by servers, which trust other machines only with a key, and by clients. Requests to a server on this machine, or started by a run, go
directly, despite HTTP_PROXY; others as HTTP_PROXY, HTTPS_PROXY and NO_PROXY say. Sessions of aiohttp go directly unless told not to.
"""

import http.client
import socket
import urllib.request
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def bearer_key(authorization: str) -> str:
    """Return the key of an Authorization header, as in "Bearer KEY"; the scheme's case does not matter (RFC 9110). "" if it has none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_loopback(host: str) -> bool:
    """Whether an address, or the name "localhost", belongs to this machine."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def names_loopback(authority: str) -> bool:
    """Whether a Host header, or an Origin without its scheme, names this machine; the port is ignored."""
    try:
        return is_loopback(urlsplit(f"//{authority}").hostname or "")
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Whether a host of a URL is this machine: its loopback, its name, or the address of one of its interfaces."""
    if is_loopback(host.lower()) or host.lower() == socket.gethostname().lower():
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_unspecified or str(address) in {
        each.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for each in interface}


def open_url(request: urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Send a request and return the answer: directly to this machine, else as the environment's proxies say.

    Raises:
        OSError: no answer came; an urllib.error.HTTPError has a status of 400 or more.
    """
    if is_this_machine(urlsplit(request.full_url).hostname or ""):
        return open_directly(request, timeout_s=timeout_s)
    return urllib.request.urlopen(request, timeout=timeout_s)


def open_directly(request: urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Send a request to a server of one's own directly, wherever it is, and return the answer; errors are as in `open_url`."""
    return _DIRECT.open(request, timeout=timeout_s)


def direct(environ: Mapping[str, str], host: str = LOOPBACK) -> dict[str, str]:
    """Return variables by which clients reach this machine, and `host`, without a proxy, e.g. {"NO_PROXY": "127.0.0.1,localhost", ...}."""
    known = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    own = (f"{LOOPBACK},localhost", "" if is_loopback(host) else host)
    hosts = known if known.strip() == "*" else ",".join(filter(None, (known, *own)))  # an asterisk among others stands for nothing
    return {"NO_PROXY": hosts, "no_proxy": hosts}
