"""A job on a node where another user left files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.job_nodes import RUNTIME, SCONTROL, SRUN, Node, assert_local_folder_is_unused

pytestmark = pytest.mark.covers("ekiben/run")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    for name, text in {"apptainer": RUNTIME, "srun": SRUN, "scontrol": SCONTROL}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "local").mkdir(mode=0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    sif = tmp_path / "mine.sif"
    sif.write_bytes(b"an image")
    return Node(tmp_path, work, sif)


def test_a_folder_of_another_user_on_the_local_disk_is_not_used(node: Node) -> None:
    folder = node.folder / f"local/ekiben-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    assert_local_folder_is_unused(node, folder)
