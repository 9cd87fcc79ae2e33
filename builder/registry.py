"""A client of OCI registries: https://github.com/opencontainers/distribution-spec

Every blob and manifest is checked against its digest. What breaks goes on where it broke: an upload asks how far it came, a
download asks for the rest. (docker-registry 2.8 keeps what came in whole pieces; a piece that breaks off makes it forget that
blob, which then begins anew.) Who one is: builder/credentials.py. Whom one trusts: the system's certificates, SSL_CERT_FILE, and
the certs.d/HOST folders of docker and podman. Plain http is spoken to this machine, and where a reference begins with http://.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

from builder.credentials import HUB, Credentials, find_credentials
from builder.errors import FetchError, UsageError

if TYPE_CHECKING:
    from ssl import SSLContext

    from requests import Response, Session

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
)  # fmt: skip
MEDIA_INDEX = _MANIFESTS[2]
_LOCAL = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$")
_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TIMEOUT = (10, 120)  # seconds: to connect, between two pieces
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try
PATIENCE = 60.0  # seconds; who asks for a longer pause is not waited for
PIECE = 16 << 20  # bytes of one piece of an upload: what is lost when a connection breaks
_MANIFEST_SIZE = 4 << 20  # bytes; the spec's own limit
_BUSY = {429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Reference:
    """``host/repository:tag@digest``, of which the last two may be empty. A name without a host is Docker Hub's."""

    host: str
    repository: str
    digest: str = ""
    tag: str = ""
    scheme: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Also with oras://, docker://, https:// or http:// before it; the last two say how to speak. Errors: UsageError."""
        scheme, _, rest = text.rpartition("://")
        if scheme not in ("", "oras", "docker", "http", "https"):
            raise UsageError(
                f"{text}: '{scheme}://' is not known; oras://, docker://, https://, http://, or none of them"
            )
        name, _, digest = rest.partition("@")
        first, slash, path = name.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            host, repository = first, path
        else:
            host, repository = HUB, name
        repository, _, tag = repository.partition(":")
        repository = f"library/{repository}" if host == HUB and "/" not in repository else repository
        if (
            not _REPOSITORY.fullmatch(repository)
            or (tag and not _TAG.fullmatch(tag))
            or (digest and not _DIGEST.fullmatch(digest))
        ):
            raise UsageError(f"{text} is no reference to an image", hint="as in registry.example.org/lab/name:tag")
        return cls(host, repository, digest, tag, scheme if scheme.startswith("http") else "")

    @property
    def wanted(self) -> str:
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.repository}{tag}{digest}"


@dataclass(frozen=True, slots=True)
class Blob:
    """Something to send: ``read(offset)`` gives its bytes from there on, the same each time."""

    digest: str
    size: int
    read: Callable[[int], Iterable[bytes]]


