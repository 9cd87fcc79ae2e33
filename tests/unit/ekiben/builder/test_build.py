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

from ekiben.artifacts.export import build_and_export
from ekiben.artifacts.exporters.oci import make_archive
from ekiben.artifacts.exporters.sif import make_sif
from ekiben.builder.build import BuildContext, Options, build, image_name, plan, prepare_job
from ekiben.core.errors import EngineError, FetchError, StoreError
from ekiben.core.progress import Progress
from ekiben.executors import Script
from ekiben.formats import oci
from ekiben.formats.sif import read_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, LayerHandle, Store, prune
from support.compiled import compiled
from support.forked_cli import server
from support.sample_recipe import AS_SIF, SampleRecipe, becomes_empty, chain_of, seed, seeded

ROOT = Path(__file__).resolve().parents[4]


def built(sample: SampleRecipe, store: Store) -> Image:
    return build(BuildContext(chain_of(sample), store, Options(), Progress(io.StringIO(), quiet=True)))


def reasons(sample: SampleRecipe, store: Store) -> dict[str, str]:
    return {action.layer.name: action.reason for action in plan(chain_of(sample), store)}


# ---------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_writes_nothing(sample: SampleRecipe, tmp_path: Path) -> None:
    assert reasons(sample, Store(tmp_path / "store")) == {
        "ground": "never built in this store",
        "walls": "parent is rebuilt",
        "roof": "parent is rebuilt",
        "own": "parent is rebuilt",
    }
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda sample: None, {}),
        (
            lambda sample: sample.replace("images/walls.def", "> /word", "> /w"),
            {
                "walls": "%post changed",
                "roof": "parent changed",
                "own": "parent changed, file changed: /.singularity.d/Singularity, /opt/ekiben/image.json",
            },
        ),
        (
            lambda sample: sample.write("files/data.txt", "new\n"),
            {"roof": "file changed: /opt/data/data.txt", "own": "parent changed, file changed: /opt/ekiben/image.json"},
        ),
        (
            lambda sample: (sample.path / "files/data.txt").chmod(0o755),
            {"roof": "file changed: /opt/data/data.txt", "own": "parent changed, file changed: /opt/ekiben/image.json"},
        ),
        (
            lambda sample: [sample.write(f"files/tree/{name}", "") for name in "vwxyz"],
            {
                "roof": "file changed: /opt/tree/v, /opt/tree/w, /opt/tree/x and 2 more",
                "own": "parent changed, file changed: /opt/ekiben/image.json",
            },
        ),
        (
            lambda sample: sample.replace("images/walls.def", "GREETING={{ word }}", "GREETING=hi"),
            {
                "roof": "environment changed: GREETING",
                "own": (
                    "parent changed, file changed: /.singularity.d/Singularity, /.singularity.d/env/90-environment.sh,"
                    " /opt/ekiben/image.json"
                ),
            },
        ),
        (
            lambda sample: sample.write("entrypoints/greet.py", "print('hi')\n"),
            {"own": "file changed: /opt/ekiben/recipe/entrypoints/greet.py"},
        ),
        (
            lambda sample: sample.replace("images/ground.def", "bookworm", "trixie"),
            {
                "ground": "source changed",
                "walls": "parent changed",
                "roof": "parent changed",
                "own": "parent changed, file changed: /.singularity.d/Singularity, /opt/ekiben/image.json",
            },
        ),
        (
            lambda sample: sample.stack(epoch=5),
            {
                "ground": "epoch changed",
                "walls": "parent changed, epoch changed",
                "roof": "parent changed, epoch changed",
                "own": "parent changed, file changed: /opt/ekiben/image.json, epoch changed",
            },
        ),
    ],
    ids=["nothing", "post", "file", "mode", "many files", "environment", "entrypoint", "base", "epoch"],
)
def test_plan_gives_the_reason_of_every_change(
    sample: SampleRecipe, tmp_path: Path, change: Callable[[SampleRecipe], object], expected: dict[str, str]
) -> None:
    store = seeded(sample, tmp_path / "store", "ground", "walls", "roof", "own")
    assert set(reasons(sample, store).values()) == {"stored"}
    change(sample)
    assert {name: reason for name, reason in reasons(sample, store).items() if reason != "stored"} == expected


def test_plan_rebuilds_a_layer_whose_blob_is_missing(sample: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(sample, tmp_path / "store", "ground", "walls", "roof")
    layer = store.layer(chain_of(sample).layers[1].cache_key)
    assert layer is not None
    store.drop_blob(layer.digest)
    assert reasons(sample, store) == {
        "ground": "stored",
        "walls": "its data is gone from the store",
        "roof": "stored",
        "own": "parent is rebuilt",
    }


# --------------------------------------------------------------------------------------------------------------- build


def test_layers_of_files_build_without_an_engine(files_only: SampleRecipe, store: Store) -> None:
    image = built(files_only, store)
    assert [layer.name for layer in image.layers] == ["ground", "roof", "own"]
    assert set(reasons(files_only, store).values()) == {"stored"}
    with store.blob_path(image.layers[1].digest).open("rb") as stream:
        reader = SquashfsReader(stream)
        assert reader.read_file("opt/tree/sub/b.txt") == b"b\n"
        assert [entry.path for entry in reader.entries()] == [
            "",
            "opt",
            "opt/data",
            "opt/data/data.txt",
            "opt/tree",
            "opt/tree/a.txt",
            "opt/tree/sub",
            "opt/tree/sub/b.txt",
        ]
    config = json.loads(store.get_blob(image.image_id))
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in image.layers]
    ref = store.image("own")
    assert ref is not None
    assert (ref["config"], ref["stack"], ref["tasks"]) == (image.image_id, "tiny", {"greet": "say hello"})


