"""Images to a real registry and back: the same bytes, none of them twice."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.artifacts.partial import partial_file
from ekiben.artifacts.pull import pull
from ekiben.artifacts.push import MEDIA_SBOM, Pushed, PushRequest, push
from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options, ask_registry, plan
from ekiben.core.errors import FetchError, UsageError
from ekiben.core.progress import Progress
from ekiben.formats.oci import MEDIA_MANIFEST
from ekiben.inspect.sbom import sbom_of_image
from ekiben.registry import session
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.resolve.graph import Layer
from ekiben.store import Image, Store
from ekiben.store.remote import LayerCache
from support.compiled import compiled
from support.registries import real_registry
from support.sample_recipe import WALLS, RunCli, SampleRecipe, chain_of, image_of, quiet, seeded

pytestmark = pytest.mark.covers("ekiben/artifacts", "ekiben/registry", "ekiben/builder")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.01, 0.02))


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    files_only.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(files_only, tmp_path / "store", "ground")


def send(image: Image, store: Store, ref: str, format: str = "docker") -> Pushed:
    return push(image, store, PushRequest(Reference.parse(ref), format), quiet())


def bytes_of(image: Image) -> int:
    return len(image.config) + sum(layer.tar_size for layer in image.layers)


def test_docker_image_push_pull_round_trip(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(files_only, store)
    done = send(image, store, f"{host}/lab/own:1")
    assert (done.sent, done.mounted, done.existing) == (bytes_of(image), 0, 0)
    data, digest = Registry(Reference.parse(f"{host}/lab/own:1")).fetch_manifest()
    assert done.ref == f"{host}/lab/own@{digest}"
    manifest = json.loads(data)
    assert manifest["config"]["digest"] == image.image_id
    assert [layer["digest"] for layer in manifest["layers"]] == [layer.diff_id for layer in image.layers]
    assert send(image, store, f"{host}/lab/own:1") == Pushed(done.ref, 0, 0, 4)
    assert send(image, store, f"{host}/lab/own:2").ref == done.ref
    make_sif(image, store, tmp_path / "made.sif", squash=False, on_bytes=lambda count: None)
    product, pulled, _ = pull(
        Reference.parse(f"{host}/lab/own:1"), Store(tmp_path / "other"), tmp_path / "pulled.sif", quiet()
    )
    assert (product.created, pulled) == (True, digest)
    assert (tmp_path / "pulled.sif").read_bytes() == (tmp_path / "made.sif").read_bytes()
    assert list((tmp_path / "other/staging").iterdir()) == []


@pytest.mark.parametrize("format", ["docker", "sif"])
def test_sbom_is_attached_as_referrer(files_only: SampleRecipe, store: Store, host: str, format: str) -> None:
    image, reference = image_of(files_only, store), Reference.parse(f"{host}/lab/bill-{format}:1")
    plain = push(image, store, PushRequest(reference, format), quiet())
    done = push(image, store, PushRequest(reference, format, sbom=True), quiet())
    assert (done.ref, plain.sbom) == (plain.ref, "")
    registry, digest = Registry(reference), done.ref.rpartition("@")[2]
    (found,) = registry.referrers(digest)
    assert (found.artifact_type, found.data["annotations"]) == (
        MEDIA_SBOM,
        {"org.opencontainers.image.title": "own.cdx.json"},
    )
    assert done.sbom == f"{host}/lab/bill-{format}@{found.digest}"
    assert registry.attached(found.digest) == [sbom_of_image(image, store).encode()]
    assert push(image, store, PushRequest(reference, format, sbom=True), quiet()) == done
    assert registry.referrers(digest) == [found]


def test_layers_have_no_sbom(files_only: SampleRecipe, store: Store, host: str) -> None:
    with pytest.raises(UsageError, match="layers have no SBOM"):
        push(
            image_of(files_only, store),
            store,
            PushRequest(Reference.parse(f"{host}/lab/layers"), "layers", sbom=True),
            quiet(),
        )


def test_only_what_changed_is_sent_and_the_rest_is_mounted(files_only: SampleRecipe, store: Store, host: str) -> None:
    first = image_of(files_only, store)
    send(first, store, f"{host}/lab/a:1")
    files_only.write("files/data.txt", "changed\n")
    second = image_of(files_only, store)
    done = send(second, store, f"{host}/lab/b:1")
    unshared = bytes_of(second) - second.layers[0].tar_size
    assert (done.sent, done.mounted, done.existing) == (unshared, 1, 0)


def test_sif_push_pull_round_trip(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(files_only, store)
    make_sif(image, store, tmp_path / "made.sif", squash=False, on_bytes=lambda count: None)
    done = send(image, store, f"{host}/lab/sif:1", "sif")
    assert done.sent == (tmp_path / "made.sif").stat().st_size + 2
    assert send(image, store, f"{host}/lab/sif:1", "sif").sent == 0
    out = tmp_path / "pulled.sif"
    assert pull(Reference.parse(f"oras://{host}/lab/sif:1"), store, out, quiet())[0].created
    assert out.read_bytes() == (tmp_path / "made.sif").read_bytes()
    assert out.stat().st_mode & 0o777 == 0o755
    assert not pull(Reference.parse(f"{host}/lab/sif:1"), store, out, quiet())[0].created
    out.write_bytes(b"x" * out.stat().st_size)
    assert pull(Reference.parse(f"{host}/lab/sif:1"), store, out, quiet())[0].created
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pull_prints_command_that_runs_a_task(
    files_only: SampleRecipe, store: Store, host: str, tmp_path: Path, run_cli: RunCli
) -> None:
    image = image_of(files_only, store)
    for number, format in enumerate(("sif", "docker")):
        send(image, store, f"{host}/lab/line:{number}", format)
        out = run_cli("--store", store.root, "pull", f"{host}/lab/line:{number}", "-o", tmp_path / format).stdout
        assert f"run     apptainer exec --nv {tmp_path / format} greet\n" in out


def test_pull_resumes_beside_concurrent_pulls(
    files_only: SampleRecipe, store: Store, host: str, tmp_path: Path
) -> None:
    done = send(image_of(files_only, store), store, f"{host}/lab/again:1", "sif")
    reference = Reference.parse(f"{host}/lab/again:1")
    pull(reference, store, tmp_path / "whole.sif", quiet())
    data = (tmp_path / "whole.sif").read_bytes()
    digest = json.loads(Registry(reference).fetch_manifest()[0])["layers"][0]["digest"]
    with partial_file(tmp_path / "a.sif", digest, store) as partial:  # as a killed one leaves it
        partial.stream.write(data[:30_000])
    log = io.StringIO()
    assert pull(reference, store, tmp_path / "a.sif", Progress(log))[1] == done.ref.partition("@")[2]
    assert "resuming after" in log.getvalue()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: pull(reference, store, tmp_path / "b.sif", quiet()), range(8)))
    assert (tmp_path / "a.sif").read_bytes() == (tmp_path / "b.sif").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_damaged_layer_is_not_sent(files_only: SampleRecipe, store: Store, host: str) -> None:
    image = image_of(files_only, store)
    path = store.blob_path(image.layers[1].digest)
    path.chmod(0o644)
    path.write_bytes(bytes(image.layers[1].size))
    for format in ("docker", "sif"):
        with pytest.raises(Exception, match="is damaged"):
            send(image, store, f"{host}/lab/damaged-{format}:1", format)
        with pytest.raises(FetchError, match="404"):
            Registry(Reference.parse(f"{host}/lab/damaged-{format}:1")).fetch_manifest()


def test_moved_tag_updates_and_digest_stays(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    first = send(image_of(files_only, store), store, f"{host}/lab/moves:1", "sif")
    before = tmp_path / "before.sif"
    pull(Reference.parse(f"{host}/lab/moves:1"), store, before, quiet())
    files_only.write("files/data.txt", "changed\n")
    second = send(image_of(files_only, store), store, f"{host}/lab/moves:1", "sif")
    log = io.StringIO()
    digest = first.ref.partition("@")[2]
    pull(Reference.parse(f"{host}/lab/moves:1@{digest}"), store, tmp_path / "x.sif", Progress(log))
    assert (tmp_path / "x.sif").read_bytes() == before.read_bytes()
    assert f"the tag 1 has moved to {second.ref.partition('@')[2]}; taking {digest} as asked" in log.getvalue()


def test_invalid_pushes_and_pulls_fail(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(files_only, store)
    with pytest.raises(UsageError, match="name a tag instead"):
        send(image, store, f"{host}/lab/x@sha256:{'0' * 64}")
    with pytest.raises(UsageError, match="without a tag"):
        send(image, store, f"{host}/lab/x:1", "layers")
    send(image, store, f"{host}/lab/keys", "layers")
    with pytest.raises(FetchError, match="is a layer, not an image"):
        pull(Reference.parse(f"{host}/lab/keys:{image.layers[0].cache_key}"), store, tmp_path / "x.sif", quiet())
    assert not (tmp_path / "x.sif").exists()


def test_missing_layers_come_from_upstream(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    """What it has is fetched, not built: an empty store needs no engine and no mmdebstrap."""
    image = image_of(files_only, store)
    done = send(image, store, f"{host}/lab/layers", "layers")
    assert send(image, store, f"{host}/lab/layers", "layers") == Pushed(done.ref, 0, 0, 3)
    mine, log = Store(tmp_path / "mine"), io.StringIO()
    again = build(BuildContext(chain_of(files_only), mine, Options(registry=f"{host}/lab/layers"), Progress(log)))
    assert [asdict(layer) for layer in again.layers] == [asdict(layer) for layer in image.layers]
    for layer in again.layers:
        mine.check_blob(layer.digest, again=True)
    assert log.getvalue().count(f"from {host}/lab/layers") == 6  # each begins and ends


def test_plan_shows_what_would_be_pulled(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, host: str, tmp_path: Path
) -> None:
    """As a build then does: an edited layer and what stands on it are not in the registry, the others are."""
    send(image_of(files_only, store), store, f"{host}/lab/plan", "layers")
    files_only.write("files/data.txt", "edited\n")
    plan = ("--store", tmp_path / "mine", "plan", files_only.path)
    asks = {"EKIBEN_REGISTRY": f"{host}/lab/plan"}
    plan_lines = [line.split(maxsplit=3) for line in run_cli(*plan, env=asks).stdout.splitlines()]
    assert [(columns[0], columns[1]) for columns in plan_lines] == [
        ("PULL", "ground"),
        ("BUILD", "roof"),
        ("BUILD", "own"),
    ]
    assert plan_lines[0][3] == f"from {host}/lab/plan"
    rows = json.loads(run_cli(*plan, "--json", env=asks).stdout)
    assert [(row["stored"], row["in_registry"]) for row in rows] == [(False, True), (False, False), (False, False)]
    assert not (tmp_path / "mine").exists()
    build(
        BuildContext(
            chain_of(files_only),
            Store(tmp_path / "mine"),
            Options(registry=f"{host}/lab/plan"),
            Progress(io.StringIO()),
        )
    )
    assert {
        line.split()[0] for line in run_cli(*plan, env={"EKIBEN_REGISTRY": "127.0.0.1:9/none"}).stdout.splitlines()
    } == {"CACHED"}
    away = run_cli("--store", tmp_path / "other", "plan", files_only.path, env={"EKIBEN_REGISTRY": "127.0.0.1:9/none"})
    assert {line.split()[0] for line in away.stdout.splitlines()} == {"BUILD"}
    assert away.stderr.count("continuing without that registry") == 1


def test_image_counts_what_is_pulled_and_what_is_built(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, host: str, tmp_path: Path
) -> None:
    send(image_of(files_only, store), store, f"{host}/lab/counts", "layers")
    env, options = (
        {"EKIBEN_REGISTRY": f"{host}/lab/counts"},
        ("--format", "sif", "--no-verify", "--json", "-o", tmp_path / "x.sif"),
    )
    done = run_cli("--store", tmp_path / "one", "image", files_only.path, *options, env=env)
    assert "own: 3 of 3 layers to pull\n" in done.stderr
    assert json.loads(done.stdout)["built"] == []
    files_only.write("files/data.txt", "edited\n")
    done = run_cli("--store", tmp_path / "two", "image", files_only.path, *options, env=env)
    assert "own: 2 of 3 layers to build, 1 to pull\n" in done.stderr
    assert len(json.loads(done.stdout)["built"]) == 2


def test_pulled_layer_needs_no_build_stage(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    send(image_of(files_only, store), store, f"{host}/lab/stages", "layers")
    cache, empty = LayerCache(f"{host}/lab/stages", Progress(io.StringIO())), Store(tmp_path / "mine")
    files_only.write("images/walls.def", WALLS)
    chain = chain_of(compiled(files_only))  # ground ← roof, which takes a wheel of a stage on walls
    ground, roof, _ = chain.layers
    (walls,) = (
        need.step for action in plan(chain, empty) for need in action.stage_deps if isinstance(need.step, Layer)
    )

    def planned() -> list[tuple[str, bool]]:
        rows: list[tuple[str, bool]] = []
        for action in ask_registry(plan(chain, empty), cache):
            rows += [(f"{need.step.name} *", need.in_registry) for need in action.stage_deps]
            rows.append((action.layer.name, action.in_registry))
        return rows

    stage = ("roof.build *", False)
    assert planned() == [("ground", True), ("walls *", False), stage, ("roof", False), ("own", False)]
    data, _ = cache.registry.fetch_manifest(
        ground.cache_key
    )  # it is asked for a key, and that is all that is looked at
    cache.registry.put_manifest(data, MEDIA_MANIFEST, walls.cache_key)
    assert planned() == [("ground", True), ("walls *", True), stage, ("roof", False), ("own", False)]
    cache.registry.put_manifest(data, MEDIA_MANIFEST, roof.cache_key)
    assert planned() == [("ground", True), ("roof", True), ("own", False)]


def test_failing_registry_is_skipped(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    log = io.StringIO()
    cache = LayerCache("127.0.0.1:9/lab/layers", Progress(log))
    assert [cache.fetch("k", store), cache.fetch("l", store)] == [None, None]
    assert log.getvalue().count("continuing without that registry") == 1
    assert (
        build(BuildContext(chain_of(files_only), store, Options(registry="127.0.0.1:9/lab/layers"), Progress(log))).name
        == "own"
    )


def test_layer_with_a_foreign_key_is_refused(files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(files_only, store)
    send(image, store, f"{host}/lab/wrong", "layers")
    client = Registry(Reference.parse(f"{host}/lab/wrong"))
    data, _ = client.fetch_manifest(image.layers[0].cache_key)
    client.put_manifest(data, "application/vnd.oci.image.manifest.v1+json", image.layers[1].cache_key)
    log = io.StringIO()
    assert (
        LayerCache(f"{host}/lab/wrong", Progress(log)).fetch(image.layers[1].cache_key, Store(tmp_path / "mine"))
        is None
    )
    assert "differs from its tag" in log.getvalue()


def test_push_and_pull(run_cli: RunCli, files_only: SampleRecipe, store: Store, host: str, tmp_path: Path) -> None:
    image_of(files_only, store)
    argv = ("--store", store.root, "push", files_only.path)
    assert f"docker pull {host}/lab/cli:1" in run_cli(*argv, f"{host}/lab/cli:1").stdout
    sent = json.loads(run_cli(*argv, f"{host}/lab/cli:1-sif", "--format", "sif", "--json").stdout)
    assert sent["ref"].startswith(f"{host}/lab/cli@sha256:")
    done = run_cli("--store", store.root, "pull", f"{host}/lab/cli:1-sif")
    assert "apptainer exec --nv cli.sif" in done.stdout
    assert (tmp_path / "cli.sif").exists()
    assert "not there: manifests/none: 404" in run_cli("pull", f"{host}/lab/cli:none", code=7).stderr
    run_cli("pull", f"{host}/Lab", code=2)


@pytest.mark.parametrize("blobs", [3, [], {"sha256:x": 3}, {"sha256:x": [1]}, None])
def test_bad_upload_is_ignored(
    files_only: SampleRecipe, store: Store, host: str, tmp_path: Path, blobs: object
) -> None:
    image = image_of(files_only, store)
    push(image, store, PushRequest(Reference.parse(f"{host}/lab/damaged-memory:1"), "docker"), quiet())
    paths = list((store.root / "checks").glob("pushed-*.json"))
    assert paths
    for path in paths:
        path.write_text(json.dumps({"blobs": blobs}))
    assert (
        push(image, store, PushRequest(Reference.parse(f"{host}/lab/damaged-memory-2:1"), "docker"), quiet()).sent > 0
    )
