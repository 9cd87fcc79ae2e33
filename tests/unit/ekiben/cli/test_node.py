"""`shell` and `notebook` on a compute node: what is refused before a scheduler is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.cli.commands._node import NodeOptions, start_on_node
from ekiben.cli.context import Context
from ekiben.core.errors import VerifyError
from ekiben.run.image import NamedImage, RequiredSignature, SifState


def test_image_without_its_signature_waits_in_no_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def refuse(path: Path) -> SifState:
        raise VerifyError(f"{path} is not signed")

    (tmp_path / "x.sif").touch()
    signature = RequiredSignature("require_signature in config.yaml", refuse)
    image = NamedImage(name="x", sif=tmp_path / "x.sif", tasks=None, signature=signature)
    node = NodeOptions(**{**dict.fromkeys(NodeOptions.__slots__), "partition": "gpu"})
    with pytest.raises(VerifyError, match="is not signed"):
        start_on_node(Context(), image, node, dry_run=True)
