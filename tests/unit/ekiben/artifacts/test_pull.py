"""What pull writes beside its output, and what it does not write through. tests/integration/test_push.py has a real
registry.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ekiben.artifacts import partial
from ekiben.artifacts import pull as pulls
from ekiben.artifacts.partial import partial_file
from ekiben.artifacts.pull import pull
from ekiben.artifacts.push import MEDIA_SIF
from ekiben.core.errors import FetchError, StoreError, UsageError
from ekiben.core.files import digest_of
from ekiben.core.progress import Progress
from ekiben.formats.sif import read_sif
from ekiben.registry import session
from ekiben.registry.reference import Reference
from ekiben.store import Store
from support.registries import MB, Answer, Script, bad_registry, trust_one_certificate
from support.sample_recipe import quiet

SIF = random.Random(5).randbytes(3 * MB)
DIGEST = digest_of(SIF)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.001,))
    monkeypatch.setattr(pulls, "read_sif", lambda path: None)  # these bytes are none
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trust_one_certificate(monkeypatch, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o2775)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def registry_of(data: bytes = SIF, *, breaks_at: int | None = None) -> Script:
    """A registry with one SIF; ``breaks_at``: no byte after this one is sent."""
    manifest = {
        "config": {"digest": digest_of(b"{}"), "size": 2, "mediaType": "application/vnd.sylabs.sif.config.v1+json"},
        "layers": [{"digest": digest_of(data), "size": len(data), "mediaType": MEDIA_SIF}],
    }

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        if "/blobs/" not in path:
            return Answer(200, json.dumps(manifest).encode())
        start = int(headers.get("range", "bytes=0-")[6:-1])
        body = data[start:] if breaks_at is None else data[start : max(start, breaks_at)]
        return Answer(206 if start else 200, body, {"Content-Length": str(len(data) - start)})

    return script


def get(host: str, store: Store, out: Path, log: io.StringIO | None = None) -> None:
    pull(Reference.parse(f"{host}/lab/x:1"), store, out, Progress(log) if log else quiet())


def break_off(store: Store, out: Path) -> tuple[Path, Path]:
    """Leave a piece of the SIF, as a killed process does: its folder, and the file."""
    with bad_registry(registry_of(breaks_at=2 * MB)) as (host, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "TIMEOUT", (1, 0.2))
        with pytest.raises(FetchError, match="broke off at"):
            get(host, store, out)
    (folder,) = (out.parent / name for name in hidden(out.parent))
    (piece,) = folder.iterdir()
    return folder, piece


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("leads_to", ["file", "missing", "folder", "device"])
def test_links_at_names_that_can_be_guessed_are_not_followed(
    leads_to: str, folder: Path, store: Store, tmp_path: Path
) -> None:
    victim = tmp_path / "thesis"
    if leads_to == "file":
        victim.write_text("precious")
    elif leads_to == "folder":
        victim.mkdir()
    target = "/dev/null" if leads_to == "device" else str(victim)
    names = [f".x.sif.{DIGEST[7:19]}.part", ".x.sif.part", ".x.sif", f".x.sif.{DIGEST[7:]}", "x.sif.part"]
    for name in names:
        (folder / name).symlink_to(target)
    with bad_registry(registry_of()) as (host, _):
        get(host, store, folder / "x.sif")
    assert (folder / "x.sif").read_bytes() == SIF
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "x.sif"])
    assert all((folder / name).is_symlink() for name in names)
    assert not victim.is_file() or victim.read_text() == "precious"
    assert not victim.is_dir() or not list(victim.iterdir())


def test_download_is_resumed_by_the_next_pull(folder: Path, store: Store) -> None:
    private, piece = break_off(store, folder / "x.sif")
    size = piece.stat().st_size
    assert (private.stat().st_mode & 0o777, piece.stat().st_mode & 0o777) == (0o700, 0o600)
    assert size > MB and "x.sif" not in piece.name
    log = io.StringIO()
    with bad_registry(registry_of()) as (host, asked):
        get(host, Store(store.root), folder / "x.sif", log)
    assert (folder / "x.sif").read_bytes() == SIF
    assert f"resuming after {size / 1e6:.0f} MB" in log.getvalue()
    assert [headers["range"] for _, path, headers in asked if "/blobs/" in path] == [f"bytes={size}-"]
    assert hidden(folder) == [] and list((store.root / "checks").glob("pull-*")) == []


def test_folder_of_a_pull_that_was_killed_at_its_end_goes_with_the_next(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SIF had its name, and nothing is downloaded again."""
    with bad_registry(registry_of()) as (host, asked):
        with monkeypatch.context() as killed:
            killed.setattr(partial.Partial, "remove", lambda self: None)
            killed.setattr(Store, "drop_check", lambda self, name: None)
            get(host, store, folder / "x.sif")
        assert len(hidden(folder)) == 1
        before = len(asked)
        get(host, store, folder / "x.sif")
        assert not any("/blobs/" in path for _, path, _ in asked[before:])
    assert hidden(folder) == [] and list((store.root / "checks").glob("pull-*")) == []


