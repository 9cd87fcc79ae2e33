"""Source distributions of a package index: chosen and fetched here by hash, and built in a build stage.

None of their code is run on this machine: uv is asked for a version without its dependencies, the archive is read for
its pyproject.toml, and what its build needs is unpacked from wheels.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ekiben.core.checked import Fields, is_basename
from ekiben.core.environment import ca_bundle
from ekiben.core.errors import DefinitionError, FetchError
from ekiben.core.files import digest_of, make_folders, open_regular
from ekiben.core.process import ProcessError
from ekiben.packages.git import GitSource, export_commit
from ekiben.packages.requirements import INDEXES, RequirementsFile, compile_lock, python_options, run_uv
from ekiben.spec.source_tree import SourceTree, read_tree
from ekiben.spec.sources import Source
from ekiben.spec.stack import Stack, read_pins

if TYPE_CHECKING:
    from requests import Session

_MAX_ARCHIVE = 2 << 30  # bytes of a source distribution
_MAX_UNPACKED = 16 << 30  # bytes of the files in it
_MAX_TEXT = 1 << 20  # bytes of its pyproject.toml
_MAX_MEMBERS = 200_000
_LEGACY = ("setuptools>=40.8.0", "wheel")  # PEP 518: what a source without [build-system] is built with
# Errors of the library for a damaged archive; RuntimeError: an encrypted zip, or an unknown compression.
_UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(OSError, EOFError, ValueError, RuntimeError),
)
_FORMATS = (".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class Archive:
    """A source distribution that an index has. ``url`` may be of a file."""

    name: str
    version: str
    url: str
    sha256: str

    @property
    def file(self) -> str:
        """Return its file name."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]


def choose_archive(checked: RequirementsFile, name: str, stack: Stack, versions: str = "") -> Archive:
    """Return the newest source distribution of ``name`` that the requirements of that name allow.

    ``versions`` narrows them, as ``==1.2``. Raises FetchError when there is none.
    """
    limits = (*checked.requirements, *checked.constraints)
    asked = [item for item in limits if canonicalize_name(item.name) == name]
    lines = [f"{name}{item.specifier}\n" for item in asked] or [f"{name}\n"]
    with tempfile.TemporaryDirectory(prefix="ekiben-source-") as folder:
        text, out = Path(folder, "requirements.txt"), Path(folder, "pylock.toml")
        lines = [*(f"{line}\n" for line in checked.options), *lines, f"{name}{versions}\n"]
        text.write_text("".join(lines), encoding="utf-8")
        options = ["--no-deps", "--no-binary", name, "--python-version", stack.file.python]
        options += ["--exclude-newer", checked.exclude_newer] if checked.exclude_newer else []
        try:
            run_uv(
                ["compile", "--quiet", *options, "--format", "pylock.toml", text, "--output-file", out], Path(folder)
            )
        except ProcessError as error:
            raise FetchError(f"{name}: no index has its source:\n{error.stderr.strip()}") from error
        try:
            (package,) = Fields.of(tomllib.loads(out.read_text(encoding="utf-8"))).objects("packages")
            source = package.object("sdist")
            digest = Fields.of(source.mapping("hashes")).hex_digest("sha256")
            url = source.text("url", "") or (Path(folder) / source.text("path")).resolve().as_uri()
            archive = Archive(name, package.text("version"), url, digest)
        except ValueError as error:
            raise FetchError(f"{name}: its source cannot be fetched: uv's answer {error}") from error
    if not is_basename(archive.file) or not archive.file.endswith(_FORMATS):
        raise FetchError(f"{name}: its source is {archive.file!r:.80}, which is none of {', '.join(_FORMATS)}")
    return archive


