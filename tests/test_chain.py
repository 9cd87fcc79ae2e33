"""From a recipe to cache keys: a key changes exactly when what it stands for can change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.chain import Chain, File, platform, resolve
from builder.errors import DefinitionError
from builder.recipe import HOUSE, find_recipe, recipe_folders
from own_recipe import Own


def chain_of(own: Own, **options: str) -> Chain:
    arguments = {name: value for name, value in options.items() if name != "stack"}
    return resolve(find_recipe(str(own.path)), stack=options.get("stack"), arguments=arguments)


def keys(own: Own, **options: str) -> dict[str, str]:
    return {layer.name: layer.cache_key for layer in chain_of(own, **options).layers}


def changed(own: Own, change: Callable[[], object]) -> set[str]:
    """The layers whose key is another after ``change``."""
    before = keys(own)
    change()
    after = keys(own)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def refusal(own: Own, **options: str) -> str:
    with pytest.raises(DefinitionError) as caught:
        chain_of(own, **options)
    assert caught.value.exit_code == 3
    return str(caught.value).replace(str(own.path), "own")


def test_every_recipe_here_resolves() -> None:
    assert len(recipe_folders()) >= 2
    for name in recipe_folders():
        first, second = resolve(find_recipe(name)), resolve(find_recipe(name))
        assert [layer.cache_key for layer in first.layers] == [layer.cache_key for layer in second.layers]
        assert first.layers[0].kind == "bootstrap"
        assert first.top.name == name


def test_the_layers_of_a_chain(own: Own) -> None:
    chain = chain_of(own)
    assert [(layer.name, layer.kind) for layer in chain.layers] == [
        ("ground", "bootstrap"), ("walls", "post"), ("roof", "files"), ("own", "files"),
    ]  # fmt: skip
    assert [layer.inputs["parent"] for layer in chain.layers] == [
        None,
        *(layer.cache_key for layer in chain.layers[:-1]),
    ]
    assert [file.destination for file in chain.layers[2].files] == ["/opt/data/data.txt", "/opt/tree/a.txt", "/opt/tree/sub/b.txt"]  # fmt: skip
    assert chain.environment["GREETING"] == "hello"
    assert chain.environment["PATH"].startswith("/opt:/usr/local/sbin:")
    assert chain.labels["walls.label"] == "one"
    assert chain.tests == (("walls", "    test -e /word\n"), ("own", "greet\n"))
    top = {file.destination: file for file in chain.top.files}
    assert top["/usr/local/bin/greet"].mode == 0o755
    assert (
        b'entrypoints/greet.py" --config "/opt/ekiben/recipe/configs/greet.yaml" "$@"'
        in top["/usr/local/bin/greet"].content
    )
    assert {"/.singularity.d/runscript", "/.singularity.d/labels.json", "/opt/ekiben/tests/01-walls.sh", "/opt/ekiben/tests/02-own.sh",
            "/opt/ekiben/image.json", "/opt/ekiben/recipe/recipe.yaml"} <= top.keys()  # fmt: skip


def test_a_base_with_a_script_is_two_layers(own: Own) -> None:
    own.write("images/ground.def", (own.path / "images/ground.def").read_text() + "%post\n    true\n")
    assert [layer.name for layer in chain_of(own).layers] == ["ground-root", "ground", "walls", "roof", "own"]


def test_a_definition_that_only_sets_the_environment_is_no_layer(own: Own) -> None:
    own.write("images/roof.def", "Bootstrap: localimage\nFrom: walls.sif\n%environment\n    export ROOF=red\n")
    chain = chain_of(own)
    assert [layer.name for layer in chain.layers] == ["ground", "walls", "own"]
    assert chain.environment["ROOF"] == "red"


class TestKeys:
    """What changes which keys. ``own`` is the recipe's last layer, which holds all there is to say about the image."""

    def test_the_script(self, own: Own) -> None:
        assert changed(own, lambda: own.replace("images/walls.def", "> /word", "> /words")) == {"walls", "roof", "own"}

    def test_an_argument_the_script_uses(self, own: Own) -> None:
        before, after = keys(own), keys(own, word="bye")
        assert {name for name in before if before[name] != after[name]} == {"walls", "roof", "own"}
        assert before == keys(own, word="hello")

    def test_a_files_content(self, own: Own) -> None:
        assert changed(own, lambda: own.write("files/data.txt", "other\n")) == {"roof", "own"}
        assert changed(own, lambda: own.write("files/tool.sh", "other\n", 0o755)) == {"walls", "roof", "own"}

    def test_a_files_executable_bit(self, own: Own) -> None:
        assert changed(own, lambda: (own.path / "files/data.txt").chmod(0o755)) == {"roof", "own"}

    def test_a_files_destination(self, own: Own) -> None:
        assert changed(own, lambda: own.replace("images/roof.def", "/opt/data/", "/opt/date/")) == {"roof", "own"}

    def test_a_file_more_in_a_folder(self, own: Own) -> None:
        assert changed(own, lambda: own.write("files/tree/c.txt", "")) == {"roof", "own"}

    def test_the_epoch_and_what_the_base_is_made_of(self, own: Own) -> None:
        everything = {"ground", "walls", "roof", "own"}
        assert changed(own, lambda: own.stack(epoch=1_700_000_001)) == everything
        assert (
            changed(own, lambda: own.replace("images/ground.def", "OSVersion: bookworm", "OSVersion: trixie"))
            == everything
        )
        assert changed(own, lambda: own.replace("images/ground.def", "Include: b a", "Include: b a c")) == everything

    def test_its_own_environment_counts_for_the_layers_above(self, own: Own) -> None:
        assert changed(own, lambda: own.replace("images/walls.def", "GREETING={{ word }}", "GREETING={{ word }}s")) == {"roof", "own"}  # fmt: skip

    def test_what_describes_a_layer_counts_only_for_the_description(self, own: Own) -> None:
        assert changed(own, lambda: own.replace("images/walls.def", "walls.label one", "walls.label two")) == {"own"}
        assert changed(own, lambda: own.replace("images/walls.def", "test -e /word", "test -s /word")) == {"own"}
        assert changed(own, lambda: own.write("images/roof.def", (own.path / "images/roof.def").read_text() + "%help\n  Help\n")) == {"own"}  # fmt: skip
        assert changed(own, lambda: own.recipe(description="another")) == {"own"}

    def test_the_recipes_own_files(self, own: Own) -> None:
        assert changed(own, lambda: own.write("entrypoints/greet.py", "print('hi')\n")) == {"own"}
        assert changed(own, lambda: own.write("configs/greet.yaml", "name: me\n")) == {"own"}

    def test_what_cannot_change_a_layer_changes_no_key(self, own: Own) -> None:
        before = keys(own)
        assert keys(own, mirror="http://mirror.example/debian") == before
        own.replace("images/ground.def", "Include: b a", "Include: a,b a")
        for path in (path for path in own.path.rglob("*") if path.is_file()):
            os.utime(path, (1, 1))
            path.chmod(path.stat().st_mode & 0o700)
        own.write("files/tree/__pycache__/a.pyc", "machine's own")
        after = keys(own)
        assert {name: after[name] for name in ("ground", "walls", "roof")} == {name: before[name] for name in ("ground", "walls", "roof")}  # fmt: skip

    def test_where_the_recipe_lies_does_not_count(self, own: Own) -> None:
        before = keys(own)
        own.path.rename(own.path.with_name("elsewhere"))
        assert keys(Own(own.path.with_name("elsewhere"))) == before

    def test_the_stack_is_not_a_place_in_a_key(self, own: Own) -> None:
        """{{ stack }} is where the stack's files lie; which files they are is in the key by their content."""
        own.write("images/stacks/tiny/a.lock", "one\n")
        own.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "{{ stack }}/a.lock /opt/a.lock")
        own.replace("images/walls.def", "    word=bye\n", "    word=bye\n    stack=x\n")
        assert changed(own, lambda: own.write("images/stacks/tiny/a.lock", "two\n")) == {"walls", "roof", "own"}


