"""The structure of the code, proven from its own imports (tests/support/architecture.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import (
    ROOT,
    builder_modules,
    calls_by_path,
    circles,
    edges,
    floors,
    imports_of,
    long_files,
    long_functions,
    package_graph,
    passed_faces,
    reading_calls,
    task_modules,
    wide_functions,
)

MODULES = {"builder": builder_modules(), "tasks": task_modules()}
MOST_FLOORS = {"builder": 7, "tasks": 7}
HEAVY = ("deflate", "zstandard", "requests", "docker", "cyclonedx", "jinja2")


@pytest.mark.parametrize("part", MODULES)
def test_no_circles(part: str) -> None:
    graph = edges(MODULES[part])
    assert len(graph) > 20
    assert circles(graph) == []
    assert circles(package_graph(graph)) == []


@pytest.mark.parametrize("part", MODULES)
def test_few_floors(part: str) -> None:
    assert max(floors(package_graph(edges(MODULES[part]))).values()) <= MOST_FLOORS[part]


@pytest.mark.parametrize("part", MODULES)
def test_packages_are_imported_by_their_faces(part: str) -> None:
    assert passed_faces(MODULES[part]) == []


@pytest.mark.parametrize("part", MODULES)
def test_files_and_functions_are_short(part: str) -> None:
    paths = [*MODULES[part].values()]
    assert long_files(paths, 600) == []
    assert long_functions(paths, 80) == []


# Functions that may have more parameters than six, and why.
WIDE = {
    "entrypoints/ekiben_tasks/models/fused_rope.py _kernel": "a Triton kernel",
    "entrypoints/ekiben_tasks/models/fused_rope.py _rotate": "a Triton kernel",
    "entrypoints/ekiben_tasks/training/batches.py __init__": "until the data of a run is one value",
}


def test_functions_have_few_parameters() -> None:
    paths = [*MODULES["builder"].values(), *MODULES["tasks"].values(), *(ROOT / "recipes").rglob("*.py")]
    assert wide_functions(paths, 6) - WIDE.keys() == set()


def test_entrypoints_never_import_the_builder() -> None:
    paths = [*(ROOT / "entrypoints").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        assert [item for item in imports_of(path.stem, path) if item.target.split(".")[0] == "ekiben"] == [], path


IMPORT_EACH = f"""
import importlib, os, sys
for face in sys.argv[1:]:
    if os.fork() == 0:  # each in a process of its own, which has imported no other
        importlib.import_module(face)
        print(*(f"{{face}}: {{name}}" for name in {HEAVY!r} if name in sys.modules), sep="\\n", end="", flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{{face}} cannot be imported")
"""


def test_faces_are_cheap_to_import() -> None:
    faces = [name for name, path in builder_modules().items() if path.name == "__init__.py"]
    assert len(faces) > 10
    argv = [sys.executable, "-c", IMPORT_EACH, *faces]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_circle_private_import_and_long_function_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.architecture.ROOT", tmp_path)
    texts = {
        "top/__init__.py": "",
        "top/one/__init__.py": "__all__ = ['a']\n",
        "top/two/__init__.py": "__all__ = []\n",
        "top/one/a.py": "def f(a, b, c, *, d):\n    from top.two import b\n" + "    x = 1\n" * 60,
        "top/two/b.py": "import top.one.a\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    from support.architecture import modules_below

    modules = modules_below(tmp_path / "top", "top")
    assert circles(edges(modules)) == [["top.one.a", "top.two.b"]]
    assert passed_faces(modules) == ["top/one/a.py:2: b is not in top.two's __all__"]
    assert long_functions(modules.values(), 60) == ["top/one/a.py:1 f: 62 lines"]
    assert wide_functions(modules.values(), 3) == {"top/one/a.py f"}
    assert wide_functions(modules.values(), 4) == set()


# What works in a folder that other users may write, and the calls by path that are left there: FILE FUNCTION CALL → why
# it is safe.
SHARED_FOLDER = ("ekiben/images/", "ekiben/publish/", "ekiben/store/", "ekiben/core/owner.py")
BY_PATH = {
    "core/owner.py is_abandoned Path('/proc', pid).exists": "a process",
    "images/find.py _at_path (path / 'recipe.yaml').is_file": "the path that you name",
    "images/find.py _at_path path.exists": "the path that you name",
    "images/find.py _at_path path.is_dir": "the path that you name",
    "images/find.py _at_path path.is_file": "the path that you name",
    "images/find.py find_image (Path(reference) / 'recipe.yaml').is_file": "a folder here that you name",
    "images/find.py find_image Path(reference).is_file": "a file here that you name",
    "images/find.py _in_registry pulled.sif.is_file": "your own folder of pulled images",
    "images/find.py registry_reference os.path.lexists": "the path that you name",
    "publish/catalog/pages.py render (HERE / name).read_text": "the program's own templates",
    "publish/catalog/runs.py import_runs folder.exists": "your folders of results",
    "publish/catalog/runs.py _find folder.is_dir": "your folders of results",
    "publish/catalog/runs.py _find os.walk": "your folders of results",
    "publish/catalog/curves.py read_metrics read_regular": "your results",
    "publish/catalog/runs.py _read read_regular": "your results",
    "publish/catalog/write.py _inner os.path.realpath": (
        "whether -o lies in the shared folder, which is then walked without links"
    ),
    "publish/file.py _copy source.stat": "the file that you publish",
    "store/_staging.py prepare self.root.is_dir": "your own store, before it is opened",
    "store/_staging.py prepare make_folders": "your own store, before it is opened",
    "store/_staging.py prepare self.root.mkdir": "your own store, before it is opened",
    "store/_staging.py translated_errors self.root.exists": "your own store, for a message",
    "store/gc.py _drop_unfinished (store.cache / 'work').glob": "your own cache",
    "store/gc.py _drop_unfinished folder.stat": "your own cache",
    "store/gc.py _drop_unfinished remove_tree": "your own cache",
    "store/shared.py prepare shared_dir.is_dir": "the folder that you name, before it is opened",
    "store/shared.py prepare shared_dir.is_symlink": "the folder that you name, for a message",
    "store/shared.py prepare os.path.lexists": "the folder that you name, for a message",
    "store/shared.py open_shared shared_dir.exists": "the folder that you name, for a message",
    "store/shared.py open_shared shared_dir.is_dir": "the folder that you name, for a message",
    "store/shared.py _exists version.outermost.path.is_dir": "the folder that you name, for a message",
    "store/sif_check.py _is_file Path(name).is_file": "which notes are kept in your own store",
    "store/gc.py _drop_compiled entry.stat": "of caches beside your own store",
    "store/gc.py _drop_compiled entry.unlink": "of caches beside your own store",
    "store/gc.py _drop_compiled store.wheels.glob": "of caches beside your own store",
}


def test_nothing_in_a_shared_folder_is_named_by_its_path() -> None:
    """Only core/folder.py names entries of such a folder to the kernel, each relative to a descriptor."""
    calls = set()
    for path in MODULES["builder"].values():
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(SHARED_FOLDER):
            calls |= {f"{file.removeprefix('ekiben/')} {call}" for call in calls_by_path(path)}
    assert calls == BY_PATH.keys()


def test_each_call_of_the_kernel_in_an_open_folder_is_relative_to_it() -> None:
    assert calls_by_path(ROOT / "ekiben/core/folder.py") == {
        "open os.open",
        "names os.listdir",
        "open_file open",
        "create open",
        "_mount_of open",
    }
    assert calls_by_path(ROOT / "ekiben/core/inner_path.py") == {"folder Folder.open"}


# Files that are read by other means than the one reader, which refuses what is not a regular file, or too large, and
# never waits (core/checked.read_regular, core/files.open_regular, Folder.open_file): FILE FUNCTION CALL → why.
READ_OTHERWISE = {
    "api.py logs path.read_text": "of an instance that this process started, in the user's home",
    "artifacts/partial.py _open open": "a new file in a private folder, by its descriptor",
    "artifacts/partial.py _open os.open": "a new file in a private folder, by its descriptor",
    "builder/_concurrency.py _available (proc / 'meminfo').read_text": "the kernel's",
    "builder/_concurrency.py _cgroup_cores (folder / 'cpu.max').read_text": "the kernel's",
    "builder/_concurrency.py _cgroup_memory stat.read_text": "the kernel's",
    "builder/_concurrency.py _cgroups_of_process (proc / 'self/cgroup').read_text": "the kernel's",
    "builder/_concurrency.py _number path.read_text": "the kernel's",
    "builder/_concurrency.py oom_kills events.read_text": "the kernel's",
    "builder/surroundings.py _kernel_text Path(path).read_text": "the kernel's",
    "builder/_stage.py import_result (staging / 'blob').open": "written by this process",
    "builder/bases/debootstrap.py _bootstrapped source_file.open": "written by this process",
    "builder/bases/_image.py image_entries (staging / f'{number}.squashfs').open": "written by this process",
    "builder/layer.py _drift blob.open": "written by this process",
    "builder/layer.py _files_tar file.open": "File.open is open_regular",
    "builder/layer.py _make blob.open": "written by this process",
    "builder/wheel_layer.py _check_layers (_IMAGES / 'scripts' / name).read_bytes": "the program's own",
    "builder/wheel_layer.py _content file.open": "File.open is open_regular",
    "builder/wheel_layer.py _job _PROGRAM.read_bytes": "the program's own",
    "bundle/_fetch.py index_debs (folder / 'Records').read_text": (
        "written by apt in a container that this process started"
    ),
    "builder/failed_line.py _connect os.open": "a pipe that this process made",
    "bundle/read.py import_compiled shutil.copyfile": "unpacked by this process",
    "bundle/read.py unpack_snapshots shutil.copyfile": "unpacked by this process",
    "bundle/read.py unpack_snapshots shutil.copytree": "unpacked by this process",
    "cli/group.py _open_missing_streams open": "/dev/null, for a closed stream",
    "cli/group.py _open_missing_streams os.open": "/dev/null, for a closed stream",
    "cli/group.py _short_help path.open": "the program's own",
    "core/atomic.py _remove_abandoned os.open": "a folder, to lock, and not to read",
    "core/atomic.py new_folder os.open": "a folder, to lock, and not to read",
    "core/checked.py read_regular open": "the one reader",
    "core/checked.py read_regular os.open": "the one reader",
    "core/emulation.py _read_entry entry.read_text": "the kernel's",
    "core/files.py open_existing open": "by its descriptor",
    "core/files.py open_existing os.open": "an existing file to rewrite, refused where it is no regular file",
    "core/files.py _open_locked os.open": "a new file",
    "core/files.py _open_unblocked os.open": "the one reader, of large files",
    "core/files.py _open_unfollowed os.open": "to lock, and not to read",
    "core/files.py abandoned_files open": "to lock, and not to read",
    "core/files.py open_regular open": "the one reader, of large files",
    "core/files.py remove_tree Path('/proc/self/mountinfo').read_text": "the kernel's",
    "core/folder.py _mount_of open": "the kernel's",
    "core/folder.py change os.open": "to change its mode, and not to read",
    "core/folder.py folder os.open": "a folder",
    "core/folder.py open os.open": "a folder",
    "core/folder.py open_file open": "the one reader, below an open folder",
    "core/folder.py open_file os.open": "the one reader, below an open folder",
    "core/process.py _orphans (process / 'environ').read_bytes": "the kernel's",
    "core/process.py _orphans (process / 'mountinfo').read_bytes": "the kernel's",
    "core/process.py _orphans Path('/proc/self/mountinfo').read_bytes": "the kernel's",
    "core/process_name.py _read Path(path).read_bytes": "the kernel's, and the machine's id",
    "doctor/machine.py _kernel_reads_zstd path.read_bytes": "the kernel's, and /boot",
    "doctor/machine.py _mount_of Path('/proc/self/mountinfo').read_text": "the kernel's",
    "doctor/machine.py _subordinate Path(table).read_text": "/etc/subuid and /etc/subgid",
    "doctor/machine.py read_flag Path(path).read_text": "the kernel's",
    "executors/_user_namespace.py subordinate_ids table.read_text": "/etc/subuid and /etc/subgid",
    "executors/apptainer.py _no_user_namespaces path.read_text": "the kernel's",
    "executors/podman.py _may_raise Path('/proc/self/status').read_text": "the kernel's",
    "formats/changeset.py _file_chunks file.open": "File.open is open_regular",
    "formats/layer.py sha256 self.open": "File.open is open_regular",
    "formats/layer.py text self.open": "File.open is open_regular",
    "formats/sif_rewrite.py _file_system Path('/proc/self/mountinfo').read_text": "the kernel's",
    "formats/sif_rewrite.py _file_system Path(f'/proc/self/fdinfo/{file.fileno()}').read_text": "the kernel's",
    "formats/sif_rewrite.py _sync_folder os.open": "a folder, to write it to the disk",
    "formats/upper.py folder_reader open": (
        "a file that was regular when the folder was listed, after its container has ended"
    ),
    "formats/upper.py read open": "a file that was regular when the folder was listed, after its container has ended",
    "gpu/devices.py _driver_of_kernel Path('/proc/driver/nvidia/version').read_text": "the kernel's",
    "packages/apt.py mount_debs shutil.copyfile": "unpacked by this process",
    "packages/host_config.py write_host_files shutil.copyfile": (
        "the user's own settings and certificates, which were looked at before"
    ),
    "packages/outdated.py _read_records archive.open": "an entry of an archive, read up to a limit",
    "packages/host_config.py mount_wheels wheel.open": "File.open is open_regular",
    "packages/sources.py _read_project archive.open": "an entry of an archive, read up to a limit",
    "packages/sources.py choose_archive out.read_text": "written by uv, which this process started",
    "project/sources.py read_built archive.open": "an entry of an archive, read up to a limit",
    "packages/edit_requirements.py edit_project project.read_text": "written by uv, which this process started",
    "packages/requirements.py compile_lock out.read_text": "written by uv, which this process started",
    "project/create.py create_recipe source.read_text": "the program's own templates",
    "project/create.py layer_text (TEMPLATE / 'images/layer.def').read_text": "the program's own templates",
    "publish/catalog/pages.py render (HERE / name).read_text": "the program's own templates",
    "resolve/render.py _write_files file.open": "File.open is open_regular",
    "run/contract.py shell_functions _SHELL_FUNCTIONS.read_text": "the program's own",
    "run/jobs/script.py job_program Path(__file__).with_name(JOB_PROGRAM).read_text": "the program's own",
    "run/jobs/runs.py _write_files path.read_text": "the program's own",
    "signing/gpg.py check out.read_bytes": "written by gpg, which this process started",
    "signing/gpg.py sign out.read_bytes": "written by gpg, which this process started",
}


def test_files_are_read_by_the_one_reader() -> None:
    """Another way to read a file has a reason in the table, and the table has no other entries."""
    calls = {
        f"{path.relative_to(ROOT / 'ekiben').as_posix()} {call}"
        for path in MODULES["builder"].values()
        for call in reading_calls(path)
    }
    assert calls == READ_OTHERWISE.keys()


def test_each_way_to_read_a_file_is_counted(tmp_path: Path) -> None:
    bodies = (
        "a.read_text()",
        "a.read_bytes()",
        "a.open()",
        "a.open('rb')",
        "a.open(mode='r')",
        "open(a)",
        "open(a, mode)",
        "shutil.copyfile(a, b)",
        "os.open(a, os.O_RDONLY)",
        "io.open(a)",
    )
    writers = (
        "a.open('wb')",
        "open(a, 'x')",
        "open_regular(a)",
        "os.open(a, os.O_CREAT)",
        "tarfile.open(fileobj=a)",
        "a.write_text('')",
    )
    for at, body in enumerate((*bodies, *writers)):
        (tmp_path / "m.py").write_text(f"def f():\n    {body}\n")
        assert bool(reading_calls(tmp_path / "m.py")) == (at < len(bodies)), body
