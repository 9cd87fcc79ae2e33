"""Find the Python of a base and what it brings: packages, torch, constraints. Nothing of the base is run.

Python is the first ``python3`` or ``python`` of the base's PATH. Its packages are those with a .dist-info or an
.egg-info in each folder that it imports from: site-packages, Debian's dist-packages, those of a virtual environment's
own Python, and folders that a .pth file adds.
"""

from __future__ import annotations

import configparser
import contextlib
import posixpath
import re
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ekiben.core.environment import DEFAULT_PATH
from ekiben.core.errors import DefinitionError
from ekiben.core.printable import single_line
from ekiben.formats.base_config import BASE, BASE_ENVIRONMENT, BaseConfig
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.gpu.device_code import read_device_code
from ekiben.project.base_files import BaseFiles
from ekiben.spec.base_packages import BasePackage, BasePackages, Constraint

# Folders of a Python that an image's own PATH need not name, before those of every PATH.
_USUAL = ("/opt/venv/bin", "/opt/conda/bin", "/opt/miniconda3/bin", "/root/miniconda3/bin", *DEFAULT_PATH.split(":"))
_PROGRAM = re.compile(r"python(3\.\d+)(?:-\w+)?")
_PATH = re.compile(r"(/[\w.+-]+)+")
_EXPORT = re.compile(r"^export (PATH|PIP_CONSTRAINT|PYTHONPATH)=(.*)$", re.MULTILINE)
_INFO = re.compile(r"(?P<name>.+?)(?:-(?P<version>[^-]+?)(?:-py3[.\d]*)?)?\.(?P<kind>dist|egg)-info")
_GLIBC = re.compile(rb"GNU C Library [^\n]{0,200} version (\d{1,3}\.\d{1,3})")
_TORCH_VERSION = re.compile(r"^__version__\s*(?::[^=\n]*)?=\s*'([^'\n]{1,80})'", re.MULTILINE)
_TORCH_CUDA = re.compile(r"^cuda\s*(?::[^=\n]*)?=\s*'(\d[\d.]{0,10})'", re.MULTILINE)
_TRIPLETS = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *(f"/usr/lib/{name}" for name in _TRIPLETS))
_PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "/root/.config/pip/pip.conf", "/root/.pip/pip.conf")
_MAX_PACKAGES = 10_000
_MAX_BINARY = 256 << 20  # bytes of an interpreter or a C library


def read_base(reader: SquashfsReader, digest: str) -> BasePackages:
    """Return what the Python of a base brings; ``digest`` is the base's.

    Raises DefinitionError where it has no Python 3, or a C library that no wheel is for; StoreError when it is damaged.
    """
    files = BaseFiles(reader)
    environment = _environment(files)
    python, real, minor = _find_python(files, environment.get("PATH", ""))
    sites = _sites(files, python, minor, environment.get("PYTHONPATH", ""))
    packages, unused = _packages(files, sites)
    constraints = list(_constraints(files, environment.get("PIP_CONSTRAINT", ""), real, unused))
    torch = next((f"{site}/torch" for site in sites if files.entry(f"{site}/torch/version.py")), "")
    if torch:
        _add_torch(files, torch, packages)
    return BasePackages(
        digest=digest,
        python=python,
        version=_full_version(files, real, minor),
        libc=_libc(files),
        packages=tuple(packages[name] for name in sorted(packages)),
        cuda=_first(_TORCH_CUDA, files.text(f"{torch}/version.py")) if torch else "",
        device_code=tuple(_device_code(files, torch, unused)) if torch else (),
        constraints=tuple(constraints),
        unused=tuple(unused),
    )


def _environment(files: BaseFiles) -> dict[str, str]:
    """Return the environment that the base's config sets, or the script that Apptainer wrote from one."""
    if record := files.read(f"/{BASE}"):
        with contextlib.suppress(ValueError):
            return dict(BaseConfig.parse(record).environment)
    environment = {}
    for name, value in _EXPORT.findall(files.text(BASE_ENVIRONMENT)):
        default = re.fullmatch(r'"\$\{\w+:-"?([^"}]*)"?\}"', value)
        environment[name] = default[1] if default else value.strip("\"'")
    return environment


# -- the interpreter
# ------------------------------------------------------------------------------------------------------


