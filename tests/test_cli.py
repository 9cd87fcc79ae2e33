"""build.py as a user meets it: exit codes, what goes to stdout and to stderr, and what is not touched."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import click
import pytest

import build
from builder.errors import EkibenError
from own_recipe import Own, RunCli, seeded

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(build.main.commands)

# Runs build.py and tells on the way out which modules came in, and what it did to the world outside.
WATCH = """
import atexit, os, runpy, sys
done = []
def watch(event, arguments):
    if event in ("socket.connect", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.mkdir", "os.rename", "os.remove"):
        done.append(event)
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        done.append(f"open {arguments[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(watch)
def tell():
    names = {name.partition(".")[0] if not name.startswith("builder.") else name for name in sys.modules}
    deeds = "\\n".join(done)
    with os.fdopen(3, "w") as out:
        print(deeds, "--", "\\n".join(sorted(names)), sep="\\n", file=out)
atexit.register(tell)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def watched(tmp_path: Path, *words: str) -> tuple[int, list[str], set[str]]:
    """Exit code, deeds and modules of build.py started without a PATH or a home to use."""
    read, write = os.pipe()
    script = f"import os; os.dup2({write}, 3)\n{WATCH}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "build.py"), *words], cwd=tmp_path, pass_fds=(write,), check=False,
        env={"PATH": "", "HOME": str(tmp_path), "EKIBEN_STORE": str(tmp_path / "store")}, capture_output=True,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as pipe:
        deeds, modules = pipe.read().split("--\n")
    assert list(tmp_path.iterdir()) == []
    return done.returncode, deeds.split("\n")[:-1] if deeds.strip() else [], set(modules.split())


HEAVY = {
    "pydantic",
    "docker",
    "yaml",
    "rich",
    "zstandard",
    "requests",
    "multiprocessing",
    "ssl",
    "builder.chain",
    "builder.store",
    "builder.squashfs",
}


@pytest.mark.parametrize(
    "words", [["--help"], [], ["plan", "--help"], ["image", "-h"], ["prune", "--help"]], ids=" ".join
)
def test_help_imports_little_and_touches_nothing(tmp_path: Path, words: list[str]) -> None:
    _, deeds, modules = watched(tmp_path, *words)
    assert "click" in modules
    assert modules & HEAVY == set()
    assert deeds == []


@pytest.mark.parametrize(
    "words",
    [["imgae"], ["image"], ["image", "hello", "--frmat", "sif"], ["image", "hello", "--format", "sfi"], ["plan", "hello", "--arg", "x"],
     ["plan", "helo"], ["image", "hello", "--engine", "dokcer"], ["image", "hello", "-o", "no/x.sif"], ["image", "hello", "lora-opencalm", "-o", "x"],
     ["run", "hello", "helo"], ["image", "hello", "helo"]],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_word_ends_with_2_and_touches_nothing(tmp_path: Path, words: list[str]) -> None:
    code, deeds, _ = watched(tmp_path, *words)
    assert code == 2
    assert deeds == []


def test_plan_touches_nothing(tmp_path: Path) -> None:
    code, deeds, modules = watched(tmp_path, "plan", "hello")
    assert (code, deeds) == (0, [])
    assert {"builder.chain", "builder.store"} <= modules
    assert modules & {"docker", "rich", "pydantic"} == set()


# ---------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_parses(name: str) -> None:
    command = build.main.commands[name]
    text = command.get_help(click.Context(command, info_name=name))
    examples = [line.split("build.py ")[1] for line in text.splitlines() if line.strip().startswith("build.py ")]
    assert examples, f"{name} --help shows no example"
    for example in examples:
        first, *words = example.split("   ")[0].split()
        assert first == name
        command.make_context(name, words)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


def test_every_exit_code_is_of_one_kind() -> None:
    kinds: list[type[EkibenError]] = [EkibenError, *EkibenError.__subclasses__()]
    codes = {kind.__name__: kind.exit_code for kind in kinds if kind.__module__ == "builder.errors"}
    assert codes == {"EkibenError": 1, "UsageError": 2, "DefinitionError": 3, "EngineError": 4, "LayerError": 5, "StoreError": 6,
                     "FetchError": 7, "VerifyError": 8, "DriftError": 9, "UnfitError": 10, "SchedulerError": 11}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- wrong words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["imgae", "hello"], "no command 'imgae'. Did you mean 'image'?"),
        (["image", "hello", "--enigne", "docker"], "No such option"),
        (["image"], "Missing argument 'RECIPE…'"),
        (
            ["image", "hello", "--format", "sfi"],
            "Invalid value for '--format': 'sfi' is not one of 'sif', 'docker', 'oci'.",
        ),
        (["image", "hello", "--engine", "dokcer"], "--engine: no engine 'dokcer'. Did you mean 'docker'?"),
        (
            ["image", "hello", "hello", "-o", "x.sif"],
            "-o names one file; build one recipe in one format, or leave -o out",
        ),
        (["image", "hello", "--format", "sif", "--format", "oci", "-o", "x"], "-o names one file"),
        (["image", "hello", "-o", "no/folder/x.sif"], "-o no/folder/x.sif: there is no folder"),
        (["image", "hello", "-o", "."], "-o .: is a folder; name a file in it, hello.sif say"),
        (["image", "hello", "--store", "x"], "'--store' comes before the command: build.py --store … image"),
        (["plan", "helo"], "no recipe 'helo'. Did you mean 'hello'?"),
        (["plan", "helo"], "hint: a recipe elsewhere is given as a path"),
        (["plan", "./helo"], "./helo: no recipe.yaml there"),
        (["plan", "hello", "--arg", "python"], "--arg python: expected NAME=VALUE"),
        (["plan", "hello", "--arg", "=x"], "--arg : expected NAME=VALUE"),
        (["run", "hello", "helo", "--dry-run"], "recipe 'hello' has no task 'helo'. Did you mean 'hello'?"),
        (["render", "hello", "--to", "docker"], "'docker' is not one of 'dockerfile', 'def'"),
        (["inspect", "nothing"], "no image 'nothing' in"),
    ],
)
def test_wrong_words(run_cli: RunCli, tmp_path: Path, words: list[str], said: str) -> None:
    done = run_cli("--store", tmp_path / "store", *words, code=2)
    assert said in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["plan", "hello", "--arg", "pyhton=3.12"],
            "--arg: argument 'pyhton' is bound but no layer of 'hello' declares it. Did you mean 'python'?",
        ),
        (["plan", "hello", "--stack", "cu13"], "--stack: no stack 'cu13'. Did you mean 'cu130'?"),
    ],
)
def test_wrong_names(run_cli: RunCli, tmp_path: Path, words: list[str], said: str) -> None:
    assert said in run_cli("--store", tmp_path / "store", *words, code=3).stderr


