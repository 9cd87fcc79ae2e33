"""`verify` recomputes what the records say: a damaged one is named with the command that repairs the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ekiben.builder.verify import _work_folder
from ekiben.core.checked import without_checksum
from ekiben.core.paths import PROJECT_ROOT
from ekiben.store import Store
from support.sample_recipe import RunCli, SampleRecipe, edit_record, image_of


def test_verify_finds_and_repairs_a_wrong_diff_id(files_only: SampleRecipe, run_cli: RunCli, store: Store) -> None:
    image = image_of(files_only, store)
    record = store.root / f"keys/{image.layers[1].cache_key}.json"
    edit_record(record, diff_id="sha256:" + "0" * 64)
    stderr = run_cli("--store", store.root, "verify", files_only.path, code=8).stderr
    assert f"the record of layer {image.layers[1].name} was damaged" in stderr
    assert f"build {files_only.path}` makes the image from it" in stderr
    assert without_checksum(json.loads(record.read_bytes()))["diff_id"] == image.layers[1].diff_id
    assert image_of(files_only, store).image_id == image.image_id


def test_verify_names_the_repairing_command(files_only: SampleRecipe, run_cli: RunCli, store: Store) -> None:
    top = image_of(files_only, store).layers[-1]
    argv = ("--store", store.root, "verify", files_only.path)
    blob, key = store.blob_path(top.digest), store.root / f"keys/{top.cache_key}.json"
    blob.chmod(0o644)
    blob.write_bytes(bytes([blob.read_bytes()[0] ^ 1]) + blob.read_bytes()[1:])
    assert f"build {files_only.path}` builds it again" in run_cli(*argv, code=6).stderr
    assert image_of(files_only, store).layers[-1].digest == top.digest
    key.write_bytes(b"\xff")
    assert f"build {files_only.path}\n" in run_cli(*argv, code=8).stderr
    assert image_of(files_only, store).layers[-1].diff_id == top.diff_id
    assert key.read_bytes() != b"\xff"


def test_the_runtime_works_in_the_store_which_removes_it_after_a_kill(store: Store, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from ekiben.builder.verify import _work_folder; from"
        " ekiben.store import Store\nwith _work_folder(Store(Path(sys.argv[1]))) as folder: (folder / 'x').mkdir();"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "tmp").mkdir()
    subprocess.run(
        [sys.executable, "-c", script, store.root],
        cwd=PROJECT_ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        check=False,
    )
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(store.staging_root.iterdir()) != []
    with _work_folder(store) as folder:
        assert [path for path in store.staging_root.iterdir() if path.is_dir()] == [folder.parent]
    assert list(store.staging_root.iterdir()) == []
