"""Answers that a hostile registry gives to pull and push: each ends soon in one sentence, and no file is left."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from ekiben.artifacts.pull import pull
from ekiben.core.errors import FetchError
from ekiben.core.printable import printable
from ekiben.registry import session
from ekiben.registry.reference import Reference
from ekiben.store import Store
from support.hostile_registry import NETRC, REFRESH, modes, secrets_in
from support.registries import Answer, at, bad_registry, blob, login, nothing
from support.sample_recipe import quiet


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(session, "TIMEOUT", (1, 0.5))


# Each with one kind of login; `python -m chaos "registry mode"` takes either.
@pytest.mark.parametrize(("mode", "identity_token"), [*zip(modes(""), itertools.cycle(["", REFRESH]), strict=False)])
def test_hostile_answer_ends_in_one_sentence(mode: str, identity_token: str, tmp_path: Path) -> None:
    store, out = Store(tmp_path / "store"), tmp_path / "out"
    out.mkdir()
    with bad_registry(lambda method, path, headers: Answer(200, b'{"token": "theirs"}')) as (other, stolen):
        reply, message = modes(other)[mode]
        with bad_registry(lambda method, path, headers: reply(path, headers)) as (host, _):
            login(tmp_path / "home", host, identity_token=identity_token)
            (tmp_path / "home/.netrc").write_text(f"machine 127.0.0.1 login u password {NETRC}\n")
            began = time.monotonic()
            with pytest.raises(FetchError, match=message) as caught:
                pull(Reference.parse(f"{host}/lab/x:1"), store, out / "x.sif", quiet())
            assert time.monotonic() - began < 10
    assert str(caught.value).startswith(f"{host}/lab/x:1")
    assert "\x1b" not in printable(str(caught.value)) and len(str(caught.value)) < 1000
    assert secrets_in(stolen) == []
    assert list(out.iterdir()) == []
    assert not (store.root / "staging").exists() or list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize("code", [200, 201, 202, 204, 301, 307, 401, 404, 500])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "GET"])
def test_upload_that_is_led_elsewhere_gives_nothing_away(method: str, code: int, tmp_path: Path) -> None:
    sent, _ = blob(1000)

    def theirs(asked: str, path: str, headers: dict[str, str]) -> Answer:
        realm = f'Bearer realm="http://{headers["host"]}/token"'
        return Answer(code, b"{}", {"Location": "/again", "WWW-Authenticate": realm})

    with bad_registry(theirs) as (other, stolen):

        def script(asked: str, path: str, headers: dict[str, str]) -> Answer:
            if "authorization" not in headers:
                return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            elsewhere = {"Location": f"http://{other}/up/1"}
            if asked == method:
                return Answer(
                    {"POST": 202, "PATCH": 202, "GET": 204}.get(method, 307), headers={**elsewhere, "Range": "0-0"}
                )
            return Answer(201 if asked == "PUT" else 202, headers={"Location": "/up/1"})

        with bad_registry(script) as (host, _):
            login(tmp_path / "home", host)
            location = f"http://{host}/up/0" if method == "GET" else ""
            try:
                at(host).send_blob(sent, nothing, location=location)
            except FetchError as error:
                assert str(error).startswith(f"{host}/lab/x: ")
    assert secrets_in(stolen) == []
