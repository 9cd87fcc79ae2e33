# shellcheck shell=sh
# shellcheck disable=SC2013,SC2154,SC2086  # contract.py writes its tables above: one name a line
# What a container gets of this machine: functions of a POSIX shell, for a module's commands and for a job's script. IFS
# has a line feed.

# Print what starts a SIF: Apptainer, else SingularityCE. Fails where neither is on PATH.
find_runtime() { command -v apptainer || command -v singularity; }

# Whether nobody else can write into a folder, or put another in its place.
is_private_folder() {
    [ -d "$1" ] && [ ! -L "$1" ] && [ -n "$(find "$1" -prune -type d -user "$(id -u)" ! -perm -020 ! -perm -002 2>/dev/null)" ]
}

# Print the folders of the node's own disk that this job or login may use, one a line.
local_folders() (
    for variable in $local_variables; do
        eval "folder=\${$variable:-}"
        [ ! -d "$folder" ] || printf '%s\n' "$folder"
    done
)

# Print the folder in which this user's own folder on the node's disk is made.
scratch_folder() { { local_folders && echo /tmp; } | head -n 1; }

# Give each cache of compiled code that others can write a new folder: their code would run as this user. Sets `caches` to
# the folder that was made, empty where none was.
protect_caches() {
    caches=
    unsafe=$(
        { local_folders && printf '%s\n' /tmp /var/tmp /dev/shm; } | while IFS= read -r base; do
            base=$base/ekiben-$(id -u)
            if { [ -e "$base" ] || [ -L "$base" ]; } && ! is_private_folder "$base"; then printf '%s\n' "$base"; fi
        done | tail -n 1
    )
    mkdir -m 700 -- "${TMPDIR:-/tmp}/ekiben-$(id -u)" 2>/dev/null # before a task makes it, as its umask has it
    for variable in $compiled_code; do
        for prefix in APPTAINERENV_ SINGULARITYENV_; do
            eval "folder=\${$prefix$variable:-}"
            if [ -n "$folder" ] && { [ -e "$folder" ] || [ -L "$folder" ]; } && ! is_private_folder "$folder"; then
                echo "$prefix$variable is not passed on: $folder can be written by others" >&2
                unset "$prefix$variable"
            fi
        done
        eval "folder=\${$variable:-}"
        if [ -n "$folder" ]; then
            if { [ ! -e "$folder" ] && [ ! -L "$folder" ]; } || is_private_folder "$folder"; then continue; fi
        elif [ -n "$unsafe" ]; then
            folder=$unsafe
        else
            continue
        fi
        echo "$folder can be written by others: compiled code goes to a temporary folder" >&2
        [ -n "$caches" ] || caches=$(mktemp -d "$(scratch_folder)/ekiben-cache-XXXXXXXX") || return
        mkdir -- "$caches/$variable" && export "$variable=$caches/$variable"
    done
}

# Drop what a site sets for all containers and what breaks the programs of an image.
drop_leaks() {
    for variable in $leaks; do
        for prefix in APPTAINERENV_ SINGULARITYENV_; do
            eval "[ -n \"\${$prefix$variable+set}\" ]" || continue
            echo "$prefix$variable is not passed on: the image has its own" >&2
            unset "$prefix$variable"
        done
    done
}

# Pass into the container of the runtime $1 what a task needs of this environment, byte for byte. What is set for
# containers already stays.
pass_variables() {
    for variable in $no_evaluation; do export "${variable?}"; done
    for variable in $(awk 'BEGIN { for (name in ENVIRON) print name }' | LC_ALL=C grep -Ex '[A-Za-z_][A-Za-z0-9_]*' |
        grep -Ex "$variables_passed"); do
        for prefix in APPTAINERENV_ SINGULARITYENV_; do
            # Who is called singularity may be either, and Apptainer warns of variables that are SingularityCE's.
            if [ "$prefix" = SINGULARITYENV_ ] && [ "${1##*/}" = apptainer ]; then continue; fi
            eval "[ -n \"\${$prefix$variable+set}\" ] || export $prefix$variable=\"\$$variable\""
        done
    done
}

# Whether --bind would end a path at a character of its own. Then --mount takes the line of CSV that mount_value prints.
needs_mount() { case $1 in *[:,\"\\]*) ;; *) return 1 ;; esac }
mount_value() (
    field=$(printf %s "$1" | sed 's/"/""/g')
    printf 'type=bind,"source=%s","destination=%s"' "$field" "$field"
)

# Whether the container gets this machine's GPUs. EKIBEN_CPU=1 goes without.
has_gpus() { [ -z "${EKIBEN_CPU:-}" ] && [ -e "$gpu_device" ]; }
