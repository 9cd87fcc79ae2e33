"""The files of images/: definitions, locks, and the scripts that install and shrink."""

from __future__ import annotations

import ast
import csv
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from builder.definition import read_definition
from builder.files import read_yaml
from builder.stack import Stack, StackFile

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "images"
DEFINITIONS = sorted(IMAGES.glob("*.def"))
STACKS = sorted(path.parent for path in IMAGES.glob("stacks/*/stack.yaml"))
PIN = re.compile(r"^([a-z0-9-]+)==(\S+) \\$", re.MULTILINE)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"images_{name}", IMAGES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_something_to_test() -> None:
    assert {path.stem for path in DEFINITIONS} >= {"base", "python", "pytorch", "huggingface"}
    assert STACKS


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.stem)
class TestDefinition:
    def test_its_shell_and_python_parse(self, path: Path) -> None:
        definition = read_definition(path, root=ROOT)
        final = definition.final
        for script in filter(None, (*(stage.post for stage in definition.stages), final.test)):
            subprocess.run(["sh", "-n"], input=script, text=True, check=True)
            # dash takes all that follows for a heredoc whose end is misspelt, runs none of it, and says nothing.
            said = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr
            assert said == ""
        for code in re.findall(r"<<'EOF'\n(.*?)^EOF$", final.test, re.MULTILINE | re.DOTALL):
            ast.parse(code)

    def test_its_test_can_fail(self, path: Path) -> None:
        test = read_definition(path, root=ROOT).final.test
        assert test.split("\n")[0].strip() == "set -e"
        assert not re.search(r"^\s*! ", test, re.MULTILINE), "set -e does not look at a command after '!'"

    def test_its_parent_and_its_files_are_here(self, path: Path) -> None:
        for stage in read_definition(path, root=ROOT).stages:
            assert stage.parent is None or (IMAGES / f"{stage.parent}.def").exists()
            here = [copy.source for copy in stage.files if copy.stage is None]
            assert [source for source in here if not (ROOT / source).exists()] == []

    def test_it_names_no_host(self, path: Path) -> None:
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

    def test_it_says_what_is_locked(self, stack: Path) -> None:
        said = yaml.safe_load((stack / "stack.yaml").read_text())
        pins = dict(pin for lock in stack.glob("*.lock") for pin in PIN.findall(lock.read_text()))
        missing = [
            line
            for lock in stack.glob("*.lock")
            for line in re.findall(r"^# not locked: (.*)$", lock.read_text(), re.MULTILINE)
        ]
        assert (
            pins.get("torch") == said["torch"] == said["arguments"]["torch"]
            or f"torch=={said['torch']}+cu118" in missing
        )
        assert said["cuda"] == said["arguments"]["cuda"]
        assert said["name"] == stack.name
        assert Path(said["arguments"]["stack"]) == stack.relative_to(ROOT)

    def test_debian_packages_are_sorted_and_once_each(self, stack: Path) -> None:
        text = (stack / "apt.lock").read_text()
        assert re.match(r"# .*\nsnapshot: \d{8}T\d{6}Z\n\n\[base\]\n", text)
        for section in text.split("\n\n")[1:]:
            title, *lines = section.splitlines()
            assert title[1:-1] in {path.stem for path in DEFINITIONS}
            assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+=\S+", line)] == []
            names = [line.split("=")[0] for line in lines]
            assert names == sorted(set(names))

    def test_locks_are_as_they_were_written(self, stack: Path) -> None:
        Stack(stack, read_yaml(stack / "stack.yaml", StackFile)).check_locks()
        listed = {line.split()[1] for line in (stack / "SHA256SUMS").read_text().splitlines()}
        assert listed == {path.name for pattern in ("*.in", "*.lock") for path in stack.glob(pattern)}


