"""A job on a node where another user left files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.job_nodes import Node, assert_local_folder_is_unused, make_node

pytestmark = pytest.mark.covers("ekiben/run")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = make_node(tmp_path)
    monkeypatch.chdir(node.work)
    return node


def test_a_folder_of_another_user_on_the_local_disk_is_not_used(node: Node) -> None:
    folder = node.folder / f"local/ekiben-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    assert_local_folder_is_unused(node, folder)
