"""A SIF as a base: which files are one, and what the key has of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.formats.sif import DESCRIPTOR, DESCRIPTORS_AT, PARTITION, read_sif
from ekiben.resolve.render import dockerfile
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import SampleRecipe
from support.small_sifs import make, small_sif, squashfs

_EXTRA = DESCRIPTOR.size - 384  # where the file system of a partition stands in its descriptor


def based_on(sample: SampleRecipe, source: str) -> None:
    (sample.path / "images/ground.def").write_text(f"Bootstrap: localimage\nFrom: {source}\n")


def keys(sample: SampleRecipe, *included: Path) -> list[str]:
    return [layer.cache_key for layer in resolve(find_recipe(str(sample.path), included), arch="amd64").layers[:-1]]


def with_file_system(number: int) -> Callable[[Path], None]:
    def patch(sif: Path) -> None:
        data = bytearray(sif.read_bytes())
        at = next(at for at, item in enumerate(read_sif(sif).descriptors) if item.data_type == PARTITION)
        start = DESCRIPTORS_AT + at * DESCRIPTOR.size + _EXTRA
        data[start : start + 4] = number.to_bytes(4, "little")
        sif.write_bytes(data)

    return patch


def test_key_is_that_of_the_partitions(sample: SampleRecipe, tmp_path: Path) -> None:
    small_sif(sample.path / "a.sif")
    based_on(sample, "./a.sif")
    first = keys(sample)
    (sample.path / "a.sif").rename(sample.path / "b.sif")
    based_on(sample, f"{sample.path}/b.sif")
    assert keys(sample) == first
    outside = small_sif(tmp_path / "elsewhere.sif")
    based_on(sample, str(outside))
    with pytest.raises(DefinitionError, match=r"ground\.def:2: From: .* outside the recipe's folder") as caught:
        keys(sample)
    assert "--include" in str(caught.value.hint)
    assert keys(sample, outside) == first
    resolved = resolve(find_recipe(str(sample.path), (outside,)), arch="amd64")
    assert f"--include {outside}" in resolved.cli_args


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sif: sif.unlink(), r"a\.sif: cannot be read: No such file"),
        (lambda sif: sif.write_bytes(b"no image"), r"a\.sif: not a SIF file"),
        (lambda sif: sif.write_bytes(sif.read_bytes()[:-4096]), r"a\.sif: truncated"),
        (with_file_system(2), r"a\.sif: .* ext3"),
        (with_file_system(5), r"a\.sif: .* encrypted"),
        (with_file_system(77), r"a\.sif: .* unknown kind"),
    ],
)
def test_what_is_no_base_is_refused(sample: SampleRecipe, damage: Callable[[Path], None], message: str) -> None:
    damage(small_sif(sample.path / "a.sif"))
    based_on(sample, "./a.sif")
    with pytest.raises(DefinitionError, match=message):
        keys(sample)


def test_image_of_another_architecture_is_refused(sample: SampleRecipe) -> None:
    make(sample.path / "a.sif", squashfs(sample.path / "layer", "data"), arch="arm64")
    based_on(sample, "./a.sif")
    with pytest.raises(DefinitionError, match="is an image for arm64, and the stack's is amd64"):
        keys(sample)


def test_dockerfile_of_a_sif_is_refused(sample: SampleRecipe) -> None:
    small_sif(sample.path / "a.sif")
    based_on(sample, "./a.sif")
    with pytest.raises(UsageError, match=r"cannot begin with a SIF: From: \./a\.sif"):
        dockerfile(resolve(find_recipe(str(sample.path)), arch="amd64"))
