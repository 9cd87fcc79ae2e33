"""SBOMs of images made here of a few files; of real ones: tests/integration."""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.builder.build import BuildContext, Options, build
from ekiben.core.errors import UsageError, VerifyError
from ekiben.core.progress import Progress
from ekiben.inspect.sbom import sbom_of, sbom_of_image, write_sbom
from ekiben.publish.publish import PublishOptions, publish
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store, StoredLayer
from support.layered_images import SITE, Files, dist_info, image, record, status
from support.sample_recipe import RunCli, SampleRecipe, quiet, seeded

HASH = "ab" * 32
OTHER = "cd" * 32
ORIGIN = {
    "package": "flash_attn",
    "layer": "top",
    "cache_key": "k" * 64,
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.11",
    "cxx11_abi": True,
    "capabilities": ["8.0", "9.0"],
    "compilers": {"nvcc": "13.0.88", "g++-12": "12.2"},
    "source": {"name": "flash-attn", "version": "2.8", "sha256": [HASH]},
}
OF_PYTHON = {
    "package": "plain",
    "layer": "top",
    "cache_key": "p" * 64,
    "source": {"name": "plain", "version": "3", "sha256": [HASH]},
}
OF_A_REPOSITORY = {
    **ORIGIN,
    "package": "apex",
    "source": {"repository": "https://example.org/apex", "commit": "1" * 40},
}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def checked(text: str) -> dict[str, Any]:
    """An SBOM that the official schema takes, with every reference leading somewhere."""
    assert (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is None, problem
    sbom: dict[str, Any] = json.loads(text)
    refs = [item["bom-ref"] for item in (sbom["metadata"]["component"], *sbom["components"])]
    assert len(set(refs)) == len(refs)
    assert {item["ref"] for item in sbom["dependencies"]} == set(refs)
    assert {other for item in sbom["dependencies"] for other in item.get("dependsOn", ())} <= set(refs)
    return sbom


def depends_on(sbom: dict[str, Any], ref: str) -> list[str]:
    return next(item.get("dependsOn", []) for item in sbom["dependencies"] if item["ref"] == ref)


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {item["name"].removeprefix("ekiben:"): item["value"] for item in component.get("properties", ())}


def by_name(sbom: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in sbom["components"]}


def python_metadata(compiled: list[dict[str, Any]], *layers: str) -> Files:
    """What an image says of itself."""
    about = {
        "recipe": "top",
        "stack": "cu130",
        "compiled": compiled,
        "layers": [{"name": name, "cache_key": name * 8} for name in layers],
    }
    return {
        "opt/ekiben/image.json": json.dumps(about).encode(),
        ".singularity.d/labels.json": b'{"org.opencontainers.image.description": "a test"}',
        ".singularity.d/env/90-environment.sh": b"#!/bin/sh\nexport PATH=/bin\nexport WORDS='one\ntwo'\n",
        ".singularity.d/Singularity": b"# base\n",
    }


RELEASE = {"etc/os-release": b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12"\n'}
COPYRIGHT = b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: Expat\n"


def sbom_with(tmp_path: Path, stack: contextlib.ExitStack, *layers: Files, compiled: Any = ()) -> dict[str, Any]:
    names = [f"layer{number}" for number in range(len(layers))]
    one = image(tmp_path, stack, "own", {**RELEASE, **layers[0]}, *layers[1:], python_metadata(list(compiled), *names))
    return checked(write_sbom(one, Store(tmp_path / "store"), quiet()))


def test_debian_packages(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    below = status(
        record("libc6", "2.36-9+deb12u1", "Source: glibc", "Maintainer: GNU Libc <a@b>", "Depends: libgcc-s1")
    )
    above = status(
        record("libc6", "2.36-9+deb12u1", "Source: glibc", "Maintainer: GNU Libc <a@b>", "Depends: libgcc-s1"),
        record("libgcc-s1", "12", "Depends: libc6 (>= 2), nowhere"),
        record("perl", "1:5+b1", "Source: perl (1:5)", "Depends: awk | libc6, editor"),
        record("mawk", "1", "Provides: awk"),
    )
    sbom = sbom_with(tmp_path, stack, {**below, "usr/share/doc/libc6/copyright": COPYRIGHT}, above)
    found = by_name(sbom)
    assert found["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12&upstream=glibc"
    assert found["perl"]["purl"] == "pkg:deb/debian/perl@1:5%2Bb1?arch=amd64&distro=debian-12&upstream=perl%401:5"
    assert found["libc6"]["supplier"] == {"name": "GNU Libc"}
    assert [item["license"]["id"] for item in found["libc6"]["licenses"]] == ["MIT"]
    assert "licenses" not in found["perl"]
    assert [properties(found[name])["layer"] for name in ("libc6", "perl")] == ["layer0", "layer1"]
    assert depends_on(sbom, found["perl"]["purl"]) == [found["mawk"]["purl"]]
    assert depends_on(sbom, found["libc6"]["purl"]) == [found["libgcc-s1"]["purl"]]
    # perl is what nobody needs; of the circle of libc6 and libgcc-s1 one has to be named, that both are reached.
    assert depends_on(sbom, "image") == ["os", found["libc6"]["purl"], found["perl"]["purl"]]
    assert (found["debian"]["type"], found["debian"]["version"]) == ("operating-system", "12")


def test_lock_mismatches_are_properties_of_package_and_image(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    one = image(
        tmp_path,
        stack,
        "own",
        {**RELEASE, **status(record("libc6", "2"), record("bash", "5"))},
        python_metadata([], "layer0"),
    )
    part = one.layers[0]
    layer = StoredLayer(
        name="layer0",
        cache_key="k",
        diff_id="sha256:" + HASH,
        tar_size=1,
        digest=part.digest,
        size=part.size,
        executor="",
        seconds=0.0,
        inputs={},
        notes={"drift": ["libc6 1 → 2"]},
    )
    sbom = checked(write_sbom(one, Store(tmp_path / "store"), quiet(), [layer]))
    assert properties(by_name(sbom)["libc6"]) == {"layer": "layer0", "drift": "libc6 1 → 2"}
    assert "drift" not in properties(by_name(sbom)["bash"])
    whole = properties(sbom["metadata"]["component"])
    assert (whole["drift"], whole["layer:01:diff_id"]) == ("libc6 1 → 2", "sha256:" + HASH)
    assert "incomplete" not in whole


def test_sbom_of_another_distribution(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    sbom = sbom_with(tmp_path, stack, {**dist_info("idna", "3"), "var/lib/rpm/rpmdb.sqlite": b"x"})
    assert properties(sbom["metadata"]["component"])["incomplete"].startswith("no var/lib/dpkg/status")


def test_python_packages(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    lock = (
        f"torch==2 \\\n    --hash=sha256:{HASH}\nidna==3 \\\n    --hash=sha256:{OTHER} \\\n   "
        f" --hash=sha256:{HASH}\nold==1 \\\n    --hash=sha256:{HASH}\n"
    )
    sbom = sbom_with(
        tmp_path,
        stack,
        {
            **dist_info(
                "torch",
                "2",
                "License-Expression: BSD-3-Clause",
                "Summary: Tensors",
                "Author: A Team <a@b>",
                'Requires-Dist: Idna[extra]>=2; python_version >= "3.11"',
                'Requires-Dist: old; sys_platform == "win32"',
                'Requires-Dist: extra_only; extra == "asked"',
                "Requires-Dist: absent",
                "Requires-Dist: not a (requirement",
            ),
            **dist_info(
                "idna", "3", 'Requires-Dist: old; extra == "extra"', 'Requires-Dist: extra_only; extra == "other"'
            ),
            **dist_info("old", "2"),
            "opt/ekiben/locks/python.lock": lock.encode(),
        },
        dist_info("extra_only", "1", "License-Expression: MIT OR Apache-2.0"),
    )
    found = by_name(sbom)
    assert found["torch"]["purl"] == "pkg:pypi/torch@2"
    assert found["torch"]["hashes"] == [{"alg": "SHA-256", "content": HASH}]
    assert (found["torch"]["description"], found["torch"]["supplier"]) == ("Tensors", {"name": "A Team"})
    assert properties(found["idna"]) == {"layer": "layer0", "locked:sha256": f"{HASH} {OTHER}"}
    assert properties(found["old"]) == {"layer": "layer0", "drift": "old 1 → 2"}
    assert "hashes" not in found["idna"] | found["old"]
    assert [item["expression"] for item in found["extra_only"]["licenses"]] == ["MIT OR Apache-2.0"]
    assert depends_on(sbom, "pkg:pypi/torch@2") == ["pkg:pypi/idna@3"]
    assert depends_on(sbom, "pkg:pypi/idna@3") == ["pkg:pypi/old@2"]  # torch asks for the extra
    assert depends_on(sbom, "image") == ["os", "pkg:pypi/extra-only@1", "pkg:pypi/torch@2"]


def test_package_installed_twice(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    again = {
        f"usr/lib/python3/dist-packages/{path.rpartition('site-packages/')[2]}": data
        for path, data in dist_info("idna", "3").items()
    }
    sbom = sbom_with(tmp_path, stack, {**dist_info("idna", "3"), **again})
    assert [item["purl"] for item in sbom["components"] if item["name"] == "idna"] == ["pkg:pypi/idna@3"] * 2


def test_compiled_wheels(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    direct = json.dumps(
        {"url": "file:///opt/wheels/flash_attn.whl", "archive_info": {"hashes": {"sha256": OTHER}}}
    ).encode()
    files = {
        **dist_info("flash_attn", "2.8"),
        f"{SITE}/flash_attn-2.8.dist-info/direct_url.json": direct,
        **dist_info("apex", "0.1"),
        **dist_info("plain", "3", f"Summary: not {uuid.UUID(int=0)}"),
    }
    sbom = sbom_with(tmp_path, stack, files, compiled=[ORIGIN, OF_A_REPOSITORY, OF_PYTHON])
    found = by_name(sbom)
    flash, apex = found["flash_attn"], found["apex"]
    assert flash["hashes"] == [{"alg": "SHA-256", "content": OTHER}]
    (source,) = flash["pedigree"]["ancestors"]
    assert (source["purl"], source["hashes"]) == ("pkg:pypi/flash-attn@2.8", [{"alg": "SHA-256", "content": HASH}])
    assert properties(flash) == {
        "layer": "layer0",
        "compiled:torch": "2.11.0",
        "compiled:cuda": "13.0",
        "compiled:python": "3.11",
        "compiled:cxx11_abi": "true",
        "compiled:capabilities": "8.0 9.0",
        "compiled:compilers": "g++-12=12.2 nvcc=13.0.88",
        "compiled:cache_key": "k" * 64,
    }
    assert properties(found["plain"]) == {"layer": "layer0", "compiled:cache_key": "p" * 64}
    assert found["plain"]["pedigree"]["ancestors"][0]["purl"] == "pkg:pypi/plain@3"
    assert (
        found["plain"]["description"] == f"not {uuid.UUID(int=0)}"
    )  # what stands for the serial number until it is known
    assert uuid.UUID(sbom["serialNumber"]).int
    # The package index has another apex.
    assert apex["purl"] == f"pkg:generic/apex@0.1?vcs_url=git%2Bhttps://example.org/apex%40{'1' * 40}"
    assert apex["pedigree"]["commits"] == [{"uid": "1" * 40, "url": "https://example.org/apex"}]
    assert "wheels" not in json.dumps(sbom)


def test_a_broken_layer_is_named(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    with pytest.raises(VerifyError, match="layer layer0: dpkg's database is broken"):
        sbom_with(tmp_path, stack, {"var/lib/dpkg/status": b"Package: a\n"})


# ---------------------------------------------------------------------------------------- the same image, the same sbom


@pytest.fixture
def store(files_only: SampleRecipe, tmp_path: Path) -> Store:
    for number, name in enumerate(("one", "two")):
        files_only.write(
            f"files/tree/opt/venv/lib/python3.11/site-packages/{name}-{number}.dist-info/METADATA",
            f"Name: {name}\nVersion: {number}\n",
        )
    files_only.replace("images/roof.def", "files/tree /opt/tree", "files/tree/opt /opt")
    return seeded(files_only, tmp_path / "store", "ground")


@pytest.fixture
def made(files_only: SampleRecipe, store: Store) -> Image:
    return build(BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), quiet()))


def test_sbom_is_the_same_from_store_and_sif(made: Image, store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    sbom = sbom_of("own", store, quiet())
    about = checked(sbom)
    whole = about["metadata"]["component"]
    assert (whole["name"], whole["version"]) == ("own", made.image_id)
    assert whole["hashes"] == [{"alg": "SHA-256", "content": made.image_id[7:]}]
    says = properties(whole)
    assert says["sif"] == made.sif_header(store).id
    for number, layer in enumerate(made.layers, 1):
        assert says[f"layer:{number:02}:diff_id"] == layer.diff_id
        assert says.get(f"layer:{number:02}:cache_key", made.layers[-1].cache_key) == layer.cache_key
    assert about["metadata"]["timestamp"] == datetime.fromtimestamp(1_700_000_000, UTC).isoformat()
    assert uuid.UUID(about["serialNumber"]).version == 5
    assert {item["purl"] for item in about["components"] if "purl" in item} == {"pkg:pypi/one@0", "pkg:pypi/two@1"}
    assert sbom_of_image(made, store) == sbom
    make_sif(made, store, tmp_path / "own.sif", squash=False, on_bytes=lambda count: None)
    told = io.StringIO()
    assert sbom_of(str(tmp_path / "own.sif"), Store(tmp_path / "empty"), Progress(told)) == sbom
    assert "diff_id of layer roof" in told.getvalue()
    done = publish(made, store, tmp_path / "lab", PublishOptions(check=False), quiet())
    assert (done.sif.parent / done.record.sbom).read_text() == sbom
    published = run_cli("--store", tmp_path / "empty", "sbom", done.sif.with_suffix(".json"))
    assert (published.stdout, published.stderr) == (sbom, "")
    assert str(tmp_path) not in sbom
    stdout = run_cli("--store", store.root, "sbom", "own", "-o", tmp_path / "own.cdx.json").stdout
    assert stdout == f"{tmp_path}/own.cdx.json  packages: 2 Python's\n"
    assert (tmp_path / "own.cdx.json").read_text() == sbom


def test_another_image_has_another_sbom(made: Image, store: Store, files_only: SampleRecipe) -> None:
    sbom = sbom_of("own", store, quiet())
    files_only.write("files/data.txt", "new\n")
    build(BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), quiet()))
    other = sbom_of("own", store, quiet())
    assert json.loads(other)["serialNumber"] != json.loads(sbom)["serialNumber"]


def test_image_without_package_database_is_published(files_only: SampleRecipe, tmp_path: Path) -> None:
    files_only.write("files/tree/var/lib/dpkg/status", "Package: a\n")
    files_only.replace("images/roof.def", "files/tree /opt/tree", "files/tree/var /var")
    store, told = seeded(files_only, tmp_path / "store", "ground"), io.StringIO()
    made = build(BuildContext(resolve(find_recipe(str(files_only.path))), store, Options(), quiet()))
    done = publish(made, store, tmp_path / "lab", PublishOptions(check=False), Progress(told))
    assert done.record.sbom is None
    assert list(done.sif.parent.glob("*.cdx.json")) == []
    assert "no SBOM: layer roof: dpkg's database is broken" in told.getvalue()


def test_sbom_of_a_squashed_sif(made: Image, store: Store, tmp_path: Path) -> None:
    product = make_sif(made, store, tmp_path / "flat.sif", squash=True, on_bytes=lambda count: None)
    about = checked(sbom_of(product.ref, store, quiet()))
    assert properties(by_name(about)["one"]) == {}
    assert uuid.UUID(about["metadata"]["component"]["version"])
    assert properties(about["metadata"]["component"])["layer:01:cache_key"] == made.layers[0].cache_key


def test_sbom_of_unknown_names_and_files_fails(made: Image, store: Store, tmp_path: Path, run_cli: RunCli) -> None:
    stderr = run_cli("--store", store.root, "sbom", "owm", code=2).stderr
    assert "Did you mean 'own'" in stderr
    assert f"build.py --store {store.root} list names the images there" in stderr
    (tmp_path / "x.json").write_text('{"format": 1}')
    assert "not a record of a published image" in run_cli("--store", store.root, "sbom", "x.json", code=2).stderr
    assert "No such file" in run_cli("--store", store.root, "sbom", "y.json", code=2).stderr
    assert "not a SIF" in run_cli("--store", store.root, "sbom", __file__, code=6).stderr


@pytest.mark.parametrize("about", [None, b"[]", b"{}", b'{"recipe": "x", "stack": "y", "layers": [1]}'])
def test_sbom_of_a_foreign_image(tmp_path: Path, stack: contextlib.ExitStack, about: bytes | None) -> None:
    files = {**python_metadata([]), "opt/ekiben/image.json": about} if about else {"etc/x": b""}
    one = image(tmp_path, stack, "x.sif", files)
    with pytest.raises(UsageError, match=r"x\.sif was not built by Ekiben: it has no") as caught:
        write_sbom(one, Store(tmp_path / "store"), quiet())
    assert "ekiben build RECIPE" in (caught.value.hint or "")
