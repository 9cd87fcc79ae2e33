"""Lock files, resolved by uv from wheels made here, and by the machine's apt-get."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from support.sample_recipe import STACK, Done, RunCli

pytestmark = pytest.mark.covers("ekiben/packages")


ROOT = Path(__file__).resolve().parents[2]
has_apt = pytest.mark.skipif(not shutil.which("apt-get") and "CI" not in os.environ, reason="needs apt-get")


def wheel(folder: Path, name: str, version: str, *depends: str) -> None:
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {need}" for need in depends),
    ]
    files = {
        f"{name}.py": b"",
        f"{info}/METADATA": "\n".join(lines).encode() + b"\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


def archive(folder: Path, **versions: str) -> None:
    """The index of a Debian archive with these packages; `core` is essential and needs `libcore`."""
    depends = {"core": "Essential: yes\nDepends: libcore\n", "tool": "Depends: libtool\n"}
    (folder / "archive").mkdir(exist_ok=True)
    (folder / "archive/Packages").write_text(
        "\n".join(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody\nPriority: optional\n"
            f"{depends.get(name, '')}Filename: ./{name}.deb\nSize: 1\nSHA256: {'0' * 64}\n"
            for name, version in {"apt": "2.0", **versions}.items()
        )
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A repository of two layers, low and high, whose stack wants packages of its own folder of wheels."""
    house = tmp_path / "house"
    shutil.copytree(ROOT / "ekiben", house / "ekiben")
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
    archive(tmp_path, core="1.0", libcore="1.0")
    return house


def lock(run_cli: RunCli, house: Path, *args: str, code: int = 0, archive: str = "./") -> Done:
    settings = {
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(house.parent / "wheels"),
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(house.parent / "uv"),
    }
    mirror = f"deb [trusted=yes] file:{house.parent}/archive {archive}"
    return run_cli("lock", "tiny", *args, "--mirror", mirror, code=code, env=settings, root=house)


def test_each_layer_locks_only_packages_missing_below(run_cli: RunCli, house: Path) -> None:
    lines = lock(run_cli, house).stdout.splitlines()
    assert lines[:2] == [
        "images/stacks/tiny/low.lock: one (new) → 1.0",
        "images/stacks/tiny/high.lock: two (new) → 1.0",
    ]
    low, high = ((house / f"images/stacks/tiny/{name}.lock").read_text() for name in ("low", "high"))
    assert low.startswith("one==1.0 \\\n    --hash=sha256:")
    assert high.startswith("two==1.0 \\\n    --hash=sha256:")
    assert "one==" not in high
    assert lock(run_cli, house).stdout == "tiny: up to date\n"
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"


@has_apt
def test_debian_packages_are_locked_by_layer(run_cli: RunCli, house: Path) -> None:
    (house / "images/high.def").write_text(
        "Bootstrap: localimage\nFrom: low.sif\n\n%post\n    apt-get update\n    apt-get install -y \\\n        tool\n"
    )
    archive(house.parent, core="1.0", libcore="1.0", tool="3.0", libtool="3.1")
    lines = lock(run_cli, house).stdout.splitlines()
    assert "images/stacks/tiny/apt.lock: [high] libtool (new) → 3.1" in lines
    path = house / "images/stacks/tiny/apt.lock"
    text = path.read_text()
    assert re.search(r"^snapshot: \d{8}T\d{6}Z$", text, re.MULTILINE)
    assert text.partition("\n\n")[2] == "[low]\napt=2.0\ncore=1.0\nlibcore=1.0\n\n[high]\nlibtool=3.1\ntool=3.0\n"

    archive(house.parent, core="1.0", libcore="1.0", tool="3.0", libtool="4.0")
    done = lock(run_cli, house, "--check", code=9)
    assert done.stdout == "images/stacks/tiny/apt.lock: [high] libtool 3.1 → 4.0\n"
    assert path.read_text() == text
    lock(run_cli, house)
    assert "libtool=4.0" in path.read_text()

    archive(house.parent, core="1.0", libcore="1.0", tool="3.0", libtool="3.1")
    with (house.parent / "archive/Packages").open("a") as stream:  # an archive that has both
        stream.write("\n" + re.search(r"Package: libtool.*", stream_text(house), re.DOTALL)[0].replace("3.1", "4.0"))  # type: ignore[index]
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"

    archive(house.parent, core="1.0", libcore="1.0")
    assert "nable to locate package tool" in lock(run_cli, house, code=7).stderr


