"""`run` shows its command, or what is missing."""

from __future__ import annotations

from pathlib import Path

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.store import Store
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, image_of
from support.small_sifs import small_sif


def test_run_names_the_nearest_task(run_cli: RunCli) -> None:
    message = run_cli("run", "--dry-run", "hello", "helo", code=2).stderr
    assert "recipe 'hello' has no task 'helo'. Did you mean 'hello'?" in message


IMAGE_ID = "0123456789abcdef" * 4
PODMAN = f"""\
#!/bin/sh
echo "$@" >>asked
case "$*" in *"image inspect"*"ekiben/hello:latest"*) echo {IMAGE_ID} ;; *"image inspect"*) exit 125 ;; esac
"""


def test_an_engine_gets_the_id_of_an_image_that_is_here(run_cli: RunCli, tmp_path: Path) -> None:
    """A name is what a registry would be asked for."""
    write_program(tmp_path / "bin/podman", PODMAN)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    argv = ["run", "--runtime", "podman", "--cpu", "--dry-run"]
    shown = run_cli(*argv, "hello", "hello", "--", "--json", env=env).stdout
    assert shown.endswith(f" sha256:{IMAGE_ID} hello --json\n")
    assert " --pull never " in shown
    for name, options in (("hello-cu124", ("--stack", "cu124")), ("lora-opencalm", ())):
        recipe = name.removesuffix("-cu124")
        done = run_cli(*argv, *options, recipe, env=env, code=4)
        assert f"{name} cannot be run here: podman has no image ekiben/{name}:latest" in done.stderr
        assert f"build {recipe}" in done.stderr.splitlines()[-1]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line for line in asked if "pull" in line.split() or " run " in line] == []


