"""Logins at a registry, as `docker login`, `apptainer registry login`, podman and credential helpers keep them.

Looked for in this order; the first that knows the host is taken:

    APPTAINER_DOCKER_USERNAME and …_PASSWORD, or SINGULARITY_…      for any host, as Apptainer does
    DOCKER_AUTH_CONFIG                                              a config.json's text, as CI systems give it
    REGISTRY_AUTH_FILE, $DOCKER_CONFIG/config.json or ~/.docker/config.json, ~/.apptainer/docker-config.json,
    ~/.singularity/docker-config.json, $XDG_RUNTIME_DIR/containers/auth.json, ~/.config/containers/auth.json

A file's `credHelpers` and `credsStore` name programs docker-credential-NAME, which are asked.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.core import process
from ekiben.core.checked import parse_json, read_regular
from ekiben.registry.reference import HUB

_HUB_NAMES = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A name and a password, or ``token``: an identity token to exchange. ``source`` says where they are from."""

    user: str
    password: str
    source: str
    token: str = ""


def find_credentials(host: str, repository: str = "") -> Credentials | None:
    """Return credentials for ``host``, the nearest to ``repository`` where a file has several; None without any."""
    for program in ("APPTAINER", "SINGULARITY"):
        user, password = (os.environ.get(f"{program}_DOCKER_{word}") for word in ("USERNAME", "PASSWORD"))
        if user and password:
            return Credentials(user, password, f"{program}_DOCKER_USERNAME")
    for source, data in _configs():
        if credentials := _config_credentials(data, host, repository, source):
            return credentials
    return None


def _configs() -> Iterator[tuple[str, dict[str, Any]]]:
    if text := os.environ.get("DOCKER_AUTH_CONFIG"):
        yield from _parsed("DOCKER_AUTH_CONFIG", text)
    for path in _files():
        try:
            text = read_regular(path, follow=True).decode()
        except (OSError, ValueError):
            continue
        yield from _parsed(str(path), text)


def _parsed(source: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        data = parse_json(text)
    except ValueError:
        return
    if isinstance(data, dict):
        yield source, data


def _files() -> list[Path]:
    home = Path.home()
    paths = [Path(os.environ[name]) for name in ("REGISTRY_AUTH_FILE",) if os.environ.get(name)]
    paths.append(Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json")
    paths += [home / ".apptainer/docker-config.json", home / ".singularity/docker-config.json"]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        paths.append(Path(runtime) / "containers/auth.json")
    return [*paths, home / ".config/containers/auth.json"]


def _config_credentials(data: dict[str, Any], host: str, repository: str, source: str) -> Credentials | None:
    names = _names(host, repository)
    helpers = data.get("credHelpers")
    helper = next((helpers[name] for name in names if name in helpers), None) if isinstance(helpers, dict) else None
    if helper is None and isinstance(data.get("credsStore"), str):
        helper = data["credsStore"]
    if helper and (credentials := _ask_helper(str(helper), names)):
        return credentials
    auths = data.get("auths")
    for name in names if isinstance(auths, dict) else ():
        entry = auths.get(name) if isinstance(auths, dict) else None
        if isinstance(entry, dict) and (credentials := _entry_credentials(entry, source)):
            return credentials
    return None


def _names(host: str, repository: str) -> list[str]:
    """The keys of a host in a file: with the path, longest first (podman), then as docker and apptainer write it."""
    components = repository.split("/") if repository else []
    inside = [f"{host}/{'/'.join(components[:count])}" for count in range(len(components), 0, -1)]
    return [
        *inside,
        host,
        f"https://{host}",
        f"https://{host}/v1/",
        f"https://{host}/v2/",
        f"http://{host}",
        *(_HUB_NAMES if host == HUB else ()),
    ]


def _entry_credentials(entry: dict[str, Any], source: str) -> Credentials | None:
    token = entry.get("identitytoken") or ""
    user, password = entry.get("username"), entry.get("password")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):
            return None
    if token or (user and password):
        return Credentials(str(user or ""), str(password or "").rstrip("\0"), source, str(token))
    return None


def _ask_helper(helper: str, names: list[str]) -> Credentials | None:
    program = process.which(f"docker-credential-{helper}")
    for name in names if program else ():
        done = process.run([str(program), "get"], check=False, input=name)
        try:
            answer = parse_json(done.stdout) if done.returncode == 0 else None
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("Secret"):
            user, secret = str(answer.get("Username", "")), str(answer["Secret"])
            source = f"docker-credential-{helper}"
            return Credentials("", "", source, secret) if user == "<token>" else Credentials(user, secret, source)
    return None
