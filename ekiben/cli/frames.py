"""The frames of an expected error, printed above its message when EKIBEN_TRACEBACK or --traceback requests them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import click

from ekiben.core.printable import printable

OPTION = "--traceback"
VARIABLE = "EKIBEN_TRACEBACK"  # tasks read it, too: ekiben_tasks/task/errors.py


def wants_frames(args: Sequence[str], environment: Mapping[str, str], with_value: Collection[str]) -> bool:
    """Return whether ``environment`` or ``args`` request the frames of an expected error.

    Reads ``args`` up to the command, because click calls no callback when an option is wrong. ``with_value``: the
    options before the command whose value is the next argument.
    """
    if environment.get(VARIABLE, "") not in ("", "0"):
        return True
    remaining = iter(args)
    for word in remaining:
        if word == OPTION:
            return True
        if word in with_value:
            next(remaining, None)
        elif word == "--" or not word.startswith("-"):
            return False
    return False


def print_frames(error: BaseException) -> None:
    """Print the frames of ``error``, and of the errors that caused it, to stderr."""
    import traceback  # imported here: most commands end without an error

    click.echo(printable("".join(traceback.format_exception(error))), nl=False, err=True)
