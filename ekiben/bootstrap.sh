#!/bin/sh
# From a fresh clone to what `make image` needs. A step that is done already is skipped.
#
#   sh ekiben/bootstrap.sh             .venv with the locked requirements
#   sh ekiben/bootstrap.sh --dev       … and what the tests and checks need
#   sh ekiben/bootstrap.sh --engine    … and a program that can run a layer, and mmdebstrap for the base layer
#
#   PYTHON=…               the interpreter to use, 3.11 or newer; of an installed Ekiben: its environment's own
#   EKIBEN_NO_INSTALL=1    leaves the system's packages alone and says what is missing
#
# Writes into the checkout only; all else goes through the system's package manager. Exit codes: 2 usage, 4 something is
# missing that this account cannot install, 7 packages could not be fetched.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv

say() { printf 'ekiben: %s\n' "$1" >&2; }
die() { say "$2"; exit "$1"; }
has() { command -v "$1" >/dev/null 2>&1; }

main() {
    locks=requirements.lock
    engine=false
    for option in "$@"; do
        case $option in
            --dev) locks="requirements.lock requirements-dev.lock" ;;
            --engine) engine=true ;;
            *) die 2 "unknown option '$option'; known: --dev --engine" ;;
        esac
    done
    is_installed || is_venv_ready || make_venv
    if $engine; then prepare_engine; fi
}

# As a package in an environment of its own: there is no lock file beside it, and nothing to set up but the engine.
is_installed() { [ ! -e "$root/requirements.lock" ]; }

# --- .venv -----------------------------------------------------------------------------------------------------------

# The stamp holds the interpreter's path and the sha256sum line of each lock file that was installed.
is_venv_ready() {
    stamp=$venv/.requirements
    [ -x "$venv/bin/python" ] && [ -r "$stamp" ] || return 1
    interpreter=$(readlink -f "$venv/bin/python")
    grep -qxF "$interpreter" "$stamp" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(real_python "$PYTHON")" = "$interpreter" ] || return 1
    for lock in $locks; do
        grep -qxF "$(lock_sum "$lock")" "$stamp" || return 1
    done
}

lock_sum() { (cd "$root" && sha256sum "$1"); }

# Made beside its place and renamed: whoever sees .venv sees all of it, and of two that make it at once one wins.
make_venv() {
    [ -w "$root" ] || die 4 "$venv is missing or outdated, and you cannot write to $root: ask its owner to run make"
    python=$(find_python)
    need_venv_module "$python"
    new=$venv.new.$(uname -n).$$
    trap 'rm -rf "$new" "$new.old"' EXIT
    trap 'exit 130' INT TERM HUP
    say "making .venv with $python"
    "$python" -I -m venv "$new"
    say "installing $locks into .venv"
    install_locked "$new" ||
        die 7 "pip could not install $locks: see above. A mirror or a proxy is set in pip.conf or PIP_INDEX_URL"
    name_final_place "$new" "$venv"
    { readlink -f "$new/bin/python"; for lock in $locks; do lock_sum "$lock"; done; } >"$new/.requirements"
    put_venv
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        real_python "$PYTHON" || die 4 "PYTHON=$PYTHON is not Python 3.11 or newer$(version_of "$PYTHON")"
        return
    fi
    # The system's own come first: everyone can read them, so one user's .venv works for the others.
    found=
    for candidate in /usr/bin/python3 /usr/bin/python3.1[1-9] /usr/local/bin/python3 \
        python3 python3.14 python3.13 python3.12 python3.11; do
        has "$candidate" || continue
        real_python "$candidate" && return
        found="$found $(command -v "$candidate")$(version_of "$candidate"),"
    done
    die 4 "needs Python 3.11 or newer; found:${found:- none,} install it (apt-get install python3.11 python3.11-venv, \
or dnf install python3.11) or name one: PYTHON=/path/to/python3"
}

# The interpreter itself, not a link that may lead to another version tomorrow.
real_python() {
    "$1" -I -c 'import os, sys
sys.exit(1) if sys.version_info < (3, 11) else print(os.path.realpath(sys.executable))' 2>/dev/null
}

version_of() { "$1" --version 2>/dev/null | sed -n '1s/.*/ (&)/p' || true; }

