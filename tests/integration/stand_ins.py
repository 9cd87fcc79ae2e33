"""Images like those that people stand on, pushed to the local registry: NVIDIA's, conda's, Python's own.

Their files are Debian's root with Python of the layers `base` and `python`, moved to where each kind has it.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.environment import platform
from ekiben.formats.layer import Entry
from ekiben.formats.squashfs.reader import SquashfsReader, merged_entries
from support.fat_elf import elf, fatbin

REGISTRY = "127.0.0.1:5000"
VENV = "opt/venv/lib/python3.11/site-packages"
TORCH = "2.9.0a0+50eac811a6.nv25.9"
_MEDIA = "application/vnd.oci.image"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class StandIn:
    """``move`` says where a file of Debian's root goes, None for one that it lacks; ``files`` are added, a link's text
    begins with "-> "."""

    move: Callable[[str], str | None]
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def distribution(site: str, name: str, version: str, metadata: str = "", module: str = "") -> dict[str, bytes | str]:
    """Return the files of an installed package: its metadata, and a module that has its name."""
    info = f"{site}/{name.replace('-', '_')}-{version}.dist-info"
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/RECORD": "",
        f"{info}/INSTALLER": "pip\n",
        f"{site}/{name.replace('-', '_')}/__init__.py": module or f'__version__ = "{version}"\n',
    }


def torch_files(site: str, version: str = TORCH, *codes: str) -> dict[str, bytes | str]:
    """Return a torch that can be imported, with a library that has device code for ``codes``."""
    module = "from torch.version import __version__, cuda\n"
    return {
        **distribution(site, "torch", version, "License: BSD-3-Clause\nRequires-Dist: filelock\n", module),
        f"{site}/torch/version.py": f"__version__ = '{version}'\ncuda: Optional[str] = '13.0'\n".replace(
            ": Optional[str]", ""
        ),
        f"{site}/torch/lib/libtorch_cuda.so": elf(fatbin(codes or ("sm_80", "sm_90"))) + bytes(9000),
    }


def ngc() -> StandIn:
    """Python in /usr/bin, packages in dist-packages, a file of constraints, a torch of NVIDIA's own."""
    site = "usr/local/lib/python3.11/dist-packages"

    def move(path: str) -> str | None:
        if path.startswith((f"{VENV}/pip/", f"{VENV}/pip-")):
            return path.replace(VENV, site)
        return None if path.startswith(("opt/", "etc/dpkg/dpkg.cfg.d/ekiben")) else path

    return StandIn(
        move,
        {
            "usr/bin/python3": "-> python3.11",
            "usr/bin/python": "-> /etc/alternatives/python",
            "etc/alternatives/python": "-> /usr/bin/python3",
            "etc/pip/constraint.txt": "# of the image\nnumpy==1.26.4\nmarkdown-it-py==2.2.0\nfaiss @ file:///faiss\n",
            **torch_files(site),
            **distribution(site, "numpy", "1.26.4"),
            **distribution(site, "filelock", "3.12.0"),
            **distribution("usr/lib/python3/dist-packages", "six", "1.16.0", "License: MIT\n"),
        },
        {"PATH": f"/usr/local/nvidia/bin:{_DEFAULT_PATH}", "PIP_CONSTRAINT": "/etc/pip/constraint.txt"},
    )


def conda() -> StandIn:
    """Python in /opt/conda, which comes first in PATH."""
    files = {
        "opt/conda/bin/python": "-> python3.11",
        "opt/conda/bin/python3": "-> python3.11",
        "opt/conda/conda-meta/python-3.11.2-h0.json": '{"name": "python", "version": "3.11.2"}\n',
        "opt/conda/conda-meta/history": "",
        "opt/conda/lib/python3.11/sitecustomize.py": _SITE,
        **torch_files("opt/conda/lib/python3.11/site-packages", "2.8.0", "sm_70"),
        **distribution("opt/conda/lib/python3.11/site-packages", "numpy", "1.26.4"),
    }
    return StandIn(_relocation("opt/conda"), files, {"PATH": f"/opt/conda/bin:{_DEFAULT_PATH}"})


def plain() -> StandIn:
    """Python in /usr/local, as the image `python` has it."""
    files: dict[str, bytes | str] = {
        "usr/local/bin/python": "-> python3.11",
        "usr/local/bin/python3": "-> python3.11",
        "usr/local/lib/python3.11/sitecustomize.py": _SITE,
    }
    return StandIn(_relocation("usr/local"), files, {"PATH": _DEFAULT_PATH, "PYTHON_VERSION": "3.11.2"})


