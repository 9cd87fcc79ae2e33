"""Images compared: made here of a few files, so that what should be said is known."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from builder.chain import resolve
from builder.contents import Opened, Part, open_image
from builder.diff import compare, layer_differences, text
from builder.errors import UsageError, VerifyError
from builder.layer import Entry, Member, pour, sort_key
from builder.pipeline import Options, build
from builder.progress import Progress
from builder.rebuild import Comparison, Rebuilt, refuse_differences
from builder.recipe import find_recipe
from builder.sif import Partition, sif_id, write_sif
from builder.squashfs import SquashfsReader, SquashfsWriter
from builder.store import StoredLayer
from own_recipe import Own, RunCli, seeded

SITE = "opt/venv/lib/python3.11/site-packages"
Files = Mapping[str, bytes | None]  # None: removed from the layers below


def package(name: str, version: str, *modules: str) -> dict[str, bytes | None]:
    info = f"{SITE}/{name}-{version}.dist-info"
    files: dict[str, bytes | None] = {f"{SITE}/{module}": f"{version} of {module}".encode() for module in modules}
    record = "".join(f"{module},sha256=x,1\n" for module in modules)
    return {**files, f"{info}/METADATA": b"Name: x\n", f"{info}/RECORD": record.encode()}


def dpkg(**versions: str) -> dict[str, bytes | None]:
    status = "\n".join(
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name, version in versions.items()
    )
    return {"var/lib/dpkg/status": status.encode()}


def write(path: Path, files: Files, mode: int = 0o644, links: Mapping[str, str] | None = None) -> Path:
    folders = {parent for file in (*files, *(links or {})) for parent in _folders(file)}
    members: list[Member] = [(Entry(folder, "dir", mtime=1), None) for folder in folders]
    members += [(Entry(name, "symlink", 0o777, mtime=1, target=target), None) for name, target in (links or {}).items()]
    for name, data in files.items():
        if data is None:
            members.append((Entry(name, "whiteout", 0, mtime=1), None))
        else:
            members.append((Entry(name, "file", mode, mtime=1, size=len(data)), [data] if data else None))
    with path.open("w+b") as out:
        pour(sorted(members, key=lambda member: sort_key(member[0].path)), SquashfsWriter(out, epoch=1))
    return path


def _folders(file: str) -> Iterator[str]:
    parts = file.split("/")[:-1]
    return ("/".join(parts[:count]) for count in range(len(parts) + 1))


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def image(
    tmp_path: Path, stack: contextlib.ExitStack, name: str, *layers: Files, links: Mapping[str, str] | None = None,
    **environment: str,
) -> Opened:  # fmt: skip
    parts = []
    for number, files in enumerate(layers):
        path = write(tmp_path / f"{name}-{number}", files, links=links)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(
            Part(f"layer{number}", digest, path.stat().st_size, SquashfsReader(stack.enter_context(path.open("rb"))))
        )
    return Opened(name, tuple(parts), environment)


def test_what_changed_is_told_apart_from_what_packages_brought(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    base = {"etc/one": b"1", "etc/gone": b"x", "etc/dir/below": b"x", **dpkg(libc6="1", bash="5")}
    before = image(tmp_path, stack, "a", base, {**package("torch", "2.6", "torch/a.py"), **package("numpy", "1", "np.py"),
                                               "opt/x": b"abc", "opt/same": b"same"}, WORD="one", KEPT="yes")  # fmt: skip
    after = image(tmp_path, stack, "b", base, {**package("torch", "2.11", "torch/a.py", "torch/b.py"), **package("new_one", "3", "n.py"),
                                              "opt/x": b"abd", "opt/same": b"same", f"{SITE}/torch/__pycache__/a.cpython-311.pyc": b"c",
                                              "etc/gone": None, "etc/dir": None, **dpkg(libc6="2", bash="5")}, WORD="two", KEPT="yes")  # fmt: skip
    about = compare(before, after)
    assert about["packages"]["python"] == {"added": {"new-one": "3"}, "removed": {"numpy": "1"}, "changed": {"torch": ["2.6", "2.11"]}, "same": 0}  # fmt: skip
    assert about["packages"]["debian"]["changed"] == {"libc6": ["1", "2"]}
    assert about["environment"] == {"added": {}, "removed": {}, "changed": {"WORD": ["one", "two"]}, "same": 1}
    assert [row["same"] for row in about["layers"]] == [True, False]
    assert set(about["files"]["removed"]) >= {"etc/gone", "etc/dir/below", f"{SITE}/np.py"}
    assert about["files"]["changed"]["opt/x"] == [3, 3]
    assert "opt/same" not in about["files"]["changed"]
    assert about["other_files"] == {"added": [], "removed": ["etc/dir/below", "etc/gone"], "changed": ["opt/x"]}
    said = text(about)
    assert "  ~ torch 2.6 → 2.11" in said
    assert "  + new-one 3" in said
    assert "  - numpy 1" in said
    assert "  ~ WORD one → two" in said
    assert "of these not in the packages above: 2 removed, 1 changed" in said
    json.dumps(about)


def test_an_image_and_itself(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    one = image(tmp_path, stack, "a", {"etc/one": b"1", **dpkg(libc6="1")}, A="b")
    about = compare(one, one)
    assert about["files"] == {"added": {}, "removed": {}, "changed": {}}
    assert "debian packages: nothing changed, 1 the same" in text(about)


def test_the_screen_is_one_screen(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    before = image(tmp_path, stack, "a", {"x": b""})
    after = image(tmp_path, stack, "b", {f"opt/{number:03}": b"x" for number in range(300)})
    said = text(compare(before, after))
    assert len(said.splitlines()) < 40
    assert "… and 290 more (--json has all)" in said


def differences(tmp_path: Path, one: Files, other: Files, mode: int = 0o644) -> list[str]:
    with write(tmp_path / "one", one).open("rb") as first, write(tmp_path / "other", other, mode).open("rb") as second:
        return list(layer_differences(SquashfsReader(first), SquashfsReader(second)))


def test_the_entries_in_which_two_layers_differ(tmp_path: Path) -> None:
    assert differences(tmp_path, {"a": b"1", "b/c": b"2"}, {"a": b"1", "b/c": b"2"}) == []
    assert differences(tmp_path, {"a": b"1", "b/c": b"2", "z": b""}, {"a": b"3", "b/d": b"2", "z": b"12"}) == [
        "a: content",
        "b/c: only the first has it",
        "b/d: only the second has it",
        "z: size 0 → 2, content",
    ]
    assert differences(tmp_path, {"a": b"1"}, {"a": b"1"}, mode=0o755) == ["a: mode 644 → 755"]
    assert differences(tmp_path, {"a": b"1"}, {"a": None}) == [
        "a: kind file → whiteout, mode 644 → 0, size 1 → 0, content"
    ]


def stored(name: str, diff_id: str) -> StoredLayer:
    return StoredLayer(name=name, cache_key="k", diff_id=diff_id, tar_size=1, digest=f"blob of {diff_id}", size=1, executor="x",
                       seconds=1.0, inputs={}, notes={"drift": ["libc6 1 → 2"]})  # fmt: skip


def test_what_came_out_differently_is_named() -> None:
    same = Rebuilt(name="base", before=stored("base", "1"), after=stored("base", "1"), differing=())
    refuse_differences("x", Comparison(layers=(same,), image_ids=("i", "i"), sif_digests=("s", "s")))
    other = Rebuilt(
        name="own", before=stored("own", "1"), after=stored("own", "2"), differing=[f"f{n}: content" for n in range(30)]
    )
    with pytest.raises(VerifyError) as caught:
        refuse_differences("x", Comparison(layers=(same, other), image_ids=("i", "j"), sif_digests=("s", "t")))
    said = str(caught.value)
    assert said.startswith(
        "x: 1 of 2 layers came out differently:\n  layer own: 1 → 2, 30 entries differ\n    f0: content\n"
    )
    assert "… and 10 more" in said
    assert said.endswith("drift: libc6 1 → 2")


def test_images_of_the_store_and_sif_files(flat: Own, tmp_path: Path, run_cli: RunCli) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    made = build(resolve(find_recipe(str(flat.path))), store, Options(), Progress(quiet=True))
    parts = [Partition(store.blob_path(layer.digest), 0, layer.size, layer.digest) for layer in made.layers]
    write_sif(tmp_path / "own.sif", parts, id=sif_id([], "x"), deffile="x", arch="amd64", epoch=1)
    with open_image("own", store) as one, open_image(str(tmp_path / "own.sif"), store) as other:
        about = compare(one, other)
        assert one.environment == other.environment | {"PATH": one.environment["PATH"]}
    assert all(row["same"] for row in about["layers"])
    said = run_cli("--store", store.root, "diff", "own", "./own.sif").stdout
    assert "files: nothing changed" in said
    assert json.loads(run_cli("--store", store.root, "diff", "own", "own.sif", "--json").stdout)["files"]["added"] == {}
    assert "no image 'owl'" in run_cli("--store", store.root, "diff", "owl", "own", code=2).stderr
    said = run_cli("--store", store.root, "diff", "own", "none.sif", code=6).stderr
    assert "error: none.sif: cannot be read: No such file or directory\nhint: build.py list names the images" in said
    assert "not a SIF" in run_cli("--store", store.root, "diff", __file__, "own", code=6).stderr
    with pytest.raises(UsageError, match="Did you mean 'own'"), open_image("owm", store):
        pass
