"""Every parser of foreign bytes, as a case: valid samples of what it reads, and a call that reads other bytes in their
record_file.

CASES holds the cases; READERS says which case covers a function that decodes JSON, YAML, tar or binary records, or why
none is needed. test_parsers.py finds such functions in the source: one that is not in READERS fails a test.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import zstandard

from ekiben import api
from ekiben.artifacts import pulled
from ekiben.artifacts.pull import pull
from ekiben.builder.base_config import read_labels
from ekiben.builder.bases import docker, docker_archive, localimage, oci_archive
from ekiben.bundle.read import import_compiled, open_bundle
from ekiben.core.environment import platform
from ekiben.core.errors import DefinitionError, EkibenError
from ekiben.core.files import digest_of
from ekiben.core.inner_path import InnerPath
from ekiben.core.settings import read_settings
from ekiben.doctor.image_requirements import requirements_of_layers, requirements_of_sif
from ekiben.formats.base_config import BASE, BaseConfig
from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.evaluated import EVALUATED, Evaluated, read_environment
from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.sif import GROUP, Signature, add_signatures, read_sif
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes
from ekiben.gpu.device_code import read_device_code
from ekiben.gpu.elf import read_library
from ekiben.images.published import read_records, removals
from ekiben.inspect._records import published_layers, stored_image
from ekiben.inspect.image_info import image_of_sif
from ekiben.inspect.sbom import sbom_of
from ekiben.packages.outdated import find_advisories
from ekiben.packages.requirements import read_requirements
from ekiben.packages.sources import build_requirements
from ekiben.project.dockerfile.base_config import parse_config
from ekiben.project.dockerfile.ignore import read_ignore
from ekiben.project.dockerfile.reader import read_dockerfile
from ekiben.project.survey import survey
from ekiben.publish.catalog.runs import runs_of
from ekiben.publish.catalog.write import make_catalog
from ekiben.publish.prune import prune as prune_published
from ekiben.registry.auth import find_credentials
from ekiben.registry.reference import Reference
from ekiben.resolve.resolve import resolve
from ekiben.run.jobs.records import find_runs
from ekiben.run.jobs.runs import request_again
from ekiben.run.site import find_site
from ekiben.signing.gpg import Keys
from ekiben.signing.registry import _claim
from ekiben.signing.sif import check_sif
from ekiben.spec.base_packages import (
    BasePackage,
    BasePackages,
    Constraint,
    format_base_packages,
    read_base_packages,
)
from ekiben.spec.bases_lock import format_bases_lock, read_bases_lock
from ekiben.spec.definition import read_definition
from ekiben.spec.recipe import find_recipe
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.sources import Source, format_sources, read_sources
from ekiben.spec.stack import find_stack, read_pins
from ekiben.store import Store, prune
from ekiben.store.shared import open_shared
from fuzz import world as samples
from fuzz.world import World
from support.image_files import SmallImage, tar_of
from support.registries import Answer, at
from support.sample_recipe import GROUND, STACK, WALLS, quiet
from support.small_sifs import blob, make
from support.tars import plain_tar

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Case:
    """``named``: what an error's message has to name, as the file that was read."""

    samples: Sequence[bytes]
    read: Read
    named: str = ""


def drain(entries: Iterator[LayerEntry]) -> None:
    for _, chunks in entries:
        for _ in chunks or ():
            pass


# --------------------------------------------------------------------------------------------------- files of a project

ADVISORY: dict[str, Any] = {
    "id": "GHSA-1",
    "summary": "torch.load runs code",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "torch"},
            "versions": ["2.10.0"],
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "2.9"}, {"fixed": "2.11.1"}]}],
        }
    ],
}


def definition(world: World) -> Case:
    path = world.path("case/definition/x.def")
    stages = (
        "Bootstrap: localimage\nFrom: ground.sif\nStage: build\n\n%post\n    true\n\nBootstrap: localimage\nFrom:"
        " ground.sif\nStage: final\n\n%files from build\n    /a /b\n"
    )

    def read(data: bytes) -> object:
        return read_definition(world.put(path, data), root=path.parent, arguments={"word": "x"})

    return Case([GROUND.encode(), WALLS.encode(), stages.encode()], read, path.name)


def project(world: World) -> Case:
    """A definition file as the top layer of a recipe: all that follows from it, too."""
    path = world.project.path / "images/roof.def"

    valid = path.read_bytes()

    def read(data: bytes) -> object:
        world.put(path, data)
        try:
            return resolve(find_recipe(str(world.project.path)))
        finally:
            world.put(path, valid)

    return Case([valid, WALLS.encode()], read)


def recipe(world: World) -> Case:
    path = world.path("case/recipe/recipe.yaml")
    plain = (
        "name: greeter\ndescription: x\nstack: tiny\nlayer: roof\ntasks:\n  greet: {entrypoint: greet.py, help: hi,"
        " runs_on: gpu}\ntest: |\n  greet\n"
    )

    def read(data: bytes) -> object:
        return find_recipe(str(world.put(path, data).parent)).members()

    return Case([(world.project.path / "recipe.yaml").read_bytes(), plain.encode()], read, str(path.parent))


def stack(world: World) -> Case:
    path = world.path("case/images/stacks/tiny/stack.yaml")

    def read(data: bytes) -> object:
        world.put(path, data)
        return find_stack("tiny", [path.parents[2]])

    return Case([json.dumps(STACK).encode()], read, path.name)


def advisories(world: World) -> Case:
    database = world.path("case/advisories.zip")
    zipped = BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("GHSA-1.json", json.dumps(ADVISORY))
    versions = {"torch": "2.11.0"}

    def read(data: bytes) -> object:
        return find_advisories(versions, world.put(database, data))

    return Case([zipped.getvalue()], read, database.name)


def advisory(world: World) -> Case:
    record_file = world.path("case/advisories/GHSA-1.json")

    def read(data: bytes) -> object:
        return find_advisories({"torch": "2.11.0"}, world.put(record_file, data).parent)

    return Case([json.dumps(ADVISORY).encode()], read, record_file.name)


