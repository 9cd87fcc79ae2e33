"""Caches and results go where they can be written, and never unsaid into a home directory."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.task import caches, files
from ekiben_tasks.task.errors import TaskError


def test_variables_of_the_user_are_kept(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "mine"), "TRITON_CACHE_DIR": "/t", "TMPDIR": str(tmp_path)}
    messages = caches.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "mine")
    assert env["TRITON_CACHE_DIR"] == "/t"
    assert str(tmp_path / "mine") in messages[0]


def test_the_allocators_blocks_grow_unless_the_user_sets_it(tmp_path: Path) -> None:
    for environment, expected in (
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    ):
        env = {"HF_HOME": str(tmp_path), "TMPDIR": str(tmp_path), **environment}
        caches.prepare_caches(env)
        assert {name: value for name, value in env.items() if name.endswith("ALLOC_CONF")} == expected


def test_ekiben_cache_is_the_second_choice(tmp_path: Path) -> None:
    env = {"EKIBEN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    caches.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "cache" / "huggingface")


def test_without_a_home_the_current_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"TMPDIR": str(tmp_path / "scratch")}
    messages = caches.prepare_caches(env)
    assert env["HF_HOME"] == str(tmp_path / "ekiben-cache" / "huggingface")
    assert env["HF_HOME"] in messages[0]


def test_home_with_cached_models_is_used(tmp_path: Path) -> None:
    kept = tmp_path / "home" / ".cache" / "huggingface"
    kept.mkdir(parents=True)
    env = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    caches.prepare_caches(env)
    assert env["HF_HOME"] == str(kept)


def test_kernel_caches_are_on_this_node_under_this_user(tmp_path: Path) -> None:
    env = {"HOME": "/nonexistent", "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    caches.prepare_caches(env)
    for name in (
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
        "CUTE_DSL_CACHE_DIR",
    ):
        assert env[name].startswith(f"{tmp_path}/ekiben-{os.getuid()}/")
    assert env["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert env["USER"] == f"uid{os.getuid()}"


# Only root can give a folder away: `make test` runs that case, and the same tests by an ordinary user leave it out.
@pytest.mark.parametrize("kind", ["open", "link", *(["foreign"] if os.getuid() == 0 else [])])
def test_a_folder_others_can_write_to_holds_no_compiled_code(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / f"ekiben-{os.getuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "open" else 0o700)
    if kind == "foreign":
        os.chown(folder, 12345, 12345)
    env = {"TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    caches.prepare_caches(env)
    used = Path(env["TRITON_CACHE_DIR"]).parent
    assert used != folder
    assert used.parent == tmp_path
    assert (used.stat().st_uid, used.stat().st_mode & 0o777) == (os.getuid(), 0o700)


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="is a file"):
        files.ensure_output_dir(tmp_path / "file")
    with pytest.raises(TaskError, match="cannot be written"):
        files.ensure_output_dir(Path("/proc/ekiben"))


def test_folder_with_files_is_refused_as_output(tmp_path: Path) -> None:
    assert files.ensure_output_dir(tmp_path / "new", empty=True).is_dir()
    (tmp_path / "new" / "x").write_text("")
    with pytest.raises(TaskError, match="not empty"):
        files.ensure_output_dir(tmp_path / "new", empty=True)


def test_a_hub_that_does_not_answer_means_offline() -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # the discard port: nothing listens
    assert "cannot be reached" in caches.prefer_cache(env)[0]
    assert env["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_answers_is_left_alone() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    try:
        assert caches.prefer_cache(env) == []
    finally:
        server.shutdown()
        server.server_close()
    assert "HF_HUB_OFFLINE" not in env
