"""SIF files written by us, run by real Apptainer: as root and as an ordinary user, layered and flat."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.runtime_files import Scripts, runtime_files
from ekiben.formats.sif import SifHeader, sif_header, sif_id, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.users import users_partition

pytestmark = pytest.mark.covers("ekiben/formats", "ekiben/artifacts")

USER = "builder"  # tests/services.sh makes it
DEFFILE = "Bootstrap: localimage\nFrom: python.sif\n\n%labels\n    who us\n"
FAQ = "usr/share/doc/base-files/FAQ"
LABELS = {"who": "us", "org.example.note": "it's here"}
Files = Mapping[str, tuple[int, bytes] | None]  # path → (mode, content), or None for a removed path


@pytest.fixture(scope="module")
def workspace() -> Iterator[Path]:
    """A folder that the ordinary user can read and write, too."""
    for tool in ("apptainer", "mmdebstrap"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed (tests/services.sh install apptainer)")
    with tempfile.TemporaryDirectory(prefix="ekiben-sif-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture(scope="module")
def base(workspace: Path) -> Partition:
    """A small Debian, as one layer."""
    archive = workspace / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=essential", "bookworm", str(archive)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "SOURCE_DATE_EPOCH": "0"})
    return squashfs(workspace / "base.sqfs", tar_entries(archive))


def tar_entries(archive: Path) -> Iterator[LayerEntry]:
    with tarfile.open(archive) as tar:
        found = {member.name.strip("/").removeprefix("./").removeprefix("."): member for member in tar}
        for path in sorted(found, key=sort_key):
            member = found[path]
            owner: dict[str, Any] = {"mode": member.mode, "uid": member.uid, "gid": member.gid}
            if member.isdir():
                yield Entry(path, "dir", **owner), None
            elif member.issym():
                yield Entry(path, "symlink", **owner, target=member.linkname), None
            elif data := tar.extractfile(member):
                content = data.read()
                yield Entry(path, "file", **owner, size=len(content)), [content] if content else None


def change(files: Files) -> Iterator[LayerEntry]:
    """A layer that changes or removes just these, and the directories above them."""
    folders = {path[:at] for path in files for at, letter in enumerate(path) if letter == "/"} | {""}
    for path in sorted({*files, *folders}, key=sort_key):
        content = files.get(path)
        if path in folders:
            yield Entry(path, "dir"), None
        elif content is None:
            yield Entry(path, "whiteout", mode=0), None
        else:
            yield Entry(path, "file", content[0], size=len(content[1])), [content[1]] if content[1] else None


def squashfs(path: Path, members: Iterable[LayerEntry]) -> Partition:
    with path.open("w+b") as out:
        write_entries(members, SquashfsWriter(out))
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256").hexdigest()
    path.chmod(0o644)
    return Partition(path, 0, path.stat().st_size, "sha256:" + digest)


def flattened(path: Path, layers: list[Partition]) -> Partition:
    streams = [layer.path.open("rb") for layer in layers]
    try:
        return squashfs(path, merged_layer([SquashfsReader(stream) for stream in streams]))
    finally:
        for stream in streams:
            stream.close()


def top_layer() -> Files:
    environment = {"PATH": "/opt/bin:/usr/bin:/bin", "GREETING": "it's $HOME", "LD_LIBRARY_PATH": "/opt/lib"}
    runscript = 'if [ $# -gt 0 ]; then exec "$@"; fi\necho "tasks: $GREETING"\n'
    startscript = 'echo "$GREETING $@" >"$1"\nexec sleep 60\n'
    return runtime_files(
        environment,
        LABELS,
        DEFFILE,
        Scripts(runscript, "test -f /layer/new && echo tests passed", startscript, "The tasks.\n"),
    )


def layers_of(workspace: Path, base: Partition, count: int) -> list[Partition]:
    """``count`` layers that end in the same tree: files come, change and go on the way."""
    steps: list[dict[str, tuple[int, bytes] | None]] = [
        {"layer/new": (0o644, b"1"), "layer/gone": (0o644, b"1"), "old/deep/file": (0o644, b"1"), FAQ: None},
        {"layer/new": (0o644, b"2"), "layer/gone": None, "opt/bin/task": (0o755, b"#!/bin/sh\necho task $#\n")},
        {"old": None, "etc/issue": None},
        {"old/back": (0o644, b"back"), "layer/again": (0o644, b"4")},
        {"layer/again": None, "etc/issue": (0o644, b"ours\n")},
        {"layer/again": (0o600, b"6")},
    ]
    merged: dict[str, tuple[int, bytes] | None] = {}
    if count == 3:
        for step in steps:
            merged |= step
        # Of what came and went again in one layer nothing is left.
        steps = [{path: merged[path] for path in merged if path not in ("layer/gone", "old", "old/deep/file")}]
    layers = [base]
    for number, step in enumerate([*steps, dict(top_layer())]):
        layers.append(squashfs(workspace / f"{count}-{number}.sqfs", change(step)))
    return layers


@pytest.fixture(scope="module")
def images(workspace: Path, base: Partition) -> dict[str, Path]:
    three, eight = layers_of(workspace, base, 3), layers_of(workspace, base, 8)
    assert (len(three), len(eight)) == (3, 8)
    stacks = {"3": three, "8": eight, "1": [flattened(workspace / "flat.sqfs", eight)]}
    for name, layers in stacks.items():
        wanted = sif_id([layer.digest for layer in layers], DEFFILE)
        write_sif(workspace / f"{name}.sif", layers, SifHeader(wanted, DEFFILE, "amd64", 0))
    return {name: workspace / f"{name}.sif" for name in stacks}


@pytest.fixture(params=["1", "3", "8"])
def image(request: pytest.FixtureRequest, images: dict[str, Path]) -> Path:
    return images[str(request.param)]


@pytest.fixture(params=["root", USER])
def who(request: pytest.FixtureRequest) -> str:
    """Root runs on kernel mounts, an ordinary user on squashfuse."""
    name = str(request.param)
    if os.geteuid() != 0 and name != pwd.getpwuid(os.geteuid()).pw_name:
        pytest.skip(f"only root can run as {name}")
    return name


def apptainer(who: str, *args: str | Path, code: int = 0, text: str = "") -> str:
    command = shlex.join(["apptainer", "--silent", *map(str, args)])
    argv = ["sh", "-c", f"cd /tmp && {command}"]
    if pwd.getpwuid(os.geteuid()).pw_name != who:
        argv = ["su", who, "-c", f"cd /tmp && {command}"]
    home = pwd.getpwnam(who).pw_dir
    environment = {"PATH": os.environ["PATH"], "HOME": home}
    found = subprocess.run(argv, input=text, capture_output=True, text=True, env=environment, timeout=120)
    assert found.returncode == code, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout


SHOW = """
for path in layer/new layer/gone layer/again old/deep old/back etc/issue usr/share/doc/base-files/FAQ; do
    if [ -f /$path ]; then echo $path: $(cat /$path 2>/dev/null || echo unreadable); else echo $path: -; fi
