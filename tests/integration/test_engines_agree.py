"""Whatever a %post does to the layers below, every engine makes the same layer of it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from conftest import ME, Cli, Engine, NewStore, RecipeFolder, Room

from builder.layer import tar_stream
from builder.squashfs import SquashfsReader

pytestmark = pytest.mark.slow

# What the layer below leaves for the one above to change. printf, since /bin/sh's echo differs.
LOWER = r"""
umask 022
mkdir -p /opt/n/gone/deep/deeper /opt/n/anew/inner /opt/n/renamed/sub /opt/n/deep/a/b/c /opt/n/emptied /opt/n/touched
for path in gone/file gone/deep/file gone/deep/deeper/file anew/one anew/two anew/three anew/inner/file renamed/file \
    renamed/sub/file deep/a/b/c/file deep/a/b/c/other emptied/file touched/file keep file-to-dir file-to-link \
    file-to-pipe owned mode removed hard-below "$(printf 'caf\351')"; do
    printf '%s\n' "$path" >"/opt/n/$path"
done
mkdir -p /opt/n/dir-to-file/sub /opt/n/dir-to-link/sub
printf 'x' >/opt/n/dir-to-file/sub/file
printf 'x' >/opt/n/dir-to-link/file
ln -s keep /opt/n/link
ln -s anew /opt/n/link-to-dir
ln /opt/n/hard-below /opt/n/hard-below-2
"""

CHANGES = r"""
umask 022
# Packages: a group of its own and a setgid program; alternatives.
apt-get update
apt-get install -y --no-install-recommends plocate netcat-openbsd
useradd --system --no-create-home --uid 321 porter
cd /opt/n
rm -r gone removed
rm -r anew; mkdir -m 750 anew; printf 'new\n' >anew/two; printf 'four\n' >anew/four
rm file-to-dir; mkdir file-to-dir; printf 'x\n' >file-to-dir/inside
rm -r dir-to-file; printf 'now a file\n' >dir-to-file
rm file-to-link; ln -s /opt/n/keep file-to-link
rm -r dir-to-link; ln -s anew dir-to-link
rm file-to-pipe; mkfifo -m 600 file-to-pipe
rm link link-to-dir; ln -s nowhere link; mkdir link-to-dir
mv renamed moved; printf 'x\n' >moved/sub/more
rm deep/a/b/c/file
rm emptied/file
mkdir -p empty/in/empty; mkdir -m 1777 sticky; mkdir -m 2775 setgid; mkdir -m 700 closed; printf 'x' >closed/file
printf '#!/bin/sh\n' >setuid; chmod 4755 setuid
printf 'x' >numbers; chown 12345:54321 numbers
chown 1000:1000 owned; chmod 600 mode
chown 7:8 touched; chmod 711 deep/a
touch keep
printf 'x' >hard-1; ln hard-1 hard-2; mkdir -p zz; ln hard-1 zz/hard-3; ln -s hard-1 zz/link
printf 'more\n' >>hard-below
rm "$(printf 'caf\351')"; printf 'x' >"$(printf 'na\357ve')"; mkdir "$(printf 'dir\377')"; printf 'x' >"$(printf 'dir\377')/f"
printf 'x' >'with space'; printf 'x' >"$(printf 'new\nline')"; printf 'x' >'back\slash'; printf 'x' >'.wh'
printf 'x' >"$(printf 'long%0250d' 0)"; mkdir came-and-went; rmdir came-and-went
printf 'x' >sparse; truncate -s 3M sparse; : >nothing
rm -r /usr/share/perl5/Debconf/Element/Teletype
rm -r /etc/skel; mkdir /etc/skel; printf 'x' >/etc/skel/.profile
printf 'x' >/var/log/noise; printf 'x' >/tmp/noise; printf 'x' >/run/noise; printf 'x' >/root/.bash_history
"""

diff_ids: dict[str, dict[str, str]] = {}  # engine → layer → diff_id, filled by the tests as they run


@pytest.fixture
def nasty(own_recipe: RecipeFolder) -> Path:
    own_recipe.layer("lower", "base", LOWER)
    own_recipe.layer("changed", "lower", CHANGES)
    own_recipe.layer("above", "changed", "rm -r /opt/n/moved; mkdir -p /opt/n/moved/sub; rm /opt/n/anew/four; printf x >>/opt/n/keep")
    own_recipe.top("above")
    return own_recipe.path


def test_the_same_layers_under_every_engine(
    engine: Engine, nasty: Path, room: Room, new_store: NewStore
) -> None:
    store = new_store(engine.user, "base")
    cli = Cli(room, engine.user)
    cwd = room.folder("out", engine.user)
    made = cli.image(store, nasty, "--engine", engine.name, "--format", "sif", "--no-verify", cwd=cwd)
    assert made["built"] == ["lower", "changed", "above", "own"]
    layers = {layer["name"]: layer["diff_id"] for layer in made["layers"]}
    changed = next(layer for layer in made["layers"] if layer["name"] == "changed")
    names = check_changes(store / "blobs/sha256" / changed["digest"][7:], changed["diff_id"])
    diff_ids[str(engine)] = layers
    first, expected = next(iter(diff_ids.items()))
    assert layers == expected, f"{engine} and {first} differ"
    assert not list((store / "staging").iterdir())
    assert names
