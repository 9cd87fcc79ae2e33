"""From a recipe to cache keys: a key changes exactly when what it stands for can change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.environment import platform
from ekiben.core.errors import DefinitionError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.formats.layer import File
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe, recipe_folders
from support.sample_recipe import SampleRecipe


def chain_of(sample: SampleRecipe, **options: str) -> ResolvedRecipe:
    arguments = {name: value for name, value in options.items() if name != "stack"}
    return resolve(find_recipe(str(sample.path)), stack=options.get("stack"), arguments=arguments)


def keys(sample: SampleRecipe, **options: str) -> dict[str, str]:
    return {layer.name: layer.cache_key for layer in chain_of(sample, **options).layers}


def changed(sample: SampleRecipe, change: Callable[[], object]) -> set[str]:
    """The layers whose key is another after ``change``."""
    before = keys(sample)
    change()
    after = keys(sample)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def refusal(sample: SampleRecipe, **options: str) -> str:
    with pytest.raises(DefinitionError) as caught:
        chain_of(sample, **options)
    assert caught.value.exit_code == 3
    return str(caught.value).replace(str(sample.path), "own")


def test_every_recipe_here_resolves() -> None:
    assert len(recipe_folders()) >= 2
    for name in recipe_folders():
        first, second = resolve(find_recipe(name)), resolve(find_recipe(name))
        assert [layer.cache_key for layer in first.layers] == [layer.cache_key for layer in second.layers]
        assert first.layers[0].kind == "bootstrap"
        assert first.top.name == name


def test_layers_of_a_recipe(sample: SampleRecipe) -> None:
    chain = chain_of(sample)
    assert [(layer.name, layer.kind) for layer in chain.layers] == [
        ("ground", "bootstrap"),
        ("walls", "post"),
        ("roof", "files"),
        ("own", "files"),
    ]
    assert [layer.inputs["parent"] for layer in chain.layers] == [
        None,
        *(layer.cache_key for layer in chain.layers[:-1]),
    ]
    assert [file.destination for file in chain.layers[2].files] == [
        "/opt/data/data.txt",
        "/opt/tree/a.txt",
        "/opt/tree/sub/b.txt",
    ]
    assert chain.environment["GREETING"] == "hello"
    assert chain.environment["PATH"].startswith("/opt:/usr/local/sbin:")
    assert chain.labels["walls.label"] == "one"
    assert chain.tests == (("walls", "    test -e /word\n"), ("own", "#!/bin/sh -e\ngreet\n"))
    top = {file.destination: file for file in chain.top.files}
    assert top["/usr/local/bin/greet"].mode == 0o755
    assert (
        b'entrypoints/greet.py" --config "/opt/ekiben/recipe/configs/greet.yaml" "$@"'
        in top["/usr/local/bin/greet"].content
    )
    assert {
        "/.singularity.d/runscript",
        "/.singularity.d/labels.json",
        "/opt/ekiben/tests/01-walls.sh",
        "/opt/ekiben/tests/02-own.sh",
        "/opt/ekiben/image.json",
        "/opt/ekiben/recipe/recipe.yaml",
    } <= top.keys()


def test_a_base_with_a_script_is_two_layers(sample: SampleRecipe) -> None:
    sample.write("images/ground.def", (sample.path / "images/ground.def").read_text() + "%post\n    true\n")
    assert [layer.name for layer in chain_of(sample).layers] == ["ground-root", "ground", "walls", "roof", "own"]


def test_a_definition_that_only_sets_the_environment_is_no_layer(sample: SampleRecipe) -> None:
    sample.write("images/roof.def", "Bootstrap: localimage\nFrom: walls.sif\n%environment\n    export ROOF=red\n")
    chain = chain_of(sample)
    assert [layer.name for layer in chain.layers] == ["ground", "walls", "own"]
    assert chain.environment["ROOF"] == "red"


ABOVE = "Bootstrap: localimage\nFrom: walls.sif\n%environment\n    export ROOF=$GREETING\n"


@pytest.mark.parametrize("line", ["    export A=$HOME/x\n", "    . /etc/profile\n"])
def test_a_script_of_the_environment_is_a_layer(sample: SampleRecipe, line: str) -> None:
    sample.replace("images/walls.def", "%environment\n", f"%environment\n{line}")
    sample.write("images/roof.def", ABOVE)
    sample.recipe(environment={"TOP": "$ROOF"})
    resolved = resolve(find_recipe(str(sample.path)))
    kinds = [(layer.name, layer.kind) for layer in resolved.layers]
    environments = [(name, "environment") for name in ("walls-environment", "roof", "own-environment")]
    assert kinds[:-1] == [("ground", "bootstrap"), ("walls", "post"), *environments]
    assert [script.where.rpartition("/")[2] for script in resolved.scripts] == [
        "walls.def:14",
        "roof.def:4",
        "recipe.yaml",
    ]
    assert resolved.scripts[2].text.endswith('export TOP="$ROOF"')
    assert "ROOF" not in resolved.environment
    (text,) = [file.content.decode() for file in resolved.top.files if file.destination.endswith("90-environment.sh")]
    assert text.endswith(
        f"\n{line}    export GREETING=hello\n    export PATH=/opt:$PATH\n\n    export ROOF=$GREETING\n\n"
        f'export EKIBEN_RECIPE="/opt/ekiben/recipe"\nexport TOP="$ROOF"\n'
    )


def test_another_script_runs_no_script_of_its_layer_again(sample: SampleRecipe) -> None:
    sample.replace("images/walls.def", "%environment\n", "%environment\n    . /etc/profile\n")
    rebuilt = changed(sample, lambda: sample.replace("images/walls.def", "/etc/profile", "/etc/other"))
    assert {"walls-environment", "roof"} <= rebuilt
    assert "walls" not in rebuilt


def test_what_a_script_writes_is_evaluated_above_it(sample: SampleRecipe) -> None:
    sample.replace("images/walls.def", "%post\n", "%post\n    echo export A=b >>/environment\n")
    resolved = resolve(find_recipe(str(sample.path)))
    ground, walls, evaluation, *_ = resolved.layers
    assert (walls.inputs["writes"], evaluation.name, evaluation.kind) == (
        "environment",
        "walls-environment",
        "environment",
    )
    assert evaluation.inputs["script"].startswith(
        f". /opt/ekiben/environment.d/{ground.cache_key[:12]}.sh\n    export GREETING"
    )
    sample.replace("images/walls.def", "ground.sif\n", "ground.sif\nStage: one\n")
    text = (sample.path / "images/walls.def").read_text().split("%environment")[0]
    last = "\nBootstrap: localimage\nFrom: ground.sif\nStage: two\n%files from one\n    /x /x\n"
    sample.write("images/walls.def", text + last)
    assert "the %post of 'one' adds to the image's environment" in refusal(sample)


def test_recipe_s_values_are_no_script(sample: SampleRecipe) -> None:
    sample.replace("images/walls.def", "%environment\n", "%environment\n    . /etc/profile\n")
    sample.recipe(environment={"A": "$(id)"})
    assert "own/recipe.yaml: environment: A: of what a shell expands only $NAME" in refusal(sample)


class TestKeys:
    """What changes which keys. ``own`` is the recipe's last layer, which holds all there is to say about the image."""

    def test_script_changes_its_layer_and_those_above(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.replace("images/walls.def", "> /word", "> /words")) == {
            "walls",
            "roof",
            "own",
        }

    def test_used_argument_changes_the_key(self, sample: SampleRecipe) -> None:
        before, after = keys(sample), keys(sample, word="bye")
        assert {name for name in before if before[name] != after[name]} == {"walls", "roof", "own"}
        assert before == keys(sample, word="hello")

    def test_file_content_changes_the_key(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.write("files/data.txt", "other\n")) == {"roof", "own"}
        assert changed(sample, lambda: sample.write("files/tool.sh", "other\n", 0o755)) == {"walls", "roof", "own"}

    def test_executable_bit_changes_the_key(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: (sample.path / "files/data.txt").chmod(0o755)) == {"roof", "own"}

    def test_file_destination_changes_the_key(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.replace("images/roof.def", "/opt/data/", "/opt/date/")) == {"roof", "own"}

    def test_added_file_changes_the_key(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.write("files/tree/c.txt", "")) == {"roof", "own"}

    def test_epoch_and_base_inputs_change_all_keys(self, sample: SampleRecipe) -> None:
        everything = {"ground", "walls", "roof", "own"}
        assert changed(sample, lambda: sample.stack(epoch=1_700_000_001)) == everything
        shown = changed(sample, lambda: sample.replace("images/ground.def", "OSVersion: bookworm", "OSVersion: trixie"))
        assert shown == everything
        assert (
            changed(sample, lambda: sample.replace("images/ground.def", "Include: b a", "Include: b a c")) == everything
        )

    def test_environment_changes_the_keys_above(self, sample: SampleRecipe) -> None:
        assert changed(
            sample, lambda: sample.replace("images/walls.def", "GREETING={{ word }}", "GREETING={{ word }}s")
        ) == {"roof", "own"}

    def test_labels_and_help_change_only_the_recipe_layer(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.replace("images/walls.def", "walls.label one", "walls.label two")) == {
            "own"
        }
        assert changed(sample, lambda: sample.replace("images/walls.def", "test -e /word", "test -s /word")) == {"own"}
        assert changed(
            sample,
            lambda: sample.write("images/roof.def", (sample.path / "images/roof.def").read_text() + "%help\n  Help\n"),
        ) == {"own"}
        assert changed(sample, lambda: sample.recipe(description="another")) == {"own"}

    def test_recipe_files_change_only_the_recipe_layer(self, sample: SampleRecipe) -> None:
        assert changed(sample, lambda: sample.write("entrypoints/greet.py", "print('hi')\n")) == {"own"}
        assert changed(sample, lambda: sample.write("configs/greet.yaml", "name: me\n")) == {"own"}

    def test_irrelevant_changes_keep_all_keys(self, sample: SampleRecipe) -> None:
        before = keys(sample)
        assert keys(sample, mirror="http://mirror.example/debian") == before
        sample.replace("images/ground.def", "Include: b a", "Include: a,b a")
        for path in (path for path in sample.path.rglob("*") if path.is_file()):
            os.utime(path, (1, 1))
            path.chmod(path.stat().st_mode & 0o700)
        sample.write("files/tree/__pycache__/a.pyc", "machine's own")
        after = keys(sample)
        assert {name: after[name] for name in ("ground", "walls", "roof")} == {
            name: before[name] for name in ("ground", "walls", "roof")
        }

    def test_recipe_path_is_not_in_the_key(self, sample: SampleRecipe) -> None:
        before = keys(sample)
        sample.path.rename(sample.path.with_name("elsewhere"))
        assert keys(SampleRecipe(sample.path.with_name("elsewhere"))) == before

    def test_stack_path_is_not_in_the_key(self, sample: SampleRecipe) -> None:
        """{{ stack }} is where the stack's files lie; which files they are is in the key by their content."""
        sample.write("images/stacks/tiny/a.lock", "one\n")
        sample.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "{{ stack }}/a.lock /opt/a.lock")
        sample.replace("images/walls.def", "    word=bye\n", "    word=bye\n    stack=x\n")
        assert changed(sample, lambda: sample.write("images/stacks/tiny/a.lock", "two\n")) == {"walls", "roof", "own"}


