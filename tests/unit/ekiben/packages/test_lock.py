"""Lock files, resolved by uv from wheels made here: no index is asked."""

from __future__ import annotations

from pathlib import Path

from ekiben.packages.lock import _differences, asked_packages
from ekiben.spec.definition import read_definition
from support.sample_recipe import RunCli


def test_packages_requested_by_a_definition_file(tmp_path: Path) -> None:
    (tmp_path / "a.def").write_text(
        "Bootstrap: debootstrap\nOSVersion: bookworm\nInclude: ca-certificates,tini\n\n%post\n"
        "    apt-get update && apt-get install -y --no-install-recommends g++ \\\n        libc6-dev $MORE # why\n"
        "    apt-get -qq install one two; echo three\n    apt-get purge -y four\n    pip install five\n"
    )
    asked = asked_packages(read_definition(tmp_path / "a.def", root=tmp_path))
    assert asked == ["ca-certificates", "tini", "g++", "libc6-dev", "one", "two"]


def test_unknown_stack_is_an_error(run_cli: RunCli) -> None:
    assert "no stack 'cu1240'. Did you mean 'cu124'?" in run_cli("lock", "cu1240", code=3).stderr


def test_differences_of_two_locks() -> None:
    old = "a==1 \\\n    --hash=sha256:0\nb==2 \\\n    --hash=sha256:1\n"
    assert list(_differences(old, old)) == []
    assert list(_differences(old, old.replace("a==1", "a==1.1").replace("b==2", "c==2"))) == [
        "a 1 → 1.1",
        "b 2 → (gone)",
        "c (new) → 2",
    ]
    assert list(_differences(old, old.replace("sha256:0", "sha256:9"))) == ["hashes changed"]
