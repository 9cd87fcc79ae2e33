"""Which locked packages have a newer release or a known advisory: releases from wheels made here, advisories in the OSV
format.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import DefinitionError, FetchError, UsageError
from ekiben.packages.outdated import find_advisories, find_newer, read_locks
from support.sample_recipe import RunCli

LOCK = "torch==2.11.0 \\\n    --hash=sha256:{0}\nMy_Package==1.0 \\\n    --hash=sha256:{0}\n".format("0" * 64)


def advisory(identifier: str = "GHSA-1", name: str = "torch", **affected: Any) -> dict[str, Any]:
    return {
        "id": identifier,
        "summary": "torch.load runs code\nand more",
        "affected": [{"package": {"ecosystem": "PyPI", "name": name}, **affected}],
    }


def between(*events: dict[str, str]) -> list[dict[str, Any]]:
    return [{"type": "ECOSYSTEM", "events": list(events)}]


def database(path: Path, *records: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, record in enumerate(records):
            archive.writestr(f"{number}.json", json.dumps(record))
    return path


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        metadata = f"{name}-{version}.dist-info"
        archive.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of files."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    for name, version in (("my_package", "1.0"), ("my_package", "1.2"), ("my_package", "2.0rc1"), ("other", "3.0")):
        wheel(tmp_path / "wheels", name, version)
    return tmp_path / "wheels"


def test_newer_releases_are_listed(index: Path) -> None:
    assert find_newer({"my-package": "1.0", "other": "3.0"}) == {"my-package": "1.2"}


def test_missing_index_is_an_error(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(FetchError, match="no index answered which packages are newer"):
        find_newer({"my-package": "1.0"})


@pytest.mark.parametrize(
    ("affected", "fixed"),
    [
        ({"versions": ["2.10.0", "2.11.0"]}, ""),
        ({"ranges": between({"introduced": "0"}, {"fixed": "2.12"})}, "2.12"),
        (
            {"ranges": between({"fixed": "2.11.1"}, {"introduced": "2.11"}, {"introduced": "1.0"}, {"fixed": "1.5"})},
            "2.11.1",
        ),
        ({"ranges": between({"introduced": "0"}, {"last_affected": "2.11.0"})}, ""),
        ({"ranges": between({"introduced": "2.11.0rc1"})}, ""),
    ],
)
def test_affected_version_is_named_with_its_fix(affected: dict[str, Any], fixed: str, tmp_path: Path) -> None:
    (known,) = find_advisories({"torch": "2.11.0"}, database(tmp_path / "all.zip", advisory(**affected)))
    assert (known.name, known.version, known.identifier, known.fixed) == ("torch", "2.11.0", "GHSA-1", fixed)
    assert known.summary == "torch.load runs code"


@pytest.mark.parametrize(
    "record",
    [
        advisory(versions=["2.10.0"]),
        advisory(ranges=between({"introduced": "0"}, {"fixed": "2.11.0"})),
        advisory(ranges=between({"introduced": "0"}, {"last_affected": "2.10.9"})),
        advisory(ranges=between({"introduced": "2.11.0.post1"})),
        advisory(ranges=[{"type": "GIT", "events": [{"introduced": "0"}]}]),
        advisory(name="torchvision", versions=["2.11.0"]),
        {**advisory(versions=["2.11.0"]), "withdrawn": "2026-01-01T00:00:00Z"},
    ],
)
def test_other_advisories_are_left_out(record: dict[str, Any], tmp_path: Path) -> None:
    assert find_advisories({"torch": "2.11.0"}, database(tmp_path / "all.zip", record)) == []


def test_database_of_something_else_is_an_error(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(database(tmp_path / "all.zip", advisory(versions=["1"])).read_bytes()[:-30])
    for path in (tmp_path / "missing.zip", damaged, database(tmp_path / "empty.zip"), tmp_path / "all.zip" / "below"):
        with pytest.raises(UsageError, match="cannot be read"):
            find_advisories({"torch": "2.11.0"}, path)
    wrong = advisory(ranges=between({"introduced": "no version"}))
    with pytest.raises(
        UsageError, match=r"0\.json: 'affected\[0\]\.ranges\[0\]\.events\[0\]\.introduced' is not a version: no version"
    ):
        find_advisories({"torch": "2.11.0"}, database(tmp_path / "wrong.zip", wrong))


def test_records_larger_than_an_advisory_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.json", b" " * (64 << 20))
    with pytest.raises(UsageError, match=r"0\.json: has \d+ bytes, more than"):
        find_advisories({"torch": "2.11.0"}, tmp_path / "all.zip")


@pytest.mark.parametrize("version", ["/../../../etc/x", "one", "1.0/../../x"])
def test_a_locked_version_that_is_a_path_is_an_error(version: str, tmp_path: Path) -> None:
    (tmp_path / "mine.lock").write_text(f"torch=={version} --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DefinitionError, match=r"mine\.lock: torch==\S+: this is not a version"):
        read_locks(tmp_path)


def test_lock_compares_a_recipe_with_index_and_database(run_cli: RunCli, index: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    run_cli("init", str(mine))
    shutil.rmtree(mine / "images" / "stacks", ignore_errors=True)
    for old in (mine / "images").glob("*.lock"):
        old.unlink()
    (mine / "images/mine.lock").write_text(LOCK)
    assert set(read_locks(mine / "images")) == {mine / "images/mine.lock"}

    newer = run_cli("lock", str(mine), "--outdated")
    assert (newer.returncode, newer.stdout.splitlines()) == (
        0,
        [f"{mine}/images/mine.lock: my-package 1.0 → 1.2", "1 of 2 locked packages have a newer release"],
    )
    known = run_cli(
        "lock", str(mine), "--advisories", str(database(tmp_path / "all.zip", advisory(versions=["2.11.0"]))), code=9
    )
    assert known.returncode == 9
    assert (
        f"{mine}/images/mine.lock: torch 2.11.0: GHSA-1, no fixed version is named: torch.load runs code"
        in known.stdout
    )
    assert "advisories of the locked versions are known: 1" in known.stderr
    none = run_cli("lock", str(mine), "--advisories", str(database(tmp_path / "none.zip", advisory(versions=["1"]))))
    assert (none.returncode, none.stdout) == (0, "no advisory is known of 2 locked packages\n")
    wrong = run_cli("lock", str(mine), "--outdated", "--keep", code=2)
    assert wrong.returncode == 2
    assert "--keep is for writing lock files" in wrong.stderr
