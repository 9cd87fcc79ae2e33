"""A client of OCI registries: https://github.com/opencontainers/distribution-spec

Every blob and manifest is checked against its digest. Interrupted transfers resume: an upload asks how far it
came, a download asks for the rest. (docker-registry 2.8 keeps what came in whole pieces; a piece that breaks off makes
it remove that blob, whose upload starts again.) Logins: ekiben/registry/auth.py. Certificates: the system's
certificates, SSL_CERT_FILE, and the certs.d/HOST folders of docker and podman. Plain HTTP is used only for localhost
and for references that begin with http://.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from ekiben.core.checked import Fields, is_digest, parse_json
from ekiben.core.errors import FetchError
from ekiben.core.files import format_size
from ekiben.registry import session as http
from ekiben.registry._pace import MINIMUM_BYTES
from ekiben.registry.manifest import Descriptor, ImageConfig, Manifest, parse_index
from ekiben.registry.reference import Reference, digest_of
from ekiben.registry.session import BUSY, MAX_MANIFEST, MEDIA_MANIFESTS, BrokenConnection, RegistrySession, Request

if TYPE_CHECKING:
    from requests import Response

MEDIA_INDEX = MEDIA_MANIFESTS[2]
MEDIA_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
PIECE = 16 << 20  # bytes of one piece of an upload: repeated when a connection breaks
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,19})")
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob to upload: ``read(offset)`` returns its bytes from ``offset`` on, the same each time."""

    digest: str
    size: int
    read: Callable[[int], Iterable[bytes]]


