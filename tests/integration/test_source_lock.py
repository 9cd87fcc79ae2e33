"""Packages without a wheel: locked, built in a stage without a network, and installed, under each engine."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.project.create import create_recipe
from ekiben.spec.sources import read_sources
from support.package_index import Index, serve, source
from workspaces import Cli, Engine, NewStore, Workspace, give

pytestmark = pytest.mark.covers("ekiben/project", "ekiben/packages", "ekiben/executors", "images/scripts")

PASSWORD = "s3cret-of-the-index"
# What the code of a source tries: each of it is to fail. The port is the index's, on this machine.
HOSTILE = """\
assert os.environ["EKIBEN_WORK"]
for variable, value in os.environ.items():
    assert {password!r} not in value, variable
for top, _, files in os.walk("/run/ekiben"):
    for file in files:
        with open(os.path.join(top, file), "rb") as stream:
            assert {password!r}.encode() not in stream.read(), file
assert not os.path.exists({checkout!r}), "files of this machine"
assert open("/proc/net/dev").read().count(":") == 1, "a network beside lo"
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=5).close()
except OSError:
    pass
else:
    raise SystemExit("this machine can be reached")
members["tiny.py"] += "UMASK = %o\\n" % os.umask(0o022)
"""
wheels: dict[str, str] = {}  # engine → the hash of the wheel; filled by the tests as they run


@pytest.fixture
def index(workspace: Workspace) -> Iterator[Index]:
    with serve(Index(login=f"reader:{PASSWORD}")) as index:
        port = index.address.rpartition(":")[2]
        code = HOSTILE.format(password=PASSWORD, checkout=str(workspace.checkout), port=port)
        index.add_source("tiny", "1.0", requires=["plain"], code=code)
        index.add_wheel("plain", "1.0")
        yield index


def recipe_with(folder: Path, requirements: str, test: str, layer: str = "python") -> Path:
    create_recipe(folder / "mine", layer=layer)
    (folder / "mine/requirements.txt").write_text(requirements)
    definition = folder / "mine/images/mine-packages.def"
    definition.write_text(definition.read_text() + f"    {test}\n")
    recipe = (folder / "mine/recipe.yaml").read_text().partition("\ntasks:")[0]
    (folder / "mine/recipe.yaml").write_text(f"{recipe}\ntasks: {{}}\n")
    return folder / "mine"


def test_source_is_built_without_network_and_secrets_to_the_same_wheel(
    workspace: Workspace, new_store: NewStore, index: Index, engine: Engine
) -> None:
    cli = Cli(workspace, engine.user)
    store, folder = new_store(engine.user, "base", "python"), workspace.folder("source", engine.user)
    recipe = recipe_with(folder, "tiny\n", 'python -c "import plain, tiny; assert tiny.UMASK == 22"')
    for path in [recipe, *recipe.rglob("*")]:
        give(path, engine.user)
    env = {"UV_DEFAULT_INDEX": index.url(f"reader:{PASSWORD}"), "PIP_FIND_LINKS": None}
    locked = cli.run("--store", store, "lock", recipe, "--engine", engine.name, env=env)
    assert "tiny 1.0 is built from its source" in locked.stdout
    (source,) = read_sources(recipe / "images/mine-packages.sources.json")
    wheels[str(engine)] = source.wheel_sha256
    assert len(set(wheels.values())) == 1, wheels

    if engine.name == "docker":  # whose containers do not reach an index of this machine
        engine = Engine("apptainer", engine.user)
    built = cli.image(store, recipe, "--engine", engine.name, "--no-verify", "-o", folder / "mine.sif", env=env)
    assert "mine-packages" in {layer["name"] for layer in built["layers"]}
    sbom = cli.run("--store", store, "sbom", folder / "mine.sif", env=env).stdout
    texts = [locked.stdout, locked.stderr, json.dumps(built), sbom]
    texts += [path.read_text() for path in recipe.rglob("*") if path.is_file()]
    texts += [path.read_text(errors="replace") for path in (store / "logs").iterdir()]
    assert PASSWORD not in "".join(texts)
    assert PASSWORD.encode() not in (folder / "mine.sif").read_bytes()
    assert '"tiny"' in sbom

    # Elsewhere, with the lock alone: the same wheel, or a refusal.
    other = new_store(engine.user, "base", "python")
    again = cli.image(other, recipe, "--engine", engine.name, "--no-verify", "-o", folder / "again.sif", env=env)
    assert again["layers"] == built["layers"]


def test_a_source_whose_build_differs_is_refused(
    workspace: Workspace, new_store: NewStore, index: Index, cli: Cli
) -> None:
    index.add_source("tiny", "1.0", code='members["tiny.py"] += f"AT = {time.time_ns()}\\n"')
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "tiny\n", "true")
    env = {"UV_DEFAULT_INDEX": index.url(f"reader:{PASSWORD}"), "PIP_FIND_LINKS": None}
    options = ("--engine", "apptainer")
    first, second = (new_store(cli.user, "base", "python") for _ in range(2))
    cli.run("--store", first, "lock", recipe, *options, env=env)
    cli.image(first, recipe, *options, "--no-verify", "-o", folder / "mine.sif", env=env)
    done = cli.run("--store", second, "build", recipe, *options, "-o", folder / "other.sif", env=env, code=None)
    assert done.returncode != 0
    assert "tiny 1.0: its source was built to the wheel" in done.stderr
    assert "its build is not the same everywhere" in done.stderr


def test_git_requirement_is_built_from_its_commit(workspace: Workspace, new_store: NewStore, cli: Cli) -> None:
    folder = workspace.folder("source")
    repository = folder / "tools"
    with tarfile.open(fileobj=io.BytesIO(source("tiny", "1.0"))) as archive:
        archive.extractall(folder)
    (folder / "tiny-1.0").rename(repository)
    for args in (["init", "--quiet", "--initial-branch=main"], ["add", "."], ["commit", "--quiet", "--message=x"]):
        subprocess.run(["git", "-C", repository, "-c", "user.name=x", "-c", "user.email=x@y.z", *args], check=True)
    env = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://git.example/tools",
    }
    recipe = recipe_with(folder, "tiny @ git+https://git.example/tools@main\n", 'python -c "import tiny"')
    stores = [new_store(cli.user, "base", "python") for _ in range(2)]
    done = cli.run("--store", stores[0], "lock", recipe, "--engine", "apptainer", env=env)
    assert "tiny 1.0 is built from the commit " in done.stdout
    images = [
        cli.image(store, recipe, "--engine", "apptainer", "--no-verify", "-o", folder / "mine.sif", env=env)
        for store in stores
    ]
    assert images[0]["layers"] == images[1]["layers"]


def test_password_of_netrc_reaches_the_index_and_nothing_else(
    workspace: Workspace, new_store: NewStore, index: Index, cli: Cli
) -> None:
    folder = workspace.folder("source")
    netrc = folder / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login reader password {PASSWORD}\n")
    netrc.chmod(0o600)
    recipe = recipe_with(folder, "tiny\n", 'python -c "import plain, tiny"')
    env = {"UV_DEFAULT_INDEX": index.url(), "NETRC": str(netrc), "PIP_FIND_LINKS": None}
    store = new_store(cli.user, "base", "python")
    cli.run("--store", store, "lock", recipe, "--engine", "apptainer", env=env)
    cli.image(store, recipe, "--engine", "apptainer", "--no-verify", "-o", folder / "mine.sif", env=env)
    kept = [path for path in [*recipe.rglob("*"), *store.rglob("*"), folder / "mine.sif"] if path.is_file()]
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []


def test_bundle_has_the_wheel_that_was_built(workspace: Workspace, new_store: NewStore, index: Index, cli: Cli) -> None:
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "tiny\n", 'python -c "import plain, tiny"')
    env = {"UV_DEFAULT_INDEX": index.url(index.login), "PIP_INDEX_URL": index.url(index.login), "PIP_FIND_LINKS": None}
    store, other = (new_store(cli.user, "base", "python") for _ in range(2))
    options = ("--engine", "apptainer", "--format", "sif", "-o", folder / "mine.sif")
    cli.run("--store", store, "lock", recipe, "--engine", "apptainer", env=env)
    built = cli.image(store, recipe, *options, env=env)
    bundle = folder / "mine.bundle"
    # The layers below come from the public index; those of this test from its own.
    both = {**env, "PIP_INDEX_URL": None, "PIP_EXTRA_INDEX_URL": index.url(index.login)}
    cli.run("--store", store, "bundle", recipe, "-o", bundle, "--engine", "apptainer", env=both)
    assert PASSWORD.encode() not in bundle.read_bytes()
    again = cli.image(other, recipe, "--bundle", bundle, *options, prefix=("unshare", "--net"))
    assert again["layers"] == built["layers"]


def test_lm_eval_is_locked_with_a_source_that_is_built(workspace: Workspace, new_store: NewStore, cli: Cli) -> None:
    """With the public index; of its packages the one without a wheel is built, for all others take gigabytes."""
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "lm_eval\n", 'python -c "import sqlitedict"')
    store = new_store(cli.user, "base", "python")
    cli.run("--store", store, "lock", recipe, "--engine", "apptainer")
    sources = read_sources(recipe / "images/mine-packages.sources.json")
    assert "sqlitedict" in {source.name for source in sources}
    assert "lm-eval==" in (recipe / "images/mine-packages.lock").read_text()
    (recipe / "requirements.txt").write_text("sqlitedict\n")
    cli.run("--store", store, "lock", recipe, "--keep")
    cli.image(store, recipe, "--engine", "apptainer", "--no-verify", "-o", folder / "mine.sif")


def test_an_import_that_fails_in_a_test_names_what_adds_it(
    workspace: Workspace, new_store: NewStore, index: Index, cli: Cli
) -> None:
    recipe = recipe_with(folder := workspace.folder("source"), "plain\n", 'python -c "import yaml"')
    env = {"UV_DEFAULT_INDEX": index.url(index.login), "PIP_FIND_LINKS": None}
    store = new_store(cli.user, "base", "python")
    cli.run("--store", store, "lock", recipe, env=env)
    options = ("--engine", "apptainer", "--format", "sif", "-o", folder / "mine.sif")
    done = cli.run("--store", store, "build", recipe, *options, env=env, code=8)
    assert "hint: the image has no module yaml, of the package PyYAML; `" in done.stderr
    assert f" add PyYAML {recipe}` adds it" in done.stderr


EXTENSION = {  # a package with compiled code, built by the setuptools of the layer below
    "pyproject.toml": '[project]\nname = "fast-sum"\nversion = "0.1"\n'
    '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    '[tool.setuptools]\npackages = ["fast_sum"]\n',
    "setup.py": "from setuptools import Extension, setup\n"
    'setup(ext_modules=[Extension("fast_sum._c", ["fast_sum/_c.c"])])\n',
    "fast_sum/__init__.py": "from fast_sum._c import add\n",
    "fast_sum/_c.c": "#include <Python.h>\n"
    "static PyObject *add(PyObject *s, PyObject *a) { long x, y;\n"
    '  return PyArg_ParseTuple(a, "ll", &x, &y) ? PyLong_FromLong(x + y) : NULL; }\n'
    'static PyMethodDef m[] = {{"add", add, METH_VARARGS, ""}, {0}};\n'
    'static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "_c", "", -1, m};\n'
    "PyMODINIT_FUNC PyInit__c(void) { return PyModule_Create(&d); }\n",
}


def test_folder_is_built_and_installed_and_an_edit_changes_its_layer_alone(
    workspace: Workspace, new_store: NewStore, index: Index, cli: Cli
) -> None:
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "./package\n", 'python -c "import plain, local_tool; print(local_tool.X)"')
    package = recipe / "package"
    (package / "local_tool").mkdir(parents=True)
    (package / "local_tool/__init__.py").write_text("X = 1\n")
    (package / "pyproject.toml").write_text(
        '[project]\nname = "local-tool"\nversion = "0.1"\ndependencies = ["plain"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    with tarfile.open(fileobj=io.BytesIO(source("local_tool", "0.1", requires=["plain"]))) as archive:
        backend = archive.extractfile("local_tool-0.1/backend.py")
        assert backend
        (package / "backend.py").write_bytes(backend.read().replace(b"VERSION =", b"X ="))
    env = {"UV_DEFAULT_INDEX": index.url(index.login), "PIP_FIND_LINKS": None}
    store = new_store(cli.user, "base", "python")
    options = ("--engine", "apptainer", "--no-verify", "-o", folder / "mine.sif")
    done = cli.run("--store", store, "lock", recipe, "--engine", "apptainer", env=env)
    assert "local-tool 0.1 is built from package" in done.stdout
    before = cli.image(store, recipe, *options, env=env)
    (package / "note.txt").write_text("edited\n")
    refused = cli.run("--store", store, "build", recipe, *options, env=env, code=3)
    assert "the package local-tool was changed, and is not locked again" in refused.stderr
    cli.run("--store", store, "lock", recipe, "--keep", "--engine", "apptainer", env=env)
    after = cli.image(store, recipe, *options, env=env)
    assert after["built"] == [] or set(after["built"]) <= {"mine-packages.local-tool", "mine-packages", "mine"}
    assert [item["digest"] for item in after["layers"]][:2] == [item["digest"] for item in before["layers"]][:2]


def test_compiled_extension_of_a_folder_is_built_where_a_layer_below_has_a_compiler(
    workspace: Workspace, new_store: NewStore, cli: Cli
) -> None:
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "./package\n", 'python -c "import fast_sum; assert fast_sum.add(2, 3) == 5"')
    definition = recipe / "images/mine-packages.def"
    definition.write_text(definition.read_text().replace("From: python.sif", "From: compiler.sif"))
    (recipe / "images/compiler.def").write_text(
        "Bootstrap: localimage\nFrom: python.sif\n\n%post\n    apt-get update\n"
        "    apt-get install -y --no-install-recommends gcc libc6-dev python3.11-dev\n"
        "    rm -rf /var/lib/apt/lists/*\n"
    )
    for name, text in EXTENSION.items():
        (recipe / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (recipe / "package" / name).write_text(text)
    stores = [new_store(cli.user, "base", "python") for _ in range(2)]
    done = cli.run("--store", stores[0], "lock", recipe, "--engine", "apptainer")
    assert "fast-sum 0.1 is built from package" in done.stdout
    images = [
        cli.image(store, recipe, "--engine", "apptainer", "--no-verify", "-o", folder / f"{at}.sif")
        for at, store in enumerate(stores)
    ]
    assert images[0]["layers"] == images[1]["layers"]


def test_sync_locks_and_builds_what_is_missing(
    workspace: Workspace, new_store: NewStore, index: Index, cli: Cli
) -> None:
    folder = workspace.folder("source")
    recipe = recipe_with(folder, "plain==1.0\n", "true")
    text = (recipe / "recipe.yaml").read_text().replace("tasks: {}", "tasks:\n  t: {entrypoint: t.py, help: x}")
    (recipe / "recipe.yaml").write_text(text)
    (recipe / "entrypoints/t.py").write_text("import plain; print('plain', plain.VERSION)\n")
    env = {"UV_DEFAULT_INDEX": index.url(index.login), "PIP_FIND_LINKS": None, "XDG_CONFIG_HOME": str(folder)}
    store = new_store(cli.user, "base", "python")

    def run(*args: str, code: int = 0) -> str:
        done = cli.run("--store", store, *args, env=env, code=code, cwd=folder)
        return done.stdout + done.stderr

    assert "or --sync with build, run and submit" in run("build", "./mine", code=3)
    assert "plain 1.0" in run("run", "--sync", "--runtime", "apptainer", "--cpu", "./mine", "t")
    index.add_wheel("plain", "2.0")
    (recipe / "requirements.txt").write_text("plain\n")
    assert "was changed and not locked again" in run("run", "--build", "--cpu", "./mine", "t", code=3)
    assert "is not in the lock" not in run("build", "--sync", "--format", "sif", "./mine")
    assert "plain==1.0" in (recipe / "images/mine-packages.lock").read_text()  # it still fits
    (recipe / "requirements.txt").write_text("plain==2.0\n")
    (folder / "ekiben").mkdir()
    (folder / "ekiben/config.yaml").write_text("sync: true\n")
    assert "plain 2.0" in run("run", "--runtime", "apptainer", "--cpu", "./mine", "t")
    lock = recipe / "images/mine-packages.lock"
    lock.write_text(lock.read_text() + "# edited\n")
    assert "was edited by hand" in run("run", "--cpu", "./mine", "t", code=3)
