"""Programs and instances in a SIF, for Python: the one module that knows spython.

spython writes the command lines, inspects images and lists instances. These defects of its 0.3 series stay outside:

- It starts `singularity`, whatever is installed. Here its command lines begin with the program that was found.
- execute(stream=True) reads stdout alone and waits for ever once 64 KiB of stderr lie unread; without ``stream`` a
  success has no exit code, stdout and stderr cannot be distinguished, and empty arguments are dropped. Here
  ekiben.core.process runs the line.
- Starting or stopping an instance that fails prints a message and returns as if it had not. Here it raises.
- Apptainer's own lost starts of instances look like others. Here they are started again.
- A folder to bind that is missing ends the whole process. Here it raises.
- An instance's logs are looked for where Apptainer does not put them. Here they are where `instance list` says.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.core.command_name import command_name
from ekiben.core.errors import EngineError, UsageError
from ekiben.core.mounts import bind_args, is_ambiguous
from ekiben.core.process import ProcessError, run, stream, which
from ekiben.run.contract import folders_to_bind
from ekiben.run.launch import RunRequest, Target, launch

_LOST_RACE = "exit status 146"  # 128 + SIGCONT, see ekiben/formats/runtime_files.py
_STARTS = 16
_INSTANCE_NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
)  # the characters that Apptainer allows, without a leading '-'


@dataclass(frozen=True, slots=True)
class Result:
    """The exit code and output of a program that has ended."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """The metadata that a runtime reads from a SIF file."""

    labels: Mapping[str, str]
    definition: str
    runscript: str
    test: str


@dataclass(frozen=True, slots=True)
class Instance:
    """A running instance of a SIF, until it is stopped.

    ``stdout`` and ``stderr`` are files that its own programs write to.
    """

    name: str
    pid: int
    stdout: Path
    stderr: Path


class Runtime:
    """Apptainer or SingularityCE, driven through spython."""

    def __init__(self, program: str | None = None) -> None:
        """Use ``program``, or the one that is installed.

        Raises:
            EngineError: neither apptainer nor singularity is here.
        """
        runtime = program or which("apptainer", "singularity")
        if runtime is None:
            raise EngineError(
                "neither apptainer nor singularity is on PATH",
                hint=f"{command_name()} doctor lists the runtimes that work here",
            )
        self.program = runtime
        self._client = _client(runtime)

    def command(
        self,
        target: Path | Instance,
        argv: Sequence[str],
        *,
        gpu: bool,
        binds: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> list[str]:
        """Return the command line that runs ``argv`` in a SIF or an instance.

        Raises:
            UsageError: ``argv`` is empty, or a folder of ``binds`` is not there.
        """
        if not argv:
            raise UsageError("a program to execute is needed; argv is empty")
        _check_binds(binds)
        image = f"instance://{target.name}" if isinstance(target, Instance) else os.fspath(target)
        folders = [bind for bind in binds if is_ambiguous(bind) and Path(bind).exists()]
        options = [*options, *(word for folder in folders for word in bind_args(folder))]
        plain = [bind for bind in binds if bind not in folders]
        line = self._client.execute(image, list(argv), bind=plain, nv=gpu, options=options, quiet=True)
        return [str(word) for word in line]

    def execute(
        self,
        target: Path | Instance,
        argv: Sequence[str],
        *,
        gpu: bool = False,
        binds: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Result:
        """Run ``argv`` to its end, in this folder, with the environment that a job needs and ``environment`` above it.

        ``on_line`` is called with each line of stdout and stderr; the result then has no output.

        Raises:
            UsageError: ``argv`` is empty, or a folder of ``binds`` is not there.
        """
        request = RunRequest(argv=argv, gpu=gpu, binds=binds)
        settings = {**self._environment(request), **self._inside(environment or {})}
        if isinstance(target, Instance):  # has its folders since it was started
            options, folders = ["--cleanenv", "--pwd", str(Path.cwd())], []
        else:
            options, folders = ["--cleanenv", "--pwd", str(Path.cwd())], folders_to_bind(argv, binds, os.environ)
        line = self.command(target, argv, gpu=gpu, binds=folders, options=options)
        if on_line:
            return Result(stream(line, on_line, env=settings), "", "")
        done = run(line, check=False, env=settings)
        return Result(done.returncode, done.stdout, done.stderr)

    def inspect(self, sif: Path) -> Inspection:
        """Return the labels and scripts of a SIF.

        Raises:
            EngineError: the runtime cannot read the file.
        """
        try:
            inspection = self._client.inspect(str(sif), quiet=True)
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(f"{sif}: spython cannot read {self.program}'s description of it: {error}") from error
        attributes = inspection.get("attributes") if isinstance(inspection, dict) else None
        if attributes is None:
            raise EngineError(f"{sif} cannot be inspected: {_message(inspection)}")
        texts = [str(attributes.get(key) or "") for key in ("deffile", "runscript", "test")]
        return Inspection({str(key): str(value) for key, value in attributes["labels"].items()}, *texts)

    def start(self, sif: Path, *, name: str | None = None, gpu: bool = False, binds: Sequence[Path] = ()) -> Instance:
        """Start a SIF as an instance, which sees this folder and ``binds``.

        Raises:
            UsageError: ``name`` cannot be an instance's, or a folder of ``binds`` is not there.
            EngineError: it does not start; the message has what the runtime wrote.
        """
        name = f"ekiben-{uuid.uuid4().hex[:12]}" if name is None else name
        if not _INSTANCE_NAME.fullmatch(name):
            allowed = "letters, digits, '.', '_' and '-', at most 128 and the first a letter, a digit or '_'"
            raise UsageError(f"{name!r} cannot be an instance's name: use {allowed}")
        request = RunRequest(argv=(), gpu=gpu, binds=binds)
        folders = folders_to_bind((), binds, os.environ)
        _check_binds(folders)
        instance = self._client.instance(str(sif), start=False, name=name, quiet=True)
        line = [
            *instance._init_command(["instance", "start"]),
            "--cleanenv",
            *(["--nv"] if gpu else []),
            *(word for folder in folders for word in bind_args(folder)),
            str(sif),
            name,
        ]
        environment = self._environment(request)
        for attempt in range(_STARTS):  # on a busy machine several attempts in a row may fail
            try:
                run(line, env=environment)
            except ProcessError as error:
                if _LOST_RACE not in error.stderr:
                    raise EngineError(str(error)) from error
            else:
                listed = instance._list(name, quiet=True, return_json=True)
                if isinstance(listed, dict):
                    return Instance(name, int(listed["pid"]), Path(listed["logOutPath"]), Path(listed["logErrPath"]))
            time.sleep(0.1 * attempt)
        raise EngineError(f"{sif}: the instance {name} ended as soon as it was started, {_STARTS} times")

    def stop(self, instance: Instance) -> None:
        """Stop an instance.

        Raises:
            EngineError: the runtime cannot; the message has what it wrote.
        """
        spython_instance = self._client.instance(instance.name, start=False, name=instance.name, quiet=True)
        try:
            run([*spython_instance._init_command(["instance", "stop"]), instance.name])
        except ProcessError as error:
            raise EngineError(str(error)) from error

    def _environment(self, request: RunRequest) -> dict[str, str]:
        return launch(Target(self.program, ""), request, os.environ).environment

    def _inside(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Apptainer reads APPTAINERENV_*, SingularityCE SINGULARITYENV_*; whoever is called singularity may be
        either.
        """
        prefixes = ["APPTAINERENV_"] if Path(self.program).name == "apptainer" else ["APPTAINERENV_", "SINGULARITYENV_"]
        return {f"{prefix}{name}": value for prefix in prefixes for name, value in environment.items()}


def _client(program: str) -> Any:
    """spython's client, whose command lines begin with ``program`` and are returned rather than run."""
    from spython.main import get_client

    client = get_client(quiet=True)

    def init_command(self: Any, action: str | list[str], flags: list[str] | None = None) -> list[str]:
        return [program, "--quiet", *(flags or []), *([action] if isinstance(action, str) else action)]

    instance = type("Instance", (client.instance,), {"_init_command": init_command})
    members = {"_init_command": init_command, "_run_command": lambda self, line, **_: line, "instance": instance}
    return type("Client", (type(client),), members)()


def _check_binds(binds: Sequence[str]) -> None:
    for bind in binds:
        if not Path(bind).exists() and not Path(bind.partition(":")[0]).exists():
            raise UsageError(f"{bind}: is not there, and cannot be bound")


def _message(reply: object) -> str:
    message = reply.get("message", "") if isinstance(reply, dict) else reply
    return " ".join(map(str, message)) if isinstance(message, list) else str(message)