def requirements(world: World) -> Case:
    path = world.path("case/requirements.txt")

    def read(data: bytes) -> object:
        for name in ("requirements.txt", "pyproject.toml"):
            file = world.put(path.with_name(name), data)
            with suppress(EkibenError) if name == "requirements.txt" else nullcontext():
                read_requirements(file, SourceFolders(file.parent))
        return None

    plain = b"# a remark\n--pre\nhumanize>=4.9 ; python_version > '3.8'  # one\ntabulate[x] \\\n  ==0.9.0\n"
    toml = b'[project]\nname = "x"\nversion = "1"\ndependencies = ["humanize==4.9.0", "trl"]\ndynamic = ["readme"]\n'
    return Case([toml, plain], read, "pyproject.toml")


def locks(world: World) -> Case:
    folder = world.path("case/locks/images/stacks/tiny/x").parent
    (folder / "stack.yaml").write_text(json.dumps(STACK))
    apt = b"snapshot: 20260101T000000Z\n[base]\nbash=5.2\n# remark\n[python]\npython3=3.11\n"
    sums = f"{'a' * 64}  apt.lock\n".encode()

    def read(data: bytes) -> object:
        result = find_stack("tiny", [folder.parents[1]])
        for name in ("apt.lock", "SHA256SUMS"):
            world.put(folder / name, data)
            with suppress(EkibenError):
                result.check_locks()
            with suppress(EkibenError):
                result.apt_lock()
        return read_pins(data.decode(errors="replace"))

    return Case([apt, sums, samples.LOCK.encode()], read)


def sources(world: World) -> Case:
    path = world.path("case/roof.sources.json")
    source = Source(
        name="sqlitedict",
        version="2.1.0",
        file="sqlitedict-2.1.0.tar.gz",
        sha256="a" * 64,
        build=(f"setuptools==80.9.0 --hash=sha256:{'b' * 64}",),
        wheel="sqlitedict-2.1.0-py3-none-any.whl",
        wheel_sha256="c" * 64,
        requires=("tqdm>=4",),
        python=">=3.7",
    )

    def read(data: bytes) -> object:
        return read_sources(world.put(path, data))

    return Case([format_sources([source]).encode()], read, str(path))


def source_archive(world: World) -> Case:
    """An sdist of a package index, as a tar and as a zip: what its build needs is read here."""
    path = world.path("case/roof-1.0.tar.gz")
    project = b'[build-system]\nrequires = ["hatchling>=1.2", "x; python_version > \'3\'"]\n'
    zipped = BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("roof-1.0/pyproject.toml", project)
    tar = plain_tar({"roof-1.0/pyproject.toml": project})

    def read(data: bytes) -> object:
        return build_requirements(world.put(path, data), "roof 1.0")

    return Case([gzip.compress(tar, mtime=0), tar, zipped.getvalue()], read, "roof 1.0")


def bases_lock(world: World) -> Case:
    path = world.path("case/bases.lock")
    locked = {"ubuntu:24.04": {"linux/amd64": f"sha256:{'a' * 64}", "linux/arm64": f"sha256:{'b' * 64}"}}

    def read(data: bytes) -> object:
        return read_bases_lock(world.put(path, data), "mine")

    return Case([format_bases_lock(locked).encode()], read, str(path))


def base_packages(world: World) -> Case:
    """The packages of a base, in a file beside a definition file that somebody else may have written."""
    path = world.path("case/base.packages.json")
    packages = BasePackages(
        digest=f"sha256:{'a' * 64}",
        python="/usr/bin/python3",
        version="3.12.3",
        libc="glibc 2.39",
        packages=(BasePackage("torch", "2.9.0"),),
        cuda="13.0",
        device_code=("sm_90",),
        constraints=(Constraint("/etc/pip/constraint.txt", "numpy<2"),),
    )
    data = format_base_packages({"linux/amd64": packages}).encode()
    read_base_packages(world.put(path, data))
    return Case([data], lambda data: read_base_packages(world.put(path, data)), str(path))


def surveyed_project(world: World) -> Case:
    """A project's pyproject.toml, of which `ekiben init` makes a recipe."""
    path = world.path("surveyed/pyproject.toml")
    text = b"[project]\nname = 'x'\ndependencies = ['numpy>=1']\n[project.scripts]\ntrain = 'x.train:main'\n"

    def read(data: bytes) -> object:
        world.put(path, data)
        return survey(path.parent)

    return Case([text], read, str(path.parent))


def evaluated(_world: World) -> Case:
    """What `env -0` printed in an image, and the file that keeps it, of a layer that may be somebody else's."""
    plain = b"A=1\0PATH=/usr/bin:/bin\0HOME=/root\0B=a\nb\0"
    files = Evaluated({"A": "1", "CACHE": "/root/x"}, ("CACHE",), True).files()

    def read(data: bytes) -> object:
        with suppress(ValueError):
            Evaluated.parse(data)
        with suppress(ValueError):
            read_environment(data, {"HOME": "/root"})
        return None

    return Case([plain, files[f"/{EVALUATED}"][1]], read)


def base_config(world: World) -> Case:
    """What a base's layer, which may be somebody else's, says that a container of it starts with."""
    config = BaseConfig(environment={"A": "1"}, user="1000", workdir="/w", entrypoint=("/x",), cmd=("y",))
    of_registry = {"config": {"Env": ["A=1", "B"], "User": "", "Entrypoint": None, "Cmd": ["sh"], "Labels": {"a": "b"}}}
    labels = b"name value\n# remark\nalone\n"
    folder = world.path("case/labels-of/labels").parent

    def read(data: bytes) -> object:
        for parse in (BaseConfig.parse, parse_config):
            with suppress(ValueError):
                parse(data)
        world.put(folder / "labels", data)
        return read_labels(folder)

    return Case([config.files()[f"/{BASE}"][1], json.dumps(of_registry).encode(), labels], read)


