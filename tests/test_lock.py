"""Lock files, resolved by uv from wheels made here: no index is asked."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from builder.lock import _differences
from own_recipe import STACK, Done, RunCli

ROOT = Path(__file__).resolve().parent.parent


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    files = {f"{name}.py": b"", f"{info}/METADATA": "\n".join(lines).encode() + b"\n",
             f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    rows = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
            for path, data in files.items()]  # fmt: skip
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A repository of two layers, low and high, whose stack wants packages of its own folder of wheels."""
    house = tmp_path / "house"
    shutil.copytree(ROOT / "builder", house / "builder")
    shutil.copy2(ROOT / "build.py", house / "build.py")
    stack = house / "images/stacks/tiny"
    stack.mkdir(parents=True)
    (stack / "stack.yaml").write_text(json.dumps({**STACK, "arguments": {}}))
    (house / "images/low.def").write_text("Bootstrap: debootstrap\nOSVersion: bookworm\n")
    (house / "images/high.def").write_text("Bootstrap: localimage\nFrom: low.sif\n")
    (stack / "low.in").write_text("one\n")
    (stack / "high.in").write_text("two\n")
    wheels = tmp_path / "wheels"
    wheel(wheels, "one", "1.0")
    wheel(wheels, "two", "1.0", "one")
    return house


def lock(run_cli: RunCli, house: Path, *words: str, code: int = 0) -> Done:
    settings = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(house.parent / "wheels"), "UV_OFFLINE": "1"}
    return run_cli("lock", "tiny", *words, code=code, env=settings, root=house)


def test_each_layer_gets_what_the_layers_below_lack(run_cli: RunCli, house: Path) -> None:
    said = lock(run_cli, house).stdout.splitlines()
    assert said == ["images/stacks/tiny/low.lock: one (new) → 1.0", "images/stacks/tiny/high.lock: two (new) → 1.0"]
    low, high = ((house / f"images/stacks/tiny/{name}.lock").read_text() for name in ("low", "high"))
    assert low.startswith("one==1.0 \\\n    --hash=sha256:")
    assert high.startswith("two==1.0 \\\n    --hash=sha256:")
    assert "one==" not in high
    assert lock(run_cli, house).stdout == "tiny: up to date\n"
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"


def test_check_changes_nothing_and_ends_with_9(run_cli: RunCli, house: Path) -> None:
    lock(run_cli, house)
    (house / "images/stacks/tiny/low.in").write_text("one>=1\nthree\n")
    wheel(house.parent / "wheels", "three", "3.0")
    done = lock(run_cli, house, "--check", code=9)
    assert done.stdout == "images/stacks/tiny/low.lock: three (new) → 3.0\n"
    assert "1 locked versions are not what tiny's .in files resolve to today" in done.stderr
    assert "hint: build.py lock tiny" in done.stderr
    assert "three" not in (house / "images/stacks/tiny/low.lock").read_text()


def test_a_newer_version_alone_is_no_reason_to_fail_a_check(run_cli: RunCli, house: Path) -> None:
    lock(run_cli, house)
    wheel(house.parent / "wheels", "one", "2.0")
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"
    assert "one 1.0 → 2.0" in lock(run_cli, house).stdout


def test_what_cannot_be_resolved(run_cli: RunCli, house: Path) -> None:
    (house / "images/stacks/tiny/low.in").write_text("none-such\n")
    done = lock(run_cli, house, code=7)
    assert "low.in could not be resolved:" in done.stderr
    assert "none-such" in done.stderr
    assert not (house / "images/stacks/tiny/low.lock").exists()


def test_an_unknown_stack(run_cli: RunCli) -> None:
    assert "no stack 'cu13'. Did you mean 'cu130'?" in run_cli("lock", "cu13", code=3).stderr


def test_differences() -> None:
    old = "a==1 \\\n    --hash=sha256:0\nb==2 \\\n    --hash=sha256:1\n"
    assert list(_differences(old, old)) == []
    assert list(_differences(old, old.replace("a==1", "a==1.1").replace("b==2", "c==2"))) == [
        "a 1 → 1.1",
        "b 2 → (gone)",
        "c (new) → 2",
    ]
    assert list(_differences(old, old.replace("sha256:0", "sha256:9"))) == ["hashes changed"]
