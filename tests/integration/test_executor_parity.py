"""Whatever a %post does to the layers below, every engine makes the same layer of it."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.tar import tar_stream
from workspaces import Cli, Engine, NewStore, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/executors", "ekiben/formats")

Listing = dict[str, tuple[object, ...]]

# Not here, for engines do differ: a file of several names in a layer below that is written to in place. fuse-overlayfs,
# which Apptainer uses without root, takes one name for another then: see test_a_file_of_several_names.

# setxattr(2) by its number, for perl is in every Debian: attribute PATH NAME VALUE-IN-HEX.
ATTRIBUTE = r"""
attribute() {
    perl -e 'my ($path, $name, $value) = @ARGV; $value = pack("H*", $value);
             syscall(`uname -m` =~ /x86/ ? 188 : 5, $path, $name, $value, length $value, 0) == 0
                 or die "$path: $!\n"' "$@"
}
"""
CAPABILITY = "01000002c0200000000000000000000000000000"  # cap_setuid, cap_setgid, cap_net_raw=ep

# What the layer below leaves for the one above to change. printf, since /bin/sh's echo differs.
LOWER = (
    ATTRIBUTE
    + r"""
umask 022
mkdir -p /opt/n/x/kept; printf 'x' >/opt/n/x/noted
attribute /opt/n/x/noted user.note 00ff0a3d; attribute /opt/n/x/kept user.note 666f6c646572
"""
    + r"""
mkdir -p /opt/n/gone/deep/deeper /opt/n/anew/inner /opt/n/renamed/sub /opt/n/deep/a/b/c /opt/n/emptied /opt/n/touched
for path in gone/file gone/deep/file gone/deep/deeper/file anew/one anew/two anew/three anew/inner/file renamed/file \
    renamed/sub/file deep/a/b/c/file deep/a/b/c/other emptied/file touched/file keep file-to-dir file-to-link \
    file-to-pipe owned mode removed "$(printf 'caf\351')"; do
    printf '%s\n' "$path" >"/opt/n/$path"
done
mkdir -p /opt/n/dir-to-file/sub /opt/n/dir-to-link/sub
printf 'x' >/opt/n/dir-to-file/sub/file
printf 'x' >/opt/n/dir-to-link/file
for name in "$(printf 'lines\nfolder')" "$(printf 'sep\342\200\250folder')" "$(printf 'bytes\376folder')" lines sep; do
    mkdir "/opt/n/$name"; printf 'x' >"/opt/n/$name/old"
done
mkdir -m 2775 /opt/n/group
ln -s keep /opt/n/link
ln -s anew /opt/n/link-to-dir
"""
)

CHANGES = (
    ATTRIBUTE
    + rf"""
umask 022
ln -sf /usr/share/zoneinfo/Asia/Tokyo /etc/localtime
cd /opt/n/x; printf 'x' >>noted; printf 'x' >kept/new
printf 'x' >pinged; attribute $PWD/pinged security.capability {CAPABILITY}; attribute $PWD/pinged user.empty ''
mkdir marked; attribute $PWD/marked user.note 31
"""
    + r"""
# Packages: a group of its own and a setgid program; alternatives.
apt-get update
apt-get install -y --no-install-recommends plocate netcat-openbsd
useradd --system --no-create-home --uid 321 porter
cd /opt/n
rm -r gone removed
rm -r anew; mkdir -m 750 anew; printf 'new\n' >anew/two; printf 'four\n' >anew/four
for name in "$(printf 'lines\nfolder')" "$(printf 'sep\342\200\250folder')" "$(printf 'bytes\376folder')"; do
    rm -r "$name"; mkdir "$name"; printf 'x' >"$name/new"
