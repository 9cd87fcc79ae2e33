"""The help of commands with many options has them in sections."""

from __future__ import annotations

import re

import click

from ekiben.cli import root
from ekiben.cli.sections import SECTIONS


def test_each_option_is_shown_once_in_its_section() -> None:
    context = click.Context(root)
    known: set[str] = set()
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        known |= {param.name or "" for param in options}
        text = command.get_help(click.Context(command, info_name=name, parent=context))
        for param in options:
            shown = re.findall(rf"^  (?:-\w, )?{re.escape(param.opts[-1])}(?: |$)", text, re.MULTILINE)
            assert len(shown) == 1, (name, param.opts)
        assert ("Options of the image:" in text) == (len(options) > 9), name
    assert known >= {name for names in SECTIONS.values() for name in names}


def test_sections_of_submit() -> None:
    command = root.get_command(click.Context(root), "submit")
    assert command is not None
    lines = command.get_help(click.Context(command, info_name="submit")).splitlines()
    titles = [line for line in lines if line.endswith(":") and line.startswith("Options")]
    assert titles == [
        "Options:",
        "Options of the image:",
        "Options of a build:",
        "Options of the container:",
        "Options of the compute nodes:",
        "Options of the run:",
    ]
    nodes = lines.index("Options of the compute nodes:")
    assert any("--nodes" in line for line in lines[nodes : lines.index("Options of the run:")])