def test_run_prints_its_command_or_an_error(run_cli: RunCli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    env = {"PATH": str(tools), **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")}
    write_program(tools / "docker", "#!/bin/sh\necho \"$@\" >>asked\necho 'no daemon answers' >&2\nexit 1\n")
    refused = run_cli("run", "--cpu", "hello", "hello", env=env, code=4).stderr
    assert "hello cannot be run here: neither apptainer nor singularity is on PATH; hello.sif is not there; " in refused
    assert "docker: no daemon answers" in refused
    write_program(tools / "docker", "#!/bin/sh\necho \"$@\" >>asked\necho 'Error: No such image: x' >&2\nexit 1\n")
    assert "docker has no image ekiben/hello:latest" in run_cli("run", "--cpu", "hello", env=env, code=4).stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {" ".join(line.split()[:2]) for line in asked} == {"image inspect"}
    small_sif(tmp_path / "x.sif")
    write_program(tools / "apptainer", "#!/bin/sh\n")
    shown = run_cli("run", "--cpu", "--dry-run", "--sif", "x.sif", "hello", "hello", env=env).stdout
    assert shown == f"+ {tools}/apptainer run --cleanenv --pwd {tmp_path} --bind {tmp_path} x.sif hello\n"


RUNTIME = """\
#!/bin/sh
echo "$1 $2" >>started
exit "$(cat outcome)"
"""


def built_pilot(files_only: SampleRecipe, store: Store, folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """Build the recipe in ``folder``, with a runtime whose tests pass; return it, and a command's options and PATH."""
    recipe, at_store = str(files_only.path), ["--store", str(store.root)]
    write_program(folder / "bin/apptainer", RUNTIME)
    (folder / "outcome").write_text("0")
    env = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    files_only.recipe(name="pilot")
    make_sif(image_of(files_only, store), store, folder / "pilot.sif", squash=False)
    return recipe, at_store, env


def test_edits_are_named_and_built_with_build(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    recipe, at_store, env = built_pilot(files_only, store, tmp_path)
    before = (tmp_path / "pilot.sif").read_bytes()
    assert "warning" not in run_cli(*at_store, "run", "--cpu", recipe, "greet", env=env).stderr
    files_only.write("entrypoints/greet.py", "print('bye')\n")
    for command, program in (("run", "greet"), ("exec", "true"), ("shell", "true")):
        shown = run_cli(*at_store, command, "--cpu", recipe, program, env=env).stderr
        assert "pilot.sif was built before an edit of entrypoints/greet.py. To make it again, use --build" in shown
        assert f"build {recipe}\n" in shown
    assert "warning" not in run_cli(*at_store, "run", "--cpu", "--live", "--dry-run", recipe, "greet", env=env).stderr
    assert "warning" not in run_cli(*at_store, "run", "--cpu", "--sif", "pilot.sif", recipe, "greet", env=env).stderr
    assert (tmp_path / "pilot.sif").read_bytes() == before
    (tmp_path / "outcome").write_text("1")
    (tmp_path / "started").unlink()
    assert "a %test under" in run_cli(*at_store, "run", "--cpu", "--build", recipe, "greet", env=env, code=8).stderr
    assert (tmp_path / "pilot.sif").read_bytes() == before
    assert (tmp_path / "started").read_text() == "--quiet test\n"
    (tmp_path / "outcome").write_text("0")
    built = run_cli(*at_store, "run", "--cpu", "--build", recipe, "greet", env=env).stderr
    assert "warning" not in built
    assert (tmp_path / "pilot.sif").read_bytes() != before
    assert (tmp_path / "started").read_text() == "--quiet test\n" * 2 + "--version \nrun --cleanenv\n"


def test_an_edit_that_cannot_be_built_is_a_warning(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    recipe, at_store, env = built_pilot(files_only, store, tmp_path)
    files_only.write("entrypoints/greet.py", "print('bye')\n")
    files_only.write("requirements.txt", "six\n")
    files_only.write("SHA256SUMS", f"{'0' * 64}  requirements.txt\n")
    for argv in (
        ("run", "--cpu", recipe, "greet"),
        ("exec", "--cpu", recipe, "true"),
        ("shell", "--cpu", recipe, "true"),
        ("submit", "--scheduler", "slurm", "--force", "--dry-run", recipe, "greet"),
    ):
        shown = run_cli(*at_store, *argv, env=env).stderr
        assert "pilot.sif was built before an edit of entrypoints/greet.py; not all of it was compared with " in shown
        assert f"{recipe}/requirements.txt: was changed and not locked again. To make it again, " in shown
        assert f"lock {recipe} --keep, then " in shown
        assert f"build {recipe}\n" in shown


def test_an_engines_older_image_is_a_warning(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    files_only.recipe(name="hello")
    image_of(files_only, store)
    write_program(tmp_path / "bin/podman", PODMAN)
    argv = ["run", "--runtime", "podman", "--cpu", "--dry-run", str(files_only.path), "greet"]
    shown = run_cli("--store", str(store.root), *argv, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}).stderr
    assert "warning: ekiben/hello:latest was not compared with its recipe: the image that was built last as" in shown
    assert f"build {files_only.path} --format podman\n" in shown


def test_build_is_for_a_recipe(run_cli: RunCli, files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    files_only.recipe(name="pilot")
    make_sif(image_of(files_only, store), store, tmp_path / "pilot.sif", squash=False)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    refused = run_cli("run", "--build", "./pilot.sif", env=env, code=2).stderr
    assert "--build is for a recipe's image, and pilot.sif is a file" in refused
    for option, value in (("--dry-run", []), ("--sif", ["pilot.sif"])):
        refused = run_cli("run", "--build", option, *value, str(files_only.path), env=env, code=2).stderr
        assert f"{option} " in refused


def test_exec_without_a_program_is_an_error(run_cli: RunCli) -> None:
    assert "a program is missing: " in run_cli("exec", "hello", code=2).stderr


def test_an_engine_runs_its_image_where_the_store_cannot_be_read(run_cli: RunCli, tmp_path: Path) -> None:
    write_program(tmp_path / "bin/podman", PODMAN)
    (tmp_path / "later").mkdir()
    (tmp_path / "later/version").write_text("999\n")
    argv = ["--store", str(tmp_path / "later"), "run", "--runtime", "podman", "--cpu", "--dry-run", "hello", "hello"]
    shown = run_cli(*argv, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}).stdout
    assert shown.endswith(f" sha256:{IMAGE_ID} hello\n")