done
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
mkfifo -m 600 zz/pipe; ln zz/pipe zz/pipe-too; printf 'x' >group/file
rm "$(printf 'caf\351')"; printf 'x' >"$(printf 'na\357ve')"
mkdir "$(printf 'dir\377')"; printf 'x' >"$(printf 'dir\377')/f"
printf 'x' >'with space'; printf 'x' >"$(printf 'new\nline')"; printf 'x' >'back\slash'; printf 'x' >'.wh'
printf 'x' >"$(printf 'long%0240d' 0)"; mkdir came-and-went; rmdir came-and-went
printf 'x' >sparse; truncate -s 3M sparse; : >nothing
rm -r /usr/share/perl5/Debconf/Element/Teletype
rm -r /etc/skel; mkdir /etc/skel; printf 'x' >/etc/skel/.profile
printf 'x' >/var/log/noise; printf 'x' >/tmp/noise; printf 'x' >/run/noise; printf 'x' >/root/.bash_history
"""
)

# What the engine shows of all layers below goes into a file, and so into the comparison.
ABOVE = r"""
cd /opt/n
find . -type d -printf '%p %m %U %G\n' -o -printf '%p %m %U %G %y %s %l\n' | LC_ALL=C sort >/opt/seen
test "$(cat anew/two)" = new
rm -r moved; mkdir -p moved/sub
rm anew/four
printf x >>keep
"""

# engine → layer → its diff_id and what the tar holds; filled by the tests as they run
seen: dict[str, dict[str, tuple[str, Listing]]] = {}


@pytest.fixture
def nasty(recipe_folder: RecipeFolder) -> Path:
    recipe_folder.layer("lower", "base", LOWER)
    recipe_folder.layer("changed", "lower", CHANGES)
    recipe_folder.layer("above", "changed", ABOVE)
    recipe_folder.top("above")
    return recipe_folder.path


@pytest.mark.guard
def test_engines_build_the_same_layers(engine: Engine, nasty: Path, workspace: Workspace, new_store: NewStore) -> None:
    store = new_store(engine.user, "base")
    cli = Cli(workspace, engine.user)
    cwd = workspace.folder("out", engine.user)
    made = cli.image(store, nasty, "--engine", engine.name, "--format", "sif", "--squash", "--no-verify", cwd=cwd)
    assert made["built"] == ["lower", "changed", "above", "own"]
    layers = {layer["name"]: (layer["diff_id"], read_layer(store, layer)) for layer in made["layers"]}
    check_changes(layers["changed"][1])
    seen[str(engine)] = layers
    first, expected = next(iter(seen.items()))
    for name, (diff_id, listing) in layers.items():
        differing = {
            path: (listing.get(path), expected[name][1].get(path))
            for path in listing | expected[name][1]
            if listing.get(path) != expected[name][1].get(path)
        }
        assert not differing, f"layer {name}: {engine} and {first} differ"
        assert diff_id == expected[name][0]
    assert not list((store / "staging").iterdir())


# What the layer `changed` holds below /opt/n: kind, mode, owner, and a link's target or a file's size.
EXPECTED = {
    "": ("dir", 0o755, "0:0"),
    ".wh": ("file", 0o644, "0:0", 1),
    "anew": ("dir", 0o750, "0:0"),
    "anew/four": ("file", 0o644, "0:0", 5),
    "anew/inner": ("whiteout",),
    "anew/one": ("whiteout",),
    "anew/three": ("whiteout",),
    "anew/two": ("file", 0o644, "0:0", 4),
    "back\\slash": ("file", 0o644, "0:0", 1),
    "caf\udce9": ("whiteout",),
    "closed": ("dir", 0o700, "0:0"),
    "closed/file": ("file", 0o644, "0:0", 1),
    "deep": ("dir", 0o755, "0:0"),
    "deep/a": ("dir", 0o711, "0:0"),
    "deep/a/b": ("dir", 0o755, "0:0"),
    "deep/a/b/c": ("dir", 0o755, "0:0"),
    "deep/a/b/c/file": ("whiteout",),
    "dir-to-file": ("file", 0o644, "0:0", 11),
    "dir-to-link": ("symlink", 0o777, "0:0", "anew"),
    "dir\udcff": ("dir", 0o755, "0:0"),
    "dir\udcff/f": ("file", 0o644, "0:0", 1),
    "emptied": ("dir", 0o755, "0:0"),
    "emptied/file": ("whiteout",),
    "empty": ("dir", 0o755, "0:0"),
    "empty/in": ("dir", 0o755, "0:0"),
    "empty/in/empty": ("dir", 0o755, "0:0"),
    "file-to-dir": ("dir", 0o755, "0:0"),
    "file-to-dir/inside": ("file", 0o644, "0:0", 2),
    "file-to-link": ("symlink", 0o777, "0:0", "/opt/n/keep"),
    "file-to-pipe": ("fifo", 0o600, "0:0"),
    "gone": ("whiteout",),
    "group": ("dir", 0o2775, "0:0"),
    "group/file": ("file", 0o644, "0:0", 1),
    "hard-1": ("file", 0o644, "0:0", 1),
    "hard-2": ("hardlink", 0o644, "0:0", "opt/n/hard-1"),
    **{f"{name}folder": ("dir", 0o755, "0:0") for name in ("lines\n", "sep\u2028", "bytes\udcfe")},
    **{f"{name}folder/new": ("file", 0o644, "0:0", 1) for name in ("lines\n", "sep\u2028", "bytes\udcfe")},
    **{f"{name}folder/old": ("whiteout",) for name in ("lines\n", "sep\u2028", "bytes\udcfe")},
    "link": ("symlink", 0o777, "0:0", "nowhere"),
    "link-to-dir": ("dir", 0o755, "0:0"),
    "long" + "0" * 240: ("file", 0o644, "0:0", 1),
    "mode": ("file", 0o600, "0:0", 5),
    "moved": ("dir", 0o755, "0:0"),
    "moved/file": ("file", 0o644, "0:0", 13),
    "moved/sub": ("dir", 0o755, "0:0"),
    "moved/sub/file": ("file", 0o644, "0:0", 17),
    "moved/sub/more": ("file", 0o644, "0:0", 2),
    "na\udcefve": ("file", 0o644, "0:0", 1),
    "new\nline": ("file", 0o644, "0:0", 1),
    "nothing": ("file", 0o644, "0:0", 0),
    "numbers": ("file", 0o644, "12345:54321", 1),
    "owned": ("file", 0o644, "1000:1000", 6),
    "removed": ("whiteout",),
    "renamed": ("whiteout",),
    "setgid": ("dir", 0o2775, "0:0"),
    "setuid": ("file", 0o4755, "0:0", 10),
    "sparse": ("file", 0o644, "0:0", 3 << 20),
    "sticky": ("dir", 0o1777, "0:0"),
    "touched": ("dir", 0o755, "7:8"),
    "with space": ("file", 0o644, "0:0", 1),
    "x": ("dir", 0o755, "0:0"),
    "x/kept": ("dir", 0o755, "0:0"),
    "x/kept/new": ("file", 0o644, "0:0", 1),
    "x/marked": ("dir", 0o755, "0:0"),
    "x/noted": ("file", 0o644, "0:0", 2),
    "x/pinged": ("file", 0o644, "0:0", 1),
    "zz": ("dir", 0o755, "0:0"),
    "zz/hard-3": ("hardlink", 0o644, "0:0", "opt/n/hard-1"),
    "zz/pipe": ("fifo", 0o600, "0:0"),
    "zz/pipe-too": ("fifo", 0o600, "0:0"),
    "zz/link": ("symlink", 0o777, "0:0", "hard-1"),
}


def show(tar: tarfile.TarFile, info: tarfile.TarInfo) -> tuple[object, ...]:
    owner = f"{info.uid}:{info.gid}"
    attributes = {
        name.removeprefix("SCHILY.xattr."): os.fsencode(value).hex()
        for name, value in info.pax_headers.items()
        if name.startswith("SCHILY.xattr.")
    }
    if info.isfile():
        stream = tar.extractfile(info)
        assert stream is not None
        return "file", info.mode, owner, info.size, hashlib.sha256(stream.read()).hexdigest(), info.mtime, attributes
    if info.issym() or info.islnk():
        return "symlink" if info.issym() else "hardlink", info.mode, owner, info.linkname
    return (
        ("dir", info.mode, owner, attributes) if info.isdir() else ("fifo" if info.isfifo() else "?", info.mode, owner)
    )


def read_layer(store: Path, layer: dict[str, str]) -> Listing:
    """A layer's tar, as Docker and others get it: its paths, and what each is."""
    with (store / "blobs/sha256" / layer["digest"][7:]).open("rb") as stream:
        data = b"".join(tar_stream(SquashfsReader(stream).contents()))
    assert "sha256:" + hashlib.sha256(data).hexdigest() == layer["diff_id"]
    found: Listing = {}
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        for info in tar:
            head, _, name = info.name.rpartition("/")
            removed = name.startswith(".wh.")
            found[f"{head}/{name[4:]}" if removed else info.name] = ("whiteout",) if removed else show(tar, info)
    return found


