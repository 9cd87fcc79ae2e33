"""Which engine is chosen, and what -v says of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ekiben import executors
from ekiben.core.decisions import set_decision_log


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    set_decision_log(lines.append)
    yield lines
    set_decision_log(None)


def engine(problem: str | None) -> SimpleNamespace:
    return SimpleNamespace(unavailable=lambda: problem)


def test_decision_names_engines_around_the_chosen_one(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    tried = [("apptainer", engine("is not installed")), ("buildah", engine(None)), ("podman", engine(None))]
    monkeypatch.setattr(executors, "by_preference", lambda: tried)
    assert executors.choose("auto")[::2] == ("buildah", "apptainer: is not installed; usable here")
    executors.choose("auto", without={"buildah"})
    assert logged == [
        "# engine: buildah (apptainer: is not installed; usable here; not tried: docker, podman)",
        "# engine: podman (apptainer: is not installed; usable here; not tried: buildah, docker)",
    ]


def test_decision_for_a_requested_engine(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(executors, "load", lambda name: engine(None))
    executors.choose("podman")
    assert logged == ["# engine: podman (asked for)"]


def test_no_engine_is_listed_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list reads what is installed."""
    monkeypatch.setattr(executors, "by_preference", lambda: [("buildah", engine(None))])
    monkeypatch.setattr(executors, "names", lambda: pytest.fail("engines were listed"))
    assert executors.choose("auto")[0] == "buildah"