def dockerfile(world: World) -> Case:
    path = world.path("case/context/Dockerfile")
    text = (
        b"# syntax=docker/dockerfile:1\nARG V=1\nFROM debian:12@sha256:" + b"a" * 64 + b" AS one\n"
        b'ENV A=1 B=${V:-x}\nRUN ["sh", "-c", "true"]\nRUN <<E\ntrue\nE\nCOPY --from=one /x /y\n'
        b'CMD ["a"]\n'
    )
    ignored = b"# remark\n*.pyc\n!keep/**\nsrc/[a-z]\n"

    def read(data: bytes) -> object:
        world.put(path, data)
        world.put(path.with_name(".dockerignore"), data)
        with suppress(EkibenError):
            read_ignore(path)
        return read_dockerfile(path)

    return Case([text, ignored], read, str(path))


def site(world: World) -> Case:
    path = world.path("case/site.yaml")
    known = [file.read_bytes() for file in sorted((Path(__file__).parents[2] / "sites").glob("*.yaml"))]

    def read(data: bytes) -> object:
        return find_site(str(world.put(path, data)))

    return Case(known, read, str(path))


def config(world: World) -> Case:
    path = world.path("case/config/ekiben/config.yaml")
    text = (
        b'shared: /groups/lab\nregistry: r.example.org/x\nrecipes: [~/a, b]\njobs: {account: lab, time: "2:00:00", env:'
        b" [A=b]}\n"
    )

    def read(data: bytes) -> object:
        world.put(path, data)
        return read_settings({"XDG_CONFIG_HOME": str(path.parents[1])})

    return Case([text], read, str(path))


# ----------------------------------------------------------------------------------------------------- store and shared


def store_records(world: World) -> Case:
    """Each record of a store: a damaged one is none, or names what is damaged."""
    image, store = world.image, world.store
    make_compiled(store)
    paths = [
        path
        for kind in ("keys", "results", "refs", "last", "checks", "compile_stats")
        for path in sorted((store.root / kind).glob("*.json"))
    ]
    kept = {path: path.read_bytes() for path in paths}

    def read(data: bytes) -> object:
        for path in paths:
            world.put(path, data)
        try:
            for layer in image.layers:
                store.layer(layer.cache_key), store.last_inputs(layer.name)
                requirements_of_layers(image.name, [layer], store, "amd64", lambda line: None)
            store.results(), store.images(), store.compile_stats("tiny")
            prune(store, dry_run=True)
            with suppress(EkibenError):
                stored_image(image.name, store, "hint")
            return None
        finally:
            for path, old in kept.items():
                world.put(path, old)

    return Case(list(kept.values()), read, "store")


def make_compiled(store: Store) -> None:
    """A result of a build stage, with numbers of its compilation."""
    from ekiben.store import StageOutput, StoredResult

    digest = store.put_blob(b"wheel")
    store.put_result(
        StoredResult(
            name="build",
            key="stage-1",
            wheel="tiny",
            files=(StageOutput("/a.whl", 0o644, digest, 5),),
            inputs={},
            origin="built",
            executor="hand",
            seconds=1.0,
        )
    )
    store.put_compile_stats("tiny", {"units": 3, "job_memory": 5})


def stored_blobs(world: World) -> Case:
    """Manifest and config of a stored image, under the digests that their bytes have."""
    store, name = world.store, world.image.name
    ref = store.image(name)
    assert ref is not None
    kept = {field: store.get_blob(ref[field]) for field in ("manifest", "config")}

    def read(data: bytes) -> object:
        for field in kept:
            changed = {**ref, field: store.put_blob(data)}
            store.records.write("refs", "damaged", changed)
            try:
                prune(store, dry_run=True)
                with suppress(EkibenError):
                    stored_image("damaged", store, "hint")
            finally:
                store.records.drop("refs", "damaged")
                store.drop_blob(digest_of(data)) if data not in kept.values() else None
        return None

    return Case(list(kept.values()), read)


def version_record(world: World) -> Case:
    path = world.published.sif.with_suffix(".json")
    valid, lab, reader = path.read_bytes(), world.folder / "lab", Store(world.folder / "reader")

    def read(data: bytes) -> object:
        world.put(path, data)
        try:
            read_records(InnerPath.below(path.parent))
            prune_published(lab, unused_for=0, grace=1, dry_run=True)
            return published_layers(path)
        finally:
            world.put(path, valid)

    assert reader.root != world.store.root
    return Case([valid], read, path.name)


def removal_note(world: World) -> Case:
    """What is beside a published image that was removed."""
    folder = world.published.sif.parent
    note = folder / f"{folder.name}-1-{'0' * 12}.removed"
    valid = b'{"file": "x", "size": 1, "removed": "2026-11-27T00:00:00.000+00:00"}'

    def read(data: bytes) -> object:
        world.put(note, data)
        try:
            return removals(InnerPath.below(folder))
        finally:
            note.unlink()

    return Case([valid], read)


def pulled_record(world: World) -> Case:
    """The records of images that were pulled from registries."""
    sif = world.put(world.path(f"downloads/pulled/{'0' * 64}.sif"), b"content")
    state = {"stat": "1", "header": "0" * 64, "sha256": "0" * 64}
    record = {"digest": f"sha256:{'0' * 64}", "state": state, "engine": ""}
    tag = {"digest": f"sha256:{'0' * 64}", "asked": "2026-11-27T00:00:00.000+00:00"}

    def read(data: bytes) -> object:
        path = world.put(sif.with_suffix(".json"), data)
        return pulled._known(sif), pulled._noted(path)

    return Case([json.dumps(record).encode(), json.dumps(tag).encode()], read)


def catalog(world: World) -> Case:
    """The records of a shared folder, read for its web pages, and an earlier catalog."""
    path = world.published.sif.with_suffix(".json")
    valid, lab, out = path.read_bytes(), world.folder / "lab", world.folder / "catalog"
    store = Store(world.folder / "reader", open_shared(lab))

    def read(data: bytes) -> object:
        world.put(path, data)
        try:
            return make_catalog(lab, store, out=out, runs=[], log=lambda line: None)
        finally:
            world.put(path, valid)

    return Case([valid], read)