def test_recipe_elsewhere_uses_the_repositorys_layers(sample: SampleRecipe) -> None:
    sample.replace("images/roof.def", "walls.sif", "python.sif")
    sample.recipe(stack="cu130")
    mine, house = chain_of(sample).layers, resolve(find_recipe("hello")).layers
    assert [layer.name for layer in mine] == ["base", "python", "roof", "own"]
    assert [layer.cache_key for layer in mine[:2]] == [layer.cache_key for layer in house[:2]]


def test_a_layer_of_the_recipe_hides_the_repositorys(sample: SampleRecipe) -> None:
    (sample.path / "images/ground.def").rename(sample.path / "images/base.def")
    sample.replace("images/walls.def", "ground.sif", "base.sif")
    assert chain_of(sample).definitions[0].path == sample.path / "images/base.def"
    assert (PROJECT_ROOT / "images/base.def").is_file()


class TestRefused:
    def test_unknown_layer_is_refused(self, sample: SampleRecipe) -> None:
        sample.recipe(layer="rof")
        assert refusal(sample) == "own/recipe.yaml: no layer 'rof'. Did you mean 'roof'?"

    def test_missing_parent_is_refused(self, sample: SampleRecipe) -> None:
        sample.replace("images/roof.def", "walls.sif", "wals.sif")
        assert refusal(sample) == "own/images/roof.def: no layer 'wals'. Did you mean 'walls'?"

    def test_circle_of_layers_is_refused(self, sample: SampleRecipe) -> None:
        sample.write("images/ground.def", "Bootstrap: localimage\nFrom: roof.sif\n")
        assert refusal(sample) == "own/images/roof.def: From: is circular: roof → walls → ground → roof"
        sample.write("images/roof.def", "Bootstrap: localimage\nFrom: roof.sif\n")
        assert refusal(sample) == "own/images/roof.def: From: is circular: roof → roof"

    def test_missing_source_file_is_refused(self, sample: SampleRecipe) -> None:
        sample.replace("images/roof.def", "files/data.txt", "files/date.txt")
        shown = refusal(sample)
        assert shown == "own/images/roof.def:5: %files files/date.txt: no such file under own. Did you mean 'data.txt'?"

    def test_unused_arguments_are_refused(self, sample: SampleRecipe) -> None:
        shown = refusal(sample, wrd="x")
        assert shown == "--build-arg: argument 'wrd' is bound but no layer of 'own' declares it. Did you mean 'word'?"
        sample.stack(arguments={"wird": "x"})
        message = (
            "own/images/stacks/tiny/stack.yaml: argument 'wird' is bound but no definition file declares it. Did you"
            " mean 'word'?"
        )
        assert refusal(sample) == message

    def test_unknown_stack_names_the_file_that_requested_it(self, sample: SampleRecipe) -> None:
        assert refusal(sample, stack="tny") == "--stack: no stack 'tny'. Did you mean 'tiny'?"
        sample.recipe(stack="tny")
        assert refusal(sample) == "own/recipe.yaml: no stack 'tny'. Did you mean 'tiny'?"

    @pytest.mark.parametrize(
        ("first", "then", "message"),
        [
            ("Bootstrap: localimage\nFrom: walls.sif\nStage: a\n", "", "no later stage copies a file of 'a'"),
            ("Bootstrap: localimage\nFrom: walls.sif\n", "", "a build stage needs a name"),
            (
                "Bootstrap: debootstrap\nOSVersion: bookworm\nStage: a\n",
                "%files from a\n    /x\n",
                "a build stage needs a layer below",
            ),
            (
                "Bootstrap: localimage\nFrom: roof.sif\nStage: a\n",
                "%files from a\n    /x\n",
                "a stage of it is its own parent: roof → roof",
            ),
            (
                "Bootstrap: localimage\nFrom: wals.sif\nStage: a\n",
                "%files from a\n    /x\n",
                "no layer 'wals'. Did you mean 'walls'?",
            ),
        ],
    )
    def test_invalid_stages_are_refused(self, sample: SampleRecipe, first: str, then: str, message: str) -> None:
        sample.write("images/roof.def", f"{first}\nBootstrap: localimage\nFrom: walls.sif\nStage: b\n\n{then}")
        assert message in refusal(sample)

    def test_confusable_package_name_is_refused(self, sample: SampleRecipe) -> None:
        sample.write("files/mine.lock", "apex==0.9.10.dev0 \\\n    --hash=sha256:0\n")
        sample.replace("images/roof.def", "files/data.txt /opt/data/", "files/mine.lock /opt/mine.lock")
        assert "the package index's apex is a toolkit for websites, not NVIDIA's" in refusal(sample)


