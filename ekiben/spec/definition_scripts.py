"""What runs a section's script, as Apptainer decides: a shebang, or what follows the section's name.

%post is run by ``/bin/sh``, whatever its first line: only ``-c SHELL`` names another shell. %runscript, %startscript
and %test are files with a shebang.
"""

from __future__ import annotations

import re
import shlex

from ekiben.spec.definition_text import Report, Section

SHEBANG_SECTIONS = ("runscript", "startscript", "test")
_PLAIN = "#!/bin/sh"
_OPTION = re.compile(r"-[aefhluvxCE]+")


def script_file(section: Section, report: Report) -> str:
    """Return the text of a %runscript, %startscript or %test as a file: with a shebang where it is not /bin/sh's."""
    text, tokens = section.text(), section.tokens
    if not text:
        return ""
    if tokens and not (len(tokens) == 1 and _OPTION.fullmatch(tokens[0])):
        report(section.line - 1, _refusal(section))
    if not "\n".join(section.body).strip().startswith("#!"):
        return f"{_PLAIN} {tokens[0]}\n{text}" if tokens else text
    if not section.body[0].strip():  # the kernel reads only the first line, and /bin/sh runs the rest
        return f"{_PLAIN}\n{text}"
    rest = "\n".join(section.body[1:]).rstrip("\n")
    return f"{' '.join([section.body[0].strip(), *tokens])}\n{rest}\n"


def _refusal(section: Section) -> str:
    options = " ".join(section.tokens)
    what = f"%{section.name} {options}: Apptainer writes '{_PLAIN} {options}' as the script's first line"
    if section.tokens[0] == "-c" and section.tokens[1:]:
        shell = " ".join(section.tokens[1:])
        return f"{what}, and no shell starts; write '#!{shell}' there, under %{section.name}"
    return f"{what}, and the script does not start; put a # before the text, or write it into the section"


def post_command(section: Section, report: Report) -> str:
    """Return the shell command that runs a %post, whose path is its ``$0``; "" where /bin/sh does, with -e alone."""
    tokens = section.tokens
    if not tokens:
        return ""
    at = tokens.index("-c") if "-c" in tokens else len(tokens)
    options, shell = tokens[:at], " ".join(tokens[at + 1 :])
    if at < len(tokens) and not shell:
        report(section.line - 1, "%post -c: the shell is missing, as in '%post -c /bin/bash'")
    elif not all(_OPTION.fullmatch(option) for option in options):
        report(
            section.line - 1,
            f"%post {' '.join(tokens)}: /bin/sh is started with these arguments, and runs no file named"
            f" '{next(option for option in options if not _OPTION.fullmatch(option))}'; put a # before the text, or"
            " name a shell with '%post -c /bin/bash'",
        )
    command = f'{shell} "$0"' if shell else '"$0"'
    if not options:
        return command
    return " ".join(["/bin/sh -e", *options, f'-c {shlex.quote(command)} "$0"' if shell else command])


def interpreter_command(text: str) -> str:
    """Return the shell command that runs a script_file() whose path is its ``$0``, as the kernel starts it."""
    line = text.partition("\n")[0]
    interpreter = line.removeprefix("#!").split(None, 1) if line.startswith("#!") else ["/bin/sh"]
    return " ".join([*(shlex.quote(argument.strip()) for argument in interpreter), '"$0"'])


def is_plain(text: str) -> bool:
    """Return whether /bin/sh runs a script_file(), without options."""
    return not text.startswith("#!") or text.partition("\n")[0] == _PLAIN


def with_shebang(text: str, *options: str) -> str:
    """Return a script with a shebang: its own, or that of /bin/sh with ``options``."""
    return text if text.startswith("#!") else " ".join([_PLAIN, *options]) + f"\n{text}"
