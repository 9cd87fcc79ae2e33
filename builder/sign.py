"""Who vouches for an image: PGP signatures of SIFs as Apptainer makes and verifies them, and of images in registries.

A SIF's signature is an object in it, clear-signed text: digests of the header, of every object and its descriptor. All that
is not a signature has to be covered by one.
An image in a registry has containers' "simple signing" beside it, what skopeo and podman call a signature: a signed text with
the reference and the manifest's digest. It is stored as an artifact that refers to the manifest (registry.py, attach()).
Whose signatures count: gpg.py, known_keys(). One good one is enough, as somebody else may have signed, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from builder import gpg
from builder.chain import platform
from builder.errors import StoreError, UsageError
from builder.gpg import Key, Keys, SignatureError
from builder.pipeline import Image
from builder.registry import Reference, Registry
from builder.sif import (
    NO_GROUP,
    SIGNATURE,
    SIGNATURE_EXTRA,
    Descriptor,
    SifInfo,
    Signature,
    read_sif,
    sif_id,
    signed_descriptor,
    signed_header,
    signed_message,
)  # fmt: skip
from builder.store import Store

MEDIA_SIGNATURE = "application/vnd.ekiben.simple-signing.v1+pgp"
_KIND = "atomic container signature"
_MOST = 1 << 20  # bytes of a signature
_ALGORITHMS = re.compile(r"(sha256|sha384|sha512):[0-9a-f]+")

# -------------------------------------------------------------------------------------------------------------- signing


def sign_image(image: Image, store: Store, key: Key) -> Signature:
    """The signature of the image's SIF. The same again the next time, so that an equal image is an equal file. Errors: EngineError."""
    partitions = [store.partition(layer) for layer in image.layers]
    id = sif_id([item.digest for item in partitions], image.chain.deffile)
    message = signed_message(partitions, id=id, deffile=image.chain.deffile, arch=platform().split("/")[1],
                             epoch=image.chain.stack.file.epoch)  # fmt: skip
    name = f"signature-{hashlib.sha256(message).hexdigest()[:32]}-{key.fingerprint}"
    if known := store.check(name):
        try:
            old = Signature(known["signature"].encode(), key.fingerprint, known["hash"])
            said, signer = gpg.check(old.data, Keys())
            if (said.strip(), signer.fingerprint) == (message, key.fingerprint):
                return old
        except (KeyError, AttributeError, SignatureError):
            pass
    data, hash = gpg.sign(message, key, clear=True)
    if os.access(store.root, os.W_OK):
        store.put_check(name, {"signature": data.decode(), "hash": hash})
    return Signature(data, key.fingerprint, hash)


def sign_pushed(registry: Registry, digest: str, key: Key) -> bool:
    """Sign what ``registry.reference`` names as the manifest ``digest``; False when this key has done so before. Errors: FetchError, EngineError."""
    name = signed_name(registry.reference)
    for data in _signatures(registry, digest):
        try:
            said, _ = gpg.check(data, Keys(fingerprints=frozenset([key.fingerprint])))
            if _claim(said) == (name, digest):
                return False
        except SignatureError:
            continue
    claim = {
        "critical": {"identity": {"docker-reference": name}, "image": {"docker-manifest-digest": digest}, "type": _KIND},
        "optional": {"creator": "ekiben", "timestamp": int(time.time())},
    }  # fmt: skip
    data, _ = gpg.sign(json.dumps(claim).encode(), key, clear=False)
    registry.attach(digest, MEDIA_SIGNATURE, data, {"org.ekiben.signer": key.fingerprint})
    return True


def signed_name(reference: Reference) -> str:
    """The image's name as a signature has it."""
    return f"{reference.host}/{reference.repository}:{reference.tag or 'latest'}"


# ---------------------------------------------------------------------------------------------------- checking: registry


def check_pushed(registry: Registry, digest: str, keys: Keys) -> Key | None:
    """Who signed the manifest ``digest`` under the name ``registry.reference``; None when nobody signed it there.

    Errors: SignatureError, FetchError.
    """
    problems = []
    for data in _signatures(registry, digest):
        try:
            said, signer = gpg.check(data, keys)
            _refuse_other_claim(said, signer, registry.reference, digest)
            return signer
        except SignatureError as problem:
            problems.append(problem)
    if problems:
        raise _telling(str(registry.reference), problems)
    return None


