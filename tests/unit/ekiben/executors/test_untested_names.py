"""The names of images whose tests have not passed yet."""

from __future__ import annotations

from ekiben.core.process_name import process_name
from ekiben.executors import is_left_untested, untested_name


def test_an_image_of_a_running_command_stays() -> None:
    name = untested_name("registry.example:5000/lab/own:latest", f"sha256:{'a' * 64}")
    assert name == f"registry.example:5000/lab/own:untested-{process_name()}-{'a' * 12}"
    assert len(name.rpartition(":")[2]) <= 128  # what a registry allows
    assert not is_left_untested(name)


def test_an_image_of_a_command_that_has_ended_goes() -> None:
    *here, _, _ = process_name().split(".")
    ended = ".".join([*here, "4194303", "1"])
    assert is_left_untested(f"ekiben/own:untested-{ended}-{'a' * 12}")
    for name in (f"ekiben/own:{ended}", "ekiben/own:untested-", "ekiben/own:untested-1-2", "untested-", ""):
        assert not is_left_untested(name)
