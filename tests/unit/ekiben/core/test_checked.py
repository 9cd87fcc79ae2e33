"""Checks of foreign values: what passes is harmless as a path or a size, and nothing but ValueError comes out."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from ekiben.core.checked import NAME, Fields, is_basename, is_digest, parse_json, read_regular
from support.hostile import NO_BASENAMES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PATHS = st.text(alphabet="ab./\\\0-: \n*", max_size=12) | st.text(max_size=300)
METHODS = (
    "text",
    "digest",
    "hex_digest",
    "name",
    "basename",
    "size",
    "number",
    "time",
    "absolute",
    "mapping",
    "texts",
    "object",
    "objects",
    "strings",
)


@for_all(PATHS)
def test_a_basename_stays_in_its_folder(value: str) -> None:
    if is_basename(value):
        path = Path(os.path.normpath(f"/shared/images/{value}"))
        assert path.parent == Path("/shared/images")
        assert path.name == value
        assert len(os.fsencode(value)) <= 255


@for_all(PATHS.map(lambda path: f"/{path}"))
def test_an_absolute_path_stays_below_a_root(value: str) -> None:
    try:
        path = Fields({"it": value}).absolute("it")
    except ValueError:
        return
    assert Path(os.path.normpath(f"/root/image{path}")).is_relative_to("/root/image")


@for_all(PATHS)
def test_a_name_is_a_basename(value: str) -> None:
    assert not NAME.fullmatch(value) or is_basename(value) or len(value) > 255


@for_all(st.text(max_size=80) | st.from_regex(r"sha256:[0-9a-f]{64}\n?", fullmatch=True))
def test_digest_matches_its_whole_pattern(value: str) -> None:
    assert is_digest(value) == (
        value.startswith("sha256:") and len(value) == 71 and set(value[7:]) <= set("0123456789abcdef")
    )


@pytest.mark.parametrize("value", [*NO_BASENAMES, None, 3])
def test_other_texts_are_not_basenames(value: object) -> None:
    assert not is_basename(value)


@pytest.mark.parametrize(
    "value", ["sha256:../../x", "sha256:", "sha256:" + "A" * 64, "sha512:" + "a" * 64, "a" * 64, None, 7]
)
def test_other_texts_are_not_digests(value: object) -> None:
    assert not is_digest(value)


@for_all(JSON, st.sampled_from(METHODS))
def test_field_of_another_type_is_refused_by_name(value: Any, method: str) -> None:
    fields = Fields.of({"it": value}, "layers[2]")
    try:
        found: Any = getattr(fields, method)("it")
    except ValueError as error:
        assert "'layers[2].it'" in str(error) or "'layers[2].it[" in str(error)
        return
    lists, objects = dict.fromkeys(("objects", "strings"), list), dict.fromkeys(("mapping", "texts"), dict)
    kinds: dict[str, Any] = {"size": int, "number": (int, float), "object": Fields, **lists, **objects}
    assert isinstance(found, kinds.get(method, str)), method
    if method == "size":
        assert 0 <= int(found) < 2**63
    if method == "time":
        datetime.fromisoformat(str(found))


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_field_is_named(method: str) -> None:
    with pytest.raises(ValueError, match="has no 'it'"):
        getattr(Fields({}), method)("it")


@for_all(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_parse_or_raise_value_error(data: bytes) -> None:
    try:
        found = parse_json(data)
    except ValueError:
        return
    assert found == json.loads(data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[" * 40 + b"]" * 40, b'{"a":' * 40 + b"1" + b"}" * 40])
def test_deep_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is nested|is not JSON"):
        parse_json(data)


@for_all(JSON)
def test_json_below_the_limits_is_unchanged(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [(b'{"a": NaN}', "NaN is not a JSON number"), (b"\xff", "is not UTF-8"), (b" " * 101, "more than 100")],
)
def test_refused_json_names_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(data, max_size=100)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file") == b"x" * 10
    for name, message in (("link", "is a link"), ("pipe", "is not a regular file")):
        with pytest.raises(ValueError, match=message):
            read_regular(tmp_path / name)
    with pytest.raises(ValueError, match="has 10 bytes, more than 9"):
        read_regular(tmp_path / "file", max_size=9)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")