def test_a_files_digest_is_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    on_disk, in_memory = File("/a", 0o644, tmp_path / "a"), File("/a", 0o644, content=b"x" * 3_000_000)
    assert on_disk.sha256() == in_memory.sha256()
    assert on_disk.size == in_memory.size == 3_000_000


@pytest.mark.skipif(platform() != "linux/amd64", reason="the text below is of linux/amd64")
def test_the_inputs_of_keys_in_full(sample: SampleRecipe) -> None:
    """An unintended change of a key is a diff here. An intended one of what the builder puts in is a new KEY_FORMAT."""
    ground, walls, roof, top = chain_of(sample).layers
    assert json.dumps([ground.inputs, walls.inputs, roof.inputs], indent=1) == GOLDEN.strip()
    assert ground.cache_key == "4f7ca9a450e1c6531db5dffd6d787b36fe3a931a841d6d572c279d288e12be3b"
    assert sorted(top.inputs) == ["epoch", "files", "format", "kind", "parent", "platform"]


GOLDEN = r"""
[
 {
  "format": 1,
  "parent": null,
  "kind": "bootstrap",
  "source": {
   "bootstrap": "debootstrap",
   "osversion": "bookworm",
   "include": "a b"
  },
  "epoch": 1700000000,
  "platform": "linux/amd64"
 },
 {
  "format": 1,
  "parent": "4f7ca9a450e1c6531db5dffd6d787b36fe3a931a841d6d572c279d288e12be3b",
  "kind": "post",
  "post": "    echo hello > /word\n",
  "files": [
   [
    "/opt/tool.sh",
    493,
    "bf664cf84f00f6ed76164c8457fdeaf8e4dee547226e9ffcf8274e2d2246fed9"
   ]
  ],
  "environment": {
   "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
  },
  "epoch": 1700000000,
  "platform": "linux/amd64"
 },
 {
  "format": 1,
  "parent": "9019340bf930d68ef998c82d939c810601057001503ec95eff37b2135ab17a35",
  "kind": "files",
  "post": "",
  "files": [
   [
    "/opt/data/data.txt",
    420,
    "6667b2d1aab6a00caa5aee5af8ad9f1465e567abf1c209d15727d57b3e8f6e5f"
   ],
   [
    "/opt/tree/a.txt",
    420,
    "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7"
   ],
   [
    "/opt/tree/sub/b.txt",
    420,
    "0263829989b6fd954f72baaf2fc64bc2e2f01d692d4de72986ea808f6e99813f"
   ]
  ],
  "environment": {
   "PATH": "/opt:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
   "GREETING": "hello"
  },
  "epoch": 1700000000,
  "platform": "linux/amd64"
 }
]
"""


