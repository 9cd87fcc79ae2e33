"""Names of images in registries: ``host/repository:tag@digest``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ekiben.core.checked import is_digest
from ekiben.core.errors import UsageError
from ekiben.core.printable import single_line

HUB = "docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


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
        """Read a reference; oras://, docker://, https:// or http:// may stand before it. Raises UsageError."""
        shown = single_line(text)
        scheme, _, rest = text.rpartition("://")
        if scheme not in ("", "oras", "docker", "http", "https"):
            raise UsageError(
                f"{shown}: '{single_line(scheme)}://' is not known; "
                "oras://, docker://, https://, http://, or none of them"
            )
        name, at, digest = rest.partition("@")
        first, slash, path = name.partition("/")
        is_host = scheme not in ("", "docker") or "." in first or ":" in first or first == "localhost"
        if slash and is_host:
            host, repository = first, path
        else:
            host, repository = HUB, name
        repository, colon, tag = repository.partition(":")
        if (colon and not tag) or (at and not digest):
            missing = "digest after the @" if at and not digest else "tag after the colon"
            raise UsageError(f"{shown}: the {missing} is missing", hint="as in registry.example.org/lab/name:tag")
        repository = f"library/{repository}" if host == HUB and "/" not in repository else repository
        if (
            not _REPOSITORY.fullmatch(repository)
            or (tag and not _TAG.fullmatch(tag))
            or (digest and not is_digest(digest))
        ):
            raise UsageError(f"{shown} is not a reference to an image", hint="as in registry.example.org/lab/name:tag")
        return cls(host, repository, digest, tag, scheme if scheme.startswith("http") else "")

    @property
    def tag_or_digest(self) -> str:
        """Return the digest, else the tag, else latest."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"{self.host}/{self.repository}{tag}{digest}"


def is_reference(text: str) -> bool:
    """Return whether a name begins with a registry's scheme or host, rather than with a folder."""
    host, slash, _ = text.partition("/")
    return "://" in text or bool(slash and re.fullmatch(r"localhost|[\w-]+([.:][\w-]+)+", host, re.ASCII))


def digest_of(data: bytes) -> str:
    """Return the digest of a blob or a manifest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
