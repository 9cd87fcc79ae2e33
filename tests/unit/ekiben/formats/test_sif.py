from __future__ import annotations

import hashlib
import os
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.partition import Partition
from ekiben.formats.runtime_files import Scripts, runtime_files
from ekiben.formats.sif import DATA_AT, SifHeader, _reserve, read_sif, sif_id, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from support.small_sifs import DEFFILE, ID, blob, make, squashfs


def test_read_sif_reads_what_write_sif_wrote(tmp_path: Path) -> None:
    layers = [squashfs(tmp_path / name, name) for name in ("base", "python", "top")]
    heard: list[int] = []
    out = tmp_path / "x.sif"
    write_sif(out, layers, SifHeader(ID, DEFFILE, "arm64", 1_700_000_000), on_bytes=heard.append)
    info = read_sif(out)
    assert (info.id, info.arch, info.created) == (ID, "arm64", 1_700_000_000)
    assert sum(heard) == sum(layer.size for layer in layers)
    assert [item.size for item in info.layers] == [layer.size for layer in layers]
    assert all(item.offset % 65536 == 0 for item in info.layers)
    with out.open("rb") as stream:
        for item, name in zip(info.layers, ("base", "python", "top"), strict=True):
            assert SquashfsReader(stream, item.offset).read_file(name) == b"data"
        deffile = info.descriptors[0]
        stream.seek(deffile.offset)
        assert stream.read(deffile.size).decode() == DEFFILE
    assert os.access(out, os.X_OK)


def test_the_bytes_are_those_of_the_sif_format(tmp_path: Path) -> None:
    """Against the layout that `apptainer build` itself writes, field by field."""
    make(tmp_path / "x.sif", blob(tmp_path / "a", b"A" * 4096), blob(tmp_path / "b", b"B" * 10))
    data = (tmp_path / "x.sif").read_bytes()
    assert data[:48] == b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0002\0"
    assert uuid.UUID(bytes=data[48:64]) == uuid.UUID(ID)
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(64, 128, 8)]
    assert numbers == [1_700_000_000, 1_700_000_000, 45, 48, 4096, 28080, 32176, 131072 + 10 - 32176]
    first, second, third = (data[4096 + 585 * at :][:585] for at in range(3))
    assert first[:17].hex() == "014000000101000000010000f000000000"
    assert second[:17].hex() == "044000000102000000010000f000000000"
    assert third[:17].hex() == "044000000103000000010000f000000000"
    assert second[201:].rstrip(b"\0").hex() == "01000000020000003032"
    assert third[201:].rstrip(b"\0").hex() == "01000000040000003032"
    places = [[int.from_bytes(row[at : at + 8], "little") for at in (17, 25, 33)] for row in (first, second, third)]
    gap = 65536 - DATA_AT - len(DEFFILE)
    assert places == [[DATA_AT, len(DEFFILE), len(DEFFILE)], [65536, 4096, 4096 + gap], [131072, 10, 10 + 61440]]
    assert data[65536:69632] == b"A" * 4096
    assert data[131072:] == b"B" * 10


def test_partition_may_be_a_range_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "many").write_bytes(b"x" * 100 + b"layer" + b"y" * 100)
    make(tmp_path / "x.sif", Partition(tmp_path / "many", 100, 5, "sha256:" + hashlib.sha256(b"layer").hexdigest()))
    assert (tmp_path / "x.sif").read_bytes().endswith(b"layer")


def test_equal_images_are_equal_files(tmp_path: Path) -> None:
    layer = squashfs(tmp_path / "a", "a")
    make(tmp_path / "1.sif", layer)
    make(tmp_path / "2.sif", layer)
    assert (tmp_path / "1.sif").read_bytes() == (tmp_path / "2.sif").read_bytes()


def test_sif_id_depends_on_layers_and_deffile() -> None:
    ids = {
        sif_id(["sha256:a"], "x"),
        sif_id(["sha256:b"], "x"),
        sif_id(["sha256:a"], "y"),
        sif_id(["sha256:a", "x"], ""),
    }
    assert len(ids) == 4
    assert sif_id(["sha256:a"], "x") in ids
    assert all(str(uuid.UUID(found)) == found for found in ids)


# -- what goes wrong leaves nothing behind


def test_a_damaged_layer_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "x.sif"
    good, bad = blob(tmp_path / "good", b"G" * 5000), blob(tmp_path / "bad", b"B" * 5000)
    out.write_bytes(b"the old image")
    bad.path.write_bytes(b"B" * 4999 + b"!")
    with pytest.raises(StoreError, match=f"{bad.path}: should be {bad.digest}, is sha256:") as caught:
        make(out, good, bad)
    assert caught.value.hint
    bad.path.write_bytes(b"B" * 4000)
    with pytest.raises(StoreError, match=f"{bad.path}: ends 1000 bytes early"):
        make(out, good, bad)
    bad.path.unlink()
    with pytest.raises(StoreError, match=f"{bad.path}: cannot be read: No such file"):
        make(out, good, bad)
    assert out.read_bytes() == b"the old image"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "x.sif"]


