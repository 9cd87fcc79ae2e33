"""The ``command:`` of a recipe's task: a program and its arguments, without a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence

PYTHON = ("python", "python3")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_OPERATORS = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1")


def parse_command(command: str, launch: str) -> list[str]:
    """Return the program and the arguments of a command.

    Raises ValueError for one that a shell or a launcher would have to read.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command: {error}: {command}") from error
    if not argv:
        raise ValueError("command: is empty; write a program and its arguments")
    if argv[0].endswith(".py"):
        raise ValueError(f"command: write python {argv[0]}, for a script of Python needs its Python")
    is_shell = argv[0].rpartition("/")[2] in _SHELLS
    odd = [word for word in argv if word in _OPERATORS or re.search(r"\$[\w{(]|`", word)]
    if odd and not is_shell:
        raise ValueError(f"command: no shell reads {odd[0]}; write sh -c '…', or a script")
    if launch == "per-gpu" and (launcher := next(_launchers(argv), None)):
        raise ValueError(
            f"command: {launcher} starts processes, as launch: per-gpu does; write the python command that it would"
            " start, or launch: single"
        )
    return argv


def _launchers(argv: Sequence[str]) -> Iterator[str]:
    if argv[0] in _LAUNCHERS:
        yield argv[0]
    if argv[0] in PYTHON and argv[1:2] == ["-m"]:
        yield from (word for word in argv[2:3] if word in _LAUNCHER_MODULES)


def search_folders(code: Collection[str], packages: Collection[str]) -> list[str]:
    """Return the folders, below the recipe's, from which Python imports ``code``: files and folders.

    ``packages``: the folders of ``code`` that are a package; the modules in the others are imported from there.
    """
    folders: dict[str, None] = {}
    for path in code:
        folders[path.rpartition("/")[0]] = None
    for path in code:
        if path not in packages and not path.endswith(".py"):
            folders[path] = None
    return list(folders)
