# shellcheck shell=bash
# shellcheck disable=SC2154  # the step's script sets the parameters, and then sources this file
# What lies above is ekiben/run/container.sh. One job of a run: `bash SCRIPT` is the job, which starts `bash SCRIPT node …` on each of its nodes.

# ---- a node: the container, and in it the launcher of this node's processes

# Show a folder inside at its own path.
bind_folder() {
    if needs_mount "$1"; then binds+=(--mount "$(mount_value "$1")"); else binds+=(--bind "$1"); fi
}

# One copy on the node's own disk for all of this user's jobs and `run`s there.
copy_image() {
    local folder copy state part sum
    folder=$(scratch_folder)/ekiben-$UID
    copy=$folder/$image_copy
    state=$folder/.$image_copy.state
    mkdir -m 700 "$folder" 2>/dev/null
    if ! is_private_folder "$folder" || ! chmod 700 "$folder"; then
        echo "$folder is not a folder of $(id -un) alone: the image is read from $image"
        return
    fi
    if (
        set -o pipefail
        flock 9
        [ -f "$copy" ] && [ ! -L "$copy" ] && [ "$(stat_of "$copy")" = "$(cat "$state" 2>/dev/null)" ] && exit
        rm -f "$copy" "$folder/.$image_copy".*.part
        part=$(mktemp "$folder/.$image_copy.XXXXXXXX.part") || exit
        sum=$(tee -- "$part" <"$image" | sha256sum) && same_copy "$part" "$sum" && chmod 500 "$part" &&
            mv "$part" "$copy" && stat_of "$copy" >"$state" && exit
        rm -f "$part"
        exit 1
    ) 9>"$folder/.$image_copy.lock"; then
        image=$copy
    else
        echo "the image could not be copied to $folder: it is read from $image"
    fi
}

# Whether a file with the checksum $2 is a whole copy of the image.
same_copy() {
    [ "$(stat -c %s -- "$1")" = "${image_stat%% *}" ] && [ "$(header_of "$1")" = "$image_header" ] || return
    [ -z "$image_sha256" ] || [ "$2" = "$image_sha256  -" ]
}

stat_of() { stat -c '%s %.9Y %.9Z %i' -- "$1"; }
header_of() { head -c 32768 -- "$1" | sha256sum | cut -d ' ' -f 1; }

# Whether a file is the image that was there when the job was submitted: by its size, times, inode, header and table of
# partitions. All of it is read where these differ and its checksum is known, or where the site asks for it.
same_image() {
    [ -f "$1" ] && [ ! -L "$1" ] && [ -r "$1" ] || return
    [ -n "$image_stat" ] || return 0
    if [ -z "$check_digest" ] && [ "$(stat_of "$1")" = "$image_stat" ] &&
        [ "$(header_of "$1")" = "$image_header" ]; then return 0; fi
    [ -n "$image_sha256" ] && [ "$(sha256sum <"$1")" = "$image_sha256  -" ]
}