def test_every_definition_file_is_read_once(sample: SampleRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the recipe does not stand on is looked at only to tell whether it declares an argument of the stack."""
    sample.write(
        "images/other.def",
        "Bootstrap: localimage\nFrom: ground.sif\n\n%arguments\n    extra=\n\n%post\n    echo {{ extra }}\n",
    )
    sample.stack(arguments={"word": "hello", "extra": "more"})
    reads: list[str] = []
    os_open = os.open

    def counted(path: Any, *args: Any, **options: Any) -> int:
        reads.append(Path(path).name)
        return os_open(path, *args, **options)

    monkeypatch.setattr(os, "open", counted)
    sample.write("images/stacks/tiny/apt.lock", "[walls]\na=1\n")
    chain_of(sample)
    monkeypatch.undo()
    ours = [name for name in reads if name in ("ground.def", "walls.def", "roof.def", "other.def", "apt.lock")]
    assert sorted(ours) == ["apt.lock", "ground.def", "other.def", "roof.def", "walls.def"]


class TestAddedLayer:
    """A layer on top of any recipe's own, as `notebook` is."""

    @staticmethod
    def resolved(recipe: str | Path, **arguments: str) -> ResolvedRecipe:
        return resolve(replace(find_recipe(str(recipe)), added_layer="notebook"), arguments=arguments)

    @pytest.mark.parametrize("recipe", ["hello", "lora-opencalm"])
    def test_layer_is_on_top_and_those_below_stay(self, recipe: str) -> None:
        below = resolve(find_recipe(recipe))
        above = self.resolved(recipe)
        names = [layer.name for layer in below.layers]
        assert [layer.name for layer in above.layers] == [*names[:-1], "notebook", f"{recipe}-notebook"]
        keys = [layer.cache_key for layer in below.layers]
        assert [layer.cache_key for layer in above.layers][: len(keys) - 1] == keys[:-1]
        assert above.recipe.image_name() == f"{recipe}-notebook"
        assert above.recipe.image_name("cu124") == f"{recipe}-notebook-cu124"
        assert above.labels["org.opencontainers.image.title"] == f"{recipe}-notebook"
        assert [name for name, _ in above.tests][-2:] == ["notebook", f"{recipe}-notebook"]

    def test_recipe_that_has_the_layer_gets_no_second_one(self, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        folder.mkdir()
        recipe = {"name": "mine", "description": "x", "stack": "cu130", "layer": "notebook", "tasks": {}}
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        names = [layer.name for layer in self.resolved(folder).layers]
        assert names == ["base", "python", "notebook", "mine-notebook"]

    def test_lock_of_the_layer_below_is_checked(self, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        (folder / "images").mkdir(parents=True)
        recipe = {"name": "mine", "description": "x", "stack": "cu130", "layer": "mine-packages", "tasks": {}}
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        (folder / "requirements.txt").write_text("einops\n")
        (folder / "images/mine-packages.def").write_text(
            "Bootstrap: localimage\nFrom: python.sif\n%files\n    images/mine-packages.lock /opt/x.lock\n"
        )
        with pytest.raises(DefinitionError, match="is not locked"):
            self.resolved(folder)
