"""Build stages without an engine: what is in a wheel's key and what is not, what a plan says, what is rendered and
kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiben.builder._stage import _collect_outputs, files_for
from ekiben.builder.build import BuildContext, _Build, import_wheel
from ekiben.builder.plan import Options, plan, plan_stages
from ekiben.builder.wheels import export_wheel, find_wheel, format_savings, read_record, wheels_of
from ekiben.core.errors import DefinitionError, LayerError, StoreError, UsageError, VerifyError
from ekiben.core.progress import Progress
from ekiben.executors import JobFailed
from ekiben.formats.layer import Entry, File, LayerEntry
from ekiben.formats.placement import resolve_destinations as to_positions
from ekiben.resolve.graph import stages_of
from ekiben.resolve.render import render
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import StageOutput, Store, StoredResult, prune
from support.compiled import compiled, extension, write_wheel
from support.sample_recipe import RunCli, SampleRecipe, seeded

SO = "tiny/op.cpython-311-x86_64-linux-gnu.so"


def chain_of(sample: SampleRecipe, **options: Any) -> Any:
    return resolve(find_recipe(str(sample.path)), **options)


def stage_of(sample: SampleRecipe, **options: Any) -> Any:
    (stage,) = wheels_of(chain_of(sample, **options)).values()
    return stage


@pytest.fixture
def tiny(sample: SampleRecipe) -> SampleRecipe:
    return compiled(sample)


def origins(sample: SampleRecipe) -> Any:
    (about,) = (file for file in chain_of(sample).top.files if file.destination == "/opt/ekiben/image.json")
    return json.loads(about.content).get("compiled")


def test_image_metadata_records_the_wheels_origin(tiny: SampleRecipe) -> None:
    tiny.write("images/stacks/tiny/apt.lock", "[walls]\ng++-12=12.2\nlibc6=2\n")
    tiny.write("files/source/tiny-source.lock", f"tiny==1.0 \\\n    --hash=sha256:{'a' * 64}\n")
    tiny.write("files/tool.lock", f"nvidia-cuda-nvcc==13.0.88 \\\n    --hash=sha256:{'b' * 64}\n")
    tiny.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "files/tool.lock /opt/tool.lock")
    assert origins(tiny) == [
        {
            "package": "tiny",
            "layer": "roof",
            "cache_key": stage_of(tiny).cache_key,
            "torch": "2.11.0",
            "cuda": "13.0",
            "python": "3.11",
            "cxx11_abi": True,
            "capabilities": ["9.0"],
            "compilers": {"g++-12": "12.2", "nvcc": "13.0.88"},
            "source": {"name": "tiny", "version": "1.0", "sha256": ["a" * 64]},
        }
    ]
    # Of a stage that compiles for no GPU, the source alone; of one that makes no package, nothing.
    tiny.replace("images/roof.def", "org.ekiben.wheel tiny", "some.label tiny")
    (plain,) = origins(tiny)
    assert plain.keys() == {"package", "layer", "cache_key", "source"}
    (tiny.path / "files/source/tiny-source.lock").unlink()
    assert origins(tiny) is None


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("https://example.org/tiny", "https://example.org/tiny"),
        ("{0}/tiny", ""),
        ("https://me:word@example.org/tiny", ""),
    ],
)
def test_credentials_are_not_in_the_recorded_repository(tiny: SampleRecipe, repository: str, message: str) -> None:
    commit = "1" * 40
    tiny.stack(arguments={"tiny_repository": repository.format(tiny.path), "tiny_commit": commit})
    tiny.replace(
        "images/roof.def", "    capabilities=8.0\n", "    capabilities=8.0\n    tiny_repository=\n    tiny_commit=\n"
    )
    tiny.replace("images/roof.def", "echo compile for", "fetch {{ tiny_repository }} {{ tiny_commit }} for")
    assert origins(tiny)[0]["source"] == {"repository": message, "commit": commit}


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "change",
    [
        lambda sample: sample.replace("images/roof.def", "echo compile for", "echo compile now for"),
        lambda sample: sample.write("files/source/tiny.c", "int other;\n"),
        lambda sample: sample.stack(torch="2.12.0", arguments={}),
        lambda sample: sample.stack(cuda="13.1", arguments={}),
        lambda sample: sample.stack(python="3.12", arguments={}),
        lambda sample: sample.stack(suite="trixie", arguments={}),
        lambda sample: sample.stack(compute_capabilities=["8.0"], arguments={}),
        lambda sample: sample.replace("images/walls.def", "> /word", "> /w"),
        lambda sample: sample.replace("images/walls.def", "export GREETING={{ word }}", "export GREETING=flag"),
        lambda sample: sample.replace("images/roof.def", "org.ekiben.wheel tiny", "org.ekiben.wheel small"),
    ],
    ids=[
        "script",
        "source",
        "torch",
        "cuda",
        "python",
        "suite",
        "capabilities",
        "compiler",
        "compiler's environment",
        "package",
    ],
)
def test_compilation_inputs_change_the_stage_key(tiny: SampleRecipe, change: Callable[[SampleRecipe], object]) -> None:
    before, layer = stage_of(tiny).cache_key, chain_of(tiny).layers[-2].cache_key
    change(tiny)
    assert stage_of(tiny).cache_key != before
    assert chain_of(tiny).layers[-2].cache_key != layer


@pytest.mark.parametrize(
    "change",
    [
        lambda sample: sample.replace("images/ground.def", "Include: b a", "Include: b a c"),
        lambda sample: sample.replace("images/roof.def", "    echo install\n", "    echo install it\n"),
        lambda sample: sample.replace("images/roof.def", "%test\n    true", "%test\n    false"),
        lambda sample: sample.stack(driver=">=999", description="other", arguments={}),
    ],
    ids=["layers below", "runtime layer", "test", "driver"],
)
def test_other_changes_keep_the_stage_key(tiny: SampleRecipe, change: Callable[[SampleRecipe], object]) -> None:
    before = stage_of(tiny).cache_key
    change(tiny)
    assert stage_of(tiny).cache_key == before


def test_a_stage_that_compiles_no_wheel_has_its_parent_in_its_key(tiny: SampleRecipe) -> None:
    tiny.replace("images/roof.def", "%labels\n    org.ekiben.wheel tiny\n", "")
    (stage,) = stages_of(chain_of(tiny).layers[-2].copies)
    assert stage.inputs["parent"] == stage.layers[-1].cache_key
    before = stage.cache_key
    tiny.replace("images/ground.def", "Include: b a", "Include: b a c")
    assert stages_of(chain_of(tiny).layers[-2].copies)[0].cache_key != before


def test_gpu_arch_narrows_the_compiled_capabilities(tiny: SampleRecipe) -> None:
    tiny.stack(compute_capabilities=["7.5", "8.0", "9.0"], arguments={})
    everything = stage_of(tiny)
    fewer = stage_of(tiny, gpu_arch="9.0")
    assert everything.inputs["capabilities"] == ["7.5", "8.0", "9.0"]
    assert fewer.inputs["capabilities"] == ["9.0"]
    assert "compile for 9.0\n" in fewer.stage.post
    assert chain_of(tiny).layers[0].cache_key == chain_of(tiny, gpu_arch="9.0").layers[0].cache_key
    tiny.replace(
        "images/roof.def", "    org.ekiben.wheel tiny", "    org.ekiben.wheel tiny\n    org.ekiben.least-capability 8.0"
    )
    assert stage_of(tiny).inputs["capabilities"] == ["8.0", "9.0"]
    with pytest.raises(UsageError, match=r"needs compute capability 8\.0 or later; the build selects only 7\.5"):
        stage_of(tiny, gpu_arch="7.5")


def test_job_memory_is_not_in_the_key(tiny: SampleRecipe) -> None:
    before = stage_of(tiny)
    tiny.replace(
        "images/roof.def", "    org.ekiben.wheel tiny", "    org.ekiben.wheel tiny\n    org.ekiben.job-memory 6.5"
    )
    assert (before.job_memory, stage_of(tiny).job_memory) == (None, 13 << 29)
    assert before.cache_key == stage_of(tiny).cache_key
    tiny.replace("images/roof.def", "job-memory 6.5", "job-memory much")
    with pytest.raises(DefinitionError, match=r"org\.ekiben\.job-memory is a number of GiB \(found: much\)"):
        stage_of(tiny)


def test_format_savings_of_fewer_gpu_architectures(tiny: SampleRecipe, tmp_path: Path) -> None:
    tiny.stack(compute_capabilities=["8.0", "9.0"], arguments={})
    store = Store(tmp_path / "store")
    shown = format_savings(chain_of(tiny, gpu_arch="9.0"), store)
    assert shown == "saves  tiny: for 9.0; not for 8.0, about 1 of 2 parts of its device code"
    keep(store, tiny, seconds=600.0)
    assert format_savings(chain_of(tiny, gpu_arch="9.0"), store).endswith("(one for 2 took 600 s and has 0 MB)")
    tiny.replace("images/roof.def", "%labels\n    org.ekiben.wheel tiny\n", "")
    assert "saves nothing: no layer of own is compiled for GPUs" in format_savings(
        chain_of(tiny, gpu_arch="9.0"), store
    )


# --------------------------------------------------------------------------------------------------------- plan, render


def keep(
    store: Store, sample: SampleRecipe, *, seconds: float = 1.0, origin: str = "compiled", data: bytes = b"PK wheel"
) -> StoredResult:
    """A wheel in the store, as if it had been compiled."""
    store.open_for_writing()
    stage = stage_of(sample)
    digest = store.put_blob(data)
    result = StoredResult(
        name=stage.name,
        key=stage.cache_key,
        wheel="tiny",
        inputs=stage.inputs,
        origin=origin,
        executor="hand",
        seconds=seconds,
        files=(StageOutput("/opt/wheels/tiny/tiny-1.0-cp311-cp311-linux_x86_64.whl", 0o644, digest, len(data)),),
    )
    store.put_result(result)
    return result


def rows(sample: SampleRecipe, store: Store) -> list[tuple[str, bool, str]]:
    return [
        row
        for action in plan(chain_of(sample), store)
        for row in (
            *((need.step.name, need.is_stored, need.reason) for need in action.stage_deps),
            (action.layer.name, action.stored is not None, action.reason),
        )
    ]


def test_plan_shows_stages_with_reasons(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(tiny, tmp_path / "store", "ground")
    assert rows(tiny, store) == [
        ("ground", True, "stored"),
        ("walls", False, "never built in this store"),
        ("roof.build", False, "never built in this store"),
        ("roof", False, "never built in this store"),
        ("own", False, "parent is rebuilt"),
    ]
    keep(store, tiny)
    assert rows(tiny, store)[1:3] == [
        ("roof.build", True, "stored, compiled"),
        ("roof", False, "never built in this store"),
    ]
    tiny.stack(compute_capabilities=["8.0", "9.0"], arguments={})
    assert ("roof.build", False, "%post changed, compute capabilities changed: 9.0 → 8.0 9.0") in rows(tiny, store)


def test_stage_is_not_planned_when_its_layer_is_stored(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(tiny, tmp_path / "store", "ground", "roof", "own")
    assert rows(tiny, store) == [("ground", True, "stored"), ("roof", True, "stored"), ("own", True, "stored")]


def test_the_plan_on_the_command_line(tiny: SampleRecipe, tmp_path: Path, run_cli: RunCli) -> None:
    stdout = run_cli("--store", tmp_path / "store", "plan", tiny.path, "--gpu-arch", "9.0").stdout
    assert "BUILD   roof.build *  " in stdout
    assert "* a build stage: only its outputs are in the image" in stdout
    assert "saves  tiny: for 9.0" in stdout
    told = run_cli("--store", tmp_path / "store", "plan", tiny.path, "--json").stdout
    (roof,) = [row for row in json.loads(told) if row["layer"] == "roof"]
    assert [stage["step"] for stage in roof["stage_deps"]] == ["walls", "roof.build"]
    assert "does not know it; it knows 7.5" in run_cli("plan", tiny.path, "--gpu-arch", "7.0", code=2).stderr


def test_a_dockerfile_with_stages(tiny: SampleRecipe, tmp_path: Path) -> None:
    text = render(chain_of(tiny), "dockerfile", tmp_path / "out").read_text()
    assert [line for line in text.splitlines() if line.startswith(("FROM", "COPY", "    sh "))] == [
        "FROM scratch AS layer-ground",
        "FROM layer-ground AS layer-walls",
        "    sh /run/copy.sh /run/walls/0 /opt/tool.sh tool.sh",
        "FROM layer-walls AS stage-roof-build",
        "    sh /run/copy.sh /run/roof.build/0 /opt/source source",
        "FROM layer-ground AS layer-roof",
        "COPY --from=stage-roof-build /opt/wheels/tiny /opt/wheels/tiny",
        "FROM layer-roof AS layer-own",
        "COPY files/own/ /",
    ]
    assert text.count('ENV GREETING="bye"') == 1
    assert (tmp_path / "out/files/roof.build/0/tiny.c").exists()
    assert "compile for 9.0" in (tmp_path / "out/post/roof.build.sh").read_text()


def test_a_definition_file_with_stages(tiny: SampleRecipe, tmp_path: Path) -> None:
    text = render(chain_of(tiny), "def", tmp_path / "out").read_text()
    first, last = text.split("Stage: image")
    assert "Stage: stage-roof-build" in first
    assert "compile for 9.0" in first
    assert "echo install" not in first
    assert "%files from stage-roof-build\n    /opt/wheels/tiny /opt/wheels/tiny" in last
    assert "compile for" not in last
    assert "%labels" not in first


# ---------------------------------------------------------------------------------------------------------------- store


def test_prune_keeps_wheels_until_it_is_asked(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    blob = store.blob_path(keep(store, tiny).files[0].digest)
    assert prune(store) == []
    assert blob.exists()
    assert len(prune(store, wheels=True, dry_run=True)) == 1
    assert blob.exists()
    assert len(prune(store, wheels=True)) == 1
    assert store.results() == []
    assert list((store.root / "results").iterdir()) == []
    keep(store, tiny, origin="imported")
    assert prune(store, wheels=True) == []


def test_prune_removes_abandoned_compiler_output_only(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    keep(store, tiny)
    work = store.cache / "work/roof.build-0"
    (work / "tiny").mkdir(parents=True)
    prune(store)
    assert work.exists()
    with store.building([]):
        os.utime(work)
        prune(store, wheels=True)
    assert work.exists()
    prune(store, wheels=True)
    assert not work.exists()


def test_wheels_export_and_import_round_trip(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    kept = keep(store, tiny)
    assert find_wheel(store, "tiny") == find_wheel(store, kept.key[:8]) == kept
    with pytest.raises(UsageError, match=r"no wheel 'tinny'.*Did you mean 'tiny'"):
        find_wheel(store, "tinny")
    wheel = export_wheel(store, kept, tmp_path)
    assert wheel.read_bytes() == b"PK wheel"
    assert read_record(wheel, stage_of(tiny)) == kept
    with pytest.raises(VerifyError, match=r"capabilities: 9\.0 there, 8\.0 here"):
        read_record(wheel, stage_of(tiny, gpu_arch="8.0"))
    wheel.with_name(wheel.name + ".json").write_text("{}")
    with pytest.raises(VerifyError, match="is not a record of a wheel"):
        read_record(wheel, stage_of(tiny))
    tiny.stack(torch="2.12.0", arguments={})
    keep(store, tiny)
    with pytest.raises(UsageError, match="there are several wheels 'tiny'; name one by its key"):
        find_wheel(store, "tiny")


def test_an_export_never_replaces_another_wheel_of_its_name(tiny: SampleRecipe, tmp_path: Path) -> None:
    """Wheels for other GPUs have the same file name."""
    store = Store(tmp_path / "store")
    kept = keep(store, tiny)
    wheel = export_wheel(store, kept, tmp_path)
    assert export_wheel(store, kept, tmp_path) == wheel
    wheel.write_bytes(b"PK for other GPUs")
    with pytest.raises(StoreError, match="exists and differs"):
        export_wheel(store, kept, tmp_path)
    assert wheel.read_bytes() == b"PK for other GPUs"


def test_wheels_of_the_upstream_store_are_used(tiny: SampleRecipe, tmp_path: Path) -> None:
    behind = Store(tmp_path / "cluster")
    kept = keep(behind, tiny)
    mine = Store(tmp_path / "mine", behind)
    assert mine.result(kept.key) == kept
    assert mine.blob_path(kept.files[0].digest).exists()


def test_a_second_wheel_of_one_key_is_refused(tiny: SampleRecipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    keep(store, tiny)
    wheel = write_wheel(tmp_path, {SO: extension("sm_90")})
    with pytest.raises(VerifyError, match=r"there is a wheel for roof\.build already \(compiled\), with other bytes"):
        import_wheel(BuildContext(chain_of(tiny), store, Options(), Progress(quiet=True)), wheel)


# -------------------------------------------------------------------------------------- compiling, with a script's part


class Script:
    """In place of an engine: each run plays the next of ``scenes`` (lines, then files, or an exit code)."""

    def __init__(self, store: Store, *scenes: tuple[list[str], dict[str, bytes] | int]) -> None:
        self.store, self.progress, self.scenes = store, Progress(quiet=True), list(scenes)
        self.settings: list[dict[str, str]] = []
        self.executor = ("script", None)

    @contextmanager
    def log(self, step: Any) -> Iterator[Any]:
        from ekiben.builder.layer import Log

        path = self.store.root / "logs" / "x.log"
        with path.open("w") as stream:
            yield Log(path, stream, self.progress)

    @contextmanager
    def run_post(self, step: Any, lower: Any, staging: Path, files: Any, log: Any, settings: Any) -> Iterator[Any]:
        (staging / "mount").mkdir()
        self.settings.append(settings)
        lines, end = self.scenes.pop(0)
        for line in lines:
            log(line)
        if isinstance(end, int):
            raise JobFailed(end)
        (staging / "mount/measured.json").write_text('{"job_memory": 1000000}')

        def members() -> Iterator[LayerEntry]:
            for name, data in sorted(end.items()):
                yield Entry(name, "file", 0o644, size=len(data)), iter([data])

        yield members()


def compile_with(
    sample: SampleRecipe, store: Store, *scenes: tuple[list[str], dict[str, bytes] | int]
) -> tuple[Script, Any]:
    store.open_for_writing()
    script = Script(store, *scenes)
    layer = chain_of(sample).layers[-2]
    build: Any = _Build(script)  # type: ignore[arg-type]
    build.ensure_layers = lambda actions: []
    deps = {dep.step.cache_key: dep for dep in plan_stages(layer.copies, store)}
    with build._results(layer.copies, deps) as results:
        build._keep(results)
    return script, results


@pytest.fixture
def good(tmp_path: Path) -> dict[str, bytes]:
    wheel = write_wheel(tmp_path, {SO: extension("sm_90")})
    return {f"opt/wheels/tiny/{wheel.name}": wheel.read_bytes(), "usr/lib/compiler": b"stays behind"}


def test_compile_stores_outputs_and_compile_stats(tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes]) -> None:
    store = Store(tmp_path / "store")
    script, results = compile_with(tiny, store, (["[1/3] a", "[3/3] b"], good))
    (result,) = results.values()
    assert [file.path for file in result.files] == ["/" + next(iter(good))]
    assert result.notes["extensions"] == {SO: ["sm_90"]}
    assert store.result(result.key) == result
    assert {key: store.compile_stats("tiny")[key] for key in ("job_memory", "units")} == {
        "job_memory": 1000000,
        "units": 3,
    }
    assert script.settings[0]["EKIBEN_WORK"].startswith("/run/ekiben/cache/work/roof.build-")
    (file,) = files_for(chain_of(tiny).layers[-2].copies, results, store)
    assert file.destination == "/" + next(iter(good))
    assert file.source == store.blob_path(result.files[0].digest)


@pytest.fixture
def plain(tiny: SampleRecipe) -> SampleRecipe:
    """The same with a stage that compiles no wheel, and hands over a folder and a file."""
    tiny.replace("images/roof.def", "%labels\n    org.ekiben.wheel tiny\n", "")
    tiny.replace(
        "images/roof.def", "    /opt/wheels/tiny /opt/wheels/tiny", "    /opt/out /opt/result\n    /opt/tool /opt/bin/"
    )
    return tiny


OUTPUTS = {"opt/out/one": b"1", "opt/out/sub/two": b"2", "opt/tool": b"t", "opt/other": b"x"}


class Tree(dict[str, str]):
    """Path → kind, instead of the layers below."""

    def lookup(self, path: str) -> Entry | None:
        """Return what is at a path."""
        return Entry(path, self[path]) if path in self else None  # type: ignore[arg-type]


def placed(sample: SampleRecipe, tmp_path: Path, *more: File, **below: str) -> list[str]:
    """Where the stage's files go on layers with these paths (``_`` for a slash)."""
    store = Store(tmp_path / "store")
    _, results = compile_with(sample, store, ([], OUTPUTS))
    files = [*more, *files_for(resolve(find_recipe(str(sample.path))).layers[-2].copies, results, store)]
    return [
        file.destination
        for file in to_positions(files, Tree({path.replace("_", "/"): kind for path, kind in below.items()}))
    ]


