"""What commands share: the types of their options, and options of several commands."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ekiben.cli.context import Context
from ekiben.core import plugins
from ekiben.core.checked import shorten
from ekiben.core.command_name import INSTALLED, program_name
from ekiben.core.environment import ARCHITECTURES
from ekiben.core.errors import UsageError, nearest
from ekiben.core.output import check_output_file, check_output_folder
from ekiben.core.paths import expand_home
from ekiben.core.printable import printable

if TYPE_CHECKING:
    from ekiben.core.pgp_key import Key
    from ekiben.core.progress import Style
    from ekiben.resolve.graph import ResolvedRecipe
    from ekiben.spec.recipe import Recipe

Function = TypeVar("Function", bound=Callable[..., Any])
COMPLETE_VAR = "_EKIBEN_COMPLETE"  # set by the shell while it completes a word
_DEFAULT_KEY = "\0"
_OF_TASKS = {"--dry-run", "--json", "--help", "--output"}


# ------------------------------------------------------------------------------------------------------------ commands


class _HelpFormatter(click.HelpFormatter):
    """Headings of help in bold, on a terminal."""

    def write_heading(self, heading: str) -> None:
        """Write a heading."""
        self.write(f"{'':>{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")


class HelpContext(click.Context):
    """A context whose help has its headings in bold."""

    formatter_class = _HelpFormatter


class Command(click.Command):
    """A command whose help names the program as the user started it."""

    context_class = HelpContext

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text."""
        with with_command_name(self, formatter.width):
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in sections where they are many."""
        from ekiben.cli.sections import write_options

        write_options(self, ctx, formatter)


class TaskCommand(Command):
    """A command with the arguments IMAGE [TASK [ARGS…]]: its options come before the task, and all else is the task's.

    Before, its options stood after the task, and ``--`` before the task's own: that is still read.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises click's UsageError."""
        return super().parse_args(ctx, self.arrange(ctx, args))

    def arrange(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the command's options, ``--``, and then the image, the task and what is the task's."""
        options, rest, is_ended = self._split(ctx, args)
        if is_ended or not rest:
            return args
        image, (more, task_args, is_ended) = rest[0], self._split(ctx, rest[1:])
        options += more
        if not is_ended and self.name not in ("shell", "exec") and "--" in task_args[1:]:
            at = task_args.index("--", 1)
            with contextlib.suppress(click.UsageError):  # of the task's own
                after_task, unknown, _ = self._split(ctx, task_args[1:at])
                if not unknown:
                    options, task_args = [*options, *after_task], [task_args[0], *task_args[at + 1 :]]
        self._note_misplaced_options(ctx, task_args[1:])
        return [*options, "--", image, *task_args]

    def _note_misplaced_options(self, ctx: click.Context, args: list[str]) -> None:
        """Say of this command's options after a task that the task gets them; not of those that tasks have, too."""
        names = {name for param in self.params for name in param.opts if name.startswith("--")} - _OF_TASKS
        misplaced = [word for word in args if word.partition("=")[0] in names]
        if misplaced and not ctx.resilient_parsing:
            line = f"note: {', '.join(misplaced)} is the task's; options of {ctx.info_name} come before the image"
            click.echo(printable(line), err=True)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], bool]:
        """Return the options at the beginning of ``args``, what follows, and whether ``--`` ended them.

        Raises click's UsageError for an option that is not this command's.
        """
        without = click.Command(self.name, params=[param for param in self.params if isinstance(param, click.Option)])
        parser = without.make_parser(ctx)  # without the arguments, which would match all that follows
        parser.allow_interspersed_args = False
        _, rest, _ = parser.parse_args(list(args))
        options = args[: len(args) - len(rest)]
        is_ended = bool(options) and options[-1] == "--"
        return options[:-1] if is_ended else options, rest, is_ended


