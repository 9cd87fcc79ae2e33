"""Writing files atomically, digests and sizes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, StoreError, UsageError
from ekiben.core.files import (
    atomic_write,
    digest_of,
    format_size,
    new_file,
    open_regular,
    parse_yaml,
    read_source,
    read_yaml,
    tree_paths,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("content", ["größer\n", "größer\n".encode(), [b"gr\xc3\xb6", b"\xc3\x9fer\n"]])
def test_atomic_write_takes_text_bytes_and_chunks(tmp_path: Path, content: str | bytes | list[bytes]) -> None:
    path = tmp_path / "x"
    before = os.umask(0o077)
    try:
        atomic_write(path, content)
    finally:
        os.umask(before)
    assert path.read_bytes() == "größer\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644


def test_text_is_utf8_under_any_locale(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from ekiben.core.files import atomic_write;"
        " atomic_write(Path(sys.argv[1]), '\\u00fc')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script, tmp_path / "x"], env=env, check=True)
    assert (tmp_path / "x").read_bytes() == b"\xc3\xbc"


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), new_file(path) as stream:
        stream.write(b"half")
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert [item.name for item in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_atomic_write_refuses_other_than_regular_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("folder", "fifo", "link"):
        path = tmp_path / name
        kind = path.lstat().st_mode
        with pytest.raises(StoreError, match=re.escape(f"{path} cannot be written: it is not a regular file")):
            atomic_write(path, "x", error=StoreError)
        assert path.lstat().st_mode == kind


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_kept(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from ekiben.core.files import new_file\n"
        "with new_file(Path(sys.argv[1])) as stream:\n"
        "    stream.write(b'x' * 1000)\n"
        "    if sys.argv[2:]: print('ready', flush=True); sys.stdin.read()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path, argv = tmp_path / "a[b].sif", [sys.executable, "-c", script]
    with subprocess.Popen([*argv, path, "wait"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as live:
        assert live.stdout is not None
        live.stdout.readline()
        for name in (path, tmp_path / "other.sif"):
            subprocess.run([*argv, name], cwd=ROOT, check=False)
        assert len(list(tmp_path.iterdir())) == 3
        with new_file(path) as stream:  # at once: a file that is not locked has no live writer
            stream.write(b"y")
        parts = sorted(item.name.rpartition(".sif")[0] for item in tmp_path.iterdir() if item.name.endswith(".part"))
        assert parts == [".a[b]", ".other"]
        live.communicate()
    assert path.read_bytes() == b"y"


def test_a_file_system_that_makes_no_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the lock comes after the name, and a file that is younger than a second may have a live writer."""
    script = (
        "import os, signal, sys; from pathlib import Path; from ekiben.core import files\n"
        "files.os.O_TMPFILE = os.O_TMPFILE | os.O_CREAT\n"  # refused everywhere, with EINVAL or ENOENT
        "with files.new_file(Path(sys.argv[1])) as stream:\n"
        "    stream.write(b'x' * 1000); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "a.sif"
    subprocess.run([sys.executable, "-c", script, path], cwd=ROOT, check=False)
    (left,) = tmp_path.iterdir()
    assert not left.name.endswith(".locked.part")
    with new_file(path) as stream:
        stream.write(b"y")
    assert left.exists()
    monkeypatch.setattr("ekiben.core.files._YOUNG", -1)
    with new_file(path) as stream:
        stream.write(b"z")
    assert [item.name for item in tmp_path.iterdir()] == ["a.sif"]
    assert path.read_bytes() == b"z"


def test_an_unwritable_destination_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/x cannot be written: No such file or directory"):
        atomic_write(tmp_path / "no" / "x", "x")


def test_finished_file_without_its_name_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "x", os.rename

    def while_another_begins(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        atomic_write(path, "another")
        rename(source, target)

    with new_file(path) as stream:
        stream.write(b"one")
        monkeypatch.setattr(os, "rename", while_another_begins)
    assert path.read_bytes() == b"one"
    assert [left.name for left in tmp_path.iterdir()] == ["x"]


def test_the_umask_is_obeyed_when_asked(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_file(tmp_path / "x", mode=0o777, obey_umask=True):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o750


def test_all_paths_below_a_folder_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    (tmp_path / "link").symlink_to("a")
    paths = [tmp_path / path for path in ("a", "a/b", "a/b/c", "link")]
    assert tree_paths(tmp_path) == sorted(tmp_path.rglob("*")) == paths
    with pytest.raises(FileNotFoundError, match="none"):
        tree_paths(tmp_path / "none")


def test_digest_of_bytes_a_file_and_a_stream(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"data")
    expected = "sha256:" + hashlib.sha256(b"data").hexdigest()
    (tmp_path / "y").write_bytes(b"skipped data")
    with (tmp_path / "y").open("rb") as stream:
        stream.seek(8)
        assert [digest_of(b"data"), digest_of(tmp_path / "x"), digest_of(stream)] == [expected] * 3


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3e6, "3.0 MB"), (2.25e9, "2.25 GB"), (4e13, "40000.00 GB")],
)
def test_format_size(count: float, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("text", "name"), [("a: 1\nb: 2\na: 3\n", "a"), ("b:\n  c: 1\n  c: 2\n", "c"), ("d: [{e: 1, e: 2}]\n", "e")]
)
def test_duplicate_yaml_key_is_an_error(tmp_path: Path, text: str, name: str) -> None:
    """YAML's readers take the last one, and what stands before it is ignored."""
    from ekiben.spec.recipe import RecipeFile

    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(DefinitionError, match=rf"recipe\.yaml: duplicate key '{name}', in lines \d and \d; remove one"):
        read_yaml(tmp_path / "recipe.yaml", RecipeFile)


