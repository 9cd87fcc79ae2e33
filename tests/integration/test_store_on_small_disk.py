"""A store on a file system that is full or read-only: a small one, mounted by root."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.store import Store
from support.small_disk import mount_tmpfs
from support.stores import blobs, put

pytestmark = pytest.mark.covers("ekiben/store")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of its own."""
    with mount_tmpfs(tmp_path / "small", "size=1m") as mount_point:
        yield mount_point


def test_a_full_disk_is_a_store_error_and_keeps_what_is_stored(mounted: Path) -> None:
    store = Store(mounted / "store")
    store.open_for_writing()
    kept = put(store, "base")
    with (
        pytest.raises(StoreError, match=rf"no space left in {store.root}: \S+ \w*B free") as caught,
        store.staging() as staging,
    ):
        (staging / "blob").write_bytes(bytes(2 << 20))
    assert "ekiben prune" in str(caught.value.hint)
    assert list((store.root / "staging").iterdir()) == []
    assert store.layer("k1") == kept
    (mounted / "filler").write_bytes(bytes(shutil.disk_usage(mounted).free))
    with pytest.raises(StoreError, match="no space left in"):
        store.put_blob(b"x" * 5000)
    assert blobs(store) == {kept.digest}


def test_a_read_only_store_is_readable_and_refuses_writers(mounted: Path) -> None:
    store = Store(mounted / "store")
    store.open_for_writing()
    layer = put(store, "base")
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    again = Store(store.root)
    again.check_blob(layer.digest)
    assert again.layer("k1") == layer
    with pytest.raises(
        StoreError, match=f"the store {store.root} cannot be written: {os.strerror(errno.EROFS)}"
    ) as caught:
        again.open_for_writing()
    assert "--store" in str(caught.value.hint)