def test_a_checked_layer_is_not_read_again_and_makes_the_same_file(tmp_path: Path) -> None:
    layer = blob(tmp_path / "a", b"A" * 5000)
    make(tmp_path / "one.sif", layer)
    make(tmp_path / "two.sif", replace(layer, is_checked=True))
    assert (tmp_path / "one.sif").read_bytes() == (tmp_path / "two.sif").read_bytes()
    short = replace(layer, is_checked=True, size=6000)
    with pytest.raises(StoreError, match="ends 1000 bytes early"):
        make(tmp_path / "short.sif", short)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise KeyboardInterrupt

    layer = blob(tmp_path / "a", b"A" * 5000)
    with pytest.raises(KeyboardInterrupt):
        write_sif(tmp_path / "x.sif", [layer], SifHeader(ID, "", "amd64", 0), on_bytes=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_missing_output_folder_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no/x\.sif cannot be written: No such file or directory"):
        make(tmp_path / "no/x.sif", blob(tmp_path / "a", b"a"))


def test_too_many_layers_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    layer = blob(tmp_path / "a", b"a")
    with pytest.raises(StoreError, match="holds 1 to 47 layers, not 48") as caught:
        make(tmp_path / "x.sif", *[layer] * 48)
    assert caught.value.hint == "use --squash"
    make(tmp_path / "x.sif", *[layer] * 47)
    assert len(read_sif(tmp_path / "x.sif").layers) == 47
    with pytest.raises(StoreError, match="'vax'; known: amd64"):
        make(tmp_path / "y.sif", layer, arch="vax")


# -- reading


def test_other_files_are_refused_as_sif(tmp_path: Path) -> None:
    path = tmp_path / "x.sif"
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read_sif(path)
    for data in (b"", b"#!/bin/sh\n" * 100):
        path.write_bytes(data)
        with pytest.raises(StoreError, match="not a SIF file"):
            read_sif(path)


def test_a_truncated_sif_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sif"
    make(path, blob(tmp_path / "a", b"A" * 9000))
    data = path.read_bytes()
    for size in (200, 5000, 33000, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StoreError, match="truncated"):
            read_sif(path)
    path.write_bytes(data[:88] + b"\xff" * 8 + data[96:])
    with pytest.raises(StoreError, match="is not that of a SIF"):
        read_sif(path)


# -- what runtimes look for inside


def run(script: bytes, *args: str, **environment: str) -> str:
    found = subprocess.run(
        ["sh", "-c", script.decode(), *args], env={"PATH": "/bin", **environment}, capture_output=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.decode()


def test_environment_values_are_not_expanded() -> None:
    values = {"A": 'it\'s $HOME `x` "q" \\', "B": "", "C": "two\nlines", "PATH": "/opt/bin:/bin"}
    files = runtime_files(values, {}, "", Scripts())
    mode, script = files[".singularity.d/env/90-environment.sh"]
    assert mode == 0o755
    shown = run(script + b'printf "%s|%s|%s|%s" "$A" "$B" "$C" "$PATH"', A="of the host")
    assert shown == "|".join(values.values())
    with pytest.raises(ValueError, match="'A-B' is not a name"):
        runtime_files({"A-B": ""}, {}, "", Scripts())


def test_driver_libraries_are_found_and_paths_can_be_added() -> None:
    _, script = runtime_files({}, {}, "", Scripts())[".singularity.d/env/99-base.sh"]
    show = script + b'echo "$LD_LIBRARY_PATH $PATH"'
    assert run(show) == "/.singularity.d/libs /bin\n"
    assert run(show, LD_LIBRARY_PATH="/a") == "/a:/.singularity.d/libs /bin\n"
    assert run(show, SING_USER_DEFINED_PREPEND_PATH="/p", SING_USER_DEFINED_APPEND_PATH="/q").endswith(" /p:/bin:/q\n")
    assert run(show, SING_USER_DEFINED_PATH="/only").endswith(" /only\n")


def test_scripts_keep_their_own_interpreter() -> None:
    files = runtime_files({}, {"b": "2", "a": "1"}, DEFFILE, Scripts("echo run", "#!/bin/bash\necho test\n"))
    assert files[".singularity.d/runscript"] == (0o755, b"#!/bin/sh\necho run\n")
    assert files[".singularity.d/test"] == (0o755, b"#!/bin/bash\necho test\n")
    assert files[".singularity.d/labels.json"] == (0o644, b'{\n "a": "1",\n "b": "2"\n}\n')
    assert files[".singularity.d/Singularity"] == (0o644, DEFFILE.encode())


def test_every_script_is_plain_sh() -> None:
    for path, (mode, content) in runtime_files({"A": "b"}, {}, "", Scripts("echo", "true")).items():
        if mode == 0o755:
            assert subprocess.run(["sh", "-n"], input=content).returncode == 0, path


def test_reserved_space_beyond_the_end_is_released(tmp_path: Path) -> None:
    make(tmp_path / "x.sif", blob(tmp_path / "a", b"A" * 4_000_000), blob(tmp_path / "b", b"B" * 1_000_000))
    about = (tmp_path / "x.sif").stat()
    assert about.st_blocks * 512 < about.st_size + 100_000


def test_space_is_reserved_where_the_file_system_can(tmp_path: Path) -> None:
    with (tmp_path / "file").open("x+b") as file:
        _reserve(file, 5_000_000)
        about = os.fstat(file.fileno())
    assert about.st_size == 0
    assert about.st_blocks * 512 >= 5_000_000  # ext4, XFS, btrfs and tmpfs can
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "wb") as pipe:
        _reserve(pipe, 5_000_000)  # says nothing
