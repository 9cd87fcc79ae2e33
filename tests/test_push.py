"""Images to a real registry and back: the same bytes, none of them twice."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from builder import registry
from builder.assemble import make_sif
from builder.chain import Layer
from builder.errors import FetchError, UsageError
from builder.oci import MEDIA_MANIFEST
from builder.pipeline import Image, Options, ask_registry, build, plan
from builder.progress import Progress
from builder.pull import LayerCache, pull
from builder.push import MEDIA_BILL, Pushed, push
from builder.registry import Reference, Registry
from builder.sbom import bill_of_image
from builder.sif import SifBytes
from builder.store import Store
from compiled import compiled
from own_recipe import WALLS, Own, RunCli, chain_of, image_of, quiet, seeded
from registries import real_registry


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PAUSES", (0.01, 0.02))


@pytest.fixture
def store(flat: Own, tmp_path: Path) -> Store:
    flat.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(flat, tmp_path / "store", "ground")


def send(image: Image, store: Store, place: str, format: str = "docker") -> Pushed:
    return push(image, store, Reference.parse(place), format, quiet())


def bytes_of(image: Image) -> int:
    return len(image.config) + sum(layer.tar_size for layer in image.layers)


def test_the_sif_without_a_file_is_the_sif(flat: Own, store: Store, tmp_path: Path) -> None:
    from builder.push import sif_bytes

    image = image_of(flat, store)
    made = make_sif(image, store, tmp_path / "x.sif", flat=False, on_bytes=lambda count: None)
    data = (tmp_path / "x.sif").read_bytes()
    sif: SifBytes = sif_bytes(image, store)
    assert sif.size == made.size == len(data)
    for offset in (0, 1, 4095, 32768, sif.size // 2, sif.size - 1, sif.size):
        assert b"".join(sif.read(offset)) == data[offset:]


def test_a_docker_image_there_and_back(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(flat, store)
    done = send(image, store, f"{host}/lab/own:1")
    assert (done.sent, done.mounted, done.there) == (bytes_of(image), 0, 0)
    data, digest = Registry(Reference.parse(f"{host}/lab/own:1")).fetch_manifest()
    assert done.place == f"{host}/lab/own@{digest}"
    manifest = json.loads(data)
    assert manifest["config"]["digest"] == image.image_id
    assert [layer["digest"] for layer in manifest["layers"]] == [layer.diff_id for layer in image.layers]
    assert send(image, store, f"{host}/lab/own:1") == Pushed(done.place, 0, 0, 4)
    assert send(image, store, f"{host}/lab/own:2").place == done.place
    make_sif(image, store, tmp_path / "made.sif", flat=False, on_bytes=lambda count: None)
    product, pulled, _ = pull(
        Reference.parse(f"{host}/lab/own:1"), Store(tmp_path / "other"), tmp_path / "pulled.sif", quiet()
    )
    assert (product.made, pulled) == (True, digest)
    assert (tmp_path / "pulled.sif").read_bytes() == (tmp_path / "made.sif").read_bytes()
    assert list((tmp_path / "other/staging").iterdir()) == []


@pytest.mark.parametrize("format", ["docker", "sif"])
def test_its_bill_of_materials_is_attached(flat: Own, store: Store, host: str, format: str) -> None:
    image, place = image_of(flat, store), Reference.parse(f"{host}/lab/bill-{format}:1")
    plain = push(image, store, place, format, quiet())
    done = push(image, store, place, format, quiet(), sbom=True)
    assert (done.place, plain.bill) == (plain.place, "")
    registry, digest = Registry(place), done.place.rpartition("@")[2]
    (found,) = registry.referrers(digest)
    assert (found["artifactType"], found["annotations"]) == (
        MEDIA_BILL,
        {"org.opencontainers.image.title": "own.cdx.json"},
    )
    assert done.bill == f"{host}/lab/bill-{format}@{found['digest']}"
    assert registry.attached(found["digest"]) == [bill_of_image(image, store).encode()]
    assert push(image, store, place, format, quiet(), sbom=True) == done
    assert registry.referrers(digest) == [found]


def test_layers_have_no_bill(flat: Own, store: Store, host: str) -> None:
    with pytest.raises(UsageError, match="a bill of materials is of an image"):
        push(image_of(flat, store), store, Reference.parse(f"{host}/lab/layers"), "layers", quiet(), sbom=True)


def test_only_what_changed_is_sent_and_the_rest_is_mounted(flat: Own, store: Store, host: str) -> None:
    first = image_of(flat, store)
    send(first, store, f"{host}/lab/a:1")
    flat.write("files/data.txt", "changed\n")
    second = image_of(flat, store)
    done = send(second, store, f"{host}/lab/b:1")
    own = bytes_of(second) - second.layers[0].tar_size
    assert (done.sent, done.mounted, done.there) == (own, 1, 0)


def test_a_sif_there_and_back(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(flat, store)
    make_sif(image, store, tmp_path / "made.sif", flat=False, on_bytes=lambda count: None)
    done = send(image, store, f"{host}/lab/sif:1", "sif")
    assert done.sent == (tmp_path / "made.sif").stat().st_size + 2
    assert send(image, store, f"{host}/lab/sif:1", "sif").sent == 0
    out = tmp_path / "pulled.sif"
    assert pull(Reference.parse(f"oras://{host}/lab/sif:1"), store, out, quiet())[0].made
    assert out.read_bytes() == (tmp_path / "made.sif").read_bytes()
    assert out.stat().st_mode & 0o777 == 0o755
    assert not pull(Reference.parse(f"{host}/lab/sif:1"), store, out, quiet())[0].made
    out.write_bytes(b"x" * out.stat().st_size)
    assert pull(Reference.parse(f"{host}/lab/sif:1"), store, out, quiet())[0].made
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_pull_goes_on_and_two_at_once_do_not_meet(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    done = send(image_of(flat, store), store, f"{host}/lab/again:1", "sif")
    place = Reference.parse(f"{host}/lab/again:1")
    pull(place, store, tmp_path / "whole.sif", quiet())
    data = (tmp_path / "whole.sif").read_bytes()
    digest = json.loads(Registry(place).fetch_manifest()[0])["layers"][0]["digest"]
    (tmp_path / f".a.sif.{digest[7:19]}.part").write_bytes(data[:30_000])  # as a killed one leaves it
    said = io.StringIO()
    assert pull(place, store, tmp_path / "a.sif", Progress(said))[1] == done.place.partition("@")[2]
    assert "are there from before" in said.getvalue()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: pull(place, store, tmp_path / "b.sif", quiet()), range(8)))
    assert (tmp_path / "a.sif").read_bytes() == (tmp_path / "b.sif").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_damaged_layer_is_not_sent(flat: Own, store: Store, host: str) -> None:
    image = image_of(flat, store)
    path = store.blob_path(image.layers[1].digest)
    path.chmod(0o644)
    path.write_bytes(bytes(image.layers[1].size))
    for format in ("docker", "sif"):
        with pytest.raises(Exception, match="is damaged"):
            send(image, store, f"{host}/lab/damaged-{format}:1", format)
        with pytest.raises(FetchError, match="404"):
            Registry(Reference.parse(f"{host}/lab/damaged-{format}:1")).fetch_manifest()


def test_a_tag_that_moved(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    first = send(image_of(flat, store), store, f"{host}/lab/moves:1", "sif")
    before = tmp_path / "before.sif"
    pull(Reference.parse(f"{host}/lab/moves:1"), store, before, quiet())
    flat.write("files/data.txt", "changed\n")
    second = send(image_of(flat, store), store, f"{host}/lab/moves:1", "sif")
    said = io.StringIO()
    digest = first.place.partition("@")[2]
    pull(Reference.parse(f"{host}/lab/moves:1@{digest}"), store, tmp_path / "x.sif", Progress(said))
    assert (tmp_path / "x.sif").read_bytes() == before.read_bytes()
    assert f"the tag 1 has moved to {second.place.partition('@')[2]}; taking {digest} as asked" in said.getvalue()


def test_what_cannot_be_pushed_or_pulled(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(flat, store)
    with pytest.raises(UsageError, match="give a tag"):
        send(image, store, f"{host}/lab/x@sha256:{'0' * 64}")
    with pytest.raises(UsageError, match="without a tag"):
        send(image, store, f"{host}/lab/x:1", "layers")
    send(image, store, f"{host}/lab/keys", "layers")
    with pytest.raises(FetchError, match="is a layer, not an image"):
        pull(Reference.parse(f"{host}/lab/keys:{image.layers[0].cache_key}"), store, tmp_path / "x.sif", quiet())
    assert not (tmp_path / "x.sif").exists()


# --------------------------------------------------------------------------------------------------------- layers by key


def test_a_registry_behind_the_stores(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    """What it has is fetched, not built: an empty store needs no engine and no mmdebstrap."""
    image = image_of(flat, store)
    done = send(image, store, f"{host}/lab/layers", "layers")
    assert send(image, store, f"{host}/lab/layers", "layers") == Pushed(done.place, 0, 0, 3)
    mine, said = Store(tmp_path / "mine"), io.StringIO()
    again = build(chain_of(flat), mine, Options(registry=f"{host}/lab/layers"), Progress(said))
    assert [asdict(layer) for layer in again.layers] == [asdict(layer) for layer in image.layers]
    for layer in again.layers:
        mine.check_blob(layer.digest, again=True)
    assert said.getvalue().count(f"from {host}/lab/layers") == 6  # each begins and ends


def test_plan_says_what_would_be_fetched(run_cli: RunCli, flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    """As a build then does: an edited layer and what stands on it are not in the registry, the others are."""
    send(image_of(flat, store), store, f"{host}/lab/plan", "layers")
    flat.write("files/data.txt", "edited\n")
    plan = ("--store", tmp_path / "mine", "plan", flat.path)
    asks = {"EKIBEN_REGISTRY": f"{host}/lab/plan"}
    said = [line.split(maxsplit=3) for line in run_cli(*plan, env=asks).stdout.splitlines()]
    assert [(words[0], words[1]) for words in said] == [("fetch", "ground"), ("build", "roof"), ("build", "own")]
    assert said[0][3] == f"from {host}/lab/plan"
    rows = json.loads(run_cli(*plan, "--json", env=asks).stdout)
    assert [(row["stored"], row["in_registry"]) for row in rows] == [(False, True), (False, False), (False, False)]
    assert not (tmp_path / "mine").exists()
    build(chain_of(flat), Store(tmp_path / "mine"), Options(registry=f"{host}/lab/plan"), Progress(io.StringIO()))
    assert {
        line.split()[0] for line in run_cli(*plan, env={"EKIBEN_REGISTRY": "127.0.0.1:9/none"}).stdout.splitlines()
    } == {"keep"}
    away = run_cli("--store", tmp_path / "other", "plan", flat.path, env={"EKIBEN_REGISTRY": "127.0.0.1:9/none"})
    assert {line.split()[0] for line in away.stdout.splitlines()} == {"build"}
    assert away.stderr.count("going on without that registry") == 1


def test_what_is_fetched_needs_no_build_stage(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    send(image_of(flat, store), store, f"{host}/lab/stages", "layers")
    cache, empty = LayerCache(f"{host}/lab/stages", Progress(io.StringIO())), Store(tmp_path / "mine")
    flat.write("images/walls.def", WALLS)
    chain = chain_of(compiled(flat))  # ground ← roof, which takes a wheel of a stage on walls
    ground, roof, _ = chain.layers
    (walls,) = (need.step for action in plan(chain, empty) for need in action.needs if isinstance(need.step, Layer))

    def planned() -> list[tuple[str, bool]]:
        rows: list[tuple[str, bool]] = []
        for action in ask_registry(plan(chain, empty), cache):
            rows += [(f"{need.step.name} *", need.in_registry) for need in action.needs]
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


def test_a_registry_that_fails_is_told_and_left(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    said = io.StringIO()
    cache = LayerCache("127.0.0.1:9/lab/layers", Progress(said))
    assert [cache.fetch("k", store), cache.fetch("l", store)] == [None, None]
    assert said.getvalue().count("going on without that registry") == 1
    assert build(chain_of(flat), store, Options(registry="127.0.0.1:9/lab/layers"), Progress(said)).name == "own"


def test_a_layer_under_another_ones_key_is_not_taken(flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    image = image_of(flat, store)
    send(image, store, f"{host}/lab/wrong", "layers")
    client = Registry(Reference.parse(f"{host}/lab/wrong"))
    data, _ = client.fetch_manifest(image.layers[0].cache_key)
    client.put_manifest(data, "application/vnd.oci.image.manifest.v1+json", image.layers[1].cache_key)
    said = io.StringIO()
    assert (
        LayerCache(f"{host}/lab/wrong", Progress(said)).fetch(image.layers[1].cache_key, Store(tmp_path / "mine"))
        is None
    )
    assert "is another layer than its tag says" in said.getvalue()


def test_push_and_pull_by_command(run_cli: RunCli, flat: Own, store: Store, host: str, tmp_path: Path) -> None:
    image_of(flat, store)
    words = ("--store", store.root, "push", flat.path)
    assert f"docker pull {host}/lab/cli:1" in run_cli(*words, f"{host}/lab/cli:1").stdout
    sent = json.loads(run_cli(*words, f"{host}/lab/cli:1-sif", "--format", "sif", "--json").stdout)
    assert sent["place"].startswith(f"{host}/lab/cli@sha256:")
    done = run_cli("--store", store.root, "pull", f"{host}/lab/cli:1-sif")
    assert "singularity exec --nv cli.sif" in done.stdout
    assert (tmp_path / "cli.sif").exists()
    assert "not there: manifests/none: 404" in run_cli("pull", f"{host}/lab/cli:none", code=7).stderr
    run_cli("pull", f"{host}/Lab", code=2)
