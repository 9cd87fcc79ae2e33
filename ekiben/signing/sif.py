"""PGP signatures of SIF files, as Apptainer makes and verifies them.

A SIF's signature is an object in it, clear-signed text: digests of the header, of every object and its descriptor. All
that is not a signature has to be covered by one. One good signature is enough, as somebody else may have signed, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.formats.sif import (
    NO_GROUP,
    SIGNATURE,
    SIGNATURE_EXTRA,
    Descriptor,
    SifInfo,
    Signature,
    add_signatures,
    message_of_group,
    read_sif,
    signed_descriptor,
    signed_header,
    signed_message,
)
from ekiben.signing import gpg
from ekiben.signing.gpg import Keys, SignatureError, unsigned, worst
from ekiben.store import Image, Store

_MOST = 1 << 20  # bytes of a signature
_ALGORITHMS = re.compile(r"(sha256|sha384|sha512):[0-9a-f]+")


def sign_image(image: Image, store: Store, key: Key) -> Signature:
    """Sign the image's SIF.

    A stored signature is used again, so that an equal image is an equal file. Raises EngineError.
    """
    partitions = [store.partition(layer) for layer in image.layers]
    message = signed_message(partitions, image.sif_header(store))
    name = f"signature-{hashlib.sha256(message).hexdigest()[:32]}-{key.fingerprint}"
    if known := store.check(name):
        try:
            old = Signature(known["signature"].encode(), key.fingerprint, known["hash"])
            old_message, signer = gpg.check(old.data, Keys())
            if (old_message.strip(), signer.fingerprint) == (message, key.fingerprint):
                return old
        except (KeyError, AttributeError, UnicodeError, SignatureError):
            pass
    data, hash = gpg.sign(message, key, clear=True)
    if os.access(store.root, os.W_OK):
        store.put_check(name, {"signature": data.decode(), "hash": hash})
    return Signature(data, key.fingerprint, hash)


def is_signed(path: Path) -> bool:
    """Return whether a SIF has a signature, good or not. Raises StoreError."""
    return any(item.data_type == SIGNATURE for item in read_sif(path).descriptors)


@contextlib.contextmanager
def signed_copy(path: Path, store: Store, key: Key | None, progress: Progress) -> Iterator[Path]:
    """Yield a SIF, or with a key a signed copy of it.

    Raises StoreError, SignatureError for a file that no signature can cover, EngineError when gpg does not sign.
    """
    if key is None:
        yield path
        return
    store.open_for_writing()
    with store.staging() as folder:
        with progress.step(f"sign {path}", total=path.stat().st_size):
            sign_file(path, folder / "signed.sif", key, progress.count)
        yield folder / "signed.sif"


def sign_file(path: Path, out: Path, key: Key, on_bytes: Callable[[int], None] = lambda _: None) -> bool:
    """Write a SIF with ``key``'s signature of all that is in it to ``out``, which may be ``path``.

    Returns False, and writes nothing, where the key has signed the file at ``path`` before and that is ``out``.
    Raises StoreError, SignatureError for a file that no signature can cover, EngineError when gpg does not sign.
    """
    info = read_sif(path)
    objects = [item for item in info.descriptors if item.data_type != SIGNATURE]
    _refuse_uncoverable(path, info, objects)
    known = dict[str, str]()
    with contextlib.suppress(SignatureError):
        if path == out and check_sif(path, Keys(fingerprints=frozenset([key.fingerprint])), known=known):
            return False
    signatures = dict[int, Signature]()
    try:
        with open_regular(path) as file:
            digests = _Digests(file, on_bytes, known)
            for group in sorted({item.group for item in objects}):
                message = message_of_group(info, group, lambda item: digests("sha256", item))
                data, hash = gpg.sign(message, key, clear=True)
                signatures[group] = Signature(data, key.fingerprint, hash)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    add_signatures(path, out, signatures)
    return True


def check_sif(
    path: Path,
    keys: Keys,
    on_bytes: Callable[[int], None] = lambda _: None,
    known: dict[str, str] | None = None,
) -> list[Key]:
    """Return who signed a SIF. Raises SignatureError unless signatures cover all of it, StoreError.

    ``known``: digests of this very file's objects, which are not read again; new ones are added.
    """
    info = read_sif(path)
    signatures = [item for item in info.descriptors if item.data_type == SIGNATURE]
    objects = [item for item in info.descriptors if item.data_type != SIGNATURE]
    if not signatures:
        raise unsigned(str(path), f"apptainer sign {path}")
    _refuse_uncoverable(path, info, objects)
    signers = list[Key]()
    try:
        with open_regular(path) as file:
            digests = _Digests(file, on_bytes, {} if known is None else known)
            for group in sorted({item.group for item in objects}):
                of_group = [item for item in objects if item.group == group]
                signers.append(
                    _check_group(
                        path, info, of_group, [item for item in signatures if item.link == group], digests, keys
                    )
                )
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return list(dict.fromkeys(signers))


def _refuse_uncoverable(path: Path, info: SifInfo, objects: Sequence[Descriptor]) -> None:
    if len({item.number for item in info.descriptors}) < len(info.descriptors):
        raise SignatureError(
            f"{path}: two of its objects have one number, and a signature cannot tell them apart", rank=5
        )
    if loose := [item.number for item in objects if item.group == NO_GROUP]:
        raise SignatureError(f"{path}: no signature covers its object {loose[0]}, which is in no group", rank=5)


class _Digests:
    """Of a SIF's objects, each read once."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None], known: dict[str, str]) -> None:
        self._file, self._on_bytes, self._known = file, on_bytes, known

    def __call__(self, algorithm: str, item: Descriptor) -> str:
        name = f"{algorithm} {item.offset} {item.size}"
        if name not in self._known:
            digest, left = hashlib.new(algorithm), item.size
            self._file.seek(item.offset)
            while left and (data := self._file.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
                self._on_bytes(len(data))
            self._known[name] = f"{algorithm}:{digest.hexdigest()}"
        return self._known[name]


def _check_group(
    path: Path,
    info: SifInfo,
    objects: Sequence[Descriptor],
    signatures: Sequence[Descriptor],
    digests: _Digests,
    keys: Keys,
) -> Key:
    problems = []
    for item in signatures:
        try:
            with open_regular(path) as file:
                file.seek(item.offset)
                data = file.read(min(item.size, _MOST))
            if data.lstrip().startswith(b"{"):
                raise SignatureError(
                    "it is signed with a key that is not of PGP (apptainer verify --key checks that)", rank=0
                )
            text, signer = gpg.check(data, keys)
            if (
                SIGNATURE_EXTRA.unpack_from(item.extra)[1][: len(signer.fingerprint) // 2].hex().upper()
                != signer.fingerprint
            ):
                raise SignatureError(f"its signature names another key than that of {signer}, who made it", rank=4)
            _refuse_changes(text, signer, info, objects, digests)
            return signer
        except SignatureError as problem:
            problems.append(problem)
    if not problems:
        raise SignatureError(
            f"{path} was changed after it was signed, or signed in part: no signature covers its object "
            f"{objects[0].number}",
            rank=5,
        )
    raise worst(str(path), problems)


def _refuse_changes(text: bytes, signer: Key, info: SifInfo, objects: Sequence[Descriptor], digests: _Digests) -> None:
    """Compare the signed hashes with the file; the largest object last, so that a mismatch is found early."""
    changed = f"it was changed after {signer} signed it"
    if text.startswith(b"SIFHASH:"):
        raise SignatureError(
            f"{signer} signed it in the way of Singularity before 3.6, which covers no headers", rank=2
        )
    first = min(item.number for item in objects)
    try:
        message = Fields.of(parse_json(text))
        head = message.object("header").text("digest")
        signed = {
            first + item.size("relativeId"): (item.text("descriptorDigest"), item.text("objectDigest"))
            for item in message.objects("objects")
        }
    except ValueError as error:
        raise SignatureError(f"what {signer} signed is not a signature of a SIF", rank=2) from error
    for digest in (head, *(digest for pair in signed.values() for digest in pair)):
        if not _ALGORITHMS.fullmatch(digest):
            raise SignatureError(
                f"its signature by {signer} rests on a hash that is not known here: {digest[:20]}", rank=2
            )
    if _hashed(head, signed_header(info.head)) != head:
        raise SignatureError(f"{changed}: its header", rank=4)
    present = {item.number for item in objects}
    if added := sorted(present - set(signed)):
        raise SignatureError(f"{signer} did not sign its object {added[0]}: it was added later, or left out", rank=4)
    if gone := sorted(set(signed) - present):
        raise SignatureError(f"{changed}: object {gone[0]} is gone", rank=4)
    for item in sorted(objects, key=lambda item: item.size):
        described, content = signed[item.number]
        if _hashed(described, signed_descriptor(item.raw, item.number - first)) != described:
            raise SignatureError(f"{changed}: the description of object {item.number}", rank=4)
        if digests(content.partition(":")[0], item) != content:
            raise SignatureError(f"{changed}: the content of object {item.number}", rank=4)


def _hashed(like: str, data: bytes) -> str:
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
