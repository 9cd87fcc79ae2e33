"""The catalogue: what is in it, what is left out, and that no name in it is more than a name."""

from __future__ import annotations

import errno
import html.parser
import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from ekiben.core.errors import StoreError, UsageError
from ekiben.core.inner_path import InnerPath
from ekiben.doctor.image_requirements import LayerRequirements, _keep
from ekiben.gpu.device_code import DeviceCode
from ekiben.images.published import VersionRecord
from ekiben.publish import catalog as module
from ekiben.publish.catalog import runs
from ekiben.publish.catalog.gather import LayerInspector
from ekiben.publish.catalog.pages import HERE, _environment, plots, render
from ekiben.publish.catalog.runs import reduced
from ekiben.publish.catalog.write import WrittenCatalog, make_catalog
from ekiben.publish.prune import prune
from ekiben.store import Store
from ekiben.store.shared import SharedStore, open_shared
from support.catalog_samples import HOSTILE, SPEEDS, catalog, image, run_record, write
from support.cli_audit import ROOT
from support.published import Lab
from support.sample_recipe import RunCli, edit_record

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "entrypoints"))
from ekiben_tasks.task import run_metadata


def make(shared_dir: Path, **options: Any) -> WrittenCatalog:
    reader_store = Store(shared_dir.parent / "of-the-reader", open_shared(shared_dir))
    return make_catalog(shared_dir, reader_store, **{"out": None, "runs": [], "log": lambda line: None, **options})


def page(made: WrittenCatalog, name: str = "images/own.html") -> str:
    return (made.out / name).read_text()


# -------------------------------------------------------------------------------------------------------- what is in it


def test_catalog_of_two_versions_with_changes(lab: Lab) -> None:
    first = lab.put(version="1", tags=["paper"], pin=True)
    second = lab.put_next(version="2")
    sbom = second.sif.with_suffix(".cdx.json")
    assert sbom.exists()
    first.sif.with_suffix(".cdx.json").unlink()  # of a publisher before there were any
    made = make(lab.folder)
    assert made.out == lab.folder / "catalog"
    assert {str(path.relative_to(made.out)) for path in made.out.rglob("*") if path.is_file()} == {
        "index.html",
        "catalog.json",
        "images/own.html",
    }
    data = json.loads((made.out / "catalog.json").read_bytes())
    assert data == made.catalog
    (image_entry,) = data["images"]
    assert (image_entry["name"], image_entry["recipe"], image_entry["current"]) == ("own", "own", second.sif.stem)
    newest, oldest = image_entry["versions"]
    assert (oldest["tags"], oldest["pinned"], oldest["sbom"], oldest["changes"]) == (["paper"], True, None, None)
    assert (newest["tags"], newest["pinned"], newest["sbom"], newest["read_error"]) == (
        ["current"],
        False,
        sbom.name,
        None,
    )
    changes = newest["changes"]
    assert changes["before"] == first.sif.stem
    assert {row["name"] for row in changes["layers"]} == {"roof", "own"}
    assert [line for line in changes["files"]["roof"] if line.startswith("opt/data/data.txt: ") and "content" in line]
    shown = page(made)
    assert f"{lab.folder}/images/own/current greet" in shown.replace("<span>", "").replace("</span>", "")
    assert f'href="../../images/own/{sbom.name}"' in shown
    assert (made.out / "images" / f"../../images/own/{sbom.name}").resolve() == sbom.resolve()
    assert "opt/data/data.txt" in shown
    assert 'href="images/own.html"' in page(made, "index.html")


def test_documented_fields_exist(lab: Lab) -> None:
    lab.put()
    docstring = module.__doc__ or ""
    catalog = make(lab.folder).catalog
    (image_entry,) = catalog["images"]
    names = {
        *catalog,
        *image_entry,
        *image_entry["versions"][0],
        *image("x")["versions"][0],
        *image("x")["versions"][0]["changes"],
    }
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", docstring)] == []
    assert image_entry["versions"][0].keys() == image("x")["versions"][0].keys()  # so the samples are of use