class CommandGroup(click.Group):
    """The same for a command that has commands of its own."""

    command_class = Command
    context_class = HelpContext

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text."""
        with with_command_name(self, formatter.width):
            super().format_help_text(ctx, formatter)


@contextlib.contextmanager
def with_command_name(command: click.Command, width: int) -> Iterator[None]:
    """Let the examples of a command's help, written with ``ekiben``, begin with what starts the program here, within
    ``width``.
    """
    written = command.help
    command.help = "\n".join(_fit_example(line, width - 2) for line in (written or "").split("\n"))
    try:
        yield
    finally:
        command.help = written


def _fit_example(line: str, width: int) -> str:
    """Return a line of help; an example with this program's name, and broken where it is too wide so that it can still
    be pasted.
    """
    example = re.fullmatch(rf"( +){INSTALLED} (.*?)(?:  +(\S.*))?", line)
    if example is None:
        return line
    indent, arguments, remark = example.groups()
    shown = f"{indent}{program_name()} {arguments}"
    aligned = (
        f"{shown}{' ' * (len(line) - len(remark) - len(indent) - len(INSTALLED) - 1 - len(arguments))}{remark}"
        if remark
        else shown
    )
    if len(aligned) <= width:
        return aligned
    lines = textwrap.wrap(
        shown, width - 2, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines) + (f"\n{indent}    {remark}" if remark else "")


def refuse_ignored(reason: str, *names: str) -> None:
    """Refuse options of the running command that were given though they have no effect; ``reason`` says when they have
    one.

    Raises:
        UsageError: one of the parameters ``names`` was given.
    """
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            shown = f"the argument {param.make_metavar(ctx)}" if isinstance(param, click.Argument) else param.opts[0]
            raise UsageError(f"{shown} {reason}")


# --------------------------------------------------------------------------------------------------------------- types

_LONGEST_NAME = 255  # bytes


def _refuse_empty(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    if not os.fspath(value):
        raise click.BadParameter("is empty; is a variable of your shell not set?", ctx, param)


def _refuse_long(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    if any(len(os.fsencode(name)) > _LONGEST_NAME for name in os.fspath(value).split("/")):
        raise click.BadParameter(
            f"{shorten(os.fspath(value))} has a name of more than {_LONGEST_NAME} bytes, and no file has one",
            ctx,
            param,
        )


class TextType(click.ParamType[str]):
    """A name or another text, which is not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        _refuse_empty(value, param, ctx)
        return str(value)


class NameType(TextType):
    """A name that a file may have, or a path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name."""
        _refuse_long(value, param, ctx)
        return super().convert(value, param, ctx)


class RecipeType(NameType):
    """A recipe or another kind of name; the shell completes names of recipes, and files."""

    name = "recipe"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Name the recipes that begin so."""
        from ekiben.spec.recipe import recipe_folders

        items = [CompletionItem(name) for name in sorted(recipe_folders()) if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


class LayerType(NameType):
    """A layer; the shell completes those of this project."""

    name = "layer"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Name the layers that begin so."""
        from ekiben.core.paths import PROJECT_ROOT

        names = sorted(path.stem for path in (PROJECT_ROOT / "images").glob("*.def"))
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class PathType(click.Path):
    """A path, which is not empty."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, with a user's home for ``~``."""
        _refuse_empty(value, param, ctx)
        _refuse_long(value, param, ctx)
        return expand_home(Path(value), param.opts[0] if param else self.name)


class OutputFile(PathType):
    """A file to write: a regular one that is there, or a new one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, its link resolved. Raises UsageError when no regular file can be there."""
        return check_output_file(super().convert(value, param, ctx), f"-o {value}")


class OutputFolder(PathType):
    """A folder to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises UsageError when no folder can be there."""
        return check_output_folder(super().convert(value, param, ctx), f"-o {value}")


class NearestChoice(click.Choice[str]):
    """One of several words; errors offer the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return the message."""
        hint = nearest(str(value), self.choices)
        return super().get_invalid_choice_message(value, ctx) + (hint if "Did you mean" in hint else "")


class CountType(click.IntRange):
    """A whole number within limits."""

    name = "integer"  # click's message has "integer range"


