"""The SBOM of an image, CycloneDX 1.6 as JSON: packages with their origin, layer and licence.

Everything is read out of the image itself, so an image of the store, its SIF and its published copy have the same SBOM,
byte for byte, wherever it is made; its serial number is the hash of its content, its time the image's. What is there:

    metadata.component   the image: its id, its SIF's UUID, the stack, its base (agent, reference, digest), the layers
                         with their keys and diff_ids, drift
    components           the distribution; Debian's packages, as dpkg has them; Python's, as their METADATA has them
    dependencies         Debian's Depends and Pre-Depends, Python's Requires-Dist, as far as installed
    properties           ekiben:layer    the layer that brought a package in this version ekiben:incomplete    of the
                         image: why packages may be missing here ekiben:drift    the version that was locked, where
                         another one was installed ekiben:locked:sha256    hashes of the files that the lock allows (one
                         of them was installed) ekiben:compiled:…       of a wheel that a build stage made: cache_key
                         (see ekiben wheels list); torch, cuda, python, cxx11_abi, capabilities, compilers when it is
                         compiled for GPUs. Its source is its pedigree's ancestor, or commit
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Commit, Component, ComponentType, Pedigree
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement, LicenseExpression
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement

from ekiben.core.checked import Fields, parse_json
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.formats.sif import read_sif, sif_header
from ekiben.formats.users import users_partition
from ekiben.inspect._records import published_layers
from ekiben.inspect.image_info import ImageInfo, config_of, image_info, layers_of
from ekiben.inspect.image_reader import (
    DebianPackage,
    ImageReader,
    PythonPackage,
    broken_packages,
    debian_packages,
    open_image,
    open_layers,
    python_packages,
)
from ekiben.inspect.licenses import debian_licenses, is_id, is_license_expression, python_licenses
from ekiben.inspect.metadata import CompiledWheel
from ekiben.packages.installed import DPKG_STATUS, plain_name
from ekiben.spec.stack import read_pins
from ekiben.store import Image, Store, StoredLayer

_IMAGE = "image"
_COMPILED = ("torch", "cuda", "python", "cxx11_abi", "capabilities", "compilers", "cache_key")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def sbom_of(name: str, store: Store, progress: Progress) -> str:
    """Return the SBOM of an image of the store, of a SIF, or of a published image by its record. Raises UsageError,
    StoreError, VerifyError."""
    known: Sequence[StoredLayer] = ()
    if name.endswith(".json"):
        sif, known = published_layers(Path(name))
        name = str(sif)
    with open_image(name, store) as image:
        return write_sbom(image, store, progress, known)


def sbom_of_image(image: Image, store: Store) -> str:
    """Return the SBOM of an image just built. Raises StoreError, VerifyError."""
    with open_layers(image.name, image.layers, store, image.environment, image.arch) as reader:
        return write_sbom(reader, store, Progress(quiet=True))


def write_sbom(image: ImageReader, store: Store, progress: Progress, known: Iterable[StoredLayer] = ()) -> str:
    """Return the SBOM of an open image.

    ``known``: layers whose diff_id need not be computed. Raises StoreError, UsageError, VerifyError.
    """
    info = image_info(image)
    debian, python, locks = debian_packages(image), python_packages(image), _locks(image)
    layers = layers_of(image, info, store, progress, known)
    drift = _drift(layers)
    components = {"os": _system(info.distribution)}
    components |= {_key(item): _debian(item, image, info, layers, drift) for item in debian}
    seen = set[tuple[str, str]]()
    for item in python:  # a package of two interpreters is distinguished by its path
        same = plain_name(item.name), item.version
        components[_key(item)] = _python(item, image, info, layers, locks, item.dist_info if same in seen else "")
        seen.add(same)
    image_component = _image_component(image, info, layers, drift, DPKG_STATUS in image.tree)
    dependencies = {**_debian_dependencies(debian), **_python_dependencies(python, image)}
    dependencies[_IMAGE] = set(_roots(components, dependencies))
    refs = {name: component.bom_ref for name, component in {_IMAGE: image_component, **components}.items()}
    bom = Bom(
        serial_number=uuid.UUID(int=0),
        components=components.values(),
        metadata=BomMetaData(
            timestamp=datetime.fromtimestamp(info.epoch, UTC),
            component=image_component,
            lifecycles=[PredefinedLifecycle(LifecyclePhase.POST_BUILD)],
        ),
        dependencies=[
            Dependency(ref, [Dependency(refs[other]) for other in dependencies.get(name, ())])
            for name, ref in refs.items()
        ],
    )
    bom.metadata.tools.components.add(Component(name="ekiben", type=ComponentType.APPLICATION))
    text = JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
    serial = uuid.UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=5)
    return text.replace(f'"serialNumber": "urn:uuid:{uuid.UUID(int=0)}"', f'"serialNumber": "urn:uuid:{serial}"')


# -- the image
# ------------------------------------------------------------------------------------------------------------


def _drift(layers: Iterable[StoredLayer]) -> dict[str, str]:
    """Return package → its line of the lock mismatches."""
    return {line.split(" ", 1)[0]: line for layer in layers for line in layer.drift}


def _image_component(
    image: ImageReader, info: ImageInfo, layers: Sequence[StoredLayer], drift: Mapping[str, str], has_debian: bool
) -> Component:
    identity, hashes = read_sif(Path(image.name)).id if not layers[0].diff_id else "", list[HashType]()
    properties = [Property(name="ekiben:stack", value=info.stack)]
    properties += [Property(name=f"ekiben:base:{name}", value=value) for name, value in sorted(info.base.items())]
    if layers[0].diff_id:
        config = config_of(info, layers, image.arch)
        identity = oci.digest_of(config)
        hashes.append(HashType(alg=HashAlgorithm.SHA_256, content=identity.removeprefix("sha256:")))
        users = users_partition([layer.reader for layer in image.layers], info.epoch)
        header = sif_header([layer.digest for layer in layers], info.deffile, image.arch, info.epoch, users)
        properties.append(Property(name="ekiben:sif", value=header.id))
    for number, layer in enumerate(layers, 1):
        for field in ("name", "cache_key", "diff_id", "digest", "size"):
            if value := getattr(layer, field):
                properties.append(Property(name=f"ekiben:layer:{number:02}:{field}", value=str(value)))
    properties += [Property(name="ekiben:drift", value=line) for line in drift.values()]
    if not has_debian:  # another distribution, such as Fedora as a registry's base
        properties.append(
            Property(name="ekiben:incomplete", value=f"no {DPKG_STATUS}: what the distribution installed is not listed")
        )
    properties += [Property(name="ekiben:incomplete", value=problem) for problem in broken_packages(image)]
    return Component(
        name=info.recipe,
        type=ComponentType.CONTAINER,
        version=identity,
        bom_ref=_IMAGE,
        hashes=hashes,
        properties=properties,
        description=info.labels.get("org.opencontainers.image.description"),
    )


def _system(distribution: Mapping[str, str]) -> Component:
    return Component(
        name=distribution.get("ID", "linux"),
        version=distribution.get("VERSION_ID"),
        bom_ref="os",
        type=ComponentType.OPERATING_SYSTEM,
        description=distribution.get("PRETTY_NAME"),
    )


# -- packages
# -------------------------------------------------------------------------------------------------------------


def _package(
    package: DebianPackage | PythonPackage,
    purl: PackageURL,
    licenses: Sequence[str],
    supplier: str,
    properties: Mapping[str, str],
    **more: Any,
) -> Component:
    declared = LicenseAcknowledgement.DECLARED
    choices = [
        (
            LicenseExpression(item, acknowledgement=declared)
            if is_license_expression(licenses)
            else (
                DisjunctiveLicense(id=item, acknowledgement=declared)
                if is_id(item)
                else DisjunctiveLicense(name=item, acknowledgement=declared)
            )
        )
        for item in licenses
    ]
    return Component(
        name=package.name,
        version=package.version,
        purl=purl,
        type=ComponentType.LIBRARY,
        licenses=choices,
        supplier=OrganizationalEntity(name=supplier) if supplier else None,
        properties=[Property(name=field, value=value) for field, value in properties.items()],
        **more,
    )


def _debian(
    package: DebianPackage,
    image: ImageReader,
    info: ImageInfo,
    layers: Sequence[StoredLayer],
    drift: Mapping[str, str],
) -> Component:
    release, (source, of) = info.distribution, package.source
    system = release.get("ID", "debian")
    qualifiers = {"arch": package.architecture}
    if number := release.get("VERSION_ID") or release.get("VERSION_CODENAME"):
        qualifiers["distro"] = f"{system}-{number}"
    if (source, of) != (package.name, package.version):
        qualifiers["upstream"] = source if of == package.version else f"{source}@{of}"
    purl = PackageURL("deb", system, package.name, package.version, qualifiers)
    copyright = image.read_through_links(f"usr/share/doc/{package.name}/copyright") or b""
    properties = _layer_of(package, image, layers)
    if package.name in drift:
        properties["ekiben:drift"] = drift[package.name]
    return _package(
        package,
        purl,
        debian_licenses(copyright.decode(errors="replace")),
        package.maintainer,
        properties,
        bom_ref=str(purl),
    )


def _layer_of(
    package: DebianPackage | PythonPackage, image: ImageReader, layers: Sequence[StoredLayer]
) -> dict[str, str]:
    """Return the property that names a package's layer; none in an image of one flat partition."""
    return {"ekiben:layer": layers[package.layer].name} if len(layers) == len(image.layers) else {}


