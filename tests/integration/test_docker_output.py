"""What a container says of its files arrives whole, or is an error."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import EngineError
from ekiben.executors import Job, docker

pytestmark = pytest.mark.covers("ekiben/executors")


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Any]]:
    """A container of this machine's own shell and tools, with a folder of ours in it."""
    if reason := docker.unavailable():
        pytest.skip(reason)
    mount = tmp_path_factory.mktemp("mount")
    made = docker.client().containers.create(
        _image(),
        ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"],
        volumes=[f"{mount}:/run/ekiben", "/usr:/usr:ro", "/lib:/lib:ro", "/lib64:/lib64:ro", "/bin:/bin:ro"],
    )
    made.start()
    job = Job(name="x", lower=(), mount=mount, cache=mount, scratch=mount, staging=mount, log=print)
    yield job, made
    made.remove(force=True)
    docker.client().images.remove("ekiben-test/empty:latest")


def _image() -> str:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    docker.client().api.import_image_from_data(out.getvalue(), repository="ekiben-test/empty", tag="latest")
    return "ekiben-test/empty:latest"


def test_large_output_is_complete(container: tuple[Job, Any]) -> None:
    job, running = container
    for _ in range(20):
        with docker._output(job, running, ["seq", "200000"]) as output:
            assert output.read() == b"".join(b"%d\n" % number for number in range(1, 200_001))
    assert [path.name for path in job.mount.iterdir()] == []


def test_failed_program_raises_with_its_stderr(container: tuple[Job, Any]) -> None:
    job, running = container
    with (
        pytest.raises(EngineError, match=r"exit code 3: on purpose"),
        docker._output(job, running, ["sh", "-c", "echo on purpose >&2; exit 3"]),
    ):
        pass


def test_truncated_output_is_an_error(container: tuple[Job, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job, running = container
    read = docker._begin_of

    def cut(mount: Path, name: str) -> bytes:
        (mount / "output").write_bytes(b"1\n")
        return read(mount, name)

    monkeypatch.setattr(docker, "_begin_of", cut)
    with pytest.raises(EngineError, match="wrote 21 bytes, and 2 of them"), docker._output(job, running, ["seq", "10"]):
        pass


def test_a_link_that_a_process_of_the_container_left_is_not_followed(
    container: tuple[Job, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, running = container
    (tmp_path / "secret").write_text("precious thesis of 21\n"[1:])
    read = docker._begin_of

    def exchange(mount: Path, name: str) -> bytes:
        (mount / "output").unlink(missing_ok=True)
        (mount / "output").symlink_to(tmp_path / "secret")
        return read(mount, name)

    monkeypatch.setattr(docker, "_begin_of", exchange)
    with pytest.raises(OSError, match="it is a link"), docker._output(job, running, ["seq", "10"]) as output:
        output.read()