class PluginType(click.ParamType[str]):
    """The name of a module in a folder of plugins, or ``also``. ``option`` and ``kind`` are for errors."""

    name = "plugin"

    def __init__(self, package: str, group: str, *, option: str, kind: str, also: tuple[str, ...] = ()) -> None:
        self.package, self.group, self.option, self.kind, self.also = package, group, option, kind, also

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Name what there is; nothing is imported for it."""
        return "|".join((*self.also, *plugins.names(self.package, self.group)))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. Raises UsageError, with the nearest name, when there is none."""
        plugins.check(self.package, self.group, value, option=self.option, kind=self.kind, also=self.also)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Name the modules that begin so."""
        known = (*self.also, *plugins.names(self.package, self.group))
        return [CompletionItem(name) for name in known if name.startswith(incomplete)]


class _KeyType(TextType):
    """A PGP key, as gpg names it; --sign without a value is gpg's default."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the key's name, empty for gpg's default."""
        return "" if value == _DEFAULT_KEY else super().convert(value, param, ctx)


# ------------------------------------------------------------------------------------------ options of several commands


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """What the command line asks for beside the recipe's name. ``arguments`` are those of definition files; ``layers``
    are added to the recipe's; ``included`` are files and folders elsewhere that it may use."""

    stack: str | None = None
    gpu_arch: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    arch: str | None = None
    included: tuple[Path, ...] = ()

    @property
    def mirror(self) -> str | None:
        """Return the URI of a Debian archive, where an argument names one."""
        return self.arguments.get("mirror")

    def find(self, recipe: str) -> Recipe:
        """Find the recipe of a name or folder. Raises UsageError, DefinitionError."""
        from ekiben.spec.recipe import find_recipe

        return replace(find_recipe(recipe, self.included), layers=self.layers)

    def resolve(self, recipe: str | Recipe) -> ResolvedRecipe:
        """Resolve a recipe, or the one of a name or folder. Raises UsageError, DefinitionError."""
        from ekiben.resolve.resolve import resolve

        named = self.find(recipe) if isinstance(recipe, str) else recipe
        return resolve(named, stack=self.stack, arguments=dict(self.arguments), gpu_arch=self.gpu_arch, arch=self.arch)


def include_option(
    purpose: str = "Let the recipe use this file or folder outside its own; may repeat.",
) -> Callable[[Function], Function]:
    """Add --include; the command gets ``included``."""
    return click.option("--include", "included", multiple=True, type=PathType(), metavar="FILE|DIR", help=purpose)


def image_options(function: Function) -> Function:
    """Add --stack and --layer, which also decide the image's name; the command gets ``stack`` and ``layers``."""
    function = click.option(
        "--layer",
        "layers",
        multiple=True,
        type=LayerType(),
        metavar="NAME",
        help="Add this layer; it replaces the layer with the same packages; may repeat.",
    )(function)
    return click.option(
        "--stack", type=NameType(), metavar="NAME", help="Use this stack of images/stacks/, not the recipe's."
    )(function)


def recipe_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --stack, --layer, --include, --arch, --gpu-arch and --build-arg; the command gets them as one
    ``recipe_options``.
    """
    return recipe_options_with(include_option())(function)


def recipe_options_with(
    include: Callable[[Callable[..., None]], Callable[..., None]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the same options, with the command's own --include."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_options(*args: Any, **params: Any) -> None:
            values = {name: params.pop(name) for name in RecipeOptions.__slots__}
            values["arguments"] = bind_arguments(values["arguments"])
            function(*args, recipe_options=RecipeOptions(**values), **params)

        arch = arch_option("Build for this processor (default: this machine's); another one is emulated.")
        return image_options(include(arch(definition_options(with_options))))

    return decorate


def arch_option(purpose: str) -> Callable[[Function], Function]:
    """Add --arch, one of the architectures that stacks can be locked for; ``purpose`` is its help text."""
    return click.option("--arch", type=NearestChoice(sorted(ARCHITECTURES.values())), help=purpose)


def definition_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --gpu-arch and --build-arg; the command gets ``gpu_arch`` and ``arguments``, for bind_arguments()."""
    function = click.option(
        "--build-arg",
        "arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set an argument of the definition files; may repeat.",
    )(function)
    return click.option(
        "--gpu-arch",
        type=TextType(),
        metavar="8.0,9.0|native",
        help="Compile extensions for these compute capabilities only, or for this machine's GPUs.",
    )(function)