def _python(
    package: PythonPackage,
    image: ImageReader,
    info: ImageInfo,
    layers: Sequence[StoredLayer],
    locks: Locks,
    ref: str,
) -> Component:
    name, metadata = plain_name(package.name), package.metadata
    origin = next((item for item in info.compiled if plain_name(item.package) == name), None)
    purl, pedigree = PackageURL("pypi", None, name, package.version), None
    properties = _layer_of(package, image, layers)
    hashes: Sequence[str] = ()
    if locked := locks.get(name):
        version, hashes = locked
        if version != package.version:
            properties["ekiben:drift"], hashes = f"{name} {version} → {package.version}", ()
        elif len(hashes) > 1:  # the lock has hashes of wheels and of the source, and does not say which is which
            properties["ekiben:locked:sha256"], hashes = " ".join(hashes), ()
    if origin:
        purl, pedigree = _compiled_from(origin, purl)
        properties |= {
            f"ekiben:compiled:{field}": text
            for field in _COMPILED
            if (text := _format_list(origin.data.get(field, "")))
        }
    if not locked:
        hashes = _installed_from(image.read_through_links(f"{package.dist_info}/direct_url.json"))
    return _package(
        package,
        purl,
        python_licenses(metadata),
        _author(metadata),
        properties,
        description=str(metadata["Summary"] or "") or None,
        pedigree=pedigree,
        bom_ref=ref or str(purl),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=item) for item in hashes],
    )


