"""Printed commands."""

from __future__ import annotations

from ekiben.run.printed import docker_line, podman_line


def test_an_engine_never_pulls_a_local_image() -> None:
    lines = [
        docker_line("ekiben/hello:latest", "hello"),
        podman_line("ekiben/hello", "hello", gpu=False, options=((), ())),
    ]
    for line in lines:
        assert " run --rm --pull=never " in line
        assert line.endswith(" ekiben/hello hello")