def check_changes(listing: Listing) -> None:
    ours = {
        path.removeprefix("opt/n").strip("/"): value
        for path, value in listing.items()
        if (path + "/").startswith("opt/n/")
    }
    ours = {path: value[: 3 if value[0] == "dir" else 4] for path, value in ours.items() if path not in UNDECIDED}
    assert ours == EXPECTED
    assert listing["usr/bin/plocate"][:2] == ("file", 0o2755)
    assert listing["etc/alternatives/nc"] == ("symlink", 0o777, "0:0", "/bin/nc.openbsd")
    assert listing["usr/share/perl5/Debconf/Element/Teletype"] == ("whiteout",)
    assert listing["etc/skel/.bashrc"] == ("whiteout",)
    assert {path: listing[f"opt/n/x/{path}"][-1] for path in ("noted", "pinged")} == {
        "noted": {"user.note": "00ff0a3d"},
        "pinged": {"security.capability": CAPABILITY, "user.empty": ""},
    }
    assert (listing["opt/n/x/kept"][-1], listing["opt/n/x/marked"][-1]) == (
        {"user.note": "666f6c646572"},
        {"user.note": "31"},
    )
    assert listing["etc/localtime"] == ("symlink", 0o777, "0:0", "/usr/share/zoneinfo/Asia/Tokyo")
    assert not [path for path in listing if path.startswith(("var/log/", "tmp/", "run/", "root/"))]


# A file touched without a change of its content: an overlay copies it up, and its time is clamped.
UNDECIDED = {"keep"}
