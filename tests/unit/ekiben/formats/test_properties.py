"""Random trees through every reader of squashfs, random edits of them through the kernel's overlay: nothing is lost on
the way.
"""

from __future__ import annotations

import tempfile

from hypothesis import given as for_all
from hypothesis import settings

from ekiben.formats.layer import write_entries
from ekiben.formats.squashfs._stream import name_links, stream_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.tar import DigestWriter, tar_entries, tar_stream
from support.random_trees import Read, Tree, members, stored, trees

fast = settings(max_examples=30, deadline=None, derandomize=True)


@fast
@for_all(trees())
def test_what_is_written_is_read_back(tree: Tree) -> None:
    read, digest = Read(), DigestWriter()
    with stored(tree) as (file, diff_id):
        write_entries(stream_entries(name_links(SquashfsReader(file).walk())), read, digest)  # type: ignore[arg-type]
    assert read.tree == tree
    assert digest.diff_id == diff_id


@fast
@for_all(trees())
def test_a_layers_tar_is_read_back(tree: Tree) -> None:
    read = Read()
    with tempfile.TemporaryFile() as archive:
        archive.writelines(tar_stream(members(tree)))
        archive.seek(0)
        write_entries(tar_entries(archive), read)
    assert {path: (entry.xattrs, data) for path, (entry, data) in read.tree.items()} == {
        path: (entry.xattrs, data) for path, (entry, data) in tree.items()
    }


# ------------------------------------------------------------------------------------------------------ edits of a tree
