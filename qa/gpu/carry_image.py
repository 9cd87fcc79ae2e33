"""Carry SIFs to a GPU machine that nothing reaches and that takes some MiB at a time.

    GPU machine  carry_image.py survey SITE-PACKAGES SURVEY.gz                             what it has, by SHA-256
    here         carry_image.py pack --survey SURVEY.gz --have DIR… --to FOLDER SIF…       FOLDER/part-000, part-001, …
    GPU machine  carry_image.py unpack FOLDER --to DIR                                     DIR/*.sif

Of what the GPU machine's Python environment has, only the name travels. An ELF file that it has in another build (torch
for Python 3.12 instead of 3.11) travels as what differs (zstd --patch-from), all else compressed, each content once
for all layers. Over there SquashfsWriter, whose bytes depend on nothing else, writes the layers again, and each SIF's
SHA-256 has to be the one it has here.

--have: folders of this machine with files that the GPU machine has, too (wheels, extracted), from which differences are
    made.
Both need Python 3.11 or later, this repository, and the program zstd (--zstd where it is not on PATH). unpack needs the
    wheel of
`deflate` in the version of requirements.lock, for another may compress to other bytes; pack `zstandard`, too; survey
    neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ekiben.core.checked import Fields, is_basename
from ekiben.core.errors import EkibenError
from ekiben.core.files import digest_of, open_regular, tree_paths
from ekiben.formats.layer import Entry, LayerEntry, read_chunks, write_entries
from ekiben.formats.partition import Partition, read_partition
from ekiben.formats.sif import DEFFILE, PARTITION, USERS, Descriptor, SifHeader, difference, read_sif, write_sif

MIN_SIZE = 1024  # bytes: smaller files are not worth naming
PATCH_SIZE = 1 << 17  # bytes: smaller ELF files are not worth a difference
STREAM_SIZE = 160 << 20  # bytes: streams are compressed, and expanded, side by side
INDEX = "index.json"
ELF = b"\x7fELF"

# Where a file's bytes are: existing, patch or stream; the name of the file that has them; where they begin in it.
Source = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Survey:
    """What a machine has in ``folder``: path → bytes, digest.

    ``tag``: its Python's, in the names of extension modules.
    """

    folder: str
    tag: str
    files: Mapping[str, tuple[int, str]]


def survey(folder: Path, out: Path) -> None:
    """Write what ``folder`` has, for pack()."""
    paths = [path for path in tree_paths(folder) if path.is_file() and not path.is_symlink()]
    paths = [path for path in paths if path.stat().st_size >= MIN_SIZE]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest_of, paths))
    files = {
        str(path.relative_to(folder)): (path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    }
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    with gzip.open(out, "wt") as file:
        json.dump(dataclasses.asdict(Survey(str(folder.resolve()), tag, files)), file)
    print(f"survey: {len(files)} files, {sum(size for size, _ in files.values()) / 1e6:.1f} MB")


# ---------------------------------------------------------------------------------------------------------------- here


def pack(sifs: Sequence[Path], options: argparse.Namespace) -> None:
    """Write the files from which unpack() makes ``sifs``. Raises ValueError for a SIF that cannot be made again."""
    try:
        with gzip.open(options.survey, "rt") as file:
            existing = Survey(**json.load(file))
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise ValueError(f"{options.survey} is not a survey: {error}") from error
    options.to.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=options.to) as name:
        cargo = Cargo(Path(name), existing, options.have)
        images: dict[str, Any] = {}
        layers: dict[str, Any] = {}
        for sif in sifs:
            header, partitions = read_image(sif)
            digests = [partition.digest for partition in partitions]
            images[sif.name] = {
                **dataclasses.asdict(header),
                "users": header.users.hex(),
                "layers": digests,
                "sha256": digest_of(sif),
            }
            print(f"{sif.name}: {len(digests)} layers, {images[sif.name]['sha256']}", flush=True)
            for partition in partitions:
                if partition.digest not in layers:
                    layers[partition.digest] = cargo.add_layer(partition)
        cargo.close()
        index = {"folder": existing.folder, "images": images, "layers": layers, "files": cargo.files()}
        (cargo.folder / INDEX).write_text(json.dumps(index, separators=(",", ":")))
        for kind, size in cargo.sizes.items():
            print(f"{kind:<9} {size / 1e6:10.1f} MB of the layers' files")
        paths = [cargo.folder / INDEX, *cargo.paths()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compressed = list(pool.map(lambda path: compress(path, cargo.originals.get(path.name), options), paths))
        count, size = split_archive(compressed, options.to, options.mebibytes << 20)
    print(f"packed: {size / 1e6:.1f} MB in {count} files")


def read_image(sif: Path) -> tuple[SifHeader, list[Partition]]:
    """Return all that write_sif() takes to write this SIF. Raises ValueError where that is another file."""
    info = read_sif(sif)
    if any(item.data_type not in (DEFFILE, PARTITION) for item in info.descriptors):
        raise ValueError(f"{sif}: it has more than a definition file and layers: carry the SIF without its signatures")
    deffile = b"".join(_read_object(sif, item) for item in info.descriptors if item.data_type == DEFFILE)
    users = b"".join(_read_object(sif, item) for item in info.layers if item.name == USERS)
    header = SifHeader(info.id, deffile.decode("utf-8", "surrogateescape"), info.arch, info.created, users)
    layers = [Partition(sif, item.offset, item.size, "") for item in info.layers if item.name != USERS]
    layers = [dataclasses.replace(layer, digest=_digest(read_partition(layer))) for layer in layers]
    if reason := difference(sif, layers, header):
        raise ValueError(f"{sif}: it is not as this version writes SIFs: {reason}")
    return header, layers


def _read_object(sif: Path, item: Descriptor) -> bytes:
    return b"".join(read_partition(Partition(sif, item.offset, item.size, "")))


def _digest(chunks: Iterable[bytes]) -> str:
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(chunk)
    return f"sha256:{sha.hexdigest()}"


class Cargo:
    """What has to travel, in ``folder``: files of which a difference will be made, and streams of all others, each
    content once.

    ``originals``: file → what it is compared with, on this machine; ``sizes``: bytes of the layers' files by kind of
    Source.
    """

    def __init__(self, folder: Path, existing: Survey, have: Sequence[Path]) -> None:
        self.folder, self._existing, self._have = folder, existing, have
        self.originals: dict[str, Path] = {}
        self.sizes: Counter[str] = Counter()
        self._references: dict[str, str] = {}  # file → what it is compared with, over there
        self._sources: dict[str, Source] = {
            digest: ("existing", path, 0) for path, (_, digest) in existing.files.items()
        }
        self._streams: dict[str, BinaryIO] = {}
        self._count = 0

    def add_layer(self, partition: Partition) -> dict[str, Any]:
        """Take a layer's files, and return its entries for the index."""
        from ekiben.formats.squashfs import SquashfsReader

        entries = []
        with open_regular(partition.path) as file:
            reader = SquashfsReader(file, partition.offset)
            for entry, chunks in reader.contents():
                fields = dataclasses.asdict(entry) | {"xattrs": [(name, value.hex()) for name, value in entry.xattrs]}
                source = self._add(entry.path, b"".join(chunks)) if chunks is not None else None
                entries.append([*fields.values(), source])
        print(f"layer {partition.digest[7:19]}: {len(entries)} entries", flush=True)
        return {"epoch": reader.epoch, "entries": entries}

    def _add(self, path: str, data: bytes) -> Source:
        digest = digest_of(data)
        if digest not in self._sources:
            original = self._find_original(path) if len(data) >= PATCH_SIZE and data.startswith(ELF) else None
            self._sources[digest] = self._patch(data, *original) if original else self._append(path, data)
        source = self._sources[digest]
        self.sizes[source[0]] += len(data)
        return source

    def _find_original(self, path: str) -> tuple[str, Path] | None:
        """Return the path over there of the same file in another build, and the file here."""
        relative = re.sub(r"cpython-3\d+", self._existing.tag, path.partition("/site-packages/")[2])
        size, digest = self._existing.files.get(relative, (-1, ""))
        files = [folder / relative for folder in self._have if size >= 0]
        files = [file for file in files if file.is_file() and file.stat().st_size == size and digest_of(file) == digest]
        return (relative, files[0]) if files else None

    def _patch(self, data: bytes, relative: str, original: Path) -> Source:
        name = self._new_name("patch")
        (self.folder / name).write_bytes(data)
        self.originals[name], self._references[name] = original, relative
        return "patch", name, 0

    def _append(self, path: str, data: bytes) -> Source:
        """Like goes with like: that compresses better."""
        kind = "elf" if data.startswith(ELF) else "pyc" if path.endswith(".pyc") else "other"
        stream = self._streams.get(kind)
        if stream is None or stream.tell() + len(data) > STREAM_SIZE:
            if stream is not None:
                stream.close()
            stream = self._streams[kind] = (self.folder / self._new_name(kind)).open("wb")
        source = "stream", Path(stream.name).name, stream.tell()
        stream.write(data)
        return source

    def _new_name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-{self._count:04}"

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams.values():
            stream.close()

    def paths(self) -> list[Path]:
        """Return the files that travel, largest first."""
        paths = [path for path in self.folder.iterdir() if path.name != INDEX]
        return sorted(paths, key=lambda path: path.stat().st_size, reverse=True)

    def files(self) -> dict[str, tuple[int, str]]:
        """Return for the index: file → its bytes, and what it is compared with over there."""
        return {path.name: (path.stat().st_size, self._references.get(path.name, "")) for path in self.paths()}


