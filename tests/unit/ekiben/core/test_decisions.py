"""Lines of -v about decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.decisions import is_logging, log_decision, set_decision_log


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    set_decision_log(lines.append)
    yield lines
    set_decision_log(None)


def test_nothing_is_written_by_default() -> None:
    assert not is_logging()
    log_decision("engine", "buildah")


def test_a_line_is_a_comment_of_the_shell(logged: list[str]) -> None:
    assert is_logging()
    log_decision("engine", "buildah", "podman: no\nsocket; usable here")
    log_decision("store", Path("/x"))
    assert logged == ["# engine: buildah (podman: no socket; usable here)", "# store: /x"]


def test_a_line_is_written_once(logged: list[str]) -> None:
    for engine in ("buildah", "buildah", "docker", "buildah"):
        log_decision("engine", engine)
    assert logged == ["# engine: buildah", "# engine: docker"]


@pytest.mark.parametrize("login", ["me:secret", "secret", "me:sec@ret", "secret:"])
def test_the_login_of_a_url_is_left_out(logged: list[str], login: str) -> None:
    log_decision("mirror", f"deb https://{login}@host.example/debian main", f"http://{login}@proxy:80 b@c")
    assert logged == ["# mirror: deb https://…@host.example/debian main (http://…@proxy:80 b@c)"]