@pytest.mark.parametrize(
    "attack", ["link", "link to a copy", "open folder", "thesis", "thesis in a folder", "gone", "file"]
)
def test_exchanged_piece_is_not_written(attack: str, folder: Path, store: Store, tmp_path: Path) -> None:
    """Somebody who may write the folder puts something else under the names that they saw there."""
    private, piece = break_off(store, folder / "x.sif")
    private.rename(tmp_path / "moved")
    thesis = tmp_path / "work" / "thesis"
    thesis.parent.mkdir(mode=0o700)
    thesis.write_text("precious")
    if attack == "link":
        private.symlink_to(thesis.parent)
    elif attack == "link to a copy":
        thesis.rename(thesis.with_name(piece.name))
        private.symlink_to(thesis.parent)
    elif attack == "open folder":
        private.mkdir(mode=0o777)
        private.chmod(0o777)
        (private / piece.name).symlink_to(thesis)
    elif attack == "thesis":
        thesis.rename(private)
    elif attack == "thesis in a folder":
        thesis.parent.rename(private)
    elif attack == "file":
        private.write_text("theirs")
    with bad_registry(registry_of()) as (host, _):
        get(host, store, folder / "x.sif")
    assert (folder / "x.sif").read_bytes() == SIF
    texts = [
        path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size == len("precious")
    ]
    assert texts == ["precious"]


@pytest.mark.parametrize(("owner", "is_refused"), [(65534, True), (0, False)])
def test_link_of_another_user_at_the_output_is_refused(
    owner: int, is_refused: bool, folder: Path, store: Store, tmp_path: Path
) -> None:
    """One's own leads where it was made for, and root's; a colleague's points to a file of the victim's."""
    if os.geteuid():
        pytest.skip("only root makes links of other users")
    (tmp_path / "thesis").write_text("precious")
    (folder / "x.sif").symlink_to(tmp_path / "thesis")
    os.lchown(folder / "x.sif", owner, owner)
    with bad_registry(registry_of()) as (host, _):
        if is_refused:
            with pytest.raises(UsageError, match="is a link that another user made, to "):
                get(host, store, folder / "x.sif")
        else:
            get(host, store, folder / "x.sif")
    assert ((tmp_path / "thesis").read_bytes() == b"precious") == is_refused


def test_piece_of_another_version_is_removed(folder: Path, store: Store) -> None:
    break_off(store, folder / "x.sif")
    other = random.Random(6).randbytes(MB)
    with bad_registry(registry_of(other)) as (host, _):
        get(host, store, folder / "x.sif")
    assert (folder / "x.sif").read_bytes() == other
    assert hidden(folder) == []


def test_parallel_pulls_of_one_file(folder: Path, store: Store) -> None:
    with bad_registry(registry_of()) as (host, _), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: get(host, store, folder / "x.sif"), range(8)))
    assert (folder / "x.sif").read_bytes() == SIF
    assert hidden(folder) == []