def _signatures(registry: Registry, digest: str) -> list[bytes]:
    found = [item for item in registry.referrers(digest) if item.get("artifactType") == MEDIA_SIGNATURE]
    return [data for item in found for data in registry.attached(item["digest"])]


def _claim(said: bytes) -> tuple[str, str] | None:
    """The name and the digest that a signed text speaks of; None when it is none of the kind."""
    try:
        critical = json.loads(said)["critical"]
        if critical["type"] != _KIND or set(critical) != {"identity", "image", "type"}:
            return None
        return str(critical["identity"]["docker-reference"]), str(critical["image"]["docker-manifest-digest"])
    except (ValueError, KeyError, TypeError):
        return None


def _refuse_other_claim(said: bytes, signer: Key, reference: Reference, digest: str) -> None:
    claim = _claim(said)
    if claim is None:
        raise SignatureError(f"what {signer} signed is no claim about an image", rank=2)
    name, of = claim
    if of != digest:
        raise SignatureError(f"its signature by {signer} is that of another image: {name}, {of}", rank=4)
    # Asked for by digest, its content is certain, and any tag of the repository will do.
    same = (
        name.rpartition(":")[0] == signed_name(reference).rpartition(":")[0]
        if reference.digest
        else name == signed_name(reference)
    )
    if not same:
        raise SignatureError(f"{signer} signed this image as {name}", rank=3, hint="a tag that was moved, or a copy under another name; "
                             "if that is what you want, pull it by its own name")  # fmt: skip


# ----------------------------------------------------------------------------------------------------- checking: by name


def is_image(name: str) -> bool:
    """Whether it is a file, or a reference to a registry, rather than a recipe."""
    return Path(name).is_file() or name.endswith(".sif") or (not Path(name).exists() and _is_reference(name))


def check_image(name: str, signer: str | None) -> tuple[str, list[Key]]:
    """A SIF file, or an image in a registry: what was looked at, and who signed it. ``signer`` is known_keys()' ``wanted``.

    Errors: SignatureError, StoreError, FetchError, UsageError.
    """
    from builder.progress import Progress

    with gpg.known_keys(signer) as keys:
        if not Path(name).exists() and _is_reference(name):
            registry = Registry(Reference.parse(name))
            _, digest = registry.fetch_manifest()
            found = check_pushed(registry, digest, keys)
            if found is None:
                raise unsigned(name, f"build.py pull {name} --require-signature, if it is a SIF that is signed itself")
            return f"{name.partition('@')[0]}@{digest}", [found]
        if not Path(name).is_file():
            raise UsageError(
                f"{name}: no such file, of which the signature could be checked", hint="name it, or make it"
            )
        progress = Progress()
        with progress.step(f"check the signature of {name}", total=Path(name).stat().st_size):
            return name, check_sif(Path(name), keys, progress.count)


def _is_reference(name: str) -> bool:
    """Whether it begins with a registry's host, not with a folder."""
    host, slash, _ = name.partition("/")
    return "://" in name or bool(slash and re.fullmatch(r"localhost|[\w-]+([.:][\w-]+)+", host, re.ASCII))


# --------------------------------------------------------------------------------------------------------- checking: SIF


def check_sif(path: Path, keys: Keys, on_bytes: Callable[[int], None] = lambda _: None) -> list[Key]:
    """Who signed all that is in a SIF. Errors: SignatureError, StoreError."""
    info = read_sif(path)
    signatures = [item for item in info.descriptors if item.data_type == SIGNATURE]
    parts = [item for item in info.descriptors if item.data_type != SIGNATURE]
    if not signatures:
        raise unsigned(str(path), f"apptainer sign {path}")
    if len({item.number for item in info.descriptors}) < len(info.descriptors):
        raise SignatureError(
            f"{path}: two of its objects have one number, and a signature cannot tell them apart", rank=5
        )
    if loose := [item.number for item in parts if item.group == NO_GROUP]:
        raise SignatureError(f"{path}: no signature covers its object {loose[0]}, which is in no group", rank=5)
    signers = list[Key]()
    try:
        with path.open("rb") as file:
            digests = _Digests(file, on_bytes)
            for group in sorted({item.group for item in parts}):
                of_group = [item for item in parts if item.group == group]
                signers.append(
                    _check_group(
                        path, info, of_group, [item for item in signatures if item.link == group], digests, keys
                    )
                )
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return list(dict.fromkeys(signers))


