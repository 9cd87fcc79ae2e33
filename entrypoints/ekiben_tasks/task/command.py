"""Build a task's command line, run it to an exit code, and start its processes on the GPUs of this node."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ekiben_tasks.task.errors import SettingError, TaskError, explain_disk, print_frames
from ekiben_tasks.task.settings import help_table, load


def command(
    prog: str, doc: str | None, settings: type[Any], arguments: Sequence[str] | None
) -> argparse.ArgumentParser:
    """Return a task's parser with --config and --set, and its settings in --help.

    doc: the description in --help. arguments: the command line, from which --config is read here; None: that of this
    process.

    Raises:
        SettingError: the file of --config cannot be read, or holds a wrong setting.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    config = first.parse_known_args(arguments)[0].config
    parser = plain_parser(prog, doc)
    parser.epilog = help_table(load(settings, config))
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting")
    return parser


def plain_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a task without settings. doc: the description in --help."""
    return argparse.ArgumentParser(
        prog=prog,
        description=(doc or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def recipe_folder(config: Path | None, script: str) -> Path:
    """Return the folder of the recipe, in which ``data/`` lies.

    In an image that is $EKIBEN_RECIPE, else the parent of the folder of ``config`` or, without one, of ``script``.
    """
    recipe = os.environ.get("EKIBEN_RECIPE")
    return Path(recipe) if recipe else (config or Path(script)).resolve().parent.parent


def start_processes(script: str, count: int | None, arguments: Sequence[str] | None) -> None:
    """Replace this process by a launcher of ``count`` processes of ``script``.

    The launcher passes signals on, and exits as the run does. torchrun is not used, because it exits with 1 whatever
    its processes exited with. This function returns if there is nothing to start: no count was given, this is one of
    the processes, or it is the only one.

    Raises:
        SettingError: the count is below 1.
    """
    if count is None or "WORLD_SIZE" in os.environ:
        return
    check_gpus(count)
    if count == 1:
        return
    here = Path(script).resolve()
    # Next to this library: only in the image is it next to a recipe's own script.
    launcher = [
        sys.executable,
        str(Path(__file__).resolve().parents[2] / "launch_node.py"),
        "--processes",
        str(count),
        "--",
    ]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // count, 1)))
    task_arguments = sys.argv[1:] if arguments is None else arguments
    os.execv(sys.executable, [*launcher, sys.executable, str(here), *task_arguments])


@dataclass(frozen=True, slots=True)
class DryRun:
    """Describe the GPUs that a dry run plans for; None: those of this machine."""

    gpus: int | None = None
    gpu: str | None = None  # a name of ekiben_tasks/models/memory.py, which lists its memory


def read_dry_run(args: argparse.Namespace) -> DryRun | None:
    """Return the dry run that --dry-run, --gpus and --on describe, None without --dry-run.

    Raises:
        SettingError: --on without --dry-run, or a number of GPUs below 1.
    """
    if args.on and not args.dry_run:
        raise SettingError(f"--on {args.on}: is for --dry-run, which plans for GPUs that are not here")
    if not args.dry_run:
        return None
    if args.gpus is not None:
        check_gpus(args.gpus)
    return DryRun(args.gpus, args.on)


class _FormerFlag(argparse.Action):
    """A former name of a flag: accepted with a warning for one more release, not in the help."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        """Set the flag under its name of today."""
        if os.environ.get("RANK", "0") == "0":
            print(
                f"warning: {option} is now --{self.dest.replace('_', '-')}; the old name will be removed",
                file=sys.stderr,
                flush=True,
            )
        setattr(namespace, self.dest, True)


def add_flag(parser: argparse.ArgumentParser, name: str, *, former: str, help: str) -> None:
    """Add the flag ``name`` to ``parser``. former: its name until the last release, accepted with a warning."""
    parser.add_argument(name, action="store_true", help=help)
    dest = name.lstrip("-").replace("-", "_")
    parser.add_argument(
        former, action=_FormerFlag, dest=dest, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def add_on_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --on, which names the GPU that a dry run plans for."""
    parser.add_argument(
        "--on", metavar="GPU", help="with --dry-run: plan for this GPU, for example H100; with --gpus N for N of them"
    )


def add_fetch_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --fetch-only, which fetches the model, and nothing else."""
    parser.add_argument(
        "--fetch-only",
        nargs="?",
        const="",
        metavar="DIR",
        help="fetch the model to the hub's cache, or into DIR, with its hashes, and stop",
    )


def check_gpus(count: int) -> None:
    """Raise SettingError for a number of GPUs below 1."""
    if count < 1:
        raise SettingError(f"--gpus {count}: at least 1 is needed")


def fail(error: TaskError) -> NoReturn:
    """Print ``error`` to stderr and exit with its code. With EKIBEN_TRACEBACK=1, print its frames above it.

    Raises:
        SystemExit: always.
    """
    print_frames(error)
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


# How many processes mpirun or srun started, and which of them this is; srun last: mpirun uses it to reach other nodes.
_STARTED_AS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def refuse_copies(environment: Mapping[str, str]) -> None:
    """Exit if srun or mpirun started this task several times as separate runs, which would write into the same output.

    The first of them prints why. WORLD_SIZE in ``environment`` says that they belong together, EKIBEN_INDEPENDENT=1
    that they may be separate.

    Raises:
        SystemExit: with code 2, in each of several separate processes.
    """
    several = (names for names in _STARTED_AS if environment.get(names[0], "") not in ("", "0", "1"))
    size, rank = next(several, ("", ""))
    if not size or {"WORLD_SIZE", "EKIBEN_INDEPENDENT"} & environment.keys():
        return
    if environment.get(rank, "0") == "0":
        task = Path(sys.argv[0]).stem
        print(
            f"error: srun or mpirun started {task} {environment[size]} times, as separate runs: start it once (srun -n"
            " 1), with --gpus N for several processes on one node; `ekiben submit` and torchrun join several nodes;"
            " EKIBEN_INDEPENDENT=1 is for runs that are meant to be separate",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(2)


def silence_libraries() -> None:
    """Silence libraries' warnings that a user of a task cannot act on."""
    # PEFT imports it, and without a GPU it warns of missing CPU kernels, which are not used.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # flash-attn 4's compiler, of an argument that flash-attn itself passes.
    warnings.filterwarnings("ignore", message=r"Argument \w+ \(position \d+\) cannot be converted to a JitArgument")


def run(main: Callable[[], int]) -> NoReturn:
    """Run a task's main() and exit: a TaskError becomes one message and an exit code, ^C becomes 130.

    Raises:
        SystemExit: always.
    """
    refuse_copies(os.environ)
    silence_libraries()
    try:
        raise SystemExit(main())
    except TaskError as error:
        fail(error)
    except Exception as error:
        if message := explain_disk(error):
            expected = TaskError(message)
            expected.__cause__ = error
            fail(expected)
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def print_once(*lines: str) -> None:
    """Print ``lines`` in the first process of a run only. Works before the process group is initialised, too."""
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in lines), end="", flush=True)


def check_smoke(what: str, passed: bool, detail: str = "") -> None:
    """Print that the check ``what`` of a smoke test passed. detail: what was measured.

    Raises:
        TaskError: it failed.
    """
    if not passed:
        raise TaskError(f"smoke: failed: {what}" + (f" ({detail})" if detail else ""))
    print(f"smoke       {what}" + (f": {detail}" if detail else ""), flush=True)
