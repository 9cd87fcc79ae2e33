"""Build stages with real engines: a small package compiled by gcc in a stage, its wheel proven, kept, taken elsewhere.

The stage stands on a layer with gcc and pip, as images/*.def stand on the toolkit. A file that nvcc would have filled
with device code is written by hand (tests/fat_elf.py): nvcc itself is too large for every run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workspaces import ENGINES, ME, USER, Cli, Engine, Workspace, give, share_layers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.compiled import extension

REGISTRY = "127.0.0.1:5000"

pytestmark = pytest.mark.covers("ekiben/builder", "ekiben/executors", "images/scripts")

TOOLS = """\
Bootstrap: localimage
From: python.sif

%files
    files/source.py /opt/ekiben/source.py
    files/compile.py /opt/ekiben/compile.py
    files/tools.lock /opt/ekiben/locks/tools.lock

%post
    apt-get update
    apt-get install -y --no-install-recommends gcc libc6-dev libpython3.11-dev git
    uv pip install --python /opt/venv/bin/python --require-hashes --requirement /opt/ekiben/locks/tools.lock

%environment
    export TOOLS=here
"""
TINY = """\
Bootstrap: localimage
From: tools.sif
Stage: build

%arguments
    capabilities=9.0
    tiny_repository=
    tiny_commit=

%files
    files/device.so /opt/device.so

%post
    source="${EKIBEN_WORK:-/opt/work}/tiny"
    python /opt/ekiben/source.py "{{ tiny_repository }}" "{{ tiny_commit }}" "$source"
    cd "$source"
    echo "for {{ capabilities }} with $MAX_JOBS jobs and $TOOLS"
    LDFLAGS=-Wl,--strip-all python /opt/ekiben/compile.py "$source" /opt/wheels/tiny
    # What nvcc leaves in a library, added to what gcc made.
    python - <<'END'
import base64, csv, hashlib, pathlib, zipfile
(path,) = pathlib.Path("/opt/wheels/tiny").iterdir()
with zipfile.ZipFile(path) as old:
    held = {name: old.read(name) for name in old.namelist()}
(record,) = (name for name in held if name.endswith("RECORD"))
held["tiny_device.so"] = pathlib.Path("/opt/device.so").read_bytes()
digest = base64.urlsafe_b64encode(hashlib.sha256(held["tiny_device.so"]).digest()).rstrip(b"=").decode()
held[record] += f"tiny_device.so,sha256={digest},{len(held['tiny_device.so'])}\\n".encode()
with zipfile.ZipFile(path, "w") as new:
    for name, data in held.items():
        new.writestr(zipfile.ZipInfo(name), data)
END

%labels
    org.ekiben.wheel tiny

Bootstrap: localimage
From: python.sif
Stage: runtime

%files from build
    /opt/wheels/tiny /opt/wheels/tiny