run_node() {
    local number nodes=$2 port=$3 name=$4 caches='' nv=() runtime container code folder
    number=$(node_number "$1")
    cd "$work" || exit
    load_modules
    drop_leaks
    # shellcheck source=/dev/null
    . "$run/environment" || exit
    [ -z "$live" ] || export EKIBEN_LIVE="$live"  # for the task's record
    runtime=$(find_runtime) ||
        { echo "error: $(hostname) has neither apptainer nor singularity on PATH" >&2; exit 127; }
    protect_caches || exit
    [ -z "$caches" ] || bind_folder "$caches"
    # What a task that saves more slowly than that says to its user.
    [ -z "$grace_period" ] || export EKIBEN_GRACE_SECONDS="$grace_period"
    pass_variables "$runtime"
    while IFS= read -r folder; do bind_folder "$folder"; done < <(local_folders)
    [ -z "$copy_local" ] || copy_image
    # shellcheck disable=SC2034  # set_task reads it
    [ ${#seeds[@]} = 0 ] || seed=${seeds[${name##*.} - 1]}
    set_task
    [ -z "$uses_gpus" ] || ! has_gpus || nv=(--nv)
    "$runtime" exec --cleanenv "${nv[@]}" "${binds[@]}" --pwd "$PWD" "$image" \
        python3 "$run/launch_node.py" --node "$number" --nodes "$nodes" --processes "$(cat "$run/$name.processes")" \
        --port "$port" --key "$run/key" --notice "$run/$name.notice" --logs "$run/$name.ranks" -- "${task[@]}" &
    container=$!
    # A signal to this node's part of the job is for the processes inside.
    # shellcheck disable=SC2064  # `container` is this function's own
    trap "kill -USR1 $container" USR1 USR2 XCPU
    # shellcheck disable=SC2064
    trap "kill -TERM $container" TERM
    # A signal ends `wait`, not the container. Once that is gone, however early, `wait` still has its exit code.
    while kill -0 "$container" 2>/dev/null; do wait "$container"; done
    wait "$container"
    code=$?
    [ -z "$caches" ] || rm -rf "$caches"
    exit "$code"
}

if [ "${1:-}" = node ]; then
    shift
    run_node "$@"
fi

# ---- the job

# The variables of a run, with tokens among them, stay until none of its jobs can start any more: one that ended with 75 may,
# those of the steps after a failed one do not.
remove_environment() {
    local job failed=
    for job in "${run_jobs[@]}"; do
        if [ -n "$failed" ] && [ "${job%%-*}" -gt "$failed" ]; then break; fi
        case $(cat "$run/$job.exit" 2>/dev/null) in
            '' | 75) return ;;
            0) ;;
            *) failed=${job%%-*} ;;
        esac
    done
    rm -f "$run/environment" "$run/key"
}

end_job() {
    echo "$1" >"$run/$name.exit"
    remove_environment
    echo "ended       $job with exit code $1, $(date '+%F %T')"
    exit "$1"
}

# How many GPUs the job has on this node. Options of the scheduler's own may have asked for them.
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        case $CUDA_VISIBLE_DEVICES in
            '' | NoDevFiles | -1) echo 0 ;;
            *) tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . ;;
        esac
    elif [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif [ "$planned_gpus" -gt 0 ] || [ -n "${SLURM_JOB_ID:-}" ] || [ -z "$uses_gpus" ] || [ ! -e "$gpu_device" ]; then
        echo "$planned_gpus"
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU '
    fi
}

# A step does not start before the step before has ended well.
wait_for_step_before() {
    local before since ended
    for before in "${steps_before[@]}"; do
        if declare -F requeue_waiting >/dev/null; then
            # It went back into the queue under another id since this job waits: wait for that one.
            since=$(cat "$run/$before.times" 2>/dev/null)
            if [ ! -e "$run/$before.exit" ] && [ "$since" != "$(cat "$run/$name.waited.$before" 2>/dev/null)" ]; then
                echo "$since" >"$run/$name.waited.$before"
                put_back requeue_waiting && exit
            fi
        fi
        ended=$(cat "$run/$before.exit" 2>/dev/null)
        if [ "$ended" != 0 ]; then
            echo "error: $name is not started, for $before ${ended:+ended with exit code }${ended:-did not end}"
            echo 1 >"$run/$name.exit"
            remove_environment
            exit 1
        fi
    done
}