# Debian's site, which is in the program itself, knows of dist-packages alone.
_SITE = "import os, site, sys\nsite.addsitedir(os.path.join(sys.prefix, 'lib/python3.11/site-packages'))\n"


def _relocation(prefix: str) -> Callable[[str], str | None]:
    def move(path: str) -> str | None:
        if path.startswith((f"{VENV}/pip/", f"{VENV}/pip-")):
            return path.replace("opt/venv", prefix)
        if path == "usr/bin/python3.11":
            return f"{prefix}/bin/python3.11"
        if path.startswith("usr/lib/python3.11/"):
            is_debian = "EXTERNALLY-MANAGED" in path or "/sitecustomize" in path or "/__pycache__/sys" in path
            return None if is_debian else path.replace("usr/lib", f"{prefix}/lib", 1)
        return None if path.startswith(("opt/", "etc/dpkg/dpkg.cfg.d/ekiben")) else path

    return move


def push(stand_in: StandIn, layers: list[Path], name: str, folder: Path, tag: str = "v1") -> str:
    """Push an image with the files of these squashfs layers, changed as the stand-in says; return its reference."""
    root, added = folder / "root.tar", folder / "added.tar"
    with root.open("wb") as out, ExitStack() as stack:
        readers = [SquashfsReader(stack.enter_context(path.open("rb"))) for path in layers]
        _write_root(stand_in, readers, out)
    with added.open("wb") as out, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in stand_in.files.items():
            _add(tar, path, content)
    blobs = [_blob(folder, path.read_bytes()) for path in (root, added)]
    system, architecture = platform().split("/")
    config = {
        "os": system,
        "architecture": architecture,
        "config": {"Env": [f"{key}={value}" for key, value in stand_in.environment.items()]},
        "rootfs": {"type": "layers", "diff_ids": [blob["digest"] for blob in blobs]},
    }
    described = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": {"mediaType": f"{_MEDIA}.config.v1+json", **_blob(folder, json.dumps(config).encode())},
        "layers": [{"mediaType": f"{_MEDIA}.layer.v1.tar", **blob} for blob in blobs],
    }
    item = {
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        **_blob(folder, json.dumps(described).encode()),
        "annotations": {"org.opencontainers.image.ref.name": "v1"},
    }
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [item]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    reference = f"{REGISTRY}/ekiben-test/{name}:{tag}"
    copy = ["skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
    subprocess.run([*copy, f"oci:{folder}:v1", f"docker://{reference}"], check=True)
    return reference


def _write_root(stand_in: StandIn, readers: list[SquashfsReader], out: io.BufferedWriter) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry, holder in _entries(readers):
            path = stand_in.move(entry.path)
            if path is None or not path or entry.kind == "whiteout":
                continue
            info = tarfile.TarInfo(path)
            info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
            data = b""
            if entry.kind == "dir":
                info.type = tarfile.DIRTYPE
            elif entry.kind == "symlink":
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
            else:
                data = _content(entry.path, path, holder.read_file(entry.path))
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _entries(readers: list[SquashfsReader]) -> Iterator[tuple[Entry, SquashfsReader]]:
    for entry in merged_entries(readers):
        holder = next((reader for reader in readers[::-1] if reader.lookup(entry.path)), readers[0])
        yield holder.lookup(entry.path) or entry, holder


def _content(old: str, new: str, data: bytes) -> bytes:
    """A Python elsewhere than in /usr is not Debian's, and pip installs into its site-packages."""
    if old != new and old == "usr/lib/python3.11/sysconfig.py":
        return data.replace(b"'posix_local')", b"'posix_prefix')").replace(b"= 'posix_local'", b"= 'posix_prefix'")
    return data


def _add(tar: tarfile.TarFile, path: str, content: bytes | str) -> None:
    info = tarfile.TarInfo(path)
    info.mode = 0o644
    if isinstance(content, str) and content.startswith("-> "):
        info.type, info.linkname = tarfile.SYMTYPE, content.removeprefix("-> ")
        tar.addfile(info)
        return
    data = content.encode() if isinstance(content, str) else content
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _blob(folder: Path, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}
