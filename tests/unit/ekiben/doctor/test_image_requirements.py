"""What an image is made of, read from squashfs layers, a SIF and the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.doctor.image_requirements import (
    ImageRequirements,
    LayerRequirements,
    read_layer,
    requirements_of_layers,
    requirements_of_sif,
)
from ekiben.formats.layer import Entry, sort_key, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, sif_id, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.store import Store, StoredLayer
from support.fat_elf import elf, fatbin

SITE = "opt/venv/lib/python3.11/site-packages"
GLIBC = b"\x7fELF" + b"x" * 100 + b"GNU C Library (Debian GLIBC 2.36-9+deb12u14) stable release version 2.36.\n"
TORCH = b"debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
LIBRARY = elf(fatbin(["sm_80", "sm_90"]), *[fatbin(["sm_90a"])] * 200)
BASE = {"usr/lib/x86_64-linux-gnu/libc.so.6": GLIBC}
FRAMEWORK = {
    f"{SITE}/torch/version.py": TORCH,
    f"{SITE}/torch/lib/libtorch_cuda.so": LIBRARY,
    f"{SITE}/torch/lib/libtorch_cpu.so": elf() + b"\0" * 9000,
    f"{SITE}/nvidia/cu13/lib/libcublas.so.13": LIBRARY,
    f"{SITE}/nvidia_cuda_runtime-13.0.96.dist-info/METADATA": b"",
    f"{SITE}/torch-2.11.0.dist-info/METADATA": b"",
}


def squashfs(path: Path, files: Mapping[str, bytes | None]) -> Path:
    """``None`` is a whiteout. Folders come by themselves."""
    entries = {"": Entry("", "dir")}
    for name, data in files.items():
        for parent in [str(parent) for parent in Path(name).parents][:-1]:
            entries[parent] = Entry(parent, "dir")
        entries[name] = Entry(name, "whiteout") if data is None else Entry(name, "file", 0o644, size=len(data))
    with path.open("w+b") as out:
        ordered = [entries[name] for name in sorted(entries, key=sort_key)]
        write_entries(
            ((entry, [files.get(entry.path) or b""] if entry.size else None) for entry in ordered), SquashfsWriter(out)
        )
    return path


def read(path: Path) -> LayerRequirements:
    with path.open("rb") as file:
        return read_layer(SquashfsReader(file))


def stored(store: Store, name: str, path: Path) -> StoredLayer:

    digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    store.open_for_writing()
    store.put_blob(path.read_bytes())
    return StoredLayer(
        name=name,
        cache_key=name,
        diff_id=digest,
        tar_size=1,
        digest=digest,
        size=path.stat().st_size,
        executor="none",
        seconds=0,
        inputs={},
    )


def image_of(tmp_path: Path, *layers: Mapping[str, bytes | None]) -> ImageRequirements:
    store = Store(tmp_path / "store")
    found = [stored(store, f"l{at}", squashfs(tmp_path / f"{at}.sqsh", files)) for at, files in enumerate(layers)]
    return requirements_of_layers("mine", found, store, "amd64", lambda _: None)


def test_requirements_of_one_layer(tmp_path: Path) -> None:
    facts = read(squashfs(tmp_path / "l", {**BASE, **FRAMEWORK, "usr/share/libx.so.txt": LIBRARY, "usr/old": None}))
    assert (facts.glibc, facts.torch_cuda, facts.compat) == ("2.36", "13.0", None)
    assert facts.packages == {"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"}
    assert set(facts.libraries) == {f"{SITE}/torch/lib/libtorch_cuda.so", f"{SITE}/nvidia/cu13/lib/libcublas.so.13"}
    assert facts.libraries[f"{SITE}/torch/lib/libtorch_cuda.so"].names == ["sm_80", "sm_90", "sm_90a"]
    assert facts.gone == ("usr/old",)
    assert facts.damaged == {}


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    facts = read(squashfs(tmp_path / "l", {"opt/x.so": LIBRARY[:-1]}))
    assert facts.libraries == {}
    assert list(facts.damaged) == ["opt/x.so"]


def test_requirements_follow_overlay_order(tmp_path: Path) -> None:
    whole = image_of(tmp_path, BASE, FRAMEWORK)
    assert (whole.cuda, whole.torch, whole.glibc, whole.partitions) == ("13.0", "2.11.0", "2.36", 2)
    assert set(whole.judged) == {f"{SITE}/torch/lib/libtorch_cuda.so"}  # cuBLAS goes with its CUDA version
    older = {
        f"{SITE}/torch-2.11.0.dist-info": None,
        f"{SITE}/torch-2.6.0.dist-info/METADATA": b"",
        f"{SITE}/torch/version.py": TORCH.replace(b"13.0", b"12.4"),
        f"{SITE}/torch/lib/libtorch_cuda.so": elf(fatbin(["sm_70"]), fatbin(["sm_70"] * 200)),
    }
    above = image_of(tmp_path, BASE, FRAMEWORK, older)
    assert (above.cuda, above.torch) == ("12.4", "2.6.0")
    assert above.judged[f"{SITE}/torch/lib/libtorch_cuda.so"].names == ["sm_70"]
    without = image_of(tmp_path, BASE, FRAMEWORK, {f"{SITE}/torch": None, f"{SITE}/torch-2.11.0.dist-info": None})
    assert (without.torch, without.judged) == (None, {})


def test_cuda_version_without_torch_is_the_runtimes(tmp_path: Path) -> None:
    facts = image_of(tmp_path, {f"{SITE}/nvidia_cuda_runtime_cu12-12.4.127.dist-info/METADATA": b""})
    assert facts.cuda == "12.4"
    assert image_of(tmp_path, BASE).cuda is None


def test_forward_compatibility_is_seen(tmp_path: Path) -> None:
    assert image_of(tmp_path, {"usr/local/cuda-13.0/compat/libcuda.so.580.65.06": b"x"}).compat == "580.65.06"


def test_what_nccl_needs_is_seen(tmp_path: Path) -> None:
    plain = {"usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0": b"x"}
    assert image_of(tmp_path, plain, {"opt/aws/lib/libnccl-net-ofi.so": b"x"}).network == ("libibverbs", "libnccl-net")
    assert image_of(tmp_path, BASE).network == ()


def test_a_layer_is_read_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    layer = stored(store, "l", squashfs(tmp_path / "l", {**BASE, **FRAMEWORK}))
    first = requirements_of_layers("mine", [layer], store, "amd64", lambda _: None)
    blob = store.blob_path(layer.digest)
    blob.chmod(0o644)
    blob.write_bytes(b"no squashfs")
    assert requirements_of_layers("mine", [layer], store, "amd64", lambda _: None) == first
    record = tmp_path / f"store/checks/facts-{layer.digest[7:]}.json"
    for spoiled in (b"{", json.dumps({**json.loads(record.read_bytes()), "format": 0}).encode()):
        record.write_bytes(spoiled)
        with pytest.raises(StoreError, match=r"not a squashfs|ends early"):
            requirements_of_layers("mine", [layer], store, "amd64", lambda _: None)
    store.drop_blob(layer.digest)
    assert not record.exists()


def test_requirements_of_a_sif(tmp_path: Path) -> None:
    """Its layers together; read again when the file is another."""
    parts = [squashfs(tmp_path / f"{at}", files) for at, files in enumerate([BASE, FRAMEWORK])]
    messages: list[str] = []
    store = Store(tmp_path / "store")
    store.open_for_writing()
    for count in (2, 1):
        partitions = [stored_partition(path) for path in parts[:count]]
        digests = [partition.digest for partition in partitions]
        write_sif(tmp_path / "x.sif", partitions, SifHeader(sif_id(digests, ""), "", "amd64", 1))
        for _ in range(2):
            facts = requirements_of_sif(tmp_path / "x.sif", store, messages.append)
            assert (facts.partitions, facts.torch) == (count, "2.11.0" if count == 2 else None)
            assert facts.size == (tmp_path / "x.sif").stat().st_size
    assert len(messages) == 2
    (tmp_path / "x.sif").write_bytes(b"no SIF")
    with pytest.raises(StoreError, match="not a SIF"):
        requirements_of_sif(tmp_path / "x.sif", store, messages.append)


def test_files_of_an_image_are_not_read_where_no_gpu_is_used(tmp_path: Path) -> None:
    partition = stored_partition(squashfs(tmp_path / "layer", {**BASE, **FRAMEWORK}))
    write_sif(tmp_path / "x.sif", [partition], SifHeader(sif_id([partition.digest], ""), "", "arm64", 1))
    messages: list[str] = []
    store = Store(tmp_path / "store")
    outline = requirements_of_sif(tmp_path / "x.sif", store, messages.append, gpu=False)
    assert (outline.arch, outline.partitions, outline.libraries, messages) == ("arm64", 1, {}, [])
    assert requirements_of_sif(tmp_path / "x.sif", store, messages.append).torch == "2.11.0"


def stored_partition(path: Path) -> Partition:

    return Partition(path, 0, path.stat().st_size, "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest())


def test_results_are_cached_where_a_store_can_be_written(tmp_path: Path) -> None:
    parts = [stored_partition(squashfs(tmp_path / "l", BASE))]
    write_sif(tmp_path / "x.sif", parts, SifHeader(sif_id([parts[0].digest], ""), "", "amd64", 1))
    for root, times in ((tmp_path / "l/store", 2), (tmp_path / "store", 1)):
        messages: list[str] = []
        for _ in range(2):
            assert requirements_of_sif(tmp_path / "x.sif", Store(root), messages.append).glibc == "2.36"
        assert len(messages) == times
