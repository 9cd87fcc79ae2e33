"""The evaluated environment of an image: its record, and the script that sets it where a container starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ekiben.core.environment import DEFAULT_PATH
from ekiben.formats.evaluated import EVALUATED, START, Evaluated, read_environment

VALUES = Evaluated({"A": "it's", "CACHE": "/root/x", "PATH": f"/a:{DEFAULT_PATH}"}, ("CACHE", "HOST"), True)


def test_record_is_read_as_it_was_written() -> None:
    assert Evaluated.parse(VALUES.files()["/" + EVALUATED][1]) == VALUES
    assert VALUES.fixed == {"A": "it's", "PATH": f"/a:{DEFAULT_PATH}"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"environment": {"A": 1}, "varying": []}',
        b'{"environment": {"A;id": "b"}, "varying": []}',
        b'{"environment": {}, "varying": ["$(id)"]}',
        b'{"environment": {}, "varying": [1]}',
    ],
)
def test_hostile_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not|has no"):
        Evaluated.parse(data)


def test_variables_of_the_start_are_left_out() -> None:
    data = b"HOME=/root\0A=b=c\0PWD=/\0_=/bin/env\0BASH_FUNC_f%%=() { :; }\0E=\0"
    assert read_environment(data, {"HOME": "/root"}) == {"A": "b=c", "E": ""}
    assert read_environment(data, {"HOME": "/x"})["HOME"] == "/root"


@pytest.mark.parametrize("data", [b"", b"A=b", b"A=b\0C", b"A\0", b"A=\xff\0"])
def test_other_output_than_that_of_env_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"prints more than|are no UTF-8"):
        read_environment(data, {})


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        ({}, {"A": "it's", "CACHE": "/h/x", "HOST": "here", "OTHER": None, "PATH": f"/a:{DEFAULT_PATH}"}),
        ({"A": "it's", "CACHE": "mine"}, {"A": "it's", "CACHE": "mine"}),
        ({"A": "x\ny 'z'", "OTHER": "$HOME"}, {"A": "x\ny 'z'", "OTHER": "$HOME"}),
        ({"PATH": "/bin"}, {"PATH": "/bin"}),
        ({"PATH": DEFAULT_PATH}, {"PATH": DEFAULT_PATH}),
    ],
)
def test_start_sets_what_the_caller_does_not(
    caller: dict[str, str], expected: dict[str, str | None], tmp_path: Path
) -> None:
    """The files as they are in an image, with another root."""
    (tmp_path / "env").mkdir()
    text = f'export A="it\'s" CACHE=$HOME/x HOST=here PATH=/a:{DEFAULT_PATH} OTHERS=$OTHER\n'
    (tmp_path / "env/90-environment.sh").write_text(text)
    for path, (mode, content) in VALUES.files().items():
        file = tmp_path / path.rpartition("/")[2]
        script = content.decode().replace("/.singularity.d", str(tmp_path)).replace("/opt/ekiben", str(tmp_path))
        file.write_text(script)
        file.chmod(mode)
    env = {"HOME": "/h", "A": "it's", "PATH": f"/a:{DEFAULT_PATH}", **caller}
    argv = [tmp_path / START.rpartition("/")[2], "/usr/bin/env", "-0"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0")[:-1])
    assert {name: variables.get(name) for name in expected} == expected
    assert not [name for name in variables if name.startswith(("_new", "_is", "_g"))]
