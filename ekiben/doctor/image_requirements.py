"""An image's requirements: device code, CUDA, torch, glibc. They are read from its layers.

Nothing is run. A layer is read once (some seconds for one with torch), and what was found is kept in the store under
the layer's digest, or under a SIF's id.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import StoreError
from ekiben.core.files import open_regular
from ekiben.formats.layer import Entry
from ekiben.formats.sif import SifInfo, read_sif
from ekiben.formats.squashfs.reader import SquashfsReader, compression
from ekiben.gpu.device_code import DeviceCode, read_device_code
from ekiben.packages.installed import distribution_at
from ekiben.store import Store, StoredLayer

FORMAT = 2  # format of the stored result; raise it when more is read
_LIBRARY = re.compile(r"\.so(\.\d+)*$")
_COMPAT = re.compile(r"^usr/local/cuda[^/]*/compat/libcuda\.so\.(\d[\d.]*)$")
_GLIBC = re.compile(rb"GNU C Library [^\n]* release version (\d+\.\d+)")
_TORCH_CUDA = re.compile(rb"^cuda(?::[^=]*)? = '([\d.]+)'", re.MULTILINE)
_NETWORK = re.compile(r"/(libibverbs|libnccl-net)[^/]*\.so[^/]*$")
_SMALL = 8192  # a library this small has no device code
_NVIDIA = re.compile(r"/site-packages/nvidia/|/lib(cu|nv|nccl)[^/]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRequirements:
    """``libraries`` with device code by path; ``packages``: Python's, name → version; ``network``: what NCCL needs
    beside TCP (libibverbs for InfiniBand, a libnccl-net plugin for others); ``gone``: what it removes below."""

    libraries: dict[str, DeviceCode] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    glibc: str | None = None
    torch_cuda: str | None = None
    compat: str | None = None
    network: tuple[str, ...] = ()
    damaged: dict[str, str] = field(default_factory=dict)
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequirements:
    """The requirements of a whole image.

    ``cuda`` is what its torch was built for, else its CUDA runtime's version; ``compat`` the driver version of
    NVIDIA's forward compatibility package when it has one; ``partitions`` the number in its SIF, ``zstd`` whether one
    is compressed with zstd.
    """

    name: str
    size: int
    partitions: int
    arch: str
    cuda: str | None
    torch: str | None
    glibc: str | None
    compat: str | None
    network: tuple[str, ...]
    libraries: dict[str, DeviceCode]
    packages: dict[str, str]
    damaged: dict[str, str]
    zstd: bool = False

    @property
    def judged(self) -> dict[str, DeviceCode]:
        """Return the libraries whose device code decides where they run: torch's and extensions'. NVIDIA's own go with
        their CUDA version, and some of them (cuFFT) keep their code where only they find it."""
        return {path: code for path, code in self.libraries.items() if not _NVIDIA.search(path)}


def requirements_of_layers(
    name: str, layers: Sequence[StoredLayer], store: Store, arch: str, log: Callable[[str], None]
) -> ImageRequirements:
    """Return the requirements of an image in the store. Raises StoreError when a layer cannot be read."""
    requirements = []
    for layer in layers:
        key = f"facts-{layer.digest[7:]}"
        requirements.append(_kept(store, key) or _keep(store, key, _scan_blob(store, layer, log)))
    return _stacked(name, requirements, size=sum(layer.size for layer in layers), partitions=len(layers), arch=arch)


def requirements_of_sif(path: Path, store: Store, log: Callable[[str], None], *, gpu: bool = True) -> ImageRequirements:
    """Return the requirements of a SIF; not ``gpu``: without those of its files, which are not read.

    Raises StoreError when it is not a complete one.
    """
    info, size = read_sif(path), path.stat().st_size
    key = f"facts-{info.id}-{size}"
    merged = _kept(store, key) or (_keep(store, key, _scan_sif(path, info, log)) if gpu else LayerRequirements())
    requirements = _stacked(str(path), [merged], size=size, partitions=len(info.layers), arch=info.arch)
    return replace(requirements, zstd=any(compression(path, partition.offset) == "zstd" for partition in info.layers))


def _scan_blob(store: Store, layer: StoredLayer, log: Callable[[str], None]) -> LayerRequirements:
    if layer.size > 100e6:
        log(f"scanning the GPU code of layer {layer.name} (first run only)")
    try:
        with store.reader(layer.digest) as reader:
            return read_layer(reader)
    except OSError as error:
        raise StoreError(f"blob {layer.digest} cannot be read: {error.strerror}") from error


def _scan_sif(path: Path, info: SifInfo, log: Callable[[str], None]) -> LayerRequirements:
    log(f"scanning the GPU code of {path} (first run only)")
    try:
        with open_regular(path) as file:
            return _merged([read_layer(SquashfsReader(file, partition.offset)) for partition in info.layers])
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------------------------------------------------ reading


def read_layer(image: SquashfsReader) -> LayerRequirements:
    """Return the requirements of one layer. Raises StoreError when the squashfs is damaged."""
    libraries, packages, damaged, gone = dict[str, DeviceCode](), dict[str, str](), dict[str, str](), list[str]()
    glibc = torch_cuda = compat = None
    network: set[str] = set()
    for entry in image.entries():
        if match := _NETWORK.search(entry.path):
            network.add(match[1])
        if entry.kind == "whiteout":
            gone.append(entry.path)
        elif entry.kind == "dir" and (distribution := distribution_at(entry.path)):
            packages[distribution[0]] = distribution[1]
        elif entry.kind == "file":
            compat = match[1] if (match := _COMPAT.match(entry.path)) else compat
            if entry.path.endswith("/libc.so.6"):
                glibc = _search_file(image, entry.path, _GLIBC) or glibc
            elif entry.path.endswith("/torch/version.py"):
                torch_cuda = _search_file(image, entry.path, _TORCH_CUDA) or torch_cuda
            elif _may_hold_device_code(entry):
                _read_library(image, entry.path, libraries, damaged)
    return LayerRequirements(
        libraries=libraries,
        packages=packages,
        glibc=glibc,
        torch_cuda=torch_cuda,
        compat=compat,
        network=tuple(sorted(network)),
        damaged=damaged,
        gone=tuple(gone),
    )


def _search_file(image: SquashfsReader, path: str, pattern: re.Pattern[bytes]) -> str | None:
    match = pattern.search(image.read_file(path))
    return match[1].decode() if match else None


def _may_hold_device_code(entry: Entry) -> bool:
    return entry.size > _SMALL and bool(_LIBRARY.search(entry.path))


def _read_library(image: SquashfsReader, path: str, libraries: dict[str, DeviceCode], damaged: dict[str, str]) -> None:
    try:
        if code := read_device_code(image.open_file(path).read_at):
            libraries[path] = code
    except ValueError as error:
        damaged[path] = str(error)


# ------------------------------------------------------------------------------------------------------------ stacking


def _merged(layers: Iterable[LayerRequirements]) -> LayerRequirements:
    """Merge layers as an overlay does, bottom first: an upper layer removes and replaces files of lower ones."""
    libraries, packages, damaged = dict[str, DeviceCode](), dict[str, str](), dict[str, str]()
    glibc = torch_cuda = compat = None
    network: set[str] = set()
    for layer in layers:
        network |= set(layer.network)
        for mapping in (libraries, damaged):
            for path in [path for path in mapping if _is_below(path, layer.gone)]:
                del mapping[path]
        for path in layer.gone:
            if (distribution := distribution_at(path)) and packages.get(distribution[0]) == distribution[1]:
                del packages[distribution[0]]
        libraries |= layer.libraries
        packages |= layer.packages
        damaged |= layer.damaged
        glibc, compat = layer.glibc or glibc, layer.compat or compat
        torch_cuda = layer.torch_cuda or torch_cuda
    return LayerRequirements(
        libraries=libraries,
        packages=packages,
        glibc=glibc,
        torch_cuda=torch_cuda,
        compat=compat,
        network=tuple(sorted(network)),
        damaged=damaged,
    )


def _is_below(path: str, gone: Iterable[str]) -> bool:
    return any(path == removed or path.startswith(removed + "/") for removed in gone)


def _stacked(
    name: str, layers: Sequence[LayerRequirements], *, size: int, partitions: int, arch: str
) -> ImageRequirements:
    merged = _merged(layers)
    return ImageRequirements(
        name=name,
        size=size,
        partitions=partitions,
        arch=arch,
        cuda=merged.torch_cuda or _cuda_runtime(merged.packages),
        torch=merged.packages.get("torch"),
        glibc=merged.glibc,
        compat=merged.compat,
        network=merged.network,
        libraries=merged.libraries,
        packages=merged.packages,
        damaged=merged.damaged,
    )


def _cuda_runtime(packages: dict[str, str]) -> str | None:
    versions = [version for name, version in packages.items() if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name)]
    return ".".join(versions[0].split(".")[:2]) if versions else None


# ------------------------------------------------------------------------------------------------------------- keeping


def _kept(store: Store, key: str) -> LayerRequirements | None:
    record = store.check(key)
    if not record or record.get("format") != FORMAT:
        return None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        fields: dict[str, Any] = {name: value for name, value in record.items() if name != "format"}
        fields["libraries"] = {
            path: DeviceCode({tuple(held): count for held, count in fatbins})
            for path, fatbins in record["libraries"].items()
        }
        fields |= {name: tuple(record[name]) for name in ("gone", "network")}
        return LayerRequirements(**fields)
    return None


def _keep(store: Store, key: str, requirements: LayerRequirements) -> LayerRequirements:
    record = {
        "format": FORMAT,
        **{
            name: getattr(requirements, name)
            for name in ("packages", "glibc", "torch_cuda", "compat", "network", "damaged", "gone")
        },
        "libraries": {
            path: [[list(held), count] for held, count in code.fatbins.items()]
            for path, code in requirements.libraries.items()
        },
    }
    with contextlib.suppress(StoreError):  # without it, the image is scanned again next time
        if not store.is_writable():
            store.open_for_writing()
        store.put_check(key, record)
    return requirements
