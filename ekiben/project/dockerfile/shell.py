"""Write %post and %runscript: RUN, CMD and ENTRYPOINT as a shell script."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence

DEFAULT_SHELL = ("/bin/sh", "-c")
SCRATCH = "/.dockerfile"  # files of a step that no layer keeps
UNKNOWN, END = "\ue000", "\ue001"  # around the name of a variable that the base sets

# Syntax of a definition file: a section, a stage, an argument.
_RESERVED = re.compile(r"^%[ \t]*[A-Za-z]|^Bootstrap:|\{\{\s*\w+\s*\}\}|\r", re.MULTILINE | re.IGNORECASE)
# A list of commands, for which it makes no difference whether a shell stops at the first error.
_SIMPLE = re.compile(r"(?:[^;|&()`$<\n{]|\$(?!\()|&&|\|\||\$\{\w+\}|<(?!<))*")
_CHANGES_SHELL = re.compile(r"(?:^|\s)(?:\.|source|eval|set|trap|exec|if|for|while|until|case)\s")

AS_USER = """\
as_user() {  # USER[:GROUP] COMMAND…: what USER of a Dockerfile means for RUN
    user=${1%%:*} home=/ group=0
    while IFS=: read -r name _ id main _ folder _; do
        if [ "$name" = "$user" ] || [ "$id" = "$user" ]; then home=$folder group=$main; break; fi
    done </etc/passwd
    case $1 in *:*) group=${1#*:} ;; esac
    shift
    export HOME="$home"
    exec chroot --userspec="$user:$group" --skip-chdir / "$@"
}
"""
MAKE_FOLDER = """\
make_folder() {  # USER:[GROUP] PATH: what WORKDIR after USER means
    if [ -e "$2" ]; then return; fi
    make_folder "$1" "$(dirname "$2")"
    mkdir "$2"
    chown "$1" "$2"
}
"""
MOUNT_FOLDER = f"""\
mount_folder() {{  # PATH: an empty folder, or one in which what a command leaves is removed
    mkdir -p {SCRATCH} "$1"
    find "$1" >{SCRATCH}/before
}}
unmount_folder() {{  # PATH
    find "$1" -depth >{SCRATCH}/after
    while IFS= read -r path; do
        if grep -qxF -e "$path" {SCRATCH}/before; then continue; fi
        if [ -d "$path" ] && [ ! -h "$path" ]; then rmdir "$path"; else rm -f "$path"; fi
    done <{SCRATCH}/after
}}
"""
ARCHIVE = f"""\
archive_files() {{  # ARCHIVE SOURCE…: what COPY --from takes; of a folder it takes the content
    archive=$1
    shift
    mkdir -p {SCRATCH}/files/content {SCRATCH}/files/files
    for path; do
        if [ -d "$path" ]; then cp -a "$path/." {SCRATCH}/files/content/
        elif [ -e "$path" ]; then cp -a -L "$path" {SCRATCH}/files/files/
        elif [ -h "$path" ]; then echo "COPY --from: $path is a link to nothing" >&2; exit 1
        else case $path in *[*?[]*) ;; *) echo "COPY --from: there is no $path" >&2; exit 1 ;; esac
        fi
    done
    chmod 755 {SCRATCH}/files/content
    tar -C {SCRATCH}/files -cf "$archive" content files
    rm -rf {SCRATCH}/files
}}
"""
UNARCHIVE = f"""\
put_files() {{  # ARCHIVE DESTINATION [OWNER [MODE]]: what COPY --from puts there
    new={SCRATCH}/new to=${{2%/}}
    mkdir -p "$new"
    tar -C "$new" -xpf "$1"
    if [ -n "${{3-}}" ]; then chown -hR "$3" "$new"; fi
    if [ -n "${{4-}}" ]; then find "$new/content" "$new/files" -mindepth 1 ! -type l -exec chmod "$4" {{}} +; fi
    if [ -n "$(ls -A "$new/content")" ]; then
        if [ ! -e "$to/" ]; then
            mkdir -p "${{to%/*}}/"
            cp -a "$new/content" "$to"
        else
            for path in "$new"/content/* "$new"/content/.[!.]* "$new"/content/..?*; do
                if [ -e "$path" ] || [ -h "$path" ]; then cp -a "$path" "$to/"; fi
            done
        fi
    fi
    for path in "$new"/files/* "$new"/files/.[!.]*; do
        if [ ! -e "$path" ]; then continue; fi
        case $2 in
        */) mkdir -p "$2" ;;
        *) mkdir -p "${{to%/*}}/" ;;
        esac
        cp -a "$path" "$2"
    done
    rm -rf "$new"
}}
"""
HELPERS = {
    "as_user": AS_USER,
    "make_folder": MAKE_FOLDER,
    "mount_folder": MOUNT_FOLDER,
    "archive_files": ARCHIVE,
    "put_files": UNARCHIVE,
}


def is_reserved(text: str) -> bool:
    """Return whether a definition file would read a piece of the text as its own."""
    return _RESERVED.search(text) is not None


def quoted(value: str) -> str:
    """Quote a value for a shell; names of variables of the base that are not known yet stay variables."""
    parts = re.split(f"{UNKNOWN}(\\w+){END}", value)
    result = "".join(
        f'"${{{piece}}}"' if number % 2 else (shlex.quote(piece) if piece else "") for number, piece in enumerate(parts)
    )
    return result or "''"


def shell_argument(text: str) -> str:
    """Return a text as one word of a shell, on lines that a definition file can hold."""
    if not is_reserved(text):
        return shlex.quote(text)
    octal = {"\\": "\\\\", "%": "%%", "\n": "\\n", "\r": "\\r", "{": "\\173"}
    return f'"$(printf {shlex.quote("".join(octal.get(letter, letter) for letter in text))})"'


def continue_lines(lines: Sequence[str]) -> list[str]:
    """Return the parts of an instruction as a shell's lines: each but the last continued, or all of them as one."""
    text = "".join(lines).strip()
    return "\\\n".join(lines).strip().split("\n") if _may_continue(lines, text) else [text]


