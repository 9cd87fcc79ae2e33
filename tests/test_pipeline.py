"""plan() says why; build() makes what is missing, and a crash at any moment costs only what was not finished."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import oci
from builder.assemble import deliver, make_archive, make_sif
from builder.chain import resolve
from builder.errors import EngineError, StoreError
from builder.pipeline import Image, Options, build, image_name, plan, prepare_job
from builder.progress import Progress
from builder.recipe import find_recipe
from builder.sif import read_sif
from builder.squashfs import SquashfsReader
from builder.store import Store
from own_recipe import Own, becomes_empty, chain_of, seed, seeded

ROOT = Path(__file__).resolve().parent.parent


def built(own: Own, store: Store) -> Image:
    return build(chain_of(own), store, Options(), Progress(io.StringIO(), quiet=True))


def reasons(own: Own, store: Store) -> dict[str, str]:
    return {action.layer.name: action.reason for action in plan(chain_of(own), store)}


# ---------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_writes_nothing(own: Own, tmp_path: Path) -> None:
    assert reasons(own, Store(tmp_path / "store")) == {
        "ground": "never built in this store", "walls": "parent is rebuilt", "roof": "parent is rebuilt", "own": "parent is rebuilt",
    }  # fmt: skip
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda own: None, {}),
        (lambda own: own.replace("images/walls.def", "> /word", "> /w"),
         {"walls": "%post changed", "roof": "parent changed", "own": "parent changed, file changed: /.singularity.d/Singularity, /opt/ekiben/image.json"}),
        (lambda own: own.write("files/data.txt", "new\n"),
         {"roof": "file changed: /opt/data/data.txt", "own": "parent changed, file changed: /opt/ekiben/image.json"}),
        (lambda own: (own.path / "files/data.txt").chmod(0o755),
         {"roof": "file changed: /opt/data/data.txt", "own": "parent changed, file changed: /opt/ekiben/image.json"}),
        (lambda own: [own.write(f"files/tree/{name}", "") for name in "vwxyz"],
         {"roof": "file changed: /opt/tree/v, /opt/tree/w, /opt/tree/x and 2 more", "own": "parent changed, file changed: /opt/ekiben/image.json"}),
        (lambda own: own.replace("images/walls.def", "GREETING={{ word }}", "GREETING=hi"),
         {"roof": "environment changed: GREETING",
          "own": "parent changed, file changed: /.singularity.d/Singularity, /.singularity.d/env/90-environment.sh, /opt/ekiben/image.json"}),
        (lambda own: own.write("entrypoints/greet.py", "print('hi')\n"), {"own": "file changed: /opt/ekiben/recipe/entrypoints/greet.py"}),
        (lambda own: own.replace("images/ground.def", "bookworm", "trixie"),
         {"ground": "source changed", "walls": "parent changed", "roof": "parent changed",
          "own": "parent changed, file changed: /.singularity.d/Singularity, /opt/ekiben/image.json"}),
        (lambda own: own.stack(epoch=5), {"ground": "epoch changed", "walls": "parent changed, epoch changed",
                                          "roof": "parent changed, epoch changed",
                                          "own": "parent changed, file changed: /opt/ekiben/image.json, epoch changed"}),
    ],
    ids=["nothing", "post", "file", "mode", "many files", "environment", "entrypoint", "base", "epoch"],
)  # fmt: skip
def test_every_reason(own: Own, tmp_path: Path, change: Callable[[Own], object], expected: dict[str, str]) -> None:
    store = seeded(own, tmp_path / "store", "ground", "walls", "roof", "own")
    assert set(reasons(own, store).values()) == {"stored"}
    change(own)
    assert {name: reason for name, reason in reasons(own, store).items() if reason != "stored"} == expected


def test_data_that_is_gone(own: Own, tmp_path: Path) -> None:
    store = seeded(own, tmp_path / "store", "ground", "walls", "roof")
    layer = store.layer(chain_of(own).layers[1].cache_key)
    assert layer is not None
    store.drop_blob(layer.digest)
    assert reasons(own, store) == {"ground": "stored", "walls": "its data is gone from the store", "roof": "stored", "own": "parent is rebuilt"}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- build


def test_a_chain_of_files_needs_no_engine(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    image = built(flat, store)
    assert [layer.name for layer in image.layers] == ["ground", "roof", "own"]
    assert set(reasons(flat, store).values()) == {"stored"}
    with store.blob_path(image.layers[1].digest).open("rb") as stream:
        reader = SquashfsReader(stream)
        assert reader.read_file("opt/tree/sub/b.txt") == b"b\n"
        assert [entry.path for entry in reader.entries()] == [
            "", "opt", "opt/data", "opt/data/data.txt", "opt/tree", "opt/tree/a.txt", "opt/tree/sub", "opt/tree/sub/b.txt",
        ]  # fmt: skip
    config = json.loads(store.get_blob(image.image_id))
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in image.layers]
    ref = store.image("own")
    assert ref is not None
    assert (ref["config"], ref["stack"], ref["tasks"]) == (image.image_id, "tiny", {"greet": "say hello"})


def test_the_same_from_empty_stores_and_nothing_the_second_time(flat: Own, tmp_path: Path) -> None:
    images = [built(flat, seeded(flat, tmp_path / name, "ground")) for name in ("one", "two")]
    assert images[0].image_id == images[1].image_id
    assert [layer.digest for layer in images[0].layers] == [layer.digest for layer in images[1].layers]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    assert built(flat, Store(tmp_path / "one")).image_id == images[0].image_id
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}


def test_a_damaged_layer_is_found_dropped_and_made_again(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    image = built(flat, store)
    blob = store.blob_path(image.layers[1].digest)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 0xFF
    blob.write_bytes(data)
    said = io.StringIO()
    again, (product,) = deliver(
        chain_of(flat), store, Options(), Progress(said), formats=("sif",), output=tmp_path / "x.sif"
    )
    assert again.image_id == image.image_id
    assert "damaged" in said.getvalue()
    assert read_sif(tmp_path / "x.sif").layers
    assert product.made
    store.check_blob(image.layers[1].digest, again=True)


def test_without_what_makes_a_base_the_error_says_what_to_do(
    flat: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.process.os.environ", {**os.environ, "PATH": str(tmp_path)})
    monkeypatch.setattr("builder.debootstrap.which", lambda *names: None)
    with pytest.raises(EngineError, match="mmdebstrap is not installed") as caught:
        built(flat, Store(tmp_path / "store"))
    assert "bootstrap.sh" in str(caught.value.hint)
    assert not list((tmp_path / "store/keys").iterdir())
    assert becomes_empty(tmp_path / "store/staging")


def test_another_stack_is_another_image(flat: Own, tmp_path: Path) -> None:
    flat.write(
        "images/stacks/other/stack.yaml",
        (flat.path / "images/stacks/tiny/stack.yaml").read_text().replace('"tiny"', '"other"'),
    )
    assert image_name(resolve(find_recipe(str(flat.path)), stack="other")) == "own-other"
    assert image_name(chain_of(flat)) == "own"


CRASH = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from builder import store as module
from builder.pipeline import Options, build
from builder.progress import Progress
from builder.chain import resolve
from builder.recipe import find_recipe

# Dies at the given system call of the store's: just before a file gets its name.
left = int(sys.argv[4])
def watch(event, arguments):
    global left
    if event == "os.rename" and sys.argv[3] in str(arguments[1]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
build(resolve(find_recipe(sys.argv[2])), module.Store(Path(sys.argv[3])), Options(), Progress(quiet=True))
"""