def catalog_replaced(world: World) -> Case:
    out = world.path("old-catalog/catalog.json")
    lab = world.published.sif.parents[2]
    store = Store(world.folder / "reader", open_shared(lab))

    def read(data: bytes) -> object:
        world.put(world.path("old-catalog/catalog.json"), data)
        return make_catalog(lab, store, out=out.parent, runs=[], log=lambda line: None)

    return Case([b'{"format": 1, "images": []}'], read, str(out.parent))


RUN = {
    "image": {"recipe": "greeter"},
    "status": "finished",
    "format": 1,
    "started": "2026-11-01T10:00:00+00:00",
    "model": {"name": "a/b", "parameters": 3},
    "device": {"name": "H100", "count": 8, "dtype": "bf16"},
    "data": {"sha256": "a" * 64, "count": 5},
    "settings": {"method": "lora", "lr": 1e-3, "a": {"b": 2}},
    "versions": {"torch": "2.11"},
    "tokens_per_second": 5.0,
}


def run_record(world: World) -> Case:
    """A run.json of a training: one to import, and one that is kept with a version."""
    from ekiben.publish.catalog.runs import import_runs

    result, sif = world.path("case/runs/a/run.json"), world.published.sif
    kept = world.path(f"{sif.parent.relative_to(world.folder)}/{sif.stem}.runs/0123456789ab.json")
    shared = open_shared(world.folder / "lab")

    def read(data: bytes) -> object:
        world.put(result, data), world.put(kept, data)
        try:
            return import_runs(shared, [result.parent]), runs_of(InnerPath.below(kept.parent.parent), sif.stem)
        finally:
            kept.unlink()

    answered = {**RUN, "answers": 4, "seconds": 2.5, "adapter": {"name": "a", "files": {}}}
    return Case([json.dumps(run).encode() for run in (RUN, answered)], read)


def run_curve(world: World) -> Case:
    """A metrics.jsonl beside a run.json, and the curve that is kept of it."""
    from ekiben.publish.catalog import curves

    path = world.path("case/curves/metrics.jsonl")
    lines = [{"step": step, "loss": 3.5 - step, "eval_loss": None} for step in range(3)]

    def read(data: bytes) -> object:
        world.put(path, data)
        kept = None
        with contextlib.suppress(ValueError):  # its readers list the reason
            kept = curves.parse_curve(InnerPath.below(path.parent) / path.name)
        return curves.read_metrics(path), kept

    curve = curves.format_curve({"loss": [(1, 2.5)], "eval_loss": []})
    return Case(["\n".join(map(json.dumps, lines)).encode(), curve], read)


# ------------------------------------------------------------------------------------------------------------- bundles


BUNDLED = {"debs/Packages": b"Package: a\n", "wheels/a-1-py3-none-any.whl": b"wheel", "include/model/weights": b"0123"}


def index_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """bundle.json of these files."""
    entries = {name: {"size": len(data), "sha256": digest_of(data)[7:]} for name, data in files.items()}
    return {"format": 3, "recipe": "greeter", "stack": "tiny", "platform": platform(), "locks": {}, "files": entries}


def bundle(world: World) -> Case:
    """All bytes of a bundle."""
    index = index_of(BUNDLED)
    index["files"]["include/model/link"] = {"link": "weights"}
    valid = plain_tar({"bundle.json": json.dumps(index).encode(), **BUNDLED}, {"include/model/link": "weights"})
    return Case([valid], bundle_reader(world), "x.bundle")


def bundle_index(world: World) -> Case:
    """bundle.json in a tar that is in order."""
    read = bundle_reader(world)
    return Case(
        [json.dumps(index_of(BUNDLED)).encode()],
        lambda data: read(plain_tar({"bundle.json": data, **BUNDLED})),
        "x.bundle",
    )


def bundle_record(world: World) -> Case:
    """The record of a compiled wheel in a bundle, and the names of its git repositories."""
    from ekiben.packages.git import mount_kept

    record = {
        "name": "build",
        "key": "stage-9",
        "wheel": "tiny",
        "inputs": {},
        "origin": "built",
        "executor": "x",
        "seconds": 1.0,
        "notes": {},
        "files": [{"path": "/a.whl", "mode": 420, "digest": digest_of(b"wheel"), "size": 5}],
    }
    path, store = world.path("x.bundle"), Store(world.folder / "bundle-cache/store")

    def read(data: bytes) -> object:
        files = {"compiled/stage-9.json": data, "sources/repositories.json": data}
        files[f"compiled/{digest_of(b'wheel')[7:]}"] = b"wheel"
        world.put(path, plain_tar({"bundle.json": json.dumps(index_of(files)).encode(), **files}))
        with open_bundle(path, store, quiet()) as unpacked:
            with suppress(EkibenError):
                mount_kept(unpacked.folder / "sources", "/x")
            import_compiled(unpacked, store)
            return None

    return Case([json.dumps(record).encode(), b'{"https://example.org/a": "0123.git"}'], read, "bundle")


def bundle_reader(world: World) -> Read:
    path, store = world.path("x.bundle"), Store(world.folder / "bundle-cache/store")

    def read(data: bytes) -> object:
        world.put(path, data)
        with open_bundle(path, store, quiet()) as unpacked:
            return list(unpacked.folder.rglob("*"))

    return read


# -------------------------------------------------------------------------------------------------------------- images


def sif(world: World) -> Case:
    """A SIF of Ekiben's: its header, what it says of itself, its signatures."""
    path = world.path("case/x.sif")

    def read(data: bytes) -> object:
        world.put(path, data)
        read_sif(path)
        with suppress(EkibenError):
            check_sif(path, Keys())
        signature = Signature(b"signed", "A" * 40, "sha512")
        add_signatures(path, path.with_suffix(".signed"), {GROUP: signature})
        return api.open(path).metadata

    return Case([sif_of(world, samples.squashfs())], read, path.name)


