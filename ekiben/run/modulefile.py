"""What Environment Modules and Lmod find of a published image: its tasks as commands, in plain sh, with no Ekiben
behind them.

    module use DIR/modulefiles
    module load ekiben/<name>                       what the link `current` is; ekiben/<name>/<tag> for other links
    module load ekiben/<name>/<version>             the newest of that version
    module load ekiben/<name>/<version>-<digest12>  this one for good

Both programs read one Tcl modulefile. It finds the image relative to itself, so DIR may have other paths
elsewhere, and its version is a link to a file that lies beside the SIF and goes with it. Which version is the default
is not written anywhere a second time: .modulerc looks at the image's links when it is read.

What the commands give a container is what `ekiben run` gives it (ekiben/run/contract.py). They start the SIF itself
and not `current`, so that nothing changes under a job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ekiben.core.errors import UsageError
from ekiben.run.contract import CERTIFICATES, FOLDERS, IMAGE_FOLDERS, shell_functions
from ekiben.run.schedulers import local_folders

MODULES = "modulefiles"
_FAMILY = "ekiben"


def module_folder(image: str) -> PurePosixPath:
    """Return the folder of the module's versions, below the shared folder."""
    return PurePosixPath(MODULES, _FAMILY, image)


def module_name(image: str, stem: str) -> str:
    """Return the name by which a module is loaded."""
    return f"{_FAMILY}/{image}/{stem.removeprefix(f'{image}-')}"


def check_shared_dir(shared_dir: Path) -> None:
    """Raise UsageError for a path that cannot be in a MODULEPATH: Lmod passes it to a shell unquoted."""
    if match := re.search(r"[^\w@%+=,./-]", str(shared_dir)):
        raise UsageError(
            f"--modulefile: '{match[0]}' in {shared_dir}: Lmod cannot read modulefiles there",
            hint="publish to a folder whose path contains only letters, digits and '-', '_', '.', '+'",
        )


def command_files(image: str, stem: str, tasks: Iterable[str]) -> dict[str, str]:
    """Return the commands: name → script."""
    runner, tasks = f"ekiben-{image}", [*tasks]
    scripts = {task: f'#!/bin/sh\nexec "${{0%/*}}/{runner}" {task} "$@"\n' for task in tasks}
    filled = {
        "runner": runner,
        "tasks": " ".join(tasks),
        "image": image,
        "stem": stem,
        "functions": shell_functions().rstrip(),
        "image_folders": " ".join(IMAGE_FOLDERS),
        "folders": _values([*FOLDERS, *local_folders()]),
        "files": _values(CERTIFICATES),
    }
    return {**scripts, runner: re.sub(r"<(\w+)>", lambda match: filled[match[1]], _RUNNER)}


def _values(names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f'"${{{name}:-}}"' for name in names)


# A path with a newline is left out.
_RUNNER = r"""#!/bin/sh
# Runs a command in the image <stem>; without one, says what there is. Written by Ekiben, needs none.
fail() { echo "<runner>: $1" >&2; exit 127; }

<functions>

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

# As one of several processes that srun or mpirun started, a task would run several times into the same output.
tasks=" <tasks> "
case $tasks in
    *" ${1:-} "*)
        # srun first: mpirun uses it to reach other nodes, with a count of its own.
        for each in "${SLURM_STEP_NUM_TASKS:-1}:${SLURM_PROCID:-0}" "${PMI_SIZE:-1}:${PMI_RANK:-0}" \
            "${OMPI_COMM_WORLD_SIZE:-1}:${OMPI_COMM_WORLD_RANK:-0}"; do
            [ "${each%:*}" -le 1 ] || { many=${each%:*} && rank=${each#*:}; }
        done
        if [ "${many:-1}" -gt 1 ] && [ -z "${WORLD_SIZE:-}${EKIBEN_INDEPENDENT:-}" ]; then
            [ "$rank" = 0 ] || exit 2
            echo "<runner>: srun or mpirun started $1 $many times, as unrelated runs: start it once (srun -n 1)," \
                "or use ekiben submit, which joins several processes; EKIBEN_INDEPENDENT=1 is for runs that are" \
                "meant to be unrelated" >&2
            exit 2
        fi
        ;;
esac

[ -r "$sif" ] || fail "$sif is gone, or closed to you: load a version that is there (module avail ekiben/<image>)"
runtime=$(find_runtime) ||
    fail "neither apptainer nor singularity is on PATH of $(uname -n): load a module that has one of them"
protect_caches || fail "set TMPDIR to a folder of your own"
drop_leaks
pass_variables "$runtime"

here=$(pwd -P)
binds=$newline
bind() {
    case $1 in
        *"$newline"*) ;;
        *) case $binds in *"$newline$1$newline"*) ;; *) binds=$binds$1$newline ;; esac ;;
    esac
}
bind_folder() { # but none of the image's own, and none that would hide one
    folder=$(unset CDPATH && cd -- "$1" 2>/dev/null && pwd -L) || return 0
    for images in <image_folders>; do
        case $folder/ in "$images"/*) return ;; esac
        case $images/ in "${folder%/}"/*) return ;; esac
    done
    bind "$folder"
}
bind_parent() { # of what is not there yet, the first parent that is
    folder=$1
    while [ ! -d "$folder" ]; do folder=${folder%/*} && folder=${folder:-/}; done
    bind_folder "$folder"
}
bind_targets() { # a link is followed inside, where what it points to has to be
    path=$1
    hops=0
    bind_parent "$path"
    while [ -L "$path" ] && [ $((hops += 1)) -le 40 ]; do
        target=$(readlink "$path")
        case $target in /*) path=$target ;; *) path=${path%/*}/$target ;; esac
        bind_parent "$path"
    done
    ! real=$(readlink -f "$1") || bind_parent "$real"
}
parents_of_links_in() { # in a snapshot of the hub, each file is a link
    find "$1/" -maxdepth 1 -type l -exec readlink -f {} + 2>/dev/null | sed 's|/[^/]*$||' | sort -u | head -n 1000
}
for folder in "${HF_HOME:-}" "${EKIBEN_CACHE:-}"; do
    [ -z "$folder" ] || mkdir -p -- "$folder" || fail "point HF_HOME and EKIBEN_CACHE at folders of your own"
done
bind_folder "$here"
for place in <folders>; do
    [ ! -d "$place" ] || bind_targets "$place"
done
# What arguments name, as --data=../x.jsonl or --output /scratch/me/run: of what is not there yet, the first parent
# that is.
for word in "$@"; do
    for value in "$word" "${word#*=}" "${word##*=}"; do
        case $value in
            -* | *://*) continue ;;
            /*) ;;
            */* | ..) value=$here/$value ;;
            '') continue ;;
            *) # lies in this folder, which is seen anyway; what a link points to is not
                [ -L "$here/$value" ] || [ -d "$here/$value" ] || continue
                value=$here/$value
                ;;
        esac
        bind_targets "$value"
        [ -d "$value" ] || continue
        for parent in $(parents_of_links_in "$value"); do
            bind_parent "$parent"
        done
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
    if needs_mount "$folder"; then
        set -- --mount "$(mount_value "$folder")" "$@"
    else
        set -- --bind "$folder" "$@"
    fi
done
! has_gpus || set -- --nv "$@"
exec "$runtime" run --cleanenv --pwd "$here" "$@"
"""


