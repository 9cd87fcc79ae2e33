"""A PGP key, as signatures and the records of published images name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """``fingerprint`` is the primary key's, whichever subkey signs."""

    fingerprint: str
    user: str

    def __str__(self) -> str:
        return f"{self.user} {self.fingerprint}".strip()
