"""An image as an OCI archive that `docker load` reads, too, streamed out of the store."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.errors import CorruptBlob
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, LayerHandle, Store, bind_layers
from support.sample_recipe import SampleRecipe


@pytest.fixture
def image(files_only: SampleRecipe, store: Store) -> Image:
    return build(
        BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), Progress(io.StringIO(), quiet=True))
    )


def unpacked(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return {info.name: file.read() for info in tar if (file := tar.extractfile(info))}


def test_the_archive_is_loadable_by_docker_and_oci_tools(store: Store, image: Image) -> None:
    counted = 0

    def count(size: int) -> None:
        nonlocal counted
        counted += size

    data = b"".join(oci.archive(image.config, bind_layers(store, image.layers), image.tag, on_bytes=count))
    files = unpacked(data)
    for name, content in files.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]
    (docker,) = json.loads(files["manifest.json"])
    assert docker["RepoTags"] == ["ekiben/own:latest"]
    assert files[docker["Config"]] == image.config
    config = json.loads(image.config)
    assert ["sha256:" + name.rpartition("/")[2] for name in docker["Layers"]] == config["rootfs"]["diff_ids"]
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(files["blobs/" + entry["digest"].replace(":", "/")])
    assert manifest["config"]["digest"] == image.image_id
    assert [(layer["digest"], layer["size"]) for layer in manifest["layers"]] == [
        (layer.diff_id, layer.tar_size) for layer in image.layers
    ]
    assert counted == sum(map(len, files.values()))
    assert b"".join(oci.archive(image.config, bind_layers(store, image.layers), image.tag)) == data


def test_image_config(image: Image) -> None:
    config = json.loads(image.config)
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert config["config"]["Cmd"] == ["/bin/sh", "/.singularity.d/runscript"]
    assert "EKIBEN_RECIPE=/opt/ekiben/recipe" in config["config"]["Env"]
    assert config["config"]["Env"] == sorted(config["config"]["Env"])
    assert config["config"]["Labels"]["org.opencontainers.image.title"] == "own"
    assert image.image_id == oci.digest_of(image.config)


def test_existing_layers_can_be_left_out(store: Store, image: Image) -> None:
    known = {image.layers[0].diff_id}
    files = unpacked(b"".join(oci.archive(image.config, bind_layers(store, image.layers), image.tag, leave_out=known)))
    assert "blobs/" + image.layers[0].diff_id.replace(":", "/") not in files
    assert "blobs/" + image.layers[1].diff_id.replace(":", "/") in files


def test_layout_folder_equals_the_archive(store: Store, image: Image, tmp_path: Path) -> None:
    oci.write_layout(tmp_path / "layout", image.config, bind_layers(store, image.layers), image.tag)
    files = {
        str(path.relative_to(tmp_path / "layout")): path.read_bytes()
        for path in (tmp_path / "layout").rglob("*")
        if path.is_file()
    }
    assert files == unpacked(b"".join(oci.archive(image.config, bind_layers(store, image.layers), image.tag)))


def test_a_layer_with_other_bytes_is_refused(store: Store, image: Image) -> None:
    one, other = image.layers[1], image.layers[2]
    path = store.blob_path(one.digest)
    path.chmod(0o644)
    path.write_bytes(store.blob_path(other.digest).read_bytes())
    with pytest.raises(CorruptBlob, match=one.digest):
        list(oci.layer_tar(LayerHandle(store, one)))
