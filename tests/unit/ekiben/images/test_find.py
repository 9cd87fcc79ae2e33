"""Which image a user means: a recipe, a file, a published version."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, StoreError, UsageError
from ekiben.images import ImageOptions, find_image
from ekiben.run.image import NamedImage, sif_state
from support.published import Lab, version
from support.sample_recipe import RECIPE

Find = Callable[..., NamedImage]
NAME = RECIPE["name"]


@pytest.fixture
def find(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Find:
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")

    def call(reference: str, shared: Path | None = lab.folder, **options: object) -> NamedImage:
        return find_image(reference, ImageOptions(shared=lambda: shared, **options))  # type: ignore[arg-type]

    return call


def test_recipe_by_its_name_and_by_its_folder(find: Find, lab: Lab) -> None:
    hello = find("hello", None)
    assert (hello.name, hello.sif, hello.build_args) == ("hello", Path("hello.sif"), "hello")
    assert hello.launch_of("hello") == "single"
    sample = find(str(lab.recipe.path), None)
    assert (sample.name, sample.tasks) == (NAME, {"greet": "single"})
    assert sample.recipe
    with pytest.raises(UsageError, match=r"recipe 'hello' has no task 'helo'.*Did you mean 'hello'"):
        hello.launch_of("helo")


def test_stack_and_layers_name_another_image(find: Find) -> None:
    image = find("hello", None, stack="cu126", layers=("huggingface",))
    assert image.name == "hello-huggingface-cu126"
    assert image.build_args == "hello --layer huggingface --stack cu126"


def test_tasks_of_a_sif_file(find: Find, lab: Lab) -> None:
    done = lab.put()
    link = Path("a-link")
    link.symlink_to(done.sif)
    for reference in (str(done.sif), "./a-link"):
        image = find(reference)
        assert (image.name, image.tasks, image.recipe) == (NAME, {"greet": "single"}, None)
    with pytest.raises(UsageError, match=r"has no task 'grete'.*Did you mean 'greet'"):
        image.launch_of("grete")


def test_file_of_another_builder_has_any_task(find: Find) -> None:
    Path("other.sif").write_bytes(b"whatever its runtime reads")
    image = find("other.sif")
    assert (image.name, image.tasks, image.launch_of("anything")) == ("other", None, "single")


@pytest.mark.parametrize("options", [{"stack": "cu126"}, {"layers": ("x",)}, {"included": (Path("/x"),)}])
def test_options_of_a_recipe_are_refused_for_files(find: Find, options: dict[str, object]) -> None:
    Path("other.sif").touch()
    with pytest.raises(UsageError, match=r"is for a recipe's image, and other\.sif is a file"):
        find("other.sif", **options)


def test_published_version_tag_and_current(find: Find, lab: Lab) -> None:
    first, second = lab.put(version="1", tags=["good"]), lab.put_next(version="2")
    for reference, done in (
        (NAME, second),
        ("own:current", second),
        ("own:2", second),
        ("own:1", first),
        ("own:good", first),
        (f"own:{version(first)}", first),
    ):
        image = find(reference)
        assert (image.sif, image.sha256) == (done.sif, done.record.sha256), reference
        assert (image.name, image.tasks, image.build_args) == (NAME, {"greet": "single"}, "")


def test_file_without_a_record_beside_a_version_that_has_one_is_not_meant(find: Find, lab: Lab) -> None:
    done = lab.put(version="1")
    planted = done.sif.with_name(f"{NAME}-1-aaaaaaaaaaaa.sif")
    planted.write_bytes(done.sif.read_bytes())
    assert find(f"{NAME}:1").sif == find(f"{NAME}:current").sif == done.sif
    with pytest.raises(StoreError, match=f"{NAME}:1-aaaaaaaaaaaa is {planted.name} in .* its record is missing"):
        find(f"{NAME}:1-aaaaaaaaaaaa")
    (done.sif.parent / "current").unlink()
    (done.sif.parent / "current").symlink_to(planted.name)
    with pytest.raises(StoreError, match=f"{NAME}:current is {planted.name}"):
        find(f"{NAME}:current")


def test_a_folder_without_versions_is_not_offered(find: Find, lab: Lab) -> None:
    done = lab.put()
    (done.sif.parent.parent / "mine").mkdir()
    with pytest.raises(UsageError, match=r"nothing is published as mine in \S+ Known: own\.$"):
        find("mine:1")


def test_version_means_its_newest_image(find: Find, lab: Lab) -> None:
    lab.put(version="1")
    newest = lab.put_next(version="1")
    assert find("own:1").sif == newest.sif


def test_recipe_comes_before_a_published_image_of_its_name(
    find: Find, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.put()
    monkeypatch.chdir(lab.recipe.path.parent)
    image = find(NAME)
    assert image.recipe
    assert image.note == f"own is this recipe's image; own:current is the one in {lab.folder}"
    assert find("own:current").recipe is None


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own:3", "own has no version '3'. Known: 1, current, good"),
        ("owm:1", "nothing is published as owm in .*Did you mean 'own'"),
        ("owm", "no recipe 'owm'.*nothing is published as owm"),
        ("Own:1", "an image's name is lower-case"),
        ("own:../..", "no recipe.yaml there"),
        ("own:-x", "own has no version '-x'"),
        ("own:", "own:: the version after the colon is missing"),
        ("hello:", "hello:: the version after the colon is missing"),
        ("gone.sif", "gone.sif is not there"),
        ("./gone", "no recipe.yaml there, and it is not a SIF file"),
        ("pipe.sif", "pipe.sif is not a regular file"),
        ("folder.sif", r"folder\.sif is a folder, not a SIF file"),
        ("http://host/own.sif", "is a file of a web server, and is not fetched"),
        ("localhost:5000/own:", "localhost:5000/own:: the tag after the colon is missing"),
        ("oras://host/own@", "oras://host/own@: the digest after the @ is missing"),
        ("own\nnew", r"no recipe 'own\\nnew'"),
        ("own:1\n2", r"own has no version '1\\n2'"),
        ("x\ny/z", r"x\\ny/z: no recipe.yaml there"),
        ("oras://host/a\nb", r"oras://host/a\\nb is not a reference"),
        ("oras://host/own:1", "is in a registry, and a file is needed"),
    ],
)
def test_missing_image_is_an_error(find: Find, lab: Lab, reference: str, message: str) -> None:
    lab.put(version="1", tags=["good"])
    os.mkfifo("pipe.sif")
    Path("folder.sif").mkdir()
    with pytest.raises(UsageError, match=message):
        find(reference)


def test_recipe_that_is_wrong_is_no_published_image(find: Find, lab: Lab, tmp_path: Path) -> None:
    lab.put()
    wrong = Path(NAME)
    wrong.mkdir()
    (wrong / "recipe.yaml").write_text("name: [")
    with pytest.raises(DefinitionError):
        find(NAME)


def test_file_of_any_name_has_a_name_for_jobs(find: Find) -> None:
    for file, name in (("my image (1).sif", "my-image-1"), ("--x.sif", "x"), ("ä.sif", "image")):
        Path(file).touch()
        assert find(f"./{file}").name == name
    Path("image.img").touch()
    assert find("image.img").sif == Path("image.img")


def test_shared_folder_that_is_gone_hides_no_other_error(find: Find, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe 'helo'.*Did you mean 'hello'"):
        find("helo", tmp_path / "nothing")


def test_without_a_shared_folder(find: Find, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="own:1 is a published image, and no shared folder is known"):
        find("own:1", None)
    with pytest.raises(StoreError, match="no shared store in"):
        find("own:1", tmp_path / "nothing")
    assert find("hello", tmp_path / "nothing").note == ""


def test_tag_that_leads_elsewhere_is_refused(find: Find, lab: Lab, tmp_path: Path) -> None:
    lab.put(version="1")
    (lab.folder / "images/own/mine").symlink_to(tmp_path / "elsewhere.sif")
    with pytest.raises(UsageError, match=r"own:mine is a link to .*, which is not a published version"):
        find("own:mine")


def test_state_of_a_file_tells_changes_without_reading_it(tmp_path: Path) -> None:
    sif = tmp_path / "x.sif"
    sif.write_bytes(bytes(100_000))
    state = sif_state(sif)
    assert state.is_same(sif)
    os.utime(sif, (1, 1))
    assert not state.is_same(sif)
    known = sif_state(sif, "0ce1e6c4d9f8d9aa3c2f0b2c1fd6ff4b6c9e3ac1c1b7cc3cbda3bbcf57db0b1b")
    os.utime(sif, (2, 2))
    assert not known.is_same(sif)
