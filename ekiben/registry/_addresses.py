"""Origins of URLs, and whether an address belongs to the internet or to a private network."""

from __future__ import annotations

import ipaddress
import socket

Origin = tuple[str, str, int]
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052


def origin(url: str) -> Origin:
    """Return scheme, host and port, as the library that connects reads them: two parsers would differ over ``\\`` and
    ``@``.

    Raises ValueError for what is not a URL of http or https, and for one that has a user.
    """
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except LocationParseError as error:
        raise ValueError("is not a URL") from error
    scheme, host = parts.scheme or "", (parts.host or "").lower()
    if scheme not in _PORTS or not host:
        raise ValueError("is not a URL of http or https")
    if parts.auth is not None:
        raise ValueError("has a user in it")
    return scheme, host, parts.port or _PORTS[scheme]


def is_private(address: str) -> bool:
    """Return whether an IP address is private, loopback, link-local, unspecified or multicast."""
    item = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(item, ipaddress.IPv6Address):
        inner = item.ipv4_mapped or item.sixtofour
        if inner is None and item in _NAT64:
            inner = ipaddress.IPv4Address(item.packed[-4:])
        item = inner or item
    return item.is_multicast or not item.is_global


def names_private(host: str) -> bool:
    """Return whether a URL's host is a private address, in any form that is connected to (127.1, 0x7f000001), or
    localhost.

    For requests through a proxy, which does the connecting: what other names lead to is not known here.
    """
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return is_private(host)
    except ValueError:
        pass
    try:
        return is_private(socket.inet_ntoa(socket.inet_aton(host)))  # the C library's forms
    except (OSError, UnicodeError):
        return False
