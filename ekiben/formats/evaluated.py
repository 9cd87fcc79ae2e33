"""The values of a %environment script, as a shell evaluates them in the finished layers: a file of the image, and the
entrypoint of a Docker image in which the values depend on where it starts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ekiben.core.checked import Fields, check_variables, parse_json
from ekiben.core.environment import DEFAULT_PATH

EVALUATED = "opt/ekiben/environment.json"
START = "/opt/ekiben/start"
_SET = "/opt/ekiben/environment.sh"
# Variables of the shell itself, and of its caller.
_OF_START = {"PWD", "OLDPWD", "SHLVL", "_"}


def written_path(parent: str) -> str:
    """Return where a layer keeps what its %post appends to /environment. ``parent``: the key of the layer below."""
    return f"/opt/ekiben/environment.d/{parent[:12]}.sh"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """``values`` as root's shell in / has them, without those of a machine; ``varying`` are names that another home,
    folder or machine gives another value; ``at_start``: a container has to run the scripts to know them all."""

    values: Mapping[str, str]
    varying: tuple[str, ...] = ()
    at_start: bool = False

    @classmethod
    def parse(cls, data: bytes) -> Evaluated:
        """Read the file EVALUATED. Raises ValueError."""
        fields = Fields.of(parse_json(data))
        values, varying = fields.texts("environment"), fields.strings("varying")
        check_variables([*values, *varying])
        return cls(values, tuple(varying), bool(fields.data.get("at_start")))

    @property
    def fixed(self) -> dict[str, str]:
        """Return the values that are the same wherever the image starts."""
        return {name: value for name, value in self.values.items() if name not in self.varying}

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Return the files of the layer: path → (mode, content)."""
        record = {"environment": dict(self.values), "varying": list(self.varying), "at_start": self.at_start}
        return {
            "/" + EVALUATED: (0o644, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n"),
            START: (0o755, _START.encode()),
            _SET: (0o644, self._set().encode()),
        }

    def _set(self) -> str:
        """Return the script that sets the image's variables, except those that the caller has set."""
        names = sorted({*self.values, *self.varying})
        known = {"PATH": DEFAULT_PATH, **self.fixed}  # Docker sets that where an image has none
        lines = [_SOURCE]
        lines += [f'_new_{name}="${{{name}-}}" _is_{name}="${{{name}+x}}"\n' for name in names]
        lines += ['eval "$_given"\n']
        for name in names:
            is_default = f'[ -z "${{{name}+x}}" ]'
            if name in known:
                is_default += f' || [ "${name}" = {shlex.quote(known[name])} ]'
            elif name == "HOME":  # every container has one
                is_default = "true"
            lines += [
                f'if {is_default}; then if [ -n "$_is_{name}" ]; then export {name}="$_new_{name}"; else unset {name}; '
                f"fi; fi\n"
            ]
        return "".join([*lines, 'exec "$@"\n'])


def with_start(entrypoint: Sequence[str] | None, command: Sequence[str]) -> list[str]:
    """Return a command that runs in an image's container without the program of its ``entrypoint``: what evaluates the
    environment remains."""
    return [*([START] if entrypoint and entrypoint[0] == START else []), *command]


def read_environment(data: bytes, start: Mapping[str, str]) -> dict[str, str]:
    """Read what `env -0` printed, without the variables of ``start``, with which the shell began.

    Raises ValueError for other bytes than UTF-8, and for what has not its form.
    """
    *lines, rest = data.split(b"\0")
    if rest or not lines:
        raise ValueError("prints more than `env -0` does")
    values = {}
    for line in lines:
        name, equals, value = line.partition(b"=")
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"sets {name.decode(errors='replace')} to bytes that are no UTF-8") from error
        if not equals:
            raise ValueError("prints more than `env -0` does")
        if re.fullmatch(rb"[A-Za-z_][A-Za-z0-9_]*", name):  # bash exports its functions under other names
            values[name.decode()] = text
    return {
        name: value for name, value in values.items() if name not in _OF_START and (name, value) not in start.items()
    }


# As Apptainer starts an image: the scripts see only HOME and PWD of the caller's variables.
_START = f"""\
#!/bin/sh
# Written by Ekiben: sets the image's environment where a container starts. What the caller sets stays.
_shell=/bin/sh
[ ! -x /bin/bash ] || _shell=/bin/bash
_given=$(export -p)
exec env -i HOME="${{HOME-/}}" PWD="$PWD" PATH={DEFAULT_PATH} _given="$_given" "$_shell" {_SET} "$@"
"""
_SOURCE = """\
_keep=$_given
unset _given
_given=$_keep
unset _keep
for _script in /.singularity.d/env/*.sh; do
    case $_script in
    */99-base.sh) ;;
    *) . "$_script" ;;
    esac
done
"""
