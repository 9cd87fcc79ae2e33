"""Commands that have an option -o."""

from __future__ import annotations

from support.sample_recipe import SampleRecipe


def output_arguments(files_only: SampleRecipe) -> dict[str, list[str]]:
    return {
        "image": ["image", str(files_only.path), "--format", "sif", "--no-verify"],
        "bundle": ["bundle", str(files_only.path)],
        "sbom": ["sbom", "own"],
        "pull": ["pull", "127.0.0.1:9/x:1"],
        "doctor": ["doctor", "--record"],
        "doctor of an image": ["doctor"],
        "render": ["render", str(files_only.path), "--to", "def"],
        "wheels": ["wheels", "export", "x"],
        "catalog": ["catalog", str(files_only.path)],
    }


TO_FILE, TO_FOLDER = ("image", "bundle", "sbom", "pull", "doctor"), ("render", "wheels", "catalog")
