"""``--layer``: layers on a recipe's, the names of their images, and what is refused before anything is built."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.resolve.graph import ResolvedRecipe, stages_of
from ekiben.resolve.resolve import resolve
from ekiben.spec.definition import parent_argument
from ekiben.spec.recipe import find_recipe
from support.programs import write_program
from support.sample_recipe import RunCli
from support.small_sifs import small_sif

HUGGINGFACE = ["base", "python", "compiler", "pytorch", "huggingface"]


def resolved(recipe: str | Path, *layers: str, stack: str | None = None, **arguments: str) -> ResolvedRecipe:
    return resolve(replace(find_recipe(str(recipe)), layers=layers), stack=stack, arguments=arguments)


def names(image: ResolvedRecipe) -> list[str]:
    return [layer.name for layer in image.layers]


@pytest.mark.parametrize(
    ("recipe", "layers", "expected"),
    [
        ("lora-opencalm", ["flash-attn"], [*HUGGINGFACE, "flash-attn"]),
        ("finetune", ["deepspeed"], [*HUGGINGFACE, "deepspeed"]),
        ("finetune", ["flash-attn"], [*HUGGINGFACE, "deepspeed-plain", "flash-attn"]),
        ("finetune", ["deepspeed", "flash-attn"], [*HUGGINGFACE, "deepspeed", "flash-attn"]),
        ("finetune", ["flash-attn", "deepspeed"], [*HUGGINGFACE, "deepspeed", "flash-attn"]),
        ("finetune", ["apex", "flash-attn"], [*HUGGINGFACE, "deepspeed-plain", "apex", "flash-attn"]),
        ("pretrain-gpt", ["apex"], [*HUGGINGFACE, "megatron", "apex"]),
        ("lora-opencalm", ["megatron", "deepspeed"], [*HUGGINGFACE, "megatron", "deepspeed"]),
        ("hello", ["flash-attn"], [*HUGGINGFACE, "flash-attn"]),
        ("hello", ["flash-attn-4"], [*HUGGINGFACE, "flash-attn-4"]),
        ("finetune", ["flash-attn-4"], [*HUGGINGFACE, "deepspeed-plain", "flash-attn-4"]),
        # Files of flash-attn's would replace flash-attn-4's, which therefore is above it.
        ("hello", ["flash-attn", "flash-attn-4"], [*HUGGINGFACE, "flash-attn", "flash-attn-4"]),
        ("hello", ["flash-attn-4", "flash-attn"], [*HUGGINGFACE, "flash-attn", "flash-attn-4"]),
        ("finetune", ["flash-attn-4", "deepspeed"], [*HUGGINGFACE, "deepspeed", "flash-attn-4"]),
        (
            "finetune",
            ["flash-attn-4", "apex", "deepspeed", "flash-attn"],
            [*HUGGINGFACE, "deepspeed", "flash-attn", "flash-attn-4", "apex"],
        ),
        ("hello", ["pytorch"], ["base", "python", "compiler", "pytorch"]),
    ],
)
def test_layers_are_put_on_the_recipe(recipe: str, layers: list[str], expected: list[str]) -> None:
    image = resolved(recipe, *layers)
    name = "-".join([recipe, *layers])
    assert names(image) == [*expected, name]
    assert image.recipe.image_name() == name
    assert image.recipe.image_name("cu124") == f"{name}-cu124"
    assert image.labels["org.opencontainers.image.title"] == name
    assert image.labels["org.ekiben.layer"] == " ".join(layers)
    assert [test for test, _ in image.tests][-2:] == [expected[-1], name]


def test_keys_below_an_added_layer_stay() -> None:
    below, above = resolved("finetune"), resolved("finetune", "flash-attn")
    keys = [layer.cache_key for layer in below.layers[:-1]]
    assert [layer.cache_key for layer in above.layers][: len(keys)] == keys
    assert "org.ekiben.layer" not in below.labels


def test_added_layer_has_the_key_that_it_has_in_recipe_yaml(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    recipe = {"name": "mine", "description": "x", "stack": "cu130", "layer": "deepspeed", "tasks": {}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    assert resolved(folder).layers[-2].cache_key == resolved("finetune", "deepspeed").layers[-2].cache_key


def test_wheel_is_compiled_once_for_all_images() -> None:
    keys = {
        stage.cache_key
        for recipe in ("finetune", "lora-opencalm", "pretrain-gpt")
        for stage in stages_of(resolved(recipe, "flash-attn").layers[-2].copies)
    }
    assert len(keys) == 1


def test_notebook_goes_on_top_of_added_layers() -> None:
    image = resolve(replace(find_recipe("finetune"), layers=("deepspeed",), added_layer="notebook"))
    assert names(image) == [*HUGGINGFACE, "deepspeed", "notebook", "finetune-deepspeed-notebook"]


def test_layers_whose_argument_has_one_name(tmp_path: Path) -> None:
    """Each layer's parent is its alone: ``base`` of one is not ``base`` of another."""
    folder = tmp_path / "mine"
    (folder / "images").mkdir(parents=True)
    recipe = {"name": "mine", "description": "x", "stack": "cu130", "layer": "pytorch", "tasks": {}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    for name in ("first", "second"):
        (folder / f"images/{name}.def").write_text(
            "Bootstrap: localimage\nFrom: {{ base }}.sif\n%arguments\n    base=python\n%post\n    true\n"
        )
    assert names(resolved(folder, "first", "second"))[-4:] == ["pytorch", "first", "second", "mine-first-second"]
    assert names(resolved(folder, "second", "first"))[-3:-1] == ["second", "first"]


@pytest.mark.parametrize(
    ("recipe", "layers", "stack", "message"),
    [
        ("finetune", ["deepsped"], None, "--layer deepsped: no layer 'deepsped'. Did you mean 'deepspeed'?"),
        ("finetune", ["huggingface"], None, "--layer huggingface: 'finetune' has it already; omit the option"),
        ("finetune", ["deepspeed", "deepspeed"], None, "--layer deepspeed: 'finetune' has it already"),
        ("finetune", ["megatron"], None, "--layer megatron: 'megatron' is on top of 'huggingface'"),
        ("finetune", ["toolkit"], None, "and 'finetune' would be without huggingface, deepspeed-plain"),
        (
            "lora-opencalm",
            ["deepspeed", "deepspeed-plain"],
            None,
            "--layer deepspeed-plain: 'lora-opencalm' has 'deepspeed', with the same packages and more",
        ),
        ("lora-opencalm", ["megatron"], "cu124", "--layer megatron: stack 'cu124' lacks it: missing "),
        ("lora-opencalm", ["flash-attn-4"], "cu124", "--layer flash-attn-4: stack 'cu124' lacks it: missing "),
    ],
)
def test_layer_that_cannot_be_added(recipe: str, layers: list[str], stack: str | None, message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(recipe, *layers, stack=stack)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layer_compiled_for_another_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "images").mkdir(parents=True)
    recipe = {"name": "mine", "description": "x", "stack": "cu130", "layer": "mine-tools", "tasks": {}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "images/mine-tools.def").write_text("Bootstrap: localimage\nFrom: python.sif\n%post\n    true\n")
    with pytest.raises(DefinitionError, match="'flash-attn' is compiled for compiler, pytorch, which 'mine' lacks"):
        resolved(folder, "flash-attn")


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("Bootstrap: localimage\nFrom: {{ base }}.sif\n", "base"),
        ("Bootstrap: localimage\nFrom: {{base}}.sif  # remark\n%post\n    echo From: x.sif\n", "base"),
        ("Bootstrap: localimage\nFrom: python.sif\n", None),
        (
            "Bootstrap: localimage\nFrom: {{ a }}.sif\nStage: b\n%post\n    x\n\nBootstrap: localimage\nFrom: p.sif\n",
            None,
        ),
        ("Bootstrap: debootstrap\nOSVersion: bookworm\n", None),
    ],
)
def test_parent_argument(text: str, argument: str | None) -> None:
    assert parent_argument(text) == argument