@dataclass
class _Labels:
    labels: dict[str, str]


def test_yaml_that_nests_too_deep_is_refused(tmp_path: Path) -> None:
    """libyaml's composer calls itself for each level: the process ended with a segmentation fault."""
    path = tmp_path / "x.yaml"
    path.write_text("labels: " + "[" * 50_000 + "]" * 50_000)
    with pytest.raises(DefinitionError, match=re.escape(f"{path}: line 1: is nested more than 32 levels deep")):
        read_yaml(path, _Labels)


def test_nested_yaml_aliases_are_not_expanded(tmp_path: Path) -> None:
    """Thirty levels of ten each: their text would fill any memory."""
    levels = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, 30)]
    (tmp_path / "x.yaml").write_text("\n".join(["l0: &l0 [x]", *levels, "labels: *l29"]))
    with pytest.raises(DefinitionError, match=r"labels: should be a mapping \(found: \[\[") as caught:
        read_yaml(tmp_path / "x.yaml", _Labels)
    assert max(map(len, str(caught.value).splitlines())) < 300 + len(str(tmp_path))


def test_reading_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    readers: list[Callable[[Path], object]] = [read_source, lambda path: read_yaml(path, _Labels)]
    for read in readers:
        with pytest.raises(DefinitionError, match="is not a regular file"):
            read(tmp_path / "pipe")
    assert read_source(tmp_path / "none", default="") == ""
    with pytest.raises(DefinitionError, match="No such file"):
        read_source(tmp_path / "none")


@pytest.mark.parametrize("text", ["time: 2:00:00", "list: [1:30]", "number: 1:30.5"])
def test_a_number_to_the_base_of_60_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 1: YAML reads .* as a number to the base of 60; put it in quotes"):
        parse_yaml(text.encode())
    assert parse_yaml(b'time: "2:00:00"') == {"time": "2:00:00"}


def test_a_file_of_the_kernel_is_no_regular_file(tmp_path: Path) -> None:
    """It has no size; some wait for more, and have no end."""
    with pytest.raises(OSError, match="it is not a regular file"):
        open_regular(Path("/proc/self/status"))
    (tmp_path / "empty").touch()
    with open_regular(tmp_path / "empty") as stream:
        assert stream.read() == b""
