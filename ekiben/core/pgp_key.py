"""A PGP key, as signatures and the records of published images name it, and a policy that names the keys to trust."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")


@dataclass(frozen=True, slots=True)
class Key:
    """``fingerprint`` is the primary key's, whichever subkey signs."""

    fingerprint: str
    user: str

    def __str__(self) -> str:
        return f"{self.user} {self.fingerprint}".strip()


def full_fingerprint(text: str) -> str:
    """Return a fingerprint as gpg writes it: 40 or 64 upper-case digits.

    Spaces between the digits and a leading 0x are left out. Raises ValueError for a shorter id, which can be forged.
    """
    digits = text.replace(" ", "").removeprefix("0x").upper()
    if not _FINGERPRINT.fullmatch(digits):
        raise ValueError(f"'{text[:80]}' is not a full fingerprint: 40 or 64 hexadecimal digits")
    return digits


@dataclass(frozen=True, slots=True)
class SignaturePolicy:
    """The signatures that an image needs before it is run.

    ``fingerprints``: of primary keys, one of which has to sign; ``sources``: the files that ask for it.
    """

    fingerprints: frozenset[str]
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"require_signature in {' and '.join(self.sources)}"

    @classmethod
    def of_all(cls, policies: Iterable[SignaturePolicy]) -> SignaturePolicy | None:
        """Return the policy that satisfies all of several, None for none. It may have no key left."""
        known = list(policies)
        if not known:
            return None
        common = frozenset.intersection(*(policy.fingerprints for policy in known))
        return cls(common, tuple(source for policy in known for source in policy.sources))
