"""Random definition files: rendered as one plain file and read again, they mean the same; and their scripts do the
same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
from hypothesis import given as for_all
from hypothesis import strategies as st

from ekiben.core.errors import DefinitionError
from ekiben.resolve.graph import BuildStage, Layer, ResolvedRecipe, stages_of
from ekiben.resolve.render import render
from ekiben.resolve.resolve import resolve
from ekiben.spec.definition import Definition, read_definition
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import RECIPE, STACK, SampleRecipe

# What readers and shells take for more than a letter, often.
odd = st.lists(
    st.sampled_from(
        ["a", "b", " ", "'", '"', "\\", "#", "%post", "Bootstrap: x", "=", ":", ";", "\t", "日", "\xa0", "\x85", "-"]
    ),
    min_size=1,
    max_size=8,
).map("".join)
braced = st.one_of(
    odd,
    st.sampled_from(
        ["{{ word }}", "{{mirror}}", "a\nb", "two\n\nlines\n", "x\n%post\n", "x\nBootstrap: y", "a\rb", ""]
    ),
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
layer_names = st.lists(
    st.sampled_from(["walls", "a b", "it's", "日本", "a.b", "A", "x+y", "roof"]), min_size=1, max_size=3, unique=True
)
paths = odd.map(lambda text: "/opt/" + text.replace("\t", "").replace('"', "").strip()).filter(
    lambda path: path != "/opt/"
)
# In a script, a % that only blanks precede begins a section, and Bootstrap: in the first column a stage.
lines = odd.map(lambda line: f" -{line}" if line.lstrip().startswith(("%", "Bootstrap:")) else line)
bodies = st.lists(lines, max_size=4).map("\n".join)
commands = st.sampled_from(
    [
        "printf '%s\\n' \"${A-no A} ${B-no B}\"",
        "x=1",
        'echo "x is ${x-unset}"',
        "exit 0",
        "cat <<EOF\n  kept\tas it is\nEOF",
        "echo one \\\n  two",
        "# a remark",
        "set +e; false; echo on",
        "umask 077; umask",
        "umask",
        "export B=changed",
        "mkdir -p sub; cd sub; pwd",
        "pwd",
        "echo 'it''s'",
        "echo a\\ ",
        "f() { echo f; }",
        "trap 'echo bye' EXIT",
        "(echo in; exit 3) || echo out",
        "echo end \\",
        "return 0",
        'echo "$#"',
    ]
)
scripts = st.lists(commands, min_size=1, max_size=4).map("\n".join)


@dataclass(frozen=True)
class Drawn:
    """Definition files, lowest first, and what recipe.yaml says."""

    definitions: dict[str, str]
    recipe: dict[str, object]


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


@st.composite
def recipes(draw: st.DrawFn, posts: st.SearchStrategy[str] = bodies) -> Drawn:
    definitions = {
        "ground": "Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: {{ mirror }}\n\n%arguments\n    mirror=\n"
    }
    values = odd.filter(lambda value: not re.search(r"(^|:)~|\n", value))
    for name in draw(layer_names):
        below = list(definitions)[-1]
        header = f"Bootstrap: localimage\nFrom: {below}.sif\n"
        text, copied = "", ""
        if posts is bodies and draw(st.booleans()):
            stage = draw(st.sampled_from(["build", "B.x", "make-it"]))
            text = f"{header}Stage: {stage}\n\n%post\n{draw(posts)}\n\n"
            pairs = draw(st.lists(st.tuples(paths, paths), min_size=1, max_size=2))
            copied = f"\n%files from {stage}\n" + "".join(
                f"    {quoted(source)} {quoted(target)}\n" for source, target in pairs
            )
        text += header + copied
        if draw(st.booleans()):
            text += "\n%files\n    files/data.txt /opt/data.txt\n"
        exports = draw(st.dictionaries(st.sampled_from(["A", "B"]) if posts is scripts else names, values, max_size=2))
        text += "\n%environment\n" + "".join(f"    export {key}={quoted(value)}\n" for key, value in exports.items())
        labels = draw(st.dictionaries(names, odd.map(str.strip).filter(bool), max_size=2))
        text += "\n%labels\n" + "".join(f"    {key} {value}\n" for key, value in labels.items())
        text += f"\n%post\n{draw(posts)}\n"
        for section in ("help", "runscript", "startscript", "test"):
            body = draw(bodies)
            text += (
                f"\n%{section}\n{body}\n" if not re.search(r"^bootstrap", body, re.IGNORECASE | re.MULTILINE) else ""
            )
        definitions[name] = text
    recipe = {
        **RECIPE,
        "layer": list(definitions)[-1],
        "description": draw(braced),
        "environment": draw(st.dictionaries(names, braced, max_size=2)),
        "labels": draw(
            st.dictionaries(st.one_of(names, st.sampled_from(["a b", "#a", "%a", "a\nb", ""])), braced, max_size=2)
        ),
        "tasks": {"greet": {**RECIPE["tasks"]["greet"], "help": draw(braced).replace("\n", "")}},
    }
    return Drawn(definitions, recipe)


@contextmanager
def rendered(drawn: Drawn) -> Iterator[tuple[ResolvedRecipe, Path]]:
    """The recipe resolved, and the file that it is rendered as. Raises DefinitionError."""
    with tempfile.TemporaryDirectory() as folder:
        sample = SampleRecipe(Path(folder) / "sample")
        for name, text in drawn.definitions.items():
            path = sample.write(f"images/{name}.def", "")
            path.write_text(text, encoding="utf-8", newline="")
        sample.write("files/data.txt", "data\n")
        sample.write("entrypoints/greet.py", "print('hello')\n")
        sample.write("configs/greet.yaml", "name: you\n")
        sample.write("recipe.yaml", json.dumps(drawn.recipe))
        sample.write("images/stacks/tiny/stack.yaml", json.dumps({**STACK, "arguments": {}}))
        resolved = resolve(find_recipe(str(sample.path)))
        yield resolved, render(resolved, "def", Path(folder) / "plain")


def steps_of(resolved: ResolvedRecipe) -> list[BuildStage | Layer]:
    return [step for layer in resolved.layers for step in (*stages_of(layer.copies), layer)]


def meaning(definition: Definition) -> Mapping[str, object]:
    final = definition.final
    return {
        "header": dict(final.header),
        "environment": dict(final.environment),
        "labels": dict(final.labels),
        "scripts": [final.test, final.runscript, final.startscript, final.help],
    }


def expected(resolved: ResolvedRecipe) -> Mapping[str, object]:
    top = {file.destination: file.content.decode() for file in resolved.top.files}
    shown = [top.get(f"/.singularity.d/{name}", "") for name in ("test", "runscript", "startscript", "runscript.help")]
    header = {"bootstrap": "debootstrap", "osversion": "bookworm", "mirrorurl": "", "from": ""}
    if any(layer.copies for layer in resolved.layers):
        header["stage"] = "image"
    # A label is one line, in a Dockerfile, too.
    labels = {key: " ".join(value.split("\n")).strip() for key, value in resolved.labels.items()}
    return {
        "header": header,
        "environment": dict(resolved.environment),
        "labels": labels,
        "scripts": [text.strip("\n") + "\n" if text.strip("\n") else "" for text in shown],
    }


def may_be_refused(drawn: Drawn) -> bool:
    """Whether root is something in it that a definition file has no way to write."""
    written = json.dumps(drawn.recipe)
    stages = re.findall(r"^%files from .*\n((?:    .*\n)+)", "\n".join(drawn.definitions.values()), re.MULTILINE)
    paths = "".join(stages).replace("' '", "").replace("    '", "").replace("'\n", "")
    return bool(
        re.search(r"\{\{|\\n", written) or re.search(r"['\\]", paths) or {"a b", "#a", ""} & {*drawn.recipe["labels"]}
    )  # type: ignore[misc]


@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
@for_all(recipes())
def test_rendered_file_is_read_as_what_was_rendered(drawn: Drawn) -> None:
    try:
        with rendered(drawn) as (resolved, path):
            again = read_definition(path, root=path.parent)
            assert meaning(again) == expected(resolved)
            copies = [(item.source, item.destination) for layer in resolved.layers for item in layer.copies]
            assert [(copy.source, copy.destination) for copy in again.final.files if copy.stage] == copies
            assert all(
                (path.parent / copy.source).exists() for stage in again.stages for copy in stage.files if not copy.stage
            )
            for step in steps_of(resolved):
                if step.stage is not None:
                    assert any(step.stage.post.strip("\n") in stage.post for stage in again.stages)
    except DefinitionError as error:
        hypothesis.assume(may_be_refused(drawn))
        assert "a plain file does not support" in str(error)


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@for_all(recipes(scripts))
def test_rendered_scripts_do_what_the_layers_do(drawn: Drawn) -> None:
    """One after the other, each in a shell of its own, as layers run them."""
    drawn.recipe.update(RECIPE, layer=list(drawn.definitions)[-1], environment={}, labels={})
    with (
        rendered(drawn) as (resolved, path),
        tempfile.TemporaryDirectory() as here,
        tempfile.TemporaryDirectory() as root,
    ):
        post = read_definition(path, root=path.parent).final.post
        steps = [
            text.partition("\n")[2].rstrip() for text in post.split("\n# layer ")[1:-1]
        ]  # the last one copies the recipe's files
        script = "\n".join(re.sub(r"^(sh|\(cd) /\.ekiben-files.*\n", "", step, flags=re.MULTILINE) for step in steps)
        layers = [layer for layer in resolved.layers if layer.stage is not None and layer.kind == "post"]
        expected = "".join(shell(layer.stage.post, layer.environment, here) for layer in layers if layer.stage)
        assert shell(f"umask 022\ncd {root}\n{script}", {}, root).replace(root, here) == expected


def shell(script: str, environment: Mapping[str, str], folder: str) -> str:
    """What a script prints as that of a layer: with its environment, from a folder instead of the root."""
    command = ["/bin/sh", "-e", "-c", f'umask 022; cd {folder}; . "$0"', "/dev/stdin"]
    done = subprocess.run(
        command,
        input=script,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), (script, done)
    return done.stdout