def test_all_problems_of_a_recipes_files(run_cli: RunCli, own: Own, tmp_path: Path) -> None:
    own.replace("images/walls.def", "%post", "%pots")
    own.replace("images/walls.def", "{{ word }} > /word", "{{ wrd }}")
    said = run_cli("--store", tmp_path / "store", "plan", own.path, code=3).stderr.splitlines()
    assert len(said) == 2
    assert all(f"{own.path}/images/walls.def:" in line for line in said)


def test_what_is_wrong_with_the_last_recipe_is_said_before_the_first_is_built(
    run_cli: RunCli, flat: Own, tmp_path: Path
) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    run_cli("--store", store.root, "image", flat.path, "helo", "--format", "sif", "--no-verify", code=2)
    assert store.images() == {}


# ------------------------------------------------------------------------------------------------------- a whole round


def test_image_list_inspect_and_prune(run_cli: RunCli, flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    at = ("--store", store.root)
    made = run_cli(*at, "image", flat.path, "--format", "sif", "--no-verify", "--json", "-o", tmp_path / "own.sif")
    result = json.loads(made.stdout)
    assert result["built"] == ["roof", "own"]
    assert [item["kind"] for item in result["products"]] == ["sif"]
    assert f"apptainer exec --nv {tmp_path}/own.sif greet" in result["run"]
    assert "own: 2 of 3 layers to build" in made.stderr

    again = run_cli(*at, "image", flat.path, "--format", "sif", "--no-verify", "-o", tmp_path / "own.sif")
    assert "own: all 3 layers are stored" in again.stderr
    assert "(there already)" in again.stdout
    assert "run     singularity exec --nv" in again.stdout

    plan = run_cli(*at, "plan", flat.path).stdout.splitlines()
    assert [line.split()[:2] for line in plan] == [["keep", "ground"], ["keep", "roof"], ["keep", "own"]]
    rows = json.loads(run_cli(*at, "plan", flat.path, "--json").stdout)
    assert [row["stored"] for row in rows] == [True, True, True]
    assert rows[1]["inputs"]["files"][0][0] == "/opt/data/data.txt"

    listed = json.loads(run_cli(*at, "list", "--json").stdout)
    assert {row["recipe"]: row["image"] for row in listed}["own"] == result["image"]
    assert "not built" in run_cli(*at, "list").stdout

    about = json.loads(run_cli(*at, "inspect", "own", "--json").stdout)
    assert (about["image"], [layer["name"] for layer in about["layers"]]) == (
        result["image"],
        ["ground", "roof", "own"],
    )
    assert "task        greet" in run_cli(*at, "inspect", "own").stdout
    sif = json.loads(run_cli(*at, "inspect", tmp_path / "own.sif", "--json").stdout)
    assert [part["name"] for part in sif["parts"]] == ["definition", "layer 0", "layer 1", "layer 2"]

    assert run_cli(*at, "prune").stdout == "removed 0 blobs, 0 B\n"
    assert "would remove 5 blobs" in run_cli(*at, "prune", "own", "--dry-run").stdout
    assert "removed 5 blobs" in run_cli(*at, "prune", "own").stdout
    assert list((store.root / "blobs/sha256").iterdir()) == []


def test_an_archive_instead_of_a_sif(run_cli: RunCli, flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    made = run_cli("--store", store.root, "image", flat.path, "--format", "oci", "--no-verify")
    assert "docker load -i own.tar" in made.stdout
    assert (tmp_path / "own.tar").stat().st_size > 0


def test_the_store_of_the_environment(run_cli: RunCli, flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground", "roof")
    said = run_cli("plan", flat.path, env={"EKIBEN_STORE": str(store.root)}).stdout
    assert [line.split()[0] for line in said.splitlines()] == ["keep", "keep", "build"]
    cache = tmp_path / "cache/ekiben"
    cache.mkdir(parents=True)
    store.root.rename(cache / "store")
    said = run_cli("plan", flat.path, env={"EKIBEN_STORE": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}).stdout
    assert [line.split()[0] for line in said.splitlines()] == ["keep", "keep", "build"]


def test_verbose_prints_commands_to_paste(run_cli: RunCli, own: Own, tmp_path: Path) -> None:
    store = seeded(own, tmp_path / "store", "ground")
    done = subprocess.run([sys.executable, str(ROOT / "build.py"), "-v", "--store", str(store.root), "image", str(own.path), "--engine", "buildah"],
                          env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, check=False, cwd=tmp_path)  # fmt: skip
    assert done.returncode in (4, 5)
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- stores and garbage


def test_prune_refuses(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    said = run_cli("--store", tmp_path, "prune", code=6).stderr
    assert f"{tmp_path} is not an Ekiben store" in said
    assert "--store" in said
    assert (tmp_path / "precious").exists()


def test_prune_of_an_unknown_image(run_cli: RunCli, flat: Own, tmp_path: Path) -> None:
    store = seeded(flat, tmp_path / "store", "ground")
    assert "no image 'onw' in" in run_cli("--store", store.root, "prune", "onw", code=2).stderr


def test_a_store_of_another_version(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("99\n")
    said = run_cli("--store", tmp_path, "plan", "hello", code=6).stderr
    assert f"error: {tmp_path} is a store of version 99; this Ekiben reads version 2" in said
    assert "hint: remove it (what it has is made or fetched again), or give another folder with --store" in said


@pytest.mark.parametrize("junk", [b"", b"x" * 10, b"\0" * 70_000, b"#!/bin/sh\n" * 9000])
def test_inspect_of_what_is_no_sif(run_cli: RunCli, tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "x.sif").write_bytes(junk)
    assert "x.sif: not a SIF file" in run_cli("inspect", "x.sif", code=6).stderr


def test_inspect_of_what_is_not_there(run_cli: RunCli) -> None:
    assert "none.sif: cannot be read: No such file or directory" in run_cli("inspect", "none.sif", code=6).stderr
    assert "cannot be read: Is a directory" in run_cli("inspect", "./", code=6).stderr


def test_inspect_of_a_damaged_sif_is_an_answer_or_an_error(flat: Own, tmp_path: Path) -> None:
    """Any bytes in its head: never a traceback."""
    from builder.assemble import make_sif
    from builder.chain import resolve
    from builder.inspect import describe, text
    from builder.pipeline import Options
    from builder.pipeline import build as build_image
    from builder.progress import Progress
    from builder.recipe import find_recipe

    store = seeded(flat, tmp_path / "store", "ground")
    image = build_image(resolve(find_recipe(str(flat.path))), store, Options(), Progress(quiet=True))
    make_sif(image, store, tmp_path / "x.sif", flat=False, on_bytes=lambda count: None)
    whole, rng = (tmp_path / "x.sif").read_bytes(), random.Random(1)
    for _ in range(300):
        data = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(32, min(len(data), 4096 + 585 * 4)) if len(data) > 40 else 0] = rng.randrange(256)
        (tmp_path / "y.sif").write_bytes(data)
        try:
            assert "y.sif" in text(describe(str(tmp_path / "y.sif"), store))
        except EkibenError as error:
            assert "y.sif" in str(error)


def test_run_shows_its_command_or_says_what_is_missing(run_cli: RunCli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    env = {"PATH": str(tools), **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")}
    (tools / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tools / "docker").chmod(0o755)
    shown = run_cli("run", "hello", "hello", "--cpu", "--dry-run", "--", "--json", env=env).stdout
    assert shown.startswith("+ docker run --rm ")
    assert shown.endswith("ekiben/hello:latest hello --json\n")
    other = run_cli("run", "hello", "--cpu", "--dry-run", "--stack", "cu124", "hello", env=env).stdout
    assert other.endswith("ekiben/hello-cu124:latest hello\n")
    (tmp_path / "x.sif").touch()
    (tools / "apptainer").write_text("#!/bin/sh\n")
    (tools / "apptainer").chmod(0o755)
    shown = run_cli("run", "hello", "hello", "--cpu", "--dry-run", "--sif", "x.sif", env=env).stdout
    assert shown == f"+ {tools}/apptainer run --cleanenv --pwd {tmp_path} --bind {tmp_path} x.sif hello\n"


@pytest.mark.parametrize(
    "words", [("--to", "/proc/nope"), ("--to", "lab", "--version", "a b"), ("--to", "lab", "--tag", "x.sif")]
)
def test_publish_refuses_before_it_builds(words: tuple[str, ...], run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("--store", tmp_path / "store", "publish", "hello", *words, code=2 if "lab" in words else 6)
    assert "error: " in done.stderr
    assert not (tmp_path / "store").exists()
