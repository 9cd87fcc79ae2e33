"""What the tests of hostile registries share: a client that does not wait, with a home of its own."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from ekiben.registry import session


@pytest.fixture(scope="session")
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls_context: ssl.SSLContext) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(session, "_trusted", lambda host, *, at_registry: tls_context)  # which takes 30 ms to read
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
