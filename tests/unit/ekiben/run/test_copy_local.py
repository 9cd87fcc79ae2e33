"""The copy of a SIF on the node's own disk."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, sif_id, write_sif
from ekiben.run.copy_local import copy_local, copy_name, local_folder
from ekiben.run.image import NamedImage, RequiredSignature, sif_state
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.script import script
from support.job_plans import plan_run


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than ``tmp_path``: memory."""
    folder = Path("/dev/shm") / f"ekiben-test-{os.getpid()}"
    folder.mkdir()
    if folder.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm and the tests' folder are on one file system")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    data = os.urandom(4096) * 4000
    (tmp_path / "part").write_bytes(data)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    path = tmp_path / "mine.sif"
    write_sif(
        path, [Partition(tmp_path / "part", 0, len(data), digest)], SifHeader(sif_id([digest], ""), "", "amd64", 1)
    )
    return path


def _image(sif: Path, sha256: str = "") -> NamedImage:
    return NamedImage(name="mine", sif=sif, tasks=None, sha256=sha256)


def _copy(sif: Path, folder: Path, message: multiprocessing.Queue[str]) -> None:
    target = copy_local(_image(sif), {"TMPDIR": str(folder)}, message.put)
    message.put(f"done {target}")


def test_two_jobs_at_once_copy_once(sif: Path, other_disk: Path) -> None:
    messages: multiprocessing.Queue[str] = multiprocessing.Queue()
    jobs = [multiprocessing.Process(target=_copy, args=(sif, other_disk, messages)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    lines = []
    while sum(line.startswith("done") for line in lines) < 4:
        lines.append(messages.get(timeout=10))
    assert sum(line.startswith("copying") for line in lines) == 1
    [target] = {line.removeprefix("done ") for line in lines if line.startswith("done")}
    assert Path(target).read_bytes() == sif.read_bytes()
    assert os.access(target, os.X_OK)
    assert [path.name for path in local_folder({"TMPDIR": str(other_disk)}).iterdir() if path.suffix == ".sif"] == [
        Path(target).name
    ]


def test_leftovers_of_killed_jobs_are_removed_and_images_kept_apart(sif: Path, other_disk: Path) -> None:
    environment, messages = {"TMPDIR": str(other_disk)}, list[str]()
    first = copy_local(_image(sif), environment, messages.append)
    first.unlink()
    left = first.with_name(f".{first.name}.abc.part")
    left.write_bytes(b"half")
    assert copy_local(_image(sif), environment, messages.append) == first
    assert not left.exists()
    os.utime(sif, (time.time() + 5, time.time() + 5))
    assert copy_local(_image(sif), environment, messages.append) != first
    assert len(messages) == 3


def test_copy_is_compared_with_the_checksum_of_its_record(sif: Path, other_disk: Path) -> None:
    environment = {"TMPDIR": str(other_disk)}
    with pytest.raises(StoreError, match="changed while it was copied, or does not match its record"):
        copy_local(_image(sif, 64 * "0"), environment, lambda _: None)
    assert [path for path in local_folder(environment).iterdir() if path.suffix != ".lock"] == []
    sha256 = hashlib.sha256(sif.read_bytes()).hexdigest()
    assert copy_local(_image(sif, sha256), environment, lambda _: None).read_bytes() == sif.read_bytes()


@pytest.mark.parametrize("damage", ["bytes", "link", "no state"])
def test_copy_that_was_written_since_is_made_again(sif: Path, other_disk: Path, damage: str) -> None:
    environment = {"TMPDIR": str(other_disk)}
    copy = copy_local(_image(sif), environment, lambda _: None)
    state = copy.with_name(f".{copy.name}.state")
    if damage == "bytes":
        copy.chmod(0o700)
        copy.write_bytes(b"x" + copy.read_bytes()[1:])
    elif damage == "link":
        copy.unlink()
        copy.symlink_to("/bin/true")
    else:
        state.unlink()
    assert copy_local(_image(sif), environment, lambda _: None) == copy
    assert copy.read_bytes() == sif.read_bytes()
    assert not copy.is_symlink()


def test_copy_that_was_made_without_a_checksum_is_not_that_of_a_signed_image(sif: Path, tmp_path: Path) -> None:
    request = JobRequest(copy_local=True)
    names = []
    for signature in (None, RequiredSignature("require_signature in config.yaml", sif_state)):
        image = replace(_image(sif), signature=signature)
        run = plan_run(image, ["train"], request, runs=tmp_path / "runs")
        (line,) = [line for line in script(run, run.steps[0]).splitlines() if line.startswith("image_copy=")]
        names.append(line.partition("=")[2])
    digest = hashlib.sha256(sif.read_bytes()).hexdigest()
    assert names == [copy_name(sif), copy_name(sif, digest)]
    assert names[0] != names[1]


def test_a_sif_on_the_same_disk_is_used_where_it_is(sif: Path, tmp_path: Path) -> None:
    assert copy_local(_image(sif), {"TMPDIR": str(tmp_path)}, lambda _: None) == sif


def test_full_local_disk_falls_back_to_the_original(sif: Path, other_disk: Path) -> None:
    with sif.open("ab") as file:
        file.truncate(1 << 43)
    with pytest.raises(StoreError, match=r"GB free, and .*mine\.sif has") as caught:
        copy_local(_image(sif), {"TMPDIR": str(other_disk)}, lambda _: None)
    assert caught.value.hint == "free some space there, or run it without --copy-local"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"ekiben-{os.getuid()}"
    folder.symlink_to("/")
    with pytest.raises(StoreError, match="can be written by others than"):
        local_folder({"TMPDIR": str(tmp_path)})


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False)])
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, mode: int, used: bool) -> None:
    folder = tmp_path / f"ekiben-{os.getuid()}"
    folder.mkdir()
    folder.chmod(mode)
    if used:
        assert local_folder({"TMPDIR": str(tmp_path)}).stat().st_mode & 0o777 == 0o700
    else:
        with pytest.raises(StoreError, match=r"can be written by others than"):
            local_folder({"TMPDIR": str(tmp_path)})


def test_scheduler_folder_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert local_folder({"TMPDIR": str(tmp_path / "a"), "PBS_LOCALDIR": str(tmp_path / "b")}).parent == tmp_path / "b"
    assert local_folder({"SGE_LOCALDIR": "/none", "TMPDIR": str(tmp_path / "a")}).parent == tmp_path / "a"