class Registry:
    """One repository; threads may share it. Errors: FetchError with the image, what the registry said, and what to do."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._sessions, opened = threading.local(), list["Session"]()
        self._opened = opened
        weakref.finalize(self, _close_all, opened)
        self._authorizations: dict[str, str] = {}
        self._lock = threading.Lock()
        self._base: str | None = None
        self._answered = False

    # -- manifests ----------------------------------------------------------------------------------------------

    def manifest(self, platform: str) -> dict[str, Any]:
        """The manifest for ``platform``; an index on the way is followed."""
        manifest = self._json(*self.fetch_manifest())
        if "manifests" in manifest:
            has = {_platform(item.get("platform", {})): item["digest"] for item in self._items(manifest, "manifests")}
            if platform not in has:
                raise FetchError(f"{self.reference}: no image for {platform}; it has {', '.join(sorted(has))}")
            manifest = self._json(*self.fetch_manifest(has[platform]))
        if not isinstance(manifest.get("config"), dict) or not self._items(manifest, "layers"):
            raise FetchError(f"{self.reference}: the registry answered with something that is no image's manifest")
        return manifest

    def _items(self, manifest: dict[str, Any], name: str) -> list[dict[str, Any]]:
        items = manifest.get(name)
        good = isinstance(items, list) and all(
            isinstance(item, dict) and _DIGEST.fullmatch(str(item.get("digest"))) for item in items
        )
        if not good:
            raise FetchError(f"{self.reference}: the registry answered with something that is no image's manifest")
        return cast(list[dict[str, Any]], items)

    def fetch_manifest(self, wanted: str = "") -> tuple[bytes, str]:
        """A manifest's bytes and their digest: checked, when it was asked for by digest; said by the bytes, when by tag."""
        digest = wanted if ":" in wanted else "" if wanted else self.reference.digest
        data = self._small(f"manifests/{wanted or self.reference.wanted}")
        found = digest_of(data)
        if digest and found != digest:
            raise FetchError(
                f"{self.reference}: the registry answered with other bytes than the digest promises: {found}"
            )
        return data, found

    def tag_digest(self, tag: str) -> str | None:
        """What the tag stands for now; None when there is no such tag."""
        answer = self._ask("HEAD", f"manifests/{tag}", headers={"Accept": ", ".join(_MANIFESTS)}, good=(200, 404))
        return answer.headers.get("Docker-Content-Digest") if answer.status_code == 200 else None

    def put_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        """Returns its digest, which the registry confirms."""
        answer = self._ask(
            "PUT", f"manifests/{tag}", data=data, headers={"Content-Type": media_type}, good=(201,), push=True
        )
        said, digest = answer.headers.get("Docker-Content-Digest"), digest_of(data)
        if said not in (None, digest):
            raise FetchError(f"{self.reference}: the registry took the manifest {digest} for {said}")
        return digest

    def config(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return self._json(self.small_blob(manifest["config"]["digest"]), manifest["config"]["digest"])

    def _json(self, data: bytes, digest: str) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise FetchError(f"{self.reference}: the registry answered with something that is no manifest: {data[:60]!r}",
                             hint="is that the registry's address, and not a web page's?")  # fmt: skip
        return found

    # -- what refers to a manifest ------------------------------------------------------------------------------

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Descriptors of what was attached to a manifest: as the registry lists them, or, where it does not, an index does.

        That index has the tag sha256-…: https://github.com/opencontainers/distribution-spec/blob/main/spec.md#referrers-tag-schema
        """
        headers = {"Accept": MEDIA_INDEX}
        with self._ask("GET", f"referrers/{digest}", headers=headers, stream=True, good=(200, 400, 404, 405)) as answer:
            if answer.status_code == 200 and answer.headers.get("Content-Type", "").startswith(MEDIA_INDEX):
                try:
                    data = b"".join(self._received(answer, _MANIFEST_SIZE))
                except _Broken as error:
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off: {error}") from error
                return self._items(self._json(data, digest), "manifests")
        return self._listed(_list_tag(digest))

    def _listed(self, tag: str) -> list[dict[str, Any]]:
        if self.tag_digest(tag) is None:
            return []
        return self._items(self._json(*self.fetch_manifest(tag)), "manifests")

    def attached(self, digest: str) -> list[bytes]:
        """The content of something attached."""
        manifest = self._json(*self.fetch_manifest(digest))
        return [self.small_blob(layer["digest"]) for layer in self._items(manifest, "layers")]

    def attach(self, subject: str, kind: str, data: bytes, annotations: Mapping[str, str]) -> str:
        """Store ``data`` as an artifact of the media type ``kind`` that refers to the manifest ``subject``. Returns its digest."""
        about, _ = self.fetch_manifest(subject)
        blobs = [Blob(digest_of(item), len(item), lambda offset, item=item: [item[offset:]]) for item in (b"{}", data)]  # type: ignore[misc]
        for blob in blobs:
            if not self.has_blob(blob.digest):
                self.send_blob(blob, lambda _: None)
        empty, content = (dict[str, Any](digest=blob.digest, size=blob.size) for blob in blobs)
        title = "org.opencontainers.image.title"
        if title in annotations:  # what a client calls the file that it pulls
            content["annotations"] = {title: annotations[title]}
        manifest = {
            "schemaVersion": 2, "mediaType": _MANIFESTS[0], "artifactType": kind,
            "config": {"mediaType": "application/vnd.oci.empty.v1+json", **empty},
            "layers": [{"mediaType": kind, **content}],
            "subject": {"mediaType": self._json(about, subject).get("mediaType", _MANIFESTS[0]), "digest": subject, "size": len(about)},
            "annotations": dict(annotations),
        }  # fmt: skip
        made = json.dumps(manifest, sort_keys=True).encode()
        digest = digest_of(made)
        headers = {"Content-Type": _MANIFESTS[0]}
        answer = self._ask("PUT", f"manifests/{digest}", data=made, headers=headers, good=(201,), push=True)
        if "OCI-Subject" not in answer.headers:  # the registry does not know of referrers
            item = {"mediaType": _MANIFESTS[0], "artifactType": kind, "digest": digest, "size": len(made), "annotations": dict(annotations)}  # fmt: skip
            self._list_too(_list_tag(subject), item)
        return digest

    def _list_too(self, tag: str, item: dict[str, Any]) -> None:
        """Registries have no locks: whoever finds that another's list took the place of his does it again, which nearly helps."""
        for _ in range(5):
            items = self._listed(tag)
            if item["digest"] in [other["digest"] for other in items]:
                return
            index = {"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [*items, item]}
            self.put_manifest(json.dumps(index, sort_keys=True).encode(), MEDIA_INDEX, tag)
        raise FetchError(f"{self.reference}: others change the list {tag} again and again", hint="try again")

    # -- blobs, down --------------------------------------------------------------------------------------------

    def small_blob(self, digest: str) -> bytes:
        data = self._small(f"blobs/{digest}")
        if digest_of(data) != digest:
            raise FetchError(
                f"{self.reference}: the registry answered {digest} with other bytes than the digest promises"
            )
        return data

    def _small(self, path: str) -> bytes:
        """A body that fits into memory."""
        for pause in (*PAUSES, None):
            try:
                with self._ask("GET", path, headers={"Accept": ", ".join(_MANIFESTS)}, stream=True) as answer:
                    return b"".join(self._received(answer, _MANIFEST_SIZE))
            except _Broken as error:
                if pause is None:
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off: {error}") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def blob(self, digest: str, out: Path, on_bytes: Callable[[int], None], size: int | None = None) -> None:
        """To ``out``; what is there already is the beginning of an earlier try, and only the rest is asked for."""
        sha, failures, furthest = hashlib.sha256(), 0, 0
        with out.open("a+b") as stream:
            stream.seek(0)
            while chunk := stream.read(1 << 20):
                sha.update(chunk)
                on_bytes(len(chunk))
            while True:
                before = stream.tell()
                try:
                    if size is None or before < size:
                        self._receive(digest, stream, sha, on_bytes, size)
                    break
                except _Broken as error:
                    failures = failures + 1 if stream.tell() <= furthest else 1
                    furthest = max(furthest, stream.tell())
                    if failures > len(PAUSES):
                        raise FetchError(f"{self.reference}: {self.reference.host} broke off at {stream.tell()} bytes: {error}",
                                         hint="the same command goes on from there") from error  # fmt: skip
                    time.sleep(PAUSES[failures - 1])
                    sha, before = self._hash_again(stream, sha, before)
        if "sha256:" + sha.hexdigest() != digest:
            out.unlink(missing_ok=True)
            raise FetchError(
                f"{self.reference}: blob {digest} arrived with other bytes", hint="run the same command again"
            )

    def _hash_again(self, stream: IO[bytes], sha: hashlib._Hash, before: int) -> tuple[hashlib._Hash, int]:
        """A server that knows no ranges began from the start, and so did the file."""
        return (hashlib.sha256(), 0) if stream.tell() == 0 and before else (sha, before)

    def _receive(
        self, digest: str, stream: IO[bytes], sha: hashlib._Hash, on_bytes: Callable[[int], None], size: int | None
    ) -> None:
        at = stream.tell()
        headers = {"Range": f"bytes={at}-"} if at else {}
        with self._ask("GET", f"blobs/{digest}", headers=headers, stream=True, good=(200, 206)) as answer:
            if at and answer.status_code == 200:
                stream.seek(0)
                stream.truncate()
                raise _Broken("it knows no ranges: from the start again")
            room = None if size is None else size - at
            for chunk in self._received(answer, room):
                stream.write(chunk)
                sha.update(chunk)
                on_bytes(len(chunk))
            if size is not None and stream.tell() < size:
                raise _Broken(f"{size - stream.tell()} bytes are missing")

    def _received(self, answer: Response, most: int | None) -> Iterator[bytes]:
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        total = 0
        try:
            for chunk in answer.iter_content(1 << 20):
                total += len(chunk)
                if most is not None and total > most:
                    raise FetchError(f"{self.reference}: the registry sends more than the {most} bytes there should be")
                yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise _Broken(str(error)) from error

    # -- blobs, up ----------------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        return self._ask("HEAD", f"blobs/{digest}", good=(200, 404), push=True).status_code == 200

    def mount_blob(self, digest: str, other: str) -> bool:
        """Whether the registry took it over from another of its repositories, without a byte being sent."""
        query = urlencode({"mount": digest, "from": other})
        answer = self._ask("POST", f"blobs/uploads/?{query}", good=(201, 202, 401, 403, 404), push=True, other=other)
        if answer.status_code == 202 and (place := answer.headers.get("Location")):  # it began an upload instead
            with contextlib.suppress(FetchError):
                self._ask("DELETE", self._absolute(place), good=(202, 204, 404, 405), push=True)
        return answer.status_code == 201

    def send_blob(
        self, blob: Blob, on_bytes: Callable[[int], None], *, begun: str = "", remember: Callable[[str], None] = lambda place: None
    ) -> int:  # fmt: skip
        """In pieces; returns how many bytes went out. ``begun`` is where an earlier run sent to, as ``remember`` heard it."""
        place, offset = self._resume(begun)
        if offset > blob.size:  # not ours
            place, offset = self._resume("")
        on_bytes(offset)
        failures = out = 0
        while True:
            remember(place)
            sent = offset
            try:
                for piece in _pieces(blob.read(offset)):
                    place = self._send_piece(place, piece, sent)
                    sent, out, failures = sent + len(piece), out + len(piece), 0
                    remember(place)
                    on_bytes(len(piece))
                break
            except _Broken as error:
                failures += 1
                if failures > len(PAUSES):
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off at {sent} bytes of {blob.digest}: {error}",
                                     hint="the same command goes on from there") from error  # fmt: skip
                time.sleep(PAUSES[failures - 1])
                place, offset = self._resume(place)
                on_bytes(offset - sent)
        if sent != blob.size:
            raise FetchError(
                f"{self.reference}: {blob.digest} has {sent} bytes, not {blob.size}: it changed while it was sent"
            )
        self._ask("PUT", _with_query(place, digest=blob.digest), good=(201, 204), push=True)
        return out

    def _resume(self, place: str) -> tuple[str, int]:
        """Where to send on, and from which byte: of the upload begun at ``place`` when the registry still knows it."""
        if place:
            answer = self._ask("GET", place, good=(204, 404, 400, 416), push=True)
            if answer.status_code == 204:
                end = answer.headers.get("Range", "").rpartition("-")[2]
                offset = int(end) + 1 if end.isdigit() and end != "0" else 0
                return self._absolute(answer.headers.get("Location", place)), offset
        answer = self._ask("POST", "blobs/uploads/", good=(202,), push=True)
        place = answer.headers.get("Location", "")
        if not place:
            raise FetchError(f"{self.reference}: the registry began an upload and did not say where")
        return self._absolute(place), 0

    def _send_piece(self, place: str, piece: bytes, start: int) -> str:
        headers = {"Content-Type": "application/octet-stream", "Content-Range": f"{start}-{start + len(piece) - 1}"}
        answer = self._ask(
            "PATCH", place, data=piece, headers=headers, good=(202, 404, 416, *_BUSY), push=True, again=False
        )
        if answer.status_code != 202:
            raise _Broken(f"{answer.status_code} {answer.reason}")
        return self._absolute(answer.headers.get("Location", place))

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def base(self) -> str:
        if self._base is None:
            host = "registry-1.docker.io" if self.reference.host == HUB else self.reference.host
            scheme = self.reference.scheme or ("https" if not _LOCAL.match(host) else self._local_scheme(host))
            self._base = f"{scheme}://{host}/v2/{self.reference.repository}/"
        return self._base

    def _local_scheme(self, host: str) -> str:
        """A registry on this machine may speak either."""
        from requests import RequestException

        try:
            answer = self._session().get(f"http://{host}/v2/", timeout=TIMEOUT, allow_redirects=False)
        except RequestException:
            return "http"
        return "https" if answer.status_code == 400 and "HTTPS" in answer.text[:1000] else "http"

    def _absolute(self, place: str) -> str:
        return urljoin(self.base, place)

    def _session(self) -> Session:
        if not hasattr(self._sessions, "session"):
            self._sessions.session = _new_session(self.reference.host)
            self._opened.append(self._sessions.session)
        return cast("Session", self._sessions.session)

    def _ask(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: bytes | None = None, stream: bool = False,
        good: Sequence[int] = (200,), push: bool = False, other: str = "", again: bool = True,
    ) -> Response:  # fmt: skip
        """One answer that is ``good``. Busy servers and broken connections are asked again, if ``again``."""
        scope = f"repository:{self.reference.repository}:{'pull,push' if push else 'pull'}"
        scope += f" repository:{other}:pull" if other else ""
        for pause in (*PAUSES, None) if again else (None,):
            try:
                answer = self._authorized(method, self._absolute(path), scope, headers or {}, data, stream)
            except _Broken as error:
                if not again:
                    raise
                if pause is None or not self._answered:
                    raise FetchError(f"{self.reference}: {self.reference.host} does not answer: {error}") from error
                time.sleep(pause)
                continue
            self._answered = True
            if answer.status_code in good:
                return answer
            if answer.status_code not in _BUSY or pause is None or (pause := _asked_pause(answer, pause)) is None:
                with answer:
                    raise self._refused(answer, method, path)
            answer.close()
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _authorized(
        self, method: str, url: str, scope: str, headers: Mapping[str, str], data: bytes | None, stream: bool
    ) -> Response:
        from requests import RequestException

        known = self._authorizations.get(scope)
        try:
            for attempt in range(2):
                answer = self._session().request(
                    method, url, headers=dict(headers), data=data, stream=stream, timeout=TIMEOUT,
                    auth=_Header(known, urlsplit(self.base).netloc), allow_redirects=method in ("GET", "HEAD"),
                )  # fmt: skip
                if answer.status_code != 401 or attempt:
                    return answer
                answer.close()
                with self._lock:
                    if self._authorizations.get(scope) == known:
                        self._authorizations[scope] = self._authorize(answer.headers.get("WWW-Authenticate", ""), scope)
                    known = self._authorizations[scope]
            return answer
        except RequestException as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise FetchError(f"{self.reference}: the certificate of {self.reference.host} is not trusted: {_reason(error)}",
                                 hint=f"put your site's CA into /etc/docker/certs.d/{self.reference.host}/ca.crt, or name a bundle in "
                                      "SSL_CERT_FILE") from error  # fmt: skip
            if "WRONG_VERSION_NUMBER" in str(error) or "record layer failure" in str(error):
                raise FetchError(f"{self.reference}: {self.reference.host} does not speak https",
                                 hint=f"if its plain http is what you want: http://{self.reference}") from error  # fmt: skip
            raise _Broken(_reason(error)) from error

    def _authorize(self, challenge: str, scope: str) -> str:
        """The header that answers a 401."""
        kind, _, rest = challenge.partition(" ")
        credentials = find_credentials(self.reference.host, self.reference.repository)
        if kind.lower() == "basic":
            if credentials is None:
                raise self._nobody()
            return "Basic " + base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()
        asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or "realm" not in asked:
            raise FetchError(
                f"{self.reference}: the registry asks for a login of a kind we don't know: {challenge or 'nothing said'}"
            )
        if not asked["realm"].startswith("https://") and self.base.startswith("https://"):
            raise FetchError(
                f"{self.reference}: the registry would have the password sent in the clear to {asked['realm']}"
            )
        return f"Bearer {self._token(asked, scope, credentials)}"

    def _token(self, asked: Mapping[str, str], scope: str, credentials: Credentials | None) -> str:
        query = [(key, asked[key]) for key in ("service",) if key in asked] + [
            ("scope", item) for item in scope.split(" ")
        ]
        if credentials and credentials.token:
            form = {"grant_type": "refresh_token", "refresh_token": credentials.token, "client_id": "ekiben",
                    "service": asked.get("service", ""), "scope": scope}  # fmt: skip
            answer = self._session().post(asked["realm"], data=form, timeout=TIMEOUT)
        else:
            basic = (credentials.user, credentials.password) if credentials else None
            answer = self._session().get(asked["realm"], params=query, auth=basic or _Header(None, ""), timeout=TIMEOUT)
        if answer.status_code in (401, 403):
            raise self._nobody(credentials)
        try:
            said = answer.json()
            return str(said.get("token") or said["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise FetchError(
                f"{self.reference}: {asked['realm']} gives no token: {answer.status_code} {answer.reason}"
            ) from error

    def _nobody(self, credentials: Credentials | None = None) -> FetchError:
        said = (
            f"the login from {credentials.source} is refused"
            if credentials
            else "it wants a login, and none is known here"
        )
        return FetchError(f"{self.reference}: access refused (401): {said}", hint=_login(self.reference.host))

    def _refused(self, answer: Response, method: str, path: str) -> FetchError:
        code = answer.status_code
        if code == 401:
            return self._nobody(find_credentials(self.reference.host, self.reference.repository))
        if code == 403:
            return FetchError(f"{self.reference}: access refused (403): this login may not {'write' if method not in ('GET', 'HEAD') else 'read'} "
                              f"there", hint=_login(self.reference.host))  # fmt: skip
        if code == 404:
            what = path.partition("?")[0] if "://" not in path else "its upload"
            return FetchError(f"{self.reference}: not there: {what}: 404 {answer.reason}")
        if code == 429:
            wait = f" (it asks for {answer.headers['Retry-After']} s)" if "Retry-After" in answer.headers else ""
            return FetchError(f"{self.reference}: {self.reference.host} says 429: too many requests from this address{wait}; "
                              "log in, or wait", hint=_login(self.reference.host))  # fmt: skip
        text = "" if method == "HEAD" else answer.text[:200]
        return FetchError(
            f"{self.reference}: {method} {path.partition('?')[0]}: {code} {answer.reason}: {text}".rstrip(": ")
        )


class _Broken(Exception):
    """A connection that ended early: worth another try."""


class _Header:
    """Sends what we know to the registry itself, and keeps requests from adding what ~/.netrc says."""

    def __init__(self, value: str | None, host: str) -> None:
        self._value, self._host = value, host

    def __call__(self, request: Any) -> Any:
        if self._value and urlsplit(request.url).netloc == self._host:
            request.headers["Authorization"] = self._value
        return request


def _new_session(host: str) -> Session:
    from requests import Session
    from requests.adapters import HTTPAdapter

    context = _trusted(host)

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *words: Any, **options: Any) -> Any:
            return super().init_poolmanager(*words, ssl_context=context, **options)

        def proxy_manager_for(self, *words: Any, **options: Any) -> Any:
            return super().proxy_manager_for(*words, ssl_context=context, **options)

    session = Session()
    session.headers["User-Agent"] = "ekiben"
    session.mount("https://", Adapter())
    if _LOCAL.match(host):
        session.trust_env = False  # no proxy leads here
    return session


def _trusted(host: str) -> SSLContext:
    import ssl

    from builder.hostenv import ca_bundle

    context = ssl.create_default_context()
    if bundle := ca_bundle():
        context.load_verify_locations(bundle)
    for folder in (
        "/etc/docker/certs.d",
        "/etc/containers/certs.d",
        "~/.config/containers/certs.d",
        "~/.docker/certs.d",
    ):
        for certificate in sorted((Path(folder).expanduser() / host).glob("*.c*rt")):
            with contextlib.suppress(OSError):
                if certificate.suffix == ".crt":
                    context.load_verify_locations(certificate)
                elif (key := certificate.with_suffix(".key")).exists():  # .cert and .key: who we are
                    context.load_cert_chain(certificate, key)
    return context


def _close_all(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.close()


def _login(host: str) -> str:
    return f"docker login {host}, or apptainer registry login oras://{host}"


def _reason(error: Exception) -> str:
    """What went wrong at the bottom, without the layers of wrapping above it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, Exception):
        error = inner
    return str(error) or type(error).__name__


def _asked_pause(answer: Response, pause: float) -> float | None:
    asked = answer.headers.get("Retry-After", "")
    if not asked.isdigit():
        return pause
    return float(asked) if float(asked) <= PATIENCE else None


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    for chunk in chunks:
        waiting.append(chunk)
        if sum(map(len, waiting)) >= PIECE:
            yield b"".join(waiting)
            waiting = []
    if waiting:
        yield b"".join(waiting)


def _with_query(url: str, **more: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=urlencode([*parse_qsl(parts.query), *more.items()])))


def _platform(said: dict[str, str]) -> str:
    return f"{said.get('os')}/{said.get('architecture')}"


def _list_tag(digest: str) -> str:
    return digest.replace(":", "-")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------------------------------------------ bases of a chain


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
        registry.blob(layer["digest"], path, on_bytes, layer.get("size"))
        with unpacked(path) as stream:
            yield stream
        path.unlink()