def stream_text(house: Path) -> str:
    return (house.parent / "archive/Packages").read_text()


def for_both(house: Path) -> Path:
    """The stack, for two architectures; their archive has an index for each."""
    stack = house / "images/stacks/tiny"
    (stack / "stack.yaml").write_text(json.dumps({**STACK, "arguments": {}, "architectures": ["amd64", "arm64"]}))
    for arch in ("amd64", "arm64"):
        index = index_of(house, arch)
        index.parent.mkdir(parents=True)
        index.write_text(stream_text(house).replace("Architecture: amd64", f"Architecture: {arch}"))
    return stack


def index_of(house: Path, arch: str) -> Path:
    return house.parent / f"archive/dists/bookworm/main/binary-{arch}/Packages"


def lock_both(run_cli: RunCli, house: Path, *args: str, code: int = 0) -> Done:
    return lock(run_cli, house, *args, code=code, archive="bookworm main")


@has_apt
def test_only_what_differs_for_arm64_is_locked_beside(run_cli: RunCli, house: Path) -> None:
    stack = for_both(house)
    wheel(house.parent / "wheels", "two", "1.0", "one", "three; platform_machine == 'aarch64'")
    wheel(house.parent / "wheels", "three", "1.0")
    lines = lock_both(run_cli, house).stdout.splitlines()
    assert "images/stacks/tiny/high.arm64.lock: three (new) → 1.0" in lines
    assert sorted(path.name for path in stack.glob("*.lock")) == [
        "apt.lock",
        "high.arm64.lock",
        "high.lock",
        "low.lock",
    ]
    text, arm64 = (stack / "high.lock").read_text(), (stack / "high.arm64.lock").read_text()
    assert "three==" not in text
    assert arm64.endswith(text)
    assert "high.arm64.lock\n" in (stack / "SHA256SUMS").read_text()
    assert lock_both(run_cli, house, "--check").stdout == "tiny: up to date\n"

    # Another processor keeps amd64's versions, also where a newer one is there.
    wheel(house.parent / "wheels", "one", "2.0")
    assert lock_both(run_cli, house, "--arch", "arm64").stdout == "tiny: up to date\n"
    (stack / "high.arm64.lock").write_text("three==0.9\n")
    done = lock_both(run_cli, house, "--arch", "arm64", "--check", code=9)
    assert "images/stacks/tiny/high.arm64.lock: three 0.9 → 1.0" in done.stdout

    # What no longer differs goes.
    wheel(house.parent / "wheels", "two", "1.0", "one")
    lock_both(run_cli, house, "--keep")
    assert not (stack / "high.arm64.lock").exists()


@has_apt
def test_debian_packages_are_locked_for_each_architecture(run_cli: RunCli, house: Path) -> None:
    stack = for_both(house)
    lock_both(run_cli, house)
    assert not (stack / "apt.arm64.lock").exists()
    index_of(house, "arm64").write_text(index_of(house, "arm64").read_text().replace("Version: 1.0", "Version: 1.0+b1"))
    done = lock_both(run_cli, house, "--arch", "arm64")
    assert "images/stacks/tiny/apt.arm64.lock: [low] libcore 1.0 → 1.0+b1\n" in done.stdout
    assert "libcore=1.0\n" in (stack / "apt.lock").read_text()


def test_architecture_that_the_stack_does_not_name_is_refused(run_cli: RunCli, house: Path) -> None:
    done = lock_both(run_cli, house, "--arch", "arm64", code=2)
    assert "--arch arm64: images/stacks/tiny/stack.yaml has architectures: [amd64]" in done.stderr


