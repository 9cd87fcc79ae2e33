"""Refuse to run an image that no required key has signed (require_signature in config.yaml).

A signature is checked in a file that is open, and with it the file's state is taken, by which its start knows it again.
Of a file with the same state only the signature is checked again, in a few milliseconds: the digests of its content are
noted in the user's own store, as a key may have expired or have been revoked since, but bytes do not change unseen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.core.pgp_key import Key, SignaturePolicy
from ekiben.core.progress import Progress
from ekiben.run.image import PULLED, RequiredSignature, SifState, is_published_file, state_of
from ekiben.signing import gpg
from ekiben.signing.gpg import Keys, SignatureError
from ekiben.signing.sif import check_sif
from ekiben.store import Store

_SETTLED = 2  # seconds in which a second change may keep the same timestamps


def required_signature(policy: SignaturePolicy, store: Store, progress: Progress) -> RequiredSignature:
    """Return the check of ``policy``, which notes digests in ``store`` where that can be written."""
    return RequiredSignature(str(policy), _Check(policy, store, progress))


def signing_key(policy: SignaturePolicy) -> Key:
    """Return the user's own key that ``policy`` names. Raises SignatureError when there is none, EngineError."""
    _refuse_empty(policy)
    names = sorted(policy.fingerprints)
    if (key := gpg.usable_secret_key(names)) is None:
        raise SignatureError(
            f"{policy}: you have the secret key of none of {', '.join(names)}",
            rank=0,
            hint="--sign KEY signs with another key; what it signs is not run here",
        )
    return key


def _refuse_empty(policy: SignaturePolicy) -> None:
    if not policy.fingerprints:
        raise SignatureError(
            f"{policy} have no key in common, so that no image can be run",
            rank=5,
            hint="name a key of the site's file in your own, or leave require_signature out of yours",
        )


class _Check:
    """The check of a policy; ``_seen`` has the digests of this process, for a store that cannot be written."""

    def __init__(self, policy: SignaturePolicy, store: Store, progress: Progress) -> None:
        self._policy, self._store, self._progress = policy, store, progress
        self._seen = dict[str, dict[str, str]]()
        self._shown = set[Path]()

    def __call__(self, path: Path) -> SifState:
        """Return the state of a SIF that a key of the policy has signed, all of it.

        Raises SignatureError for one without, StoreError for another file, EngineError without gpg.
        """
        _refuse_empty(self._policy)
        try:
            with open_regular(path) as stream:
                return self._check_open(path, stream)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error

    def _check_open(self, path: Path, stream: BinaryIO) -> SifState:
        before, status = state_of(stream), os.fstat(stream.fileno())
        identity = f"{status.st_dev} {before.stat} {before.header}"
        name = f"signed-content-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        digests = self._seen.get(name) or _digests(self._store.check(name))
        known_digests = len(digests)
        keys = Keys(fingerprints=self._policy.fingerprints, source=f"a key of {self._policy}")
        title = f"check the signature of {path}"
        # The open file, even if its path was replaced.
        open_file = Path(f"/proc/self/fd/{stream.fileno()}")
        try:
            # A command checks several times; a file that was written a moment ago is read each time.
            is_silent = bool(digests) or path in self._shown
            self._shown.add(path)
            with contextlib.nullcontext() if is_silent else self._progress.step(title, total=status.st_size):
                check_sif(open_file, keys, self._progress.count, digests)
        except (SignatureError, StoreError) as error:
            message = str(error).replace(str(open_file), str(path))
            if isinstance(error, StoreError):
                raise StoreError(message, hint=error.hint) from error
            if str(self._policy) not in message:
                message = f"{message}; {self._policy} forbids running it"
            raise SignatureError(message, rank=error.rank, hint=self._hint(path, error)) from error
        if state_of(stream) != before:
            raise SignatureError(f"{path} was changed while its signature was checked", rank=5)
        if len(digests) > known_digests and status.st_ctime < time.time() - _SETTLED:
            self._seen[name] = digests
            if self._store.is_writable():
                self._store.put_check(name, {"digests": digests})
        return before

    def _hint(self, path: Path, error: SignatureError) -> str:
        """Return how this image can be signed: a published file is not changed, a pulled one is pulled again."""
        file, program = path.resolve(), command_name()
        if is_published_file(file):
            sign = f"{program} publish {file} --to {file.parents[2]} --sign publishes a signed version"
        elif file.is_relative_to((self._store.downloads / PULLED).resolve()):
            sign = f"{program} push {file} HOST/NAME:TAG --sign pushes a signed SIF"
        else:
            sign = f"{program} sign {path} --key FINGERPRINT"
        sign += ", if one of these keys is yours"
        return f"{error.hint}; or {sign}" if error.hint and "gpg --import" in error.hint else sign


def _digests(note: Mapping[str, object] | None) -> dict[str, str]:
    digests = (note or {}).get("digests")
    return {str(name): str(digest) for name, digest in digests.items()} if isinstance(digests, dict) else {}
