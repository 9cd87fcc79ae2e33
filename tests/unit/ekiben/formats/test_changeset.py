"""What a script changed, as every kind of overlay tells it, becomes the same members; applied, they give the merged
tree.
"""

from __future__ import annotations

import errno
import io
import os
import random
import socket
import tarfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import LayerError
from ekiben.formats.changeset import (
    PLACEHOLDERS,
    Lower,
    OverlayError,
    file_entries,
    is_excluded,
    normalize,
    refuse_total_removal,
    unordered_entries,
)
from ekiben.formats.layer import Entry, File, Xattrs, write_entries
from ekiben.formats.left_out import LeftOut
from ekiben.formats.tar import DigestWriter
from ekiben.formats.upper import Changes
from ekiben.formats.xattrs import content_xattrs
from support.changesets import (
    BASE,
    CAPABILITY,
    EPOCH,
    SHAPES,
    XATTRS,
    Content,
    Layers,
    Tree,
    Upper,
    d,
    docker,
    drained,
    f,
    files,
    in_order,
    link,
    oci,
    overlayfs,
    same_in_all_shapes,
    sent,
    tar,
    tar_info,
    tree,
)


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    with ExitStack() as stack:
        yield Layers(tmp_path, stack)


# ------------------------------------------------------------------------- an upper directory, and how overlays keep it


def short(members: Iterable[Content]) -> list[str]:
    signs = {"dir": "/", "whiteout": " gone", "symlink": "@", "hardlink": "=", "file": "", "fifo": "|"}
    return [entry.path + signs[entry.kind] for entry, _ in members if entry.path]


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    (tmp_path / "upper").mkdir()
    return tmp_path / "upper"


@pytest.fixture
def base(layers: Layers) -> Layers:
    layers.push(sent(BASE))
    return layers


CASES: dict[str, tuple[Upper, list[str]]] = {
    "nothing": (Upper(), []),
    "folders that were only passed through": (Upper(tree(BASE["etc"], BASE["opt"], BASE["opt/a"])), []),
    "a new file": (Upper(tree(BASE["opt"], BASE["opt/a"], f("opt/a/new", b"n"))), ["opt/", "opt/a/", "opt/a/new"]),
    "a new folder, empty": (Upper(tree(BASE["opt"], d("opt/new"))), ["opt/", "opt/new/"]),
    "a folder's mode": (Upper(tree(d("etc", 0o700))), ["etc/"]),
    "a folder's owner": (Upper(tree(d("etc", gid=3))), ["etc/"]),
    "a deletion": (Upper(tree(BASE["etc"]), {"etc/conf"}), ["etc/", "etc/conf gone"]),
    "a folder's deletion": (Upper(tree(BASE["opt"]), {"opt/a"}), ["opt/", "opt/a gone"]),
    "a deletion at the top": (Upper(tree(), {"bin"}), ["bin gone"]),
    "a deletion of what was not below": (Upper(tree(BASE["etc"]), {"etc/never"}), []),
    "a file in a folder's place": (Upper(tree(BASE["opt"], f("opt/a", b"file"))), ["opt/", "opt/a"]),
    "a folder in a file's place": (
        Upper(tree(BASE["etc"], d("etc/conf"), f("etc/conf/x")), set(), {"etc/conf"}),
        ["etc/", "etc/conf/", "etc/conf/x"],
    ),
    "a link in a folder's place": (Upper(tree(BASE["opt"], link("opt/a", "z"))), ["opt/", "opt/a@"]),
    "a folder made again, empty": (
        Upper(tree(BASE["opt"], BASE["opt/a"]), set(), {"opt/a"}),
        ["opt/", "opt/a/", "opt/a/b gone", "opt/a/x gone"],
    ),
    "a folder made again with one of its files": (
        Upper(tree(BASE["opt"], BASE["opt/a"], f("opt/a/x", b"new")), set(), {"opt/a"}),
        ["opt/", "opt/a/", "opt/a/b gone", "opt/a/x"],
    ),
    "a folder in it made again, too": (
        Upper(tree(BASE["opt"], BASE["opt/a"], BASE["opt/a/b"], f("opt/a/b/d")), set(), {"opt/a"}),
        ["opt/", "opt/a/", "opt/a/b/", "opt/a/b/c gone", "opt/a/b/d", "opt/a/x gone"],
    ),
    "a file in it in a folder's place": (
        Upper(tree(BASE["opt"], BASE["opt/a"], f("opt/a/b", b"b")), set(), {"opt/a"}),
        ["opt/", "opt/a/", "opt/a/b", "opt/a/x gone"],
    ),
    "a whiteout in a folder made again": (
        Upper(tree(BASE["opt"], BASE["opt/a"]), {"opt/a/x"}, {"opt/a"}),
        ["opt/", "opt/a/", "opt/a/b gone", "opt/a/x gone"],
    ),
    "noise": (
        Upper(
            tree(
                d("tmp"),
                f("tmp/x"),
                d("var"),
                d("var/log"),
                f("var/log/apt.log"),
                BASE["etc"],
                f("etc/resolv.conf"),
                f("etc/machine-id"),
            )
        ),
        ["tmp/", "var/", "var/log/"],
    ),
    "noise that is deleted": (Upper(tree(BASE["etc"]), {"etc/hostname", "etc/.pwd.lock"}), []),
}