def test_outputs_of_a_stage_go_to_their_destinations(plain: SampleRecipe, tmp_path: Path) -> None:
    assert placed(plain, tmp_path, opt="dir") == ["/opt/result/one", "/opt/result/sub/two", "/opt/bin/tool"]
    assert placed(plain, tmp_path, File("/opt/result.txt", 0o644), opt_bin="dir")[-1] == "/opt/bin/tool"


@pytest.mark.parametrize(
    ("below", "message"),
    [
        (
            {"opt_result": "dir"},
            (
                "%files from build: /opt/result is a folder in the layers below; name where the stage's folder goes:"
                " /opt/result/out"
            ),
        ),
        ({"opt_bin_tool": "dir"}, "%files: /opt/bin/tool is a folder in the layers below; name the file in it"),
    ],
    ids=["folder", "file"],
)
def test_stage_output_into_folder_fails(
    plain: SampleRecipe, tmp_path: Path, below: dict[str, str], message: str
) -> None:
    with pytest.raises(LayerError) as caught:
        placed(plain, tmp_path, **below)
    assert message in str(caught.value)


@pytest.mark.parametrize("path", ["/opt/result", "/opt/bin/tool", "/opt/bin"])
def test_path_of_a_stage_and_of_the_host_is_refused(plain: SampleRecipe, tmp_path: Path, path: str) -> None:
    with pytest.raises(LayerError, match=f"%files and %files from build both write {path}; leave one"):
        placed(plain, tmp_path, File(path, 0o644))


