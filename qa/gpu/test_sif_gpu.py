"""A SIF written by us sees the GPU under `apptainer exec --nv` and trains there.

Run on a machine with an NVIDIA GPU, Apptainer and a Python that has torch, transformers and peft: `make test-gpu`.
EKIBEN_SIF names a built lora-opencalm.sif to use; without it (a machine without a network, say) the image is made of
the machine's own system and Python environment, in layers as a recipe's image has them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.formats.layer import Entry, LayerEntry, read_chunks, sort_key, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.runtime_files import Scripts, runtime_files
from ekiben.formats.sif import sif_header, write_sif
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter

pytestmark = pytest.mark.gpu
HOUSE = Path(__file__).resolve().parents[2]
RECIPE = HOUSE / "recipes" / "lora-opencalm"
INSIDE = "/opt/ekiben/recipe"
SYSTEM = ("bin", "lib", "lib64", "sbin", "etc", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/include")
EMPTY = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "root", "home", "mnt", "opt")
EPOCH = 1_700_000_000
PYTHON = "python" if "EKIBEN_SIF" in os.environ else sys.executable  # the image's


def members_below(top: Path, *, under: tuple[str, ...], empty: tuple[str, ...] = ()) -> Iterator[LayerEntry]:
    """Files and folders of this machine as a layer: ``under`` whole, ``empty`` as folders."""
    paths: set[str] = {""} | {parent for path in (*under, *empty) for parent in _parents(path)}
    for name in under:
        source = top / name
        paths.add(name)
        if source.is_dir() and not source.is_symlink():
            for folder, folders, files in os.walk(source):
                folders[:] = [item for item in folders if item != "__pycache__"]
                # The linker's cache names this machine's driver, which --nv puts elsewhere.
                paths |= {
                    os.path.relpath(Path(folder, item), top) for item in (*folders, *files) if item != "ld.so.cache"
                }
    for path in sorted(paths | set(empty), key=sort_key):
        yield from _member(top / path, path)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _member(source: Path, path: str) -> Iterator[LayerEntry]:
    try:
        info = source.lstat()
    except FileNotFoundError:
        yield Entry(path, "dir", 0o755, mtime=EPOCH), None
        return
    if stat.S_ISLNK(info.st_mode):
        yield Entry(path, "symlink", 0o777, mtime=EPOCH, target=str(source.readlink())), None
    elif stat.S_ISDIR(info.st_mode):
        yield Entry(path, "dir", 0o755, mtime=EPOCH), None
    elif stat.S_ISREG(info.st_mode) and os.access(source, os.R_OK):
        with source.open("rb") as stream:
            yield (
                Entry(path, "file", info.st_mode & 0o777, mtime=EPOCH, size=info.st_size),
                read_chunks(stream.read, info.st_size),
            )


def _small(files: dict[str, tuple[int, bytes]]) -> Iterator[LayerEntry]:
    folders = {parent for path in files for parent in _parents(path)} | {""}
    for path in sorted(folders | files.keys(), key=sort_key):
        if path in files:
            mode, data = files[path]
            yield Entry(path, "file", mode, mtime=EPOCH, size=len(data)), iter([data]) if data else None
        else:
            yield Entry(path, "dir", 0o755, mtime=EPOCH), None


def _recipe_layer() -> dict[str, tuple[int, bytes]]:
    """The top layer as the builder makes it, but for the interpreter's path."""
    files = {
        f"{INSIDE[1:]}/entrypoints/{path.relative_to(HOUSE / 'entrypoints')}": (0o644, path.read_bytes())
        for path in (HOUSE / "entrypoints").rglob("*.py")
    }
    for path in RECIPE.rglob("*"):
        if path.is_file():
            files[f"{INSIDE[1:]}/{path.relative_to(RECIPE)}"] = (0o644, path.read_bytes())
    for task in ("train", "chat", "merge"):
        command = f'exec {sys.executable} {INSIDE}/entrypoints/{task}.py --config {INSIDE}/configs/{task}.yaml "$@"\n'
        files[f"usr/local/bin/{task}"] = (0o755, f"#!/bin/sh\n{command}".encode())
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONNOUSERSITE": "1",
        "EKIBEN_RECIPE": INSIDE,
    }
    return files | runtime_files(
        environment,
        {"recipe": "lora-opencalm"},
        "Bootstrap: scratch\n",
        Scripts(run='exec "$@"\n', test="train --smoke\n"),
    )