def test_a_lock_edited_by_hand_is_out_of_date(run_cli: RunCli, house: Path) -> None:
    lock(run_cli, house)
    path = house / "images/stacks/tiny/high.lock"
    path.write_text(path.read_text() + "# mine\n")
    done = lock(run_cli, house, "--check", code=9)
    assert (
        done.stdout.splitlines()[-1]
        == f"images/stacks/tiny/high.lock: is not as `{sys.executable} {house}/build.py lock` left it"
    )
    lock(run_cli, house)
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"


def test_package_missing_from_the_index_is_an_error(run_cli: RunCli, house: Path) -> None:
    (house / "images/stacks/tiny/low.in").write_text("one\nspecial==1.0+cu118\n")
    wheel(house.parent / "wheels", "two", "1.0", "special")
    stdout = lock(run_cli, house).stdout
    assert "low.lock: special==1.0+cu118 is not locked: no index here has it" in stdout
    text = (house / "images/stacks/tiny/low.lock").read_text()
    assert text.startswith("# not locked: special==1.0+cu118\none==1.0")
    assert (house / "images/stacks/tiny/high.lock").read_text().startswith("two==1.0")
    wheel(house.parent / "wheels", "special", "1.0+cu118")
    lock(run_cli, house)
    text = (house / "images/stacks/tiny/low.lock").read_text()
    assert "not locked" not in text
    assert "special==1.0+cu118 \\\n    --hash=sha256:" in text


def test_torch_and_cuda_follow_the_stack(run_cli: RunCli, house: Path) -> None:
    folder = house / "images/stacks/tiny"
    (folder / "low.in").write_text("one\ntorch==2.6.0\n")
    wheel(house.parent / "wheels", "torch", "2.6.0", "nvidia-cuda-runtime-cu12")
    wheel(house.parent / "wheels", "nvidia_cuda_runtime_cu12", "12.4.127")
    stderr = lock(run_cli, house, code=3).stderr
    assert "images/stacks/tiny/stack.yaml: torch: 2.11.0, but the .in files resolve to torch 2.6.0" in stderr
    (folder / "stack.yaml").write_text(json.dumps({**STACK, "arguments": {}, "torch": "2.6.0", "cuda": "12.1"}))
    stderr = lock(run_cli, house, code=3).stderr
    assert "stack.yaml: cuda: 12.1, but torch 2.6.0 comes with nvidia-cuda-runtime-cu12 12.4.127" in stderr
    assert not (folder / "low.lock").exists()
    (folder / "stack.yaml").write_text(json.dumps({**STACK, "arguments": {}, "torch": "2.6.0", "cuda": "12.4"}))
    lock(run_cli, house)


def test_check_writes_nothing_and_exits_with_9(run_cli: RunCli, house: Path) -> None:
    lock(run_cli, house)
    (house / "images/stacks/tiny/low.in").write_text("one>=1\nthree\n")
    wheel(house.parent / "wheels", "three", "3.0")
    done = lock(run_cli, house, "--check", code=9)
    assert done.stdout.splitlines()[0] == "images/stacks/tiny/low.lock: three (new) → 3.0"
    assert "locks of tiny differ from its definitions and .in files" in done.stderr
    assert f"hint: {sys.executable} {house}/build.py lock tiny --keep" in done.stderr
    assert "three" not in (house / "images/stacks/tiny/low.lock").read_text()


def test_check_ignores_newer_versions(run_cli: RunCli, house: Path) -> None:
    lock(run_cli, house)
    wheel(house.parent / "wheels", "one", "2.0")
    assert lock(run_cli, house, "--check").stdout == "tiny: up to date\n"
    assert lock(run_cli, house, "--keep").stdout == "tiny: up to date\n"
    assert "one 1.0 → 2.0" in lock(run_cli, house).stdout


def test_unresolvable_requirements_are_an_error(run_cli: RunCli, house: Path) -> None:
    (house / "images/stacks/tiny/low.in").write_text("none-such\n")
    done = lock(run_cli, house, code=7)
    assert "low.in could not be resolved:" in done.stderr
    assert "none-such" in done.stderr
    assert not (house / "images/stacks/tiny/low.lock").exists()