def _find_python(files: BaseFiles, path: str) -> tuple[str, str, str]:
    """Return the path of the base's Python, the file that it leads to, and its version as 3.12."""
    folders = list(dict.fromkeys([*path.split(":"), *_USUAL]))
    for folder in folders:
        for name in ("python3", "python"):
            program = f"{folder.rstrip('/')}/{name}"
            real = files.resolve(program) if _PATH.fullmatch(program) else None
            if real is None or (entry := files.entry(real)) is None or entry.kind == "dir" or not entry.mode & 0o111:
                continue
            match = _PROGRAM.fullmatch(posixpath.basename(real))
            if minor := match[1] if match else _minor_of_library(files, real):
                return program, real, minor
    raise DefinitionError(
        f"the base has no Python 3 in {', '.join(folders)}",
        hint="without Python packages, write a definition file of your own: `Bootstrap: docker`, `From:`, %post",
    )


def _minor_of_library(files: BaseFiles, real: str) -> str:
    """Return the version by the folder of the standard library beside a program that is only called python3."""
    library = f"{posixpath.dirname(posixpath.dirname(real))}/lib"
    folders = [match[1] for name in files.names(library) if (match := re.fullmatch(r"python(3\.\d+)", name))]
    return folders[0] if len(folders) == 1 else ""


def _full_version(files: BaseFiles, real: str, minor: str) -> str:
    """Return the version with its third number, where the interpreter's file or its library says one only."""
    pattern = re.compile(rb"\0(" + re.escape(minor).encode() + rb"\.\d{1,3})\+?\0")
    prefix = posixpath.dirname(posixpath.dirname(real))
    libraries = [f"{folder}/libpython{minor}.so.1.0" for folder in (f"{prefix}/lib", *_LIBRARIES)]
    for path in (real, *libraries):
        entry = files.entry(path)
        if entry is None or entry.size > _MAX_BINARY:
            continue
        versions = {match for block in files.blocks(path) for match in pattern.findall(block)}
        if len(versions) == 1:
            return str(versions.pop().decode())
    return minor


def _libc(files: BaseFiles) -> str:
    for folder in _LIBRARIES:
        entry = files.entry(f"{folder}/libc.so.6")
        if entry is None or entry.size > _MAX_BINARY:
            continue
        for block in files.blocks(f"{folder}/libc.so.6", overlap=512):
            if match := _GLIBC.search(block):
                return f"glibc {match[1].decode()}"
    if any(name.startswith("ld-musl-") for name in files.names("/lib")):
        return "musl"
    raise DefinitionError(
        f"the base has no C library that wheels are made for: neither libc.so.6 in {', '.join(_LIBRARIES)}, nor musl"
    )


# -- its packages
# ------------------------------------------------------------------------------------------------------


def _sites(files: BaseFiles, python: str, minor: str, python_path: str) -> list[str]:
    """Return the folders that it imports packages from, the first one first."""
    sites: list[str] = []
    program = python
    for _ in range(4):  # a virtual environment of a virtual environment's Python, at most
        prefix = posixpath.dirname(posixpath.dirname(program))
        settings = files.text(f"{prefix}/pyvenv.cfg")
        if not settings:
            program = files.resolve(program) or program
            sites += _sites_of(posixpath.dirname(posixpath.dirname(program)), minor)
            break
        sites += _sites_of(prefix, minor)
        home = _first(re.compile(r"^home\s*=\s*(/\S*)", re.MULTILINE), settings)
        if not home or not re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE):
            break
        program = f"{home}/{posixpath.basename(program)}"
    sites = [*filter(None, python_path.split(":")), *sites]
    for site in list(sites):
        sites += _added_folders(files, site)
    known: dict[str, str] = {}
    for site in sites:
        if (real := files.resolve(site)) and files.is_folder(real):
            known.setdefault(real, site)
    return list(known)


def _sites_of(prefix: str, minor: str) -> list[str]:
    """Return the folders of packages of a Python below ``prefix``: its own, and those of Debian's."""
    library = f"lib/python{minor}"
    sites = [f"{prefix}/{library}/site-packages", f"{prefix}/lib64/python{minor}/site-packages"]
    if prefix in ("/usr", "/"):
        debian = [
            f"/usr/local/{library}/dist-packages",
            "/usr/lib/python3/dist-packages",
            f"/usr/{library}/dist-packages",
        ]
        return [*debian, *sites, f"/usr/local/{library}/site-packages"]
    return [*sites, f"{prefix}/{library}/dist-packages"]