def _may_continue(lines: Sequence[str], text: str) -> bool:
    """Return whether a shell leaves out a backslash and a newline at the end of each piece."""
    if "`" in text or "<<" in text or any(line.endswith("\\") for line in lines):
        return False
    if not all(one[-1:].isspace() or two[:1].isspace() for one, two in itertools.pairwise(lines)):
        return False  # the next line is indented
    ends, count = set[int](), 0
    for line in lines[:-1]:
        count += len(line)
        ends.add(count)
    quote, before, is_escaped = "", " ", False
    for at, letter in enumerate("".join(lines)):
        if at in ends and quote:
            return False
        if is_escaped:
            is_escaped = False
        elif letter == "\\" and quote != "'":
            is_escaped = True
        elif quote == '"' and letter == "'":
            return False
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and before in " \t;&|(":
            return False
        before = letter
    return True


def run_lines(
    argv: Sequence[str], shell: Sequence[str], user: str, workdir: str, *, command: Sequence[str] = ()
) -> list[str]:
    """Return the lines that run ``words``, or a ``command`` of ``shell``, as RUN does: as the user, in the folder."""
    lines = ["("]
    if workdir != "/":
        lines.append(f"cd {quoted(workdir)}")
    text = "\n".join(command)
    if command and tuple(shell) == DEFAULT_SHELL and not user and not is_reserved(text):
        stops_alike = _SIMPLE.fullmatch(text.replace("\\\n", "")) and not _CHANGES_SHELL.search(text)
        return [*lines, *([] if stops_alike else ["set +e"]), *command, ")"]
    argv = [*shell, text] if command else argv
    start = f"as_user {quoted(user)}" if user else "exec"
    return [*lines, " ".join([start, *map(shell_argument, argv)]), ")"]


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable."""
    return [f"export {name}={quoted(value)}" for name, value in variables.items()]


def runscript(entrypoint: Sequence[str], cmd: Sequence[str], workdir: str) -> str:
    """Return what `docker run` starts: the entrypoint with the arguments, or with CMD where there are none."""
    lines = [f"cd {quoted(workdir)}"] if workdir not in ("", "/") else []
    start = " ".join(map(shell_argument, entrypoint))
    argv = " ".join(map(shell_argument, cmd))
    if entrypoint:
        lines += [f"if [ $# -eq 0 ]; then set -- {argv}; fi"] if cmd else []
        lines.append(f'exec {start} "$@"')
    else:
        lines.append('if [ $# -gt 0 ]; then exec "$@"; fi')
        lines += [f"exec {argv}"] if cmd else []
    return "\n".join(lines) + "\n"