# --------------------------------------------------------------------------------------------------------- command line


def test_commands_take_layers(run_cli: RunCli, tmp_path: Path) -> None:
    at = ("--store", tmp_path / "store")
    planned = json.loads(
        run_cli(*at, "plan", "finetune", "--layer", "deepspeed", "--layer=flash-attn", "--json").stdout
    )
    assert [layer["layer"] for layer in planned][-3:] == ["deepspeed", "flash-attn", "finetune-deepspeed-flash-attn"]
    run_cli("render", "finetune", "--to", "dockerfile", "--layer", "deepspeed", "-o", tmp_path / "rendered")
    dockerfile = next((tmp_path / "rendered").glob("*ockerfile")).read_text()
    assert "finetune-deepspeed" in dockerfile
    message = run_cli(*at, "plan", "finetune", "--layer", "megatron", code=3).stderr
    assert message.startswith("error: --layer megatron: ")
    assert message.count("\n") == 1


def test_run_takes_the_image_of_the_layers(run_cli: RunCli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    write_program(tools / "apptainer", "#!/bin/sh\nexit 1\n")
    env = {"PATH": str(tools)}
    argv = ("run", "finetune", "--layer", "deepspeed", "--stack", "cu124", "--cpu", "--dry-run", "train")
    message = run_cli(*argv, env=env, code=4).stderr
    assert "finetune-deepspeed-cu124.sif is not there" in message
    assert "build finetune --layer deepspeed --stack cu124" in message
    small_sif(tmp_path / "finetune-deepspeed-cu124.sif")
    assert " finetune-deepspeed-cu124.sif train\n" in run_cli(*argv, env=env).stdout
    message = run_cli("run", "finetune", "--layer", "deepspeed", "--sif", "x.sif", env=env, code=2).stderr
    assert "--sif: x.sif is not there" in message


@pytest.mark.parametrize(
    ("layers", "stack", "gpu_arch", "arguments"),
    [
        ((), None, None, {}),
        (("deepspeed", "flash-attn"), None, "9.0,8.0", {}),
        (("apex",), "cu124", None, {"apex_extensions": "xentropy focal_loss"}),
        (("flash-attn-4",), "cu132", None, {"mirror": "http://mirror.example.org/debian?a=$b"}),
    ],
)
def test_printed_arguments_resolve_to_the_same_image(
    layers: tuple[str, ...], stack: str | None, gpu_arch: str | None, arguments: dict[str, str], run_cli: RunCli
) -> None:
    recipe = replace(find_recipe("finetune"), layers=layers)
    image = resolve(recipe, stack=stack, gpu_arch=gpu_arch, arguments=arguments)
    planned = json.loads(run_cli("plan", "--json", *shlex.split(image.cli_args)).stdout)
    assert [layer["cache_key"] for layer in planned] == [layer.cache_key for layer in image.layers]


def test_printed_arguments_name_a_recipe_elsewhere_by_its_folder(tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "my lab/hello"
    shutil.copytree(find_recipe("hello").folder, folder)
    image = resolve(find_recipe(str(folder)))
    assert shlex.split(image.cli_args) == [str(folder)]
    assert "hello" in run_cli("plan", *shlex.split(image.cli_args)).stdout
    store = tmp_path / "store"
    refused = run_cli("--store", store, "bundle", folder, "--gpu-arch", "9.0", "--layer", "flash-attn", code=8)
    assert f"build '{folder}' --layer flash-attn --gpu-arch 9.0" in refused.stderr
