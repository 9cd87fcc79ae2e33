"""Keyrings for tests: real gpg, in a home of its own, with keys that live for a day."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Keyring:
    home: Path

    @property
    def env(self) -> dict[str, str]:
        return {"GNUPGHOME": str(self.home)}

    def gpg(self, *args: str | Path, input: bytes = b"") -> bytes:
        argv = ["gpg", "--batch", "--yes", "--quiet", "--homedir", self.home, *args]
        done = subprocess.run(argv, input=input, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def make(self, user: str, *args: str, kind: str = "ed25519", passphrase: str = "", lives: str = "1d") -> str:
        """A new key; its fingerprint."""
        secret = ("--pinentry-mode", "loopback", "--passphrase", passphrase)
        self.gpg(*args, *secret, "--quick-generate-key", user, kind, "sign", lives)
        return next(line.split(":")[9] for line in self.listed(f"={user}") if line.startswith("fpr:"))

    def listed(self, name: str) -> list[str]:
        return self.gpg("--with-colons", "--list-keys", "--", name).decode().splitlines()

    def export(self, name: str, out: Path) -> Path:
        out.write_bytes(self.gpg("--armor", "--export", name))
        return out

    def sign(self, text: bytes, user: str, *args: str) -> bytes:
        return self.gpg(*args, "--local-user", user, "--clear-sign", input=text)

    def revoke(self, fingerprint: str) -> None:
        """With the certificate that gpg kept when it made the key; a colon keeps it from being used by mistake."""
        prepared = (self.home / "openpgp-revocs.d" / f"{fingerprint}.rev").read_bytes()
        self.gpg("--import", input=prepared.replace(b":-----BEGIN", b"-----BEGIN"))


@contextlib.contextmanager
def keyring() -> Iterator[Keyring]:
    if not shutil.which("gpg"):
        pytest.skip("gpg is not installed (tests/services.sh install)")
    home = Path(tempfile.mkdtemp(prefix="ekiben-keys-", dir="/tmp"))  # an agent's socket needs a short path
    (home / "gpg-agent.conf").write_text("s2k-count 65536\n")  # else it measures for seconds how much the machine bears
    try:
        yield Keyring(home)
    finally:
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def used(ring: Keyring) -> Iterator[None]:
    """As the user's own."""
    before = os.environ.get("GNUPGHOME")
    os.environ["GNUPGHOME"] = str(ring.home)
    try:
        yield
    finally:
        os.environ.pop("GNUPGHOME")
        if before is not None:
            os.environ["GNUPGHOME"] = before
