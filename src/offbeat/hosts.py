"""Names and addresses of machines: which of them are this machine's own. Used by the servers, which trust nobody else without a key."""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine's own."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def names_loopback(authority: str) -> bool:
    """Whether a Host header, or what follows the scheme of an Origin, names this machine; a port does not matter."""
    try:
        return is_loopback(urlsplit(f"//{authority}").hostname or "")
    except ValueError:
        return False
