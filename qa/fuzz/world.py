"""Valid samples of all that Ekiben reads: a recipe, the store, SIF and shared folder made of it, and folders to read
from.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import TarWriter
from ekiben.publish.publish import Published, PublishOptions, publish
from ekiben.store import Image, Store
from support.fat_elf import elf, fatbin
from support.registries import Answer, bad_registry
from support.sample_recipe import GROUND, SampleRecipe, image_of, quiet, seeded

SITE = "opt/venv/lib/python3.11/site-packages"
STATUS = (
    "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2\nDepends: libc6 (>= 2), a |"
    " b\nSource: bash (5)\n\n"
)
METADATA = (
    "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\nLicense: MIT\nAuthor-email: A B"
    " <a@example.org>\nRequires-Dist: numpy[x] (>=1) ; python_version > '3'\n"
)
COPYRIGHT = (
    "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nCopyright: x\nLicense:"
    " GPL-3+\n text\n"
)
LOCK = f"torch==2.11.0 \\\n    --hash=sha256:{'a' * 64}\nnumpy==2.0\n"
DIRECT_URL = json.dumps({"url": "file:///x", "archive_info": {"hashes": {"sha256": "a" * 64}}})
LIBRARY = elf(fatbin(["sm_80", "sm_90a", "compute_90"]), gap=b"\0" * 8).ljust(9000, b"\0")
IMAGE_JSON = json.dumps(
    {
        "recipe": "greeter",
        "stack": "tiny",
        "layers": [{"name": "ground", "cache_key": "k1"}],
        "compiled": [
            {
                "package": "torch",
                "cache_key": "p",
                "layer": "top",
                "torch": "2.11.0",
                "capabilities": ["8.0"],
                "cxx11_abi": True,
                "compilers": {"nvcc": "13"},
                "source": {"name": "torch", "version": "2.11.0", "sha256": ["a" * 64]},
            }
        ],
    }
)
TREE: Mapping[str, bytes] = {
    "etc/passwd": b"root:x:0:0::/root:/bin/sh\n",
    "etc/os-release": b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n',
    "var/lib/dpkg/status": STATUS.encode(),
    "usr/share/doc/bash/copyright": COPYRIGHT.encode(),
    f"{SITE}/torch-2.11.0.dist-info/METADATA": METADATA.encode(),
    f"{SITE}/torch-2.11.0.dist-info/direct_url.json": DIRECT_URL.encode(),
    f"{SITE}/torch/version.py": b"cuda = '13.0'\n",
    f"{SITE}/torch/lib/libtorch.so": LIBRARY,
    "usr/lib/libc.so.6": b"GNU C Library (Debian) stable release version 2.36\n",
    "opt/ekiben/image.json": IMAGE_JSON.encode(),
    "opt/ekiben/recipe/recipe.yaml": (
        b"name: greeter\ndescription: x\ntasks:\n  greet: {entrypoint: greet.py, help: say hello}\n"
    ),
    "opt/ekiben/locks/python.lock": LOCK.encode(),
    "opt/venv/pyvenv.cfg": b"home = /usr/bin\nversion = 3.11.2\n",
    ".singularity.d/env/90-environment.sh": b"export PATH=/opt/venv/bin:$PATH\nexport A='b c'\n",
    ".singularity.d/labels.json": b'{"org.ekiben.stack": "tiny"}',
    ".singularity.d/Singularity": b"Bootstrap: docker\n",
    "usr/share/large": bytes(range(256)) * 1200,
}


XATTRS = (("security.capability", b"\x00\x00\x00\x02" + bytes(16)), ("user.note", b"x" * 300))


def entries(files: Mapping[str, bytes]) -> list[LayerEntry]:
    """The entries of a layer of these files, with a link, a second name, a pipe and a removal."""
    folders = {
        "",
        "usr",
        "etc",
        *(parent.as_posix() for name in files for parent in Path(name).parents if parent.as_posix() != "."),
    }
    result: list[LayerEntry] = [(Entry(folder, "dir", mtime=1), None) for folder in folders]
    result += [
        (Entry(name, "file", 0o644, mtime=1, size=len(data)), [data] if data else None) for name, data in files.items()
    ]
    result += [
        (Entry("usr/z-link", "symlink", 0o777, mtime=1, target="lib"), None),
        (Entry("usr/z-name", "hardlink", 0o644, mtime=1, target=min(files)), None),
        (Entry("usr/pipe", "fifo", 0o644, mtime=1), None),
        (Entry("usr/noted", "file", 0o755, mtime=1, xattrs=XATTRS), None),
        (Entry("usr/gone", "whiteout", 0, mtime=1), None),
    ]
    return sorted(result, key=lambda item: sort_key(item[0].path))


def squashfs(files: Mapping[str, bytes] = TREE) -> bytes:
    """These files as a layer."""
    with tempfile.TemporaryFile() as out:
        write_entries(entries(files), SquashfsWriter(out, epoch=1))
        out.seek(0)
        return out.read()


def layer_tar() -> bytes:
    """These files as the tar form of a layer."""
    out = io.BytesIO()
    write_entries(entries(TREE), TarWriter(out.write))
    return out.getvalue()


@contextmanager
def answering() -> Iterator[tuple[str, dict[str, Answer]]]:
    """A registry that answers a path with the first of its answers whose name is in the path: its host, and the
    answers.
    """
    answers: dict[str, Answer] = {}

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        return next((answer for fragment, answer in answers.items() if fragment in path), Answer(404))

    with bad_registry(script) as (host, _):
        yield host, answers


@dataclass(frozen=True)
class World:
    """``folder`` is the one place that a parser may write to; ``registry`` answers what a case says."""

    folder: Path
    registry: tuple[str, dict[str, Answer]]

    def answer(self, answers: Mapping[str, Answer | bytes]) -> str:
        """Let the registry give these answers alone, and return its host."""
        host, known = self.registry
        known.clear()
        known.update({path: Answer(body=it) if isinstance(it, bytes) else it for path, it in answers.items()})
        return host

    def path(self, name: str) -> Path:
        """A path below the folder, its parent made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def put(self, path: Path, data: bytes) -> Path:
        """Write a file that may be there, and may be read-only."""
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path

    @cached_property
    def project(self) -> SampleRecipe:
        project = SampleRecipe(self.folder / "project")
        project.recipe()
        project.stack(arguments={})
        project.write("images/ground.def", GROUND)
        project.write(
            "images/roof.def", "Bootstrap: localimage\nFrom: ground.sif\n\n%files\n    files/data.txt /opt/data/\n"
        )
        project.write("files/data.txt", "data\n")
        project.write("entrypoints/greet.py", "print('hello')\n")
        project.write("configs/greet.yaml", "name: you\n")
        return project

    @cached_property
    def store(self) -> Store:
        return seeded(self.project, self.folder / "store", "ground")

    @cached_property
    def image(self) -> Image:
        return image_of(self.project, self.store)

    @cached_property
    def sif(self) -> Path:
        path = self.folder / "image.sif"
        make_sif(self.image, self.store, path, squash=False)
        return path

    @cached_property
    def published(self) -> Published:
        return publish(self.image, self.store, self.folder / "lab", PublishOptions(check=False), quiet())