start_nodes() {
    local number=0
    pids=()
    if declare -F start_all_nodes >/dev/null; then
        start_all_nodes &
        pids=($!)
        return
    fi
    # shellcheck disable=SC2034  # start_remote_node reads it
    for host in ${nodes//,/ }; do
        if [ "$number" = 0 ]; then
            bash "$script" node 0 "$nodes" "$port" "$name" &
        else
            start_remote_node &
        fi
        pids+=($!) number=$((number + 1))
    done
}

# When it fails on one node, it is ended on the others; the exit code is that of the first.
wait_for_nodes() {
    local at ended
    code=0
    while [ ${#pids[@]} -gt 0 ]; do
        wait -n "${pids[@]}"
        for at in "${!pids[@]}"; do
            if kill -0 "${pids[at]}" 2>/dev/null; then continue; fi
            wait "${pids[at]}"
            ended=$?
            unset "pids[at]"
            if [ "$code" = 0 ] && [ "$ended" != 0 ]; then
                code=$ended
                [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null
            fi
        done
    done
}

# Whether this start wrote anything but its records below the task's output folders: a checkpoint, or results.
# A folder too large to search in a minute counts as one with something new.
has_saved() {
    local folder found
    # shellcheck disable=SC2034  # set_outputs reads it
    [ ${#seeds[@]} = 0 ] || seed=${seeds[${name##*.} - 1]}
    set_outputs
    for folder in "${outputs[@]}"; do
        # `generate` keeps its answers beside the file that it will write.
        found=$(find "$(dirname -- "$folder")" -maxdepth 1 -name ".${folder##*/}.part-*" -newer "$run/$name.started" -print -quit 2>/dev/null)
        [ -z "$found" ] || return 0
        [ -e "$folder" ] || continue
        found=$(timeout 60 find -L "$folder" \( -name '.?*' ! -name '.*.part-*' -o -name ekiben-runs -o -name ekiben-trackers -o -path "$run" \) -prune \
            -o -type f -newer "$run/$name.started" \
            ! -name run.json ! -name loss.png ! -name 'metrics.*' ! -name '*.log' ! -name 'events.out.*' ! -name '*.svg' -print -quit 2>/dev/null)
        if [ $? = 124 ] || [ -n "$found" ]; then return 0; fi
    done
    return 1
}

# A start that neither the job itself nor its scheduler put back into the queue is a new attempt: somebody submitted the
# script once more. Of a script that was written and not submitted, the first start is the first attempt. $1: `again` for
# a job that put itself back under a new id, which may start before that id is written.
begin_attempt() {
    local ended known attempt is_same='' before='did not end'
    attempt=$(($(cat "$run/$name.attempt" 2>/dev/null || echo 1) + 1)) # read before the id, which is written first
    ended=$(cat "$run/$name.exit" 2>/dev/null)
    known=$(cat "$run/$name.job" 2>/dev/null)
    if [ "${known%%.*}" = "${job%%.*}" ] || [ "$1" = again ] || [ -n "${EKIBEN_INDEX+set}" ]; then is_same=yes; fi
    if [ -z "$known" ]; then
        [ -z "$by_hand" ] || claim_attempt 1
    elif [ -z "$is_same" ] || { [ ! -e "$run/$name.requeued" ] && [ -n "$ended" ] && [ "$ended" != 75 ]; }; then
        # What has ended may still be in the scheduler's queue for a moment.
        [ -n "$is_same" ] || { [ -n "$ended" ] && [ "$ended" != 75 ]; } || refuse_beside "$known"
        claim_attempt "$attempt"
        echo "$attempt" >"$run/$name.attempt"
        rm -f "$run/$name.times" "$run/$name.idle" "$run/$name.cancelled" "$run/cancelled"
        [ -z "$ended" ] || before="ended with exit code $ended"
        echo "attempt     $attempt, after one that $before"
    fi
    rm -f "$run/$name.exit" "$run/$name.notice" "$run/$name.requeued"
    if [ ! -e "$run/environment" ]; then
        echo "note: the variables of the shell that submitted this run were removed when it ended: those of the job are used"
        make_private environment </dev/null
    fi
    [ -e "$run/key" ] || od -An -N16 -tx1 /dev/urandom | tr -d ' \n' | make_private key
}

# Two jobs at once would write into the same folders. Where the scheduler cannot be asked, the task starts.
refuse_beside() {
    if declare -F is_queued >/dev/null && is_queued "$1"; then
        echo "error: $name is not started, for job $1 of this run has not ended: wait for its end or cancel it, then submit this" \
            "script again"
        exit 1
    fi
}

# Of jobs that begin the same attempt at the same moment, the first one's file counts.
claim_attempt() {
    (set -o noclobber && echo "$job" >"$run/$name.claim.$1") 2>/dev/null || refuse_beside "$(cat "$run/$name.claim.$1")"
    note_id
}

# Put this job back into the queue by a function of the scheduler.
put_back() {
    touch "$run/$name.requeued"
    "$1" && return
    rm -f "$run/$name.requeued"
    return 1
}

# By its newest id a job is asked for; in an array it has the array's.
note_id() {
    echo "$job" >"$run/$name.job"
    [ "$index" = 0 ] || echo "$job" >"$run/$step.array"
}

# Several jobs of an array may begin at the same moment: the first one's file counts.
make_private() {
    local part
    part=$(umask 077 && mktemp "$run/.$1.XXXXXXXX") && cat >"$part" && ln "$part" "$run/$1" 2>/dev/null
    rm -f "$part"
}

name=$step
[ "$index" = 0 ] || name=$step.$index
cd "$work" || exit
if declare -F prepare_job >/dev/null; then prepare_job; fi
begin_attempt "${1:-}"
wait_for_step_before
if ! same_image "$image"; then
    if [ -e "$image" ]; then
        echo "error: $image is not what it was when the job was submitted: submit the task again"
    else
        echo "error: $image is gone: submit the task again with an image that is there"
    fi
    end_job 1
fi
nodes=$(list_nodes | awk '!seen[$1]++ { print $1 }' | paste -sd, -)
port=$((20000 + $(echo "$job.$index" | cksum | cut -d ' ' -f 1) % 12000))
[ -n "$processes" ] || processes=$(count_gpus)
[ "$processes" -gt 0 ] || processes=1
echo "$processes" >"$run/$name.processes" # every node has to start as many
times=$(cat "$run/$name.times" 2>/dev/null || echo 0)
echo "job         $job on $nodes, start $((times + 1)), $(date '+%F %T')"

# Signalled before the walltime ends, or before preemption: the processes save, and end.
trap 'touch "$run/$name.notice"' USR1 USR2 XCPU TERM
timer=
if [ -n "$warn_after" ]; then
    (trap 'kill $!' TERM; sleep "$warn_after" & wait $! && touch "$run/$name.notice") >/dev/null 2>&1 &
    timer=$!
fi

touch "$run/$name.started"
start_nodes
wait_for_nodes
[ -z "$timer" ] || kill "$timer" 2>/dev/null

# ---- 75: not finished. The same job again, until it is done, or until it makes no progress.
if [ "$code" = 75 ] && [ ! -e "$run/cancelled" ] && [ ! -e "$run/$name.cancelled" ]; then
    saved='saved, not finished'
    idle=0
    if ! has_saved; then
        saved='nothing was saved, not finished'
        idle=$(($(cat "$run/$name.idle" 2>/dev/null || echo 0) + 1))
    fi
    echo "$idle" >"$run/$name.idle"
    if [ "$idle" -ge 2 ]; then
        echo "error: $idle starts in a row saved nothing: not back into the queue. Submit again with a longer --time, or with a" \
            "longer --grace-period"
    elif [ "$times" -lt "$max_resubmits" ]; then
        echo $((times + 1)) >"$run/$name.times"
        echo "again       $saved: back into the queue, $((times + 1)) of at most $max_resubmits times"
        put_back requeue && exit "$code"
        echo "$times" >"$run/$name.times"
    else
        echo "error: $saved, and back in the queue $max_resubmits times: that is --max-resubmits"
    fi
fi
end_job "$code"
