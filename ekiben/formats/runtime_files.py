"""The files of /.singularity.d, which container runtimes read in an image."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scripts:
    """Scripts of `run`, `test` and `instance start` in an image, and the text of `run-help`."""

    run: str = ""
    test: str = ""
    start: str = ""
    help: str = ""


def runtime_files(
    environment: Mapping[str, str],
    labels: Mapping[str, str],
    deffile: str,
    scripts: Scripts,
    environment_scripts: Sequence[str] = (),
) -> dict[str, tuple[int, bytes]]:
    """Return the files of /.singularity.d: path → (mode, content). Values of ``environment`` are not expanded;
    ``environment_scripts`` follow them as they are.

    Raises ValueError when a name cannot be an environment variable's.
    """
    exports = "".join(f"export {name}={shlex.quote(_checked(name, value))}\n" for name, value in environment.items())
    exports += "".join("\n" + text.rstrip("\n") + "\n" for text in environment_scripts)
    texts = {
        "actions/exec": _ENTER + 'exec "$@"\n',
        "actions/run": _ENTER + 'exec /.singularity.d/runscript "$@"\n',
        "actions/shell": _ENTER + _SHELL,
        # It sends no SIGCONT to process 1, as Apptainer's own file does for Singularity before 3.6: later ones forward
        # the signal to this script, and where it has ended by then, they end the instance with status 128 + SIGCONT.
        "actions/start": _ENTER + ('exec /.singularity.d/startscript "$@"\n' if scripts.start else ""),
        "actions/test": _ENTER + 'exec /.singularity.d/test "$@"\n',
        "env/90-environment.sh": exports,
        "env/99-base.sh": _BASE,
        "runscript": scripts.run,
        "test": scripts.test,
        **({"startscript": scripts.start} if scripts.start else {}),
    }
    files = {name: (0o755, _script(text)) for name, text in texts.items()}
    files["labels.json"] = 0o644, json.dumps(dict(labels), indent=1, sort_keys=True).encode() + b"\n"
    if scripts.help:
        files["runscript.help"] = 0o644, scripts.help.encode("utf-8", "surrogateescape")
    files["Singularity"] = 0o644, deffile.encode("utf-8", "surrogateescape")
    return {f".singularity.d/{name}": file for name, file in sorted(files.items())}


def _checked(name: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a name for an environment variable")
    return value


def _script(text: str) -> bytes:
    text = text if text.startswith("#!") else "#!/bin/sh\n" + text
    return (text if text.endswith("\n") else text + "\n").encode("utf-8", "surrogateescape")


_ENTER = """\
for script in /.singularity.d/env/*.sh; do
    if [ -f "$script" ]; then . "$script"; fi
done
"""

_SHELL = """\
for shell in "${SINGULARITY_SHELL:-}" /bin/bash /bin/sh; do
    if [ -x "$shell" ]; then exec "$shell" "$@"; fi
done
echo "this image has no shell" >&2
exit 1
"""

# --nv puts the driver's libraries into /.singularity.d/libs. The other variables carry the
# user's APPTAINERENV_PREPEND_PATH, APPTAINERENV_APPEND_PATH and APPTAINERENV_PATH.
_BASE = """\
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
PATH="${SING_USER_DEFINED_PREPEND_PATH:+$SING_USER_DEFINED_PREPEND_PATH:}$PATH"
PATH="$PATH${SING_USER_DEFINED_APPEND_PATH:+:$SING_USER_DEFINED_APPEND_PATH}"
PATH="${SING_USER_DEFINED_PATH:-$PATH}"
unset SING_USER_DEFINED_PREPEND_PATH SING_USER_DEFINED_APPEND_PATH SING_USER_DEFINED_PATH
export LD_LIBRARY_PATH PATH
"""
