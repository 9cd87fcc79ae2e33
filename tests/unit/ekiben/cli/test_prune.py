"""`prune` touches nothing that is not a store."""

from __future__ import annotations

from pathlib import Path

from support.sample_recipe import AS_SIF, RunCli, SampleRecipe, seeded


def test_prune_refuses_a_folder_that_is_no_store(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    message = run_cli("--store", tmp_path, "prune", code=6).stderr
    assert f"{tmp_path} is not an Ekiben store" in message
    assert "--store" in message
    assert (tmp_path / "precious").exists()


def test_prune_of_an_unknown_image_is_an_error(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    assert "no image 'onw' in" in run_cli("--store", store.root, "prune", "onw", code=2).stderr


def test_prune_names_a_record_an_image_heals(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    image = ("--store", store.root, "image", files_only.path, *AS_SIF, "-o", tmp_path / "own.sif")
    run_cli(*image)
    record = store.root / "refs/own.json"
    blobs = sorted(path.name for path in (store.root / "blobs/sha256").iterdir())
    record.chmod(0o644)
    record.write_bytes(record.read_bytes()[:40])
    done = run_cli("--store", store.root, "prune")
    assert "removed 0 blobs" in done.stdout
    assert f"{record} is damaged, and may name any layer: none is removed" in done.stderr
    assert "Building the image writes it again" in done.stderr
    assert sorted(path.name for path in (store.root / "blobs/sha256").iterdir()) == blobs
    run_cli(*image)
    assert store.images()
    assert "damaged" not in run_cli("--store", store.root, "prune").stderr
    assert sorted(path.name for path in (store.root / "blobs/sha256").iterdir()) == blobs


def test_prune_of_engines_without_a_store(run_cli: RunCli, tmp_path: Path) -> None:
    no_engines = {"PATH": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    run_cli("--store", tmp_path / "none", "prune", "--engines", env=no_engines)
    assert "is not an Ekiben store" in run_cli("--store", tmp_path / "none", "prune", code=6).stderr
    assert not (tmp_path / "none").exists()
