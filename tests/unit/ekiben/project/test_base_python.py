"""What is packages in the files of a base: its Python, packages, torch, constraints; nothing of it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, EkibenError
from ekiben.formats.base_config import BASE_ENVIRONMENT, BaseConfig
from ekiben.formats.layer import Entry
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.project.base_python import read_base
from ekiben.spec.base_packages import BasePackages, format_base_packages, read_base_packages
from support.fat_elf import elf, fatbin
from support.squashfs_trees import tree, write

DIGEST = "sha256:" + "a" * 64
GLIBC = b"GNU C Library (Ubuntu GLIBC 2.39-0ubuntu8) stable release version 2.39.\n"
DEBIAN = "usr/local/lib/python3.12/dist-packages"
CONDA = "opt/conda/lib/python3.11/site-packages"
Files = Mapping[str, str | bytes]

PROGRAM = b"\0 3.12\0" + b"\x003.12.7\0" + bytes(40)


def read(path: Path, files: Files, **environment: str) -> BasePackages:
    """Read a base with these files: a text that begins with "-> " is a link, programs are those in bin/."""
    config = BaseConfig(environment={"PATH": "/usr/local/bin:/usr/bin", **environment}).files()
    texts = {inside.strip("/"): data for inside, (_, data) in config.items()} | dict(files)
    entries: dict[str, Entry | tuple[Entry, bytes]] = {}
    for inside, content in texts.items():
        folders = inside.split("/")[:-1]
        entries |= {name: Entry(name, "dir") for name in ("/".join(folders[:at]) for at in range(1, len(folders) + 1))}
        if isinstance(content, str) and content.startswith("-> "):
            entries[inside] = Entry(inside, "symlink", 0o777, target=content[3:])
        else:
            data = content.encode() if isinstance(content, str) else content
            entries[inside] = Entry(inside, "file", 0o755 if "/bin/" in inside else 0o644, size=len(data)), data
    write(path / "base.squashfs", tree(*entries.values()))
    with (path / "base.squashfs").open("rb") as stream:
        return read_base(SquashfsReader(stream), DIGEST)


def package(site: str, name: str, version: str, more: str = "") -> dict[str, str]:
    return {f"{site}/{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n{more}"}


def debian(**files: str | bytes) -> Files:
    return {
        "usr/bin/python3": "-> python3.12",
        "usr/bin/python3.12": PROGRAM,
        "usr/lib/x86_64-linux-gnu/libc.so.6": GLIBC,
        "lib": "-> usr/lib",
        f"{DEBIAN}/.keep": "",
        **files,
    }


@pytest.mark.parametrize(
    ("files", "environment", "python", "version"),
    [
        (debian(), {}, "/usr/bin/python3", "3.12.7"),
        (
            debian(**{"usr/bin/python": "-> /etc/alternatives/py", "etc/alternatives/py": "-> /usr/bin/python3"}),
            {},
            "/usr/bin/python3",
            "3.12.7",
        ),
        (debian(**{"usr/bin/python3.12": b"two: \x003.12.7\x00 and \x003.12.8\0"}), {}, "/usr/bin/python3", "3.12"),
        (
            {**debian(), "opt/conda/bin/python": "-> python3.11", "opt/conda/bin/python3.11": b"\x003.11.5\0"},
            {"PATH": "/opt/conda/bin:/usr/bin"},
            "/opt/conda/bin/python",
            "3.11.5",
        ),
        (
            {**debian(), "usr/local/bin/python3": "-> python3.13", "usr/local/bin/python3.13": b"x"},
            {},
            "/usr/local/bin/python3",
            "3.13",
        ),
        (
            {**debian(), "srv/env/bin/python": "-> /usr/bin/python3", "srv/env/pyvenv.cfg": "home = /usr/bin\n"},
            {"PATH": "/srv/env/bin:/usr/bin"},
            "/srv/env/bin/python",
            "3.12.7",
        ),
        (
            {"opt/conda/bin/python3": b"\0", "opt/conda/lib/python3.10/os.py": "", "lib64/libc.so.6": GLIBC},
            {},
            "/opt/conda/bin/python3",
            "3.10",
        ),
    ],
    ids=["debian", "alternatives", "unclear", "conda", "local", "venv", "name"],
)
def test_python_is_the_first_of_the_path(
    files: Files, environment: dict[str, str], python: str, version: str, tmp_path: Path
) -> None:
    base = read(tmp_path, files, **environment)
    assert (base.python, base.version, base.libc) == (python, version, "glibc 2.39")


def test_packages_are_those_of_each_folder_that_it_imports_from(tmp_path: Path) -> None:
    files = {
        **debian(),
        **package(DEBIAN, "Torch_Thing", "1.0.0", "Requires-Dist: x\nRequires-Dist: PySocks>=1; extra == 'socks'\n"),
        **package("usr/lib/python3/dist-packages", "torch-thing", "0.9"),  # the first folder has another one
        "usr/lib/python3/dist-packages/six-1.16.0.egg-info": "Name: six\nVersion: 1.16.0\n",
        "usr/lib/python3/dist-packages/old-2.0-py3.12.egg-info/PKG-INFO": "Name: old\nVersion: 2.0\n",
        f"{DEBIAN}/own.pth": "# a remark\n/srv/more\nimport os; os.system('false')\n../../../../none\n",
        **package("srv/more", "added", "2024.1.post1"),
        **package("srv/other", "unseen", "1"),
        **package(DEBIAN, "odd", "not-a-version"),
    }
    base = read(tmp_path, files)
    assert [(item.name, item.version) for item in base.packages] == [
        ("added", "2024.1.post1"),
        ("old", "2.0"),
        ("six", "1.16.0"),
        ("torch-thing", "1.0.0"),
    ]
    assert base.packages[-1].extras == ('PySocks>=1; extra == "socks"',)
    assert "odd" in base.unused[0]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_virtual_environment_may_see_the_packages_of_its_python(is_open: bool, tmp_path: Path) -> None:
    settings = f"home = /usr/bin\ninclude-system-site-packages = {str(is_open).lower()}\n"
    files = {
        **debian(),
        "opt/venv/bin/python3": "-> /usr/bin/python3.12",
        "opt/venv/pyvenv.cfg": settings,
        **package("opt/venv/lib/python3.12/site-packages", "mine", "1"),
        **package(DEBIAN, "below", "2"),
    }
    base = read(tmp_path, files, PATH="/opt/venv/bin:/usr/bin")
    assert [item.name for item in base.packages] == (["below", "mine"] if is_open else ["mine"])


def test_torch_is_read_from_its_files(tmp_path: Path) -> None:
    files = {
        **debian(),
        f"{DEBIAN}/torch/version.py": "__version__ = '2.9.0a0+50ea.nv25.9'\ncuda: Optional[str] = '13.0'\n",
        f"{DEBIAN}/torch/lib/libtorch_cuda.so": elf(fatbin(["sm_80", "sm_90a", "compute_90"])),
    }
    base = read(tmp_path, files)
    assert (base.torch, base.cuda) == ("2.9.0a0+50ea.nv25.9", "13.0")
    assert base.device_code == ("sm_80", "sm_90a", "compute_90")


@pytest.mark.parametrize(
    ("variable", "settings"),
    [("/etc/pip/constraint.txt", ""), ("", "[global]\nconstraint = /etc/pip/constraint.txt\n")],
)
def test_constraints_are_those_of_pip(variable: str, settings: str, tmp_path: Path) -> None:
    files = {
        **debian(),
        "etc/pip.conf": settings,
        "etc/pip/constraint.txt": "# kept\nprotobuf<5  # why\nfaiss @ file:///faiss\nnumpy==1.26.4\n\n-c other.txt\n",
        **package(DEBIAN, "numpy", "1.26.4"),
    }
    base = read(tmp_path, files, PIP_CONSTRAINT=variable)
    assert [item.line for item in base.constraints] == ["protobuf<5", "numpy==1.26.4"]
    assert [item.line for item in base.limits] == ["protobuf<5"]
    assert [line.split(" is not")[0] for line in base.unused] == [
        "/etc/pip/constraint.txt:3: faiss @ file:///faiss",
        "/etc/pip/constraint.txt:6: -c other.txt",
    ]


def test_the_environment_of_a_sif_is_apptainers(tmp_path: Path) -> None:
    script = 'export PATH="/opt/conda/bin:/usr/bin"\nexport PIP_CONSTRAINT="${PIP_CONSTRAINT:-"/c.txt"}"\n'
    files = {
        **debian(),
        "opt/ekiben/base.json": "-> none",
        BASE_ENVIRONMENT.strip("/"): script,
        "opt/conda/bin/python": "-> python3.11",
        "opt/conda/bin/python3.11": b"x",
        **package(CONDA, "numpy", "1"),
        "c.txt": "a<1\n",
    }
    base = read(tmp_path, files)
    assert (base.python, base.constraints[0].line) == ("/opt/conda/bin/python", "a<1")
    assert [item.name for item in base.packages] == ["numpy"]


def test_the_list_is_kept_in_a_file(tmp_path: Path) -> None:
    base = read(tmp_path, {**debian(), **package(DEBIAN, "a", "1", "Requires-Dist: b; extra == 'x'\n")})
    (tmp_path / "x.packages.json").write_text(format_base_packages({"linux/amd64": base}))
    assert read_base_packages(tmp_path / "x.packages.json") == {"linux/amd64": base}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"etc/passwd": ""}, "has no Python 3 in /usr/local/bin"),
        ({"usr/bin/python3": "-> python3", "lib/libc.so.6": GLIBC}, "has no Python 3"),
        ({"usr/bin/python3": "-> ../../../../etc", "etc/x": ""}, "has no Python 3"),
        ({"usr/bin/python3.12": b"x", "usr/bin/python3": "-> python3.12"}, "no C library"),
        ({**debian(), f"{DEBIAN}/a-1.dist-info/METADATA": b"x" * (5 << 20)}, "more than the 4194304"),
    ],
)
def test_a_base_that_is_none_is_an_error(files: Files, message: str, tmp_path: Path) -> None:
    with pytest.raises(EkibenError, match=message):
        read(tmp_path, files)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"name": "a"', '"name": "A b"', "'platforms.linux/amd64.packages[0].name' is not"),
        ('"version": "1"', '"version": "1.x"', "Invalid version"),
        ('"python": "/usr/bin/python3"', '"python": "/usr/bin/python3; reboot"', "a path"),
        ('"libc": "glibc 2.39"', '"libc": "dietlibc"', "glibc VERSION"),
        ('"format": 1', '"format": 2', "format 2"),
        ('"constraints": []', '"constraints": [{"file": "x", "line": "--hash"}]', "is none"),
    ],
)
def test_a_damaged_list_of_packages_is_an_error(old: str, new: str, message: str, tmp_path: Path) -> None:
    base = read(tmp_path, {**debian(), **package(DEBIAN, "a", "1")})
    text = format_base_packages({"linux/amd64": base})
    assert old in text
    (tmp_path / "x.packages.json").write_text(text.replace(old, new))
    with pytest.raises(DefinitionError, match=r"x\.packages\.json: is not as .* init.* writes it") as raised:
        read_base_packages(tmp_path / "x.packages.json")
    assert message in str(raised.value)