@pytest.fixture(scope="session")
def sif(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if variable := os.environ.get("EKIBEN_SIF"):
        return Path(variable)
    folder = tmp_path_factory.mktemp("sif")
    environment = Path(sys.prefix).parent if Path(sys.prefix).name == ".venv" else Path(sys.prefix)
    layers = [
        members_below(Path("/"), under=SYSTEM, empty=EMPTY),
        members_below(Path("/"), under=(str(environment)[1:],)),
        _small(_recipe_layer()),
    ]
    partitions = []
    for number, members in enumerate(layers):
        began, digest, path = time.monotonic(), DigestWriter(), folder / f"{number}.squashfs"
        with path.open("w+b") as out:
            write_entries(members, digest, SquashfsWriter(out, epoch=EPOCH))
        sha = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
        partitions.append(Partition(path, 0, path.stat().st_size, f"sha256:{sha}"))
        print(
            f"layer {number}: {path.stat().st_size / 1e6:.0f} MB of {digest.size / 1e6:.0f} MB,"
            f" {time.monotonic() - began:.1f} s"
        )
    out_file, began = folder / "gpu.sif", time.monotonic()
    header = sif_header([item.digest for item in partitions], "Bootstrap: scratch\n", "amd64", EPOCH)
    write_sif(out_file, partitions, header)
    print(f"SIF: {out_file.stat().st_size / 1e6:.0f} MB, {time.monotonic() - began:.1f} s")
    return out_file


def run_in(
    sif: Path, *args: str, nv: bool = True, folder: Path | None = None, binds: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    runtime = shutil.which("apptainer") or shutil.which("singularity")
    assert runtime, "needs apptainer or singularity"
    mounts = ["--bind", f"{folder}:{folder}", "--pwd", str(folder)] if folder else []
    mounts += [word for path in binds for word in ("--bind", f"{path}:{path}:ro")]
    argv = [runtime, "exec", *(["--nv"] if nv else []), "--cleanenv", "--no-home", *mounts, str(sif), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=500)


def test_gpu_is_visible_with_nv_only(sif: Path) -> None:
    with_nv = run_in(sif, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    assert with_nv.returncode == 0, with_nv.stderr
    print(with_nv.stdout)
    question = [PYTHON, "-c", "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"]
    assert run_in(sif, *question).stdout.startswith("True")
    assert run_in(sif, *question, nv=False).stdout.startswith("False")


def test_smoke_training_on_the_gpu(sif: Path, tmp_path: Path) -> None:
    done = run_in(sif, "train", "--smoke", "--output", str(tmp_path / "smoke"), folder=tmp_path)
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert "smoke       all passed" in done.stdout and "NVIDIA" in done.stdout.rpartition("all passed")[2]


@pytest.mark.skipif(
    "EKIBEN_SIF" not in os.environ, reason="needs a recipe's image with its compiler: EKIBEN_SIF=lora-opencalm.sif"
)
def test_triton_compiles_inside(sif: Path, tmp_path: Path) -> None:
    program = (
        "import os, torch\n"
        "os.environ['TRITON_CACHE_DIR'] = os.environ['TORCHINDUCTOR_CACHE_DIR'] = os.getcwd()\n"
        "f = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2 + 1)\n"
        "x = torch.randn(4096, device='cuda')\n"
        "assert torch.allclose(f(x), torch.nn.functional.gelu(x) * 2 + 1, atol=1e-5)\n"
        "print('compiled')\n"
    )
    done = run_in(sif, PYTHON, "-c", program, folder=tmp_path)
    assert "compiled" in done.stdout, done.stderr[-2000:]


def test_training_is_as_fast_inside(sif: Path, tmp_path: Path) -> None:
    """A quarter of OpenCALM-3B learns in the image and on the host, blocks compiled in both: printed as a ratio."""
    bench = HOUSE / "qa" / "gpu" / "bench_train.py"
    command = [str(bench), "--here", "lora/ours", "--layers", "8", "--steps", "24"]
    inside = run_in(sif, PYTHON, *command, folder=tmp_path, binds=(HOUSE,))
    outside = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert inside.returncode == 0, inside.stderr[-3000:]
    speeds = [json.loads(done.stdout.rpartition("RESULT ")[2])["tokens_per_s"] for done in (inside, outside)]
    print(
        f"LoRA training: {speeds[0]:,.0f} tokens/s inside, {speeds[1]:,.0f} outside, ratio {speeds[0] / speeds[1]:.3f}"
    )
    assert speeds[0] > 0


def test_speed_inside_equals_outside(sif: Path, tmp_path: Path) -> None:
    """The same bf16 matrix products in the image and on the host: printed as a ratio, not judged by time."""
    program = (
        "import json, torch, time\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\n"
        "for _ in range(3): a @ a\n"
        "torch.cuda.synchronize(); began = time.perf_counter()\n"
        "for _ in range(20): a @ a\n"
        "torch.cuda.synchronize()\n"
        "print(json.dumps(2 * 8192**3 * 20 / (time.perf_counter() - began) / 1e12))\n"
    )
    inside = run_in(sif, PYTHON, "-c", program)
    outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    inside_rate, outside_rate = (json.loads(done.stdout.splitlines()[-1]) for done in (inside, outside))
    print(
        f"bf16 matrix product: {inside_rate:.0f} TFLOP/s inside, {outside_rate:.0f} outside, ratio"
        f" {inside_rate / outside_rate:.3f}"
    )
    assert inside_rate > 0
