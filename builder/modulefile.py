"""What Environment Modules and Lmod find of a published image: its tasks as commands, in plain sh, with no Ekiben behind them.

    module use DIR/modulefiles
    module load ekiben/<name>                       what the link `current` is; ekiben/<name>/<tag> for other links
    module load ekiben/<name>/<version>-<digest12>  this one for good

Both programs read one Tcl modulefile. It finds the image by its own place, so DIR may be seen under other paths elsewhere, and
its version is a link to a file that lies beside the SIF and goes with it. Which version is the default is not written
anywhere a second time: .modulerc looks at the image's links when it is read.

The commands do as `build.py run` (builder/launch.py): of the environment only what a job needs gets in, folders are seen at
their own path. They start the SIF itself and not `current`, so that nothing changes under a job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from builder.errors import UsageError
from builder.launch import CERTIFICATES, FOLDERS, IMAGES_OWN, LEAKS, LOCAL, passes
from builder.machine import GPU_DEVICE

MODULES = "modulefiles"
_FAMILY = "ekiben"


def module_folder(image: str) -> Path:
    """Below the place: where the module's versions are."""
    return Path(MODULES, _FAMILY, image)


def module_name(image: str, stem: str) -> str:
    """As it is loaded."""
    return f"{_FAMILY}/{image}/{stem.removeprefix(f'{image}-')}"


def check_place(place: Path) -> None:
    """Errors: UsageError for a path that cannot be in a MODULEPATH: Lmod hands it to a shell as it is."""
    if found := re.search(r"[^\w@%+=,./-]", str(place)):
        raise UsageError(
            f"--modulefile: '{found[0]}' in {place}: Lmod cannot read modulefiles there",
            hint="publish to a folder whose path has only letters, digits and '-', '_', '.', '+'",
        )


def command_files(image: str, stem: str, tasks: Mapping[str, str]) -> dict[str, str]:
    """The commands: name → script. ``tasks``: name → what it does."""
    runner = f"ekiben-{image}"
    scripts = {task: f'#!/bin/sh\n# {text}\nexec "${{0%/*}}/{runner}" {task} "$@"\n' for task, text in tasks.items()}
    filled = {
        "runner": runner, "image": image, "stem": stem, "gpu": GPU_DEVICE, "passes": passes(),
        "leaks": " ".join(LEAKS), "own": " ".join(IMAGES_OWN), "folders": _values([*FOLDERS, *LOCAL]), "files": _values(CERTIFICATES),
    }  # fmt: skip
    return {**scripts, runner: re.sub(r"<(\w+)>", lambda found: filled[found[1]], _RUNNER)}


def _values(names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f'"${{{name}:-}}"' for name in names)


# --cleanenv and what is let in: see builder/launch.py, whose tables these are. Values go by the runtime's environment, which
# other users cannot read. A bind cannot have ':' or ',' in it; a path with a newline is left out.
_RUNNER = r"""#!/bin/sh
# Runs a command in the image <stem>; without one, says what there is. Written by Ekiben, needs none.
fail() { echo "<runner>: $1" >&2; exit 127; }
own=${0%/*}
sif=${own%/*}/<stem>.sif
newline='
'
set -f
IFS=$newline
# A task may be called like a program of the host that is needed below, or by the runtime.
path=:$PATH:
case $path in *":$own:"*) path=${path%%":$own:"*}:${path#*":$own:"} ;; esac
path=${path#:}
PATH=${path%:}

[ -r "$sif" ] || fail "$sif is gone, or closed to you: load a version that is there (module avail ekiben/<image>)"
runtime=$(command -v apptainer || command -v singularity) ||
    fail "neither apptainer nor singularity is on PATH of $(uname -n): load a module that has one of them"
prefixes=APPTAINERENV_
[ "${runtime##*/}" = apptainer ] || prefixes=APPTAINERENV_${newline}SINGULARITYENV_

# Of the outside the task gets what a job needs; what is meant for programs of the host breaks those of the image.
for name in <leaks>; do
    for prefix in APPTAINERENV_ SINGULARITYENV_; do
        eval "[ -n \"\${$prefix$name+set}\" ]" || continue
        echo "$prefix$name is not passed on: the image has its own" >&2
        unset "$prefix$name"
    done
done
for name in $(awk 'BEGIN { for (name in ENVIRON) print name }' | LC_ALL=C grep -Ex '[A-Za-z_][A-Za-z0-9_]*' |
    grep -Ex '<passes>'); do
    for prefix in $prefixes; do
        eval "[ -n \"\${$prefix$name+set}\" ] || export $prefix$name=\"\$$name\""
    done
done

here=$(pwd -P)
binds=$newline
bind() {
    case $1 in
        *[:,]*) echo "$1 is not seen inside: a runtime binds no path with ':' or ','" >&2 ;;
        *"$newline"*) ;;
        *) case $binds in *"$newline$1$newline"*) ;; *) binds=$binds$1$newline ;; esac ;;
    esac
}
bind_folder() { # but none of the image's own, and none that would hide one
    folder=$(unset CDPATH && cd -- "$1" 2>/dev/null && pwd -L) || return 0
    for images in <own>; do
        case $folder/ in "$images"/*) return ;; esac
        case $images/ in "${folder%/}"/*) return ;; esac
    done
    bind "$folder"
}
for folder in "${HF_HOME:-}" "${EKIBEN_CACHE:-}"; do
    [ -z "$folder" ] || mkdir -p -- "$folder" || fail "point HF_HOME and EKIBEN_CACHE at folders of your own"
done
bind_folder "$here"
for folder in <folders>; do
    [ ! -d "$folder" ] || bind_folder "$folder"
done
# What arguments name, as --data=../x.jsonl or --output /scratch/me/run: of what is not there yet, the first parent that is.
for word in "$@"; do
    for value in "$word" "${word#*=}" "${word##*=}"; do
        case $value in
            -* | *://*) continue ;;
            /*) ;;
            */* | ..) value=$here/$value ;;
            *) continue ;;
        esac
        while [ ! -d "$value" ]; do value=${value%/*} && value=${value:-/}; done
        bind_folder "$value"
    done
done
for file in <files>; do
    case $file in /*) ;; *) file=$here/$file ;; esac
    [ ! -f "$file" ] || bind "$file"
done

set -- "$sif" "$@"
for folder in $binds; do
    for other in $binds; do
        case $folder in "$other"/*) continue 2 ;; esac
    done
    set -- --bind "$folder" "$@"
done
if [ -z "${EKIBEN_CPU:-}" ] && [ -e <gpu> ]; then set -- --nv "$@"; fi
exec "$runtime" run --cleanenv --pwd "$here" "$@"
"""