def unsigned(name: str, how: str) -> SignatureError:
    return SignatureError(
        f"{name} is not signed", rank=0, hint=f"ask who made it to publish or push it with --sign, or: {how}"
    )


class _Digests:
    """Of a SIF's objects, each read once."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes, self._known = file, on_bytes, dict[tuple[str, int], str]()

    def __call__(self, algorithm: str, item: Descriptor) -> str:
        if (algorithm, item.number) not in self._known:
            digest, left = hashlib.new(algorithm), item.size
            self._file.seek(item.offset)
            while left and (data := self._file.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
                self._on_bytes(len(data))
            self._known[algorithm, item.number] = f"{algorithm}:{digest.hexdigest()}"
        return self._known[algorithm, item.number]


def _check_group(
    path: Path,
    info: SifInfo,
    parts: Sequence[Descriptor],
    signatures: Sequence[Descriptor],
    digests: _Digests,
    keys: Keys,
) -> Key:
    problems = []
    for item in signatures:
        try:
            with path.open("rb") as file:
                file.seek(item.offset)
                data = file.read(min(item.size, _MOST))
            if data.lstrip().startswith(b"{"):
                raise SignatureError(
                    "it is signed with a key that is not of PGP (apptainer verify --key checks that)", rank=0
                )
            said, signer = gpg.check(data, keys)
            if (
                SIGNATURE_EXTRA.unpack_from(item.extra)[1][: len(signer.fingerprint) // 2].hex().upper()
                != signer.fingerprint
            ):
                raise SignatureError(f"its signature names another key than that of {signer}, who made it", rank=4)
            _refuse_changes(said, signer, info, parts, digests)
            return signer
        except SignatureError as problem:
            problems.append(problem)
    if not problems:
        raise SignatureError(f"{path} was changed after it was signed, or signed in part: no signature covers its object "
                             f"{parts[0].number}", rank=5)  # fmt: skip
    raise _telling(str(path), problems)


def _refuse_changes(said: bytes, signer: Key, info: SifInfo, parts: Sequence[Descriptor], digests: _Digests) -> None:
    """Compare what was signed with what is there; the largest last, so that what is wrong is found soon."""
    changed = f"it was changed after {signer} signed it"
    if said.startswith(b"SIFHASH:"):
        raise SignatureError(
            f"{signer} signed it in the way of Singularity before 3.6, which covers no headers", rank=2
        )
    first = min(item.number for item in parts)
    try:
        message = json.loads(said)
        head = str(message["header"]["digest"])
        objects: dict[int, Any] = {first + int(item["relativeId"]): item for item in message["objects"]}
        signed = {
            number: (str(item["descriptorDigest"]), str(item["objectDigest"])) for number, item in objects.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise SignatureError(f"what {signer} signed is no signature of a SIF", rank=2) from error
    for digest in (head, *(digest for pair in signed.values() for digest in pair)):
        if not _ALGORITHMS.fullmatch(digest):
            raise SignatureError(
                f"its signature by {signer} rests on a hash that is not known here: {digest[:20]}", rank=2
            )
    if _hashed(head, signed_header(info.head)) != head:
        raise SignatureError(f"{changed}: its header", rank=4)
    there = {item.number for item in parts}
    if added := sorted(there - set(signed)):
        raise SignatureError(f"{signer} did not sign its object {added[0]}: it was added later, or left out", rank=4)
    if gone := sorted(set(signed) - there):
        raise SignatureError(f"{changed}: object {gone[0]} is gone", rank=4)
    for item in sorted(parts, key=lambda item: item.size):
        described, content = signed[item.number]
        if _hashed(described, signed_descriptor(item.row, item.number - first)) != described:
            raise SignatureError(f"{changed}: the description of object {item.number}", rank=4)
        if digests(content.partition(":")[0], item) != content:
            raise SignatureError(f"{changed}: the content of object {item.number}", rank=4)


def _hashed(like: str, data: bytes) -> str:
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def _telling(name: str, problems: Sequence[SignatureError]) -> SignatureError:
    """Of several signatures that are no good, the one of which most is wrong."""
    worst = max(problems, key=lambda problem: problem.rank)
    return SignatureError(f"{name}: {worst}", rank=worst.rank, hint=worst.hint)