def test_catalog_is_reproducible_and_readable_by_all(lab: Lab) -> None:
    lab.put()
    lab.folder.chmod(0o2750)
    before, mask = {}, os.umask(0o077)
    try:
        for _ in range(2):
            made = make(lab.folder)
            found = {path.relative_to(made.out): path.read_bytes() for path in made.out.rglob("*") if path.is_file()}
            assert before in ({}, found)
            before = found
    finally:
        os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.out.rglob("*") if path.is_file()}
    assert modes == {0o440}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (made.out, made.out / "images")} == {0o2750}
    assert {path.name for path in lab.folder.iterdir()} == {"README", "images", "store", "trash", "catalog"}


def test_gpus_are_those_of_the_device_code(lab: Lab, tmp_path: Path) -> None:
    """Facts as they would be kept of a layer with torch: no such layer is made here."""
    done = lab.put()
    held = DeviceCode({("sm_80", "sm_90", "compute_90"): 1})
    reader = Store(tmp_path / "reader", open_shared(lab.folder))
    top = done.record.layers[-1]
    _keep(
        reader,
        f"facts-{top.digest[7:]}",
        LayerRequirements(libraries={"opt/libtorch_cuda.so": held}, packages={"torch": "2.11.0"}, torch_cuda="13.0"),
    )
    found = LayerInspector(reader, lambda line: None).of(done.record)
    assert {gpu["capability"]: gpu["level"] for gpu in found["gpus"]} == {
        "7.0": "error",
        "7.5": "error",
        "8.0": "ok",
        "8.6": "ok",
        "8.9": "ok",
        "9.0": "ok",
        "10.0": "warning",
        "10.3": "warning",
        "12.0": "warning",
    }
    assert found["driver"] == {"minimum": "580.65.06", "toolkit": "580.65.06"}
    assert found["device_code"] == ["sm_80", "sm_90", "compute_90"]


def test_missing_layer_leaves_the_other_entries(lab: Lab, tmp_path: Path) -> None:
    done = lab.put()
    for link in (tmp_path / "lab/store/layers" / done.record.layers[0].digest[7:]).iterdir():
        link.unlink()
    made = make(lab.folder)
    (version,) = made.catalog["images"][0]["versions"]
    assert version["read_error"] == "layer ground is not in the folder's store"
    assert "layer ground is not in the folder" in page(made)


def test_an_empty_shared_folder(tmp_path: Path) -> None:
    SharedStore(tmp_path / "lab").open_for_writing()
    made = make(tmp_path / "lab")
    assert made.catalog["images"] == []
    assert "No images yet" in page(made, "index.html")


def test_module_and_signature_are_shown_only_where_they_exist(lab: Lab) -> None:
    first = lab.put()
    made = make(lab.folder)
    assert "module load" not in page(made)
    assert "apptainer verify" not in page(made)
    second = lab.put_next(module=True)
    edit_record(second.sif.with_suffix(".json"), signature={"fingerprint": "9F3A55", "user": "Tanaka <t@example.org>"})
    made = make(lab.folder)
    ways = {way["title"]: way["lines"] for way in made.catalog["images"][0]["commands"]}
    assert ways["Environment Modules, Lmod"] == [
        f"module use {lab.folder}/modulefiles",
        "module load ekiben/own",
        "greet",
    ]
    assert ways["Check it"][1] == f"apptainer verify {second.sif}"
    assert "Tanaka &lt;t@example.org&gt;" in page(made)
    (first.sif.parent / "current").unlink()
    (first.sif.parent / "current").symlink_to(first.sif.name)
    assert "module load" not in page(make(lab.folder))  # what is shown then has none
    (first.sif.parent / "current").unlink()
    ways = {way["title"]: way["lines"] for way in make(lab.folder).catalog["images"][0]["commands"]}
    assert ways["Environment Modules, Lmod"][1] == f"module load {second.module}"