def test_folder_of_a_stage_with_a_slash_is_refused(plain: SampleRecipe, tmp_path: Path) -> None:
    plain.replace("images/roof.def", "/opt/out /opt/result", "/opt/out /opt/")
    with pytest.raises(LayerError, match="%files from build: /opt/out is a folder; name its destination: /opt/out"):
        placed(plain, tmp_path)


def test_empty_folder_of_an_output_is_reported(plain: SampleRecipe, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open_for_writing()
    (stage,) = stages_of(resolve(find_recipe(str(plain.path))).layers[-2].copies)
    folders = ("opt/out", "opt/out/hollow", "opt/out/hollow/deep", "opt/out/sub", "elsewhere")
    entries: list[LayerEntry] = [(Entry(path, "dir"), None) for path in folders]
    entries += [(Entry(path, "file", 0o600, size=1), [b"x"]) for path in ("opt/out/sub/two", "opt/tool")]
    with store.staging() as staging:
        outputs, left_out = _collect_outputs(stage, entries, staging, store)
    assert [(output.path, output.mode) for output in outputs] == [("/opt/out/sub/two", 0o644), ("/opt/tool", 0o644)]
    assert left_out == ["/opt/out/hollow is an empty folder, and only files are copied"]


def test_rendered_names_with_blanks_are_in_double_quotes(plain: SampleRecipe, tmp_path: Path) -> None:
    """Apptainer takes no others, and no backslashes."""
    plain.replace("images/roof.def", "    /opt/out /opt/result", '    "/opt/a folder/x" "/opt/a name"')
    text = render(resolve(find_recipe(str(plain.path))), "def", tmp_path / "folder").read_text()
    assert '    "/opt/a folder/x" "/opt/a name"\n' in text


def test_resumed_compilation_keeps_the_unit_count(tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes]) -> None:
    store = Store(tmp_path / "cache/store")
    (copy,) = chain_of(tiny).layers[-2].copies
    work = store.cache / f"work/roof.build-{copy.stage.cache_key[:12]}"
    work.mkdir(parents=True)
    (work / "half.o").touch()
    compile_with(tiny, store, (["[1/1] b"], good))
    assert "units" not in store.compile_stats("tiny")
    assert store.compile_stats("tiny")["job_memory"] == 1000000


