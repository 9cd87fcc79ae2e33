"""Images in files as bases: what the key has of them, and which are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from ekiben.builder.bases import load_base
from ekiben.core.errors import DefinitionError, FetchError, UsageError
from ekiben.packages.host_config import PackageSources
from ekiben.resolve.render import dockerfile
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.image_files import SmallImage, digest, tar_of, write_folder, write_tar
from support.sample_recipe import SampleRecipe

Write = Callable[[Path], None]


def key(sample: SampleRecipe, agent: str, source: str) -> str:
    (sample.path / "images/ground.def").write_text(f"Bootstrap: {agent}\nFrom: {source}\n")
    return resolve(find_recipe(str(sample.path)), arch="amd64").layers[0].cache_key


def built(sample: SampleRecipe, staging: Path) -> dict[str, bytes]:
    """The files of the base's layer."""
    layer = resolve(find_recipe(str(sample.path)), arch="amd64").layers[0]
    assert layer.stage is not None
    staging.mkdir(exist_ok=True)
    entries = load_base(layer.stage.bootstrap).entries(
        layer, staging, {}, cast(PackageSources, None), lambda line: None
    )
    return {entry.path: b"".join(data or ()) for entry, data in entries if entry.kind == "file"}


def test_key_is_that_of_the_image(sample: SampleRecipe, tmp_path: Path) -> None:
    image = SmallImage()
    write_folder(sample.path / "layout", image.layout())
    write_tar(sample.path / "layout.tar", image.layout())
    write_tar(sample.path / "saved.tar", image.saved())
    (sample.path / "saved.tar.gz").write_bytes(gzip.compress(tar_of(image.saved())))
    sources = [("oci", "./layout"), ("oci-archive", "layout.tar"), ("oci-archive", "./layout.tar:small")]
    assert len({key(sample, *source) for source in sources}) == 1
    first = built(sample, tmp_path / "store")
    assert first["etc/keep"] == b"kept\n"
    assert b"export A='of the base'" in first[".singularity.d/env/10-docker2singularity.sh"]
    with pytest.raises(UsageError, match="cannot begin with an image in a file"):
        dockerfile(resolve(find_recipe(str(sample.path)), arch="amd64"))
    names = ["saved.tar", "saved.tar.gz", "saved.tar:small:1", "saved.tar:@0"]
    assert len({key(sample, "docker-archive", name) for name in names}) == 1
    assert built(sample, tmp_path / "store") == first


def _damaged(files: dict[str, bytes], name: str, data: bytes) -> dict[str, bytes]:
    (path,) = [one for one in files if one == name or files[one] == data]
    return {**files, path: files[path][:-1] + b"?"}


IMAGE = SmallImage()
OTHER = SmallImage(env=("A=other",))
TWO = json.dumps(
    [json.loads(image.saved(RepoTags=[name])["manifest.json"])[0] for image, name in ((IMAGE, "a:1"), (OTHER, "b:1"))]
).encode()


