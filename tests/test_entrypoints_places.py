"""Caches and results go where they can be written, and never unsaid into a home directory."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import places  # noqa: E402
from settings import TaskError  # noqa: E402


def test_what_the_user_set_is_kept(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "mine"), "TRITON_CACHE_DIR": "/t", "TMPDIR": str(tmp_path)}
    said = places.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "mine")
    assert env["TRITON_CACHE_DIR"] == "/t"
    assert str(tmp_path / "mine") in said[0]


def test_ekiben_cache_comes_next(tmp_path: Path) -> None:
    env = {"EKIBEN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    places.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "cache" / "huggingface")


def test_without_a_home_the_current_folder_is_taken_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"TMPDIR": str(tmp_path / "scratch")}
    said = places.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "ekiben-cache" / "huggingface")
    assert env["HF_HOME"] in said[0]


def test_a_home_that_already_holds_models_is_used(tmp_path: Path) -> None:
    kept = tmp_path / "home" / ".cache" / "huggingface"
    kept.mkdir(parents=True)
    env = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    places.prepare_caches(env)
    assert env["HF_HOME"] == str(kept)


def test_kernel_caches_are_on_this_node_under_this_user(tmp_path: Path) -> None:
    env = {"HOME": "/nonexistent", "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    places.prepare_caches(env)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert env[name].startswith(f"{tmp_path}/ekiben-{os.getuid()}/")
    assert env["USER"] == f"uid{os.getuid()}"


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="is a file"):
        places.claim_folder(tmp_path / "file")
    with pytest.raises(TaskError, match="cannot be written"):
        places.claim_folder(Path("/proc/ekiben"))


def test_a_full_folder_is_refused_where_an_empty_one_is_needed(tmp_path: Path) -> None:
    assert places.claim_folder(tmp_path / "new", empty=True).is_dir()
    (tmp_path / "new" / "x").write_text("")
    with pytest.raises(TaskError, match="not empty"):
        places.claim_folder(tmp_path / "new", empty=True)


def test_a_hub_that_does_not_answer_means_offline() -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # the discard port: nothing listens
    assert "cannot be reached" in places.prefer_cache(env)[0]
    assert env["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_answers_is_left_alone() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    try:
        assert places.prefer_cache(env) == []
    finally:
        server.shutdown()
        server.server_close()
    assert "HF_HUB_OFFLINE" not in env
