"""Real gpg: which key signs, whose signatures count, and how each refused one is reported."""

from __future__ import annotations

import pytest

from ekiben.core.errors import EngineError
from ekiben.signing import gpg
from ekiben.signing.gpg import find_key

# ------------------------------------------------------------------------------------------------------ which key signs


def test_missing_gpg_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpg, "which", lambda *names: None)
    with pytest.raises(EngineError, match="not installed"):
        find_key()


# ----------------------------------------------------------------------------------------------------- whose signatures


# ------------------------------------------------------------------------------------------ signatures that are no good