def sif_files(world: World) -> Case:
    """A SIF that somebody gave: its SBOM, and what it needs to run."""
    path, store = world.path("case/y.sif"), Store(world.folder / "reader")
    store.open_for_writing()

    def read(data: bytes) -> object:
        world.put(path, data)
        with suppress(EkibenError):
            sbom_of(str(path), store, quiet())
        with suppress(EkibenError):
            image_of_sif(path, store, quiet())
        result = requirements_of_sif(path, store, lambda line: None)
        for record in (store.root / "checks").glob("facts-*"):
            record.unlink()
        return result

    return Case([sif_of(world, samples.squashfs())], read, path.name)


def sif_of(world: World, layer: bytes) -> bytes:
    """A SIF with one layer."""
    from ekiben.formats.partition import Partition
    from ekiben.formats.sif import SifHeader, sif_id, write_sif

    blob, out = world.path("made/layer"), world.path("made/x.sif")
    blob.write_bytes(layer)
    header = SifHeader(sif_id([digest_of(layer)], "x"), "x", "amd64", 1)
    write_sif(out, [Partition(blob, 0, len(layer), digest_of(layer))], header)
    return out.read_bytes()


def packages(world: World) -> Case:
    """The databases of packages in an image, and what it says of itself, each instead of the others."""
    names = (
        "var/lib/dpkg/status",
        f"{samples.SITE}/torch-2.11.0.dist-info/METADATA",
        f"{samples.SITE}/torch-2.11.0.dist-info/direct_url.json",
        "opt/ekiben/image.json",
        "opt/ekiben/recipe/recipe.yaml",
        "opt/ekiben/locks/python.lock",
        ".singularity.d/labels.json",
        ".singularity.d/env/90-environment.sh",
        "usr/share/doc/bash/copyright",
        "etc/os-release",
        "opt/venv/pyvenv.cfg",
    )
    path, store = world.path("case/z.sif"), Store(world.folder / "reader")
    store.open_for_writing()
    small = {name: data for name, data in samples.TREE.items() if len(data) < 5000}
    turn = 0

    def read(data: bytes) -> object:
        nonlocal turn
        turn += 1
        known = [name for name in names if small[name] in case.samples and data[:12] == small[name][:12]] or list(names)
        tree = {**small, known[turn % len(known)]: data}
        world.put(path, sif_of(world, samples.squashfs(tree)))
        with suppress(EkibenError):
            sbom_of(str(path), store, quiet())
        return api.open(path).metadata

    case = Case([small[name] for name in names], read, path.name)
    return case


def squashfs(world: World) -> Case:
    path = world.path("case/layer.squashfs")

    def read(data: bytes) -> object:
        world.put(path, data)
        with path.open("rb") as stream:
            reader = SquashfsReader(stream)
            reader.lookup("opt/ekiben/image.json"), reader.children("usr")
            drain(merged_layer([reader]))
        return None

    return Case([samples.squashfs(), samples.squashfs({"a": b"x" * 300_000})], read, path.name)


def compress(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


FOREIGN = plain_tar(
    {"a/.wh.gone": b"", "a/.wh..wh..opq": b"", "usr/lib/x": b"x" * 3000, "bin/sh": b"#!"},
    {"usr/lib64": "lib", "etc/x": "../../../../etc/passwd"},
)


def changes(world: World) -> Case:
    """The tar of what a script changed."""
    return Case(
        [samples.layer_tar(), FOREIGN], lambda data: drain(normalize(Changes(BytesIO(data)), Lower([]), epoch=1))
    )


def libraries(world: World) -> Case:
    def read(data: bytes) -> object:
        for parse in (read_library, lambda data: read_device_code(lambda offset, size: data[offset : offset + size])):
            try:
                parse(data)
            except ValueError as error:
                assert str(error), "an error without a reason"
        return None

    return Case([samples.LIBRARY, Path("/usr/bin/true").resolve().read_bytes()], read)


# ----------------------------------------------------------------------------------------------------------- registries


MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = json.dumps(
    {
        "created": "2026-01-01T00:00:00+00:00",
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest_of(b"tar")]},
        "config": {"Env": ["PATH=/bin", "A=b"], "Labels": {"org.ekiben.stack": "tiny"}},
    }
).encode()


def manifest_of(config: bytes, *layers: bytes) -> bytes:
    entries = [{"mediaType": "x", "digest": digest_of(layer), "size": len(layer)} for layer in layers]
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "y", "digest": digest_of(config), "size": len(config)},
            "layers": entries,
        }
    ).encode()


def registry_manifest(world: World) -> Case:
    """Manifest or index of an image, as a pull and a base out of a registry read it."""
    layer = samples.layer_tar()
    child = {"mediaType": MANIFEST, "digest": digest_of(b"x"), "size": 1}
    index = {"schemaVersion": 2, "manifests": [{**child, "platform": {"os": "linux", "architecture": "amd64"}}]}

    def read(data: bytes) -> object:
        host = world.answer({"/manifests/": data, digest_of(CONFIG): CONFIG, digest_of(layer): layer})
        registry = at(host, tag="1")
        registry.config(registry.manifest("linux/amd64"))
        return None

    return Case([manifest_of(CONFIG, layer), json.dumps(index).encode()], read, world.registry[0])


def registry_config(world: World) -> Case:
    def read(data: bytes) -> object:
        registry = at(world.answer({"/manifests/": manifest_of(data, b"x"), digest_of(data): data}), tag="1")
        return registry.config(registry.manifest("linux/amd64"))

    return Case([CONFIG], read, world.registry[0])


def answer_image(world: World, layer: bytes) -> str:
    """Let the registry have an image of this one layer, and return its reference."""
    config = CONFIG.replace(digest_of(b"tar").encode(), digest_of(samples.layer_tar()).encode())
    manifest = manifest_of(config, layer)
    host = world.answer({"/manifests/": manifest, digest_of(config): config, digest_of(layer): layer})
    return f"http://{host}/lab/x@{digest_of(manifest)}"


def registry_base(world: World) -> Case:
    """The layers of a base out of a registry, whoever made them."""

    class Stage:
        header: dict[str, str] = {}  # noqa: RUF012

    class Layer:
        stage, epoch, inputs = Stage, 1, {"platform": platform()}

    def read(data: bytes) -> object:
        Stage.header = {"from": answer_image(world, data)}
        with tempfile.TemporaryDirectory() as folder:
            entries = docker.entries(Layer, Path(folder), {}, None, lambda line: None)  # type: ignore[arg-type]
            drain(entries)
        return None

    return Case([compress(FOREIGN), FOREIGN, samples.layer_tar(), zstandard.compress(FOREIGN)], read, "layer")