def test_seconds_of_a_resumed_compilation_are_those_of_all_attempts(
    tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr("ekiben.builder._stage.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    store = Store(tmp_path / "cache/store")
    with pytest.raises(LayerError):
        compile_with(tiny, store, (["[1/2] a"], 1))  # begins at 0, its unit is done at 100
    stage = stage_of(tiny)
    work = store.cache / f"work/roof.build-{stage.cache_key[:12]}"
    assert store.compile_stats(stage.cache_key) == {"seconds": 100.0}
    assert list(work.iterdir()) == []
    (work / "half.o").touch()
    _, results = compile_with(tiny, store, (["[1/1] b"], good))  # begins at 200, its unit is done at 300
    assert next(iter(results.values())).seconds == 300.0
    assert store.compile_stats("tiny")["seconds"] == 300.0
    assert store.compile_stats(stage.cache_key) == {}


def test_seconds_of_a_lost_attempt_do_not_count(tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes]) -> None:
    store = Store(tmp_path / "cache/store")
    store.open_for_writing()
    store.put_compile_stats(stage_of(tiny).cache_key, {"seconds": 1e6})
    _, results = compile_with(tiny, store, (["[1/1] b"], good))
    assert next(iter(results.values())).seconds < 1e6


def test_compilation_killed_for_memory_resumes_with_half_the_jobs(
    tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiben.builder._concurrency.os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("ekiben.builder._concurrency._cgroups_of_process", lambda *places: [])
    monkeypatch.setattr("ekiben.builder._concurrency._available", lambda proc: 100 << 30)
    store = Store(tmp_path / "store")
    script, _ = compile_with(tiny, store, (["Killed"], 1), (["[1/2] a"], 137), (["[2/2] b"], good))
    assert [settings["MAX_JOBS"] for settings in script.settings] == ["8", "4", "2"]
    assert len({settings["NVCC_THREADS"] for settings in script.settings}) == 1
    with pytest.raises(LayerError, match="failed with exit code 1") as error:
        compile_with(tiny, Store(tmp_path / "other"), (["[1/2] a", "error: no such type"], 1))
    assert "What was compiled (1 units) is kept" in str(error.value)
    with pytest.raises(LayerError, match="killed for lack of memory, alone as it was"):
        compile_with(tiny, Store(tmp_path / "other"), *[(["Killed"], 1)] * 4)
    with pytest.raises(LayerError, match=r"no space left on the disk.*ekiben prune"):
        compile_with(tiny, Store(tmp_path / "other"), (["ld: No space left on device"], 1))
    assert Store(tmp_path / "other").results() == []


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"opt/other": b""}, LayerError, "the stage made nothing at /opt/wheels/tiny"),
        (
            {"opt/wheels/tiny/a.whl": b"", "opt/wheels/tiny/b.whl": b""},
            LayerError,
            "has 2 outputs, and one wheel is expected",
        ),
        ({"opt/wheels/tiny/readme": b""}, LayerError, "has 1 outputs, and one wheel is expected"),
        ({"opt/wheels/tiny/tiny-1.0-cp311-cp311-linux_x86_64.whl": b"PK"}, VerifyError, "cannot be read"),
    ],
)
def test_invalid_outputs_are_not_stored(
    tiny: SampleRecipe, tmp_path: Path, files: dict[str, bytes], error: type[Exception], message: str
) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(error, match=message):
        compile_with(tiny, store, ([], files))
    assert store.results() == []
    if error is VerifyError:
        assert list((store.root / "blobs/sha256").iterdir()) == []


