"""What a build borrows from the host: where Debian packages come from, and which versions."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.packages import apt as debootstrap
from ekiben.packages.apt import apt_sources, preferences, snapshot_sources
from ekiben.packages.host_config import PackageSources, write_host_files
from support.programs import write_program

MOMENT = "20260102T030405Z"


client_has_gone = threading.Event()


class Snapshots(http.server.BaseHTTPRequestHandler):
    """An archive of snapshots that knows one moment, and takes its time over another."""

    def do_HEAD(self) -> None:
        if "20269999" in self.path:
            client_has_gone.wait(60)
        self.send_response(200 if self.path == f"/debian/{MOMENT}/dists/bookworm/Release" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    client_has_gone.clear()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Snapshots) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("EKIBEN_SNAPSHOT", url)
        yield url
        client_has_gone.set()
        server.shutdown()


def test_the_snapshot_archive_is_asked_for_the_locked_moment(archive: str) -> None:
    lines = snapshot_sources("bookworm", MOMENT).splitlines()
    assert lines[0] == f"deb [check-valid-until=no] {archive}/debian/{MOMENT} bookworm main"
    assert lines[2] == f"deb [check-valid-until=no] {archive}/debian-security/{MOMENT} bookworm-security main"
    assert len(lines) == 3


@pytest.mark.parametrize("moment", ["", "20200101T000000Z", "20269999T000000Z"])
def test_no_snapshot_lines_when_the_archive_does_not_answer(archive: str, moment: str) -> None:
    assert snapshot_sources("bookworm", moment, patience=0.5) == ""


def test_snapshot_archive_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EKIBEN_SNAPSHOT", "")
    assert snapshot_sources("bookworm", MOMENT) == ""
    monkeypatch.setenv("EKIBEN_SNAPSHOT", "http://127.0.0.1:9")
    assert snapshot_sources("bookworm", MOMENT, patience=0.5) == ""


def test_a_given_mirror() -> None:
    assert apt_sources("bookworm", "http://mirror/debian") == "deb http://mirror/debian bookworm main\n"
    assert apt_sources("bookworm", "deb [trusted=yes] file:/a ./") == "deb [trusted=yes] file:/a ./"


@pytest.mark.parametrize("apt", ["none", "another distribution's"])
def test_mmdebstraps_mirror_replaces_apt_sources(apt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu, or no Debian at all."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin" if apt != "none" else str(programs))
    if apt != "none":
        write_program(programs / "apt-get", "#!/bin/sh\necho Packages http://archive noble main http://archive/\n")
    else:
        assert apt_sources("bookworm", None) == ""
    lines = [f"deb [signed-by=/keys] http://a/debian {suite} main" for suite in ("bookworm", "bookworm-updates")]
    echoes = "".join(f"echo '{line}' >&2\n" for line in lines)
    write_program(programs / "mmdebstrap", f"#!/bin/sh\n{echoes}echo 'E: command failed' >&2\nexit 25\n")
    assert apt_sources("bookworm", None) == "".join(f"{line}\n" for line in lines)


def test_keyring_is_named_where_apt_lacks_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.gpg"
    monkeypatch.setattr(debootstrap, "_KEYS", keys)
    monkeypatch.setattr(debootstrap, "_TRUSTED", tmp_path)
    assert apt_sources("bookworm", "http://a/debian") == "deb http://a/debian bookworm main\n"
    keys.touch()
    assert apt_sources("bookworm", "http://a/debian") == f"deb [signed-by={keys}] http://a/debian bookworm main\n"
    (tmp_path / "debian-archive-bookworm-automatic.asc").touch()
    assert apt_sources("bookworm", "http://a/debian") == "deb http://a/debian bookworm main\n"


def test_pins_and_sources_reach_apt(tmp_path: Path) -> None:
    written = write_host_files(
        tmp_path, PackageSources("deb outside\n", "deb inside\n", {"b": "1:2.0-3", "a": "1"}, {"UV_OFFLINE": "1"})
    )
    assert written["APT_CONFIG"] == "/run/ekiben/apt.conf"
    assert written["UV_OFFLINE"] == "1"
    assert (tmp_path / "sources.list").read_text() == "deb inside\n"
    assert (tmp_path / "preferences").read_text() == preferences({"a": "1", "b": "1:2.0-3"})
    assert "Package: b\nPin: version 1:2.0-3\nPin-Priority: 995\n" in preferences({"b": "1:2.0-3"})
    assert 'Dir::Etc::preferences "/run/ekiben/preferences";' in (tmp_path / "apt.conf").read_text()


@pytest.mark.parametrize(
    ("index", "kept"),
    [("https://a.example/simple", True), ("https://u:p@a.example/x", True), ("https://c.example", False)],
)
def test_only_logins_of_the_indexes_are_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str, kept: bool
) -> None:
    (tmp_path / "netrc").write_text(
        "machine a.example login me password 1st\nmachine b.example login me password 2nd\n"
    )
    (tmp_path / "netrc").chmod(0o600)
    (tmp_path / "mount").mkdir()
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("UV_INDEX", index)
    environment = write_host_files(tmp_path / "mount", PackageSources("", "", {}))
    assert ("NETRC" in environment) == kept
    if kept:
        assert (tmp_path / "mount/netrc").read_text() == "machine a.example login me password 1st\n"
        assert (tmp_path / "mount/netrc").stat().st_mode & 0o77 == 0
