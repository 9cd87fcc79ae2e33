"""Tokens that are missing or may not: the hub is played by a local server that answers as it does."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("huggingface_hub", "datasets"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parent.parent
PLACES = [Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints", ROOT / "entrypoints"]

ANSWERS = {"gated": (403, "GatedRepo"), "private": (401, "RepoNotFound"), "unknown": (404, "RepoNotFound")}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """OWNER/gated, OWNER/private and OWNER/unknown, as models and as data sets."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            status, code = next(answer for name, answer in ANSWERS.items() if f"/{name}" in self.path)
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(hub: str, folder: Path, script: str, token: str) -> list[str]:
    """The errors ``script`` prints, in a process of its own: the hub's library reads its address once."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": hub, "PYTHONPATH": os.pathsep.join(map(str, PLACES))}
    if token:
        environment["HF_TOKEN"] = token
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


MODELS = """
import hub, settings
for name in ("gated", "private", "unknown"):
    try:
        hub.locate_model(f"owner/{name}")
    except settings.TaskError as error:
        print(error)
"""
DATA = """
import forms, rows, settings
for name in ("gated", "private", "unknown"):
    try:
        rows.read_all([rows.Source(f"owner/{name}", 0.0)], seed=0, skip_bad=False)
    except settings.TaskError as error:
        print(error)
"""


@pytest.mark.parametrize(("kind", "script"), [("model", MODELS), ("data set", DATA)], ids=["model", "data set"])
@pytest.mark.parametrize("token", ["", "hf_read"], ids=["no token", "a token"])
def test_what_to_do_about_a_token(hub: str, tmp_path: Path, kind: str, script: str, token: str) -> None:
    gated, private, unknown = ask(hub, tmp_path, script, token)
    for name, said in (("gated", gated), ("private", private), ("unknown", unknown)):
        assert said.startswith(f"{kind} owner/{name}: "), said
    if token:
        assert "token you gave" in gated
        assert re.search("not on the hub, or private; .*is the token you gave allowed", private)
    else:
        assert "HF_TOKEN" in gated
        assert re.search("not on the hub, or private; .*HF_TOKEN", private)
    assert "not on the hub" in unknown
    assert "hf_read" not in gated + private + unknown