def image_file(world: World) -> Case:
    """An image in a file, as OCI layout and as `docker save` writes it: what it names, and its layers."""
    path = world.path("case/image.tar")
    image = SmallImage(architecture=platform().partition("/")[2])

    def read(data: bytes) -> object:
        world.put(path, data)
        for agent in (oci_archive, docker_archive):
            header = {"bootstrap": "oci-archive", "from": str(path), "file": str(path)}
            with suppress(DefinitionError):
                header["digest"] = agent.file_digest(path, header, platform().partition("/")[2])
                drain_base(agent.entries, header)
        return agent.file_digest(path, header, platform().partition("/")[2])

    return Case([tar_of(image.saved()), tar_of(image.layout()), compress(tar_of(image.saved()))], read, str(path))


def sif_base(world: World) -> Case:
    """A SIF as a base, with scripts and labels of its own."""
    path = world.path("case/base.sif")
    arch = platform().partition("/")[2]
    labels = {".singularity.d/labels.json": b'{"L": "1"}', ".singularity.d/env/90-environment.sh": b"export A=b\n"}
    with path.with_suffix(".layer").open("w+b") as out:
        entries: list[LayerEntry] = [(Entry("", "dir"), None), (Entry(".singularity.d", "dir"), None)]
        entries += [(Entry(".singularity.d/env", "dir"), None)]
        entries += [(Entry(name, "file", size=len(data)), iter([data])) for name, data in labels.items()]
        write_entries(sorted(entries, key=lambda item: sort_key(item[0].path)), SquashfsWriter(out))
    make(path, blob(path.with_suffix(".layer"), path.with_suffix(".layer").read_bytes()), arch=arch)

    def read(data: bytes) -> object:
        world.put(path, data)
        header = {"bootstrap": "localimage", "from": str(path), "file": str(path)}
        header["digest"] = localimage.file_digest(path, header, arch)
        drain_base(localimage.entries, header)
        return None

    return Case([path.read_bytes()], read, str(path))


def drain_base(entries: Callable[..., Iterator[LayerEntry]], header: Mapping[str, str]) -> None:
    class Stage:
        pass

    class Layer:
        stage, epoch, inputs = Stage, 1, {"platform": platform()}

    Stage.header = header  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        drain(entries(Layer, Path(folder), {}, None, lambda line: None))


def registry_image(world: World) -> Case:
    """The layers of an image that is pulled as a SIF."""
    store = Store(world.folder / "reader")

    def read(data: bytes) -> object:
        return pull(Reference.parse(answer_image(world, data)), store, world.path("case/pulled.sif"), quiet())

    return Case([samples.layer_tar(), compress(samples.layer_tar())], read)


def registry_layer(world: World) -> Case:
    """The record of a layer in a registry of layers."""
    from ekiben.formats.partition import read_partition
    from ekiben.store.remote import LayerCache

    layer, head = world.image.layers[-1], {"Docker-Content-Digest": digest_of(b"")}
    blob = world.store.partition(layer)
    content = b"".join(read_partition(blob))
    record = json.dumps(
        {
            "name": layer.name,
            "cache_key": layer.cache_key,
            "diff_id": layer.diff_id,
            "tar_size": layer.tar_size,
            "digest": layer.digest,
            "size": layer.size,
            "executor": "x",
            "seconds": 1.0,
            "inputs": {},
            "notes": {},
        }
    ).encode()
    into = Store(world.folder / "from-registry")
    into.open_for_writing()

    def read(data: bytes) -> object:
        known = {digest_of(data): data, layer.digest: content}
        host = world.answer({"/manifests/": Answer(body=manifest_of(data, content), headers=head), **known})
        result = LayerCache(f"http://{host}/lab/layers", quiet()).fetch(layer.cache_key, into)
        assert result is None or (result.digest, result.size) == (layer.digest, layer.size)
        world.answer({"/manifests/": Answer(body=data, headers=head), **known})
        LayerCache(f"http://{host}/lab/layers", quiet()).fetch(layer.cache_key, into)
        return None

    return Case([record, manifest_of(record, content)], read)


def registry_referrers(world: World) -> Case:
    """The list of what was attached to an image, and an attached artifact."""
    child = {"mediaType": MANIFEST, "digest": digest_of(b"x"), "size": 1, "artifactType": "t", "annotations": {}}
    index = {"schemaVersion": 2, "manifests": [child]}
    kind = {"Content-Type": "application/vnd.oci.image.index.v1+json"}

    def read(data: bytes) -> object:
        answers: dict[str, Answer | bytes] = {
            "/referrers/": Answer(body=data, headers=kind),
            "/manifests/": data,
            "/blobs/": data,
        }
        registry = at(world.answer(answers), tag="1")
        with suppress(EkibenError):
            registry.attached("1")
        return registry.referrers(digest_of(b"y"))

    return Case([json.dumps(index).encode(), manifest_of(b"{}", b"x")], read, world.registry[0])


def registry_token(world: World) -> Case:
    """What a login answers."""
    host, _ = world.registry
    challenge = {"WWW-Authenticate": f'Bearer realm="http://{host}/token",service="x"'}

    def read(data: bytes) -> object:
        world.answer({"/token": data, "/manifests/": Answer(401, headers=challenge)})
        return at(host, tag="1").fetch_manifest()

    return Case([b'{"token": "abc", "expires_in": 300}', b'{"access_token": "abc"}'], read, host)


def registry_login(world: World) -> Case:
    """The files in which other programs keep logins."""
    path = world.path("home/.docker/config.json")
    data = {
        "auths": {
            "r.example.org": {"auth": "YTpi"},
            "r.example.org/lab": {"username": "a", "password": "b", "identitytoken": "t"},
        },
        "credHelpers": {"other": "none"},
        "credsStore": None,
    }

    def read(data: bytes) -> object:
        world.put(path, data)
        return find_credentials("r.example.org", "lab/x")

    return Case([json.dumps(data).encode()], read)


