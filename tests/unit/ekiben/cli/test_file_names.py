"""Names of files that are not UTF-8: printed, copied and rendered as they are, or refused in a sentence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from support.forked_cli import server
from support.sample_recipe import SampleRecipe, seeded

ROOT = Path(__file__).resolve().parents[4]
RAW = b"caf\xe9"


@pytest.fixture
def odd(files_only: SampleRecipe, tmp_path: Path) -> SampleRecipe:
    """A recipe that copies a file of such a name, by its folder and by a pattern; its base is in a store."""
    (files_only.path / "files/tree" / os.fsdecode(RAW)).write_text("odd\n")
    seeded(files_only, tmp_path / "store", "ground")
    return files_only


def run(tmp_path: Path, *argv: str | Path | bytes, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    words = [str(ROOT / "build.py"), "--store", str(tmp_path / "store"), *map(os.fsdecode, argv)]
    texts = server().run(words, os.environ, tmp_path, timeout=120)
    stdout, stderr = os.fsencode(texts.stdout), os.fsencode(texts.stderr)
    done = subprocess.CompletedProcess(words, texts.returncode, stdout, stderr)
    assert b"Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done
    return done


@pytest.mark.parametrize("line", ["files/tree /opt/tree", "files/tree/* /opt/tree/", "files/tree/caf* /opt/tree/"])
def test_file_of_such_a_name_is_copied(odd: SampleRecipe, tmp_path: Path, line: str) -> None:
    odd.replace("images/roof.def", "files/tree /opt/tree", line)
    for argv in (["plan"], ["plan", "--json"], ["image", "--format", "sif", "--no-verify", "-o", b"x-" + RAW]):
        done = run(tmp_path, *argv, odd.path)
    assert b"x-" + RAW in done.stdout
    assert os.path.isfile(os.fsencode(tmp_path) + b"/x-" + RAW)  # noqa: PTH113  bytes
    (tmp_path / "own.sif").unlink(missing_ok=True)
    store, (_, roof, _) = Store(tmp_path / "store"), resolve(find_recipe(str(odd.path))).layers
    stored = store.layer(roof.cache_key)
    assert stored
    with store.blob_path(stored.digest).open("rb") as blob:
        assert SquashfsReader(blob).read_file(f"opt/tree/{os.fsdecode(RAW)}") == b"odd\n"
    (odd.path / "files/tree" / os.fsdecode(RAW)).write_text("changed\n")
    run(tmp_path, "plan", odd.path)  # says which file changed


@pytest.mark.parametrize("target", ["def", "dockerfile"])
def test_rendered_folder_of_such_a_name(odd: SampleRecipe, tmp_path: Path, target: str) -> None:
    done = run(tmp_path, "render", odd.path, "--to", target, "-o", os.fsencode(tmp_path) + b"/" + RAW)
    file = done.stdout.rstrip(b"\n")
    assert file.startswith(os.fsencode(tmp_path) + b"/" + RAW)
    assert os.path.isfile(file)  # noqa: PTH113  bytes
    assert [path for path in (tmp_path / os.fsdecode(RAW)).rglob(os.fsdecode(RAW)) if path.read_text() == "odd\n"]


def test_rendered_file_names_it_or_is_refused(odd: SampleRecipe, tmp_path: Path) -> None:
    odd.replace("images/roof.def", "files/tree /opt/tree", "files/tree/caf* /opt/one")
    done = run(tmp_path, "render", odd.path, "--to", "def", "-o", "plain")
    assert RAW in (tmp_path / os.fsdecode(done.stdout.strip())).read_bytes()
    message = run(tmp_path, "render", odd.path, "--to", "dockerfile", "-o", "docker", code=3).stderr
    assert b"a Dockerfile cannot name a file whose name is not UTF-8: " in message
    assert not (tmp_path / "docker").exists()