@pytest.mark.parametrize(
    ("agent", "write", "message"),
    [
        ("oci", lambda path: None, "cannot be read: No such file"),
        ("oci", lambda path: path.mkdir(), "it has no file index.json"),
        ("oci", lambda path: path.write_bytes(b""), "cannot be read: Not a directory"),
        ("oci-archive", lambda path: path.mkdir(), "cannot be read: .* not a regular file|Is a directory"),
        ("oci-archive", lambda path: path.write_bytes(b"no tar" * 1000), "it is not a tar, or damaged"),
        ("oci-archive", lambda path: path.write_bytes(b"\x1f\x8bno gzip"), "cannot be decompressed"),
        ("oci-archive", lambda path: path.write_bytes(tar_of(IMAGE.layout())[:3000]), "cut off, or damaged"),
        ("oci-archive", lambda path: write_tar(path, IMAGE.saved()), "it has no file 'index.json'"),
        ("oci-archive:other", lambda path: write_tar(path, IMAGE.layout()), "no image 'other'; named there: small"),
        ("oci-archive", lambda path: write_tar(path, SmallImage(architecture="arm64").layout()), "image for arm64"),
        (
            "oci-archive",
            lambda path: write_tar(path, _damaged(IMAGE.layout(), "", IMAGE.config)),
            "the blob sha256:.* has other bytes than its digest",
        ),
        ("docker-archive", lambda path: write_tar(path, IMAGE.layout()), "it has no file 'manifest.json'"),
        ("docker-archive:b", lambda path: write_tar(path, IMAGE.saved()), "no image 'b'; it has small:1"),
        ("docker-archive:@1", lambda path: write_tar(path, IMAGE.saved()), "no image '@1'"),
        (
            "docker-archive",
            lambda path: write_tar(path, {**IMAGE.saved(), "manifest.json": TWO}),
            "2 images; it has a:1, b:1",
        ),
        ("docker-archive", lambda path: write_tar(path, IMAGE.saved(Config=3)), "manifest.json 'images.*Config'"),
        ("docker-archive", lambda path: write_tar(path, IMAGE.saved(Layers=[])), "names 1 layers, and 0 are there"),
        (
            "docker-archive",
            lambda path: write_tar(path, IMAGE.saved(Config="../../../etc/passwd")),
            "it has no file '../../../etc/passwd'",
        ),
        (
            "docker-archive",
            lambda path: write_tar(path, {**IMAGE.saved(), "config.json": b"->/etc/passwd"}),
            "it has no file 'config.json'",
        ),
        (
            "docker-archive",
            lambda path: write_tar(path, {**IMAGE.saved(), "config.json": b"->config.json"}),
            "it has no file 'config.json'",
        ),
        (
            "docker-archive",
            lambda path: write_tar(path, {**IMAGE.saved(), "./config.json": b"{}"}),
            "it has 'config.json' twice",
        ),
    ],
)
def test_what_is_no_base_is_refused(sample: SampleRecipe, agent: str, write: Write, message: str) -> None:
    agent, _, name = agent.partition(":")
    write(sample.path / "image")
    with pytest.raises(DefinitionError, match=message) as caught:
        key(sample, agent, f"./image:{name}" if name else "./image")
    assert str(sample.path / "image") in str(caught.value)


@pytest.mark.parametrize(
    ("agent", "files", "message"),
    [
        ("docker-archive", _damaged(IMAGE.saved(), "layer0/layer.tar", b""), "layer 1 has other bytes than its digest"),
        (
            "oci-archive",
            _damaged(IMAGE.layout(), "", IMAGE.layers[0]),
            "the blob sha256:.* other bytes than its digest",
        ),
        (
            "oci-archive",
            {name: data for name, data in IMAGE.layout().items() if data != IMAGE.layers[0]},
            "it has no file",
        ),
        (
            "docker-archive",
            SmallImage(layers=[tar_of({"../../etc/passwd": b"x"})]).saved(),
            "layer 1 of the image cannot be unpacked: .*goes upwards",
        ),
    ],
)
def test_damaged_layer_is_refused(
    sample: SampleRecipe, tmp_path: Path, agent: str, files: dict[str, bytes], message: str
) -> None:
    write_tar(sample.path / "image", files)
    key(sample, agent, "./image")
    with pytest.raises(FetchError, match=message):
        built(sample, tmp_path / "store")


def test_a_layer_may_be_a_link_to_another(sample: SampleRecipe, tmp_path: Path) -> None:
    """As skopeo, and Docker for layers that are equal, write them."""
    layer = IMAGE.layers[0]
    image = SmallImage(layers=[layer, layer])
    write_tar(sample.path / "image", {**image.saved(), "layer1/layer.tar": b"->../layer0/layer.tar"})
    key(sample, "docker-archive", "./image")
    assert built(sample, tmp_path / "store")["etc/keep"] == b"kept\n"


def test_another_image_under_the_name_is_another_key(sample: SampleRecipe) -> None:
    keys = set()
    for image in (IMAGE, OTHER):
        write_tar(sample.path / "image", image.saved())
        keys.add(key(sample, "docker-archive", "./image"))
    assert len(keys) == 2
    assert digest(IMAGE.config) != digest(OTHER.config)
