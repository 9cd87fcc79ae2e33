"""Any bytes give a value, or an error of Ekiben's that names what was read: no other exception, no time, no memory, no
file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Verbosity, settings
from hypothesis import given as draw

from ekiben.core.errors import EkibenError
from ekiben.registry import client, session
from fuzz import limits
from fuzz.damage import damaged
from fuzz.limits import TooLong, limited
from fuzz.parsers import CASES, READERS
from fuzz.world import World, answering
from support.architecture import ROOT

pytestmark = pytest.mark.covers("qa/fuzz", "ekiben/formats", "ekiben/store", "ekiben/registry", "ekiben/spec")

# More of them, and not the same each time, in `make chaos`.
EXAMPLES = int(os.environ.get("EKIBEN_FUZZ_EXAMPLES", 30))
LIMITS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES == 30,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)
DECODERS = {
    "parse_json",
    "parse_yaml",
    "read_yaml",
    "read_source",
    "read_regular",
    "unpack",
    "unpack_from",
    "iter_unpack",
}
OF_MODULES = {
    "json": {"load", "loads"},
    "tarfile": {"open"},
    "yaml": {"load", "safe_load"},
    "tomllib": {"load", "loads"},
    "pickle": {"load", "loads"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with answering() as registry:
        yield World(tmp_path_factory.mktemp("fuzz"), registry)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(session, "PAUSES", ())
    monkeypatch.setattr(session, "_trusted", functools.cache(session._trusted))  # it reads all certificates each time
    assert client.http.PAUSES == ()
    monkeypatch.setattr(tempfile, "tempdir", str(world.path("tmp/x").parent))
    for name, value in {"HOME": str(world.folder / "home"), "REGISTRY_AUTH_FILE": "", "DOCKER_AUTH_CONFIG": ""}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("name", CASES)
def test_damaged_bytes_give_a_value_or_an_error_that_names_them(name: str, world: World) -> None:
    case = CASES[name](world)
    for sample in case.samples:  # what is in order is read, or refused for another reason than its form
        try:
            case.read(sample)
        except EkibenError as error:
            assert case.named in str(error)

    @LIMITS
    @draw(data=damaged(case.samples))
    def check(data: bytes) -> None:
        try:
            with limited(world.folder):
                case.read(data)
        except EkibenError as error:
            assert case.named in str(error), f"the message does not name {case.named}: {error}"
        except TooLong as error:
            pytest.fail(str(error))
        except BaseException as error:
            error.add_note(f"the bytes are in {world.put(world.path(f'failed/{name}'), data)}")
            raise

    check()


def test_every_function_that_decodes_bytes_has_a_case() -> None:
    assert sorted(decoding_functions()) == sorted(READERS)
    assert {case for case in READERS.values() if " " not in case} <= CASES.keys()


@pytest.mark.parametrize(
    "change",
    [{"name": "../../victim"}, {"cache_key": "../../victim"}, {"digest": "sha256:../../victim"}, {"name": "/victim"}],
)
def test_a_layer_of_a_registry_names_no_file_elsewhere(change: dict[str, str], world: World) -> None:
    case = CASES["registry_layer"](world)
    victim = world.put(world.path("victim.json"), b"precious")
    before = {path for path in world.folder.rglob("*victim*") if path != victim}
    with contextlib.suppress(EkibenError):
        case.read(json.dumps({**json.loads(case.samples[0]), **change}).encode())
    assert victim.read_bytes() == b"precious"
    assert {path for path in world.folder.rglob("*victim*") if path != victim} == before


def decoding_functions() -> set[str]:
    return {
        f"{path.relative_to(ROOT / 'ekiben')}:{name}"
        for path in (ROOT / "ekiben").rglob("*.py")
        for name in _decoding(path)
    }


def _decoding(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(inner, ast.Call) and _decodes(inner.func) for inner in ast.walk(node)
        ):
            yield node.name


def _decodes(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in DECODERS
    if not isinstance(called, ast.Attribute):
        return False
    module = called.value.id if isinstance(called.value, ast.Name) else ""
    return called.attr in DECODERS or called.attr in OF_MODULES.get(module, ())


def test_the_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    with pytest.raises(TooLong), limited(tmp_path):
        while True:
            pass
    with pytest.raises(MemoryError), limited(tmp_path):
        bytearray(300 << 20)
    with pytest.raises(AssertionError, match="elsewhere"), limited(tmp_path / "inside"):
        (tmp_path / "elsewhere").write_text("x")
    with limited(tmp_path):
        (tmp_path / "here").write_text("x")