def signed_claim(world: World) -> Case:
    names = {"identity": {"docker-reference": "a/b:1"}, "image": {"docker-manifest-digest": digest_of(b"x")}}
    claim = {"critical": {**names, "type": "atomic container signature"}}
    return Case([json.dumps(claim).encode()], _claim)


# ---------------------------------------------------------------------------------------------------------------- jobs


def job_record(world: World) -> Case:
    """run.json of a submitted run, and the small files that its jobs write."""
    folder = world.path("case/jobs/own-greet-1/x").parent
    record = {
        "format": 3,
        "image": "greeter",
        "recipe_path": "/x",
        "scheduler": "slurm",
        "site": None,
        "site_path": None,
        "sif": "/x.sif",
        "sif_id": None,
        "sif_state": {"stat": "1 2.000000000 3.000000000 4", "header": "0" * 64, "sha256": ""},
        "work": "/",
        "submitted": "2026-11-01T00:00:00Z",
        "request": {
            "nodes": 1,
            "gpus_per_node": None,
            "env": ["A"],
            "binds": ["/data"],
            "seeds": [],
            "scheduler_args": [],
            "max_resubmits": 20,
            "copy_local": False,
        },
        "steps": [
            {
                "name": "1-greet",
                "argv": ["greet", "a"],
                "nodes": 1,
                "gpus": 0,
                "processes": 1,
                "resource_args": [],
                "seeds": ["1", "2"],
            }
        ],
    }
    endings = ("job", "exit", "times", "array", "1.job", "1.exit", "1.times")

    def read(data: bytes) -> object:
        is_record = data[:1] in (b"{", b"[")
        world.put(folder / "run.json", data if is_record else json.dumps(record).encode())
        for ending in endings:
            world.put(folder / f"1-greet.{ending}", b"7\n" if is_record else data)
        result = []
        for run in find_runs([], folder.parent):
            with run.files() as files:
                result.append([(files.exit_code(job), files.times(job), id) for job, id in run.ids.items()])
            request_again(run)
        return result

    return Case([json.dumps(record).encode(), b"123\n"], read, str(folder))


def compiled_record(world: World) -> Case:
    """The record beside a wheel that somebody gives, and what a compiler measured."""
    from ekiben.builder._stage import _read_measured
    from ekiben.builder.wheels import RECORD_FORMAT, read_record

    wheel = world.path("case/tiny.whl")
    wheel.write_bytes(b"wheel")
    record = {
        "format": RECORD_FORMAT,
        "name": "build",
        "key": "stage-9",
        "wheel": "tiny",
        "inputs": {"a": 1},
        "origin": "built",
        "executor": "x",
        "seconds": 1.0,
        "notes": {},
        "files": [{"path": "/a.whl", "mode": 420, "digest": digest_of(b"wheel"), "size": 5}],
    }

    class Stage:
        name, cache_key, inputs = "build", "stage-9", {"a": 1}

    def read(data: bytes) -> object:
        record_file = world.put(wheel.with_name("tiny.whl.json"), data)
        _read_measured(record_file)
        return read_record(wheel, Stage())  # type: ignore[arg-type]

    return Case([json.dumps(record).encode()], read, "tiny.whl")


def pbs_answer(world: World) -> Case:
    """What qstat prints of jobs, on whatever version of PBS a site has."""
    from ekiben.run.schedulers import pbs

    jobs = {
        "1.srv": {"job_state": "R", "exec_host": "n1/0+n2/0", "stime": "Mon"},
        "2[1].srv": {"job_state": "F", "Exit_status": 3, "comment": "x"},
    }

    def read(data: bytes) -> object:
        return list(pbs._records(data.decode("utf-8", "replace")).values())

    return Case([json.dumps({"pbs_version": "20", "Jobs": jobs}).encode(), b""], read, "qstat")


def oar_answer(world: World) -> Case:
    from ekiben.run.schedulers import oar

    job = {
        "Job_Id": 7,
        "array_id": "7",
        "array_index": 1,
        "state": "Running",
        "initial_request": "oarsub -S x",
        "startTime": 1700000000,
        "assigned_network_address": ["n1", "n1"],
        "exit_code": None,
        "events": [{"type": "WALLTIME", "description": ""}],
    }

    def read(data: bytes) -> object:
        records = oar._records(data.decode("utf-8", "replace"))
        return [(oar._key(record), oar._nodes(record), oar._started(record)) for record in records]

    return Case([json.dumps({"7": job, "8": {**job, "exit_code": "256"}}).encode()], read, "oarstat")


Make = Callable[[World], Case]
CASES: dict[str, Make] = {
    case.__name__: case
    for case in (
        definition,
        project,
        recipe,
        stack,
        requirements,
        locks,
        sources,
        source_archive,
        base_packages,
        bases_lock,
        surveyed_project,
        base_config,
        dockerfile,
        evaluated,
        advisories,
        advisory,
        site,
        config,
        store_records,
        stored_blobs,
        version_record,
        removal_note,
        pulled_record,
        catalog,
        catalog_replaced,
        run_record,
        run_curve,
        bundle,
        bundle_index,
        bundle_record,
        sif,
        sif_files,
        packages,
        squashfs,
        changes,
        libraries,
        registry_manifest,
        registry_config,
        registry_base,
        image_file,
        sif_base,
        registry_image,
        registry_layer,
        registry_referrers,
        registry_token,
        registry_login,
        signed_claim,
        job_record,
        compiled_record,
        pbs_answer,
        oar_answer,
    )
}