def modulefile(image: str, stem: str, description: str, tasks: Mapping[str, str]) -> str:
    """Return the text of a modulefile."""
    version, runner = stem.removeprefix(f"{image}-"), f"ekiben-{image}"
    width = max(map(len, tasks), default=0)
    text = [
        f"{image} {version}: {' '.join(description.split())}",
        "",
        "Commands, each of which runs in the container image:",
        "",
        *(f"  {task:<{width}}  {help_text}" for task, help_text in tasks.items()),
        "",
        f"  {runner} COMMAND ...: whatever is in the image; with bash a shell, alone what there is.",
        "",
        "While it is loaded, programs of the host with these names are hidden.",
        "Where there is an NVIDIA driver they see the GPUs; EKIBEN_CPU=1 goes without.",
        (
            "They see this folder, those that arguments name, caches (HF_HOME, EKIBEN_CACHE), the job's local disk, and"
            " what the site"
        ),
        (
            "or APPTAINER_BIND binds. Of the environment they get what a job needs: the scheduler's variables, NCCL's,"
            " proxies, HF_TOKEN;"
        ),
        (
            "Several processes of one command, as srun -n 2 starts, are refused, unless WORLD_SIZE or"
            " EKIBEN_INDEPENDENT=1 is set."
        ),
        "APPTAINERENV_NAME=VALUE sets more. The image is $EKIBEN_IMAGE, for launchers of your own.",
        "",
        (
            f"One image of Ekiben is loaded at a time. module avail ekiben/{image} lists the versions; the default is"
            " the one"
        ),
        "that is current, and what is loaded stays as it is when another becomes that.",
    ]
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
    """Return the .modulerc: the image's links, as versions.

    An error here would break every `module` command of the folder's users.
    """
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
# A version without its digest: the newest of that number, unless a link has that name.
foreach module [glob -nocomplain -directory $images -types f *.module] {{
    set version [string range [file rootname [file tail $module]] {len(image) + 1} end]
    if {{![regexp {{^(.+)-[0-9a-f]{{12}}$}} $version version number]}} continue
    if {{[file exists $images/$number] || [catch {{file mtime $module}} time]}} continue
    if {{![info exists newest($number)] || $time > [lindex $newest($number) 0]}} {{
        set newest($number) [list $time $version]
    }}
}}
foreach number [array names newest] {{ module-version ekiben/{image}/[lindex $newest($number) 1] $number }}
"""


def _quote(text: str) -> str:
    """Return ``text`` as one word of Tcl, in ASCII: modulefiles are read in whatever encoding a user's locale has. And
    no end of a string of Lua's, into which Lmod puts it."""
    kept = re.sub(r'[\\"\[\]{}$]', lambda match: f"\\{match[0]}", text.replace("]=", "] ="))
    return (
        '"'
        + "".join(
            letter if letter.isascii() and (letter.isprintable() or letter == "\n") else _escaped(letter)
            for letter in kept
        )
        + '"'
    )


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) <= 0xFFFF else "?"  # Tcl 8.6 has no wider escape
