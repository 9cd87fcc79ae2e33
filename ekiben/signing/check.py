"""Check the signature of an image named on the command line: a SIF file, or an image in a registry."""

from __future__ import annotations

from pathlib import Path

from ekiben.core.command_name import command_name
from ekiben.core.errors import UsageError
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference, is_reference
from ekiben.signing import gpg
from ekiben.signing.gpg import unsigned
from ekiben.signing.registry import check_pushed
from ekiben.signing.sif import check_sif


def check_image(name: str, signer: str | None) -> tuple[str, list[Key]]:
    """Check the signature of a SIF file or of an image in a registry. Returns what was checked, and who signed it.

    ``signer``: as for known_keys(). Raises SignatureError, StoreError, FetchError, UsageError.
    """
    with gpg.known_keys(signer) as keys:
        if not Path(name).exists() and is_reference(name):
            registry = Registry(Reference.parse(name))
            _, digest = registry.fetch_manifest()
            signing_key = check_pushed(registry, digest, keys)
            if signing_key is None:
                raise unsigned(
                    name, f"{command_name()} pull {name} --require-signature, if it is a SIF that is signed itself"
                )
            return f"{name.partition('@')[0]}@{digest}", [signing_key]
        if not Path(name).is_file():
            raise UsageError(f"{name}: no such file", hint="name it, or make it")
        progress = Progress()
        with progress.step(f"check the signature of {name}", total=Path(name).stat().st_size):
            return name, check_sif(Path(name), keys, progress.count)