def modulefile(image: str, stem: str, description: str, tasks: Mapping[str, str]) -> str:
    version, runner = stem.removeprefix(f"{image}-"), f"ekiben-{image}"
    width = max(map(len, tasks), default=0)
    text = [f"{image} {version}: {' '.join(description.split())}", "", "Commands, each of which runs in the container image:", "",
            *(f"  {task:<{width}}  {about}" for task, about in tasks.items()), "",
            f"  {runner} COMMAND ...: whatever is in the image; with bash a shell, alone what there is.", "",
            "While it is loaded, programs of the host with these names are hidden.",
            "Where there is an NVIDIA driver they see the GPUs; EKIBEN_CPU=1 goes without.",
            "They see this folder, those that arguments name, caches (HF_HOME, EKIBEN_CACHE), the job's local disk, and what the site",
            "or APPTAINER_BIND binds. Of the environment they get what a job needs: the scheduler's variables, NCCL's, proxies, HF_TOKEN;",
            "APPTAINERENV_NAME=VALUE sets more. The image is $EKIBEN_IMAGE, for launchers of your own.", "",
            f"One image of Ekiben is loaded at a time. module avail ekiben/{image} lists the versions; the default is the one",
            "that is current, and what is loaded stays as it is when another becomes that."]  # fmt: skip
    return f"""#%Module1.0
set images [file normalize [file dirname $ModulesCurrentModulefile]/../../../images/{image}]
proc ModulesHelp {{}} {{
    puts stderr {_quote(chr(10).join(text))}
}}
module-whatis {_quote(text[0])}
conflict ekiben
if {{[llength [info commands family]]}} {{ family ekiben }}
setenv EKIBEN_IMAGE $images/{stem}.sif
prepend-path PATH $images/{stem}.bin
"""


def rc_file(image: str) -> str:
    """What the image's links are, as versions. An error here would end every `module` command of whoever uses the place."""
    return f"""#%Module1.0
# Lmod says where this file is by [info script] alone.
set here [expr {{[info exists ModulesCurrentModulefile] ? $ModulesCurrentModulefile : [info script]}}]
set images [file normalize [file dirname $here]/../../../images/{image}]
foreach link [lsort [glob -nocomplain -directory $images -types l *]] {{
    if {{[catch {{file readlink $link}} target]}} continue
    set version [string range [file rootname $target] {len(image) + 1} end]
    set tag [file tail $link]
    if {{$tag eq "default" || ![file exists $images/{image}-$version.module]}} continue
    module-version ekiben/{image}/$version $tag
    if {{$tag eq "current"}} {{ module-version ekiben/{image}/$version default }}
}}
"""


def _quote(text: str) -> str:
    """One word of Tcl, in ASCII: modulefiles are read in whatever encoding a user's locale has. And no end of a string of Lua's,
    into which Lmod puts it."""
    kept = re.sub(r'[\\"\[\]{}$]', lambda found: f"\\{found[0]}", text.replace("]=", "] ="))
    return (
        '"'
        + "".join(
            letter if letter.isascii() and (letter.isprintable() or letter == "\n") else _escaped(letter)
            for letter in kept
        )
        + '"'
    )


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) <= 0xFFFF else "?"  # Tcl 8.6 knows no more