def fetch_archive(archive: Archive, cache: Path) -> Path:
    """Return the archive's file in ``cache``, by its hash; download it where it is not there.

    A password that the index needs is the user's: in ~/.netrc, or in the settings of uv that name the index. Raises
    FetchError.
    """
    target = cache / "sources" / archive.sha256
    if target.is_file():
        return target
    make_folders(target.parent)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as out:
        try:
            digest, size = hashlib.sha256(), 0
            for chunk in chunks_of(archive.url):
                digest.update(chunk)
                out.write(chunk)
                if (size := size + len(chunk)) > _MAX_ARCHIVE:
                    raise FetchError(f"{archive.file}: is larger than {_MAX_ARCHIVE >> 30} GiB")
            if digest.hexdigest() != archive.sha256:
                raise FetchError(f"{archive.file}: has the hash {digest.hexdigest()}; expected: {archive.sha256}")
            out.close()
            Path(out.name).rename(target)
        finally:
            Path(out.name).unlink(missing_ok=True)
    return target


def chunks_of(url: str) -> Iterator[bytes]:
    """Yield the bytes of a URL. Raises FetchError, whose text has no password."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        with open_regular(Path(unquote(parts.path))) as stream:
            while chunk := stream.read(1 << 20):
                yield chunk
        return
    import requests

    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    try:
        with requests.Session() as session:
            session.auth = _login(url)
            with session.get(url, stream=True, timeout=60, verify=_certificates(session)) as response:
                response.raise_for_status()
                yield from response.iter_content(1 << 20)
    except requests.HTTPError as error:
        raise FetchError(
            f"{shown}: answered {error.response.status_code}",
            hint="a password belongs in ~/.netrc, or in the URL of the index in uv's settings",
        ) from error
    except requests.RequestException as error:
        raise FetchError(f"{shown}: cannot be fetched: {type(error).__name__}") from error


def _certificates(session: Session) -> str | bool:
    bundle = ca_bundle()
    return str(bundle) if bundle else bool(session.verify)


def _login(url: str) -> tuple[str, str] | None:
    """Return the user and password of an index on the same server that the environment names; None leaves it to
    ~/.netrc.
    """
    host = urlsplit(url).netloc.rpartition("@")[2]
    for variable in INDEXES:
        for index in os.environ.get(variable, "").split():
            label, _, address = index.rpartition("=") if "://" not in index.partition("=")[0] else ("", "", index)
            parts = urlsplit(address)
            if parts.netloc.rpartition("@")[2] != host:
                continue
            prefix = f"UV_INDEX_{label.upper().replace('-', '_')}_"
            user = unquote(parts.username or "") or os.environ.get(prefix + "USERNAME", "")
            password = unquote(parts.password or "") or os.environ.get(prefix + "PASSWORD", "")
            if user or password:
                return user, password
    return None


def build_requirements(file: Path, name: str, subdirectory: str = "") -> list[str]:
    """Return what the archive's pyproject.toml says that its build needs; ``subdirectory`` is a folder in the archive's
    one folder. Raises DefinitionError.
    """
    with open_regular(file) as stream:
        text = _read_project(stream, name, subdirectory)
    try:
        project = Fields.of(tomllib.loads(text or ""))
        requires = project.object("build-system").strings("requires") if "build-system" in project else [*_LEGACY]
        return [str(Requirement(line)) for line in requires]
    except (ValueError, RecursionError, InvalidRequirement) as error:
        raise DefinitionError(f"{name}: the pyproject.toml of its source cannot be read: {error}") from error


def has_submodules(file: Path) -> bool:
    """Return whether the tar of a git commit names submodules."""
    with tarfile.open(file, "r:") as tar:
        return any(entry.name == "source/.gitmodules" for entry in tar)


def _read_project(stream: IO[bytes], name: str, subdirectory: str) -> str | None:
    """Return pyproject.toml of a folder in the archive's one folder; None where there is none."""
    is_zip, size = zipfile.is_zipfile(stream), 0
    stream.seek(0)
    try:
        if is_zip:
            with zipfile.ZipFile(stream) as archive:
                for info in archive.infolist():
                    if _is_project(info.filename, subdirectory):
                        with archive.open(info) as file:
                            return file.read(_MAX_TEXT).decode()
            return None
        with tarfile.open(fileobj=stream, mode="r:*") as tar:
            for number, entry in enumerate(tar):
                if number > _MAX_MEMBERS:
                    raise DefinitionError(f"{name}: its source has more than {_MAX_MEMBERS} files")
                if (size := size + entry.size) > _MAX_UNPACKED:
                    raise DefinitionError(f"{name}: its source unpacks to more than {_MAX_UNPACKED >> 30} GiB")
                if entry.isreg() and _is_project(entry.name, subdirectory) and (content := tar.extractfile(entry)):
                    return content.read(_MAX_TEXT).decode()
    except _UNREADABLE as error:
        raise DefinitionError(f"{name}: its source cannot be read: {error}") from error
    return None