def compress(path: Path, original: Path | None, options: argparse.Namespace) -> Path:
    """Return the file that replaces ``path``. With --cache, one of an earlier run serves."""
    out = path.with_name(f"{path.name}.zst")
    key = [digest_of(path), original and digest_of(original), options.level]
    known = options.cache and options.cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.zst"
    if known and known.exists():
        shutil.copyfile(known, out)
    else:
        reference = ["--long=29", f"--patch-from={original}"] if original else ["--long=27"]
        argv = [options.zstd, "-q", f"-{options.level}", "-T1", *reference, str(path), "-o", str(out)]
        subprocess.run(argv, check=True)
    if known and not known.exists():
        known.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(out, known.with_suffix(".new"))
        known.with_suffix(".new").rename(known)
    path.unlink()
    return out


def split_archive(paths: Sequence[Path], folder: Path, size: int) -> tuple[int, int]:
    """Write a tar of ``paths`` as files of ``size`` bytes; return how many there are, and the bytes of all."""
    with tempfile.TemporaryFile(dir=folder) as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in paths:
                tar.add(path, path.name)
        total = file.seek(0, os.SEEK_END)
        file.seek(0)
        count = 0
        while data := file.read(size):
            (folder / f"part-{count:03}").write_bytes(data)
            count += 1
    return count, total


