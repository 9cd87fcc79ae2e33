"""Exporters are modules of a folder: each fits the Protocol, and one more file is one more format."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path

import pytest

from ekiben.artifacts import exporters
from ekiben.artifacts.export import export
from ekiben.artifacts.exporters import Artifact, Exporter
from ekiben.cli import root
from ekiben.core.errors import EngineError, UsageError
from ekiben.run.printed import docker_line, podman_line
from support.sample_recipe import SampleRecipe, image_of, quiet, seeded

TEXT = '''"""A list of the layers' digests."""

from ekiben.artifacts.exporters import Artifact

PREFERENCE, SUFFIX, FALLBACK = 99, ".txt", None


def is_default():
    return False


def unavailable():
    return None


def export(image, store, target, options, progress):
    target.write_text("".join(f"{layer.digest}\\n" for layer in image.layers))
    return Artifact("digests", str(target), target.stat().st_size, True)


def run_commands(artifact, task):
    return [f"cat {artifact.ref}"]
'''


@pytest.mark.parametrize("name", exporters.names())
def test_every_exporter_fits_the_protocol(name: str) -> None:
    exporter = exporters.load(name)
    assert isinstance(exporter.PREFERENCE, int)
    assert exporter.SUFFIX is None or exporter.SUFFIX.startswith(".")
    assert exporter.FALLBACK is None or exporter.FALLBACK in exporters.names()
    for method in ("is_default", "unavailable", "export", "run_commands"):
        wanted = list(inspect.signature(getattr(Exporter, method)).parameters)[1:]
        assert list(inspect.signature(getattr(exporter, method)).parameters) == wanted, f"{name}.{method}"


def test_shipped_exporters() -> None:
    assert exporters.names() == ["docker", "oci", "podman", "sif"]
    assert [name for name in exporters.names() if exporters.load(name).SUFFIX is None] == ["docker", "podman"]


def test_exporter_is_one_file(files_only: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/digests.py").write_text(TEXT)
    monkeypatch.setattr(exporters, "__path__", [*exporters.__path__, str(tmp_path / "plugins")])
    monkeypatch.chdir(tmp_path)
    assert exporters.names() == ["digests", "docker", "oci", "podman", "sif"]
    store = seeded(files_only, tmp_path / "store", "ground")
    image = image_of(files_only, store)
    (artifact,) = export(image, store, quiet(), formats=["digests"])
    assert (artifact.kind, artifact.ref) == ("digests", "own.txt")
    assert Path("own.txt").read_text().split() == [layer.digest for layer in image.layers]
    assert exporters.run_commands(artifact, "greet") == ["cat own.txt"]
    assert [item.kind for item in export(image, store, quiet(), formats=["digests", "sif"])] == ["digests", "sif"]

    import click

    command = root.get_command(click.Context(root), "image")
    assert command is not None
    assert "--format digests|docker|oci|podman|sif" in command.get_help(click.Context(command))
    assert command.make_context("image", ["hello", "--format", "digests"]).params["formats"] == ("digests",)


def test_unavailable_format_is_an_error_without_a_fallback(
    files_only: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/nowhere.py").write_text(TEXT.replace("return None", "return 'nothing to write with'"))
    monkeypatch.setattr(exporters, "__path__", [*exporters.__path__, str(tmp_path / "plugins")])
    store = seeded(files_only, tmp_path / "store", "ground")
    image = image_of(files_only, store)
    with pytest.raises(EngineError, match="--format nowhere: nothing to write with"):
        export(image, store, quiet(), formats=["nowhere"])
    with pytest.raises(UsageError, match=r"--format: no format 'nowher'\. Did you mean 'nowhere'\?"):
        export(image, store, quiet(), formats=["nowher"])


@pytest.mark.parametrize("kind", ["sif", "oci"])
def test_printed_commands_quote_the_file(kind: str) -> None:
    artifact = Artifact(kind, "my images/it's.file", 1, True)
    for line in exporters.run_commands(artifact, "train"):
        assert "my images/it's.file" in shlex.split(line)


def test_printed_lines_ask_for_gpus_only_on_a_machine_with_gpus() -> None:
    for gpu in (True, False):
        line = docker_line("ekiben/x:latest", "train", gpu_args=["--gpus", "all"] if gpu else [])
        assert ("--gpus all" in line) == gpu
        assert ("--device" in podman_line("ekiben/x:latest", "train", gpu=gpu, options=([], []))) == gpu