done
"""


@pytest.mark.guard
def test_layers_are_stacked_and_whiteouts_apply(image: Path, who: str) -> None:
    again = "6" if who == "root" else "unreadable"  # mode 0600, owned by root
    shown = apptainer(who, "exec", image, "sh", "-c", SHOW).splitlines()
    assert shown == [
        "layer/new: 2",
        "layer/gone: -",
        f"layer/again: {again}",
        "old/deep: -",
        "old/back: back",
        "etc/issue: ours",
        "usr/share/doc/base-files/FAQ: -",
    ]


def test_exec_run_shell_and_test(image: Path, who: str) -> None:
    assert apptainer(who, "exec", image, "task", "a b", "c") == "task 2\n"
    assert apptainer(who, "run", image) == "tasks: it's $HOME\n"
    assert apptainer(who, "run", image, "task", "a b") == "task 1\n"
    assert apptainer(who, "shell", image, text="echo $GREETING; head -c 3 /etc/debian_version") == "it's $HOME\n12."
    assert apptainer(who, "test", image) == "tests passed\n"
    apptainer(who, "run", image, "sh", "-c", "exit 7", code=7)


def test_instance_start_runs_the_startscript(image: Path, who: str) -> None:
    name = f"ekiben-start-{who}-{image.stem}"
    answer = Path("/tmp", name)
    try:
        apptainer(who, "instance", "start", image, name, answer, "a b")
        for _ in range(100):
            if answer.exists() and answer.read_text():
                break
            time.sleep(0.1)
        assert answer.read_text() == f"it's $HOME {answer} a b\n"
        assert apptainer(who, "exec", f"instance://{name}", "sh", "-c", "cat /proc/[0-9]*/comm").count("sleep") == 1
    finally:
        apptainer(who, "instance", "stop", name)
        answer.unlink(missing_ok=True)


def test_printed_launch_command_runs(images: dict[str, Path], workspace: Path) -> None:
    """A SIF can be started by its name, when the runtime has its old name too."""
    names = workspace / "names"
    names.mkdir(exist_ok=True)
    script = names / "run-singularity"
    if not script.exists():
        script.write_text('#!/bin/sh\nexec apptainer run "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{names}:{os.environ['PATH']}"}
    found = subprocess.run([images["3"], "task", "x"], capture_output=True, text=True, env=environment, cwd=workspace)
    assert (found.returncode, found.stdout) == (0, "task 1\n"), found.stderr


def test_users_of_upper_layers(base: Partition, who: str) -> None:
    with base.path.open("rb") as stream:
        reader = SquashfsReader(stream)
        passwd, group = (reader.read_file(f"etc/{name}") for name in ("passwd", "group"))
    upper = change(
        {
            "etc/passwd": (
                0o644,
                passwd + b"ann:x:4242:4321::/home/ann:/bin/sh\nsshd:x:104:65534::/run/sshd:/usr/sbin/nologin\n",
            ),
            "etc/group": (0o644, group + b"lab:x:4321:ann\n"),
        }
    )
    layers = [
        base,
        squashfs(base.path.parent / "users.sqfs", upper),
        squashfs(base.path.with_name("top.sqfs"), change(dict(top_layer()))),
    ]
    with contextlib.ExitStack() as stack:
        readers = [SquashfsReader(stack.enter_context(layer.path.open("rb"))) for layer in layers]
        users = users_partition(readers, 0)
    image = base.path.with_name("users.sif")
    write_sif(image, layers, sif_header([layer.digest for layer in layers], DEFFILE, "amd64", 0, users))
    show = "id ann; getent passwd sshd; getent group lab; getent passwd $(id -u) | cut -d: -f1"
    for options in ([], ["--contain", "--writable-tmpfs"], *([] if who == "root" else [["--fakeroot"]])):
        caller = "root" if options == ["--fakeroot"] else who
        assert apptainer(who, "exec", *options, image, "sh", "-c", show).splitlines() == [
            "uid=4242(ann) gid=4321(lab) groups=4321(lab)",
            "sshd:x:104:65534::/run/sshd:/usr/sbin/nologin",
            "lab:x:4321:ann",
            caller,
        ]


def test_apptainer_inspect(image: Path, who: str) -> None:
    assert apptainer(who, "inspect", "--labels", image).splitlines() == ["org.example.note: it's here", "who: us"]
    assert "tasks: $GREETING" in apptainer(who, "inspect", "--runscript", image)
    assert "export PATH=/opt/bin" in apptainer(who, "inspect", "--environment", image)
    assert "tests passed" in apptainer(who, "inspect", "--test", image)
    assert "From: python.sif" in apptainer(who, "inspect", "--deffile", image)
    assert apptainer(who, "run-help", image) == "The tasks.\n"


def test_environment_inside(image: Path, who: str) -> None:
    show: list[str | Path] = [image, "sh", "-c", "echo $GREETING,$PATH,$LD_LIBRARY_PATH"]
    assert apptainer(who, "exec", *show) == "it's $HOME,/opt/bin:/usr/bin:/bin,/opt/lib:/.singularity.d/libs\n"
    assert apptainer(who, "exec", "--nv", *show).endswith(":/.singularity.d/libs\n")
    assert apptainer(who, "exec", "--env", "GREETING=hi,PREPEND_PATH=/first", *show).startswith("hi,/first:/opt/bin:")
    assert apptainer(who, "exec", "--cleanenv", "--contain", *show).startswith("it's $HOME,/opt/bin:")


def test_writable_overlay(image: Path, who: str, workspace: Path) -> None:
    write = "echo x > /layer/mine && rm /layer/new && ls /layer"
    assert apptainer(who, "exec", "--writable-tmpfs", image, "id", "-u") == f"{pwd.getpwnam(who).pw_uid}\n"
    fakeroot = ["exec"] if who == "root" else ["exec", "--fakeroot"]
    assert apptainer(who, *fakeroot, image, "id", "-u") == "0\n"
    assert apptainer(who, *fakeroot, "--writable-tmpfs", image, "sh", "-c", write) == "again\nmine\n"
    overlay = workspace / f"overlay-{who}-{image.stem}"
    overlay.mkdir()
    shutil.chown(overlay, who)
    assert apptainer(who, *fakeroot, "--overlay", overlay, image, "sh", "-c", write) == "again\nmine\n"
    assert apptainer(who, *fakeroot, "--overlay", overlay, image, "ls", "/layer") == "again\nmine\n"


def test_apptainer_sif_list(images: dict[str, Path]) -> None:
    shown = [line for line in apptainer("root", "sif", "list", images["8"]).splitlines() if line[:1].isdigit()]
    assert [line.rpartition("|")[2] for line in shown] == [
        "Def.FILE",
        "FS (Squashfs/*System/amd64)",
        *["FS (Squashfs/Overlay/amd64)"] * 7,
    ]
    assert {line.split("|")[1].strip() for line in shown} == {"1"}


def test_a_signed_image_verifies_and_a_changed_one_does_not(images: dict[str, Path], workspace: Path) -> None:
    signed = workspace / "signed.sif"
    shutil.copy(images["8"], signed)
    owner = ["--name", "nobody", "--email", "nobody@example.org", "--comment", "test", "--password", ""]
    home = workspace / "home"
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "APPTAINER_CONFIGDIR": str(home)}

    def call(*args: str | Path) -> int:
        return subprocess.run(["apptainer", *map(str, args)], env=environment, capture_output=True).returncode

    assert call("key", "newpair", "--push=false", *owner) == 0
    assert call("verify", signed) != 0
    assert call("sign", signed) == 0
    assert call("verify", signed) == 0
    with signed.open("r+b") as stream:
        stream.seek(100_000)
        byte = stream.read(1)[0]
        stream.seek(100_000)
        stream.write(bytes([byte ^ 1]))
    assert call("verify", signed) != 0
