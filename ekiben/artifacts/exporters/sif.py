"""The SIF file that Apptainer and SingularityCE run."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.core.errors import EngineError, StoreError, VerifyError
from ekiben.core.files import digest_of
from ekiben.core.progress import Progress
from ekiben.formats.partition import Partition
from ekiben.formats.sif import new_sif, read_sif
from ekiben.formats.sif_rewrite import RewriteRefused, check_rewrite, was_killed
from ekiben.run.printed import sif_lines
from ekiben.store import Image, Store, check_sif, is_noted, keep_sif, known_sif, note_sif

PREFERENCE = 10
SUFFIX = ".sif"
FALLBACK = None


def is_default() -> bool:
    """Return True: most machines of a cluster run SIF files."""
    return True


def unavailable() -> None:
    """Return None: files can be written everywhere."""


def export(image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact:
    """Write the image's SIF at ``target``; what is there stays until the new one has passed ``options.check``."""
    if was_killed(target):
        progress.log(f"{target} was being rewritten when its build was killed; it is written again")
    if options.rewrite and not options.squash and (artifact := _rewrite(image, store, target, options, progress)):
        return artifact
    with contextlib.ExitStack() as stack:
        with progress.step(f"write {target}", total=image.size):
            sif = stack.enter_context(making_sif(image, store, target, options, progress.count))
        if options.check:
            try:
                options.check(image, replace(sif.artifact, ref=str(sif.path)))
            except VerifyError:
                if sif.artifact.created:
                    progress.log(f"{target} {'is left as it was' if target.exists() else 'is not written'}")
                raise
            except OSError as error:  # not the file's name, which new_sif() would expect
                raise EngineError(f"the tests of {target} cannot be run: {error}") from error
    return sif.artifact


def _rewrite(image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact | None:
    """Rewrite the last layer of the SIF at ``target``; None, with the reason, where it has to be written anew."""
    header = image.sif_header(store)
    try:
        old = read_sif(target)
    except (StoreError, OSError):
        return None
    if old.id == header.id:
        return None
    for layer in image.layers:
        store.check_blob(layer.digest)
    partitions = [store.partition(layer, is_checked=True) for layer in image.layers]
    try:
        rewrite = check_rewrite(target, partitions, header, is_noted=is_noted(old.id, target, store))
        if options.check_layers:
            try:
                options.check_layers(image)
            except VerifyError:
                progress.log(f"{target} is left as it was")
                raise
        rewrite.run()
    except RewriteRefused as reason:
        progress.log(f"{target} is written anew, not rewritten: {reason}")
        return None
    note_sif(header, target, store)
    return Artifact("sif", str(target), target.stat().st_size, True, known_sif(store, header.id))


def run_commands(artifact: Artifact, task: str) -> list[str]:
    """Return the commands that run it."""
    return sif_lines(artifact.ref, task)


def make_sif(
    image: Image,
    store: Store,
    out: Path,
    *,
    squash: bool,
    with_sha256: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Artifact:
    """Write a SIF of the image's layers at ``out``: see making_sif()."""
    options = ExportOptions(squash=squash, with_sha256=with_sha256)
    with making_sif(image, store, out, options, on_bytes) as sif:
        pass
    return sif.artifact


@dataclass(slots=True)
class NewSif:
    """A SIF at ``path``, which becomes ``artifact``: its SHA-256 may be known only when it has its name."""

    artifact: Artifact
    path: Path


@contextlib.contextmanager
def making_sif(
    image: Image, store: Store, out: Path, options: ExportOptions, on_bytes: Callable[[int], None]
) -> Iterator[NewSif]:
    """Write a SIF of the image's layers, yield it, and let it replace ``out`` when the block ends without an
    exception. A file that is there and has the image stays.

    The SHA-256, where ``options`` ask for it, is computed while the file is written and the block runs, and stored for
    publish, push and submit. It depends on the layers alone, so one value holds for every SIF of them; but not for a
    squashed one, which is compressed again.
    """
    squash, unchanged = options.squash, None
    header = image.squashed_header() if squash else image.sif_header(store)
    with contextlib.suppress(OSError, StoreError, VerifyError):  # then it is made again
        if read_sif(out).id == header.id and check_sif(image, out, store):
            known = known_sif(store, header.id)
            unchanged = Artifact("sif", str(out), out.stat().st_size, False, known)
    if unchanged:
        yield NewSif(unchanged, out)
        return
    if not out.parent.is_dir():
        raise StoreError(f"{out}: there is no folder {out.parent}")
    for layer in image.layers:
        store.check_blob(layer.digest)
    partitions = [store.partition(layer, is_checked=True) for layer in image.layers]
    with contextlib.ExitStack() as stack:
        if squash:
            store.open_for_writing()
            partitions = [_squashed(image, store, stack.enter_context(store.staging()) / "squashed.squashfs")]
        known = known_sif(store, header.id)
        file_hash = hashlib.sha256() if options.with_sha256 and not squash and not known else None
        digest = partitions[0].digest if squash else None
        with new_sif(out, partitions, header, on_bytes=on_bytes, file_hash=file_hash) as path:
            note_sif(header, path, store, digest)
            yield (sif := NewSif(Artifact("sif", str(out), path.stat().st_size, True, known), path))
        if file_hash:
            known = keep_sif(store, header.id, file_hash)
            sif.artifact = replace(sif.artifact, sha256=known)
        note_sif(header, out, store, digest, sha256=None if squash else known)


def _squashed(image: Image, store: Store, path: Path) -> Partition:
    """Write all layers as one partition, for tools that read only the first."""
    from ekiben.formats.layer import write_entries
    from ekiben.formats.squashfs.reader import merged_layer
    from ekiben.formats.squashfs.writer import SquashfsWriter

    with contextlib.ExitStack() as stack:
        layers = [stack.enter_context(store.reader(layer.digest)) for layer in image.layers]
        out = stack.enter_context(path.open("w+b"))
        write_entries(merged_layer(layers), SquashfsWriter(out, epoch=image.epoch))
        out.seek(0)
        digest = digest_of(out)
    return Partition(path, 0, path.stat().st_size, digest, is_checked=True)