def _format_list(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in sorted(value.items()))
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _compiled_from(origin: CompiledWheel, purl: PackageURL) -> tuple[PackageURL, Pedigree | None]:
    """Return purl and pedigree of a compiled wheel, by its repository: an index may have another of that name."""
    if commit := origin.commit:
        repository = origin.repository
        where = {"vcs_url": f"git+{repository}@{commit}"} if repository else {}
        return PackageURL("generic", None, purl.name, purl.version, where), Pedigree(
            commits=[Commit(uid=commit, url=XsUri(repository) if repository else None)]
        )
    if not origin.name:
        return purl, None
    ancestor = PackageURL("pypi", None, plain_name(origin.name), origin.version)
    return purl, Pedigree(
        ancestors=[
            Component(
                name=origin.name,
                version=origin.version,
                purl=ancestor,
                bom_ref=f"{ancestor}#source",
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=item) for item in origin.sha256],
            )
        ]
    )


def _installed_from(direct_url: bytes | None) -> list[str]:
    """Return the wheel's hash as pip wrote it: https://packaging.python.org/specifications/direct-url/"""
    with contextlib.suppress(ValueError):
        return [Fields.of(parse_json(direct_url or b"")).object("archive_info").object("hashes").hex_digest("sha256")]
    return []


def _author(metadata: Message) -> str:
    """Return the author's name without the address."""
    for field in ("Author", "Author-email", "Maintainer", "Maintainer-email"):
        author = " ".join(str(metadata[field] or "").split())
        name = re.sub(r'\s*<[^>]*>|\s*\([^)]*\)|"', "", author).strip(" ,")
        if name and "@" not in name:
            return name
    return ""