def test_shown_shell_lines_are_quoted(tmp_path: Path) -> None:
    """Under a path with a blank and quotes, each line is what a shell takes apart as meant."""
    from ekiben.publish.catalog.gather import commands

    folder = tmp_path / "o'the $lab" / "images" / "own"
    version = {**image("own")["versions"][0], "file": "own-1-000000000000.sif", "tasks": {"greet": "x"}}
    for way in commands(folder.parent.parent, InnerPath.below(folder), version, "own", False):
        for line in way["lines"]:
            checked = subprocess.run(["bash", "-nc", line], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, line
    slurm = next(
        way
        for way in commands(folder.parent.parent, InnerPath.below(folder), version, "own", False)
        if way["title"] == "Slurm"
    )
    stdout = subprocess.run(
        ["bash", "-c", slurm["lines"][0].replace("sbatch", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    inner = stdout.stdout.splitlines()[-1]
    again = subprocess.run(
        ["bash", "-c", inner.replace("apptainer", "printf '%s\\n'", 1)], capture_output=True, text=True, check=True
    )
    assert again.stdout.splitlines()[-2:] == [str(folder / version["file"]), "greet"]


def test_line_of_an_image_with_added_layers_names_them(tmp_path: Path) -> None:
    from ekiben.publish.catalog.gather import commands

    folder = tmp_path / "lab/images/mine-deepspeed"
    version = {**image("mine")["versions"][0], "file": "mine-deepspeed-1-000000000000.sif", "tasks": {"greet": "x"}}
    ways = {
        way["title"]: way["lines"]
        for way in commands(folder.parent.parent, InnerPath.below(folder), version, "mine", False, ["deepspeed"])
    }
    assert "ekiben build mine --stack cu130 --layer deepspeed --format docker" in ways["Docker"][0]


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ("{}", "has no 'format'"),
        ('{"format": true}', "'format' is not a size"),
        ("[" * 100_000, "is n"),
        ("\udcff", "is not UTF-8"),
        ('{"format": NaN}', "NaN is not a JSON number"),
    ],
)
def test_a_broken_record_is_left_out_and_named(lab: Lab, content: str, message: str) -> None:
    done = lab.put()
    name = "own-0-0123456789ab.json"
    done.sif.with_name(name).write_text(content, errors="surrogateescape")
    made = make(lab.folder)
    (skipped,) = made.catalog["skipped"]
    assert skipped["file"] == f"images/own/{name}"
    assert message in skipped["reason"]
    assert len(made.catalog["images"][0]["versions"]) == 1
    assert name in page(made, "index.html")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "of format 2"),
        ({"file": "../../../etc/passwd"}, "'file' is not a plain file name"),
        ({"file": "own-1-0123456789ab.sif"}, "'file' belongs to another version"),
        ({"name": "other"}, "'name' belongs to another image: other"),
        ({"name": "../own"}, "'name' is not a name"),
        ({"size": 1}, "bytes of 1"),
        ({"size": -1}, "'size' is not a size"),
        ({"tasks": {"a": 1}}, "'tasks' is not names and strings"),
        ({"layers": [1]}, "'layers[0]' is not an object"),
        ({"layers": []}, "'layers' is empty"),
        ({"layers": [{"name": "x"}]}, "has no 'layers[0].cache_key'"),
        ({"checks": [{"runtime": "x", "seconds": "y"}]}, "'checks[0].seconds' is not a number"),
    ],
)
def test_invalid_record_is_left_out_with_a_reason(lab: Lab, changes: dict[str, Any], message: str) -> None:
    done = lab.put()
    edit_record(done.sif.with_suffix(".json"), **changes)
    made = make(lab.folder)
    assert made.catalog["images"] == []
    assert message in made.catalog["skipped"][0]["reason"]


def test_only_a_catalog_folder_is_replaced(lab: Lab, tmp_path: Path) -> None:
    lab.put()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="exists, and is not a catalog"):
        make(lab.folder, out=tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    made = make(lab.folder, out=tmp_path / "empty")
    assert "../images" not in page(made)  # a link would not lead there
    (made.out / "images/gone.html").write_text("of an image that was pruned")
    assert not (make(lab.folder, out=made.out).out / "images/gone.html").exists()
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        make(lab.folder, out=tmp_path / "no/such/folder")


def test_failed_write_keeps_the_former_catalog(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.put()
    made = make(lab.folder, out=tmp_path / "pages")
    before, rename = page(made), os.rename

    failed: list[Any] = []

    def fail_once(source: Any, target: Any, **options: Any) -> None:
        if target == made.out.name and not failed:
            failed.append(source)
            raise OSError(28, "No space left on device")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(UsageError, match="No space left"):
        make(lab.folder, out=made.out)
    assert failed
    assert page(made) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".pages")] == []


