"""Reads images from OCI registries by digest: https://github.com/opencontainers/distribution-spec

Only reading, for ``Bootstrap: docker``. Every blob is checked against its digest.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from builder.errors import FetchError

if TYPE_CHECKING:
    from requests import Response, Session

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
)  # fmt: skip
_LOCAL = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+)(:\d+)?$")
TIMEOUT = (10, 120)  # seconds: to connect, between two pieces


@dataclass(frozen=True, slots=True)
class Reference:
    """``host/repository@digest``; a name without a host is Docker Hub's."""

    host: str
    repository: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        name, _, digest = text.partition("@")
        first, slash, rest = name.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            host, repository = first, rest
        else:
            host, repository = "docker.io", name if slash else f"library/{name}"
        return cls(host, re.sub(r":[^/]*$", "", repository), digest)

    @property
    def base(self) -> str:
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        return f"{'http' if _LOCAL.match(host) else 'https'}://{host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}@{self.digest}"


class Registry:
    """One repository. Errors: FetchError with the image, what the registry said, and what to do."""

    def __init__(self, reference: Reference) -> None:
        from requests import Session

        self.reference = reference
        self._session: Session = Session()
        self._session.headers["User-Agent"] = "ekiben"

    def manifest(self, platform: str) -> dict[str, Any]:
        """The manifest for ``platform``; an index on the way is followed."""
        manifest = self._json(f"manifests/{self.reference.digest}", self.reference.digest)
        if "manifests" in manifest:
            found = [
                item["digest"] for item in manifest["manifests"] if _platform(item.get("platform", {})) == platform
            ]
            if not found:
                has = ", ".join(sorted({_platform(item.get("platform", {})) for item in manifest["manifests"]}))
                raise FetchError(f"{self.reference}: no image for {platform}; it has {has}")
            manifest = self._json(f"manifests/{found[0]}", found[0])
        return manifest

    def config(self, manifest: dict[str, Any]) -> dict[str, Any]:
        digest = manifest["config"]["digest"]
        return self._json(f"blobs/{digest}", digest)

    def _json(self, path: str, digest: str) -> dict[str, Any]:
        data = self._get(path).content
        if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
            raise FetchError(
                f"{self.reference}: the registry answered {path} with other bytes than the digest promises"
            )
        return cast(dict[str, Any], json.loads(data))

    def blob(self, digest: str, out: Path, on_bytes: Callable[[int], None]) -> None:
        sha = hashlib.sha256()
        with out.open("wb") as stream:
            for chunk in self._get(f"blobs/{digest}", stream=True).iter_content(1 << 20):
                sha.update(chunk)
                stream.write(chunk)
                on_bytes(len(chunk))
        if "sha256:" + sha.hexdigest() != digest:
            raise FetchError(
                f"{self.reference}: layer {digest} arrived with other bytes", hint="run the same command again"
            )

    def _get(self, path: str, *, stream: bool = False) -> Response:
        from requests import RequestException

        try:
            answer = self._ask(path, stream)
            if answer.status_code == 401:
                self._session.headers["Authorization"] = self._token(answer.headers.get("WWW-Authenticate", ""))
                answer = self._ask(path, stream)
        except RequestException as error:
            raise FetchError(f"{self.reference}: {self.reference.host} does not answer: {error}") from error
        if answer.status_code == 429:
            raise FetchError(
                f"{self.reference}: {self.reference.host} says: too many pulls from this address; log in, or wait"
            )
        if answer.status_code in (401, 403):
            raise FetchError(
                f"{self.reference}: access refused ({answer.status_code})", hint=f"docker login {self.reference.host}"
            )
        if not answer.ok:
            raise FetchError(f"{self.reference}: {path}: {answer.status_code} {answer.reason}: {answer.text[:200]}")
        return answer

    def _ask(self, path: str, stream: bool) -> Response:
        return self._session.get(f"{self.reference.base}/{path}", headers={"Accept": ", ".join(_MANIFESTS)},
                                 stream=stream, timeout=TIMEOUT)  # fmt: skip

    def _token(self, challenge: str) -> str:
        credentials = _credentials(self.reference.host)
        if challenge.lower().startswith("basic"):
            return "Basic " + base64.b64encode(":".join(credentials or ("", "")).encode()).decode()
        asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        parameters = {key: asked[key] for key in ("service", "scope") if key in asked}
        answer = self._session.get(asked["realm"], params=parameters, auth=credentials, timeout=TIMEOUT)
        said = answer.json()
        return f"Bearer {said.get('token') or said['access_token']}"


def _platform(said: dict[str, str]) -> str:
    return f"{said.get('os')}/{said.get('architecture')}"


def _credentials(host: str) -> tuple[str, str] | None:
    """What `docker login` keeps in its config file, for a host."""
    place = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    try:
        known = json.loads(place.read_text()).get("auths", {})
    except (OSError, ValueError):
        return None
    names = (host, f"https://{host}", "https://index.docker.io/v1/" if host == "docker.io" else host)
    found = next((known[name]["auth"] for name in names if known.get(name, {}).get("auth")), None)
    if found is None:
        return None
    user, _, password = base64.b64decode(found).decode().partition(":")
    return user, password


def unpacked(path: Path) -> IO[bytes]:
    """A layer's tar, whatever it is compressed with."""
    stream = path.open("rb")
    start = stream.read(4)
    stream.seek(0)
    if start[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream))
    if start == b"\x28\xb5\x2f\xfd":
        import zstandard

        return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(stream))
    return stream


def environment_of(config: dict[str, Any]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in config.get("config", {}).get("Env") or [] if "=" in line)


def image_layers(reference: Reference, folder: Path, platform: str, on_bytes: Callable[[int], None]) -> Iterator[Any]:
    """First the environment, then each layer's tar as a stream, bottom first."""
    registry = Registry(reference)
    manifest = registry.manifest(platform)
    yield environment_of(registry.config(manifest))
    for number, layer in enumerate(manifest["layers"]):
        path = folder / f"layer-{number}"
        registry.blob(layer["digest"], path, on_bytes)
        with unpacked(path) as stream:
            yield stream
        path.unlink()