def test_empty_stores_give_equal_images_and_no_second_build(files_only: SampleRecipe, tmp_path: Path) -> None:
    images = [built(files_only, seeded(files_only, tmp_path / name, "ground")) for name in ("one", "two")]
    assert images[0].image_id == images[1].image_id
    assert [layer.digest for layer in images[0].layers] == [layer.digest for layer in images[1].layers]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    assert built(files_only, Store(tmp_path / "one")).image_id == images[0].image_id
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}


def test_damaged_layer_is_dropped_and_rebuilt(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    image = built(files_only, store)
    blob = store.blob_path(image.layers[1].digest)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 0xFF
    blob.write_bytes(data)
    log = io.StringIO()
    again, (product,) = build_and_export(
        BuildContext(chain_of(files_only), store, Options(), Progress(log)), formats=("sif",), output=tmp_path / "x.sif"
    )
    assert again.image_id == image.image_id
    assert "damaged" in log.getvalue()
    assert read_sif(tmp_path / "x.sif").layers
    assert product.created
    store.check_blob(image.layers[1].digest, again=True)


def test_damaged_record_of_a_last_build_is_written_again(files_only: SampleRecipe, store: Store) -> None:
    """The image is there, and a build reads no such record: the next one would not know why its layer is rebuilt."""
    image = built(files_only, store)
    record = store.root / "last" / f"{image.layers[1].name}.json"
    before = record.read_bytes()
    record.write_bytes(before[:-9])
    built(files_only, store)
    assert record.read_bytes() == before


def test_missing_base_builder_is_an_error_with_a_hint(
    files_only: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiben.core.process.os.environ", {**os.environ, "PATH": str(tmp_path)})
    monkeypatch.setattr("ekiben.packages.apt.which", lambda *names: None)
    with pytest.raises(EngineError, match="mmdebstrap is not installed") as caught:
        built(files_only, Store(tmp_path / "store"))
    assert "bootstrap.sh" in str(caught.value.hint)
    assert not list((tmp_path / "store/keys").iterdir())
    assert becomes_empty(tmp_path / "store/staging")


def test_another_stack_is_another_image(files_only: SampleRecipe, tmp_path: Path) -> None:
    files_only.write(
        "images/stacks/other/stack.yaml",
        (files_only.path / "images/stacks/tiny/stack.yaml").read_text().replace('"tiny"', '"other"'),
    )
    assert image_name(resolve(find_recipe(str(files_only.path)), stack="other")) == "own-other"
    assert image_name(chain_of(files_only)) == "own"


CRASH = """
import os, signal, sys
from pathlib import Path
from ekiben.store import Store
from ekiben.builder.plan import BuildContext, Options
from ekiben.builder.build import build
from ekiben.store import store as module
from ekiben.core.progress import Progress
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe

# Dies at the given system call of the store's: just before a file gets its name.
left = int(sys.argv[3])
def watch(event, arguments):
    global left
    # below an open folder, or by its path
    if event == "os.rename" and (arguments[3] >= 0 or sys.argv[2] in str(arguments[1])):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
build(BuildContext(resolve(find_recipe(sys.argv[1])), Store(Path(sys.argv[2])), Options(), Progress(quiet=True)))
"""


def test_build_killed_at_any_moment_is_resumed(files_only: SampleRecipe, tmp_path: Path) -> None:
    expected = built(files_only, seeded(files_only, tmp_path / "whole", "ground")).image_id
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    kills = 0
    for moment in range(40):
        store = seeded(files_only, tmp_path / str(moment), "ground")
        argv = [str(script), str(files_only.path), str(store.root), str(moment)]
        done = server().run(argv, os.environ, tmp_path, timeout=120)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:
            break
        kills += 1
        image = store.image("own")
        assert image is None or store.get_blob(image["manifest"])
        for path in (store.root / "blobs/sha256").iterdir():
            store.check_blob("sha256:" + path.name, again=True)
        assert built(files_only, store).image_id == expected
        store.open_for_writing()
        assert becomes_empty(store.root / "staging")
    assert 8 <= kills < 40


def test_two_builds_at_once_store_one_copy(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    files_only.write("files/tree/big.bin", "x" * 5_000_000)
    argv = [sys.executable, f"{ROOT}/build.py", "--store", str(store.root), "image", str(files_only.path), *AS_SIF]
    running = [
        subprocess.Popen(
            [*argv, "--json", "-o", f"{tmp_path}/{name}.sif"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two")
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert (tmp_path / "one.sif").read_bytes() == (tmp_path / "two.sif").read_bytes()
    assert len(list((store.root / "blobs/sha256").iterdir())) == 5  # three layers, config, manifest


def test_prune_during_a_build_removes_nothing_it_uses(files_only: SampleRecipe, store: Store) -> None:
    for path in (store.root / "blobs/sha256").iterdir():
        os.utime(path, (1, 1))

    class Prunes(io.StringIO):
        def write(self, text: str) -> int:
            if "layer own" in text:
                prune(store)
            return super().write(text)

    image = build(BuildContext(chain_of(files_only), store, Options(), Progress(Prunes())))
    for layer in image.layers:
        store.check_blob(layer.digest, again=True)


def test_ctrl_c_in_a_build_ends_with_130_and_keeps_the_store(
    files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    with files_only.write("files/tree/large", "").open("wb") as large:
        large.truncate(600 << 20)
    argv = [sys.executable, f"{ROOT}/build.py", "--store", str(store.root), "image", str(files_only.path), *AS_SIF]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any(line.startswith("layer roof") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "run the same command to resume" in stderr
    assert list((store.root / "staging").iterdir()) == []
    assert len(list((store.root / "keys").iterdir())) == 1


# ------------------------------------------------------------------------------------------------------------ products


def test_sif_is_reproducible_and_not_rewritten(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    image = built(files_only, store)
    first = make_sif(image, store, tmp_path / "a.sif", squash=False, on_bytes=lambda count: None)
    second = make_sif(image, store, tmp_path / "b.sif", squash=False, on_bytes=lambda count: None)
    again = make_sif(image, store, tmp_path / "a.sif", squash=False, on_bytes=lambda count: None)
    assert (tmp_path / "a.sif").read_bytes() == (tmp_path / "b.sif").read_bytes()
    assert (first.created, second.created, again.created) == (True, True, False)
    assert len(read_sif(tmp_path / "a.sif").layers) == 3
    flat_one = make_sif(image, store, tmp_path / "a.sif", squash=True, on_bytes=lambda count: None)
    assert flat_one.created
    assert len(read_sif(tmp_path / "a.sif").layers) == 1
    with pytest.raises(StoreError, match="there is no folder"):
        make_sif(image, store, tmp_path / "no/a.sif", squash=False, on_bytes=lambda count: None)


def test_archive_is_complete_or_absent(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    image = built(files_only, store)
    with pytest.raises(StoreError, match=r"gone/x.tar cannot be written: No such file"):
        make_archive(image, store, tmp_path / "gone/x.tar", on_bytes=lambda count: None)
    store.blob_path(image.layers[1].digest).unlink()
    before = set(tmp_path.iterdir())
    with pytest.raises(StoreError, match=r"blob .* cannot be read: .*: No such file"):
        make_archive(image, store, tmp_path / "x.tar", on_bytes=lambda count: None)
    assert set(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------------------------ the parts


def test_prepare_job_sets_environment_script_and_files(sample: SampleRecipe, tmp_path: Path) -> None:
    chain = chain_of(sample)
    store = seeded(sample, tmp_path / "store", "ground")
    lines: list[str] = []
    with store.staging() as staging:
        script = Script("walls", "true\n", {"A": "it's"})
        job = prepare_job(script, [], store, staging, files=chain.layers[1].files, log=lines.append)
        assert (job.mount / "post.sh").read_text() == "true\n"
        assert (job.mount / "environment").read_text() == "export A='it'\"'\"'s'\n"
        assert (job.mount / "environment").stat().st_mode & 0o777 == 0o600
        assert "it" not in (job.mount / "run.sh").read_text().split()
        with tarfile.open(job.mount / "files.tar") as tar:
            (info,) = tar.getmembers()
            assert (info.name, info.mode, info.uid, info.uname) == ("opt/tool.sh", 0o755, 0, "")
    assert job.cache.is_dir()
    assert not staging.exists()


def test_seeded_layer_reads_like_a_built_one(files_only: SampleRecipe, tmp_path: Path) -> None:
    """What the tests here stand on."""
    store = Store(tmp_path / "store")
    layer = chain_of(files_only).layers[0]
    seed(store, layer)
    stored = store.layer(layer.cache_key)
    assert stored is not None
    assert sum(map(len, oci.layer_tar(LayerHandle(store, stored)))) == stored.tar_size


def test_git_commit_that_cannot_be_had_is_named_before_anything_is_built(sample: SampleRecipe, tmp_path: Path) -> None:
    compiled(sample)
    subprocess.run(["git", "init", "--quiet", "--bare", sample.path / "mirror"], check=True)
    source = f"    capabilities=8.0\n    tiny_repository={sample.path}/mirror\n    tiny_commit={'1' * 40}"
    sample.replace("images/roof.def", "    capabilities=8.0", source)
    sample.replace("images/roof.def", "echo compile", "echo {{ tiny_repository }} {{ tiny_commit }}")
    store = Store(tmp_path / "store")
    with pytest.raises(FetchError, match=f"^{sample.path}/mirror does not have the commit {'1' * 40}$"):
        built(sample, store)
    assert not [*store.root.glob("layers/*")]
