"""push asks the registry before it builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.store import Store
from support.registries import Answer, Script, bad_registry, trust_one_certificate
from support.sample_recipe import RunCli, SampleRecipe


@pytest.fixture(autouse=True)
def few_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trust_one_certificate(monkeypatch, tmp_path)


def always(code: int, **headers: str) -> Script:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda method, path, request: Answer(code, headers=named)


REFUSALS = {
    "no login": (always(401, WWW_Authenticate='Basic realm="x"'), "the registry requires a login, and you have none"),
    "may not write": (always(403), "this login may not write there"),
    "no repository": (always(404), "not there"),
    "no registry": (always(200), "POST blobs/uploads/: 200 OK"),
    "read only": (always(405), "POST blobs/uploads/: 405 Method Not Allowed"),
    "redirects to a page": (always(302, Location="/login"), "redirects POST elsewhere"),
}


@pytest.mark.parametrize("format", ["docker", "sif", "layers"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_registry_that_refuses_is_found_out_before_the_build(
    refusal: str, format: str, run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path
) -> None:
    script, message = REFUSALS[refusal]
    with bad_registry(script) as (host, asked):
        argv = ("--store", tmp_path / "store", "push", files_only.path, f"{host}/lab/x", "--format", format)
        error = run_cli(*argv, code=7, env={"HOME": str(tmp_path / "home")}).stderr
    assert message in error and "layer" not in error
    assert {(method, path) for method, path, _ in asked} == {("POST", "/v2/lab/x/blobs/uploads/")}
    assert not (tmp_path / "store").exists()


def test_registry_that_is_not_there_is_found_out_before_the_build(
    run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path
) -> None:
    error = run_cli("--store", tmp_path / "store", "push", files_only.path, "127.0.0.1:9/lab/x:1", code=7).stderr
    assert "127.0.0.1:9 does not answer: " in error
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("reference", "format"),
    [
        ("127.0.0.1:9/lab/x:1", "layers"),
        (f"127.0.0.1:9/lab/x@sha256:{'0' * 64}", "docker"),
        (f"127.0.0.1:9/lab/x@sha256:{'0' * 64}", "layers"),
    ],
)
def test_reference_that_nothing_is_pushed_to(
    reference: str, format: str, run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path
) -> None:
    argv = ("--store", tmp_path / "store", "push", files_only.path, reference, "--format", format)
    stderr = run_cli(*argv, code=2).stderr
    assert "give a " in stderr or "name a " in stderr
    assert not (tmp_path / "store").exists()


def test_check_cancels_its_upload(run_cli: RunCli, files_only: SampleRecipe, store: Store) -> None:
    """The registry takes that upload, and refuses the next."""
    posts = 0

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        nonlocal posts
        posts += method == "POST"
        if method == "POST" and posts == 1:
            return Answer(202, headers={"Location": "/v2/lab/x/blobs/uploads/1?state=a"})
        return Answer(204 if method == "DELETE" else 403)

    with bad_registry(script) as (host, asked):
        run_cli("--store", store.root, "push", files_only.path, f"{host}/lab/x:1", code=7)
    methods = [(method, path.partition("?")[0]) for method, path, _ in asked[:2]]
    assert methods == [("POST", "/v2/lab/x/blobs/uploads/"), ("DELETE", "/v2/lab/x/blobs/uploads/1")]
    assert len(asked) > 2  # it was built, and sent