def test_damaged_wheel_is_recompiled(tiny: SampleRecipe, tmp_path: Path, good: dict[str, bytes]) -> None:
    store = Store(tmp_path / "store")
    _, results = compile_with(tiny, store, ([], good))
    (result,) = results.values()
    blob = store.blob_path(result.files[0].digest)
    whole = blob.read_bytes()
    modified = blob.stat().st_mtime_ns
    blob.chmod(0o644)
    blob.write_bytes(whole[:-1] + b"x")
    os.utime(blob, ns=(modified, modified + 10**9))  # that it changed does not depend on the file system's clock
    script, _ = compile_with(tiny, store, ([], good))
    assert script.scenes == []
    assert blob.read_bytes() == whole


def test_the_wheels_commands(tiny: SampleRecipe, tmp_path: Path, run_cli: RunCli) -> None:
    store = tmp_path / "store"
    assert "no compiled wheels here" in run_cli("--store", store, "wheels", "list").stderr
    keep(Store(store), tiny, seconds=61.0)
    assert "for 9.0  8 B  compiled in 61 s" in run_cli("--store", store, "wheels", "list").stdout
    assert json.loads(run_cli("--store", store, "wheels", "list", "--json").stdout)[0]["wheel"] == "tiny"
    run_cli("--store", store, "wheels", "export", "tiny", "-o", tmp_path)
    assert len(list(tmp_path.glob("*.whl*"))) == 2
    assert (
        "is not a folder" in run_cli("--store", store, "wheels", "export", "tiny", "-o", tmp_path / "no", code=6).stderr
    )
    assert (
        "cannot be read" in run_cli("--store", store, "wheels", "import", tiny.path, tmp_path / "no.whl", code=2).stderr
    )
