"""Recognises names and addresses of this machine. Used by the servers, which trust other machines only with a key."""

from ipaddress import ip_address
from urllib.parse import urlsplit


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
