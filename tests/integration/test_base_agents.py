"""Bases other than Debian's and a registry's: the files are those that Apptainer has from the same definition."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ekiben.formats.sif import read_sif
from ekiben.formats.squashfs.reader import SquashfsReader, merged_entries
from workspaces import Cli, RecipeFolder, Workspace, need

pytestmark = pytest.mark.covers("ekiben/builder/bases")

# What each of both writes into its image, of its own.
_WRITTEN = (".singularity.d", "opt/ekiben", ".exec", ".run", ".shell", ".test", "singularity", "environment")


def files_of(sif: Path) -> dict[str, tuple[str, int, str, bytes]]:
    """Path → kind, mode, target of a link, content."""
    files = {}
    with sif.open("rb") as stream:
        readers = [SquashfsReader(stream, item.offset) for item in read_sif(sif).layers]
        for entry in merged_entries(readers):
            if not entry.path.startswith(_WRITTEN) and entry.path not in ("", "opt"):
                top = next((reader for reader in readers[::-1] if reader.lookup(entry.path)), readers[0])
                content = top.read_file(entry.path) if entry.kind == "file" else b""
                files[entry.path] = (entry.kind, entry.mode, entry.target, content)
    return files


@pytest.mark.guard
@pytest.mark.parametrize("compressor", ["gzip", "zstd"])
def test_sif_of_apptainer_as_base(compressor: str, recipe_folder: RecipeFolder, workspace: Workspace, cli: Cli) -> None:
    need("apptainer")
    folder = recipe_folder.path
    tree = workspace.folder("tree")
    for name in ("etc", "bin", "srv/a b"):
        (tree / name).mkdir(parents=True)
    (tree / "etc/keep").write_text("kept\n")
    (tree / "etc/link").symlink_to("keep")
    (tree / "bin/tool").write_text("#!/bin/sh\n")
    (tree / "bin/tool").chmod(0o4755)
    (tree / "srv/a b/empty").touch()
    build = ["apptainer", "-q", "build", "--force", "--mksquashfs-args", f"-comp {compressor}"]
    subprocess.run([*build, folder / "base.sif", tree], check=True)
    definition = "Bootstrap: localimage\nFrom: ./base.sif\n"
    (folder / "images/ground.def").write_text(definition)
    recipe_folder.top("ground")
    store = workspace.folder("store")
    cli.run("--store", store, "image", folder, "--format", "sif", "--no-verify", "-o", store / "one.sif", cwd=folder)
    subprocess.run([*build, store / "apptainer.sif", folder / "images/ground.def"], check=True, cwd=folder)
    built = files_of(store / "one.sif")
    assert built == files_of(store / "apptainer.sif")
    assert built["etc/keep"][3] == b"kept\n"
    # An image of Ekiben's, of several partitions, is a base, too.
    (store / "one.sif").rename(folder / "base.sif")
    cli.run("--store", store, "image", folder, "--format", "sif", "--no-verify", "-o", store / "two.sif", cwd=folder)
    assert files_of(store / "two.sif") == built