@pytest.mark.parametrize("before", ["open", "_lock"])
@pytest.mark.parametrize("still_runs", [True, False])
def test_a_pull_that_takes_the_file_of_a_beginning_one(
    before: str, still_runs: bool, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the names in the record before the first one has made the file, or locked it."""
    out = folder / "x.sif"
    name = "_lock" if before == "_lock" else "_open"
    call = getattr(partial, name)
    with contextlib.ExitStack() as stack:

        def other_pull(*args: Any) -> Any:
            monkeypatch.setattr(partial, name, call)
            other = stack.enter_context(partial_file(out, DIGEST, store))
            other.stream.write(b"other")
            if not still_runs:
                other.finish("x.sif", 0o644)
                stack.close()
            return call(*args)

        monkeypatch.setattr(partial, name, other_pull)
        with partial_file(out, DIGEST, store) as first:
            assert first.had == 0
            first.stream.write(b"first")
            first.finish("x.sif", 0o644)
        assert out.read_bytes() == b"first"
    assert len(hidden(folder)) == still_runs  # it broke off, and is resumed
    with partial_file(out, DIGEST, store) as again:
        assert again.had == 5 * still_runs
        again.discard()
    assert hidden(folder) == []


def test_piece_that_is_in_use_is_left_alone(folder: Path, store: Store) -> None:
    with partial_file(folder / "x.sif", DIGEST, store) as first:
        first.stream.write(b"begin")
        with bad_registry(registry_of()) as (host, asked):
            get(host, store, folder / "x.sif")
        assert (folder / "x.sif").read_bytes() == SIF
        assert len(hidden(folder)) == 1 and not first.is_empty
        assert "range" not in asked[-1][2]
    assert len(hidden(folder)) == 1  # it broke off, and is resumed
    with partial_file(folder / "x.sif", DIGEST, store) as again:
        assert (again.had, again.name) == (5, first.name)
        again.discard()
    assert hidden(folder) == []


@pytest.mark.parametrize("after", ["mkdir", "rename", "_lock"])
def test_folder_that_a_kill_leaves_at_any_moment_goes(after: str, folder: Path, store: Store) -> None:
    """After the folder is made, after the file is, and after the file got its name."""
    if (pid := os.fork()) == 0:
        with pytest.MonkeyPatch.context() as patch:
            target = "ekiben.artifacts.partial._lock" if after == "_lock" else f"os.{after}"
            call = partial._lock if after == "_lock" else getattr(os, after)

            def kill_after(*args: object, **options: object) -> object:
                result = call(*args, **options)
                if after == "_lock" or str(args[0]).startswith(".x.sif.") or args[1:2] == ("x.sif",):
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            patch.setattr(target, kill_after)
            with partial_file(folder / "x.sif", DIGEST, store) as first:
                first.stream.write(b"begin")
                first.finish("x.sif", 0o644)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(hidden(folder)) == 1
    with bad_registry(registry_of()) as (host, _):
        get(host, store, folder / "x.sif")
    assert hidden(folder) == []
    assert (folder / "x.sif").read_bytes() == SIF


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"folder": "..", "file": "x", "digest": "sha256:%s"}' % ("0" * 64),
        '{"folder": "a", "file": "../x", "digest": "sha256:%s"}' % ("0" * 64),
        '{"folder": 3}',
    ],
)
def test_record_that_is_none_is_ignored(record: str, folder: Path, store: Store) -> None:
    break_off(store, folder / "x.sif")
    (path,) = (store.root / "checks").glob("pull-*")
    path.write_text(record)
    with bad_registry(registry_of()) as (host, _):
        get(host, store, folder / "x.sif")
    assert (folder / "x.sif").read_bytes() == SIF


def test_without_a_store_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file/store")
    with bad_registry(registry_of(breaks_at=MB)) as (host, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "TIMEOUT", (1, 0.2))
        with pytest.raises(FetchError):
            get(host, store, folder / "x.sif")
    assert hidden(folder) == []
    with bad_registry(registry_of()) as (host, _):
        get(host, store, folder / "x.sif")
    assert [path.name for path in folder.iterdir()] == ["x.sif"]


def test_what_is_no_sif_leaves_nothing(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "read_sif", read_sif)
    with bad_registry(registry_of()) as (host, _), pytest.raises(StoreError, match=f"^{host}/lab/x:1: not a SIF file$"):
        get(host, store, folder / "x.sif")
    assert list(folder.iterdir()) == []


def test_other_bytes_leave_nothing(folder: Path, store: Store) -> None:
    good = registry_of()

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        return Answer(200, bytes(len(SIF))) if "/blobs/" in path else good(method, path, headers)

    with bad_registry(script) as (host, _), pytest.raises(FetchError, match="arrived damaged"):
        get(host, store, folder / "x.sif")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_the_file_is_that_of_the_umask(umask: int, folder: Path, store: Store) -> None:
    before = os.umask(umask)
    try:
        with bad_registry(registry_of()) as (host, _):
            get(host, store, folder / "x.sif")
    finally:
        os.umask(before)
    status = (folder / "x.sif").stat()
    assert (status.st_mode & 0o777, status.st_gid) == (0o777 & ~umask, folder.stat().st_gid)