# ---------------------------------------------------------------------------------------------------------- over there


def unpack(folder: Path, to: Path, zstd: str) -> int:
    """Make the SIFs of pack() and return how many differ from those of there. Raises ValueError for damaged input."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as name:
        work = Path(name)
        join_archive(sorted(folder.glob("part-*")), work)
        expand(work / INDEX, 1 << 32, None, zstd)
        index = Fields.of(json.loads((work / INDEX).read_bytes()))
        existing = Path(index.text("folder"))
        files = index.mapping("files")
        with ThreadPoolExecutor() as pool:
            jobs = [
                (path_below(work, name), size, path_below(existing, reference) if reference else None, zstd)
                for name, (size, reference) in files.items()
            ]
            list(pool.map(lambda job: expand(*job), jobs))
        layers = index.object("layers")
        blobs = {digest: work / f"blob-{number}" for number, digest in enumerate(layers.data)}
        with ProcessPoolExecutor() as processes:
            written = {
                digest: processes.submit(write_layer, layers.object(digest), existing, work, blob)
                for digest, blob in blobs.items()
            }
            for digest, job in written.items():
                if (actual := job.result()) != digest:
                    raise ValueError(f"layer {digest} became {actual}: is deflate that of requirements.lock?")
        images = index.object("images")
        return sum(not write_image(to, name, images.object(name), blobs) for name in images.data)


def join_archive(paths: Sequence[Path], work: Path) -> None:
    """Extract what split_archive() wrote. Raises ValueError for a missing file, and for a name outside the folder."""
    names = [path.name for path in paths]
    if not paths or names != [f"part-{number:03}" for number in range(len(paths))]:
        raise ValueError(f"part-000 and all that follow are needed, not {', '.join(names) or 'an empty folder'}")
    with tempfile.TemporaryFile(dir=work) as joined:
        for path in paths:
            with path.open("rb") as file:
                shutil.copyfileobj(file, joined)
        joined.seek(0)
        try:
            with tarfile.open(fileobj=joined) as tar:
                for item in tar:
                    content = tar.extractfile(item) if item.isreg() and is_basename(item.name) else None
                    if content is None:
                        raise ValueError(f"{item.name!r} is not a plain file")
                    with (work / item.name).open("xb") as out:
                        shutil.copyfileobj(content, out)
        except (tarfile.TarError, FileExistsError) as error:
            raise ValueError(f"the files do not make up one archive: {error}") from error


def path_below(folder: Path, relative: str) -> Path:
    """Return ``folder / relative``. Raises ValueError for a path that points out of it."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{relative!r} is not a path below {folder}")
    return folder / path