@pytest.mark.parametrize("name", CASES)
def test_every_overlay_form_gives_the_same_entries(base: Layers, name: str) -> None:
    upper, expected = CASES[name]
    upper.made.pop("", None)
    assert short(same_in_all_shapes(upper, base.lower)) == expected


def test_normalized_form_of_an_entry(base: Layers) -> None:
    late = replace(f("etc/late", b"x")[0], mtime=EPOCH + 9, mode=0o4755)
    upper = Upper(
        {
            "etc": (replace(BASE["etc"][0], mtime=77), b""),
            "etc/late": (late, b"x"),
            "etc/z": link("etc/z", "/abs/./olute"),
        }
    )
    (root, _), (etc, _), (made, data), (symlink, _) = same_in_all_shapes(upper, base.lower)
    assert root == Entry("", "dir", 0o755, mtime=EPOCH)
    assert etc == BASE["etc"][0]
    assert (made, data) == (replace(late, mtime=EPOCH), b"x")
    assert (symlink.mode, symlink.target) == (0o777, "/abs/./olute")


def test_uv_cache_json_is_excluded(base: Layers) -> None:
    """uv writes when the wheel's file was made, and lists that note in RECORD."""
    info, lines = "site/a-1.dist-info", b"a.py,sha256=x,1\na-1.dist-info/RECORD,,\n"
    note = b"a-1.dist-info/uv_cache.json,sha256=y,127\n"
    plain = Upper(tree(d("site"), d(info), f(f"{info}/RECORD", lines)))
    noted = Upper(tree(d("site"), d(info), f(f"{info}/RECORD", note + lines), f(f"{info}/uv_cache.json", b"{}")))
    assert same_in_all_shapes(noted, base.lower) == same_in_all_shapes(plain, base.lower)
    only = Upper(tree(d("site"), d(info), f(f"{info}/RECORD", note)))
    assert (f(f"{info}/RECORD")[0], b"") in same_in_all_shapes(only, base.lower)


def test_devices_and_sockets_are_excluded(base: Layers) -> None:
    info = tarfile.TarInfo("./etc/device")
    info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
    block = tarfile.TarInfo("./etc/disk")
    block.type = tarfile.BLKTYPE
    archive = tar([(tar_info(BASE["etc"][0]), b""), (info, b""), (block, b"")])
    assert short(drained(normalize(Changes(archive), base.lower, epoch=EPOCH))) == []


def test_sockets_below_a_folder_are_excluded(base: Layers, upper: Path) -> None:
    (upper / "etc").mkdir(0o755)
    os.mkfifo(upper / "etc/pipe")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(upper / "etc/socket"))
        assert short(drained(normalize(Changes(upper), base.lower, epoch=EPOCH))) == ["etc/", "etc/pipe|"]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EIO])
