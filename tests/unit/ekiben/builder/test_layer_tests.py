"""Tests of layers run again where anything that they can see has changed, and not where the recipe alone has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ekiben.builder.layer_tests import ScriptGroup, script_of
from ekiben.builder.surroundings import machine, podman, sif_runtime
from ekiben.builder.verify import Check, _Tests
from ekiben.core.errors import VerifyError
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, edit_record, image_of

ALL, LAYERS, RECIPE = "all", "layers", "recipe"


@dataclass
class Runs:
    """Test runs of a sample's image, which end as ``codes`` say; ``ran`` has their parts."""

    sample: SampleRecipe
    store: Store
    codes: dict[str, int] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    runtime: str = "apptainer"
    surroundings: Callable[[], dict[str, object]] | None = lambda: {"kernel": 1}

    def check(self, *, again: bool = False) -> Check:
        self.ran = []
        image = image_of(self.sample, self.store)
        return _Tests(image, self.runtime, self.store, self._run, self.surroundings).check(again=again)

    def _run(self, lines: list[str], group: ScriptGroup | None) -> int:
        name = ALL if group is None else LAYERS if group.hides_recipe else RECIPE
        self.ran.append(name)
        return self.codes.get(name, 0)


@pytest.fixture
def runs(files_only: SampleRecipe, store: Store) -> Runs:
    files_only.write(
        "images/roof.def", (files_only.path / "images/roof.def").read_text() + "\n%test\n    test -d /opt\n"
    )
    return Runs(files_only, store)


def edit_entrypoint(runs: Runs, text: str = "print('edited')\n") -> None:
    runs.sample.write("entrypoints/greet.py", text)


@pytest.mark.parametrize(
    "edit",
    [
        lambda runs: edit_entrypoint(runs),
        lambda runs: runs.sample.write("configs/greet.yaml", "name: another\n"),
    ],
)
def test_edited_recipe_runs_the_recipe_test_alone(runs: Runs, edit: Callable[[Runs], Any]) -> None:
    first = runs.check()
    assert (runs.ran, first.reused) == ([LAYERS, RECIPE], None)
    before = image_of(runs.sample, runs.store)
    edit(runs)
    second = runs.check()
    assert runs.ran == [RECIPE]
    assert second.reused is not None
    assert (second.reused.tests, second.reused.image) == (("01-roof.sh",), before.image_id)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(second.reused.date)) < timedelta(minutes=1)
    third = runs.check()
    assert (runs.ran, third.known) == ([], True)
    runs.check(again=True)
    assert runs.ran == [ALL]


def age_records(runs: Runs, **changes: Any) -> None:
    for path in (runs.store.root / "checks").glob("layers-*"):
        edit_record(path, **changes)


def damage_records(runs: Runs) -> None:
    for path in (runs.store.root / "checks").glob("layers-*"):
        path.write_bytes(b"{}")


LONG_AGO, LATER = (datetime.now(UTC) + timedelta(days=days) for days in (-8, 1))


@pytest.mark.parametrize(
    "edit",
    [
        lambda runs: runs.sample.write("files/data.txt", "edited\n"),  # of a layer below
        lambda runs: runs.sample.replace("images/roof.def", "test -d /opt", "test -d /etc"),
        lambda runs: runs.sample.recipe(environment={"NAME": "value"}),
        lambda runs: runs.sample.recipe(labels={"name": "value"}),
        lambda runs: runs.sample.recipe(test="greet again\n"),
        lambda runs: runs.sample.replace("recipe.yaml", "say hello", "say more"),
        lambda runs: setattr(runs, "runtime", "docker"),
        lambda runs: setattr(runs, "surroundings", lambda: {"kernel": 2}),
        lambda runs: age_records(runs, date=LONG_AGO.isoformat()),
        lambda runs: age_records(runs, date=LATER.isoformat()),
        lambda runs: age_records(runs, tests=[]),
        lambda runs: age_records(runs, image="another"),
        damage_records,
    ],
)
def test_tests_of_layers_run_where_their_inputs_differ(runs: Runs, edit: Callable[[Runs], Any]) -> None:
    runs.check()
    edit_entrypoint(runs)
    edit(runs)
    assert runs.check().reused is None
    assert runs.ran == [LAYERS, RECIPE]


@pytest.mark.parametrize(
    "edit",
    [
        lambda runs: runs.sample.replace(
            "images/roof.def", "test -d /opt", "cat /opt/ekiben/recipe/configs/greet.yaml"
        ),
        lambda runs: runs.sample.replace("images/roof.def", "test -d /opt", 'ls "$EKIBEN_RECIPE"'),
        lambda runs: runs.sample.replace("images/roof.def", "test -d /opt", "greet || true"),
        lambda runs: runs.sample.recipe(environment={"PYTHONPATH": "/opt/ekiben/recipe/entrypoints"}),
        lambda runs: setattr(runs, "surroundings", None),
    ],
)
def test_all_run_where_tests_of_layers_may_see_the_recipe(runs: Runs, edit: Callable[[Runs], Any]) -> None:
    edit(runs)
    for text in ("print(1)\n", "print(2)\n"):
        edit_entrypoint(runs, text)
        assert runs.check().reused is None
        assert runs.ran == [ALL]


def test_all_run_where_a_group_fails_alone(runs: Runs) -> None:
    runs.codes = {RECIPE: 1}
    runs.check()
    assert runs.ran == [LAYERS, RECIPE, ALL]
    runs.codes = {LAYERS: 1}
    runs.sample.write("files/data.txt", "edited\n")
    runs.check()
    assert runs.ran == [LAYERS, ALL]
    edit_entrypoint(runs)
    runs.check()
    assert runs.ran == [ALL]


def test_failed_tests_are_no_reason_to_leave_any_out(runs: Runs) -> None:
    runs.codes = {LAYERS: 1, ALL: 1}
    for _ in range(2):
        with pytest.raises(VerifyError, match="a %test under apptainer"):
            runs.check()
        assert runs.ran == [LAYERS, ALL]
    runs.codes = {}
    runs.check()
    assert runs.ran == [LAYERS, RECIPE]


@pytest.mark.parametrize("name", ["02-x.sh", ""])
def test_the_scripts_run_each_test_once(tmp_path: Path, name: str) -> None:
    """The two parts are what /.singularity.d/test runs, in its order, and the first failure ends them."""
    names = ["01-a.sh", "02-x.sh", "03-b.sh"]
    for script in names:
        (tmp_path / script).write_text(f"#!/bin/sh\necho {script}\n")
        (tmp_path / script).chmod(0o755)

    def lines(comparison: str) -> tuple[int, list[str]]:
        script = script_of(comparison, name).replace("/opt/ekiben/tests", str(tmp_path))
        done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
        return done.returncode, [line for line in done.stdout.splitlines() if line in names]

    assert lines("=") == (0, [name] if name else [])
    assert lines("!=") == (0, [other for other in names if other != name])
    (tmp_path / names[0]).write_text("#!/bin/sh\nexit 7\n")
    assert lines("!=") == (7, [])


def test_the_machine_is_the_same_from_one_moment_to_the_next() -> None:
    assert machine() == machine()
    assert podman() == podman()
    assert sif_runtime("/bin/sh") == sif_runtime("/bin/sh") != sif_runtime("/bin/ls")
