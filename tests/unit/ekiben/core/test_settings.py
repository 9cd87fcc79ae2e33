"""Options before the environment, that before config.yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.core.settings import read_settings
from ekiben.run.jobs.request import JobRequest, with_defaults


def test_options_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "ekiben").mkdir()
    (tmp_path / "ekiben/config.yaml").write_text("shared: /file\nregistry: host/file\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": "/cache"}
    found = read_settings(environment)
    assert (found.store, found.shared, found.registry) == (Path("/cache/ekiben/store"), Path("/file"), "host/file")
    environment |= {"EKIBEN_STORE": "/env", "EKIBEN_SHARED": "/env-shared", "EKIBEN_REGISTRY": "host/env"}
    found = read_settings(environment)
    assert (found.store, found.shared, found.registry) == (Path("/env"), Path("/env-shared"), "host/env")
    found = read_settings(environment, store=Path("/option"), shared=Path("/option-shared"))
    assert (found.store, found.shared) == (Path("/option"), Path("/option-shared"))


def test_empty_variables_mean_none(tmp_path: Path) -> None:
    (tmp_path / "ekiben").mkdir()
    (tmp_path / "ekiben/config.yaml").write_text("shared: /file\nregistry: host/file\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "EKIBEN_STORE": "", "EKIBEN_SHARED": "", "EKIBEN_REGISTRY": ""}
    found = read_settings(environment)
    assert (found.shared, found.registry) == (None, None)
    assert found.store == Path("~/.cache/ekiben/store").expanduser()


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = read_settings({"XDG_CONFIG_HOME": str(tmp_path)}, store=Path("store"), shared=Path("lab"))
    assert (policy.store, policy.shared) == (tmp_path / "store", tmp_path / "lab")


def test_user_config_replaces_single_keys_of_site_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ekiben").mkdir()
    monkeypatch.setattr("ekiben.core.settings._OF_SITE", tmp_path / "site.yaml")
    (tmp_path / "site.yaml").write_text(
        'shared: /lab\nregistry: host/lab\nrecipes: [lab]\njobs: {partition: gpu, time: "2:00:00", env: [A=1]}\n'
    )
    (tmp_path / "ekiben/config.yaml").write_text("registry: host/mine\njobs: {account: me, time: 90m, env: [B]}\n")
    both = read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (both.shared, both.registry, both.recipes) == (Path("/lab"), "host/mine", (tmp_path / "lab",))
    request = with_defaults(JobRequest(env=("C",)), both.jobs)
    assert (request.account, request.partition, request.time_seconds, request.env) == (
        "me",
        "gpu",
        5400,
        ("A=1", "B", "C"),
    )


A, B, C = "A" * 40, "B" * 40, "c" * 64


def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, user: str) -> list[str] | None:
    (tmp_path / "ekiben").mkdir(exist_ok=True)
    monkeypatch.setattr("ekiben.core.settings._OF_SITE", tmp_path / "site.yaml")
    (tmp_path / "site.yaml").write_text(site)
    (tmp_path / "ekiben/config.yaml").write_text(user)
    policy = read_settings({"XDG_CONFIG_HOME": str(tmp_path), "EKIBEN_REQUIRE_SIGNATURE": ""}).require_signature
    return None if policy is None else sorted(policy.fingerprints)


@pytest.mark.parametrize(
    ("site", "user", "expected"),
    [
        ("", "", None),
        (f"require_signature: [{A}]", "", [A]),
        ("", f"require_signature: [{A}]", [A]),
        (f"require_signature: [{A}, {B}]", f"require_signature: [{B}, {C}]", [B]),
        (f"require_signature: [{A}]", f"require_signature: [{B}]", []),
        (f"require_signature: ['{'a' * 20} {'a' * 20}', '0x{C}']", "", [A, C.upper()]),
    ],
)
def test_user_tightens_the_policy_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, user: str, expected: list[str] | None
) -> None:
    assert policy(tmp_path, monkeypatch, site, user) == expected


@pytest.mark.parametrize("kind", ["folder", "broken link", "long name"])
def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its policy would not hold."""
    path = tmp_path / "etc/config.yaml"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "broken link":
        path.symlink_to("nowhere")
    else:  # which cannot be looked up, as in a folder that is closed to the user
        path = path.with_name("x" * 300)
    monkeypatch.setattr("ekiben.core.settings._OF_SITE", path)
    with pytest.raises(DefinitionError, match=rf"{re.escape(str(path))}: (is not a regular file|cannot be read: )"):
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "require_signature: is empty; name the fingerprints of keys, or leave it out"),
        ("", "require_signature: is empty; name the fingerprints of keys, or leave it out"),
        ("null", "require_signature: is empty; name the fingerprints of keys, or leave it out"),
        ("[~]", "require_signature.0: should be a string"),
        ("[A1B2C3D4]", "require_signature: 'A1B2C3D4' is not a full fingerprint"),
        ("[A1B2C3D4E5F60718]", "is not a full fingerprint"),
        (f"[{A}F]", "is not a full fingerprint"),
        (f"[{A[:-1]}g]", "is not a full fingerprint"),
        (f'["{A}\\n"]', "is not a full fingerprint"),
        ('[""]', "'' is not a full fingerprint"),
        (f"[{'1' * 40}]", "require_signature.0: should be a string"),
        (A, "require_signature: should be a list"),
        ("false", "require_signature: should be a list"),
        (f"[[{A}]]", "require_signature.0: should be a string"),
    ],
)
@pytest.mark.parametrize("file", ["site", "user"])
def test_wrong_policy_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, value: str, message: str
) -> None:
    texts = {"site": "", "user": "", file: f"require_signature: {value}\n"}
    with pytest.raises(DefinitionError, match=re.escape(message)):
        policy(tmp_path, monkeypatch, **texts)
