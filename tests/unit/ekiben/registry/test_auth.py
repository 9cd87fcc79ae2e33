"""Where a login for a registry is found."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ekiben.registry.auth import find_credentials

HOST = "registry.example.org"


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "DOCKER_CONFIG",
        "DOCKER_AUTH_CONFIG",
        "REGISTRY_AUTH_FILE",
        "XDG_RUNTIME_DIR",
        "APPTAINER_DOCKER_USERNAME",
        "APPTAINER_DOCKER_PASSWORD",
        "SINGULARITY_DOCKER_USERNAME",
        "SINGULARITY_DOCKER_PASSWORD",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def found(repository: str = "") -> tuple[str, str] | None:
    credentials = find_credentials(HOST, repository)
    return (credentials.user, credentials.password) if credentials else None


def test_without_files_there_are_no_credentials() -> None:
    assert found() is None


@pytest.mark.parametrize(
    "location",
    [
        ".docker/config.json",
        ".apptainer/docker-config.json",
        ".singularity/docker-config.json",
        ".config/containers/auth.json",
    ],
)
@pytest.mark.parametrize("name", [HOST, f"https://{HOST}", f"https://{HOST}/v1/"])
def test_credentials_of_the_usual_files(home: Path, location: str, name: str) -> None:
    write(home / location, {"auths": {"other.example.org": auth("x", "y"), name: auth("alice", "a:b")}})
    assert found() == ("alice", "a:b")


def test_credential_files_from_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "d/config.json", {"auths": {HOST: auth("docker", "1")}})
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "d"))
    assert found() == ("docker", "1")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(write(home / "r.json", {"auths": {HOST: auth("podman", "2")}})))
    assert found() == ("podman", "2")
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {HOST: auth("ci", "3")}}))
    assert found() == ("ci", "3")
    monkeypatch.setenv("SINGULARITY_DOCKER_USERNAME", "env")
    monkeypatch.setenv("SINGULARITY_DOCKER_PASSWORD", "4")
    assert found() == ("env", "4")


def test_credentials_of_a_registry_namespace(home: Path) -> None:
    write(
        home / ".config/containers/auth.json",
        {"auths": {HOST: auth("all", "1"), f"{HOST}/lab": auth("lab", "2"), f"{HOST}/lab/x": auth("x", "3")}},
    )
    assert [found(name) for name in ("", "other", "lab/y", "lab/x", "lab/x/z")] == [
        ("all", "1"),
        ("all", "1"),
        ("lab", "2"),
        ("x", "3"),
        ("x", "3"),
    ]


@pytest.mark.parametrize("how", [{"credsStore": "test"}, {"credHelpers": {HOST: "test"}}])
def test_credential_helper_is_called(home: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object]) -> None:
    helper = home / "bin/docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(
        f'#!/bin/sh\nread host\n[ "$1 $host" = "get {HOST}" ] || {{ echo "credentials not found"; exit 1; }}\n'
        'echo \'{"Username": "helped", "Secret": "h"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:/usr/bin:/bin")
    write(home / ".docker/config.json", {**how, "auths": {"other.example.org": auth("other", "o")}})
    assert found() == ("helped", "h")
    assert find_credentials("nobody.example.org") is None
    helper.write_text('#!/bin/sh\necho \'{"Username": "<token>", "Secret": "t"}\'\n')
    token = find_credentials(HOST)
    assert token and (token.token, token.password) == ("t", "")


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "{",
        "[]",
        '{"auths": []}',
        '{"auths": {"registry.example.org": "x"}}',
        '{"credHelpers": 3}',
        '{"auths": {"registry.example.org": {"auth": "no base64 !"}}}',
        '{"credsStore": "gone"}',
    ],
)
def test_unreadable_credential_files_are_skipped(home: Path, junk: str) -> None:
    (home / ".docker").mkdir()
    (home / ".docker/config.json").write_text(junk)
    write(home / ".config/containers/auth.json", {"auths": {HOST: {"username": "last", "password": "l"}}})
    assert found() == ("last", "l")