Locks = dict[str, tuple[str, list[str]]]


def _locks(image: ImageReader) -> Locks:
    texts = [
        image.read_through_links(path) or b""
        for path in sorted(image.tree)
        if path.startswith("opt/ekiben/locks/") and path.endswith(".lock")
    ]
    return {
        plain_name(name): (version, hashes)
        for text in texts
        for name, version, hashes in read_pins(text.decode(errors="replace"))
    }


# -- dependencies ------------------------------------------------------------------------------------------------------

Dependencies = dict[str, set[str]]  # by the keys of components in write_sbom()


def _debian_dependencies(packages: Sequence[DebianPackage]) -> Dependencies:
    providers: dict[str, list[str]] = {}
    for package in packages:
        for name in (package.name, *package.provides):
            providers.setdefault(name, []).append(_key(package))
    return {
        _key(package): (
            {
                other
                for choice in package.depends
                for other in next((providers[name] for name in choice if name in providers), ())
            }
            - {_key(package)}
        )
        for package in packages
    }


def _python_dependencies(packages: Sequence[PythonPackage], image: ImageReader) -> Dependencies:
    """Requires-Dist whose marker is true in the image. An extra counts where another package requires it."""
    installed = {(_site(package), plain_name(package.name)): package for package in packages}
    dependencies: Dependencies = {_key(package): set() for package in packages}
    waiting = [(package, "") for package in packages]
    done: set[tuple[str, str]] = set()
    environments = {site: _marker_environment(site, image) for site in {_site(package) for package in packages}}
    while waiting:
        package, extra = waiting.pop()
        if (_key(package), extra) in done:
            continue
        done.add((_key(package), extra))
        for line in package.metadata.get_all("Requires-Dist", []):
            with contextlib.suppress(InvalidRequirement):  # older than the specification
                requirement = Requirement(str(line))
                if requirement.marker and not requirement.marker.evaluate(
                    {**environments[_site(package)], "extra": extra}
                ):
                    continue
                if (other := installed.get((_site(package), plain_name(requirement.name)))) is not None:
                    dependencies[_key(package)] |= {_key(other)} - {_key(package)}
                    waiting += [(other, plain_name(name)) for name in requirement.extras]
    return dependencies


def _key(package: DebianPackage | PythonPackage) -> str:
    if isinstance(package, DebianPackage):
        return f"deb:{package.name}:{package.architecture}"
    return f"py:{package.dist_info}"


def _site(package: PythonPackage) -> str:
    return package.dist_info.rpartition("/")[0]


def _marker_environment(site: str, image: ImageReader) -> dict[str, str]:
    """Return the image's marker variables: packaging.python.org/specifications/dependency-specifiers/"""
    short = match[1] if (match := re.search(r"/python(\d+\.\d+)/", f"/{site}/")) else "3"
    settings = image.read_through_links(site.partition("/lib/")[0] + "/pyvenv.cfg") or b""
    full = match[1].decode() if (match := re.search(rb"^version\s*=\s*(\S+)", settings, re.MULTILINE)) else f"{short}.0"  # type: ignore[assignment]
    return {
        "python_version": short,
        "python_full_version": full,
        "implementation_version": full,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": _MACHINES.get(image.arch, image.arch),
        "platform_release": "",
        "platform_version": "",
    }


def _roots(names: Iterable[str], dependencies: Dependencies) -> list[str]:
    """Return components from which all can be reached: those that none needs, and one of each other cycle."""
    names = sorted(names)
    needed = {name for required in dependencies.values() for name in required}
    roots = [name for name in names if name not in needed]
    reached: set[str] = set()
    for start in (*roots, *names):
        if start not in reached:
            roots += [start] if start in needed else []
            waiting = [start]
            while waiting:
                if (name := waiting.pop()) not in reached:
                    reached.add(name)
                    waiting += dependencies.get(name, ())
    return roots
