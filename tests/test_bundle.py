"""Bundles as files: what is damaged, missing, smuggled in or made for something else is refused."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from builder.bundle import Bundle, _compiled, bundle_supply, check_bundle, open_bundle, take_compiled, unpack_snapshots
from builder.chain import platform, resolve, stages_of
from builder.errors import FetchError, StoreError
from builder.progress import Progress
from builder.recipe import find_recipe
from builder.store import Handed, Store, StoredResult
from own_recipe import Own, RunCli, seeded

FILES = {"debs/Packages": b"Package: a\n", "wheels/a-1-py3-none-any.whl": b"wheel", "with/model/weights": b"0123"}


def index(files: Mapping[str, bytes], **more: Any) -> dict[str, Any]:
    facts = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return {"format": 2, "recipe": "own", "stack": "tiny", "platform": platform(), "locks": {}, "files": facts, **more}


def write(
    path: Path, about: Mapping[str, Any], files: Mapping[str, bytes], links: Mapping[str, str] | None = None
) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in {"bundle.json": json.dumps(about).encode(), **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
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


def test_what_is_in_it_comes_out(tmp_path: Path, store: Store) -> None:
    about = index(FILES)
    about["files"]["with/model/link"] = {"link": "weights"}
    path = write(tmp_path / "x.bundle", about, FILES, {"with/model/link": "weights"})
    assert opened(path, store) == {name: data.decode() for name, data in FILES.items()} | {"with/model/link": "0123"}
    with open_bundle(path, store, Progress(quiet=True)) as bundle:
        (made,) = unpack_snapshots(bundle, tmp_path / "out")
        assert made == tmp_path / "out/model"
        assert (made / "link").is_symlink()
        (made / "weights").write_text("mine")
        unpack_snapshots(bundle, tmp_path / "out")
        assert (made / "weights").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wheels/a-1-py3-none-any.whl": b"wheex"}, "wheels/a-1-py3-none-any.whl is damaged"),
        ({"wheels/other.whl": b"x"}, "wheels/other.whl is not what its bundle.json says"),
        ({"../evil": b"x"}, "../evil is not what its bundle.json says"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, store: Store, change: dict[str, bytes], said: str) -> None:
    path = write(tmp_path / "x.bundle", index(FILES), {**FILES, **change})
    with pytest.raises(StoreError) as caught:
        opened(path, store)
    assert said in str(caught.value)
    assert list(store.cache.iterdir()) == []


def test_names_and_links_that_lead_out_are_refused(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path / "x.bundle", index({"../evil": b"x"}), {"../evil": b"x"})
    with pytest.raises(StoreError, match=r"\.\./evil is not what"):
        opened(path, store)
    about = index({})
    about["files"]["with/a/b"] = {"link": "../../../etc"}
    path = write(tmp_path / "y.bundle", about, {}, {"with/a/b": "../../../etc"})
    with pytest.raises(StoreError, match="points out of the bundle"):
        opened(path, store)
    assert not (store.cache / "evil").exists()


def test_half_a_bundle_and_no_bundle(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path / "x.bundle", index(FILES), {"debs/Packages": FILES["debs/Packages"]})
    with pytest.raises(StoreError, match=r"no whole bundle: wheels/a-1-py3-none-any.whl is missing, and 1 more"):
        opened(path, store)
    whole = write(tmp_path / "x.bundle", index(FILES), FILES).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:3000])
    with pytest.raises(StoreError, match="no whole bundle"):
        opened(tmp_path / "cut", store)
    (tmp_path / "text").write_text("x" * 5000)
    with pytest.raises(StoreError, match="no whole bundle"):
        opened(tmp_path / "text", store)
    write(tmp_path / "new", index(FILES, format=1), FILES)
    with pytest.raises(StoreError, match="is no bundle, or one of another version"):
        opened(tmp_path / "new", store)
    with pytest.raises(StoreError, match="No such file"):
        opened(tmp_path / "none", store)


def test_a_bundle_for_other_locks_is_refused(own: Own, tmp_path: Path) -> None:
    own.write("files/walls.lock", "one==1\n")
    own.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "files/walls.lock /opt/walls.lock")
    own.write("images/stacks/tiny/apt.lock", "snapshot: 20260102T030405Z\n[walls]\ntool=1\n")
    chain = resolve(find_recipe(str(own.path)))
    digest = hashlib.sha256(b"one==1\n").hexdigest()
    packages = hashlib.sha256(b'{"tool": "1"}').hexdigest()
    right = Bundle(tmp_path / "bundle-x", index({}, locks={"/opt/walls.lock": digest, "apt.lock [walls]": packages}))
    check_bundle(right, chain)
    supply = bundle_supply(right, chain)
    assert supply.sources_inside == "deb [trusted=yes] file:/run/ekiben/cache/bundle-x/debs ./\n"
    assert supply.environment["UV_FIND_LINKS"] == "/run/ekiben/cache/bundle-x/wheels"
    assert supply.pins == {"tool": "1"}
    for locks, said in (
        ({"/opt/walls.lock": digest}, r"other apt.lock \[walls\]"),
        ({}, r"other /opt/walls.lock, apt.lock"),
    ):
        with pytest.raises(FetchError, match=said):
            check_bundle(Bundle(tmp_path, index({}, locks=locks)), chain)
    with pytest.raises(FetchError, match="the bundle is for linux/arm64"):
        check_bundle(Bundle(tmp_path, index({}, platform="linux/arm64")), chain)


def test_the_command_line(own: Own, flat: Own, tmp_path: Path, run_cli: RunCli) -> None:
    store = tmp_path / "store"
    said = run_cli("--store", store, "image", own.path, "--offline", code=2).stderr
    assert "--offline: ground, roof, own would have to be built; give what it is built from with --bundle FILE" in said
    assert "No such file" in run_cli("--store", store, "image", own.path, "--bundle", "none", code=6).stderr
    assert "is not built: missing ground" in run_cli("--store", store, "bundle", own.path, code=8).stderr
    seeded(flat, store, "ground")
    run_cli("--store", store, "image", flat.path, "--format", "sif", "--no-verify")
    run_cli("--store", store, "image", flat.path, "--format", "sif", "--no-verify", "--offline")
    assert (
        "--with none: there is no such file"
        in run_cli("--store", store, "bundle", flat.path, "--with", "none", code=2).stderr
    )
    (tmp_path / "a/x").mkdir(parents=True)
    (tmp_path / "b/x").mkdir(parents=True)
    said = run_cli("--store", store, "bundle", flat.path, "--with", "a/x", "--with", "b/x", code=2).stderr
    assert "two of the paths end in the same name" in said


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("no/x.bundle", "-o no/x.bundle: there is no folder {}/no; make it first"),
        ("file/x.bundle", "-o file/x.bundle: there is no folder {}/file; make it first"),
        ("there", "-o there: is a folder; name the file in it, as there/recipe.bundle"),
    ],
)
def test_where_no_bundle_can_be_is_said_before_anything_is_fetched(
    flat: Own, tmp_path: Path, run_cli: RunCli, output: str, said: str
) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    run_cli("--store", store.root, "image", flat.path, "--format", "sif", "--no-verify")
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    lines = run_cli("--store", store.root, "bundle", flat.path, "-o", output, code=2).stderr.splitlines()
    assert lines == [f"error: {said.format(tmp_path)}"]


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


def test_what_build_stages_handed_over_travels_along(own: Own, tmp_path: Path, store: Store) -> None:
    own.write("images/walls.def", STAGES)
    own.stack(arguments={})
    chain = resolve(find_recipe(str(own.path)))
    (stage,) = stages_of(item for layer in chain.layers for item in layer.taken)
    store.open_for_writing()
    with pytest.raises(StoreError, match=r"what walls\.build compiled is not in .*/store any more"):
        _compiled(chain, store, tmp_path)
    digest = store.put_blob(b"compiled")
    result = StoredResult(name=stage.name, key=stage.cache_key, wheel=None, files=(Handed("/made", 0o644, digest, 8),),
                          inputs=stage.inputs, origin="compiled", executor="hand", seconds=1.0)  # fmt: skip
    store.put_result(result)
    files = {name: path.read_bytes() for name, path in _compiled(chain, store, tmp_path).items()}
    path = write(tmp_path / "x.bundle", index(files), files)
    other = Store(tmp_path / "other/store")
    with open_bundle(path, other, Progress(quiet=True)) as bundle:
        take_compiled(bundle, other)
    assert other.result(stage.cache_key) == result
    assert other.get_blob(digest) == b"compiled"

    (blob,) = (name for name in files if not name.endswith(".json"))
    wrong = {**files, blob: b"compilex"}
    third = Store(tmp_path / "third/store")
    with open_bundle(write(tmp_path / "y.bundle", index(wrong), wrong), third, Progress(quiet=True)) as bundle:
        with pytest.raises(StoreError, match=r"the bundle has not the file /made of walls\.build"):
            take_compiled(bundle, third)
        assert third.result(stage.cache_key) is None