def expand(path: Path, size: int, original: Path | None, zstd: str) -> None:
    """Write ``path`` from its compressed form beside it: ``size`` bytes, of the index at most.

    Raises ValueError for others.
    """
    compressed = path.with_name(f"{path.name}.zst")
    reference = [f"--patch-from={original}"] if original else []
    argv = [zstd, "-q", "-d", "-c", "--long=31", *reference, str(compressed)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child, path.open("xb") as out:
        assert child.stdout is not None
        for chunk in read_chunks(child.stdout.read, size):
            out.write(chunk)
        is_longer = bool(child.stdout.read(1))
        child.stdout.close()
        if child.wait() or is_longer or (path.name != INDEX and out.tell() != size):
            raise ValueError(f"{compressed.name} does not expand to {size} bytes")
    compressed.unlink()


def write_layer(layer: Fields, existing: Path, work: Path, out: Path) -> str:
    """Write a layer and return its digest. Raises ValueError, or StoreError, for entries that cannot be a layer's."""
    from ekiben.formats.squashfs import SquashfsWriter

    def entries() -> Iterator[LayerEntry]:
        for *fields, xattrs, source in layer.data["entries"]:
            entry = Entry(*[*fields, tuple((name, bytes.fromhex(value)) for name, value in xattrs)])
            yield entry, read_source(source, entry.size, existing, work) if source else None

    with out.open("w+b") as file:
        write_entries(entries(), SquashfsWriter(file, epoch=layer.size("epoch")))
    return digest_of(out)


def read_source(source: Source, size: int, existing: Path, work: Path) -> Iterator[bytes]:
    """Yield the bytes of a file of a layer. Raises ValueError for a path that points elsewhere."""
    kind, name, offset = source
    with path_below(existing if kind == "existing" else work, name).open("rb") as file:
        file.seek(offset)
        yield from read_chunks(file.read, size)


def write_image(to: Path, name: str, image: Fields, blobs: Mapping[str, Path]) -> bool:
    """Write a SIF of checked layers; return whether it is the file that was packed."""
    if not is_basename(name):
        raise ValueError(f"{name!r} is not a file name")
    header = SifHeader(
        image.text("id"),
        image.text("deffile"),
        image.text("arch"),
        image.size("epoch"),
        bytes.fromhex(image.text("users")),
    )
    layers = [
        Partition(blobs[digest], 0, blobs[digest].stat().st_size, digest, is_checked=True)
        for digest in image.strings("layers")
    ]
    sha, expected = hashlib.sha256(), image.digest("sha256")
    write_sif(to / name, layers, header, file_hash=sha)
    actual = f"sha256:{sha.hexdigest()}"
    print(f"{to / name}: {actual}, {'the same' if actual == expected else f'NOT {expected}'}", flush=True)
    return actual == expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("survey", help="write what a folder has")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command = commands.add_parser("pack", help="write the files that travel")
    command.add_argument("sifs", type=Path, nargs="+", metavar="SIF")
    command.add_argument("--survey", type=Path, required=True, help="what the other machine has")
    command.add_argument("--have", type=Path, nargs="+", default=[], metavar="DIR", help="what both machines have")
    command.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    command.add_argument("--part", type=int, default=58, dest="mebibytes", metavar="MIB", help="size of each file")
    command.add_argument("--level", type=int, default=12, help="zstd's")
    command.add_argument("--cache", type=Path, metavar="DIR", help="keep what is compressed, for the next time")
    command.add_argument("--zstd", default="zstd", metavar="PROGRAM")
    command = commands.add_parser("unpack", help="make the SIFs")
    command.add_argument("folder", type=Path)
    command.add_argument("--to", type=Path, required=True, metavar="DIR")
    command.add_argument("--zstd", default="zstd", metavar="PROGRAM")
    args = parser.parse_args()
    try:
        if args.command == "survey":
            survey(args.folder, args.out)
        elif args.command == "pack":
            pack(args.sifs, args)
        else:
            return min(unpack(args.folder, args.to, args.zstd), 1)
    except (EkibenError, ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
