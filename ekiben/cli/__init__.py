"""The command line: options → one call → one result.

Each command is a file of ``commands``, imported when it is asked for.

main   start the program
root   the group of all commands
"""

from ekiben.cli.group import main, root

__all__ = ["main", "root"]
