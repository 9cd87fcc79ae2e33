"""Options that show a folder in a container, for paths with characters that have a meaning in these options."""

from __future__ import annotations

import csv
import io

import hypothesis
import pytest
from hypothesis import strategies as st

from ekiben.core.mounts import bind_args, is_ambiguous, volume_args


def test_a_plain_path_is_bound() -> None:
    assert bind_args("/a b/c'd") == ["--bind", "/a b/c'd"]
    assert bind_args("/a", "/b", read_only=True) == ["--bind", "/a:/b:ro"]
    assert volume_args("/a", "/b") == ["--volume", "/a:/b"]


@pytest.mark.parametrize("path", ["/a:b", "/a,b", '/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_ends_early_in_these_options_is_mounted(path: str) -> None:
    assert is_ambiguous(path)
    assert [bind_args(path)[0], volume_args(path, "/x")[0]] == ["--mount", "--mount"]


@hypothesis.given(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.booleans())
def test_a_reader_of_csv_gets_the_same_path(name: str, read_only: bool) -> None:
    path = f"/a:{name}"
    for args, target in (
        (bind_args(path, read_only=read_only), "destination"),
        (volume_args(path, path, read_only=read_only), "target"),
    ):
        option, line = args
        (fields,) = csv.reader(io.StringIO(line, newline=""), strict=True)
        assert option == "--mount"
        assert fields == ["type=bind", f"source={path}", f"{target}={path}", *(["readonly"] if read_only else [])]
