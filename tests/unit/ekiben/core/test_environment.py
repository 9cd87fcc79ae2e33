"""Whose certificates are trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ekiben.core.environment import ca_bundle
from ekiben.core.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "message"),
    [("text", "has no certificate in it"), ("folder", "cannot be read"), ("pipe", "cannot be read")],
)
def test_a_bundle_without_certificates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    bundle = tmp_path / "bundle"
    {"text": lambda: bundle.write_text("root:x:0:0"), "folder": bundle.mkdir, "pipe": lambda: os.mkfifo(bundle)}[kind]()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    with pytest.raises(UsageError, match=f"SSL_CERT_FILE={bundle}:? {message}"):
        ca_bundle()
