"""A recipe's folder outside the repository, with layers, files and a stack of its own; and how tests start build.py."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.checked import with_checksum, without_checksum
from ekiben.core.files import digest_of
from ekiben.core.progress import Progress
from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter
from ekiben.resolve.graph import Layer, ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store, StoredLayer

Done = subprocess.CompletedProcess[str]
RunCli = Callable[..., Done]

STACK: dict[str, Any] = {
    "name": "tiny",
    "description": "for tests",
    "suite": "bookworm",
    "python": "3.11",
    "cuda": "13.0",
    "torch": "2.11.0",
    "driver": ">=580",
    "compute_capabilities": ["9.0"],
    "epoch": 1_700_000_000,
    "arguments": {"word": "hello"},
}
RECIPE: dict[str, Any] = {
    "name": "own",
    "description": "a recipe outside the repository",
    "stack": "tiny",
    "layer": "roof",
    "tasks": {"greet": {"entrypoint": "greet.py", "config": "configs/greet.yaml", "help": "say hello"}},
    "test": "greet\n",
}
AS_SIF = ("--format", "sif", "--no-verify")
GROUND = (
    "Bootstrap: debootstrap\nOSVersion: bookworm\nInclude: b a\nMirrorURL: {{ mirror }}\n\n%arguments\n    mirror=\n"
)
WALLS = """\
Bootstrap: localimage
From: ground.sif

%arguments
    word=bye

%files
    files/tool.sh /opt/tool.sh

%post
    echo {{ word }} > /word

%environment
    export GREETING={{ word }}
    export PATH=/opt:$PATH

%labels
    walls.label one

%test
    test -e /word
"""
ROOF = """\
Bootstrap: localimage
From: walls.sif

%files
    files/data.txt /opt/data/
    files/tree /opt/tree
"""


@dataclass(frozen=True)
class SampleRecipe:
    """A recipe's folder with layers, files and a stack of its own. Its layers: ground, walls (%post), roof (files)."""

    path: Path

    def write(self, file: str, text: str, mode: int = 0o644) -> Path:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.path / file).read_text()
        assert old in text
        (self.path / file).write_text(text.replace(old, new))

    def recipe(self, **changes: Any) -> None:
        self.write("recipe.yaml", json.dumps({**RECIPE, **changes}, indent=1))

    def stack(self, **changes: Any) -> None:
        self.write("images/stacks/tiny/stack.yaml", json.dumps({**STACK, **changes}, indent=1))


def full_sample(path: Path) -> SampleRecipe:
    """Write a recipe with each kind of file: ground ← walls (%post) ← roof (files), an entrypoint and its
    configuration.
    """
    sample = SampleRecipe(path)
    sample.recipe()
    sample.stack()
    sample.write("images/ground.def", GROUND)
    sample.write("images/walls.def", WALLS)
    sample.write("images/roof.def", ROOF)
    sample.write("files/tool.sh", "#!/bin/sh\necho tool\n", 0o755)
    sample.write("files/data.txt", "data\n")
    sample.write("files/tree/a.txt", "a\n")
    sample.write("files/tree/sub/b.txt", "b\n")
    sample.write("entrypoints/greet.py", "print('hello')\n")
    sample.write("configs/greet.yaml", "name: you\n")
    return sample


def without_post(sample: SampleRecipe) -> SampleRecipe:
    """Leave out the layer with a %post: what needs no engine. ground ← roof."""
    sample.replace("images/roof.def", "walls.sif", "ground.sif")
    (sample.path / "images/walls.def").unlink()
    sample.stack(arguments={})
    return sample


def seed(store: Store, layer: Layer, programs: Mapping[str, bytes] | None = None) -> None:
    """Puts a hand-made layer where the real one would be: a base without mmdebstrap, a %post without an engine.

    ``programs`` go to /bin.
    """
    members: list[LayerEntry] = [(Entry("", "dir", mtime=layer.epoch), None)]
    if programs:
        members.append((Entry("bin", "dir", mtime=layer.epoch), None))
        members += [
            (Entry(f"bin/{name}", "file", 0o755, mtime=1, size=len(data)), [data]) for name, data in programs.items()
        ]
    members += [(Entry(name, "dir", mtime=layer.epoch), None) for name in ("etc", "opt", "tmp", "usr")]
    members.append((Entry(f"zz-{layer.name}", "file", 0o644, mtime=1, size=4), [b"seed"]))
    store.open_for_writing()
    with store.staging() as staging:
        digest = DigestWriter()
        with (staging / "blob").open("w+b") as out:
            write_entries(members, digest, SquashfsWriter(out, epoch=layer.epoch))
        data = (staging / "blob").read_bytes()
        store.put_file(staging / "blob", digest_of(data))
    store.put_layer(
        StoredLayer(
            name=layer.name,
            cache_key=layer.cache_key,
            diff_id=digest.diff_id,
            tar_size=digest.size,
            digest=digest_of(data),
            size=len(data),
            executor="hand",
            seconds=0.0,
            inputs=layer.inputs,
        )
    )


def seeded(sample: SampleRecipe, root: Path, *names: str, programs: Mapping[str, bytes] | None = None) -> Store:
    """A store at ``root`` in which these layers of the recipe are."""
    store = Store(root)
    for layer in resolve(find_recipe(str(sample.path))).layers:
        if layer.name in names:
            seed(store, layer, programs)
    return store


def chain_of(sample: SampleRecipe) -> ResolvedRecipe:
    return resolve(find_recipe(str(sample.path)))


def quiet() -> Progress:
    return Progress(io.StringIO(), quiet=True)


def image_of(sample: SampleRecipe, store: Store) -> Image:
    return build(BuildContext(chain_of(sample), store, Options(), quiet()))


def edit_record(path: Path, **changes: Any) -> None:
    """Change fields of a record, and its checksum with them, as whoever may write there can."""
    record = {**without_checksum(json.loads(path.read_bytes())), **changes}
    path.chmod(0o644)
    path.write_text(json.dumps(with_checksum(record)))


def becomes_empty(folder: Path, seconds: float = 10) -> bool:
    """What a build leaves behind is removed by a thread that the process waits for at its end.

    A folder that is gone is empty.
    """
    end = time.monotonic() + seconds
    with contextlib.suppress(FileNotFoundError):
        while list(folder.iterdir()):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True
