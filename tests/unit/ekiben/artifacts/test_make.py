"""An image that is made and tested: what is there stays until the new one has passed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ekiben.artifacts.make import BuildRequest, BuiltImage, make_image
from ekiben.builder.plan import BuildContext, Options
from ekiben.core.errors import VerifyError
from ekiben.store import Store, known_sif_sha256
from support.programs import write_program
from support.sample_recipe import SampleRecipe, chain_of, quiet

# Notes which file is tested; the test ends as `outcome` says.
RUNTIME = """\
#!/bin/sh
for file in "$@"; do :; done
echo "$file" >>{folder}/tested
[ -e "$file" ] || exit 99
exit "$(cat {folder}/outcome)"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "outcome").write_text("0")
    write_program(tmp_path / "bin/apptainer", RUNTIME.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def make(sample: SampleRecipe, store: Store, folder: Path) -> BuiltImage:
    request = BuildRequest(formats=["sif"], output=folder / "own.sif")
    return make_image(BuildContext(chain_of(sample), store, Options(), quiet()), request)


def _tested_files(folder: Path) -> list[Path]:
    return [Path(line) for line in (folder / "tested").read_text().splitlines()]


def test_sif_gets_its_name_after_its_tests(files_only: SampleRecipe, store: Store, folder: Path) -> None:
    result = make(files_only, store, folder)
    assert [check.runtime for check in result.checks] == ["apptainer"]
    (file,) = _tested_files(folder)
    assert file.parent == folder
    assert file.name != "own.sif"
    assert not file.exists()
    assert result.artifacts[0].created
    sha256 = hashlib.sha256((folder / "own.sif").read_bytes()).hexdigest()  # complete when the tests have ended
    assert result.artifacts[0].sha256 == known_sif_sha256(folder / "own.sif", store) == sha256


def test_sif_whose_test_fails_leaves_the_former_one(files_only: SampleRecipe, store: Store, folder: Path) -> None:
    make(files_only, store, folder)
    before = (folder / "own.sif").read_bytes()
    (folder / "outcome").write_text("3")
    files_only.write("files/data.txt", "edited\n")
    with pytest.raises(VerifyError):
        make(files_only, store, folder)
    assert (folder / "own.sif").read_bytes() == before
    assert {path.name for path in folder.iterdir() if path.suffix in (".sif", ".part")} == {"own.sif"}
    (folder / "own.sif").unlink()
    with pytest.raises(VerifyError):
        make(files_only, store, folder)
    assert not (folder / "own.sif").exists()
    (folder / "outcome").write_text("0")
    make(files_only, store, folder)
    assert (folder / "own.sif").read_bytes() != before


def test_former_sif_is_tested_under_its_name(files_only: SampleRecipe, store: Store, folder: Path) -> None:
    request = BuildRequest(formats=["sif"], output=folder / "own.sif", verify=False)
    make_image(BuildContext(chain_of(files_only), store, Options(), quiet()), request)
    assert not (folder / "tested").exists()
    result = make(files_only, store, folder)
    assert (len(result.checks), result.artifacts[0].created) == (1, False)
    assert _tested_files(folder) == [folder / "own.sif"]
    assert make(files_only, store, folder).checks[0].known
    assert len(_tested_files(folder)) == 1