%post
    pip install --no-deps --no-index --no-compile /opt/wheels/tiny/*.whl
    rm -r /opt/wheels

%test
    set -e
    python -c 'import tiny; assert tiny.answer() == 42'
    if command -v gcc; then exit 1; fi
    test -z "$TOOLS"
"""
SOURCE = """\
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", 0, -1, methods};
PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&module); }
"""
SETUP = """\
from setuptools import Extension, setup
setup(name="tiny", version="1.0", ext_modules=[Extension("tiny", ["tiny.c"], define_macros=[("ANSWER", "42")])])
"""


@dataclass(frozen=True)
class Tiny:
    """A recipe whose top layer takes a wheel of a build stage; ``mirror`` is where its source lies."""

    path: Path
    mirror: Path

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.path / file).read_text()
        assert old in text
        (self.path / file).write_text(text.replace(old, new))

    def write(self, file: str, text: str | bytes) -> None:
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        (self.path / file).write_bytes(text.encode() if isinstance(text, str) else text)

    def stack(self, **changes: Any) -> None:
        about = {
            "name": "small",
            "description": "a test",
            "suite": "bookworm",
            "python": "3.11",
            "cuda": "13.0",
            "torch": "2.11.0",
            "driver": ">=580",
            "compute_capabilities": ["9.0"],
            "epoch": 1_795_219_200,
            "arguments": {
                "stack": "x",
                "python": "3.11",
                "tiny_repository": "https://example.invalid/tiny",
                "tiny_commit": self.commit,
            },
        }
        self.write("images/stacks/small/stack.yaml", json.dumps({**about, **changes}))

    @property
    def commit(self) -> str:
        return git(self.mirror, "rev-parse", "HEAD")

    @property
    def settings(self) -> dict[str, str | None]:
        """git's own way to name a mirror."""
        return {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.file://{self.mirror.parent}/.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://example.invalid/",
        }


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "safe.directory=*", "-C", str(folder)]
    when = {**os.environ, "GIT_AUTHOR_DATE": "@1700000000 +0000", "GIT_COMMITTER_DATE": "@1700000000 +0000"}
    return subprocess.run([*command, *args], env=when, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tiny(workspace: Workspace) -> Tiny:
    return make_tiny(workspace, workspace.folder("tiny"))


def make_tiny(workspace: Workspace, folder: Path) -> Tiny:
    mirror = folder / "mirrors/tiny"
    mirror.mkdir(parents=True)
    git(mirror, "init", "--quiet")
    made = Tiny(folder / "own", mirror)
    for name, text in (("tiny.c", SOURCE), ("setup.py", SETUP)):
        (mirror / name).write_text(text)
    git(mirror, "add", ".")
    git(mirror, "commit", "--quiet", "-m", "tiny")
    made.write("images/tools.def", TOOLS)
    made.write("images/tiny.def", TINY)
    for name, script in (("source.py", "fetch_source.py"), ("compile.py", "build_wheel.py")):
        made.write(f"files/{name}", (workspace.checkout / "images/scripts" / script).read_text())
    made.write("files/device.so", extension("sm_90"))
    locked = [locked_block(workspace.checkout, name) for name in ("ninja", "packaging", "setuptools", "wheel")]
    made.write("files/tools.lock", "".join(locked))
    shutil.copytree(workspace.checkout / "images/stacks/cu130", made.path / "images/stacks/small")
    (made.path / "images/stacks/small/SHA256SUMS").unlink()
    made.stack()
    made.write(
        "recipe.yaml",
        json.dumps({"name": "own", "description": "a test", "stack": "small", "layer": "tiny", "tasks": {}}),
    )
    return made


def locked_block(checkout: Path, name: str) -> str:
    """A package's lines of cu130's lock files."""
    text = "".join(path.read_text() for path in sorted((checkout / "images/stacks/cu130").glob("*.lock")))
    return next(block for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if block.startswith(f"{name}=="))


@dataclass(frozen=True)
class Built:
    store: Path
    result: dict[str, Any]
    stderr: str


@pytest.fixture(scope="module")
def built(workspace: Workspace, cli: Cli, hello: Path) -> Iterator[Built]:
    """The recipe built once, as root with Apptainer: its tools layer is what the other tests begin with."""
    folder = Path(tempfile.mkdtemp(prefix="stages-", dir=workspace.path))
    folder.chmod(0o755)
    tiny, store = make_tiny(workspace, folder), folder / "store"
    share_layers(hello, store, ["base", "python"], ME)
    done = cli.run(
        "--store",
        store,
        "image",
        tiny.path,
        "--json",
        "--engine",
        "apptainer",
        "--format",
        "sif",
        "-o",
        folder / "own.sif",
        env=tiny.settings,
    )
    yield Built(store, json.loads(done.stdout), done.stderr)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store_with(built: Built, workspace: Workspace) -> Callable[..., Path]:
    """store_with(user, *layers): a store in which these layers are, and nothing that was compiled."""

    def make(user: str = ME, *layers: str) -> Path:
        store = workspace.folder("stores", user) / "store"
        share_layers(built.store, store, layers, user)
        return store

    return make


def wheels(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((store / "results").glob("*.json"))]


def nothing_kept(store: Path) -> bool:
    """No record of a wheel and no blob of one; no record of the layer."""
    names = {json.loads(path.read_text())["name"] for path in (store / "keys").glob("*.json")}
    zipped = [path for path in (store / "blobs/sha256").iterdir() if path.read_bytes()[:2] == b"PK"]
    return not wheels(store) and "tiny" not in names and not zipped


def test_image_contains_the_wheel_but_no_compiler(built: Built, workspace: Workspace, cli: Cli, tiny: Tiny) -> None:
    assert {item["name"] for item in built.result["layers"]} == {"base", "python", "tiny", "own"}
    assert [check["runtime"] for check in built.result["checks"]] == ["apptainer"]
    assert "stage tiny.build" in built.stderr
    (wheel,) = wheels(built.store)
    assert (wheel["wheel"], wheel["origin"], wheel["executor"]) == ("tiny", "compiled", "apptainer")
    assert wheel["inputs"]["capabilities"] == ["9.0"]
    assert [tool[0] for tool in wheel["inputs"]["tools"]] == ["tools"]
    assert wheel["notes"]["extensions"]["tiny_device.so"] == ["sm_90"]
    listed = cli.run("--store", built.store, "wheels", "list").stdout
    assert listed.startswith("tiny ")
    assert "torch 2.11.0  CUDA 13.0  Python 3.11  for 9.0" in listed
    assert list((built.store.parent / "cache-root/work").iterdir()) == []
    about = json.loads(
        next(path.read_text() for path in (built.store / "keys").glob("*.json") if '"name": "tiny"' in path.read_text())
    )
    assert list(about["notes"]["outputs"].values()) == [wheel["files"][0]["digest"][7:]]


def test_sbom_records_the_compilation(built: Built, cli: Cli, tiny: Tiny) -> None:
    (wheel,) = wheels(built.store)
    sbom = json.loads(cli.run("--store", built.store.parent / "nothing", "sbom", built.store.parent / "own.sif").stdout)
    (found,) = (item for item in sbom["components"] if item["name"] == "tiny")
    assert found["hashes"] == [{"alg": "SHA-256", "content": wheel["files"][0]["digest"][7:]}]
    assert found["pedigree"]["commits"] == [{"uid": tiny.commit, "url": "https://example.invalid/tiny"}]
    assert found["purl"] == f"pkg:generic/tiny@1.0?vcs_url=git%2Bhttps://example.invalid/tiny%40{tiny.commit}"
    properties = {item["name"]: item["value"] for item in found["properties"]}
    assert properties["ekiben:compiled:cache_key"] == wheel["key"]
    assert (properties["ekiben:compiled:capabilities"], properties["ekiben:compiled:torch"]) == ("9.0", "2.11.0")
    assert properties["ekiben:layer"] == "tiny"


def test_an_edited_runtime_layer_compiles_nothing(built: Built, cli: Cli, tiny: Tiny) -> None:
    def plan() -> dict[str, str]:
        rows = json.loads(cli.run("--store", built.store, "plan", tiny.path, "--json").stdout)
        return {
            **{need["step"]: need["reason"] for row in rows for need in row.get("stage_deps", ())},
            **{row["layer"]: row["reason"] for row in rows},
        }

    assert set(plan().values()) == {"stored"}
    tiny.replace("images/tiny.def", "rm -r /opt/wheels\n", "rm -r /opt/wheels\n    echo more >/opt/more\n")
    assert plan() == plan() | {"tiny.build": "stored, compiled", "tiny": "%post changed", "own": plan()["own"]}
    tiny.replace("images/tiny.def", "for {{ cap", "now for {{ cap")
    assert plan()["tiny.build"] == "%post changed"
    assert "tools" not in plan() or plan()["tools"] == "stored"
    tiny.stack(compute_capabilities=["8.0", "9.0"])
    assert "compute capabilities changed: 9.0 → 8.0 9.0" in plan()["tiny.build"]


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if str(engine) != "apptainer-root"], ids=str)
def test_every_engine_compiles_the_same_wheel(
    engine: Engine, built: Built, tiny: Tiny, workspace: Workspace, store_with: Callable[..., Path]
) -> None:
    store = store_with(engine.user, "base", "python", "tools")
    made = Cli(workspace, engine.user).image(
        store,
        tiny.path,
        "--engine",
        engine.name,
        "--format",
        "sif",
        "--no-verify",
        "-o",
        store.parent / "own.sif",
        env=tiny.settings,
        cwd=store.parent,
    )
    assert wheels(store)[0]["files"] == wheels(built.store)[0]["files"]
    assert {item["name"]: item["diff_id"] for item in made["layers"]} == {
        item["name"]: item["diff_id"] for item in built.result["layers"]
    }


def test_exported_wheel_is_imported_without_a_compiler(
    built: Built, cli: Cli, tiny: Tiny, workspace: Workspace, store_with: Callable[..., Path]
) -> None:
    stick = workspace.folder("stick")
    wheel = Path(cli.run("--store", built.store, "wheels", "export", "tiny", "-o", stick).stdout.strip())
    assert {path.name for path in stick.iterdir()} == {wheel.name, wheel.name + ".json"}
    store = store_with(ME, "base", "python")
    stdout = cli.run("--store", store, "wheels", "import", tiny.path, wheel, "--engine", "apptainer").stdout
    assert "verified and stored" in stdout
    made = cli.image(
        store, tiny.path, "--engine", "apptainer", "--format", "sif", "--no-verify", "-o", stick / "own.sif"
    )
    assert made["built"] == ["own"]
    assert [item["digest"] for item in made["layers"]] == [item["digest"] for item in built.result["layers"]]
    (kept,) = wheels(store)
    assert kept["origin"] == "imported"
    cli.run("--store", store, "wheels", "import", tiny.path, wheel)  # again: it is there
    assert "removed 0 blobs" in cli.run("--store", store, "prune", "--wheels").stdout


def test_invalid_wheels_are_not_imported(
    built: Built, cli: Cli, tiny: Tiny, workspace: Workspace, store_with: Callable[..., Path]
) -> None:
    stick, store = workspace.folder("stick"), store_with(ME, "base", "python")
    wheel = Path(cli.run("--store", built.store, "wheels", "export", "tiny", "-o", stick).stdout.strip())
    record = wheel.with_name(wheel.name + ".json")

    def refused(*args: str | Path, code: int = 8) -> str:
        stderr = cli.run(
            "--store", store, "wheels", "import", tiny.path, *args, "--engine", "apptainer", code=code
        ).stderr
        assert nothing_kept(store), stderr
        return stderr

    assert "not the one given" in refused(wheel, "--sha256", "0" * 64)
    tiny.stack(torch="2.12.0", cuda="13.1")
    (tiny.path / "images/stacks/small/pytorch.lock").unlink()
    (tiny.path / "images/stacks/small/toolkit.lock").unlink()
    stderr = refused(wheel)
    assert "torch: 2.11.0 there, 2.12.0 here" in stderr
    assert "cuda: 13.0 there, 13.1 here" in stderr
    tiny.stack()
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert "its record says" in refused(wheel)
    record.unlink()
    other = wheel.with_name(wheel.name.replace("cp311-cp311", "cp312-cp312"))
    wheel.rename(other)
    assert "is for cp312" in refused(other)
    strange = other.with_name("strange-1.0-cp311-cp311-linux_x86_64.whl")
    other.rename(strange)
    assert "no layer of own compiles 'strange'; it compiles tiny" in refused(strange, code=2)


def test_unverified_wheel_is_not_stored(cli: Cli, tiny: Tiny, store_with: Callable[..., Path]) -> None:
    store = store_with(ME, "base", "python", "tools")

    def failed(code: int) -> str:
        stderr = cli.run(
            "--store",
            store,
            "image",
            tiny.path,
            "--engine",
            "apptainer",
            "--format",
            "sif",
            "--no-verify",
            cwd=store.parent,
            env=tiny.settings,
            code=code,
        ).stderr
        assert nothing_kept(store), stderr
        return stderr

    tiny.write("files/device.so", extension("sm_80"))
    assert "tiny_device.so: no device code for compute capability 9.0 (there is: sm_80)" in failed(8)
    tiny.write("files/device.so", extension("sm_90"))
    tiny.replace("images/tiny.def", "== 42", "== 43")
    assert "%test of tiny failed" in failed(8)


def test_mirror_with_another_commit_is_refused(cli: Cli, tiny: Tiny, store_with: Callable[..., Path]) -> None:
    store = store_with(ME, "base", "python", "tools")
    tiny.stack()
    wanted = tiny.commit
    shutil.rmtree(tiny.mirror / ".git")
    git(tiny.mirror, "init", "--quiet")
    (tiny.mirror / "tiny.c").write_text(SOURCE + "\n")
    git(tiny.mirror, "add", ".")
    git(tiny.mirror, "commit", "--quiet", "-m", "another")
    build = ("--store", store, "image", tiny.path, "--engine", "apptainer", "--format", "sif")
    mirrored = rf"https://example\.invalid/tiny \(from (file://)?{re.escape(str(tiny.mirror))}\)"
    stderr = cli.run(*build, env=tiny.settings, code=7).stderr
    assert re.search(f"{mirrored} does not have the commit {wanted}", stderr), stderr
    shutil.rmtree(tiny.mirror)
    stderr = cli.run(*build, env=tiny.settings, code=7).stderr
    assert re.search(f"{mirrored} cannot be read: ", stderr), stderr
    assert nothing_kept(store)


def test_compilation_out_of_memory_or_disk(cli: Cli, tiny: Tiny, store_with: Callable[..., Path]) -> None:
    store = store_with(ME, "base", "python", "tools")
    begin = '    echo "for'

    def failed() -> str:
        stderr = cli.run(
            "--store",
            store,
            "image",
            tiny.path,
            "--engine",
            "apptainer",
            "--format",
            "sif",
            "--no-verify",
            cwd=store.parent,
            env=tiny.settings,
            code=5,
        ).stderr
        assert nothing_kept(store), stderr
        (work,) = (store.parent / "cache-root/work").iterdir()
        assert (work / "tiny/setup.py").exists()
        shutil.rmtree(work)
        return stderr

    tiny.replace("images/tiny.def", begin, f"    cat /dev/zero >/dev/full\n{begin}")
    assert "no space left on the disk while it compiled" in failed()
    tiny.replace("images/tiny.def", "cat /dev/zero >/dev/full", "kill -9 $$")
    assert "killed for lack of memory, alone as it was" in failed()
    tiny.replace("images/tiny.def", "kill -9 $$", '[ "$MAX_JOBS" = 1 ] || kill -9 $$')
    stderr = cli.run(
        "--store",
        store,
        "image",
        tiny.path,
        "--engine",
        "apptainer",
        "--format",
        "sif",
        "--no-verify",
        cwd=store.parent,
        env=tiny.settings,
    ).stderr
    if "1 parallel compiler jobs" not in stderr.split("stage tiny.build: ")[1]:
        assert "a compiler was killed for lack of memory; on with half the jobs" in stderr
    assert wheels(store)[0]["notes"]["jobs"] == 1


def test_full_disk_while_compiling(cli: Cli, tiny: Tiny, store_with: Callable[..., Path]) -> None:
    """A real one: the first extension fits, the second does not; with a larger limit only the second is compiled."""
    (tiny.mirror / "large.c").write_text("char data[8 << 20] = {1};\n" + SOURCE.replace("tiny", "large"))
    (tiny.mirror / "setup.py").write_text(
        SETUP.replace("])\n", ', Extension("large", ["large.c"], define_macros=[("ANSWER", "1")])])\n')
    )
    git(tiny.mirror, "add", ".")
    git(tiny.mirror, "commit", "--quiet", "-m", "a large one")
    tiny.stack()
    store = store_with(ME, "base", "python", "tools")
    work = store.parent / "cache-root/work"
    work.mkdir(parents=True)
    argv = ("--store", store, "image", tiny.path, "--engine", "apptainer", "--format", "sif", "--no-verify")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "none", work], check=True)
    try:
        stderr = cli.run(*argv, cwd=store.parent, env=tiny.settings, code=5).stderr
        assert "no space left on the disk while it compiled" in stderr
        assert f"build.py --store {store} prune" in stderr
        assert nothing_kept(store)
        subprocess.run(["mount", "-o", "remount,size=64m", work], check=True)
        for log in (store / "logs").iterdir():
            log.unlink()
        cli.run(*argv, cwd=store.parent, env=tiny.settings)
    finally:
        subprocess.run(["umount", work], check=True)
    (log,) = (store / "logs").glob("*tiny.build*")
    assert "building 'large' extension" in log.read_text()
    assert "building 'tiny' extension" not in log.read_text()
    assert wheels(store)[0]["origin"] == "compiled"


def test_a_bundle_has_the_sources_and_with_the_compiler_compiles_offline(
    cli: Cli, tiny: Tiny, workspace: Workspace, store_with: Callable[..., Path]
) -> None:
    """A git source, and a source distribution: setuptools' own, which builds itself and so needs nothing else."""
    tiny.replace(
        "images/tiny.def",
        "    files/device.so /opt/device.so\n",
        "    files/device.so /opt/device.so\n    files/more-source.lock /opt/more-source.lock\n",
    )
    tiny.replace(
        "images/tiny.def",
        '    echo "for',
        '    python /opt/ekiben/source.py /opt/more-source.lock "$EKIBEN_WORK/more"\n'
        '    test -e "$EKIBEN_WORK/more/setup.py"\n    echo "for',
    )
    tiny.write("files/more-source.lock", locked_block(workspace.checkout, "setuptools"))
    folder, store, sif = tiny.path.parent, store_with(ME, "base", "python", "tools"), ("--format", "sif", "--no-verify")
    online = cli.image(store, tiny.path, "--engine", "apptainer", *sif, cwd=folder, env=tiny.settings)
    argv = ("bundle", tiny.path, "-o", folder / "own.bundle", "--compiler", "--engine", "apptainer", "--json")
    about = json.loads(cli.run("--store", store, *argv, cwd=folder, env=tiny.settings).stdout)
    assert about["compiled"] == 2
    with tarfile.open(folder / "own.bundle") as tar:
        names = {name.removeprefix("sources/") for name in tar.getnames() if name.startswith("sources/")}
    assert "setuptools-81.0.0.tar.gz" in names
    assert [name for name in names if name.endswith(f".git/refs/heads/of-{tiny.commit}")]

    # From here on there is no network, and no mirror.
    tiny.stack()
    commit = tiny.commit
    shutil.rmtree(tiny.mirror)
    alone = ("unshare", "--net")
    offline = ("--engine", "apptainer", "--bundle", folder / "own.bundle", *sif)
    other = store_with(ME, "base", "python")
    made = cli.image(other, tiny.path, *offline, cwd=folder, prefix=alone)
    assert made["built"] == ["tiny", "own"]
    assert made["layers"] == online["layers"]
    assert wheels(other)[0] == wheels(store)[0]

    tiny.write("files/device.so", extension("sm_80"))
    stack = json.loads((tiny.path / "images/stacks/small/stack.yaml").read_text())
    assert stack["arguments"]["tiny_commit"] == commit
    tiny.write("images/stacks/small/stack.yaml", json.dumps({**stack, "compute_capabilities": ["8.0"]}))
    made = cli.image(other, tiny.path, *offline, cwd=folder, prefix=alone)
    assert {"tiny", "own"} <= set(made["built"])
    (wheel,) = (item for item in wheels(other) if item["inputs"]["capabilities"] == ["8.0"])
    assert wheel["origin"] == "compiled"
    assert wheel["notes"]["extensions"]["tiny_device.so"] == ["sm_80"]


PUSHED = """\
Bootstrap: docker
From: {image}

%environment
    export PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""


@dataclass(frozen=True)
class Pushed:
    """The recipe on images in a registry, its first layers; built in ``store``, as ``sif``."""

    tiny: Tiny
    store: Path
    sif: Path


@pytest.fixture(scope="module")
def pushed(built: Built, cli: Cli, workspace: Workspace) -> Iterator[Pushed]:
    """Its source lies beside it, so that plain tools can build what is rendered of it, too."""
    host, port = REGISTRY.split(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        pytest.skip(f"no registry answers at {REGISTRY} (tests/services.sh start)")
    folder = Path(tempfile.mkdtemp(prefix="pushed-", dir=workspace.path))
    folder.chmod(0o755)
    tiny = make_tiny(workspace, folder)
    about = json.loads((tiny.path / "recipe.yaml").read_text())
    for name, layer in (("ground", "python"), ("bench", "tools")):
        tiny.write("recipe.yaml", json.dumps({**about, "layer": layer}))
        argv = ("push", tiny.path, f"{REGISTRY}/ekiben-test/{name}:1", "--json")
        tiny.write(
            f"images/{name}.def", PUSHED.format(image=json.loads(cli.run("--store", built.store, *argv).stdout)["ref"])
        )
    tiny.write("recipe.yaml", json.dumps(about))
    tiny.replace("images/bench.def", "bin\n", "bin\n    export TOOLS=here\n")
    for old, new in (
        ("From: tools.sif", "From: bench.sif"),
        ("From: python.sif", "From: ground.sif"),
        ("    tiny_repository=\n    tiny_commit=\n", ""),
        (
            "    files/device.so /opt/device.so\n",
            (
                "    files/device.so /opt/device.so\n    files/tiny.c /opt/tiny/tiny.c\n    files/setup.py"
                " /opt/tiny/setup.py\n"
            ),
        ),
        (
            'python /opt/ekiben/source.py "{{ tiny_repository }}" "{{ tiny_commit }}" "$source"',
            'mkdir -p "${source%/*}"; cp -r /opt/tiny "$source"',
        ),
    ):
        tiny.replace("images/tiny.def", old, new)
    for name in ("tiny.c", "setup.py"):
        shutil.copy(tiny.mirror / name, tiny.path / "files" / name)
    tiny.stack(arguments={"stack": "x", "python": "3.11"})
    store, sif = folder / "store", folder / "own.sif"
    cli.image(store, tiny.path, "--engine", "apptainer", "--format", "sif", "--no-verify", "-o", sif)
    yield Pushed(tiny, store, sif)
    shutil.rmtree(folder, ignore_errors=True)


def test_complete_rebuild_of_an_extension_is_reproducible(pushed: Pushed, cli: Cli) -> None:
    """From an empty store: compiled again, its layer, the image's config, the SIF."""
    argv = ("verify", pushed.tiny.path, "--rebuild", "--engine", "apptainer", "--json")
    done = cli.run("--store", pushed.store, *argv)
    assert "stage tiny.build (compiles tiny)" in done.stderr
    about = json.loads(done.stdout)
    assert about["same"] is True
    assert {layer["name"]: layer["diff_id"][0] == layer["diff_id"][1] for layer in about["layers"]} == {
        "ground": True,
        "ground-environment": True,
        "tiny": True,
        "own": True,
    }
    assert about["sif"][0] == about["sif"][1]


RENDERED = (
    r"find /opt/venv/lib -path '*tiny*' -type f -exec sha256sum {} + | sort; ls -d /opt/work /opt/wheels; command -v"
    r" gcc; "
    "python -c 'import tiny; print(tiny.answer())'"
)


def test_docker_and_apptainer_build_the_rendered_files(pushed: Pushed, cli: Cli, workspace: Workspace) -> None:
    """A build stage in a Dockerfile and in a definition file, built without Ekiben: the same files in the image."""
    if not Path("/usr/bin/docker").exists():
        pytest.skip("docker is not installed (tests/services.sh install docker)")
    tiny, folder = pushed.tiny, workspace.folder("rendered")
    inside = ("/bin/sh", "-c", RENDERED)

    def output_lines(*command: str | Path) -> list[str]:
        done = subprocess.run([*command, *inside], capture_output=True, text=True, check=False)
        return done.stdout.splitlines()

    ours = output_lines("apptainer", "--silent", "exec", "--cleanenv", "--contain", pushed.sif)
    assert len(ours) >= 5
    assert ours[-1] == "42"
    assert not [line for line in ours if line.startswith("/")], "no source, no wheel and no compiler ships"

    cli.run("render", tiny.path, "--to", "dockerfile", "-o", folder / "docker")
    name = "ekiben-test/stages"
    options = ("--quiet", "--no-cache", "--network", "none")
    build = ["/usr/bin/docker", "build", *options, "-t", name, str(folder / "docker")]
    done = subprocess.run(
        build, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    try:
        assert output_lines("/usr/bin/docker", "run", "--rm", name) == ours
    finally:
        subprocess.run(["/usr/bin/docker", "rmi", "--force", name], check=False, capture_output=True)

    file = Path(cli.run("render", tiny.path, "--to", "def", "-o", folder / "def").stdout.strip())
    give(folder / "def", USER)
    command = f"cd {folder}/def && apptainer build --fakeroot --no-https --sandbox x {file.name}"
    done = subprocess.run(["su", USER, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert output_lines("apptainer", "--silent", "exec", "--cleanenv", "--contain", folder / "def/x") == ours
