"""Images compared: made here of a few files, so that the differences are known."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.artifacts.reproduce import Comparison, Rebuilt, refuse_differences
from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.errors import UsageError, VerifyError
from ekiben.core.progress import Progress
from ekiben.formats.compare import layer_differences
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, sif_id, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.inspect.diff import compare
from ekiben.inspect.image_reader import open_image
from ekiben.inspect.text import format_diff
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store, StoredLayer
from support.layered_images import SITE, Files, image, write
from support.sample_recipe import RunCli, SampleRecipe


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


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


def test_changed_files_are_separate_from_packaged_ones(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    base = {"etc/one": b"1", "etc/gone": b"x", "etc/dir/below": b"x", **dpkg(libc6="1", bash="5")}
    before = image(
        tmp_path,
        stack,
        "a",
        base,
        {
            **package("torch", "2.6", "torch/a.py"),
            **package("numpy", "1", "np.py"),
            "opt/x": b"abc",
            "opt/same": b"same",
        },
        WORD="one",
        KEPT="yes",
    )
    after = image(
        tmp_path,
        stack,
        "b",
        base,
        {
            **package("torch", "2.11", "torch/a.py", "torch/b.py"),
            **package("new_one", "3", "n.py"),
            "opt/x": b"abd",
            "opt/same": b"same",
            f"{SITE}/torch/__pycache__/a.cpython-311.pyc": b"c",
            "etc/gone": None,
            "etc/dir": None,
            **dpkg(libc6="2", bash="5"),
        },
        WORD="two",
        KEPT="yes",
    )
    about = compare(before, after)
    assert about["packages"]["python"] == {
        "added": {"new-one": "3"},
        "removed": {"numpy": "1"},
        "changed": {"torch": ["2.6", "2.11"]},
        "same": 0,
    }
    assert about["packages"]["debian"]["changed"] == {"libc6": ["1", "2"]}
    assert about["environment"] == {"added": {}, "removed": {}, "changed": {"WORD": ["one", "two"]}, "same": 1}
    assert [row["same"] for row in about["layers"]] == [True, False]
    assert set(about["files"]["removed"]) >= {"etc/gone", "etc/dir/below", f"{SITE}/np.py"}
    assert about["files"]["changed"]["opt/x"] == [3, 3]
    assert "opt/same" not in about["files"]["changed"]
    assert about["other_files"] == {"added": [], "removed": ["etc/dir/below", "etc/gone"], "changed": ["opt/x"]}
    report = format_diff(about)
    assert "  ~ torch 2.6 → 2.11" in report
    assert "  + new-one 3" in report
    assert "  - numpy 1" in report
    assert "  ~ WORD one → two" in report
    assert "of these not in the packages above: 2 removed, 1 changed" in report
    json.dumps(about)


def test_diff_of_an_image_with_itself_is_empty(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    one = image(tmp_path, stack, "a", {"etc/one": b"1", **dpkg(libc6="1")}, A="b")
    about = compare(one, one)
    assert about["files"] == {"added": {}, "removed": {}, "changed": {}}
    assert "debian packages: nothing changed, 1 the same" in format_diff(about)


def test_report_fits_one_screen(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    before = image(tmp_path, stack, "a", {"x": b""})
    after = image(tmp_path, stack, "b", {f"opt/{number:03}": b"x" for number in range(300)})
    report = format_diff(compare(before, after))
    assert len(report.splitlines()) < 40
    assert "… and 290 more (--json has all)" in report


def differences(tmp_path: Path, one: Files, other: Files, mode: int = 0o644) -> list[str]:
    with write(tmp_path / "one", one).open("rb") as first, write(tmp_path / "other", other, mode).open("rb") as second:
        return list(layer_differences(SquashfsReader(first), SquashfsReader(second)))


def test_differing_entries_of_two_layers(tmp_path: Path) -> None:
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
    return StoredLayer(
        name=name,
        cache_key="k",
        diff_id=diff_id,
        tar_size=1,
        digest=f"blob of {diff_id}",
        size=1,
        executor="x",
        seconds=1.0,
        inputs={},
        notes={"drift": ["libc6 1 → 2"]},
    )


def test_rebuild_error_names_differing_entries() -> None:
    same = Rebuilt(name="base", before=stored("base", "1"), after=stored("base", "1"), differing=())
    refuse_differences("x", Comparison(layers=(same,), image_ids=("i", "i"), sif_digests=("s", "s")))
    other = Rebuilt(
        name="own", before=stored("own", "1"), after=stored("own", "2"), differing=[f"f{n}: content" for n in range(30)]
    )
    with pytest.raises(VerifyError) as caught:
        refuse_differences("x", Comparison(layers=(same, other), image_ids=("i", "j"), sif_digests=("s", "t")))
    message = str(caught.value)
    assert message.startswith("x: 1 of 2 layers differ:\n  layer own: 1 → 2, 30 entries differ\n    f0: content\n")
    assert "… and 10 more" in message
    assert message.endswith("drift: libc6 1 → 2")


def test_diff_of_stored_images_and_sif_files(
    files_only: SampleRecipe, store: Store, tmp_path: Path, run_cli: RunCli
) -> None:
    made = build(BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), Progress(quiet=True)))
    parts = [Partition(store.blob_path(layer.digest), 0, layer.size, layer.digest) for layer in made.layers]
    write_sif(tmp_path / "own.sif", parts, SifHeader(sif_id([], "x"), "x", "amd64", 1))
    with open_image("own", store) as one, open_image(str(tmp_path / "own.sif"), store) as other:
        about = compare(one, other)
        assert one.environment == other.environment | {"PATH": one.environment["PATH"]}
    assert all(row["same"] for row in about["layers"])
    output = run_cli("--store", store.root, "diff", "own", "./own.sif").stdout
    assert "files: nothing changed" in output
    assert json.loads(run_cli("--store", store.root, "diff", "own", "own.sif", "--json").stdout)["files"]["added"] == {}
    assert "no image 'owl'" in run_cli("--store", store.root, "diff", "owl", "own", code=2).stderr
    assert "none.sif is not there" in run_cli("--store", store.root, "diff", "own", "none.sif", code=2).stderr
    assert "not a SIF" in run_cli("--store", store.root, "diff", __file__, "own", code=6).stderr
    with pytest.raises(UsageError, match="Did you mean 'own'"), open_image("owm", store):
        pass
