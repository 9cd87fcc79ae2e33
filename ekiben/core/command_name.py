"""The program's name as the user typed it, for help texts and for the commands that messages offer.

The command line sets it once; a message that offers a command starts it with ``command_name()``, so that it works when
pasted.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALLED = "ekiben"

_name = INSTALLED
_options = ""


def program_name() -> str:
    """Return how this program was started: ``ekiben``, or as typed, such as ``.venv/bin/python build.py``."""
    return _name


def command_name() -> str:
    """Return what a command for people to paste begins with: program_name(), and the options before its command."""
    return f"{_name} {_options}" if _options else _name


def set_command_options(options: Mapping[str, str | Path | None]) -> None:
    """Append these options to ``command_name()``, except those that are None."""
    global _options
    _options = shlex.join(str(word) for name, value in options.items() if value is not None for word in (name, value))


def set_command_name(name: str) -> None:
    """Make ``name`` what ``program_name()`` returns."""
    global _name
    _name = name


def typed_name(argv: Sequence[str], orig_argv: Sequence[str]) -> str:
    """Return the words that started this program, without its arguments, quoted for a shell.

    ``argv`` and ``orig_argv`` are those of the module sys: the script with its arguments, and all words the interpreter
    got.
    """
    script = argv[0]
    if not script.endswith(".py"):  # a console script of pip; a shell passes the full path of a program on PATH
        on_path = shutil.which(Path(script).name)
        return (
            Path(script).name
            if on_path and os.path.realpath(on_path) == os.path.realpath(script)
            else shlex.quote(script)
        )
    command = list(orig_argv[: len(orig_argv) - len(argv) + 1])
    if "-c" in command or (command[-1] != script and command[-2:] != ["-m", INSTALLED]):  # imported by other code
        return shlex.quote(script)
    if (
        command == ["python3", script] and "/" in script and os.access(script, os.X_OK)
    ):  # started through its first line, `env python3`
        return shlex.quote(script)
    return shlex.join(command)
