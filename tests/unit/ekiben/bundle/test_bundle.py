"""Bundles as files: what is damaged, missing, smuggled in or made for something else is refused."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ekiben.bundle._index import BundleIndex
from ekiben.bundle.read import Bundle, bundle_sources, check_bundle, import_compiled, open_bundle, unpack_snapshots
from ekiben.bundle.write import _compiled
from ekiben.core.environment import platform
from ekiben.core.errors import FetchError, StoreError
from ekiben.core.progress import Progress
from ekiben.resolve.graph import stages_of
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import StageOutput, Store, StoredResult
from support.hostile import NO_RECORDS
from support.sample_recipe import RunCli, SampleRecipe, seeded
from support.tars import plain_tar

FILES = {"debs/Packages": b"Package: a\n", "wheels/a-1-py3-none-any.whl": b"wheel", "include/model/weights": b"0123"}


def index(files: Mapping[str, bytes], **more: Any) -> dict[str, Any]:
    facts = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return {"format": 3, "recipe": "own", "stack": "tiny", "platform": platform(), "locks": {}, "files": facts, **more}


def parsed(files: Mapping[str, bytes], **more: Any) -> BundleIndex:
    found = BundleIndex.parse(json.dumps(index(files, **more)).encode())
    assert found is not None
    return found


def write(
    path: Path, about: Mapping[str, Any], files: Mapping[str, bytes], links: Mapping[str, str] | None = None
) -> Path:
    path.write_bytes(plain_tar({"bundle.json": json.dumps(about).encode(), **files}, links))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache/store")


def opened(path: Path, store: Store) -> dict[str, str]:
    with open_bundle(path, store, Progress(quiet=True)) as bundle:
        assert bundle.folder.parent == store.cache
        found = {
            str(item.relative_to(bundle.folder)): item.read_text()
            for item in bundle.folder.rglob("*")
            if item.is_file()
        }
    assert list(store.cache.iterdir()) == []
    return found


@pytest.mark.parametrize("format", [2, 4, "3", None])
def test_a_bundle_of_another_format_is_refused(format: object, tmp_path: Path, store: Store) -> None:
    with pytest.raises(StoreError, match="of another version of Ekiben"):
        opened(write(tmp_path / "x.bundle", index({}, format=format), {}), store)


def test_bundle_round_trip(tmp_path: Path, store: Store) -> None:
    about = index(FILES)
    about["files"]["include/model/link"] = {"link": "weights"}
    path = write(tmp_path / "x.bundle", about, FILES, {"include/model/link": "weights"})
    assert opened(path, store) == {name: data.decode() for name, data in FILES.items()} | {"include/model/link": "0123"}
    with open_bundle(path, store, Progress(quiet=True)) as bundle:
        (made,) = unpack_snapshots(bundle, tmp_path / "out")
        assert made == tmp_path / "out/model"
        assert (made / "link").is_symlink()
        (made / "weights").write_text("mine")
        unpack_snapshots(bundle, tmp_path / "out")
        assert (made / "weights").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheels/a-1-py3-none-any.whl": b"wheex"}, "wheels/a-1-py3-none-any.whl is damaged"),
        ({"wheels/other.whl": b"x"}, "wheels/other.whl differs from its bundle.json"),
        ({"../evil": b"x"}, "../evil differs from its bundle.json"),
    ],
)
def test_content_with_wrong_digest_fails(tmp_path: Path, store: Store, change: dict[str, bytes], message: str) -> None:
    path = write(tmp_path / "x.bundle", index(FILES), {**FILES, **change})
    with pytest.raises(StoreError) as caught:
        opened(path, store)
    assert message in str(caught.value)
    assert list(store.cache.iterdir()) == []


def test_names_and_links_outside_the_bundle_are_refused(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path / "x.bundle", index({"../evil": b"x"}), {"../evil": b"x"})
    with pytest.raises(StoreError, match=r"\.\./evil differs from"):
        opened(path, store)
    about = index({})
    about["files"]["include/a/b"] = {"link": "../../../etc"}
    path = write(tmp_path / "y.bundle", about, {}, {"include/a/b": "../../../etc"})
    with pytest.raises(StoreError, match="points out of the bundle"):
        opened(path, store)
    assert not (store.cache / "evil").exists()


def test_truncated_and_foreign_files_are_refused(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path / "x.bundle", index(FILES), {"debs/Packages": FILES["debs/Packages"]})
    with pytest.raises(StoreError, match=r"an incomplete bundle: wheels/a-1-py3-none-any.whl is missing, and 1 more"):
        opened(path, store)
    whole = write(tmp_path / "x.bundle", index(FILES), FILES).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:3000])
    with pytest.raises(StoreError, match="an incomplete bundle"):
        opened(tmp_path / "cut", store)
    (tmp_path / "text").write_text("x" * 5000)
    with pytest.raises(StoreError, match="an incomplete bundle"):
        opened(tmp_path / "text", store)
    write(tmp_path / "new", index(FILES, format=1), FILES)
    with pytest.raises(StoreError, match="is not a bundle, or one of another version"):
        opened(tmp_path / "new", store)
    with pytest.raises(StoreError, match="No such file"):
        opened(tmp_path / "none", store)


def test_a_bundle_for_other_locks_is_refused(sample: SampleRecipe, tmp_path: Path) -> None:
    sample.write("files/walls.lock", "one==1\n")
    sample.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "files/walls.lock /opt/walls.lock")
    sample.write("images/stacks/tiny/apt.lock", "snapshot: 20260102T030405Z\n[walls]\ntool=1\n")
    chain = resolve(find_recipe(str(sample.path)))
    digest = hashlib.sha256(b"one==1\n").hexdigest()
    packages = hashlib.sha256(b'{"tool": "1"}').hexdigest()
    right = Bundle(tmp_path / "bundle-x", parsed({}, locks={"/opt/walls.lock": digest, "apt.lock [walls]": packages}))
    check_bundle(right, chain)
    supply = bundle_sources(right, chain)
    assert supply.sources_inside == "deb [trusted=yes] file:/run/ekiben/cache/bundle-x/debs ./\n"
    assert supply.environment["UV_FIND_LINKS"] == "/run/ekiben/cache/bundle-x/wheels"
    assert supply.pins == {"tool": "1"}
    for locks, message in (
        ({"/opt/walls.lock": digest}, r"other apt.lock \[walls\]"),
        ({}, r"other /opt/walls.lock, apt.lock"),
    ):
        with pytest.raises(FetchError, match=message):
            check_bundle(Bundle(tmp_path, parsed({}, locks=locks)), chain)
    with pytest.raises(FetchError, match="the bundle is for linux/arm64"):
        check_bundle(Bundle(tmp_path, parsed({}, platform="linux/arm64")), chain)


def test_bundle_commands_and_offline(
    sample: SampleRecipe, files_only: SampleRecipe, tmp_path: Path, run_cli: RunCli
) -> None:
    store = tmp_path / "store"
    stderr = run_cli("--store", store, "image", sample.path, "--offline", code=2).stderr
    assert "--offline: ground, roof, own would have to be built; pass its sources with --bundle FILE" in stderr
    assert "No such file" in run_cli("--store", store, "image", sample.path, "--bundle", "none", code=6).stderr
    assert "is not built: missing ground" in run_cli("--store", store, "bundle", sample.path, code=8).stderr
    seeded(files_only, store, "ground")
    run_cli("--store", store, "image", files_only.path, "--format", "sif", "--no-verify")
    run_cli("--store", store, "image", files_only.path, "--format", "sif", "--no-verify", "--offline")
    shown = run_cli("--store", store, "bundle", files_only.path, "--include", "none", code=2).stderr
    assert "--include none: no such file or folder" in shown
    (tmp_path / "a/x").mkdir(parents=True)
    (tmp_path / "b/x").mkdir(parents=True)
    stderr = run_cli("--store", store, "bundle", files_only.path, "--include", "a/x", "--include", "b/x", code=2).stderr
    assert "two of the paths have the same last name" in stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/x.bundle", "-o no/x.bundle: there is no folder {}/no; create it first"),
        ("file/x.bundle", "-o file/x.bundle: there is no folder {}/file; create it first"),
        ("there", "-o there: is a folder; name a file in it"),
    ],
)
def test_invalid_output_is_refused_before_anything_is_fetched(
    files_only: SampleRecipe, tmp_path: Path, run_cli: RunCli, output: str, message: str
) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    run_cli("--store", store.root, "image", files_only.path, "--format", "sif", "--no-verify")
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    lines = run_cli("--store", store.root, "bundle", files_only.path, "-o", output, code=2).stderr.splitlines()
    assert lines == [f"error: {message.format(tmp_path)}"]


STAGES = """\
Bootstrap: localimage
From: ground.sif
Stage: build

