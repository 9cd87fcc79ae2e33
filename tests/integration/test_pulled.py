"""Images of a registry wherever a command takes an image: pulled once by digest, with a real registry."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ekiben
from ekiben.artifacts.exporters.sif import make_sif
from ekiben.artifacts.pulled import pull_once
from ekiben.artifacts.push import Pushed, PushRequest, push
from ekiben.core.errors import FetchError, StoreError, UsageError
from ekiben.images import ImageOptions, find_image
from ekiben.registry import session
from ekiben.registry.reference import Reference
from ekiben.run.image import NamedImage
from ekiben.store import Store
from support.hostile import NO_RECORDS
from support.keyrings import keyring, used
from support.registries import Cutter, real_registry
from support.sample_recipe import RunCli, SampleRecipe, image_of, quiet, seeded
from workspaces import Cli, Workspace, need

pytestmark = pytest.mark.covers("ekiben/artifacts", "ekiben/images", "ekiben/registry")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PAUSES", (0.01, 0.02))


@pytest.fixture
def builder(files_only: SampleRecipe, tmp_path: Path) -> Store:
    files_only.write("files/data.txt", str(tmp_path) * 1000)  # each test's image is another one
    return seeded(files_only, tmp_path / "builder", "ground")


@pytest.fixture
def user(tmp_path: Path) -> Store:
    (tmp_path / "user").mkdir()
    return Store(tmp_path / "user/store")


def send(recipe: SampleRecipe, store: Store, ref: str, format: str = "sif") -> Pushed:
    return push(image_of(recipe, store), store, PushRequest(Reference.parse(ref), format), quiet())


def find(reference: str, store: Store, **options: object) -> NamedImage:
    asked = ImageOptions(pull=lambda named: pull_once(named, store, quiet()), **options)  # type: ignore[arg-type]
    return find_image(reference, asked)


def test_sif_is_pulled_once(files_only: SampleRecipe, builder: Store, user: Store, host: str, tmp_path: Path) -> None:
    send(files_only, builder, f"{host}/lab/own:1")
    make_sif(image_of(files_only, builder), builder, tmp_path / "own.sif", squash=False)
    with Cutter(host) as proxy:
        first = find(f"oras://{proxy.host}/lab/own:1", user)
        assert first.sif.read_bytes() == (tmp_path / "own.sif").read_bytes()
        assert (first.name, first.tasks, first.note) == (image_of(files_only, builder).name, {"greet": "single"}, "")
        assert first.sif.parent == user.downloads / "pulled"
        pulled = proxy.passed_down
        assert pulled > first.sif.stat().st_size
        again = find(f"{proxy.host}/lab/own:1", user)
        assert again == first
        assert proxy.passed_down - pulled < 5_000  # headers
    by_digest = find(f"oras://{proxy.host}/lab/own@sha256:{first.sif.stem.partition('-')[0]}", user)  # nothing is asked
    assert by_digest == first


def test_registry_that_does_not_answer(files_only: SampleRecipe, builder: Store, user: Store, host: str) -> None:
    send(files_only, builder, f"{host}/lab/own:2")
    with Cutter(host) as proxy:
        reference = f"{proxy.host}/lab/own:2"
        first = find(reference, user)
    gone = find(f"oras://{reference}", user)
    assert gone.sif == first.sif
    assert gone.note.startswith(f"{proxy.host} does not answer: {proxy.host}/lab/own:2 is what it was on ")
    first.sif.unlink()
    with pytest.raises(FetchError, match=r"does not answer.* and that image is not in"):
        find(f"oras://{reference}", user)
    with pytest.raises(FetchError, match=f"no such file or folder here, and no image in the registry {proxy.host}"):
        find(f"{proxy.host}/lab/never:1", user)


def test_changed_tag_is_pulled_again(files_only: SampleRecipe, builder: Store, user: Store, host: str) -> None:
    send(files_only, builder, f"{host}/lab/own:3")
    first = find(f"oras://{host}/lab/own:3", user)
    files_only.write("files/data.txt", "another")
    send(files_only, builder, f"{host}/lab/own:3")
    second = find(f"oras://{host}/lab/own:3", user)
    assert second.sif != first.sif and first.sif.is_file()


@pytest.mark.parametrize("victim", ["sif", "json", "reference"])
def test_damage_is_repaired(files_only: SampleRecipe, builder: Store, user: Store, host: str, victim: str) -> None:
    send(files_only, builder, f"{host}/lab/own:4")
    first = find(f"oras://{host}/lab/own:4", user)
    content = first.sif.read_bytes()
    if victim == "sif":
        first.sif.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert find(f"oras://{host}/lab/own:4", user) == first
    else:
        references = first.sif.parent / "references"
        path = first.sif.with_suffix(".json") if victim == "json" else next(references.iterdir())
        for data in NO_RECORDS:
            path.write_bytes(data)
            assert find(f"oras://{host}/lab/own:4", user).sif == first.sif
    assert first.sif.read_bytes() == content


def test_folder_of_everybody_is_refused(user: Store, host: str) -> None:
    (user.downloads / "pulled").mkdir(parents=True)
    (user.downloads / "pulled").chmod(0o777)
    with pytest.raises(StoreError, match="can be written by others"):
        find(f"oras://{host}/lab/own:1", user)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("oras://{host}/lab/nothing:1", FetchError, "has no image lab/nothing with the tag 1"),
        ("{host}/lab/nothing", FetchError, "has no image lab/nothing with the tag latest"),
        ("oras://{host}/Lab/own:1", UsageError, "is not a reference to an image"),
        ("library://lab/own:1", UsageError, "'library://' is not known; oras://, docker://"),
        ("oras://{host}/lab/own@sha256:12", UsageError, "is not a reference to an image"),
        ("oras://{host}/lab/own@sha256:" + "0" * 64, FetchError, "404"),
        ("oras://no.such.host.invalid/lab/own:1", FetchError, "no.such.host.invalid"),
    ],
)
def test_each_failure_is_one_sentence(
    user: Store, host: str, reference: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        find(reference.format(host=host), user)
    assert "\n" not in str(caught.value)


def test_option_of_a_recipe_is_refused(user: Store, host: str) -> None:
    with pytest.raises(UsageError, match=r"--stack is for a recipe's image, and oras://.* is in a registry"):
        find(f"oras://{host}/lab/own:1", user, stack="cu130")


def test_path_comes_before_a_registry(user: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.images").mkdir()
    (tmp_path / "my.images/x").write_bytes(b"")
    assert find("my.images/x", user).sif == Path("my.images/x")
    with pytest.raises(UsageError, match=r"my\.images/y\.sif is not there"):
        find("my.images/y.sif", user)


def test_docker_image_of_ours_is_a_sif(
    files_only: SampleRecipe, builder: Store, user: Store, host: str, tmp_path: Path
) -> None:
    need("apptainer")
    pushed = send(files_only, builder, f"{host}/lab/own:docker", "docker")
    make_sif(image_of(files_only, builder), builder, tmp_path / "own.sif", squash=False)
    image = find(f"docker://{host}/lab/own:docker", user)
    assert image.sif.read_bytes() == (tmp_path / "own.sif").read_bytes()
    assert image.pulled == pushed.ref
    assert find(f"docker://{host}/lab/own:docker", user) == image


def test_docker_image_is_left_to_an_engine_where_nothing_runs_a_sif(
    files_only: SampleRecipe, builder: Store, user: Store, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = send(files_only, builder, f"{host}/lab/own:docker", "docker")
    monkeypatch.setenv("PATH", str(tmp_path))
    image = find(f"docker://{host}/lab/own:docker", user)
    assert (image.pulled, image.sif.is_file(), image.tasks) == (pushed.ref, False, None)


def test_commands_take_a_reference(
    run_cli: RunCli, files_only: SampleRecipe, builder: Store, user: Store, host: str, tmp_path: Path
) -> None:
    send(files_only, builder, f"{host}/lab/own:5")
    reference, argv = f"oras://{host}/lab/own:5", ("--store", user.root)
    assert json.loads(run_cli(*argv, "inspect", reference, "--json").stdout)["objects"]
    run_cli(*argv, "diff", reference, reference)
    run_cli(*argv, "sbom", reference, "-o", tmp_path / "x.json")
    dry = run_cli(*argv, "run", "--runtime", "apptainer", "--dry-run", reference, "greet").stdout
    assert str(user.downloads / "pulled") in dry
    wrong = run_cli(*argv, "run", "--dry-run", reference, "grete", code=2).stderr
    assert "has no task 'grete'" in wrong
    assert "is not signed" in run_cli(*argv, "verify", reference, code=8).stderr


def test_open_takes_a_reference(
    files_only: SampleRecipe, builder: Store, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(files_only, builder, f"{host}/lab/own:6")
    monkeypatch.setenv("EKIBEN_STORE", str(tmp_path / "mine/store"))
    (tmp_path / "mine").mkdir()
    assert list(ekiben.open(f"oras://{host}/lab/own:6").tasks) == ["greet"]


def test_file_is_pushed_as_it_is(
    run_cli: RunCli, files_only: SampleRecipe, builder: Store, user: Store, host: str, tmp_path: Path
) -> None:
    make_sif(image_of(files_only, builder), builder, tmp_path / "own.sif", squash=False)
    argv = ("--store", user.root, "push")
    printed = run_cli(*argv, tmp_path / "own.sif", f"{host}/lab/file:1", "--sbom").stdout
    assert f"use     apptainer pull oras://{host}/lab/file:1" in printed and "sbom " in printed
    image = find(f"oras://{host}/lab/file:1", user)
    assert image.sif.read_bytes() == (tmp_path / "own.sif").read_bytes()
    again = json.loads(run_cli(*argv, f"oras://{host}/lab/file:1", f"{host}/lab/copy:1", "--json").stdout)
    assert again["sent"] < 10
    refused = run_cli(*argv, tmp_path / "own.sif", f"{host}/lab/file:2", "--format", "docker", code=2).stderr
    assert "is a SIF file, and is pushed as one: --format sif" in refused
    (tmp_path / "no.sif").write_bytes(b"none")
    assert "not a SIF file" in run_cli(*argv, tmp_path / "no.sif", f"{host}/lab/file:3", code=6).stderr


def test_image_in_a_registry_is_signed(
    run_cli: RunCli, files_only: SampleRecipe, builder: Store, user: Store, host: str
) -> None:
    with keyring() as ring, used(ring):
        fingerprint = ring.make("Alice")
        send(files_only, builder, f"{host}/lab/signed:1")
        assert fingerprint in run_cli("--store", user.root, "sign", f"{host}/lab/signed:1").stdout
        assert "(existing)" in run_cli("--store", user.root, "sign", f"{host}/lab/signed:1").stdout
        assert fingerprint in run_cli("verify", f"{host}/lab/signed:1").stdout


@pytest.mark.guard
def test_task_runs_from_a_registry(cli: Cli, hello: Path, host: str, workspace: Workspace) -> None:
    need("apptainer")
    cli.run("--store", hello, "push", "hello", f"{host}/lab/hello:1", "--format", "sif")
    store = workspace.folder("colleague") / "store"
    out = cli.run("--store", store, "run", f"oras://{host}/lab/hello:1", "hello", "--json").stdout
    assert out.startswith("{")


def test_docker_runs_an_image_that_it_pulled_by_digest(cli: Cli, hello: Path, host: str, workspace: Workspace) -> None:
    need("docker")
    pushed = json.loads(cli.run("--store", hello, "push", "hello", f"{host}/lab/hello:d", "--json").stdout)
    store = workspace.folder("colleague") / "store"
    done = cli.run("--store", store, "run", "--runtime", "docker", f"docker://{host}/lab/hello:d", "hello", "--json")
    assert "{" in done.stdout
    assert f"{host}/lab/hello:d " not in done.stderr and "--pull never" in done.stderr
    subprocess.run(["docker", "image", "rm", "--force", pushed["ref"]], capture_output=True, check=False)