def test_killed_at_any_moment_the_next_run_goes_on(flat: Own, tmp_path: Path) -> None:
    expected = built(flat, seeded(flat, tmp_path / "whole", "ground")).image_id
    kills = 0
    for moment in range(40):
        store = seeded(flat, tmp_path / str(moment), "ground")
        argv = [sys.executable, "-c", CRASH, str(ROOT), str(flat.path), str(store.root), str(moment)]
        if subprocess.run(argv, check=False).returncode == 0:
            break
        kills += 1
        image = store.image("own")
        assert image is None or store.get_blob(image["manifest"])
        for path in (store.root / "blobs/sha256").iterdir():
            store.check_blob("sha256:" + path.name, again=True)
        assert built(flat, store).image_id == expected
        store.open_for_writing()
        assert becomes_empty(store.root / "staging")
    assert 8 <= kills < 40


def test_two_builds_at_once_store_one_copy(flat: Own, tmp_path: Path) -> None:
    flat.write("files/tree/big.bin", "x" * 5_000_000)
    store = seeded(flat, tmp_path / "store", "ground")
    argv = [
        sys.executable,
        str(ROOT / "build.py"),
        "--store",
        str(store.root),
        "image",
        str(flat.path),
        "--format",
        "sif",
        "--no-verify",
        "--json",
    ]
    running = [subprocess.Popen([*argv, "-o", str(tmp_path / f"{name}.sif")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for name in ("one", "two")]  # fmt: skip
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert (tmp_path / "one.sif").read_bytes() == (tmp_path / "two.sif").read_bytes()
    assert len(list((store.root / "blobs/sha256").iterdir())) == 5  # three layers, config, manifest


def test_pruning_meanwhile_takes_nothing_from_a_build(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    for path in (store.root / "blobs/sha256").iterdir():
        os.utime(path, (1, 1))

    class Prunes(io.StringIO):
        def write(self, text: str) -> int:
            if "layer own" in text:
                store.prune()
            return super().write(text)

    image = build(chain_of(flat), store, Options(), Progress(Prunes()))
    for layer in image.layers:
        store.check_blob(layer.digest, again=True)


def test_ctrl_c_in_a_build_ends_with_130_and_leaves_the_store_usable(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    with flat.write("files/tree/large", "").open("wb") as large:
        large.truncate(600 << 20)
    argv = [
        sys.executable,
        str(ROOT / "build.py"),
        "--store",
        str(store.root),
        "image",
        str(flat.path),
        "--format",
        "sif",
        "--no-verify",
    ]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any(line.startswith("layer roof") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "run the same command to go on" in said
    assert list((store.root / "staging").iterdir()) == []
    assert len(list((store.root / "keys").iterdir())) == 1


# ------------------------------------------------------------------------------------------------------------ products


def test_a_sif_is_the_same_file_and_is_not_written_twice(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    image = built(flat, store)
    first = make_sif(image, store, tmp_path / "a.sif", flat=False, on_bytes=lambda count: None)
    second = make_sif(image, store, tmp_path / "b.sif", flat=False, on_bytes=lambda count: None)
    again = make_sif(image, store, tmp_path / "a.sif", flat=False, on_bytes=lambda count: None)
    assert (tmp_path / "a.sif").read_bytes() == (tmp_path / "b.sif").read_bytes()
    assert (first.made, second.made, again.made) == (True, True, False)
    assert len(read_sif(tmp_path / "a.sif").layers) == 3
    flat_one = make_sif(image, store, tmp_path / "a.sif", flat=True, on_bytes=lambda count: None)
    assert flat_one.made
    assert len(read_sif(tmp_path / "a.sif").layers) == 1
    with pytest.raises(StoreError, match="there is no folder"):
        make_sif(image, store, tmp_path / "no/a.sif", flat=False, on_bytes=lambda count: None)


def test_an_archive_is_whole_or_not_there(flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    image = built(flat, store)
    with pytest.raises(StoreError, match=r"gone/x.tar cannot be written: No such file"):
        make_archive(image, store, tmp_path / "gone/x.tar", on_bytes=lambda count: None)
    store.blob_path(image.layers[1].digest).unlink()
    before = set(tmp_path.iterdir())
    with pytest.raises(StoreError, match=r"blob .* cannot be read: .*: No such file"):
        make_archive(image, store, tmp_path / "x.tar", on_bytes=lambda count: None)
    assert set(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------------------------ the parts


def test_what_a_job_gets(own: Own, tmp_path: Path) -> None:
    chain = chain_of(own)
    store = seeded(own, tmp_path / "store", "ground")
    lines: list[str] = []
    with store.staging() as staging:
        job = prepare_job(
            "walls", "true\n", {"A": "it's"}, [], store, staging, files=chain.layers[1].files, log=lines.append
        )
        assert (job.mount / "post.sh").read_text() == "true\n"
        assert "A='it'\"'\"'s'" in (job.mount / "run.sh").read_text()
        with tarfile.open(job.mount / "files.tar") as tar:
            (info,) = tar.getmembers()
            assert (info.name, info.mode, info.uid, info.uname) == ("opt/tool.sh", 0o755, 0, "")
    assert job.cache.is_dir()
    assert not staging.exists()


def test_a_seed_is_a_layer_like_any_other(flat: Own, tmp_path: Path) -> None:
    """What the tests here stand on."""
    store = Store(tmp_path / "store")
    layer = chain_of(flat).layers[0]
    seed(store, layer)
    stored = store.layer(layer.cache_key)
    assert stored is not None
    assert sum(map(len, oci.layer_tar(store, stored))) == stored.tar_size