def _added_folders(files: BaseFiles, site: str) -> Iterator[str]:
    """Yield the folders that .pth files of a folder add; what they import is not run."""
    for name in files.names(site):
        if name.endswith(".pth"):
            for line in files.text(f"{site}/{name}").splitlines()[:1000]:
                if line and not line.startswith(("#", "import ", "import\t")):
                    yield posixpath.normpath(posixpath.join(site, line.strip()))


def _packages(files: BaseFiles, sites: Iterable[str]) -> tuple[dict[str, BasePackage], list[str]]:
    """Return the packages by name, of the first folder that has each, and what cannot be kept to."""
    packages, unused = dict[str, BasePackage](), list[str]()
    for site in sites:
        for name in files.names(site):
            if (match := _INFO.fullmatch(name)) is None:
                continue
            if len(packages) >= _MAX_PACKAGES:
                raise DefinitionError(f"the base has more than {_MAX_PACKAGES} Python packages")
            metadata = "METADATA" if match["kind"] == "dist" else "PKG-INFO"
            path = f"{site}/{name}/{metadata}" if files.is_folder(f"{site}/{name}") else f"{site}/{name}"
            package = _package(match["name"], match["version"] or "", files.text(path))
            if package is None:
                unused.append(single_line(f"{site}/{name}: is no package with a version that can be compared"))
            else:
                packages.setdefault(package.name, package)
    return packages, unused


def _package(name: str, version: str, text: str) -> BasePackage | None:
    metadata = HeaderParser().parsestr(text)
    name = canonicalize_name(str(metadata["Name"] or name))
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        return None
    extras = []
    for line in metadata.get_all("Requires-Dist", []):
        with contextlib.suppress(InvalidRequirement):  # older than the specification
            requirement = Requirement(str(line))
            if requirement.marker and "extra" in str(requirement.marker) and not requirement.url:
                extras.append(str(requirement))
    try:
        return BasePackage(name, str(Version(str(metadata["Version"] or version))), tuple(extras))
    except InvalidVersion:
        return None


def _add_torch(files: BaseFiles, torch: str, packages: dict[str, BasePackage]) -> None:
    """Add a torch that was built in place and has no metadata; correct a version without its local part."""
    with contextlib.suppress(InvalidVersion):
        version = str(Version(_first(_TORCH_VERSION, files.text(f"{torch}/version.py"))))
        packages.setdefault("torch", BasePackage("torch", version))


def _device_code(files: BaseFiles, torch: str, unused: list[str]) -> list[str]:
    """Return the architectures that torch's library has code for; none where it has none, or cannot be read."""
    path = f"{torch}/lib/libtorch_cuda.so"
    entry = files.entry(path)
    if entry is None or entry.kind not in ("file", "hardlink"):
        return []
    try:
        code = read_device_code(files.reader.open_file(entry.path).read_at)
    except ValueError as error:
        unused.append(single_line(f"{path}: its device code cannot be read: {error}"))
        return []
    return code.names if code else []


# -- constraints
# ------------------------------------------------------------------------------------------------------


def _constraints(files: BaseFiles, variable: str, real: str, unused: list[str]) -> Iterator[Constraint]:
    """Yield the lines of the files of constraints that the base's pip reads."""
    prefix = posixpath.dirname(posixpath.dirname(real))
    names = variable.split() or [name for path in (*_PIP_FILES, f"{prefix}/pip.conf") for name in _named(files, path)]
    for name in dict.fromkeys(names):
        if files.read(name) is None:
            unused.append(single_line(f"{name}: pip of the base reads constraints from it, and it is not there"))
        for number, line in enumerate(files.text(name).splitlines(), 1):
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if not text:
                continue
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                requirement = None
            if requirement is None or requirement.url or requirement.extras:
                unused.append(single_line(f"{name}:{number}: {text:.100} is not used: no NAME with versions"))
            elif requirement.specifier:
                yield Constraint(name, str(requirement))


def _named(files: BaseFiles, path: str) -> Iterator[str]:
    """Yield the files of constraints that a pip.conf names."""
    settings = configparser.RawConfigParser()
    with contextlib.suppress(configparser.Error):
        settings.read_string(files.text(path))
    for section in ("global", "install"):
        if settings.has_section(section):
            yield from settings.get(section, "constraint", fallback="").split()


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