def test_concurrent_catalog_writers(lab: Lab) -> None:
    lab.put()
    first = make(lab.folder)
    files = {path.relative_to(first.out): path.read_bytes() for path in first.out.rglob("*") if path.is_file()}
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(make, lab.folder) for _ in range(24)]:
            done.result()
    assert {path.relative_to(first.out): path.read_bytes() for path in first.out.rglob("*") if path.is_file()} == files
    assert [path.name for path in (lab.folder).iterdir() if path.name.startswith(".")] == []


# ----------------------------------------------------------------------------------------------------- strangers' words


class Seen(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "text", [HOSTILE, "javascript:alert(1)", "</style></title></script><svg/onload=alert(1)>", "\u202e\x00\ud800"]
)
def test_hostile_name_is_escaped(tmp_path: Path, text: str) -> None:
    out = write(tmp_path / "catalog", text)
    style, script = ((HERE / name).read_text() for name in ("style.css", "sort.js"))
    pages = list(out.rglob("*.html"))
    assert len(pages) == 4
    clean = {tag for path in write(tmp_path / "clean").rglob("*.html") for tag, _ in Seen(path.read_text()).tags}
    for path in pages:
        shown = path.read_text()
        seen = Seen(shown)
        assert {tag for tag, _ in seen.tags} <= {*clean, "ul", "li"}
        assert [tag for tag, _ in seen.tags].count("script") == 1
        assert f"<script>{script}</script>" in shown
        assert f"<style>{style}</style>" in shown
        assert [
            name
            for _, attributes in seen.tags
            for name in attributes
            if name.startswith("on") or name in ("style", "src")
        ] == []
        for tag, attributes in seen.tags:
            if "href" in attributes:
                assert re.match(r"(#|\.\./|images/|index\.html|catalog\.json|data:,$)", attributes["href"] or ""), (
                    tag,
                    attributes,
                )
    if text.isprintable():
        assert text in Seen((out / "images/hello.html").read_text()).text


def test_hostile_record_is_escaped(lab: Lab) -> None:
    done = lab.put()
    record = json.loads(done.sif.with_suffix(".json").read_bytes())
    layers = [{**layer, "notes": {"drift": [HOSTILE]}} for layer in record["layers"]]
    edit_record(
        done.sif.with_suffix(".json"),
        description=HOSTILE,
        tasks={HOSTILE: HOSTILE},
        by=HOSTILE,
        layers=layers,
        signature={"fingerprint": HOSTILE, "user": HOSTILE, HOSTILE: HOSTILE},
    )
    made = make(lab.folder)
    assert made.catalog["skipped"] == []
    assert made.catalog["images"][0]["versions"][0]["sbom"] == f"{done.sif.stem}.cdx.json"  # the file that is there
    seen = Seen(page(made))
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert "img" not in dict(seen.tags)
    assert HOSTILE in seen.text


@pytest.mark.parametrize("field", ["version", "stack", "recipe", "published", "sbom", "previous", "image", "sha256"])
def test_a_hostile_identifier_leaves_the_record_out(lab: Lab, field: str) -> None:
    done = lab.put()
    edit_record(done.sif.with_suffix(".json"), **{field: HOSTILE})
    made = make(lab.folder)
    assert made.catalog["images"] == []
    assert made.catalog["skipped"][0]["reason"].startswith(f"'{field}' is not ")
    assert "img" not in dict(Seen(page(made, "index.html")).tags)


# ------------------------------------------------------------------------------------------------------------ runs


def about_image(shared_dir: Path, published: VersionRecord) -> dict[str, Any]:
    with open_shared(shared_dir).reader(published.layers[-1].digest) as reader:
        return runs.image_metadata(reader)