%post
    echo compiled >/made

Bootstrap: localimage
From: ground.sif
Stage: runtime

%files from build
    /made /opt/made

%post
    test -e /opt/made
"""


def test_bundle_contains_stage_outputs(sample: SampleRecipe, tmp_path: Path, store: Store) -> None:
    sample.write("images/walls.def", STAGES)
    sample.stack(arguments={})
    chain = resolve(find_recipe(str(sample.path)))
    (stage,) = stages_of(item for layer in chain.layers for item in layer.copies)
    store.open_for_writing()
    with pytest.raises(StoreError, match=r"what walls\.build compiled is not in .*/store any more"):
        _compiled(chain, store, tmp_path)
    digest = store.put_blob(b"compiled")
    result = StoredResult(
        name=stage.name,
        key=stage.cache_key,
        wheel=None,
        files=(StageOutput("/made", 0o644, digest, 8),),
        inputs=stage.inputs,
        origin="compiled",
        executor="hand",
        seconds=1.0,
    )
    store.put_result(result)
    files = {name: path.read_bytes() for name, path in _compiled(chain, store, tmp_path).items()}
    path = write(tmp_path / "x.bundle", index(files), files)
    other = Store(tmp_path / "other/store")
    with open_bundle(path, other, Progress(quiet=True)) as bundle:
        import_compiled(bundle, other)
    assert other.result(stage.cache_key) == result
    assert other.get_blob(digest) == b"compiled"

    (blob,) = (name for name in files if not name.endswith(".json"))
    wrong = {**files, blob: b"compilex"}
    third = Store(tmp_path / "third/store")
    with open_bundle(write(tmp_path / "y.bundle", index(wrong), wrong), third, Progress(quiet=True)) as bundle:
        with pytest.raises(StoreError, match=r"the bundle has not the file /made of walls\.build"):
            import_compiled(bundle, third)
        assert third.result(stage.cache_key) is None


# ------------------------------------------------------------------------------------------------- bundles of strangers


def test_a_file_behind_links_is_not_written(tmp_path: Path, store: Store) -> None:
    """Each link's text stays inside; followed one through the other, they lead above the bundle's folder."""
    deep = "include/x/a/b/c/d/e"
    links = {f"{deep}/up": "../../../../../flat", "include/x/out": "a/b/c/d/e/up/../../../../.."}
    about = index({"include/x/flat/file": b"1", "include/x/out/evil": b"2"})
    about["files"] |= {name: {"link": target} for name, target in links.items()}
    path = tmp_path / "x.bundle"
    with tarfile.open(path, "w") as tar:
        for name, data, target in (
            ("bundle.json", json.dumps(about).encode(), ""),
            ("include/x/flat/file", b"1", ""),
            *((name, b"", target) for name, target in links.items()),
            ("include/x/out/evil", b"2", ""),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), tarfile.SYMTYPE if target else tarfile.REGTYPE, target
            tar.addfile(info, io.BytesIO(data))
    before = sorted(item for item in tmp_path.rglob("*") if store.cache not in item.parents)
    with pytest.raises(StoreError, match=r"include/x/out/evil is below a link"):
        opened(path, store)
    assert list(tmp_path.rglob("evil")) == []
    assert before == [item for item in before if item.exists()]


def test_links_that_combine_to_lead_outside_are_refused(tmp_path: Path, store: Store) -> None:
    links = {"include/x/a/b/c/up": "../../../flat", "include/x/out": "a/b/c/up/../../.."}
    about = index({"include/x/flat/file": b"1"})
    about["files"] |= {name: {"link": target} for name, target in links.items()}
    path = write(tmp_path / "x.bundle", about, {"include/x/flat/file": b"1"}, links)
    with pytest.raises(StoreError, match=r"include/x/out points out of the bundle"):
        opened(path, store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": 3}, "'files' is not an object"),
        ({"files": {"debs/x": {}}}, "has no 'files.debs/x.size'"),
        ({"files": {"debs/x": {"size": -1, "sha256": "0" * 64}}}, "'files.debs/x.size' is not a size"),
        ({"files": {"debs/x": {"size": 1, "sha256": "../../x"}}}, "'files.debs/x.sha256' is not a SHA-256"),
        ({"locks": {"a": 1}}, "'locks' is not names and strings"),
        ({"platform": None}, "'platform' is not a string"),
    ],
)
def test_wrong_field_of_the_index_is_named(tmp_path: Path, store: Store, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "x.bundle", {**index(FILES), **change}, FILES)
    with pytest.raises(StoreError, match=re.escape(message)):
        opened(path, store)


@pytest.mark.parametrize("data", NO_RECORDS)
def test_an_index_that_is_not_json_is_refused(tmp_path: Path, store: Store, data: bytes) -> None:
    (tmp_path / "x.bundle").write_bytes(plain_tar({"bundle.json": data}))
    with pytest.raises(StoreError, match=r"an incomplete bundle|is not a bundle"):
        opened(tmp_path / "x.bundle", store)


def test_a_later_versions_fields_of_the_index_are_ignored() -> None:
    assert parsed({}, signed_by="later").recipe == "own"


@pytest.mark.parametrize(
    "record",
    [
        {},
        [1],
        {"key": "../../x"},
        {"name": "../x"},
        {"key": "other"},
        {"files": [{"path": "/x", "mode": 1, "digest": "sha256:../../x", "size": 1}]},
        {"files": [{"path": "../../x", "mode": 1, "digest": "sha256:" + "0" * 64, "size": 1}]},
    ],
)
def test_a_compiled_record_that_is_wrong_is_refused(tmp_path: Path, store: Store, record: Any) -> None:
    right: dict[str, Any] = {
        "name": "walls.build",
        "key": "k" * 64,
        "wheel": None,
        "files": [],
        "inputs": {},
        "origin": "compiled",
        "executor": "x",
        "seconds": 1.0,
    }
    data = json.dumps({**right, **record} if isinstance(record, dict) and record else record).encode()
    name = f"compiled/{'k' * 64}.json"
    path = write(tmp_path / "x.bundle", index({name: data}), {name: data})
    store.open_for_writing()
    before = [item for item in tmp_path.rglob("*") if item.is_file()]
    with open_bundle(path, store, Progress(quiet=True)) as bundle, pytest.raises(StoreError, match="in the bundle is"):
        import_compiled(bundle, store)
    assert {item for item in tmp_path.rglob("*") if item.is_file()} == set(before)
