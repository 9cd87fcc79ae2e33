"""The chain as one plain file: parsed again by our own reader, and by a shell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, StoreError
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.render import render
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe, recipe_folders
from support.sample_recipe import SampleRecipe


@pytest.fixture
def chain(sample: SampleRecipe) -> ResolvedRecipe:
    return resolve(find_recipe(str(sample.path)))


def test_rendered_dockerfile_and_context(chain: ResolvedRecipe, tmp_path: Path) -> None:
    path = render(chain, "dockerfile", tmp_path / "context")
    text = path.read_text()
    assert path == tmp_path / "context/Dockerfile"
    assert [line for line in text.splitlines() if line.startswith(("FROM", "ADD", "COPY", "RUN", "CMD"))] == [
        "FROM scratch",
        "ADD root.tar /",
        (
            "RUN --mount=type=bind,source=files/walls,target=/run/walls"
            " --mount=type=bind,source=files/copy.sh,target=/run/copy.sh umask 022 && \\"
        ),
        "RUN --mount=type=bind,source=post/walls.sh,target=/run/post.sh \\",
        (
            "RUN --mount=type=bind,source=files/roof,target=/run/roof"
            " --mount=type=bind,source=files/copy.sh,target=/run/copy.sh umask 022 && \\"
        ),
        "COPY files/own/ /",
        'CMD ["/bin/sh", "/.singularity.d/runscript"]',
    ]
    assert "mmdebstrap --variant=minbase --include=b,a bookworm root.tar" in text
    assert 'ENV GREETING="hello"' in text
    assert 'LABEL walls.label="one"' in text
    assert (tmp_path / "context/post/walls.sh").read_text() == "    echo hello > /word\n"
    assert "    sh /run/copy.sh /run/walls/0 /opt/tool.sh tool.sh" in text.splitlines()
    tool = tmp_path / "context/files/walls/0"
    assert (tool.read_text(), tool.stat().st_mode & 0o777) == ("#!/bin/sh\necho tool\n", 0o755)
    assert (tmp_path / "context/files/own/usr/local/bin/greet").exists()


def test_rendered_definition_file_and_context(chain: ResolvedRecipe, tmp_path: Path) -> None:
    path = render(chain, "def", tmp_path / "folder")
    text = path.read_text()
    assert path == tmp_path / "folder/own.def"
    for line in (
        "Bootstrap: debootstrap",
        "OSVersion: bookworm",
        "MirrorURL: {{ mirror }}",
        "export GREETING=hello",
        "    walls.label one",
    ):
        assert line in text.splitlines()
    post = text.split("%post\n")[1].split("\n%environment")[0]
    subprocess.run(["sh", "-n"], input=post, text=True, check=True)
    assert post.index("export GREETING=hello") > post.index("echo hello > /word")
    copied = [line.split() for line in text.split("%files\n")[1].split("\n%post")[0].splitlines() if line.strip()]
    assert ["files/walls", "/.ekiben-files/walls"] in copied
    assert all((tmp_path / "folder" / source).exists() for source, _ in copied)
    assert (
        post.index("copy.sh /.ekiben-files/walls/0 ")
        < post.index("> /word")
        < post.index("copy.sh /.ekiben-files/roof/0 ")
    )


@pytest.mark.parametrize("target", ["dockerfile", "def"])
def test_every_recipe_here_renders(target: str, tmp_path: Path) -> None:
    for name in recipe_folders():
        assert render(resolve(find_recipe(name)), target, tmp_path / name).is_file()


def test_rendered_values_are_quoted(sample: SampleRecipe, tmp_path: Path) -> None:
    sample.recipe(environment={"QUOTE": 'a "b" \\ c'}, labels={"l": "x$y"})
    chain = resolve(find_recipe(str(sample.path)))
    text = render(chain, "dockerfile", tmp_path / "a").read_text()
    assert 'ENV QUOTE="a \\"b\\" \\\\ c"' in text
    assert 'LABEL l="x\\$y"' in text
    assert "export QUOTE='a \"b\" \\ c'" in render(chain, "def", tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("changes", "targets", "message"),
    [
        (
            {"environment": {"A": "one\ntwo"}},
            ("def", "dockerfile"),
            "the environment variable A, whose value has several lines",
        ),
        ({"labels": {"a b": "x"}}, ("def", "dockerfile"), "the label 'a b'"),
        ({"labels": {"": "x"}}, ("def", "dockerfile"), "the label ''"),
        (
            {"environment": {"A": "{{ x }}"}},
            ("def",),
            "{{ }}, which is one of its arguments: export A='{{ x }}'",
        ),
        ({"description": "one\n%post"}, ("def",), "in %runscript a line that begins another section: %post"),
    ],
)
def test_render_refuses_what_a_plain_file_cannot_hold(
    changes: dict[str, object], targets: tuple[str, ...], message: str, sample: SampleRecipe, tmp_path: Path
) -> None:
    sample.recipe(**changes)
    for target in ("def", "dockerfile"):
        if target in targets:
            with pytest.raises(DefinitionError, match=re.escape(f"a plain file does not support {message}")):
                render(resolve(find_recipe(str(sample.path))), target, tmp_path / target)
            assert not (tmp_path / target).exists()
        else:
            assert render(resolve(find_recipe(str(sample.path))), target, tmp_path / target).is_file()


def test_rendered_script_of_the_environment(sample: SampleRecipe, tmp_path: Path) -> None:
    sample.write("images/roof.def", "Bootstrap: localimage\nFrom: walls.sif\n%environment\n    export A=$HOME/x\n")
    resolved = resolve(find_recipe(str(sample.path)))
    text = render(resolved, "def", tmp_path / "def").read_text()
    assert "\nexport PATH=/opt:/usr/local/sbin" in text.split("%environment\n")[1]
    assert "\n    export A=$HOME/x\n\n%runscript" in text
    text = render(resolved, "dockerfile", tmp_path / "docker").read_text()
    assert text.endswith('ENTRYPOINT ["/.singularity.d/actions/exec"]\nCMD ["/bin/sh", "/.singularity.d/runscript"]\n')
    script = (tmp_path / "docker/files/own/.singularity.d/env/90-environment.sh").read_text()
    assert script.endswith("\n    export A=$HOME/x\n")
    sample.replace("images/walls.def", "%environment\n", "%environment\n    . /etc/profile\n")
    sample.replace("images/roof.def", "%environment", "%post\n    true\n%environment")
    with pytest.raises(DefinitionError, match=r"the %post of roof above a %environment that is a script.*walls.def:14"):
        render(resolve(find_recipe(str(sample.path))), "def", tmp_path / "refused")
    sample.replace("images/walls.def", "%post\n", "%post\n    echo export A=b >>/environment\n")
    with pytest.raises(DefinitionError, match="the %post of walls, which adds to the image's environment or labels"):
        render(resolve(find_recipe(str(sample.path))), "dockerfile", tmp_path / "refused")


def test_rendered_description_of_several_lines_is_a_comment(sample: SampleRecipe, tmp_path: Path) -> None:
    sample.recipe(description="one\n\ntwo\n")
    for target in ("def", "dockerfile"):
        text = render(resolve(find_recipe(str(sample.path))), target, tmp_path / target).read_text()
        assert text.startswith("# own: one\n#\n# two\n")
        assert "one  two" in text  # the label


def test_rendered_files_of_layers_with_odd_names_need_no_quotes(sample: SampleRecipe, tmp_path: Path) -> None:
    (sample.path / "images/walls.def").rename(sample.path / "images/it's a wall.def")
    sample.replace("images/roof.def", "walls.sif", "it's a wall.sif")
    for target in ("def", "dockerfile"):
        path = render(resolve(find_recipe(str(sample.path))), target, tmp_path / target)
        (folder,) = (path.parent / "files").glob("layer-*")
        assert f"{folder.name}/0 /opt/tool.sh" in path.read_text()


def test_render_refuses_a_folder_with_files(chain: ResolvedRecipe, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("x")
    for folder in (tmp_path / "full", tmp_path / "full/mine"):
        with pytest.raises(StoreError, match="is not an empty folder; give another folder with -o"):
            render(chain, "def", folder)
    assert (tmp_path / "full/mine").read_text() == "x"
    (tmp_path / "empty").mkdir()
    assert render(chain, "def", tmp_path / "empty").is_file()


def test_files_of_a_layer_go_where_cp_puts_them_after_the_scripts_below(sample: SampleRecipe, tmp_path: Path) -> None:
    """The rendered script itself, on a folder instead of the root."""
    sample.write("files/with space", "spaced\n")
    sample.write("files/tree/it's\nso", "quoted\n")
    (sample.path / "files/tree/hollow").mkdir()
    below = (
        "echo below > /opt/data.txt; mkdir -p /opt/into /opt/empty /opt/old; ln -s into /opt/link; echo 1 > /opt/first;"
        " ln /opt/first /opt/second; ln -s 'old/end\n' /opt/dangling"
    )
    sample.replace("images/walls.def", "echo {{ word }} > /word", f"echo {{{{ word }}}} > /word; {below}")
    lines = [
        "files/data.txt /opt/data.txt",
        '"files/with space" "/opt/a b"',
        '"files/with space" /opt/into',
        "files/data.txt /opt/empty",
        "files/data.txt /opt/link",
        "files/tree /opt/old",
        "files/tree /opt/tree",
        "files/data.txt /opt/first",
        "files/data.txt /opt/dangling",
    ]
    sample.replace("images/roof.def", "files/data.txt /opt/data/", "\n    ".join(lines))
    path = render(resolve(find_recipe(str(sample.path))), "def", tmp_path / "folder")
    root = tmp_path / "root"
    (root / "opt").mkdir(parents=True)
    copy = path.parent / "files/copy.sh"
    copy.write_text(copy.read_text().replace("chown 0:0", "true"))
    post = path.read_text().split("%post\n")[1].split("\n%environment")[0].split("# layer", 1)[1]
    script = "# layer" + post.rsplit("rm -rf /.ekiben-files", 1)[0]
    script = re.sub(r"(?<=[ '])/(?=opt|word)", f"{root}/", script)
    script = script.replace("/.ekiben-files", f"{path.parent}/files").replace("-C / ", f"-C {root} ")
    subprocess.run(["sh", "-e"], input=script, text=True, check=True)
    files = {str(path.relative_to(root)): path.read_text() for path in (root / "opt").rglob("*") if path.is_file()}
    tree = {"a.txt": "a\n", "sub/b.txt": "b\n", "it's\nso": "quoted\n"}
    expected = {
        "data.txt": "data\n",
        "a b": "spaced\n",
        "into/with space": "spaced\n",
        "empty/data.txt": "data\n",
        "into/data.txt": "data\n",
        "first": "data\n",
        "second": "1\n",
        "old/end\n": "data\n",
        **{f"{folder}/{name}": text for folder in ("tree", "old/tree") for name, text in tree.items()},
    }
    assert {name: files.get(f"opt/{name}") for name in expected} == expected
    assert (root / "opt/tree/hollow").is_dir()
    assert (root / "opt/old/tree/hollow").is_dir()
    assert (root / "opt/link").is_symlink()