class Registry:
    """One repository; threads may share it.

    Raises FetchError with the image, the answer of the registry, and a hint.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.session = RegistrySession(reference)

    # -- manifests ----------------------------------------------------------------------------------------------

    def manifest(self, platform: str) -> Manifest:
        """Return the manifest for ``platform``; an index on the way is followed."""
        data, _ = self.fetch_manifest()
        if (listed := self._parse(parse_index, data)) is not None:
            items = {item.platform: item for item in listed}
            if platform not in items:
                raise FetchError(f"{self.reference}: no image for {platform}; it has {', '.join(sorted(items))}")
            data, _ = self.fetch_manifest(items[platform].digest, items[platform].size)
        manifest = self._parse(Manifest.parse, data)
        if not manifest.layers:
            raise FetchError(f"{self.reference}: the registry answered with something that is not an image's manifest")
        return manifest

    def platform_digests(self) -> dict[str, str]:
        """Return the digest of each platform's manifest; the platform is "" where the image does not say it.

        Raises FetchError.
        """
        data, digest = self.fetch_manifest()
        if (listed := self._parse(parse_index, data)) is not None:
            return {item.platform: item.digest for item in listed}
        manifest = self._parse(Manifest.parse, data)
        is_image = manifest.config.media_type in MEDIA_CONFIGS
        architecture = self.config(manifest).architecture if is_image else ""
        return {f"linux/{architecture}" if architecture else "": digest}

    def _parse(self, parse: Callable[[bytes], _Parsed], data: bytes) -> _Parsed:
        try:
            return parse(data)
        except ValueError as error:
            web = data.lstrip()[:1] == b"<"
            raise FetchError(
                f"{self.reference}: the registry answered with something that is not an image's manifest: it {error}:"
                f" {data[:60]!r}",
                hint="is that the registry's address, and not a web page's?" if web else None,
            ) from error

    def fetch_manifest(self, tag_or_digest: str = "", size: int | None = None) -> tuple[bytes, str]:
        """Return a manifest's bytes and their digest, which is checked when one was requested. Raises FetchError.

        ``size``: its bytes, where a descriptor names it; more are not read.
        """
        digest = tag_or_digest if ":" in tag_or_digest else "" if tag_or_digest else self.reference.digest
        data = self.session.read_small(f"manifests/{tag_or_digest or self.reference.tag_or_digest}", size)
        actual = digest_of(data)
        if digest and actual != digest:
            raise FetchError(f"{self.reference}: the registry's answer does not match the digest: {actual}")
        return data, actual

    def tag_digest(self, tag: str) -> str | None:
        """Return the digest that a tag names now; None when there is no such tag. Raises FetchError."""
        request = Request("HEAD", f"manifests/{tag}", {"Accept": ", ".join(MEDIA_MANIFESTS)})
        answer = self.session.ask(request, good=(200, 404))
        if answer.status_code == 404:
            return None
        digest = answer.headers.get("Docker-Content-Digest")
        if digest is None:  # OCI lets a registry leave it out
            return self.fetch_manifest(tag)[1]
        if not is_digest(digest):
            raise FetchError(
                f"{self.reference}: the registry answered for the tag {tag} without a digest: {digest!r:.80}"
            )
        return digest

    def put_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        """Put a manifest under ``tag``, and return its digest. Raises FetchError."""
        request = Request("PUT", f"manifests/{tag}", {"Content-Type": media_type}, data, push=True)
        answer = self.session.ask(request, good=(201,))
        confirmed, digest = answer.headers.get("Docker-Content-Digest"), digest_of(data)
        if confirmed not in (None, digest):
            raise FetchError(f"{self.reference}: the registry stored the manifest {digest} as {confirmed}")
        return digest

    def config(self, manifest: Manifest) -> ImageConfig:
        """Return the config of an image. Raises FetchError."""
        return self._parse(ImageConfig.parse, self.small_blob(manifest.config.digest, manifest.config.size))

    # -- referrers of a manifest ------------------------------------------------------------------------------

    def referrers(self, digest: str) -> list[Descriptor]:
        """Return descriptors of what was attached to a manifest, from the referrers API or else from an index.

        That index has the tag sha256-…:
        https://github.com/opencontainers/distribution-spec/blob/main/spec.md#referrers-tag-schema
        """
        request = Request("GET", f"referrers/{digest}", {"Accept": MEDIA_INDEX})
        with self.session.ask(request, stream=True, good=(200, 400, 404, 405)) as answer:
            if answer.status_code == 200 and answer.headers.get("Content-Type", "").startswith(MEDIA_INDEX):
                try:
                    data = b"".join(self.session.received(answer, MAX_MANIFEST))
                except BrokenConnection as error:
                    raise FetchError(f"{self.reference}: {self.reference.host} broke off: {error}") from error
                return self._parse(parse_index, data) or []
        return self._listed(_list_tag(digest))

    def _listed(self, tag: str) -> list[Descriptor]:
        if self.tag_digest(tag) is None:
            return []
        return self._parse(parse_index, self.fetch_manifest(tag)[0]) or []

    def attached(self, digest: str) -> list[bytes]:
        """Return the content of an attached artifact. Raises FetchError."""
        manifest = self._parse(Manifest.parse, self.fetch_manifest(digest)[0])
        return [self.small_blob(layer.digest, layer.size) for layer in manifest.layers]

    def attach(self, subject: str, kind: str, data: bytes, annotations: Mapping[str, str]) -> str:
        """Store ``data`` as an artifact of the media type ``kind`` that refers to the manifest ``subject``.

        Returns its digest.
        """
        subject_data, _ = self.fetch_manifest(subject)
        blobs = [Blob(digest_of(item), len(item), lambda offset, item=item: [item[offset:]]) for item in (b"{}", data)]  # type: ignore[misc]
        for blob in blobs:
            if not self.has_blob(blob.digest):
                self.send_blob(blob, lambda _: None)
        empty, content = (dict[str, Any](digest=blob.digest, size=blob.size) for blob in blobs)
        media_type = self._parse(_media_type, subject_data) or MEDIA_MANIFESTS[0]
        title = "org.opencontainers.image.title"
        if title in annotations:  # the name of a client's file
            content["annotations"] = {title: annotations[title]}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MEDIA_MANIFESTS[0],
            "artifactType": kind,
            "config": {"mediaType": "application/vnd.oci.empty.v1+json", **empty},
            "layers": [{"mediaType": kind, **content}],
            "subject": {"mediaType": media_type, "digest": subject, "size": len(subject_data)},
            "annotations": dict(annotations),
        }
        manifest_data = json.dumps(manifest, sort_keys=True).encode()
        digest = digest_of(manifest_data)
        headers = {"Content-Type": MEDIA_MANIFESTS[0]}
        request = Request("PUT", f"manifests/{digest}", headers, manifest_data, push=True)
        answer = self.session.ask(request, good=(201,))
        if "OCI-Subject" not in answer.headers:  # the registry does not know of referrers
            item = {
                "mediaType": MEDIA_MANIFESTS[0],
                "artifactType": kind,
                "digest": digest,
                "size": len(manifest_data),
                "annotations": dict(annotations),
            }
            self._append_referrer(_list_tag(subject), item)
        return digest

    def _append_referrer(self, tag: str, item: dict[str, Any]) -> None:
        """Append an entry to the list of referrers, and check it: without locks, another client may overwrite it."""
        for _ in range(5):
            items = self._listed(tag)
            if item["digest"] in [other.digest for other in items]:
                return
            index = {
                "schemaVersion": 2,
                "mediaType": MEDIA_INDEX,
                "manifests": [*(dict(other.data) for other in items), item],
            }
            self.put_manifest(json.dumps(index, sort_keys=True).encode(), MEDIA_INDEX, tag)
        raise FetchError(f"{self.reference}: other clients keep changing the list {tag}", hint="try again")

    # -- blobs, down --------------------------------------------------------------------------------------------

    def small_blob(self, digest: str, size: int | None = None) -> bytes:
        """Return a blob that fits into memory, checked against its digest; ``size``: as its descriptor says.

        Raises FetchError.
        """
        data = self.session.read_small(f"blobs/{digest}", size)
        if digest_of(data) != digest:
            raise FetchError(f"{self.reference}: the registry's answer for {digest} does not match it")
        return data

    def blob(self, digest: str, out: Path, on_bytes: Callable[[int], None], size: int) -> None:
        """Download a blob to ``out``, in a folder of this user's, and resume where an earlier attempt left a part of
        it.

        Raises FetchError.
        """
        with out.open("a+b") as stream:
            try:
                self.download(digest, size, stream, on_bytes)
            except FetchError:
                if os.fstat(stream.fileno()).st_size == 0:
                    out.unlink(missing_ok=True)
                raise

    def download(self, digest: str, size: int, stream: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        """Download a blob of ``size`` bytes to an open file, and resume after the part that it has.

        Raises FetchError; when the bytes have another digest, the file is empty afterwards.
        """
        sha, failures, furthest = hashlib.sha256(), 0, 0
        self._check_space(digest, size, stream)
        stream.seek(0)
        while chunk := stream.read(1 << 20):
            sha.update(chunk)
            on_bytes(len(chunk))
        while True:
            before = stream.tell()
            try:
                if before < size:
                    self._receive(digest, size, stream, sha, on_bytes)
                break
            except BrokenConnection as error:
                # A connection that ends after a few bytes, again and again, is as slow as one that sends them slowly.
                failures = failures + 1 if stream.tell() < furthest + MINIMUM_BYTES else 1
                furthest = max(furthest, stream.tell())
                if failures > len(http.PAUSES):
                    raise FetchError(
                        f"{self.reference}: {self.reference.host} broke off at {stream.tell()} bytes: {error}",
                        hint="the same command resumes it",
                    ) from error
                time.sleep(http.PAUSES[failures - 1])
                sha, before = self._hash_again(stream, sha, before)
        if "sha256:" + sha.hexdigest() != digest:
            stream.seek(0)
            stream.truncate()
            raise FetchError(f"{self.reference}: blob {digest} arrived damaged", hint="run the same command again")

    def _check_space(self, digest: str, size: int, stream: BinaryIO) -> None:
        """Check that the disk has room for the size that the registry declares."""
        status, volume = os.fstat(stream.fileno()), os.fstatvfs(stream.fileno())
        missing, free = size - status.st_size, volume.f_bavail * volume.f_frsize
        if missing > free:
            raise FetchError(
                f"{self.reference}: no space left for {digest}: it needs {format_size(missing)}, {format_size(free)}"
                " are free"
            )

    def _hash_again(self, stream: BinaryIO, sha: hashlib._Hash, before: int) -> tuple[hashlib._Hash, int]:
        """Return a new hash where the server ignored the range, and sent the file from its start."""
        return (hashlib.sha256(), 0) if stream.tell() == 0 and before else (sha, before)

    def _receive(
        self, digest: str, size: int, stream: BinaryIO, sha: hashlib._Hash, on_bytes: Callable[[int], None]
    ) -> None:
        at = stream.tell()
        headers = {"Range": f"bytes={at}-"} if at else {}
        with self.session.ask(Request("GET", f"blobs/{digest}", headers), stream=True, good=(200, 206)) as answer:
            if at and answer.status_code == 200:
                stream.seek(0)
                stream.truncate()
                raise BrokenConnection("it knows no ranges: from the start again")
            for chunk in self.session.received(answer, size - at):
                stream.write(chunk)
                sha.update(chunk)
                on_bytes(len(chunk))
            if stream.tell() < size:
                raise BrokenConnection(f"{size - stream.tell()} bytes are missing")

    # -- blobs, up ----------------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has the blob. Raises FetchError."""
        return self.session.ask(Request("HEAD", f"blobs/{digest}", push=True), good=(200, 404)).status_code == 200

    def mount_blob(self, digest: str, other: str) -> bool:
        """Mount a blob from the repository ``other`` of the same registry; return whether the registry did so."""
        query = urlencode({"mount": digest, "from": other})
        request = Request("POST", f"blobs/uploads/?{query}", push=True, other=other)
        answer = self.session.ask(request, good=(201, 202, 401, 403, 404))
        if answer.status_code == 202:  # it began an upload instead
            self._cancel(answer)
        return answer.status_code == 201

    def _begin_upload(self) -> Response:
        return self.session.ask(Request("POST", "blobs/uploads/", push=True), good=(202,))

    def _cancel(self, upload: Response) -> None:
        with contextlib.suppress(FetchError):
            if location := self.session.location(upload):
                self.session.ask(Request("DELETE", location, push=True), good=(202, 204, 404, 405))

    def check_push(self) -> None:
        """Start and cancel an upload, to check that the registry answers and that this login may write.

        Raises FetchError.
        """
        self._cancel(self._begin_upload())

    def send_blob(
        self,
        blob: Blob,
        on_bytes: Callable[[int], None],
        *,
        location: str = "",
        on_location: Callable[[str], None] = lambda location: None,
    ) -> int:
        """Upload a blob in pieces, and return how many bytes were sent.

        ``location``: the URL of an interrupted upload to resume, as ``on_location`` received it. Raises FetchError.
        """
        location, offset = self._resume(location)
        if offset > blob.size:  # not ours
            location, offset = self._resume("")
        on_bytes(offset)
        failures = out = furthest = 0
        while True:
            on_location(location)
            sent = offset
            try:
                for piece in _pieces(blob.read(offset)):
                    location = self._send_piece(location, piece, sent)
                    sent, out = sent + len(piece), out + len(piece)
                    if sent > furthest:  # limit the retries with a registry that loses uploads
                        failures, furthest = 0, sent
                    on_location(location)
                    on_bytes(len(piece))
                break
            except BrokenConnection as error:
                failures += 1
                if failures > len(http.PAUSES):
                    raise FetchError(
                        f"{self.reference}: {self.reference.host} broke off at {sent} bytes of {blob.digest}: {error}",
                        hint="the same command resumes it",
                    ) from error
                time.sleep(http.PAUSES[failures - 1])
                location, offset = self._resume(location)
                on_bytes(offset - sent)
        if sent != blob.size:
            raise FetchError(
                f"{self.reference}: {blob.digest} has {sent} bytes, not {blob.size}: it changed while it was sent"
            )
        self.session.ask(Request("PUT", _with_query(location, digest=blob.digest), push=True), good=(201, 204))
        return out

    def _resume(self, location: str) -> tuple[str, int]:
        """Return the URL and the byte to resume from: of the upload at ``location`` when the registry still has it."""
        if location:
            answer = self.session.ask(Request("GET", location, push=True), good=(204, 404, 400, 416))
            if answer.status_code == 204:
                match = _RANGE.fullmatch(answer.headers.get("Range", ""))
                offset = int(match[1]) + 1 if match and match[1] != "0" else 0
                return self.session.location(answer) or self.session.absolute(location), offset
        answer = self._begin_upload()
        if not (location := self.session.location(answer)):
            raise FetchError(f"{self.reference}: the registry began an upload without a Location")
        return location, 0

    def _send_piece(self, location: str, piece: bytes, start: int) -> str:
        headers = {"Content-Type": "application/octet-stream", "Content-Range": f"{start}-{start + len(piece) - 1}"}
        request = Request("PATCH", location, headers, piece, push=True)
        answer = self.session.ask(request, good=(202, 404, 416, *BUSY), again=False)
        if answer.status_code != 202:
            raise BrokenConnection(f"{answer.status_code} {answer.reason}")
        return self.session.location(answer) or location


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
    split_url = urlsplit(url)
    return urlunsplit(split_url._replace(query=urlencode([*parse_qsl(split_url.query), *more.items()])))


def _list_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _media_type(manifest: bytes) -> str:
    return Fields.of(parse_json(manifest)).text("mediaType", "")
