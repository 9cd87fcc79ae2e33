"""Tests of an image's layers, apart from its recipe's own test: they need not run again when the recipe is edited.

The tests of the layers run without the recipe's folder: what they can see is then the same in every image with the same
layers, environment and runtime files. The key hashes all of that, and the machine. Where they passed with that key,
another run has the same inputs, and only the recipe's own test runs. All tests run in the complete image

- where one of the layers' tests, or the environment, names the recipe's folder or a task (Image.recipe_test);
- where a layer below has a recipe or tests of its own, as an image of Ekiben that serves as a base;
- where they fail without the recipe's folder, or the recipe's test fails alone: the complete run decides;
- in `verify`, and on a runtime of which too little is known.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ekiben import __version__
from ekiben.core.checked import Fields, is_basename, parse_json
from ekiben.core.decisions import log_decision
from ekiben.core.errors import EngineError, StoreError
from ekiben.core.files import digest_of
from ekiben.core.paths import RECIPE_HOME, TESTS
from ekiben.formats.tar import tar_digest
from ekiben.store import Image, Store

_FORMAT = 1  # of the key
_HOME, _TESTS = RECIPE_HOME.lstrip("/"), TESTS.lstrip("/")
_VALID = timedelta(days=7)  # a test may depend on the date
_CLOCK = timedelta(minutes=5)  # by which the clocks of machines with one store may differ

Surroundings = Callable[[], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ScriptGroup:
    """Some of an image's tests: ``script`` runs them. ``hides_recipe``: without the recipe's folder."""

    script: str
    hides_recipe: bool


@dataclass(frozen=True, slots=True)
class EarlierPass:
    """Tests that were not run: they passed on ``date`` in ``image``, an image's id, with the same inputs.

    ``tests`` names the layers' scripts; none: all of the image's. ``date``: ISO 8601, "" where it was not noted.
    """

    tests: tuple[str, ...]
    date: str
    image: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {"tests": list(self.tests), "date": self.date or None, "image": self.image}

    @classmethod
    def parse(cls, value: object) -> EarlierPass:
        """Read to_json()'s object. Raises ValueError."""
        fields = Fields.of(value)
        date = fields.time("date") if "date" in fields else ""
        tests = fields.data.get("tests")
        if not isinstance(tests, list) or not all(map(is_basename, tests)):
            fields.refuse("tests", "a list of file names")
        return cls(tuple(tests), date, fields.digest("image"))

    @property
    def day(self) -> str:
        """Return the date for people."""
        return f"{self.date[:16].replace('T', ' ')} UTC"

    def __str__(self) -> str:
        tests = ", ".join(name.partition("-")[2].removesuffix(".sh") or name for name in self.tests)
        return f"{tests or 'all'} passed {f'on {self.day}' if self.date else 'before'} in {self.image[:19]}"


@dataclass(frozen=True, slots=True)
class SeparateTests:
    """The tests of an image in two groups. ``names`` are the layers' tests; ``key`` hashes what they can see."""

    image: Image
    names: tuple[str, ...]
    key: str

    @property
    def of_layers(self) -> ScriptGroup:
        """Return the tests of the layers."""
        return ScriptGroup(script_of("!=", self.image.recipe_test or ""), True)

    @property
    def of_recipe(self) -> ScriptGroup:
        """Return the recipe's own test."""
        return ScriptGroup(script_of("=", self.image.recipe_test or ""), False)

    def passed(self, store: Store) -> EarlierPass | None:
        """Return when the layers' tests passed with this key; None where they did not, or too long ago."""
        with contextlib.suppress(ValueError):
            reused = EarlierPass.parse(store.check(self._record))
            age = datetime.now(UTC) - datetime.fromisoformat(reused.date)
            if reused.tests == self.names and -_CLOCK <= age <= _VALID:
                return reused
        return None

    def note_passed(self, store: Store) -> None:
        """Remember that the layers' tests passed now."""
        _put(store, self._record, EarlierPass(self.names, now(), self.image.image_id).to_json())

    def is_recipe_required(self, store: Store) -> bool:
        """Return whether the layers' tests failed without the recipe's files, and passed with them."""
        return (store.check(self._record) or {}).get("requires_recipe") is True

    def note_requirement(self, store: Store) -> None:
        """Remember that the layers' tests need the recipe's files."""
        _put(store, self._record, {"requires_recipe": True})

    @property
    def _record(self) -> str:
        return f"layers-{self.key}"


def now() -> str:
    """Return the time as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def separate(image: Image, store: Store, runtime: str, surroundings: Surroundings) -> SeparateTests | None:
    """Return the tests of an image in two groups; None where only a complete run is safe, or a group is empty.

    ``surroundings`` says what decides about the tests beside the image.
    """
    name, reason = f"tests of {image.name} under {runtime}", ""
    if image.recipe_test is None:
        reason = "a test of a layer, or the environment, may name the recipe's files"
    else:
        try:
            names, visible = _visible(image, store)
            if names:
                inputs = [_FORMAT, __version__, runtime, surroundings(), visible]
                key = digest_of(json.dumps(inputs, sort_keys=True).encode()).removeprefix("sha256:")
                return SeparateTests(image, names, key)
            reason = "a base has tests or a recipe of its own, or no layer has a test"
        except (StoreError, EngineError, OSError, ValueError) as error:
            reason = str(error)
    log_decision(name, "all run in the complete image", reason)
    return None


def _visible(image: Image, store: Store) -> tuple[tuple[str, ...], list[object]]:
    """Return the names of the layers' tests, and what they can see of the image; no names where only a complete run is
    safe."""
    *below, top = image.layers
    for layer in below:
        with store.reader(layer.digest) as reader:
            if reader.lookup(_HOME) or reader.lookup(_TESTS):
                return (), []
    with store.reader(top.digest) as reader:
        names = [entry.path.rpartition("/")[2] for entry in reader.children(_TESTS)] if reader.lookup(_TESTS) else []
        rest, _ = tar_digest(reader, without=_HOME)
    config = {name: value for name, value in Fields.of(parse_json(image.config)).data.items() if name not in _OF_LAYERS}
    layers = tuple(sorted(name for name in names if name != image.recipe_test))
    return layers, [[layer.digest for layer in below], rest, config]


_OF_LAYERS = ("rootfs", "history")


def script_of(comparison: str, name: str) -> str:
    """Return a script that runs the tests whose file name is equal ("=") to ``name`` or not ("!="); recipe_layer.py has
    the one that runs all."""
    return f"""\
for script in {TESTS}/*.sh; do
    [ -e "$script" ] && [ "${{script##*/}}" {comparison} {shlex.quote(name)} ] || continue
    echo "test: ${{script##*/}}"
    "$script" </dev/null || {{ code=$?; echo "test: ${{script##*/}} FAILED"; exit $code; }}
done
"""


def _put(store: Store, name: str, record: Mapping[str, Any]) -> None:
    if store.is_writable():
        with contextlib.suppress(StoreError):  # a full disk: they run again next time
            store.put_check(name, record)