def test_a_recipe_elsewhere_may_stand_on_the_repositorys_layers(own: Own) -> None:
    own.replace("images/roof.def", "walls.sif", "python.sif")
    own.recipe(stack="cu130")
    mine, house = chain_of(own).layers, resolve(find_recipe("hello")).layers
    assert [layer.name for layer in mine] == ["base", "python", "roof", "own"]
    assert [layer.cache_key for layer in mine[:2]] == [layer.cache_key for layer in house[:2]]


def test_a_layer_of_the_recipe_hides_the_repositorys(own: Own) -> None:
    (own.path / "images/ground.def").rename(own.path / "images/base.def")
    own.replace("images/walls.def", "ground.sif", "base.sif")
    assert chain_of(own).definitions[0].path == own.path / "images/base.def"
    assert (HOUSE / "images/base.def").is_file()


class TestRefused:
    def test_an_unknown_layer(self, own: Own) -> None:
        own.recipe(layer="rof")
        assert refusal(own) == "own/recipe.yaml: no layer 'rof'. Did you mean 'roof'?"

    def test_a_missing_parent(self, own: Own) -> None:
        own.replace("images/roof.def", "walls.sif", "wals.sif")
        assert refusal(own) == "own/images/roof.def: no layer 'wals'. Did you mean 'walls'?"

    def test_a_circle(self, own: Own) -> None:
        own.write("images/ground.def", "Bootstrap: localimage\nFrom: roof.sif\n")
        assert refusal(own) == "own/images/roof.def: From: goes round in a circle: roof → walls → ground → roof"
        own.write("images/roof.def", "Bootstrap: localimage\nFrom: roof.sif\n")
        assert refusal(own) == "own/images/roof.def: From: goes round in a circle: roof → roof"

    def test_a_file_that_is_not_there(self, own: Own) -> None:
        own.replace("images/roof.def", "files/data.txt", "files/date.txt")
        assert (
            refusal(own)
            == "own/images/roof.def:5: %files files/date.txt: no such file under own. Did you mean 'data.txt'?"
        )

    def test_unused_arguments(self, own: Own) -> None:
        assert (
            refusal(own, wrd="x")
            == "--arg: argument 'wrd' is bound but no layer of 'own' declares it. Did you mean 'word'?"
        )
        own.stack(arguments={"wird": "x"})
        said = "own/images/stacks/tiny/stack.yaml: argument 'wird' is bound but no definition file declares it. Did you mean 'word'?"
        assert refusal(own) == said

    def test_an_unknown_stack_says_who_asked(self, own: Own) -> None:
        assert refusal(own, stack="tny") == "--stack: no stack 'tny'. Did you mean 'tiny'?"
        own.recipe(stack="tny")
        assert refusal(own) == "own/recipe.yaml: no stack 'tny'. Did you mean 'tiny'?"

    @pytest.mark.parametrize(
        ("first", "then", "said"),
        [
            ("Bootstrap: localimage\nFrom: walls.sif\nStage: a\n", "", "no later stage takes anything of 'a'"),
            ("Bootstrap: localimage\nFrom: walls.sif\n", "", "a build stage needs a name"),
            ("Bootstrap: debootstrap\nOSVersion: bookworm\nStage: a\n", "%files from a\n    /x\n", "a build stage stands on a layer"),
            ("Bootstrap: localimage\nFrom: roof.sif\nStage: a\n", "%files from a\n    /x\n", "a stage of it stands on itself: roof → roof"),
            ("Bootstrap: localimage\nFrom: wals.sif\nStage: a\n", "%files from a\n    /x\n", "no layer 'wals'. Did you mean 'walls'?"),
        ],
    )  # fmt: skip
    def test_stages_that_cannot_be_built(self, own: Own, first: str, then: str, said: str) -> None:
        own.write("images/roof.def", f"{first}\nBootstrap: localimage\nFrom: walls.sif\nStage: b\n\n{then}")
        assert said in refusal(own)

    def test_a_package_of_another_meaning(self, own: Own) -> None:
        own.write("files/mine.lock", "apex==0.9.10.dev0 \\\n    --hash=sha256:0\n")
        own.replace("images/roof.def", "files/data.txt /opt/data/", "files/mine.lock /opt/mine.lock")
        assert "the package index's apex is a toolkit for websites, not NVIDIA's" in refusal(own)


def test_a_files_digest_is_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    on_disk, in_memory = File("/a", 0o644, tmp_path / "a"), File("/a", 0o644, content=b"x" * 3_000_000)
    assert on_disk.sha256() == in_memory.sha256()
    assert on_disk.size == in_memory.size == 3_000_000


@pytest.mark.skipif(platform() != "linux/amd64", reason="the text below is of linux/amd64")
def test_the_inputs_of_keys_in_full(own: Own) -> None:
    """An unintended change of a key is a diff here. An intended one of what the builder puts in is a new KEY_FORMAT."""
    ground, walls, roof, top = chain_of(own).layers
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