def _is_project(path: str, subdirectory: str) -> bool:
    return path.partition("/")[2] == (f"{subdirectory}/" if subdirectory else "") + "pyproject.toml"


def lock_build(requires: Sequence[str], checked: RequirementsFile, below: str, stack: Stack) -> tuple[str, ...]:
    """Return the pins of a build's requirements, a line each with its hashes; what the layers below have is left to
    them, where that is what the build asks for.

    Raises ProcessError.
    """
    if not requires:
        return ()
    needed = RequirementsFile(
        checked.options, tuple(map(Requirement, requires)), checked.exclude_newer, installed=checked.installed
    )
    try:
        text = compile_lock(needed, stack, below=below, absent=[], old=below)
    except ProcessError:  # another setuptools than the layers': the build gets its own
        alone = replace(needed, installed=())
        text, below = compile_lock(alone, stack, below="", absent=[], old=""), ""
    known = {canonicalize_name(name) for name, _, _ in read_pins(below)}
    return tuple(
        " ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes)])
        for name, version, hashes in read_pins(text)
        if canonicalize_name(name) not in known
    )


def fetch_commit(name: str, repository: str, commit: str, cache: Path) -> Path:
    """Return a tar of a git commit's files in ``cache``; fetch it where it is not there. Raises FetchError."""
    target = cache / "sources" / f"commit-{commit}.tar"
    if not target.is_file():
        make_folders(target.parent)
        export_commit(GitSource(repository, commit), target)
    return target


def keep_folder(tree: SourceTree, cache: Path) -> Path:
    """Return the archive of a folder in ``cache``, by its hash. Raises DefinitionError."""
    make_folders(cache / "sources")
    with tempfile.NamedTemporaryFile(dir=cache / "sources", delete=False) as out:
        try:
            tree.write(out)
            out.close()
            target = cache / "sources" / digest_of(Path(out.name)).removeprefix("sha256:")
            Path(out.name).rename(target)
        finally:
            Path(out.name).unlink(missing_ok=True)
    return target


def mount_source(source: Source, stack: Stack, mount: Path, cache: Path, folder: Path | None = None) -> None:
    """Put the source, and what its build needs, into ``mount``; ``folder`` is where that of a folder lies.

    Raises FetchError, DefinitionError.
    """
    file = cache / "sources" / source.sha256
    if folder and not file.is_file() and keep_folder(read_tree(folder), cache) != file:
        raise DefinitionError(f"{folder}: was changed while {source.name} was built; build again")
    if source.commit:
        file = fetch_commit(source.name, source.repository, source.commit, cache)
    elif not file.is_file():
        nothing = RequirementsFile((), ())
        archive = choose_archive(nothing, source.name, stack, f"=={source.version}")
        if archive.sha256 != source.sha256:
            raise FetchError(
                f"{source.name} {source.version}: the index offers another source, {archive.sha256[:12]}…; locked is"
                f" {source.sha256[:12]}…"
            )
        file = fetch_archive(archive, cache)
    mount.mkdir()
    with open_regular(file) as archived, (mount / source.file).open("wb") as copy:
        shutil.copyfileobj(archived, copy)
    target = mount / "build"
    target.mkdir()
    if source.build:
        _install(source.build, stack, target)


def _install(pins: Iterable[str], stack: Stack, target: Path) -> None:
    """Unpack the wheels of ``pins`` without running any of their code."""
    with tempfile.TemporaryDirectory(prefix="ekiben-build-") as folder:
        file = Path(folder, "requirements.txt")
        file.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--link-mode", "copy", "--quiet"]
        try:
            run_uv(
                ["install", *options, *python_options(stack), "--target", target, "--requirements", file], Path(folder)
            )
        except ProcessError as error:
            raise FetchError(f"what a build needs could not be fetched:\n{error.stderr.strip()}") from error
