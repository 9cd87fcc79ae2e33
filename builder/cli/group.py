"""The group that every command belongs to, and what the commands share: options, the store, errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from builder.errors import EkibenError, UsageError

if TYPE_CHECKING:
    from builder.chain import Chain
    from builder.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])


class Terminated(KeyboardInterrupt):
    """SIGTERM: of kill, timeout, a batch system. What was started must not outlive us."""


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


class Errors(click.Group):
    """Expected errors become one message and an exit code of their own; Ctrl-C is 130, SIGTERM 143."""

    def invoke(self, ctx: click.Context) -> Any:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminate)
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if any(error.option_name in known.opts for known in self.params):
                said = f"'{error.option_name}' comes before the command: build.py {error.option_name} … {ctx.invoked_subcommand}"
                raise click.UsageError(said, error.ctx) from error
            raise
        except EkibenError as error:
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(str(error), err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as error:
            click.echo("interrupted; what was finished is kept, run the same command to go on", err=True)
            ctx.exit(143 if isinstance(error, Terminated) else 130)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from builder.errors import nearest

        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UsageError(f"no command '{args[0]}'." + nearest(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


@click.group(cls=Errors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--store",
    "store_path",
    type=click.Path(path_type=Path),
    help="The store (default: $EKIBEN_STORE, else ~/.cache/ekiben/store).",
)
@click.option(
    "--shared",
    type=click.Path(path_type=Path),
    help="Where colleagues publish; layers there are not built (default: $EKIBEN_SHARED, else `shared:` in config.yaml).",
)
@click.option("-v", "--verbose", is_flag=True, help="Print every program that is started, as a command to paste.")
@click.pass_context
def main(ctx: click.Context, store_path: Path | None, shared: Path | None, verbose: bool) -> None:
    """Container images for LLM training: layered definition files become a SIF and a Docker image.

    \b
    Examples:
      build.py image lora-opencalm              build, verify, print what to run
      build.py plan lora-opencalm               what would run, and why
      build.py run lora-opencalm train          run a task
    """
    ctx.obj = store_path
    if verbose:
        from builder.process import set_trace

        set_trace(lambda line: click.echo(line, err=True))


def chain_options(command: Command) -> Command:
    command = click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Bind an argument of the definition files; may repeat.",
    )(command)
    command = click.option(
        "--gpu-arch",
        metavar="8.0,9.0|native",
        help="Compile extensions for these GPUs only (compute capabilities), or for those of this machine.",
    )(command)
    return click.option("--stack", help="Another stack of images/stacks/ than the recipe's own.")(command)


def sign_option(command: Command) -> Command:
    return click.option(
        "--sign",
        is_flag=False,
        flag_value="",
        metavar="[KEY]",
        help="Sign it with this PGP key, as gpg knows it; without KEY, with gpg's default or your only one.",
    )(command)


def signature_options(command: Command) -> Command:
    command = click.option(
        "--key",
        "signer",
        metavar="FILE|FINGERPRINT",
        help="Whose signature: the public key in FILE, or one of your keyring (default: any of your keyring). "
        "Means --require-signature.",
    )(command)
    return click.option(
        "--require-signature", is_flag=True, help="Refuse what is signed by nobody of your keyring; --key names whom."
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def open_store(path: Path | None) -> Store:
    """The user's own store, before the one that colleagues publish to when there is one."""
    from builder.config import read_config
    from builder.store import Store, default_root

    root = path.expanduser().absolute() if path else default_root()
    shared = click.get_current_context().find_root().params.get("shared") or read_config().shared
    if shared is None:
        return Store(root)
    from builder.shared import open_shared

    return Store(root, open_shared(Path(shared).expanduser().absolute()))


def bound(arguments: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.partition("=") for item in arguments]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--arg {name}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def resolved(recipe: str, stack: str | None, arguments: tuple[str, ...], gpu_arch: str | None = None) -> Chain:
    from builder.chain import resolve
    from builder.recipe import find_recipe

    return resolve(find_recipe(recipe), stack=stack, arguments=bound(arguments), gpu_arch=gpu_arch)
