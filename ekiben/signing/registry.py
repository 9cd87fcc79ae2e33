"""PGP signatures of images in registries: containers' "simple signing", the signatures of skopeo and podman.

A signed text with the reference and the manifest's digest is stored beside the image, as an artifact that refers to the
manifest.
"""

from __future__ import annotations

import json
import time

from ekiben.core.checked import Fields, parse_json
from ekiben.core.pgp_key import Key
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.signing import gpg
from ekiben.signing.gpg import Keys, SignatureError, worst

MEDIA_SIGNATURE = "application/vnd.ekiben.simple-signing.v1+pgp"
_KIND = "atomic container signature"


def sign_pushed(registry: Registry, digest: str, key: Key) -> bool:
    """Sign what ``registry.reference`` names as the manifest ``digest``; False when this key has done so before.

    Raises FetchError, EngineError.
    """
    name = signed_name(registry.reference)
    for data in _signatures(registry, digest):
        try:
            message, _ = gpg.check(data, Keys(fingerprints=frozenset([key.fingerprint])))
            if _claim(message) == (name, digest):
                return False
        except SignatureError:
            continue
    claim = {
        "critical": {
            "identity": {"docker-reference": name},
            "image": {"docker-manifest-digest": digest},
            "type": _KIND,
        },
        "optional": {"creator": "ekiben", "timestamp": int(time.time())},
    }
    data, _ = gpg.sign(json.dumps(claim).encode(), key, clear=False)
    registry.attach(digest, MEDIA_SIGNATURE, data, {"org.ekiben.signer": key.fingerprint})
    return True


def signed_name(reference: Reference) -> str:
    """Return the image's name as a signature has it."""
    return f"{reference.host}/{reference.repository}:{reference.tag or 'latest'}"


def check_pushed(registry: Registry, digest: str, keys: Keys) -> Key | None:
    """Return who signed the manifest ``digest`` under the name ``registry.reference``; None without a signature.

    Raises SignatureError, FetchError.
    """
    problems = []
    for data in _signatures(registry, digest):
        try:
            message, signer = gpg.check(data, keys)
            _refuse_other_claim(message, signer, registry.reference, digest)
            return signer
        except SignatureError as problem:
            problems.append(problem)
    if problems:
        raise worst(str(registry.reference), problems)
    return None


def _signatures(registry: Registry, digest: str) -> list[bytes]:
    descriptors = [item for item in registry.referrers(digest) if item.artifact_type == MEDIA_SIGNATURE]
    return [data for item in descriptors for data in registry.attached(item.digest)]


def _claim(message: bytes) -> tuple[str, str] | None:
    """The name and the digest in a signed text; None when it is of another format."""
    try:
        critical = Fields.of(parse_json(message)).object("critical")
        if critical.text("type") != _KIND or set(critical.data) != {"identity", "image", "type"}:
            return None
        return critical.object("identity").text("docker-reference"), critical.object("image").text(
            "docker-manifest-digest"
        )
    except ValueError:
        return None


def _refuse_other_claim(message: bytes, signer: Key, reference: Reference, digest: str) -> None:
    claim = _claim(message)
    if claim is None:
        raise SignatureError(f"what {signer} signed is not a claim about an image", rank=2)
    name, of = claim
    if of != digest:
        raise SignatureError(f"its signature by {signer} is that of another image: {name}, {of}", rank=4)
    # The digest determines the content: a signature for any tag of the repository is valid.
    same = (
        name.rpartition(":")[0] == signed_name(reference).rpartition(":")[0]
        if reference.digest
        else name == signed_name(reference)
    )
    if not same:
        raise SignatureError(
            f"{signer} signed this image as {name}",
            rank=3,
            hint=(
                "a tag that was moved, or a copy under another name; if that is what you want, pull it by its own name"
            ),
        )
