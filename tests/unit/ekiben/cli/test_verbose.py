"""-v: what is decided and why, on stderr; nothing of it without -v, and never a secret."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.cli_audit import audit
from support.programs import write_program
from support.sample_recipe import RunCli, SampleRecipe, seeded
from support.small_sifs import small_sif


def decisions(stderr: str) -> dict[str, str]:
    """Subject → choice and reason, of the lines that say a decision."""
    lines = [line[2:] for line in stderr.splitlines() if line.startswith("# ")]
    return dict(line.split(": ", 1) for line in lines)


def write_config(folder: Path, text: str) -> dict[str, str]:
    path = folder / "config/ekiben/config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {"XDG_CONFIG_HOME": str(folder / "config"), "EKIBEN_STORE": "", "XDG_CACHE_HOME": ""}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests set for all of them would come before the config.yaml of one."""
    for name in ("EKIBEN_REGISTRY", "EKIBEN_SHARED", "EKIBEN_RECIPES"):
        monkeypatch.delenv(name, raising=False)


def test_layers_are_named_with_decision_and_reason(run_cli: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    store = seeded(files_only, tmp_path / "store", "ground")
    plain = run_cli("--store", store.root, "plan", files_only.path)
    done = run_cli("-v", "--store", store.root, "plan", files_only.path)
    assert done.stdout == plain.stdout
    assert decisions(plain.stderr) == {}
    lines = decisions(done.stderr)
    assert lines["layer ground"].startswith(f"CACHED (stored: {store.root}/blobs/sha256/")
    assert lines["layer roof"] == "BUILD (never built in this store)"
    assert lines[f"recipe {files_only.path}"] == f"{files_only.path} (named by its path)"
    assert lines["stack"].endswith(" (named in recipe.yaml)")
    assert lines["architecture"] == "amd64 (this machine's)"
    assert lines["store"] == f"{store.root} (--store)"


def test_settings_are_named_with_their_source(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "config/ekiben/config.yaml"
    env = write_config(tmp_path, "registry: 127.0.0.1:1/lab/layers\n")
    lines = decisions(run_cli("-v", "plan", "hello", env=env).stderr)
    assert lines["registry of layers"] == f"127.0.0.1:1/lab/layers (the user's {path})"
    assert lines["store"].endswith("/.cache/ekiben/store (default)")
    assert lines["shared folder"] == "none (not set)"
    assert lines["recipe hello"].endswith("/recipes/hello (a recipe of Ekiben)")
    env |= {"EKIBEN_REGISTRY": "", "EKIBEN_SHARED": str(tmp_path / "lab"), "EKIBEN_STORE": str(tmp_path / "mine")}
    lines = decisions(run_cli("-v", "plan", "hello", env=env, code=6).stderr)
    assert lines["registry of layers"] == "none (EKIBEN_REGISTRY is empty)"
    assert lines["shared folder"] == f"{tmp_path}/lab (EKIBEN_SHARED)"
    lines = decisions(run_cli("-v", "--shared", tmp_path / "other", "plan", "hello", env=env, code=6).stderr)
    assert lines["shared folder"] == f"{tmp_path}/other (--shared)"


def test_store_of_the_environment(run_cli: RunCli, tmp_path: Path) -> None:
    for name, path in (("EKIBEN_STORE", tmp_path / "mine"), ("XDG_CACHE_HOME", tmp_path / "cache")):
        env = {"EKIBEN_STORE": "", "XDG_CACHE_HOME": "", name: str(path)}
        assert decisions(run_cli("-v", "plan", "hello", env=env).stderr)["store"].endswith(f" ({name})")


def test_recipe_of_a_configured_folder(run_cli: RunCli, sample: SampleRecipe, tmp_path: Path) -> None:
    env = write_config(tmp_path, f"recipes: [{sample.path.parent}]\n")
    done = run_cli("-v", "plan", sample.path.name, env={**env, "EKIBEN_STORE": str(tmp_path / "store")})
    source = f"in a folder of recipes, from the user's {tmp_path}/config/ekiben/config.yaml"
    assert decisions(done.stderr)["recipe own"] == f"{sample.path} ({source})"


def test_engines_and_runtimes_are_named_with_the_reason(run_cli: RunCli, tmp_path: Path) -> None:
    for name in ("docker", "apptainer"):
        write_program(tmp_path / "bin" / name, "#!/bin/sh\necho an-id\n")
    env = {"PATH": str(tmp_path / "bin")}
    small_sif(tmp_path / "hello.sif")
    lines = decisions(run_cli("-v", "run", "--dry-run", "hello", "hello", env=env).stderr)
    assert lines["runtime"] == f"{tmp_path}/bin/apptainer (it runs SIF files, and hello.sif is here)"
    lines = decisions(
        run_cli("-v", "run", "--dry-run", "--cpu", "--runtime", "docker", "hello", "hello", env=env).stderr
    )
    assert lines["runtime"] == f"{tmp_path}/bin/docker (--runtime)"
    assert lines["GPUs"] == "none (--cpu)"
    small_sif(tmp_path / "hello.sif")
    lines = decisions(run_cli("-v", "run", "--dry-run", "hello", "hello", env=env).stderr)
    assert lines["runtime"] == f"{tmp_path}/bin/apptainer (it runs SIF files, and hello.sif is here)"


def test_scheduler_site_and_defaults_of_jobs(run_cli: RunCli, tmp_path: Path) -> None:
    env = write_config(tmp_path, 'jobs: {account: lab, time: "2:00:00", env: [TOKEN=secret]}\n')
    done = run_cli("-v", "submit", "--site", "abci-3.0", "--gpus-per-node", "8", "--dry-run", "hello", "hello", env=env)
    lines = decisions(done.stderr)
    assert lines["scheduler"] == "pbs (of the site abci-3.0)"
    assert lines["partition of abci-3.0"].startswith("rt_HF (the smallest that is enough; rt_HG: --gpus-per-node 8: ")
    assert f"# defaults of jobs: account=lab, time=2:00:00, env (the user's {tmp_path}/config/" in done.stderr
    assert "secret" not in done.stderr
    done = run_cli(
        "-v", "submit", "--scheduler", "slurm", "--gpus-per-node", "1", "--dry-run", "hello", "hello", env=env
    )
    assert decisions(done.stderr)["scheduler"] == "slurm (--scheduler)"


class _Locked(BaseHTTPRequestHandler):
    """A registry that asks for a password, and has nothing."""

    def do_HEAD(self) -> None:
        known = self.headers.get("Authorization", "").startswith("Basic ")
        self.send_response(404 if known else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="lab"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_the_source_of_a_login_is_named_and_never_the_login(run_cli: RunCli, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Locked)
    Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    login = base64.b64encode(b"layer-reader:hunter2").decode()
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: {"auth": login}}}))
    env = {
        "EKIBEN_REGISTRY": f"{host}/lab/layers",
        "DOCKER_CONFIG": str(tmp_path / "docker"),
        "EKIBEN_STORE": str(tmp_path / "none"),
    }
    try:
        done = run_cli("-v", "plan", "hello", env=env)
        lines = decisions(done.stderr)
        assert f"# login at {host}: {tmp_path}/docker/config.json (for lab/layers)\n" in done.stderr
        assert lines["layer hello"] == f"BUILD (parent is rebuilt; not available from {host}/lab/layers)"
        assert [word for word in ("hunter2", login, "layer-reader") if word in done.stderr + done.stdout] == []
        env["DOCKER_CONFIG"] = str(tmp_path)
        anonymous = run_cli("-v", "plan", "hello", env={**env, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": ""}).stderr
        assert f"# login at {host}: anonymous (no file or variable has a login for it)\n" in anonymous
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("options", [[], ["-v"]], ids=["plain", "verbose"])
def test_a_plan_with_decisions_imports_no_more(tmp_path: Path, options: list[str]) -> None:
    audited = audit(tmp_path, *options, "plan", "hello")
    assert (audited.code, audited.effects) == (0, [])
    assert audited.modules & {"docker", "rich", "requests", "ssl", "logging", "traceback"} <= {"traceback", "logging"}
