"""Connections to registries: they report the address that they reached, and end when bytes come too slowly.

Both are done on the socket. Below it, a body is read in pieces that a server fills as slowly as it likes, and so are
headers and the lengths of chunks; above it, a name may lead to another address when it is looked up once more.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from ekiben.registry._pace import Pace


@dataclass(frozen=True, slots=True)
class Guard:
    """Callbacks of a connection. Each may raise.

    ``on_address`` receives the address that was reached, ``on_slow`` a sentence about the bytes that came.
    """

    on_address: Callable[[str], None]
    on_slow: Callable[[str], None]


class _Measured:
    """Plain and TLS sockets that count each read and write."""

    pace: Pace | None = None

    def recv_into(self, *arguments: Any) -> int:
        began = time.monotonic()
        size: int = super().recv_into(*arguments)  # type: ignore[misc]
        return self._add(size, began)

    def send(self, *arguments: Any) -> int:
        began = time.monotonic()
        size: int = super().send(*arguments)  # type: ignore[misc]
        return self._add(size, began)

    def _add(self, size: int, began: float) -> int:
        if self.pace is not None:
            self.pace.add(size, time.monotonic() - began)
        return size


class _PlainSocket(_Measured, socket.socket):
    def sendall(self, data: Any, *flags: int) -> None:
        """Send in pieces: socket.sendall has one timeout for all of the data."""
        with memoryview(data).cast("B") as view:
            sent = 0
            while sent < len(view):
                sent += self.send(view[sent:], *flags)


class TLSSocket(_Measured, ssl.SSLSocket):
    """A socket of an SSLContext with this ``sslsocket_class``."""


class _GuardedConnection(HTTPConnection):
    """Connections of both schemes with a ``guard``, which new_adapter() sets."""

    guard: Guard

    def _new_conn(self) -> socket.socket:
        plain = super()._new_conn()
        timeout, address = plain.gettimeout(), plain.getpeername()[0]
        measured = _PlainSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        measured.settimeout(timeout)
        try:
            if self.proxy is None:  # the proxy connects; the final address is unknown
                self.guard.on_address(address)
        except BaseException:
            measured.close()
            raise
        measured.pace = Pace(self.guard.on_slow)
        return measured

    def connect(self) -> None:
        super().connect()
        if isinstance(self.sock, TLSSocket):
            self.sock.pace = Pace(self.guard.on_slow)

    @property
    def _pace(self) -> Pace | None:
        return self.sock.pace if isinstance(self.sock, _Measured) else None

    def request(self, *arguments: Any, **options: Any) -> None:
        if pace := self._pace:
            pace.begin()
        super().request(*arguments, **options)

    def getresponse(self) -> Any:
        pace = self._pace
        if pace:
            pace.begin(headers=True)
        response = super().getresponse()
        if pace:
            pace.begin()
        return response


class _GuardedTLSConnection(_GuardedConnection, HTTPSConnection):
    pass


def new_adapter(context: ssl.SSLContext, guard: Guard) -> HTTPAdapter:
    """Return the adapter of a session of requests, for http and https."""
    context.sslsocket_class = TLSSocket

    class PlainConnection(_GuardedConnection):
        pass

    class TLSConnection(_GuardedTLSConnection):
        pass

    PlainConnection.guard = TLSConnection.guard = guard

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = PlainConnection

    class TLSPool(HTTPSConnectionPool):
        ConnectionCls = TLSConnection

    pools = {"http": PlainPool, "https": TLSPool}

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> Any:
            super().init_poolmanager(*args, ssl_context=context, **options)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
            manager = super().proxy_manager_for(*args, ssl_context=context, **options)
            if hasattr(manager, "proxy"):  # a SOCKS manager has its own pools
                manager.pool_classes_by_scheme = pools
            return manager

    return Adapter()
