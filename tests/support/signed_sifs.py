"""SIF files with layers of a few bytes and a signature."""

from __future__ import annotations

from pathlib import Path

from ekiben.core.pgp_key import Key
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, Signature, signed_message, write_sif
from ekiben.signing import gpg
from support.small_sifs import DEFFILE, ID, squashfs

ALICE, BOB = "Alice <alice@example.org>", "Bob <bob@example.org>"
EPOCH = 1_700_000_000


def layers(folder: Path, *names: str) -> list[Partition]:
    return [squashfs(folder / name, name) for name in names]


def make_signed(out: Path, parts: list[Partition], key: Key) -> Path:
    message = signed_message(parts, SifHeader(ID, DEFFILE, "amd64", EPOCH))
    data, hash = gpg.sign(message, key, clear=True)
    write_sif(out, parts, SifHeader(ID, DEFFILE, "amd64", EPOCH), signature=Signature(data, key.fingerprint, hash))
    return out
