"""An image of 20 GB and 500,000 files, without an engine: time and peak memory of each step that handles all of it.

    PYTHONPATH=.:tests .venv/bin/python qa/large_image.py FOLDER [--gigabytes 20] [--files 500000] [--layers 5]

The files compress to a hundredth, so that a disk of 2 GB is enough; they are hashed, compressed and written like
others. Each step runs in a process of its own, whose peak memory is printed. No test runs it: it takes minutes of two
cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import difference, sif_header, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader, merged_entries
from ekiben.formats.squashfs.reuse import BlockReuse
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter, tar_digest

FILES_IN_FOLDER = 500
TEXT = "".join(hashlib.sha256(b"%d" % line).hexdigest() + "\n" for line in range(40)).encode()


@dataclass(frozen=True, slots=True)
class Large:
    """The image below ``folder``; ``size``: bytes of a file, of which ``files`` are in each of ``layers`` layers."""

    folder: Path
    layers: int
    files: int
    size: int

    def blob(self, layer: int) -> Path:
        return self.folder / f"layer{layer}.squashfs"

    def partitions(self) -> list[Partition]:
        digests = (self.folder / "digests").read_text(encoding="utf-8").split()
        blobs = [self.blob(layer) for layer in range(self.layers)]
        return [Partition(blob, 0, blob.stat().st_size, digest) for blob, digest in zip(blobs, digests, strict=True)]

    def entries(self, layer: int, edit: str = "") -> Iterator[LayerEntry]:
        """Yield the files of a layer; with ``edit`` the last one differs."""
        yield Entry("", "dir"), None
        yield Entry(f"l{layer}", "dir"), None
        body = (TEXT * (self.size // len(TEXT) + 1))[: self.size - 32]
        for number in range(self.files):
            if number % FILES_IN_FOLDER == 0:
                yield Entry(f"l{layer}/{number // FILES_IN_FOLDER:05}", "dir"), None
            name = f"l{layer}/{number // FILES_IN_FOLDER:05}/{number:07}"
            text = edit if number == self.files - 1 else ""
            first = hashlib.md5(f"{layer} {number} {text}".encode(), usedforsecurity=False).hexdigest().encode()
            yield Entry(name, "file", mode=0o644, size=self.size), [first, body]

    def write_layers(self) -> None:
        digests = []
        for layer in range(self.layers):
            reuse, tar = BlockReuse(), DigestWriter()
            with self.blob(layer).open("w+b") as out:
                write_entries(self.entries(layer), tar, SquashfsWriter(out, epoch=1, reuse=reuse))
                out.seek(0)
                digests.append(f"sha256:{hashlib.file_digest(out, 'sha256').hexdigest()}")
            (self.folder / f"index{layer}").write_bytes(reuse.index())
        (self.folder / "digests").write_text("\n".join(digests), encoding="utf-8")

    def write_edit(self) -> None:
        with self.blob(0).open("rb") as former, (self.folder / "edit").open("w+b") as out:
            reuse = BlockReuse(former, (self.folder / "index0").read_bytes())
            write_entries(self.entries(0, "edit"), DigestWriter(), SquashfsWriter(out, epoch=1, reuse=reuse))
        print(f"    {reuse.copied} blocks copied")

    def write_image(self) -> None:
        partitions = self.partitions()
        header = sif_header([item.digest for item in partitions], "", "amd64", 1)
        write_sif(self.folder / "image.sif", partitions, header, file_hash=hashlib.sha256())

    def check_image(self) -> None:
        partitions = self.partitions()
        header = sif_header([item.digest for item in partitions], "", "amd64", 1)
        assert difference(self.folder / "image.sif", partitions, header) == ""

    def read_tars(self) -> None:
        for layer in range(self.layers):
            with self.blob(layer).open("rb") as blob:
                tar_digest(SquashfsReader(blob))

    def list_files(self) -> None:
        streams = [self.blob(layer).open("rb") for layer in range(self.layers)]
        count = sum(entry.kind == "file" for entry in merged_entries([SquashfsReader(stream) for stream in streams]))
        assert count == self.layers * self.files


def measure(name: str, step: Callable[[], None]) -> None:
    """Run a step in a fork, and print its seconds, CPU seconds and peak memory."""
    sys.stdout.flush()
    began, pid = time.monotonic(), os.fork()
    if not pid:
        step()
        sys.stdout.flush()
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{name} ended with {os.waitstatus_to_exitcode(status)}")
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{name:<38} {time.monotonic() - began:7.1f} s {cpu:7.1f} CPU s {usage.ru_maxrss >> 10:5} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--files", type=int, default=500_000)
    parser.add_argument("--layers", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    size = max(64, int(args.gigabytes * 1e9 / args.files))
    image = Large(args.folder, args.layers, args.files // args.layers, size)
    measure("write the layers, with tar and SHA-256", image.write_layers)
    measure("write the first again, one file edited", image.write_edit)
    measure("write the SIF, with its SHA-256", image.write_image)
    measure("compare the SIF", image.check_image)
    measure("read the layers' tars", image.read_tars)
    measure("list the merged files", image.list_files)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"(the process before a step: {before} MiB)")


if __name__ == "__main__":
    main()
