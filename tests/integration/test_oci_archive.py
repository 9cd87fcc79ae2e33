"""An OCI archive of ours, read by Apptainer."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store, bind_layers
from support.sample_recipe import SampleRecipe

pytestmark = pytest.mark.covers("ekiben/formats")


@pytest.fixture
def image(files_only: SampleRecipe, store: Store) -> Image:
    return build(
        BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), Progress(io.StringIO(), quiet=True))
    )


def test_apptainer_builds_from_the_archive(store: Store, image: Image, tmp_path: Path) -> None:
    """It unpacks no file into a folder for which the archive has no entry."""
    if not shutil.which("apptainer"):
        pytest.skip("apptainer is not installed")
    data = b"".join(oci.archive(image.config, bind_layers(store, image.layers), image.tag))
    (tmp_path / "x.tar").write_bytes(data)
    argv = ["apptainer", "--quiet", "build", "--sandbox", str(tmp_path / "box"), f"oci-archive:{tmp_path}/x.tar"]
    env = {**os.environ, "APPTAINER_CACHEDIR": str(tmp_path / "cache")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "box/opt").is_dir()
