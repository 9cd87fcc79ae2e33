"""A Docker daemon that does not answer, or refuses the user."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.executors import _docker_daemon


@pytest.fixture(autouse=True)
def no_client_is_known() -> Iterator[None]:
    _docker_daemon.client.cache_clear()
    yield
    _docker_daemon.client.cache_clear()


@pytest.mark.parametrize("is_refused", [False, True])
def test_no_socket_is_left_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_refused: bool) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_refused:
            with socket.socket(socket.AF_UNIX) as gone:
                gone.bind(str(path))  # and nobody listens
        assert _docker_daemon.unavailable() == f"no Docker daemon answers at unix://{path}"
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


@pytest.mark.parametrize("kind", ["unix", "tcp", "https"])
def test_a_silent_daemon_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    monkeypatch.setattr(_docker_daemon, "_PATIENCE", 0.2)
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as silent:
        silent.bind(str(tmp_path / "docker.sock") if kind == "unix" else ("127.0.0.1", 0))
        silent.listen()
        where = f"unix://{tmp_path}/docker.sock" if kind == "unix" else f"{kind}://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("DOCKER_HOST", where)
        assert _docker_daemon.unavailable() == f"no Docker daemon answers at {where}"
