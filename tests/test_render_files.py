"""The chain as one plain file: parsed again by our own reader, and by a shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from builder.chain import Chain, resolve
from builder.errors import StoreError
from builder.recipe import find_recipe, recipe_folders
from builder.render import render
from own_recipe import Own


@pytest.fixture
def chain(own: Own) -> Chain:
    return resolve(find_recipe(str(own.path)))


def test_a_dockerfile_and_its_folder(chain: Chain, tmp_path: Path) -> None:
    path = render(chain, "dockerfile", tmp_path / "context")
    text = path.read_text()
    assert path == tmp_path / "context/Dockerfile"
    assert [line for line in text.splitlines() if line.startswith(("FROM", "ADD", "COPY", "RUN", "CMD"))] == [
        "FROM scratch",
        "ADD root.tar /",
        "COPY files/walls/ /",
        "RUN --mount=type=bind,source=post/walls.sh,target=/run/post.sh \\",
        "COPY files/roof/ /",
        "COPY files/own/ /",
        'CMD ["/bin/sh", "/.singularity.d/runscript"]',
    ]
    assert "mmdebstrap --variant=minbase --include=b,a bookworm root.tar" in text
    assert 'ENV GREETING="hello"' in text
    assert 'LABEL walls.label="one"' in text
    assert (tmp_path / "context/post/walls.sh").read_text() == "    echo hello > /word\n"
    tool = tmp_path / "context/files/walls/opt/tool.sh"
    assert (tool.read_text(), tool.stat().st_mode & 0o777) == ("#!/bin/sh\necho tool\n", 0o755)
    assert (tmp_path / "context/files/own/usr/local/bin/greet").exists()


def test_a_definition_file_and_its_folder(chain: Chain, tmp_path: Path) -> None:
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
    assert ["files/walls/opt/tool.sh", "/opt/tool.sh"] in copied
    assert all((tmp_path / "folder" / source).is_file() for source, _ in copied)
    assert not [destination for _, destination in copied if destination.startswith("/.singularity.d")]


@pytest.mark.parametrize("target", ["dockerfile", "def"])
def test_every_recipe_here_renders(target: str, tmp_path: Path) -> None:
    for name in recipe_folders():
        assert render(resolve(find_recipe(name)), target, tmp_path / name).is_file()


def test_values_are_quoted(own: Own, tmp_path: Path) -> None:
    own.recipe(environment={"QUOTE": 'a "b" \\ c'}, labels={"l": "x$y"})
    chain = resolve(find_recipe(str(own.path)))
    text = render(chain, "dockerfile", tmp_path / "a").read_text()
    assert 'ENV QUOTE="a \\"b\\" \\\\ c"' in text
    assert 'LABEL l="x\\$y"' in text
    assert "export QUOTE='a \"b\" \\ c'" in render(chain, "def", tmp_path / "b").read_text()


def test_a_folder_with_something_in_it_is_left_alone(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("x")
    for place in (tmp_path / "full", tmp_path / "full/mine"):
        with pytest.raises(StoreError, match="is not an empty folder; give another folder with -o"):
            render(chain, "def", place)
    assert (tmp_path / "full/mine").read_text() == "x"
    (tmp_path / "empty").mkdir()
    assert render(chain, "def", tmp_path / "empty").is_file()
