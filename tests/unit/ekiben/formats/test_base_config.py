"""A base's own configuration: read from a registry's config, kept as files of its layer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ekiben.core.checked import Fields
from ekiben.formats.base_config import BASE, BASE_ENVIRONMENT, BASE_RUNSCRIPT, BaseConfig


def parse(**fields: object) -> BaseConfig:
    return BaseConfig.parse_oci(Fields(fields))


def test_empty_config() -> None:
    assert parse() == BaseConfig()
    assert parse(Env=None, Entrypoint=None, Cmd=None, Labels=None) == BaseConfig()


def test_record_is_read_as_it_was_written() -> None:
    config = parse(
        Env=["A=b=c", "PATH=/x:/bin", "no.name=x", "EMPTY=", "alone"],
        User="1:2",
        WorkingDir="/srv",
        Entrypoint=["a b", "c"],
        Cmd=["d"],
        Labels={"e": "f"},
    )
    path = "/x:/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin"
    assert config.environment == {"A": "b=c", "PATH": path, "EMPTY": "", "alone": ""}
    assert BaseConfig.parse(config.files()["/" + BASE][1]) == config


@pytest.mark.parametrize(
    "fields", [{"Env": "A=b"}, {"Env": [1]}, {"Entrypoint": "sh"}, {"Cmd": {}}, {"User": 1}, {"Labels": {"a": 1}}]
)
def test_hostile_config_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse(**fields)


def test_values_are_those_of_the_config_whatever_they_hold() -> None:
    value = 'it\'s $(id) `id` "q"\nline'
    script = parse(Env=[f"A={value}"]).files()[BASE_ENVIRONMENT][1].decode()
    done = subprocess.run(["sh", "-c", f'{script}printf %s "$A"'], capture_output=True, text=True, check=True)
    assert done.stdout == value


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "arguments", "shown"),
    [
        (["echo", "a b"], [], [], "a b"),
        (["echo", "a"], ["c d"], [], "a c d"),
        (["echo", "a"], ["c"], ["e f"], "a e f"),
        ([], ["echo", "c"], [], "c"),
        ([], ["echo", "c"], ["echo", "e"], "e"),
        ([], [], ["echo", "e"], "e"),
    ],
)
def test_program_of_the_base(
    entrypoint: list[str], cmd: list[str], arguments: list[str], shown: str, tmp_path: Path
) -> None:
    script = tmp_path / "run"
    script.write_bytes(parse(Entrypoint=entrypoint, Cmd=cmd).files()[BASE_RUNSCRIPT][1])
    done = subprocess.run(["sh", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == f"{shown}\n"