def test_no_xattrs_means_no_opaque_marks(
    base: Layers, upper: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without extended attributes, and one that fails to read them: a mark that was overlooked shows old
    files.
    """

    def fail(upper_dir: str) -> list[str]:
        raise OSError(number, os.strerror(number), upper_dir)

    (upper / "new").mkdir(0o755)
    monkeypatch.setattr(os, "listxattr", fail)
    if number == errno.ENOTSUP:
        assert short(drained(normalize(Changes(upper), base.lower, epoch=EPOCH))) == ["new/"]
    else:
        with pytest.raises(OSError, match="Input/output error"):
            drained(normalize(Changes(upper), base.lower, epoch=EPOCH))


def test_a_tar_that_breaks_off_between_two_files_is_an_error(base: Layers) -> None:
    data = in_order(Upper(made={"a": f("a", b"x"), "b": f("b", b"y")})).getvalue()
    assert short(drained(normalize(Changes(io.BytesIO(data)), base.lower, epoch=EPOCH))) == ["a", "b"]
    with pytest.raises(LayerError, match="is truncated"):
        drained(normalize(Changes(io.BytesIO(data[: 3 * 512])), base.lower, epoch=EPOCH))


def test_a_layer_that_removes_all_below_is_refused(base: Layers) -> None:
    names = set(base.lower.children(""))
    assert len(names) > 1
    whole = drained(normalize(Changes(in_order(Upper(deleted=names))), base.lower, epoch=EPOCH))
    with pytest.raises(LayerError, match="removes all that is in the layers below"):
        drained(refuse_total_removal(((entry, None) for entry, _ in whole), base.lower))
    some = drained(normalize(Changes(in_order(Upper(deleted={*names} - {"usr"}))), base.lower, epoch=EPOCH))
    drained(refuse_total_removal(((entry, None) for entry, _ in some), base.lower))


def test_an_opaque_root_folder_is_refused(base: Layers) -> None:
    with pytest.raises(LayerError, match="all of the layers below was removed"):
        normalize(Changes(in_order(Upper()), opaque={""}), base.lower, epoch=EPOCH)


class TestTimeZone:
    def zone(self, name: str) -> Upper:
        files = tree(d("etc"), link("etc/localtime", f"/usr/share/zoneinfo/{name}"))
        return Upper({path: content for path, content in files.items() if path})

    def test_a_time_zone_is_kept(self, base: Layers) -> None:
        members = same_in_all_shapes(self.zone("Asia/Tokyo"), base.lower)
        assert [entry.target for entry, _ in members if entry.path == "etc/localtime"] == [
            "/usr/share/zoneinfo/Asia/Tokyo"
        ]

    @pytest.mark.parametrize("name", ["Etc/UTC", "UTC"])
    def test_utc_is_what_no_time_zone_means(self, base: Layers, name: str) -> None:
        assert "etc/localtime@" not in short(same_in_all_shapes(self.zone(name), base.lower))

    def test_utc_replaces_another_time_zone(self, base: Layers) -> None:
        base.push(sent(tree(d("etc"), link("etc/localtime", "/usr/share/zoneinfo/Asia/Tokyo"))))
        assert "etc/localtime@" in short(same_in_all_shapes(self.zone("Etc/UTC"), base.lower))


class TestXattrs:
    def upper(self, xattrs: Xattrs = XATTRS) -> Upper:
        files = tree(replace_entry(d("usr"), xattrs=xattrs), replace_entry(f("usr/ping", b"x"), xattrs=xattrs))
        return Upper({path: content for path, content in files.items() if path})

    def test_capabilities_and_those_of_users_are_kept(self, base: Layers) -> None:
        members = same_in_all_shapes(self.upper(), base.lower)
        assert {entry.path: entry.xattrs for entry, _ in members} == {"": (), "usr": XATTRS, "usr/ping": XATTRS}

    def test_a_file_that_was_copied_up_with_them_is_left_out(self, base: Layers) -> None:
        members = same_in_all_shapes(self.upper(), base.lower)
        base.push(sent({entry.path: (entry, data) for entry, data in members}))
        assert short(same_in_all_shapes(self.upper(), base.lower)) == []
        assert "usr/ping" in short(same_in_all_shapes(self.upper(XATTRS[:1]), base.lower))

    def test_the_namespace_that_set_a_capability_does_not_count(self) -> None:
        of_a_namespace = bytes.fromhex("01000003") + CAPABILITY[4:] + (100_000).to_bytes(4, "little")
        assert content_xattrs([("security.capability", of_a_namespace)]) == (("security.capability", CAPABILITY),)

    @pytest.mark.parametrize(
        "name",
        [
            "trusted.overlay.opaque",
            "user.overlay.opaque",
            "user.fuseoverlayfs.origin",
            "user.containers.override_stat",
            "security.selinux",
            "system.posix_acl_access",
        ],
    )
    def test_what_is_no_content(self, name: str) -> None:
        assert content_xattrs([(name, b"y")]) == ()

    @pytest.mark.parametrize("name", ["user.a=b", "user.a%3Db"])
    def test_a_name_that_tools_write_in_different_ways_is_refused(self, base: Layers, upper: Path, name: str) -> None:
        (upper / "x").write_bytes(b"x")
        os.setxattr(upper / "x", name, b"1")
        with pytest.raises(LayerError, match=r"/x: the extended attribute 'user.a.*b' cannot be stored"):
            drained(normalize(Changes(upper), base.lower, epoch=EPOCH))

    def test_a_registrys_layer_that_names_a_file_alone_keeps_those_of_its_folders(self, base: Layers) -> None:
        base.push(sent({"": d(""), **self.upper().made}))
        members = drained(
            unordered_entries(tar([(tar_info(f("usr/new")[0]), b"")]), io.BytesIO(), base.lower, epoch=EPOCH)
        )
        assert next(entry.xattrs for entry, _ in members if entry.path == "usr") == XATTRS


def replace_entry(content: Content, **fields: Any) -> Content:
    return replace(content[0], **fields), content[1]


class TestSharedNames:
    """fuse-overlayfs marks what it copied up with the path that it had."""

    @pytest.fixture
    def lower(self, layers: Layers) -> Lower:
        layers.push(
            sent(tree(f("a", b"old"), (Entry("b", "hardlink", 0o644, mtime=5, target="a"), b""), f("c", b"old")))
        )
        return layers.lower

    def copied(self, path: str, origin: str, data: bytes, mode: int = 0o644) -> io.BytesIO:
        info = tar_info(f(path, data, mode)[0])
        info.pax_headers["SCHILY.xattr.user.fuseoverlayfs.origin"] = origin + "\0"
        return tar([(tar_info(d("")[0]), b""), (info, data)])

    @pytest.mark.parametrize(
        ("path", "origin", "data", "mode"),
        [("a", "a", b"new", 0o644), ("b", "b", b"old", 0o600), ("new", "b", b"new", 0o644)],
    )
    def test_a_changed_file_of_several_names_is_refused(
        self, lower: Lower, path: str, origin: str, data: bytes, mode: int
    ) -> None:
        with pytest.raises(OverlayError, match=f"/{origin} is one of several names"):
            drained(normalize(Changes(self.copied(path, origin, data, mode)), lower, epoch=EPOCH))

    @pytest.mark.parametrize(("path", "origin", "data"), [("a", "a", b"old"), ("new", "b", b"old"), ("c", "c", b"new")])
    def test_unchanged_and_single_names_are_kept(self, lower: Lower, path: str, origin: str, data: bytes) -> None:
        members = drained(normalize(Changes(self.copied(path, origin, data)), lower, epoch=EPOCH))
        assert [entry.path for entry, _ in members][1:] == ([] if (path, data) == ("a", b"old") else [path])

    @pytest.mark.parametrize("path", ["pipe", "renamed"])
    def test_a_fifo_that_became_a_file_is_refused(self, layers: Layers, path: str) -> None:
        layers.push(sent(tree((Entry("pipe", "fifo", 0o644, mtime=5), b""))))
        with pytest.raises(
            OverlayError, match=f"/{path} was a FIFO in a layer below, /pipe: fuse-overlayfs made it an empty file"
        ):
            drained(normalize(Changes(self.copied(path, "pipe", b"")), layers.lower, epoch=EPOCH))


@pytest.mark.parametrize("path", ["etc/.wh.x", ".wh.y"])
def test_a_name_that_docker_takes_for_a_removal_is_refused(base: Layers, path: str) -> None:
    upper = Upper({name: content for name, content in tree(d("etc"), f(path, b"x")).items() if name})
    for shape in ("overlayfs", "docker"):
        with pytest.raises(LayerError, match=r"begins with \.wh\."):
            drained(SHAPES[shape](upper, base.lower))
    with pytest.raises(LayerError, match=r"begins with \.wh\."):
        files(base, f"/{path}")


def test_two_names_of_a_fifo_are_two_fifos_in_every_form(base: Layers, tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.mkdir()
    os.mkfifo(up / "a", 0o600)
    os.link(up / "a", up / "b")
    os.utime(up / "a", (5, 5))
    as_folder = drained(normalize(Changes(up), base.lower, epoch=EPOCH))
    infos = [(tar_info(Entry("", "dir")), b""), (tar_info(Entry("a", "fifo", 0o600, mtime=5)), b"")]
    for second in (Entry("b", "fifo", 0o600, mtime=5), Entry("b", "hardlink", 0o600, mtime=5, target="./a")):
        other = drained(normalize(Changes(tar([*infos, (tar_info(second), b"")])), base.lower, epoch=EPOCH))
        assert [(e.path, e.kind, e.mode) for e, _ in other] == [
            ("", "dir", 0o755),
            ("a", "fifo", 0o600),
            ("b", "fifo", 0o600),
        ]
    assert [(e.path, e.kind, e.mode, e.mtime) for e, _ in as_folder][1:] == [
        ("a", "fifo", 0o600, 5),
        ("b", "fifo", 0o600, 5),
    ]


def test_a_folder_that_fuse_overlayfs_gave_no_group_is_refused(base: Layers) -> None:
    parent, inside = d("g", 0o2755, gid=42), (replace(f("g/s/x", b"x")[0], gid=42), b"x")
    for child, is_fuse, is_refused in (
        (d("g/s"), True, True),
        (d("g/s", 0o2755), True, True),
        (d("g/s", 0o2755, gid=42), True, False),
        (d("g/s"), False, False),
    ):
        archive = tar(
            [(tar_info(Entry("", "dir")), b""), *((tar_info(entry), data) for entry, data in (parent, child, inside))]
        )
        entries = normalize(Changes(archive, is_fuse=is_fuse), base.lower, epoch=EPOCH)
        if is_refused:
            with pytest.raises(OverlayError, match=r"/g/s was made in a folder that is setgid, and has not its group"):
                drained(entries)
        else:
            assert "g/s" in [entry.path for entry, _ in drained(entries)]


@pytest.mark.parametrize("mode", [0o2755, 0o4755, 0o6755])
def test_a_folder_that_fuse_overlayfs_copied_up_gets_its_bits_back(layers: Layers, mode: int) -> None:
    layers.push(sent(tree(d("g", mode), d("plain"))))
    members = [(Entry("", "dir"), b""), d("g"), d("plain"), f("plain/x", b"x")]
    for is_fuse, expected in ((True, {"plain": 0o755}), (False, {"g": 0o755, "plain": 0o755})):
        archive = tar([(tar_info(entry), data or b"") for entry, data in members])
        entries = drained(normalize(Changes(archive, is_fuse=is_fuse), layers.lower, epoch=EPOCH))
        assert {entry.path: entry.mode for entry, _ in entries if entry.kind == "dir" and entry.path} | {
            "plain": 0o755
        } == expected


def test_many_exclusions_of_one_kind_are_one_line() -> None:
    left = LeftOut()
    for number in range(9):
        left.add(f"var/log/{number}")
    assert left.lines() == [
        "left out: /var/log/0, /var/log/1, /var/log/2 and 6 more (logs, caches and locks that differ from run to run)"
    ]


def test_nothing_is_reported_without_exclusions(base: Layers) -> None:
    left = LeftOut()
    upper = Upper(made={"a": f("a", b"x")}, deleted={"etc"})
    drained(normalize(Changes(in_order(upper)), base.lower, epoch=EPOCH, left_out=left))
    assert left.lines() == []


def test_a_file_that_ends_early_is_an_error(base: Layers, upper: Path) -> None:
    (upper / "new").write_bytes(b"12345")
    root, (entry, chunks) = normalize(Changes(upper), base.lower, epoch=EPOCH)
    (upper / "new").write_bytes(b"123")
    with pytest.raises(ValueError, match="'new' changed while it was read: \\+2 bytes of 5 left"):
        write_entries([root, (entry, chunks)], DigestWriter())


def test_a_recreated_folder_in_a_registrys_layer_hides_the_old_one(base: Layers) -> None:
    """.wh.a beside a/: deleted, and made again in the same layer."""
    archive = tar(
        [(tarfile.TarInfo("opt/.wh.a"), b""), (tar_info(d("opt/a")[0], ""), b""), (tar_info(f("opt/a/n")[0], ""), b"")]
    )
    members = drained(unordered_entries(archive, io.BytesIO(), base.lower, epoch=EPOCH))
    assert short(members) == ["opt/", "opt/a/", "opt/a/b gone", "opt/a/n", "opt/a/x gone"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("opt/a/.wh.x", ["opt/", "opt/a/", "opt/a/x gone"]),
        ("opt/a/.wh..wh..opq", ["opt/", "opt/a/", "opt/a/b gone", "opt/a/x gone"]),
        (".wh..wh..opq", ["bin gone", "etc gone", "opt gone", "usr gone"]),
        (".wh.etc", ["etc gone"]),
    ],
)
def test_registry_layer_may_delete_without_naming_the_folder(base: Layers, name: str, expected: list[str]) -> None:
    members = drained(unordered_entries(tar([(tarfile.TarInfo(name), b"")]), io.BytesIO(), base.lower, epoch=EPOCH))
    assert short(members) == expected
    assert all(BASE[entry.path][0] == entry for entry, _ in members if entry.kind == "dir" and entry.path)


class TestHardLinks:
    def test_first_hard_link_name_is_the_file_in_any_archive_order(self, base: Layers) -> None:
        made = tree(BASE["usr"], BASE["usr/bin"], f("usr/bin/c", b"data", 0o644))
        del made[""]
        for links in (
            {"usr/bin/d": "usr/bin/c", "usr/bin/e": "usr/bin/c"},
            {"usr/bin/a": "usr/bin/c", "usr/bin/b": "usr/bin/c"},
        ):
            members = drained(oci(Upper(made, links=links), base.lower))
            first, *others = sorted(["usr/bin/c", *links])
            assert short(members) == ["usr/", "usr/bin/", first, *(f"{name}=" for name in others)]
            assert [entry.target for entry, _ in members if entry.kind == "hardlink"] == [first, first]
            assert next(data for entry, data in members if entry.path == first) == b"data"

    def test_hard_links_of_an_ordered_archive(self, base: Layers) -> None:
        made = tree(BASE["usr"], BASE["usr/bin"], f("usr/bin/c", b"data"))
        del made[""]
        same_in_all_shapes(Upper(made, links={"usr/bin/d": "usr/bin/c"}), base.lower)

    def test_metadata_of_a_hard_link_entry_is_ignored(self, layers: Layers) -> None:
        """Some tools write links with no mode or time; read back from the squashfs, the tar must be the same."""
        upper = Upper(tree(f("b", b"data", 0o755, 7)), links={"a": "b", "c": "b"})
        del upper.made[""]
        before, after = DigestWriter(), DigestWriter()
        write_entries(oci(upper, layers.lower), before)
        layers.push(oci(upper, layers.lower))
        write_entries(layers.readers[0].contents(), after)
        assert before.diff_id == after.diff_id

    def test_hard_link_to_an_excluded_entry_is_an_error(self, base: Layers) -> None:
        made = tree(d("tmp"), f("tmp/x", b"x"), BASE["usr"])
        del made[""]
        for shape in (overlayfs, docker, oci):
            with pytest.raises(
                LayerError, match=r"/usr/y is a hard link to /tmp/x, which no layer keeps; copy the file"
            ):
                drained(shape(Upper(made, links={"usr/y": "tmp/x"}), base.lower))

    def test_hard_link_out_of_a_registry_layer_is_an_error(self, base: Layers) -> None:
        with pytest.raises(LayerError, match="/usr/y is a hard link to /usr/gone, which the archive does not hold"):
            drained(oci(Upper(links={"usr/y": "usr/gone"}), base.lower))


def test_a_root_file_system_gets_placeholders_for_mounts() -> None:
    archive = tar([(tar_info(d("etc")[0]), b""), (tar_info(f("etc/hostname", b"host")[0]), b"host")])
    members = drained(unordered_entries(archive, io.BytesIO(), Lower([]), epoch=EPOCH, placeholders=True))
    assert short(members) == ["etc/", *sorted(PLACEHOLDERS)]
    assert all(entry.size == 0 for entry, _ in members)


@pytest.mark.parametrize(
    "path",
    [
        "tmp/x",
        "var/log/a/b",
        "etc/resolv.conf",
        "root/.cache",
        "var/lib/dpkg/lock-frontend",
        "run/ekiben/x",
        "proc/1",
        "var/cache/ldconfig/aux-cache",
        ".singularity.d/env/x",
        "a/.wh..wh.plnk",
    ],
)
def test_machine_specific_paths_are_excluded(path: str) -> None:
    assert is_excluded(path)


@pytest.mark.parametrize(
    "path",
    [
        "tmp",
        "var/log",
        "tmpx/a",
        "opt/tmp/x",
        "etc/passwd",
        "home/etc/hosts",
        "usr/dev/x",
        "var/lib/dpkg/status",
        "run",
    ],
)
def test_other_paths_are_kept(path: str) -> None:
    assert not is_excluded(path)


# ---------------------------------------------------------------------------------------------------- any tree at all

NAMES = ["a", "b", "a-b", "a.b", "A", "-rf", "+x", ".c", "é", "a b", ".wh", "\udcff"]


class Script:
    """A random script on a tree: the tree afterwards, and what an overlay's upper directory holds then."""

    def __init__(self, rng: random.Random, before: Tree) -> None:
        self.rng, self.before, self.after, self.upper = rng, before, dict[str, Content](), Upper()
        self.visit("")
        self.after[""] = before[""]

    def children(self, path: str) -> list[str]:
        return [name for name in self.before if name and name.rpartition("/")[0] == path]

    def leaf(self, path: str) -> Content:
        if self.rng.random() < 0.2:
            return link(path, self.rng.choice(["a", "../b", "/abs"]))
        return f(
            path,
            self.rng.randbytes(self.rng.choice([0, 1, 5000])),
            self.rng.choice([0o644, 0o755, 0o4711]),
            self.rng.randrange(99),
        )

    def make(self, path: str, depth: int = 0) -> None:
        """Something new at ``path``, whatever was there."""
        if self.rng.random() < 0.6 or depth > 2:
            self.after[path] = self.upper.made[path] = self.leaf(path)
            return
        self.after[path] = self.upper.made[path] = d(path, self.rng.choice([0o755, 0o700]), uid=self.rng.choice([0, 9]))
        if path in self.before and depth == 0:
            self.upper.opaque.add(path)
        for name in self.rng.sample(NAMES, self.rng.randrange(4)):
            self.make(f"{path}/{name}", depth + 1)

    def keep(self, path: str) -> None:
        for name, content in self.before.items():
            if name == path or name.startswith(path + "/"):
                self.after[name] = content

    def visit(self, path: str) -> bool:
        """Work in a folder that stays; whether something in it changed."""
        changed = False
        for child in self.children(path):
            chance = self.rng.random()
            if chance < 0.15:
                self.upper.deleted.add(child)
            elif chance < 0.35:
                self.make(child)
            elif chance < 0.75 and self.before[child][0].kind == "dir":
                touched = self.visit(child)
                entry = self.before[child][0]
                if self.rng.random() < 0.2:
                    entry = replace(entry, mode=0o711)
                    touched = True
                self.after[child] = entry, b""
                if touched or self.rng.random() < 0.3:
                    self.upper.made[child] = replace(entry, mtime=3), b""
                    changed = True
                continue
            else:
                self.keep(child)
                continue
            changed = True
        for name in self.rng.sample(NAMES, self.rng.randrange(3)):
            child = f"{path}/{name}".lstrip("/")
            if child not in self.before and len(child) < 30:
                self.make(child)
                changed = True
        return changed


def applied(before: Tree, members: Collection[Content]) -> Tree:
    """A model of stacking: a folder on a folder merges, anything else replaces all that was there."""
    after = dict(before)
    for entry, data in members:
        old = after.get(entry.path)
        if entry.kind != "dir" or (old and old[0].kind != "dir"):
            after = {
                path: content
                for path, content in after.items()
                if path != entry.path and not path.startswith(entry.path + "/")
            }
        if entry.kind != "whiteout":
            after[entry.path] = entry, data
    return after


@pytest.mark.parametrize("seed", range(60))
def test_random_changes_of_random_trees(layers: Layers, seed: int) -> None:
    rng = random.Random(seed)
    merged = Script(rng, tree()).after
    for _ in range(5):  # something to begin with
        merged = Script(rng, merged).after
    layers.push(sent(merged))
    for _ in range(3):
        script = Script(rng, merged)
        members = same_in_all_shapes(script.upper, layers.lower)
        assert drained(oci(script.upper, layers.lower, rng)) == members
        assert applied(merged, members) == script.after
        layers.push(sent({entry.path: (entry, data) for entry, data in members}))
        assert layers.merged() == script.after
        for path, content in script.after.items():
            assert layers.lower.lookup(path) == content[0]
        merged = script.after


# ------------------------------------------------------------------------------------------------ layers of files alone


class TestFiles:
    def test_existing_folders_keep_their_metadata(self, base: Layers) -> None:
        members = files(base, "/opt/a/new/file")
        assert short(members) == ["opt/", "opt/a/", "opt/a/new/", "opt/a/new/file"]
        assert members[1] == BASE["opt"]
        assert members[3][0] == Entry("opt/a/new", "dir", 0o755, mtime=EPOCH)

    def test_symlinked_parent_folder_stays_a_link(self, base: Layers) -> None:
        assert short(files(base, "/bin/new")) == ["usr/", "usr/bin/", "usr/bin/new"]

    def test_links_may_be_absolute_climb_and_chain(self, base: Layers) -> None:
        base.push(sent(tree(BASE["usr"], link("usr/one", "../two"), link("two", "/opt/a"))))
        assert short(files(base, "/usr/one/n")) == ["opt/", "opt/a/", "opt/a/n"]

    def test_a_circle_of_links_is_an_error(self, base: Layers) -> None:
        base.push(sent(tree(link("one", "two"), link("two", "one"))))
        with pytest.raises(LayerError, match="/one/n: too many links"):
            files(base, "/one/n")

    def test_a_folder_is_not_replaced_by_a_file(self, base: Layers) -> None:
        with pytest.raises(
            LayerError, match="/opt/a is a folder in the layers below; name the file in it: /opt/a/<name>"
        ):
            files(base, "/opt/a")

    def test_a_file_is_not_replaced_by_a_folder(self, base: Layers) -> None:
        with pytest.raises(LayerError, match="/etc/conf is not a folder in the layers below"):
            files(base, "/etc/conf/x")

    def test_later_of_two_equal_names_wins(self, base: Layers) -> None:
        twice = [File("/etc/n", 0o644, content=b"one"), File("/etc/n", 0o755, content=b"two")]
        assert drained(file_entries(twice, base.lower, epoch=EPOCH))[-1] == f("etc/n", b"two", 0o755, EPOCH)


def test_lower_merges_as_overlayfs_does(layers: Layers) -> None:
    layers.push(sent(BASE))
    gone: Any = {"opt/a": (Entry("opt/a", "whiteout", 0), b"")}
    layers.push(sent({**tree(BASE["opt"]), **gone}))
    layers.push(sent(tree(BASE["opt"], d("opt/a", 0o700), f("opt/a/new"), f("usr"))))
    lower = layers.lower
    assert lower.children("opt") == ["opt/a", "opt/z"]
    assert lower.children("opt/a") == ["opt/a/new"]
    assert lower.lookup("opt/a/x") is None
    assert lower.lookup("usr/bin") is None
    assert lower.children("usr") == []
    assert lower.children("") == ["bin", "etc", "opt", "usr"]
