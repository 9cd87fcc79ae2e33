"""The group of all commands: finds them in their folder, lists them in sections, turns errors into messages and exit
codes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from ekiben import __version__
from ekiben.cli import commands
from ekiben.cli.context import Context
from ekiben.cli.frames import OPTION, VARIABLE, print_frames, wants_frames
from ekiben.cli.options import COMPLETE_VAR, HelpContext, PathType, with_command_name
from ekiben.core.command_name import program_name, set_command_name, set_command_options, typed_name
from ekiben.core.decisions import set_decision_log
from ekiben.core.errors import EkibenError, UsageError, nearest
from ekiben.core.printable import printable

SECTIONS = {
    "Build and run": (
        "init",
        "add",
        "remove",
        "build",
        "plan",
        "run",
        "exec",
        "shell",
        "notebook",
        "doctor",
        "render",
        "bundle",
        "wheels",
    ),
    "Share": ("publish", "catalog", "push", "pull", "sign"),
    "Inspect": ("list", "inspect", "diff", "sbom", "verify"),
    "Jobs": ("submit", "status", "logs", "cancel"),
    "Manage": ("lock", "prune", "completion"),
}
ALIASES = {"image": "build"}  # its first name, which make has, too


class Terminated(KeyboardInterrupt):
    """SIGTERM: of kill, timeout, a batch system. What was started must not outlive us."""


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


def _repeat_interrupt(ignored: sys.UnraisableHookArgs) -> None:
    """Send a signal again that arrived in a destructor, where Python prints its exception and continues."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    signum = signal.SIGTERM if issubclass(ignored.exc_type, Terminated) else signal.SIGINT
    delay, is_started = 0.02, False
    while not is_started:
        # On a busy machine the signal may arrive while this thread starts, and would be ignored again.
        with contextlib.suppress(KeyboardInterrupt):
            later = threading.Timer(delay, os.kill, (os.getpid(), signum))
            later.daemon = True
            later.start()
            is_started = True
        delay *= 4


