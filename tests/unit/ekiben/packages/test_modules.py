"""A failed import names what brings the module."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ekiben.packages.modules import explain_import


@pytest.mark.parametrize(
    ("line", "lacks", "arguments"),
    [
        ("ModuleNotFoundError: No module named 'cv2'", "no module cv2, of the package", "opencv-python-headless"),
        ("ModuleNotFoundError: No module named 'google.protobuf'", "no module google.protobuf", "protobuf"),
        ("ModuleNotFoundError: No module named 'sentence_transformers'", "no module sentence", "sentence_transformers"),
        ("[rank0]: ModuleNotFoundError: No module named 'yaml'", "no module yaml, of the package PyYAML", "PyYAML"),
        ("ModuleNotFoundError: No module named 'trl.new'", "version of trl has no module trl.new", ""),
        (
            "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
            "no libGL.so.1",
            "--apt libgl1",
        ),
        ("OSError: libx.so.7: cannot open shared object file: No such file", "no libx.so.7", ""),
    ],
)
def test_what_an_import_lacks_is_named(line: str, lacks: str, arguments: str) -> None:
    explained = explain_import(["Traceback", line, "1 test failed"])
    assert explained is not None
    assert lacks in explained[0]
    assert explained[1] == arguments


def test_messages_are_those_of_python() -> None:
    done = subprocess.run([sys.executable, "-c", "import absent_.x"], capture_output=True, text=True, check=False)
    assert explain_import(done.stderr.splitlines()) == ("the image has no module absent_", "absent_")
    done = subprocess.run([sys.executable, "-c", "import json.absent"], capture_output=True, text=True, check=False)
    assert explain_import(done.stderr.splitlines()) == ("the image's version of json has no module json.absent", "")
    assert explain_import(["AssertionError"]) is None
