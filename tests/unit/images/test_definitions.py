"""The definition files of images/ and the lock files of its stacks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ekiben.core.files import read_yaml
from ekiben.spec.definition import read_definition
from ekiben.spec.stack import Stack, StackFile
from support.image_scripts import ROOT, SCRIPTS

IMAGES = ROOT / "images"
DEFINITIONS = sorted(IMAGES.glob("*.def"))
STACKS = sorted(path.parent for path in IMAGES.glob("stacks/*/stack.yaml"))
PIN = re.compile(r"^([a-z0-9-]+)==(\S+) \\$", re.MULTILINE)


def test_definition_files_exist() -> None:
    assert {path.stem for path in DEFINITIONS} >= {"base", "python", "pytorch", "huggingface"}
    assert STACKS


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.stem)
class TestDefinition:
    def test_shell_and_python_sections_parse(self, path: Path) -> None:
        definition = read_definition(path, root=ROOT)
        final = definition.final
        for script in filter(None, (*(stage.post for stage in definition.stages), final.test)):
            subprocess.run(["sh", "-n"], input=script, text=True, check=True)
            # dash takes all that follows for a heredoc whose end is misspelt, runs none of it, and says nothing.
            stderr = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr
            assert stderr == ""
        for code in re.findall(r"<<'EOF'\n(.*?)^EOF$", final.test, re.MULTILINE | re.DOTALL):
            ast.parse(code)

    def test_test_section_can_fail(self, path: Path) -> None:
        test = read_definition(path, root=ROOT).final.test
        assert test.split("\n")[0].strip() == "set -e"
        assert not re.search(r"^\s*! ", test, re.MULTILINE), "set -e does not look at a command after '!'"

    def test_parent_and_source_files_exist(self, path: Path) -> None:
        for stage in read_definition(path, root=ROOT).stages:
            assert stage.parent is None or (IMAGES / f"{stage.parent}.def").exists()
            here = [copy.source for copy in stage.files if copy.stage is None]
            assert [source for source in here if not (ROOT / source).exists()] == []

    def test_definition_names_no_host(self, path: Path) -> None:
        assert re.findall(r"https?://[^<\s]+", path.read_text()) == []


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
class TestStack:
    def test_every_input_is_locked_with_hashes(self, stack: Path) -> None:
        inputs = sorted(stack.glob("*.in"))
        assert inputs
        for source in inputs:
            pins = PIN.findall(text := source.with_suffix(".lock").read_text())
            assert pins
            assert len(re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]) == len(pins)
            assert all("--hash=sha256:" in block for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:])
            assert "://" not in text

    def test_no_package_is_in_two_layers_of_a_chain(self, stack: Path) -> None:
        for definition in DEFINITIONS:
            chain, layer = [], definition.stem
            while layer:
                chain.append(layer)
                layer = read_definition(IMAGES / f"{layer}.def", root=ROOT).final.parent or ""
            locks = [lock for layer in chain if (lock := stack / f"{layer}.lock").exists()]
            names = [name for lock in locks for name, _ in PIN.findall(lock.read_text())]
            assert len(names) == len(set(names)), definition.stem

    def test_stack_file_matches_its_locks(self, stack: Path) -> None:
        stack_file = yaml.safe_load((stack / "stack.yaml").read_text())
        pins = dict(pin for lock in stack.glob("*.lock") for pin in PIN.findall(lock.read_text()))
        assert pins.get("torch") == stack_file["torch"] == stack_file["arguments"]["torch"]
        assert stack_file["cuda"] == stack_file["arguments"]["cuda"]
        assert stack_file["name"] == stack.name
        assert Path(stack_file["arguments"]["stack"]) == stack.relative_to(ROOT)

    def test_debian_packages_are_sorted_and_once_each(self, stack: Path) -> None:
        text = (stack / "apt.lock").read_text()
        assert re.match(r"# .*\nsnapshot: \d{8}T\d{6}Z\n\n\[base\]\n", text)
        for section in text.split("\n\n")[1:]:
            title, *lines = section.splitlines()
            assert title[1:-1] in {path.stem for path in DEFINITIONS}
            assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+=\S+", line)] == []
            names = [line.split("=")[0] for line in lines]
            assert names == sorted(set(names))

    def test_locks_are_unedited(self, stack: Path) -> None:
        Stack(stack, read_yaml(stack / "stack.yaml", StackFile)).check_locks()
        listed = {line.split()[1] for line in (stack / "SHA256SUMS").read_text().splitlines()}
        assert listed == {path.name for pattern in ("*.in", "*.lock") for path in stack.glob(pattern)}


def test_every_script_prints_one_line_of_usage_under_its_name_in_the_image() -> None:
    copies = [copy for path in DEFINITIONS for stage in read_definition(path, root=ROOT).stages for copy in stage.files]
    names = {copy.source: Path(copy.destination).name for copy in copies if copy.stage is None}
    scripts = sorted(SCRIPTS.glob("*.py"))
    assert scripts
    for script in scripts:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: {names.get(str(script.relative_to(ROOT)), script.name)} ")
        assert done.stderr.count("\n") == 1
