"""Evaluates a %environment that is a script: its shell runs it in the finished layers, as Apptainer does at a start."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.builder.base_config import has_config
from ekiben.core.checked import read_regular
from ekiben.core.environment import DEFAULT_PATH
from ekiben.core.errors import LayerError
from ekiben.core.paths import BUILD_MOUNT
from ekiben.formats.evaluated import EVALUATED, Evaluated, read_environment
from ekiben.formats.layer import File
from ekiben.resolve.graph import Layer
from ekiben.spec.environment import EnvironmentScript, depends_on_start
from ekiben.store import Store, StoredLayer

SECONDS = 60  # timeout of a script
LINES = 12  # of its output, in an error
MAX_SIZE = 1 << 20  # bytes of all variables
_WORK = f"/{BUILD_MOUNT}/environment.d"
# Home and folder of each evaluation. In the last, commands such as hostname give other answers.
_STARTS = {"usual": ("/root", "/"), "elsewhere": ("/nonexistent/home", "/usr"), "machine": ("/root", "/")}
_TIMEOUT, _NO_ENV, _NO_SCRIPT = 90, 91, 92


def evaluated_of(layers: Sequence[StoredLayer], store: Store) -> Evaluated | None:
    """Return what the highest script of the environment in ``layers`` set; None where there is none.

    Raises LayerError for a layer that does not hold it, StoreError, OSError.
    """
    for layer in reversed(layers):
        if layer.inputs.get("kind") != "environment" and not has_config(layer.inputs):
            continue
        with store.reader(layer.digest) as reader:
            entry = reader.lookup(EVALUATED)
            try:
                return Evaluated.parse(reader.read_file(EVALUATED) if entry and entry.kind == "file" else b"")
            except ValueError as error:
                raise LayerError(f"layer {layer.name}: its /{EVALUATED} {error}") from error
    return None


def environment_of(environment: Mapping[str, str], layers: Sequence[StoredLayer], store: Store) -> Mapping[str, str]:
    """Return the variables of a script on ``layers``: ``environment``, and what scripts of the environment set."""
    evaluated = evaluated_of(layers, store)
    return {**environment, **evaluated.values} if evaluated else environment


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of a layer's scripts, which reads and writes files of ``folder``.

    ``of_base``: the scripts among the files of the image.
    """

    layer: Layer
    folder: Path
    of_base: Sequence[str] = ()

    @property
    def script(self) -> EnvironmentScript:
        """Return the layer's own script; those below it have been evaluated."""
        return self.layer.scripts[-1]

    def write(self) -> str:
        """Write the files of the evaluation, and return the script that runs it."""
        self.folder.mkdir(parents=True)
        names = [f"{number}-{script.path.name}" for number, script in enumerate(self.layer.scripts)]
        for name, script in zip(names, self.layer.scripts, strict=True):
            padding = "\n" * max(0, script.line - 1)  # the shell's messages have the numbers of the file's lines
            (self.folder / name).write_text(padding + script.text, encoding="utf-8", errors="surrogateescape")
        lines = [_BELOW]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(self.layer.environment.items())]
        for name, script in zip(names, self.layer.scripts, strict=True):
            if script.file:  # it is among those of the image
                continue
            lines += [f': "${{{used}?which no layer sets}}"' for used in script.required]
            lines += [f". {shlex.quote(f'{_WORK}/{name}')}"]
        (self.folder / "all.sh").write_text("\n".join([_HEAD, *lines, _ABOVE, _TAIL]), encoding="utf-8")
        check = f'"$shell" -n {shlex.quote(f"{_WORK}/{names[-1]}")} || exit {_NO_SCRIPT}\n'
        starts = "".join(f"begin {name} {home} {folder}\n" for name, (home, folder) in _STARTS.items())
        values = {"no-env": _NO_ENV, "seconds": SECONDS, "path": DEFAULT_PATH, "work": _WORK, "timeout": _TIMEOUT}
        post = re.sub("@([a-z-]+)@", lambda match: str(values[match[1]]), _POST)
        return f"{post}{check}{starts}"

    def read(self) -> Evaluated:
        """Return what the scripts set. Raises LayerError."""
        evaluated = {name: self._read(name, home) for name, (home, _) in _STARTS.items()}
        usual, elsewhere, machine = evaluated["usual"], evaluated["elsewhere"], evaluated["machine"]
        names = sorted(usual.keys() | elsewhere.keys() | machine.keys())
        of_machine = [name for name in names if usual.get(name) != machine.get(name)]
        varying = [name for name in names if usual.get(name) != elsewhere.get(name) or name in of_machine]
        texts = [*self.of_base, *(script.text for script in self.layer.scripts)]
        at_start = bool(varying) or any(map(depends_on_start, texts))
        values = {name: value for name, value in usual.items() if name not in of_machine}
        return Evaluated(values, tuple(varying), at_start)

    def _read(self, name: str, home: str) -> dict[str, str]:
        try:
            return read_environment(read_regular(self.folder / f"{name}.out", max_size=MAX_SIZE), {"HOME": home})
        except (OSError, ValueError) as error:
            reason = "it leaves nothing" if isinstance(error, OSError) else f"it {error}"
            raise LayerError(f"{self._what} cannot be evaluated in the image: {reason}") from error

    @property
    def _what(self) -> str:
        return f"{self.script.where}: {'the environment of the base' if self.script.file else '%environment'}"

    def failure(self, code: int, lines: Sequence[str]) -> LayerError:
        """Return the error of an evaluation that ended with ``code`` and wrote ``lines``."""
        if code == _TIMEOUT:
            reason = f"it does not end within {SECONDS} seconds"
        elif code == _NO_ENV:
            reason = "the image has no program env"
        elif code == _NO_SCRIPT:
            reason = "the shell cannot read it"
        else:
            reason = "the shell ends before its last line"
        shown = [*self._located(line for line in lines if line.strip())][-LINES:]
        return LayerError(
            f"{self._what} cannot be evaluated in the image: {reason}" + "".join(f"\n  {line}" for line in shown)
        )

    def _located(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield lines of the shell's, with the files' own paths."""
        for line in lines:
            text = line
            for number, script in enumerate(self.layer.scripts):
                text = text.replace(f"{_WORK}/{number}-{script.path.name}", str(script.path))
            yield text.replace(f"{_WORK}/all.sh", str(self.script.path))


def environment_files(evaluated: Evaluated) -> list[File]:
    """Return the files of a layer that holds an evaluated environment."""
    return [File(path, mode, content=content) for path, (mode, content) in evaluated.files().items()]


# Apptainer passes only the home and the folder of the caller's variables to these scripts.
_POST = """\
set +e
shell=/bin/sh limit=
[ ! -x /bin/bash ] || shell=/bin/bash
command -v env >/dev/null || exit @no-env@
if timeout -s KILL 5 env >/dev/null 2>&1; then limit="timeout -s KILL @seconds@"; fi
ulimit -t @seconds@ 2>/dev/null
begin() {
    cd "$3" 2>/dev/null || cd /
    env -i HOME="$2" PATH=@path@ $limit "$shell" @work@/all.sh @work@/"$1"
    code=$?
    [ "$code" -le 128 ] || exit @timeout@
    [ -s @work@/"$1.out" ] || exit 1
}
"""
_HEAD = """\
_out=$1 _env=$(command -v env)
case $1 in
*/machine)
    id() { echo 4321; }
    nproc() { echo 4321; }
    hostname() { echo another; }
    whoami() { echo another; }
    uname() { echo another; }
    date() { echo another; }
    ;;
esac
shift
"""
# Scripts of a base, and of the %post of layers, in the order in which Apptainer has them.
_BELOW = """\
for _script in /.singularity.d/env/[0-8]*.sh; do
    [ ! -f "$_script" ] || . "$_script"
done
"""
_ABOVE = """\
for _script in /.singularity.d/env/*.sh; do
    case $_script in
    */[0-8]*.sh | */90-environment.sh | */99-base.sh) ;;
    *) [ ! -f "$_script" ] || . "$_script" ;;
    esac
done
"""
_TAIL = '"$_env" -0 >"$_out.out"\n'