def bind_arguments(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return --build-arg's values, name → value. Raises UsageError for one that is not NAME=VALUE."""
    pairs = [item.partition("=") for item in arguments]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--build-arg {name}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def engine_option(purpose: str) -> Callable[[Function], Function]:
    """Add --engine, one of the executors that are there; ``purpose`` is its help text."""
    kind = PluginType("ekiben.executors", "ekiben.executors", option="--engine", kind="engine", also=("auto",))
    return click.option("--engine", type=kind, default="auto", show_default=True, help=purpose)


def find_signing_key(context: Context, sign: str | None, option: str = "--sign") -> Key | None:
    """Return the key of ``option``; without it the user's key that require_signature of the settings names, None
    where nothing does.

    Raises UsageError, SignatureError, EngineError.
    """
    from ekiben.signing import gpg, policy

    required = context.settings.require_signature
    if sign is not None:
        key = gpg.find_key(sign, option)
        if required and key.fingerprint not in required.fingerprints:
            context.log(f"warning: {required} does not name {key}: this image will not be run here")
        return key
    return policy.signing_key(required) if required else None


def key_for_file(context: Context, sif: Path, sign: str | None) -> Key | None:
    """Return the key that signs a file: as find_signing_key(), but None for a file that has the required signature.

    Raises UsageError, SignatureError for a file with another signature, be it a bad one, EngineError, StoreError.
    """
    from ekiben.signing.gpg import SignatureError
    from ekiben.signing.policy import required_signature
    from ekiben.signing.sif import is_signed

    required = context.settings.require_signature
    if sign is None and required and is_signed(sif):
        try:
            required_signature(required, context.store, context.progress).check(sif)
        except SignatureError as error:
            hint = "where you trust what is in it all the same, --sign KEY signs it"
            raise SignatureError(str(error), rank=error.rank, hint=hint) from error
        return None
    return find_signing_key(context, sign)


def sign_option(function: Function) -> Function:
    """Add --sign with an optional key: None, or the key's name, empty for gpg's default."""
    return click.option(
        "--sign",
        type=_KeyType(),
        is_flag=False,
        flag_value=_DEFAULT_KEY,
        metavar="[KEY]",
        help=(
            "Sign it with this PGP key, named as in gpg; without KEY, with gpg's default key or your only one. If "
            "config.yaml has require_signature, your key among those signs without this option."
        ),
    )(function)


def signature_options(function: Function) -> Function:
    """Add --require-signature and --key."""
    function = click.option(
        "--key",
        "signer",
        type=TextType(),
        metavar="FILE|FINGERPRINT",
        help=(
            "Require a signature by the public key in FILE, or by one key of your keyring. Implies --require-signature."
        ),
    )(function)
    return click.option(
        "--require-signature", is_flag=True, help="Refuse an image that no key of your keyring has signed."
    )(function)


def progress_option(function: Function) -> Function:
    """Add --progress, which sets ``Context.progress_style``."""

    def remember(ctx: click.Context, param: click.Parameter, value: Style) -> None:
        if context := ctx.find_object(Context):
            context.progress_style = value

    return click.option(
        "--progress",
        type=click.Choice(["auto", "plain"]),
        default="auto",
        show_default=True,
        expose_value=False,
        callback=remember,
        help="Output of scripts: `auto` shows the last lines on a terminal only; `plain` prints all lines.",
    )(function)


def json_option(function: Function) -> Function:
    """Add --json, which sets ``Context.json``."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if context := ctx.find_object(Context):
            context.json = value

    return click.option(
        "--json", is_flag=True, expose_value=False, callback=remember, help="Print the result as JSON."
    )(function)