def put_run(folder: Path, about: Any, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    record = {**run_record(*SPEEDS[0]), "image": about, **changes}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_run_records_are_kept_without_private_fields(lab: Lab, tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = lab.put()
    metadata = about_image(lab.folder, done.record)
    put_run(
        results / "a/b",
        metadata,
        settings={"model": "/home/me/secret/my-model", "method": "lora", "token": "hf_secret", "learning_rate": 3e-4},
    )
    put_run(results / "c", metadata, status="interrupted")
    put_run(results / "d", {"recipe": "other"})
    put_run(results / "e", metadata, started="yesterday")
    put_run(results / "f", metadata, model={"name": "/home/me/secret/my-model", "parameters": float("nan")})
    (results / "job").mkdir()
    (results / "job/run.json").write_text('{"scheduler": "slurm", "steps": []}')
    (results / "half").mkdir()
    (results / "half/run.json").write_text('{"image"')
    made = make(lab.folder, runs=[results])
    assert len(made.runs.new) == 2
    assert (made.runs.known, made.runs.unfinished, made.runs.unmatched) == (0, 1, 1)
    assert sorted(Path(file).parent.name for file, _ in made.runs.broken) == ["e", "half"]
    kept = list((done.sif.parent / f"{done.sif.stem}.runs").iterdir())
    assert len(kept) == 2
    for path in (*kept, *made.out.rglob("*.*")):
        assert b"secret" not in path.read_bytes(), path
    runs = made.catalog["images"][0]["versions"][0]["runs"]
    assert {run["model"]["name"] for run in runs} == {"cyberagent/open-calm-3b", "my-model"}
    assert [run["settings"] for run in runs if run["model"]["name"] != "my-model"] == [{"learning_rate": 3e-4}]
    assert "cyberagent/open-calm-3b" in page(made)
    before = {path: path.read_bytes() for path in kept}
    again = make(lab.folder, runs=[results])
    assert (again.runs.new, again.runs.known, again.runs.jobs, again.runs.without_image) == ([], 2, 1, [])
    assert {path: path.read_bytes() for path in (done.sif.parent / f"{done.sif.stem}.runs").iterdir()} == before
    assert again.catalog == made.catalog
    with pytest.raises(UsageError, match="no such folder"):
        make(lab.folder, runs=[tmp_path / "nowhere"])


# What generate wrote of four answers with an adapter; host and paths of a person.
ANSWERED = Path(__file__).parents[3] / "support" / "generate.run.json"


def test_record_of_generate_is_imported_beside_its_output(lab: Lab, tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = lab.put()
    metadata = about_image(lab.folder, done.record)
    put_run(results / "training", metadata)
    record = {**json.loads(ANSWERED.read_text()), "image": metadata}
    (results / "answers.jsonl.run.json").write_text(json.dumps(record))
    (results / "other.run.json").write_text('{"vocab_size": 1500}')  # a record without an image, as train-tokenizer's
    catalog = make(lab.folder, runs=[results])
    assert (len(catalog.runs.new), catalog.runs.broken) == (2, [])
    assert catalog.runs.without_image == [str(results / "other.run.json")]
    answered, training = catalog.catalog["images"][0]["versions"][0]["runs"]
    assert (answered["answers"], answered["seconds"], answered["tokens_per_s"]) == (4, 0.0, 517.0)
    assert (answered["model"]["name"], answered["seed"], answered["device"]["name"]) == ("base", 42, "CPU")
    assert answered["settings"]["max_new_tokens"] == 4 and "answers" not in training
    for path in (*catalog.out.rglob("*.*"), *done.sif.parent.glob("*.runs/*")):
        assert b"secret" not in path.read_bytes(), path
    text = page(catalog)
    assert "4 answers in 0 s" in text and "Tokens per second, generate" in text
    alone = make(lab.folder, runs=[results / "answers.jsonl.run.json"])
    assert (alone.runs.new, alone.runs.known) == ([], 1)


def test_curves_and_evaluations_are_shown(lab: Lab, tmp_path: Path) -> None:
    results, done = tmp_path / "results", lab.put()
    with open_shared(lab.folder).reader(done.record.layers[-1].digest) as reader:
        metadata = runs.image_metadata(reader)
    put_run(results / "training", metadata)
    lines = [{"step": step, "loss": 5.0 - step / 1000} for step in range(1, 1001)]
    lines += [{"step": 1000, "eval_loss": 4.5}, {"step": 1000, "eval_loss": True}, {"step": -1, "loss": 2}, [3]]
    metrics = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo'
    (results / "training/metrics.jsonl").write_text(metrics)
    scores = {"jsquad": {"f1": 81.25, "exact_match": 70, "note": "x"}, "</td>": {"a": 1}, "broken": 3}
    put_run(results / "evaluation", metadata, scores=scores, started="2026-11-20T10:00:00Z")
    built = make(lab.folder, runs=[results])
    assert (len(built.runs.new), built.runs.broken) == (2, [])
    evaluation, training = built.catalog["images"][0]["versions"][0]["runs"]
    assert evaluation["scores"] == {"jsquad": {"exact_match": 70, "f1": 81.25}} and evaluation["curve"] is None
    assert training["curve"] is not None and "scores" not in training
    assert len(training["curve"]["loss"]) == 60
    assert training["curve"]["loss"][-1] == (1000, 4.0) and training["curve"]["eval_loss"] == [(1000, 4.5)]
    text = page(built)
    assert text.count("<polyline points=") == 1 and "<td>exact_match</td>" in text and "81.25" in text
    again = make(lab.folder, runs=[results])
    assert (again.runs.new, again.runs.known) == ([], 2)
    (kept,) = done.sif.parent.glob("*.runs/*.curve")
    for content in ("[", "[1]", '{"loss": [[1, "x"], [2], 3, [4, 1e999]], "eval_loss": 3}'):
        kept.chmod(0o644)
        kept.write_text(content)
        broken = [item["file"] for item in make(lab.folder).catalog["skipped"]]
        assert bool(broken) == (content != '{"loss": [[1, "x"], [2], 3, [4, 1e999]], "eval_loss": 3}'), content


def test_images_that_serve_a_model_are_named() -> None:
    sample = catalog()
    assert b"serve a model" not in render(cast(Any, sample), None)["images/lora-opencalm.html"]
    sample["images"][1]["versions"][0]["tasks"]["serve"] = "answer requests"
    text = render(cast(Any, sample), None)["images/lora-opencalm.html"]
    assert b'serve a model: <a href="../images/hello.html">hello</a>' in text


def test_a_record_of_a_job_is_one_that_names_its_image(lab: Lab, tmp_path: Path) -> None:
    lab.put()
    (tmp_path / "results").mkdir()
    job = {"format": 3, "image": "mine", "scheduler": "slurm", "steps": [{"name": "1-train"}]}
    (tmp_path / "results/run.json").write_text(json.dumps(job))
    counts = make(lab.folder, runs=[tmp_path / "results"]).runs
    assert (counts.jobs, counts.without_image) == (1, [])


@pytest.mark.parametrize("value", ["<b>", [], -1e400, True, None])
def test_odd_numbers_of_answers_are_left_out(value: Any) -> None:
    kept = reduced({**json.loads(ANSWERED.read_text()), "answers": value, "seconds": value})
    assert kept["answers"] is None and kept["seconds"] is None


def test_run_records_are_pruned_with_their_version(lab: Lab, tmp_path: Path) -> None:
    done = lab.put()
    put_run(tmp_path / "results", about_image(lab.folder, done.record))
    make(lab.folder, runs=[tmp_path / "results"])
    lab.put_next()
    prune(lab.folder, names=[done.sif.name])
    left = [path.name for path in done.sif.parent.iterdir() if path.name.startswith(done.sif.stem)]
    assert left == [f"{done.sif.stem}.removed"]
    prune(lab.folder, grace=0)
    assert list((lab.folder / "trash").iterdir()) == []


def test_run_record_belongs_to_the_version_with_its_files(lab: Lab, tmp_path: Path) -> None:
    """Two versions that differ in the recipe's own layer, and what a task in each says of its image."""
    first = lab.put()
    lab.recipe.write("entrypoints/greet.py", "print('hello again')\n")
    second = lab.put()
    for done in (first, second):
        about, inside = about_image(lab.folder, done.record), tmp_path / done.sif.stem
        with open_shared(lab.folder).reader(done.record.layers[-1].digest) as reader:
            for entry, chunks in reader.contents():
                if entry.path.startswith("opt/ekiben/recipe/") and entry.kind == "file":
                    (inside / entry.path).parent.mkdir(parents=True, exist_ok=True)
                    (inside / entry.path).write_bytes(b"".join(chunks or ()))
        assert run_metadata.checksum(inside / "opt/ekiben/recipe") == about["recipe_sha256"]
        put_run(tmp_path / "results" / done.sif.stem, about, seed=1 if done is first else 2)
    newest, oldest = make(lab.folder, runs=[tmp_path / "results"]).catalog["images"][0]["versions"]
    assert ([run["seed"] for run in oldest["runs"]], [run["seed"] for run in newest["runs"]]) == ([1], [2])


def test_run_records_that_match_several_versions(lab: Lab, tmp_path: Path) -> None:
    """Without a checksum, as older ones: the newest version that was there when the run began, else the oldest."""
    first = lab.put()
    lab.recipe.write("entrypoints/greet.py", "print('hello again')\n")
    second = lab.put()
    about = {name: value for name, value in about_image(lab.folder, second.record).items() if name != "recipe_sha256"}
    for done, day in ((first, "2026-01-01"), (second, "2026-03-01")):
        edit_record(done.sif.with_suffix(".json"), published=f"{day}T00:00:00.000+00:00")
    for name, day in (("before", "2025-12-24"), ("between", "2026-02-02"), ("after", "2026-03-03")):
        put_run(tmp_path / "results" / name, about, started=f"{day}T10:00:00Z")
    newest, oldest = make(lab.folder, runs=[tmp_path / "results"]).catalog["images"][0]["versions"]
    assert [run["started"][:10] for run in newest["runs"]] == ["2026-03-03"]
    assert [run["started"][:10] for run in oldest["runs"]] == ["2026-02-02", "2025-12-24"]


def test_edited_run_record_is_left_out(lab: Lab) -> None:
    done = lab.put()
    folder = done.sif.parent / f"{done.sif.stem}.runs"
    folder.mkdir()
    (folder / "bad.json").write_text("[]")
    kept = reduced(run_record(*SPEEDS[0]))
    (folder / "good.json").write_text(json.dumps({**kept, "tokens_per_s": "<b>", "model": 7, "host": "secret"}))
    made = make(lab.folder)
    (run,) = made.catalog["images"][0]["versions"][0]["runs"]
    assert (run["id"], run["tokens_per_s"], run["model"]["name"], run["settings"]) == (
        "good",
        None,
        None,
        {"lora.r": 4},
    )
    assert made.catalog["skipped"] == [
        {"file": f"images/own/{folder.name}/bad.json", "reason": "is not a record of a run"}
    ]
    assert "secret" not in page(made)


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("cyberagent/open-calm-3b", "cyberagent/open-calm-3b"),
        ("/home/me/models/mine/", "mine"),
        ("../mine", "mine"),
        ("~/mine", "mine"),
        ("https://me:token@host/mine", "mine"),
        ("mine", "mine"),
        ("a\nb", None),
        ("/", None),
        (7, None),
        (None, None),
        ("x" * 101, None),
    ],
)
def test_of_a_model_s_path_only_the_end_is_kept(model: Any, kept: str | None) -> None:
    record = run_record(*SPEEDS[0])
    record["model"]["name"] = model
    record["settings"].pop("model")
    assert reduced(record)["model"]["name"] == kept


def test_a_pretrained_model_is_called_by_its_size() -> None:
    """recipes/pretrain-gpt's record has no name of a model."""
    record = {
        **run_record(*SPEEDS[0]),
        "model": {"parameters": 7, "layers": 2},
        "settings": {"size": "125m", "data": "/home/me/secret"},
    }
    kept = reduced(record)
    assert (kept["model"]["name"], kept["model"]["parameters"]) == ("GPT 125m", 7)
    assert "secret" not in json.dumps(kept)


def test_a_plot_has_a_row_for_each_model_and_device() -> None:
    runs = [{"version": "1", **reduced(run_record(*row))} for row in (*SPEEDS, SPEEDS[0])]
    speed, mfu = plots(runs)
    assert [(row["label"], row["best"], len(row["dots"])) for row in speed["rows"]] == [
        ("cyberagent/open-calm-small · NVIDIA L4", "141,000", 1),
        ("cyberagent/open-calm-3b · NVIDIA H200", "19,500", 2),
        ("cyberagent/open-calm-7b · 4 × NVIDIA H200", "9,200", 1),
        ("gpt2 · Tesla V100S-PCIE-32GB", "410", 1),
    ]
    assert [tick["label"] for tick in speed["ticks"]] == [
        "100",
        "1,000",
        "10,000",
        "100,000",
        "1,000,000",
    ]  # far apart: by powers of ten
    assert [tick["label"] for tick in mfu["ticks"]] == ["0", "25.0 %", "50.0 %"]
    places = [dot["x"] for plot in (speed, mfu) for row in plot["rows"] for dot in row["dots"]]
    assert all(0 <= device <= 100 for device in places)
    assert len(mfu["rows"]) == 3  # the V100S' is not known
    assert plots([]) == []


# ----------------------------------------------------------------------------------------------------- the command line


def test_catalog_by_command(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    done = lab.put()
    put_run(tmp_path / "results", about_image(lab.folder, done.record))
    done.sif.with_name("own-0-0123456789ab.json").write_text("{")
    result = run_cli("--store", tmp_path / "mine", "catalog", lab.folder, "--runs", "results")
    assert f"written  {lab.folder}/catalog/index.html  1 image, 1 version\n" in result.stdout
    assert (
        "runs     1 new, 0 known, 0 not finished, 0 of other images, 0 without an image, 0 unreadable\n"
        in result.stdout
    )
    assert "skipped: images/own/own-0-0123456789ab.json: is not JSON" in result.stderr
    lab.recipe.write("files/data.txt", "new\n")
    published = run_cli("--store", lab.store.root, "publish", lab.recipe.path, "--to", lab.folder, "--no-verify").stdout
    assert f"{ROOT}/build.py --store {lab.store.root} catalog {lab.folder} " in published
    told = json.loads(run_cli("--store", tmp_path / "mine", "catalog", lab.folder, "-o", "pages", "--json").stdout)
    assert (told["path"], told["images"], len(told["skipped"])) == (str(tmp_path / "pages"), 1, 1)
    assert "nothing was published there yet" in run_cli("catalog", tmp_path / "results", code=6).stderr
    assert "no such folder" in run_cli("catalog", lab.folder, "--runs", "nowhere", code=2).stderr


# Records of runs that are none: each is counted, and named with the reason.
HOSTILE_RUNS = {
    "infinity": ('{"status": "finished", "final_loss": Infinity}', "names no image"),
    "no-image": ('{"status": "finished", "started": "2026-01-01T00:00:00Z"}', "names no image"),
    "image-is-text": ('{"image": "../../x", "scheduler": "slurm", "steps": []}', "names no image"),
    "list": ("[Infinity]", "is not a record of a run"),
    "number": ("Infinity", "is not a record of a run"),
    "brackets": ("[" * 100_000, "is nested more than"),
}


def test_hostile_run_records_are_counted_and_named(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    lab.put()
    for name, (text, _) in HOSTILE_RUNS.items():
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "run.json").write_text(text)
    (tmp_path / "results" / "job").mkdir()
    (tmp_path / "results" / "job" / "run.json").write_text('{"scheduler": "slurm", "steps": []}')
    result = run_cli("catalog", lab.folder, "--runs", "results")
    counts = "0 new, 0 known, 0 not finished, 0 of other images, 3 without an image, 3 unreadable, 1 of jobs"
    assert f"runs     {counts}\n" in result.stdout
    for name, (_, reason) in HOSTILE_RUNS.items():
        assert re.search(rf"^skipped: \S*results/{name}/run.json: {reason}", result.stderr, re.MULTILINE), result.stderr
    printed = json.loads(run_cli("catalog", lab.folder, "--runs", "results", "--json").stdout)
    assert [printed["runs"][name] for name in ("jobs", "without_image", "unreadable")] == [1, 3, 3]
    assert len(printed["skipped"]) == len(HOSTILE_RUNS)


def test_folders_of_runs_and_versions_that_cannot_be_read_are_named(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    done = lab.put()
    put_run(results / "a", {"recipe": "mine"})
    (results / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # root, who runs the tests, may read everything
        if str(path).endswith("/closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert make(lab.folder, runs=[results]).runs.broken == [
        (str(results / "closed"), "cannot be read: Permission denied")
    ]
    monkeypatch.undo()

    def cannot_be_read(_: Any) -> Any:
        raise StoreError("damaged:\nblob")

    monkeypatch.setattr(runs, "image_metadata", cannot_be_read)
    catalog = make(lab.folder, runs=[results / "a"])
    assert catalog.runs.broken == [(str(done.sif), "its runs are not recognised: damaged: blob")]
    assert catalog.runs.unmatched == 1


def test_loss_has_four_decimals() -> None:
    loss = _environment().filters["loss"]
    assert [loss(value) for value in (7.0005, 7.0, 1.81249, 0.00012345, None)] == [
        "7.0005",
        "7.0000",
        "1.8125",
        "0.000123",
        "–",
    ]