_OURS = "reads what Ekiben itself has just written, or a program of this machine"
# A case → the functions whose bytes it has, file by file; or in a sentence why these need none.
_READERS = {
    "packages": (
        """
        api.py:metadata inspect/image_info.py:image_info
        inspect/metadata.py:parse inspect/sbom.py:_installed_from spec/recipe.py:parse
    """
    ),
    "compiled_record": "builder/_stage.py:_read_measured builder/wheels.py:read_record",
    _OURS: (
        """
        builder/layer.py:_files_tar bundle/write.py:_write cli/commands/sbom.py:command
        executors/_containers_storage.py:unavailable executors/podman.py:load packages/outdated.py:find_newer
        builder/base_config.py:_with_labels packages/host_config.py:write_host_files packages/sources.py:choose_archive
        project/dockerfile/temporary.py:temporary_recipe builder/failed_line.py:__enter__,_reported,failed
        builder/layer_tests.py:_visible packages/git.py:_join_tars project/add.py:edits project/on_base.py:_texts
        project/shipped.py:_members,shipped_tasks cli/commands/_start.py:_entrypoint executors/podman.py:try_image
    """
    ),
    "bundle_index": "bundle/_index.py:parse",
    "bundle": "bundle/read.py:_unpack",
    "bundle_record": "bundle/read.py:import_compiled packages/git.py:mount_kept",
    "version_record": "core/checked.py:parse_json inspect/_records.py:published_layers images/published.py:read_record",
    "removal_note": "images/published.py:removals",
    "pulled_record": "artifacts/pulled.py:_known,_noted,_reference_of,parse",
    "definition": "core/files.py:read_source spec/definition.py:read_definition",
    "recipe": "core/files.py:read_yaml spec/recipe.py:read_recipe",
    "config": "core/settings.py:read_settings",
    "stack": "doctor/consult.py:known_stacks spec/stack.py:read_stack",
    "changes": "formats/changeset.py:_tar_members",
    "registry_base": "formats/changeset.py:unordered_entries formats/foreign_tar.py:_entries,_write_out",
    "sif": (
        """
        formats/sif.py:_descriptor,_difference_between,_fixed_fields,read_sif,signed_descriptor,signed_header
        formats/sif.py:_with_signatures,table_at
        signing/sif.py:_check_group,_refuse_changes
    """
    ),
    "squashfs": (
        """
        formats/squashfs/reader.py:__init__,_block,_directory_inode,_file_inode,_inode,_listing,_table
        formats/squashfs/reader.py:_xattr_pairs,_xattr_sets,_xattr_value
    """
    ),
    "image_file": "builder/image_files.py:_parse_saved,_tar",
    "sif_base": "builder/sif_base.py:_labels",
    "registry_image": "formats/tar.py:tar_entries",
    "libraries": "gpu/device_code.py:_entries,_fatbin_sections,_fatbins",
    "stored_blobs": "inspect/_records.py:stored_image store/gc.py:reachable",
    "advisories": "packages/outdated.py:_read_records",
    "advisory": "packages/outdated.py:find_advisories",
    "locks": "packages/outdated.py:read_locks spec/stack.py:apt_lock spec/sums.py:check_sums",
    "sources": "spec/sources.py:read_sources",
    "base_config": (
        """
        builder/base_config.py:read_labels formats/base_config.py:parse
        project/dockerfile/base_config.py:parse_config
    """
    ),
    "dockerfile": (
        """
        project/dockerfile/ignore.py:read_ignore project/dockerfile/image_config.py:set_healthcheck
        project/dockerfile/reader.py:json_list,read_dockerfile
    """
    ),
    "index of the own store: tests/unit/ekiben/formats/test_squashfs_reuse.py damages it": (
        "formats/squashfs/reuse.py:_where"
    ),
    "base_packages": "spec/base_packages.py:read_base_packages",
    "bases_lock": "spec/bases_lock.py:read_bases_lock",
    "surveyed_project": "project/survey.py:_read_module,_read_pyproject,_required project/existing.py:_pins",
    "looks for names in an archive, of which any are right": "project/on_base.py:_archive_names",
    "evaluated": "builder/environment.py:_read formats/evaluated.py:parse",
    "source_archive": "packages/sources.py:_read_project,build_requirements",
    "requirements": (
        """
        packages/requirements.py:_project_name,project_requirements,read_requirements
        packages/sources.py:has_submodules
    """
    ),
    "gives certificates to OpenSSL, or keys to gpg": "registry/session.py:_trusted signing/gpg.py:_read_keys",
    "matches patterns in a text of limited size": (
        """
        project/add.py:_keep_below,_not_asked,_read_lists,change_debian,replace_packages
        project/from_definition.py:create_from_definition
        cli/commands/submit.py:_scripts_of packages/lock.py:_read,_resolve project/lock.py:_read
        resolve/capabilities.py:check_torch spec/recipe.py:_imports_library spec/stack.py:unlocked
    """
    ),
    "copies git's index, which git reads": "run/live.py:_commit_of",
    "asks whether a bundle of certificates has one": "core/environment.py:ca_bundle",
    "looks for a name in a file of the machine's administrator": "gpu/container_gpus.py:_names_gpus",
    "run_record": "publish/catalog/runs.py:_read",
    "run_curve": "publish/catalog/curves.py:read_metrics,parse_curve",
    "catalog": "publish/catalog/runs.py:image_metadata",
    "catalog_replaced": "publish/catalog/write.py:_is_replaceable",
    "registry_login": "registry/auth.py:_ask_helper,_configs,_parsed",
    "registry_manifest": "registry/client.py:_media_type registry/manifest.py:parse",
    "registry_referrers": "registry/manifest.py:parse_index",
    "registry_token": "registry/session.py:_token",
    "project": "resolve/resolve.py:check_arguments spec/sums.py:check_recipe_locks",
    "job_record": "run/copy_local.py:_is_as_copied run/jobs/records.py:parse",
    "oar_answer": "run/schedulers/oar.py:_records",
    "pbs_answer": "run/schedulers/pbs.py:_records",
    "site": "run/site.py:find_site",
    "signed_claim": "signing/registry.py:_claim",
    "store_records": "store/_records.py:_read",
    "registry_layer": "store/remote.py:_fetch",
}
READERS = {
    f"{file}:{function}": case
    for case, files in _READERS.items()
    for file, _, functions in (entry.partition(":") for entry in files.split())
    for function in functions.split(",")
}
