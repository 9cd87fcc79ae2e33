"""Take out of a site-packages folder what a training run never reads, and say what it was: shrink.py SITE-PACKAGES

Kept on purpose: torch/include and nvidia/*/include (extensions and torch.compile are built against them), CUPTI
(torch.profiler), every ptxas, every GPU architecture. RECORD is kept true: removed files leave it, stripped ones get
their new hash and size. A second run finds nothing to do.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20

UNUSED = {
    "**/tests": "the package's own tests",
    "nvidia/*/lib/libcusolverMg.so.*": "cuSOLVER over several GPUs in one process; torch links libcusolver",
    "nvidia/*/lib/libcufftw.so.*": "cuFFT behind FFTW's interface",
    "nvidia/*/lib/libnvblas.so.*": "cuBLAS behind BLAS's interface",
    "nvidia/*/lib/libnvrtc.alt.so.*": "a second build of NVRTC",
    "nvidia/*/lib/libnvrtc-builtins.alt.so.*": "a second build of NVRTC",
    "nvidia/*/lib/libnvperf_*.so": "hardware counters; torch.profiler traces with CUPTI alone",
    "nvidia/nvshmem/lib/libnvshmem_device.*": "for linking device code against NVSHMEM",
    "pyarrow/include": "headers of Arrow",
    "torch/bin/protoc*": "a compiler of protocol buffers",
    "triton/backends/nvidia/lib/cupti/*.a": "for linking against CUPTI",
    "triton/backends/nvidia/lib/cupti/libnvperf_*.so": "hardware counters; Proton traces with CUPTI alone",
    "triton/instrumentation": "examples of compiler passes",
}

# Symbols for debuggers: small in most wheels, hundreds of megabytes in torch and triton. NVIDIA's libraries come
# stripped, and those in *.libs were rewritten by auditwheel, which strip is known to break.
STRIP_FROM = 16 * MIB
NOT_STRIPPED = re.compile(r"nvidia/|[^/]+\.libs/")


def find_unused(site: Path) -> dict[Path, str]:
    """Files and folders to remove → why; nothing inside a folder that goes as a whole."""
    found = {path: why for pattern, why in UNUSED.items() for path in sorted(site.glob(pattern))}
    found |= dict.fromkeys(_other_bitsandbytes(site), "bitsandbytes for another CUDA, ROCm or XPU")
    return {path: why for path, why in found.items() if not found.keys() & set(path.parents)}


def _other_bitsandbytes(site: Path) -> Iterator[Path]:
    """Every build but the one for torch's CUDA and the CPU's."""
    version = site / "torch" / "version.py"
    match = re.search(r"^cuda\b.*'(\d+)\.(\d+)'", version.read_text(), re.MULTILINE) if version.exists() else None
    if match is None:
        return
    kept = {"libbitsandbytes_cpu.so", f"libbitsandbytes_cuda{match[1]}{match[2]}.so"}
    yield from (path for path in sorted(site.glob("bitsandbytes/libbitsandbytes_*.so")) if path.name not in kept)


def size_of(path: Path) -> int:
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(size_of(child) for child in path.iterdir())


def remove(site: Path) -> int:
    """Bytes freed. One line a path, or a package that holds several for one reason."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for path, why in find_unused(site).items():
        groups.setdefault((path.relative_to(site).parts[0], why), []).append(path)
    sizes = [sum(size_of(path) for path in paths) for paths in groups.values()]
    for (package, why), paths, size in zip(groups, groups.values(), sizes, strict=True):
        for path in paths:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        report(size, paths[0].relative_to(site) if len(paths) == 1 else f"{package} ({len(paths)} paths)", why)
    return sum(sizes)


def find_strippable(site: Path) -> list[Path]:
    files = (path for path in sorted(site.rglob("*.so*")) if path.is_file() and not path.is_symlink())
    large = (path for path in files if path.stat().st_size >= STRIP_FROM)
    libraries = [path for path in large if not NOT_STRIPPED.match(path.relative_to(site).as_posix())]
    if libraries and not all(map(shutil.which, ("readelf", "strip"))):  # only a layer with a compiler brings them
        report(0, f"{len(libraries)} large libraries", "not stripped of symbols for debuggers: no binutils here")
        return []
    return [path for path in libraries if has_symbols(path)]


def has_symbols(path: Path) -> bool:
    return b" .symtab " in binutils("readelf", "--section-headers", "--wide", path)


def binutils(tool: str, *arguments: str | Path) -> bytes:
    return subprocess.run([tool, *arguments], check=True, stdout=subprocess.PIPE).stdout


def strip(path: Path) -> int:
    """Bytes freed. A new file takes the old one's place: other names of the old one, as in uv's cache, stay whole."""
    before, stripped = path.stat(), path.with_name(path.name + ".stripped")
    binutils("strip", "--strip-unneeded", "-o", stripped, path)
    stripped.chmod(before.st_mode)
    stripped.replace(path)
    return before.st_size - path.stat().st_size


def strip_all(site: Path) -> tuple[list[Path], int]:
    """What was stripped, and the bytes freed."""
    files = find_strippable(site)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sizes = list(pool.map(strip, files))
    for path, size in zip(files, sizes, strict=True):
        report(size, path.relative_to(site), "symbols for debuggers")
    return files, sum(sizes)


def update_records(site: Path, changed: set[Path]) -> None:
    for record in sorted(site.glob("*.dist-info/RECORD")):
        rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
        kept = [_row(site, row, changed) for row in rows if (site / row[0]).exists()]
        if kept != rows:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(kept)
            replace(record, text.getvalue())


def _row(site: Path, row: list[str], changed: set[Path]) -> list[str]:
    path = site / row[0]
    if path not in changed:
        return row
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return [row[0], "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), str(path.stat().st_size)]


def replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def report(size: int, path: Path | str, why: str) -> None:
    print(f"{size / MIB:8.1f} MiB  {path}: {why}", flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (site := Path(arguments[0])).is_dir():
        print("usage: shrink.py SITE-PACKAGES   (a folder of installed Python packages)", file=sys.stderr)
        return 2
    freed = remove(site)
    stripped, symbols = strip_all(site)
    update_records(site, set(stripped))
    report(freed + symbols, site, "in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