# Debian keeps this part of Python in a package of its own.
need_venv_module() {
    if "$1" -I -c 'import ensurepip, venv' 2>/dev/null; then return; fi
    case $1 in
        /usr/bin/*) ;;
        *) die 4 "$1 lacks the modules venv and ensurepip: name a complete Python with PYTHON=/path/to/python3" ;;
    esac
    name=$(basename "$1")
    install_packages "$1 cannot make a virtual environment" "$name-venv" "$name" ||
        exit 4
}

# -I: a PYTHONPATH of environment modules or of a shell profile must not leak in.
install_locked() {
    target=$1
    set --
    for lock in $locks; do set -- "$@" -r "$root/$lock"; done
    quietly env PIP_USER=0 "$target/bin/python" -I -m pip install --no-input --disable-pip-version-check \
        --require-hashes "$@"
}

# Scripts name the folder they were made in, which is about to be renamed.
name_final_place() {
    "$1/bin/python" -I - "$1" "$2" <<'EOF'
import os, pathlib, sys

old, new = map(os.fsencode, sys.argv[1:])
venv = pathlib.Path(sys.argv[1])
for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
    if path.is_file() and not path.is_symlink() and old in (content := path.read_bytes()):
        path.write_bytes(content.replace(old, new))
EOF
}

put_venv() {
    if is_venv_ready; then return; fi
    if [ -e "$venv" ] && [ ! -e "$venv/.requirements" ]; then
        mv -T "$venv" "$venv.before" || die 1 "$venv was made by someone else: move it away"
        say "kept the .venv that was here as .venv.before"
    fi
    mv -T "$venv" "$new.old" 2>/dev/null || true
    mv -T "$new" "$venv" 2>/dev/null || is_venv_ready || die 1 "cannot rename $new to $venv"
}

# --- what runs a layer -----------------------------------------------------------------------------------------------

prepare_engine() {
    if ! has_engine; then
        install_packages "nothing here can run a layer ($engine_problems), buildah can" \
            "buildah crun uidmap fuse-overlayfs" "buildah crun shadow-utils fuse-overlayfs" || exit 4
        has_engine || die 4 "buildah is installed and cannot be used here: $engine_problems"
    fi
    # Not an end by itself: the image may be in a store already, or stand on a base that needs no mmdebstrap.
    { has mmdebstrap && has_debian_keys; } ||
        install_packages "mmdebstrap or Debian's keys are missing, with which the Debian base layer is made" \
            "mmdebstrap debian-archive-keyring" "mmdebstrap debian-keyring" ||
        say "going on without them: an image that has to build its base layer will say so"
}

# Ubuntu's mmdebstrap comes without.
has_debian_keys() { [ -e /usr/share/keyrings/debian-archive-keyring.gpg ]; }

# Cheapest question first. What was there and of no use is in $engine_problems.
has_engine() {
    found=
    for engine_name in apptainer singularity buildah; do
        has "$engine_name" || continue
        if is_singularityce "$engine_name" && [ "$(id -u)" != 0 ]; then
            found="${found}SingularityCE is here, which builds as root only; "
            continue
        fi
        if has_user_namespaces; then return; fi
        found="$found$engine_name is here, but this account has no user namespaces; "
    done
    if [ -n "${DOCKER_HOST:-}" ] || [ -S /var/run/docker.sock ]; then
        if docker_answers; then return; fi
        found="${found}the docker daemon at ${DOCKER_HOST:-/var/run/docker.sock} does not answer this account; "
    fi
    engine_problems=${found:-no docker, apptainer, singularity or buildah; }
    engine_problems=${engine_problems%; }
    return 1
}

is_singularityce() {  # or Apptainer under its old name
    case $1 in singularity) ;; *) return 1 ;; esac
    case $(singularity --version 2>/dev/null) in singularity*) ;; *) return 1 ;; esac
}

has_user_namespaces() {
    [ "$(id -u)" != 0 ] || return 0
    # There AppArmor allows them to each packaged engine and to nothing else, so unshare proves nothing.
    [ "$(cat /proc/sys/kernel/apparmor_restrict_unprivileged_userns 2>/dev/null)" != 1 ] || return 0
    unshare --user --map-root-user true 2>/dev/null
}

docker_answers() {
    if is_installed; then python=${PYTHON:-python3}; else python=$venv/bin/python; fi
    "$python" -I -c 'import docker; docker.from_env(timeout=5).ping()' 2>/dev/null
}

# --- the system's packages -------------------------------------------------------------------------------------------

# install_packages WHY DEBIAN_NAMES RPM_NAMES: fails when it cannot, after printing who can and how.
# shellcheck disable=SC2086
install_packages() {
    apt="apt-get install -y --no-install-recommends $2"
    dnf="dnf install -y $3"
    if ! { has apt-get || has dnf; } || ! as_root=$(become_root); then
        say "$1. Ask the administrator for one of these${EKIBEN_NO_INSTALL:+ (EKIBEN_NO_INSTALL is set)}:"
        say "    $apt"
        say "    $dnf    # mmdebstrap: from EPEL, where it has it"
        return 1
    fi
    if has apt-get; then
        say "$1: installing $2"
        [ -n "${has_fresh_lists:-}" ] || quietly $as_root apt-get -o DPkg::Lock::Timeout=300 update || return 1
        has_fresh_lists=yes
        quietly $as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 ${apt#apt-get}
    else
        say "$1: installing $3"
        quietly $as_root $dnf
    fi
}

# Prints what to put before a command.
become_root() {
    [ -z "${EKIBEN_NO_INSTALL:-}" ] || return 1
    [ "$(id -u)" != 0 ] || return 0
    has sudo && sudo -n true 2>/dev/null && echo "sudo -n"
}

# One line per thing done is enough, unless it fails: then all of it.
quietly() {
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null && { rm -f "$log"; return; }
    cat "$log" >&2
    rm -f "$log"
    say "failed: $*"
    return 1
}

main "$@"