class Root(click.Group):
    """Expected errors become one message and an exit code of their own, with --json as JSON; Ctrl-C is 130, SIGTERM
    143.
    """

    context_class = HelpContext
    _wants_json = False
    wants_frames = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the files of the folder of commands."""
        return sorted(
            module.name for module in pkgutil.iter_modules(commands.__path__) if not module.name.startswith("_")
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or return None when there is none of this name."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in self.list_commands(ctx):
            return None
        command = import_module(f"{commands.__name__}.{name}").command
        assert isinstance(command, click.Command)
        return command

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text with the program's name in its examples."""
        with with_command_name(self, formatter.width):
            super().format_help_text(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections. None is imported for that."""
        names = set(self.list_commands(ctx))
        listed = {name for section in SECTIONS.values() for name in section}
        for title, section in SECTIONS.items():
            shown = [name for name in section if name in names]
            if title == "Manage":
                shown += sorted(names - listed)
            if shown:
                with formatter.section(title):
                    formatter.write_dl([(name, _short_help(name)) for name in shown])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command, and whether --json comes after it: errors in arguments are JSON, too."""
        self._wants_json = "--json" in itertools.takewhile(lambda word: word != "--", args)
        self.note_frames(args)
        try:
            return super().parse_args(ctx, args)
        except click.ClickException as error:
            self._print_json(ctx, error)
            raise
        except EkibenError as error:
            self._exit(ctx, error)
        except KeyboardInterrupt as error:
            self._interrupt(ctx, error)

    def note_frames(self, args: Sequence[str]) -> None:
        """Note whether the frames of errors are to be printed, before any argument can be wrong."""
        options = [param for param in self.params if isinstance(param, click.Option) and not param.is_flag]
        self.wants_frames = wants_frames(args, os.environ, {name for param in options for name in param.opts})

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
        hook, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
        try:
            return self._invoke(ctx)
        except KeyboardInterrupt as error:  # also a signal while an error is printed
            self._interrupt(ctx, error)
        finally:
            sys.unraisablehook = hook
            if is_main:  # at exit it would end a clean-up with a traceback
                signal.signal(signal.SIGTERM, before)

    def _invoke(self, ctx: click.Context) -> Any:
        """Run the command, and say what is wrong where it fails."""
        try:
            return super().invoke(ctx)
        except click.ClickException as raised:
            wrong = self._move_option(ctx, raised)
            self._print_json(ctx, wrong)
            raise wrong from raised
        except EkibenError as error:
            self._exit(ctx, error)
        except OSError as error:  # a path from the command line: too long, unreadable, on a failing disk
            if error.filename is None:
                raise
            expected = EkibenError(f"{os.fsdecode(error.filename)}: {error.strerror}")
            expected.__cause__ = error
            self._exit(ctx, expected)

    def _move_option(self, ctx: click.Context, error: click.ClickException) -> click.ClickException:
        """Return what to say of an option that comes before the command, or is not there; else ``error`` itself."""
        if not isinstance(error, click.NoSuchOption):
            return error
        if not any(error.option_name in param.opts for param in self.params):
            nearest_first = error.possibilities or []  # click would list all, by the alphabet
            return click.NoSuchOption(error.option_name, error.message, nearest_first[:1], error.ctx)
        message = (
            f"'{error.option_name}' comes before the command: "
            f"{program_name()} {error.option_name} … {ctx.invoked_subcommand}"
        )
        return click.UsageError(message, error.ctx)

    def _exit(self, ctx: click.Context, error: EkibenError) -> NoReturn:
        """Print an expected error and end with its code."""
        self._print_json(ctx, error)
        if self.wants_frames:
            print_frames(error)
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(printable(str(error)), err=True)
        if error.hint:
            click.echo(printable(f"hint: {error.hint}"), err=True)
        ctx.exit(error.exit_code)

    def _interrupt(self, ctx: click.Context, error: KeyboardInterrupt) -> NoReturn:
        """Say that a signal ended the command, and end with its code."""
        stopped = _interrupted(error)
        self._print_json(ctx, stopped)
        if self.wants_frames:
            print_frames(error)
        click.echo(str(stopped), err=True)
        ctx.exit(stopped.exit_code)

    def _print_json(self, ctx: click.Context, error: click.ClickException | EkibenError) -> None:
        """Print an error on stdout when --json was given and nothing was printed there."""
        context = ctx.find_object(Context) or Context()
        if not self._wants_json or context.printed or not self._takes_json(ctx):
            return
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        hint = None if isinstance(error, click.ClickException) else error.hint
        click.echo(json.dumps({"error": {"message": message, "hint": hint, "exit_code": error.exit_code}}, indent=1))

    def _takes_json(self, ctx: click.Context) -> bool:
        """Whether --json is an option of the command, and not an argument of the task that it runs."""
        command = self.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
        return (
            command is None
            or isinstance(command, click.Group)
            or any("--json" in param.opts for param in command.params)
        )

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command that ``args`` begin with. Raises UsageError, with the nearest name, when there is none."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UsageError(f"no command '{args[0]}'." + nearest(args[0], [*self.list_commands(ctx), *ALIASES]))
        return super().resolve_command(ctx, args)


def _interrupted(error: BaseException) -> EkibenError:
    """Say what an interrupted command leaves: its own note, where it has one."""
    notes = getattr(error, "__notes__", None)
    kept = notes[-1] if notes else "what was finished is kept, run the same command to resume"
    stopped = EkibenError(f"interrupted; {kept}")
    stopped.exit_code = 143 if isinstance(error, Terminated) else 130
    return stopped


def _short_help(name: str) -> str:
    """Read the first line of a command's docstring, without importing the command."""
    for folder in commands.__path__:
        path = Path(folder, f"{name}.py")
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                return next(lines, "").strip().strip('"').rstrip(".")
    return ""


@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--store", type=PathType(), metavar="DIR", help="The store (default: $EKIBEN_STORE, else ~/.cache/ekiben/store)."
)
@click.option(
    "--shared",
    type=PathType(),
    metavar="DIR",
    help=(
        "Where colleagues publish; layers there are not built (default: $EKIBEN_SHARED, else `shared:` in config.yaml)."
    ),
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print each decision with its reason, and each program that is started, as a command to paste.",
)
@click.option(
    OPTION,
    is_flag=True,
    help=f"Print the frames of an error above its message, for a bug report (also: {VARIABLE}=1).",
)
@click.version_option(__version__, prog_name="ekiben", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context, store: Path | None, shared: Path | None, verbose: bool, traceback: bool) -> None:
    """Build, run and share container images for LLM training.

    \b
    Examples:
      ekiben build lora-opencalm              build, verify, print what to run
      ekiben plan lora-opencalm               what would be built, and why
      ekiben run lora-opencalm train          run a task
    """
    environment = {**os.environ, VARIABLE: "1"} if traceback else os.environ  # a task that `run` starts reads it
    set_command_options({"--store": store, "--shared": shared})
    ctx.obj = Context(store_option=store, shared_option=shared, environment=environment)
    if verbose:
        from ekiben.core.process import set_trace

        set_trace(lambda line: click.echo(line, err=True))
        set_decision_log(lambda line: click.echo(printable(line), err=True))
    if ctx.invoked_subcommand is None:
        from ekiben.cli.overview import overview

        click.echo("\n".join(overview()))


def main() -> None:
    """Start the program with the arguments of this process."""
    _open_missing_streams()
    root.note_frames(sys.argv[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path is printed as it is, also where its bytes are no UTF-8
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        Path.cwd()
    except OSError as error:
        _print_requested_frames(error)
        click.echo(
            f"error: this folder cannot be used: {error.strerror}\nhint: it was removed: change to another one",
            err=True,
        )
        sys.exit(UsageError.exit_code)
    set_command_name(typed_name(sys.argv, sys.orig_argv))
    try:
        sys.exit(_run())
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _print_requested_frames(error)
        click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        os._exit(1)  # buffered text cannot be written either, and Python would print a traceback
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in the background
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python flushes at exit, without a traceback


def _run() -> int:
    """Run the command, and return the exit code.

    Of its own, click makes 1 of an interrupt that comes after the command's end.
    """
    try:
        color = False if os.environ.get("NO_COLOR") else None  # None: where it is a terminal
        code = root.main(prog_name=program_name(), complete_var=COMPLETE_VAR, standalone_mode=False, color=color)
    except click.ClickException as error:
        _print_requested_frames(error)
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        _print_requested_frames(error)
        stopped = _interrupted(error.__cause__ or error)
        click.echo(str(stopped), err=True)
        return stopped.exit_code
    return code if isinstance(code, int) else 0


def _print_requested_frames(error: BaseException) -> None:
    if root.wants_frames:
        print_frames(error)


def _open_missing_streams() -> None:
    """Open /dev/null where stdin, stdout or stderr was closed: the next file that is opened would take its number, and
    messages.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