def package(site: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> None:
    """An installed distribution, its RECORD true."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    with (info / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([path, "sha256=x", len(data)] for path, data in files.items())


def record(site: Path, name: str) -> dict[str, tuple[str, str]]:
    rows = csv.reader((site / f"{name}-1.0.dist-info" / "RECORD").read_text().splitlines())
    return {path: (digest, size) for path, digest, size in rows}


def shrink(site: Path) -> str:
    script = [sys.executable, str(IMAGES / "shrink.py"), str(site)]
    return subprocess.run(script, check=True, capture_output=True, text=True).stdout


def test_shrink_removes_says_so_and_keeps_record_true(tmp_path: Path) -> None:
    package(tmp_path, "torch", {"torch/version.py": b"cuda: Optional[str] = '13.0'\n", "torch/bin/protoc": b"x",
                                "torch/testing/__init__.py": b"", "torch/include/a.h": b""})  # fmt: skip
    package(tmp_path, "bitsandbytes", {f"bitsandbytes/libbitsandbytes_{build}.so": b"12345"
                                       for build in ("cpu", "cuda128", "cuda130", "rocm72")})  # fmt: skip
    package(tmp_path, "a", {"a/__init__.py": b"", "a/tests/b/tests/test_c.py": b"x", "a/latest/d.py": b""})
    told = shrink(tmp_path)
    assert "bitsandbytes (2 paths)" in told
    assert "a/tests: " in told
    assert set(record(tmp_path, "torch")) == {"torch/version.py", "torch/testing/__init__.py", "torch/include/a.h"}
    assert set(record(tmp_path, "a")) == {"a/__init__.py", "a/latest/d.py"}
    assert {path.name for path in tmp_path.glob("bitsandbytes/*")} == {
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda130.so",
    }
    assert not (tmp_path / "a" / "tests").exists()
    assert len(shrink(tmp_path).splitlines()) == 1


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("strip")), reason="needs a C compiler and binutils")
def test_shrink_strips_large_libraries_but_not_those_of_nvidia(tmp_path: Path) -> None:
    source = tmp_path / "large.c"
    source.write_text("static char data[17 << 20] = {1};\nchar *get(void) { return data; }\nstatic int unused(void) { return 1; }\n"
                      "int (*use)(void) = unused;\n")  # fmt: skip
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", tmp_path / "large.so", source], check=True)
    data = (tmp_path / "large.so").read_bytes()
    site = tmp_path / "site"
    paths = ["a/large.so", "a/small.so", "nvidia/lib/large.so", "a.libs/large.so"]
    package(site, "a", {path: data if "large" in path else data[:1000] for path in paths})
    os.link(site / "a" / "large.so", tmp_path / "other-name.so")
    shrink(site)
    stripped = (site / "a" / "large.so").read_bytes()
    assert b".symtab" in data
    assert b".symtab" not in stripped
    assert record(site, "a")["a/large.so"][1] == str(len(stripped))
    assert record(site, "a")["a/large.so"][0] != "sha256=x"
    assert [record(site, "a")[path][0] for path in paths[1:]] == ["sha256=x"] * 3
    assert (site / "nvidia/lib/large.so").read_bytes() == (site / "a.libs/large.so").read_bytes() == data
    assert (tmp_path / "other-name.so").read_bytes() == data


def check(site: Path, lock: str) -> tuple[int, str]:
    (site / "a.lock").write_text(lock)
    script = [sys.executable, str(IMAGES / "check.py"), str(site / "a.lock")]
    done = subprocess.run(script, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_check_compares_versions_and_files(tmp_path: Path) -> None:
    package(tmp_path, "ekibentest", {"ekibentest/__init__.py": b"1 + 1\n", "ekibentest/b.py": b""})
    assert check(tmp_path, "ekibentest==1.0 \\\n    --hash=sha256:0\n") == (0, "")
    assert check(tmp_path, "ekibentest==2.0 \\\n") == (1, "ekibentest is 1.0, the lock says 2.0\n")
    assert check(tmp_path, "ekibenother==2.0 \\\n") == (1, "ekibenother 2.0 is not installed\n")
    assert check(tmp_path, "")[0] == 1
    (tmp_path / "ekibentest/__init__.py").write_text("1\n")
    (tmp_path / "ekibentest/b.py").unlink()
    code, told = check(tmp_path, "ekibentest==1.0 \\\n")
    assert code == 1
    assert "has 2 bytes, RECORD says 6" in told
    assert "b.py is missing" in told


def test_byte_code_holds_a_hash_even_where_an_import_wrote_some_before(tmp_path: Path) -> None:
    install = load("install")
    source = tmp_path / "a.py"
    source.write_text("A = {'b', 'c'}\n")
    py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert install._uncompiled(source) == [source]
    install._compile([source])
    assert install._uncompiled(source) == []


def test_byte_code_does_not_depend_on_the_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install = load("install")
    source = tmp_path / "a.py"
    source.write_text("def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e'}, __debug__\n")
    compiled = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("PYTHONOPTIMIZE", seed)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        install._compile([source])
        (path,) = (tmp_path / "__pycache__").iterdir()
        compiled.append((path.name, path.read_bytes()))
    assert compiled[0] == compiled[1]


def test_bad_arguments_are_one_line() -> None:
    for script in ("install", "shrink", "check", "source", "compile", "toolkit", "install_wheel"):
        done = subprocess.run([sys.executable, IMAGES / f"{script}.py"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: {script}.py ")
        assert done.stderr.count("\n") == 1
