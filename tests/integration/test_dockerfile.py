"""A Dockerfile becomes definition files: the same files, environment and start as Docker's own build of it.

The oracle is BuildKit of Docker 20.10, by the client of that version. It knows no heredoc: what a heredoc means is in
tests/unit/ekiben/project/dockerfile/.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dockerfile_cases import CASES, Case
from ekiben.core.progress import Progress
from ekiben.formats.evaluated import START
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.tar import tar_stream
from ekiben.inspect.image_info import image_of_sif
from ekiben.project.dockerfile import Conversion, convert
from ekiben.store import Store
from workspaces import ROOT, Cli, Workspace, need

pytestmark = pytest.mark.covers("docs/tutorials", "ekiben/project/dockerfile", "ekiben/cli/commands/init.py")

REGISTRY = "127.0.0.1:5000"
DOCKER = "/usr/bin/docker"  # of 20.10, which needs no plug-in for BuildKit
PROGRAMS = (
    "sh bash cat chmod chown chroot cp cut date dirname echo env false find grep head id ln ls mkdir mv printf pwd"
    " readlink rm rmdir sed seq sleep sort stat tail tar test touch tr true uname wc gzip"
)
IGNORED = (
    "dev",
    "proc",
    "sys",
    "etc/hosts",
    "etc/hostname",
    "etc/resolv.conf",
    "etc/mtab",
    ".dockerenv",
    "run",
    ".singularity.d",
    "opt/ekiben",
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Listing = dict[str, tuple[object, ...]]


def docker(*args: str | Path, cwd: Path | None = None, code: int | None = 0) -> str:
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    done = subprocess.run(
        [DOCKER, *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert code is None or done.returncode == code, f"{args}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


def small_root(folder: Path) -> Path:
    """A root file system of this machine's own programs, of some megabytes."""
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "usr/sbin",
        "etc",
        "root",
        "tmp",
        "home/app",
        "opt/full",
        "dev",
        "proc",
        "sys",
        "pub",
    ):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in PROGRAMS.split():
        real = os.path.realpath(shutil.which(name) or name)
        shutil.copy2(real, folder / "usr/bin" / name)
        listed = subprocess.run(["ldd", real], capture_output=True, text=True, check=False).stdout
        for word in listed.split():
            if word.startswith("/"):
                target = folder / ("usr" + word if not word.startswith("/usr") else word[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(os.path.realpath(word), target)
    (folder / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:99:77::/home/app:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\napp:x:77:\nmore:x:78:app\n")
    (folder / "opt/full/old").write_text("old\n")
    os.chown(folder / "home/app", 99, 77)
    for name in ("tmp", "pub"):
        (folder / name).chmod(0o1777)
    (folder / "root").chmod(0o700)
    for name in ("etc/passwd", "etc/group", "opt/full/old"):
        (folder / name).chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base of all cases in the registry, by digest."""
    need("docker", "skopeo")
    if not Path(DOCKER).exists():
        pytest.skip(f"{DOCKER} is not installed (tests/services.sh install docker)")
    root = small_root(tmp_path_factory.mktemp("root"))
    name = f"{REGISTRY}/ekiben-test/dockerfile-base:1"
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        changes = (f"ENV PATH={PATH}", "ENV FROM_BASE=yes", "WORKDIR /", 'CMD ["sh"]')
        options = [word for change in changes for word in ("--change", change)]
        subprocess.run([DOCKER, "import", *options, "-", name], stdin=tar.stdout, check=True, capture_output=True)
    docker("push", "-q", name)
    digest = subprocess.check_output(
        ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", f"docker://{name}"], text=True
    ).strip()
    reference = f"{REGISTRY}/ekiben-test/dockerfile-base@{digest}"
    docker("pull", "-q", reference)
    return reference


@dataclass(frozen=True)
class Result:
    """What a build left: files that differ from the base's, variables, labels, and what else an image's config has."""

    files: Listing
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    config: Mapping[str, object]


CONFIG = (
    *("Cmd", "Entrypoint", "ExposedPorts", "Healthcheck", "OnBuild", "Shell"),
    *("StopSignal", "User", "Volumes", "WorkingDir"),
)


def config_of(config: Mapping[str, Any]) -> dict[str, object]:
    """The fields that are not empty, without the program that evaluates an environment where a container starts."""
    entrypoint = [item for item in config.get("Entrypoint") or () if item != START]
    return {name: value for name in CONFIG if (value := entrypoint if name == "Entrypoint" else config.get(name))}


@dataclass
class Built:
    """Results, files and Docker's images by the case's name."""

    expected: dict[str, Result] = field(default_factory=dict)
    actual: dict[str, Result] = field(default_factory=dict)
    sifs: dict[str, Path] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)


def write_context(case: Case, folder: Path, base: str) -> Path:
    for name, content in {"a.txt": "a\n", **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, tuple):
            path.symlink_to(content[0])
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content)
    for name, mode in case.modes.items():
        (folder / name).chmod(mode)
    (folder / "Dockerfile").write_text(re.sub(r"\bBASE\b", base, case.text))
    return folder / "Dockerfile"


def path_is(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}/")


def listing_of_tar(data: bytes) -> Listing:
    listing: Listing = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        entries = {info.name: info for info in tar}
        for info in tar:
            name = info.name.strip("/")
            target = entries[info.linkname] if info.islnk() else info
            content = tar.extractfile(target) if target.isreg() else None
            owner = (info.uid, info.gid, info.mode & 0o7777)
            if info.isdir():
                listing[name] = ("dir", *owner)
            elif info.issym():
                listing[name] = ("link", info.linkname)
            else:
                listing[name] = ("file", *owner, hashlib.sha256(content.read() if content else b"").hexdigest())
    return {name: value for name, value in listing.items() if not any(path_is(name, top) for top in IGNORED)}


def docker_result(image: str, base_files: Listing) -> Result:
    container = docker("create", image, "true")
    try:
        data = subprocess.run([DOCKER, "export", container], check=True, capture_output=True).stdout
    finally:
        docker("rm", container)
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    environment = dict(line.split("=", 1) for line in config["Env"])
    return Result(changed(listing_of_tar(data), base_files), environment, config["Labels"] or {}, config_of(config))


def changed(files: Listing, base: Listing) -> Listing:
    new = {name: value for name, value in files.items() if base.get(name) != value}
    return {**new, **dict.fromkeys(base.keys() - files.keys(), ("gone",))}


def listing_of_layers(store: Path, digests: Sequence[str]) -> Listing:
    with contextlib.ExitStack() as stack:
        paths = [store / "blobs/sha256" / digest.removeprefix("sha256:") for digest in digests]
        readers = [SquashfsReader(stack.enter_context(path.open("rb"))) for path in paths]
        return listing_of_tar(b"".join(tar_stream(merged_layer(readers))))


def build_with_docker(case: Case, dockerfile: Path, base_files: Listing) -> tuple[str, Result]:
    arguments = [word for item in case.arguments for word in ("--build-arg", item)]
    target = ["--target", case.target] if case.target else []
    image = docker("build", "-q", *arguments, *target, "-f", dockerfile, dockerfile.parent)
    return image, docker_result(image, base_files)


def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of this run's tests: with -k, few of them."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    return [case for case in CASES if case in chosen]


@pytest.fixture(scope="module")
def built(
    request: pytest.FixtureRequest, base: str, workspace: Workspace, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    """All cases, built with Docker and, in one process, here."""
    cases = selected(request)
    folder, store, result = tmp_path_factory.mktemp("cases"), workspace.folder("store"), Built()
    folder.chmod(0o755)
    base_files = docker_result(base, {}).files
    contexts = {case.name: write_context(case, folder / "contexts" / case.name, base) for case in cases}
    recipes = []
    for case in cases:
        arguments = dict(item.split("=", 1) for item in case.arguments)
        recipe = folder / "recipes" / f"df-{case.name}"
        convert(recipe, Conversion(dockerfile=contexts[case.name], arguments=arguments, target=case.target))
        recipes.append(recipe)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {case.name: pool.submit(build_with_docker, case, contexts[case.name], base_files) for case in cases}
        done = cli.run("--store", store, "build", *recipes, "--format", "sif", "--no-verify", "--json", cwd=folder)
    for case, recipe, image in zip(cases, recipes, json.loads(done.stdout), strict=True):
        result.images[case.name], result.expected[case.name] = futures[case.name].result()
        digests = [layer["digest"] for layer in image["layers"]]
        below = listing_of_layers(store, digests[:1])
        config = json.loads((store / "blobs/sha256" / image["image"].removeprefix("sha256:")).read_bytes())["config"]
        environment = dict(line.split("=", 1) for line in config["Env"])
        result.actual[case.name] = Result(
            changed(listing_of_layers(store, digests[:-1]), below), environment, config["Labels"], config_of(config)
        )
        result.sifs[case.name] = folder / f"{recipe.name}.sif"
    yield result
    shutil.rmtree(store)
    docker("image", "rm", "--force", *dict.fromkeys(result.images.values()), code=None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_build_is_as_docker_builds(case: Case, built: Built) -> None:
    expected, actual = built.expected[case.name], built.actual[case.name]
    assert {name: value for name, value in expected.files.items() if name not in case.differs} == {
        name: value for name, value in actual.files.items() if name not in case.differs
    }
    environment = {name: value for name, value in actual.environment.items() if name != "EKIBEN_RECIPE"}
    assert environment == expected.environment
    assert expected.labels.items() <= actual.labels.items()
    assert actual.config == expected.config


@pytest.mark.parametrize("case", [case for case in CASES if case.run is not None], ids=lambda case: case.name)
def test_start_is_as_docker_starts(case: Case, built: Built) -> None:
    assert case.run is not None
    for arguments in ((), case.run):
        expected = docker("run", "--rm", built.images[case.name], *arguments, code=None)
        argv = ["apptainer", "-q", "run", "--cleanenv", "--no-home", str(built.sifs[case.name]), *arguments]
        actual = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/")
        assert actual.stdout.strip() == expected, actual.stderr


def test_base_starts_as_it_is_and_commands_run_without_its_program(base: str, workspace: Workspace, cli: Cli) -> None:
    """Without a Dockerfile: program, user and folder of an image of others, in Docker and in its SIF's record."""
    folder = workspace.folder("inherited")
    text = f'FROM {base}\nUSER app\nWORKDIR /opt/full\nENTRYPOINT ["echo", "started"]\nCMD ["now"]\nEXPOSE 80\n'
    (folder / "Dockerfile").write_text(text)
    name = f"{REGISTRY}/ekiben-test/inherited:1"
    docker("build", "-q", "-t", name, folder)
    docker("push", "-q", name)
    recipe = folder / "inherits"
    (recipe / "images").mkdir(parents=True)
    (recipe / "images/inherits.def").write_text(f"Bootstrap: docker\nFrom: {name}\n\n%test\n    [ -e /opt/full/old ]\n")
    (recipe / "recipe.yaml").write_text(
        "name: inherits\ndescription: d\nstack: cu130\nlayer: inherits\ntasks: {}\ndocker: {stop_signal: SIGINT}\n"
    )
    cli.run("lock", recipe, cwd=folder)
    store = folder / "store"
    cli.run("--store", store, "build", recipe, "--format", "docker", "--format", "sif", cwd=folder)
    expected = config_of(json.loads(docker("image", "inspect", name))[0]["Config"])
    inspected = json.loads(docker("image", "inspect", "ekiben/inherits"))[0]
    expected = {**expected, "StopSignal": "SIGINT"}
    assert config_of(inspected["Config"]) == {key: value for key, value in expected.items() if key != "ExposedPorts"}
    assert docker("run", "--rm", "ekiben/inherits") == "started now"
    assert docker("run", "--rm", "ekiben/inherits", "x") == "started x"
    environment = {"EKIBEN_STORE": str(store)}
    done = cli.run("exec", "--runtime", "docker", recipe, "--", "cat", "/opt/full/old", cwd=folder, env=environment)
    assert done.stdout == "old\n"
    from_sif = image_of_sif(folder / "inherits.sif", Store(folder / "other"), Progress())
    assert from_sif.image.image_id == inspected["Id"]
    docker("image", "rm", "--force", "ekiben/inherits", name, code=None)


def test_commands_of_the_tutorial_run(base: str, workspace: Workspace, cli: Cli) -> None:
    files, numbered = (ROOT / "docs/tutorials/dockerfile.md").read_text(encoding="utf-8").split("\n1. ")
    dockerfile, script = (textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", files, re.MULTILINE))
    folder = workspace.folder("tutorial")
    (folder / "greeter").mkdir()
    name = base.partition("@")[0] + ":1"
    (folder / "greeter/Dockerfile").write_text(dockerfile.replace("registry.example.org/lab/base:1", name))
    (folder / "greeter/greet.sh").write_text(script)
    shown: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^ {8}(.+)$", numbered, re.MULTILINE):
        if line.startswith(("ekiben ", "apptainer ")):
            shown.append((line, []))
        else:
            shown[-1][1].append(line)
    assert [line.split()[1] for line, _ in shown] == ["init", "lock", "build", "run", "run"]
    for line, expected in shown:
        program, *arguments = line.split()
        if program == "apptainer":
            output = subprocess.check_output([program, "-q", *arguments], cwd=folder, text=True)
        else:
            output = cli.run(*arguments, cwd=folder, env={"EKIBEN_STORE": str(folder / "store")}).stdout
        assert set(expected) <= set(output.splitlines()), line


def test_build_without_a_recipe_has_the_same_layers(base: str, workspace: Workspace, cli: Cli) -> None:
    folder = workspace.folder("kept")
    (folder / "kept").mkdir()
    (folder / "kept/a.txt").write_text("a\n")
    text = "ARG V=0\nFROM BASE\nARG V\nCOPY a.txt /a\nRUN echo $V >/o\n"
    (folder / "kept/Dockerfile").write_text(text.replace("BASE", base.partition("@")[0] + ":1"))
    options = ("--format", "sif", "--no-verify", "--json")
    here = cli.image(folder / "store", "kept/Dockerfile", *options, "--build-arg", "V=1", cwd=folder)
    assert (folder / "kept.sif").is_file() and here["name"] == "kept"
    cli.run("init", "other/kept", "--from", "kept/Dockerfile", "--build-arg", "V=1", cwd=folder)
    cli.run("lock", "other/kept", cwd=folder)
    shutil.copy(folder / "other/kept/bases.lock", folder / "kept")
    converted = cli.image(folder / "store", "other/kept", *options, cwd=folder)
    assert converted["built"] == [] and converted["image"] == here["image"]
    offline = cli.image(folder / "store", "./kept", *options, "--offline", "--build-arg", "V=1", cwd=folder)
    assert offline["image"] == here["image"]  # by the bases.lock beside the Dockerfile
    (folder / "kept/bases.lock").unlink()
    done = cli.run("build", "kept/Dockerfile", "--offline", cwd=folder, code=2)
    assert "a tag can move" in done.stderr
