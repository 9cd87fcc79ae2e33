#!/usr/bin/env bash
# The tests of a change, or all: what they need is installed and started first. CONTRIBUTING.md says which tests there are.
#
#   tests/run.sh change [OPTION…]   unit tests; of the others the guards, those of what changed, and one slice
#   tests/run.sh all [OPTION…]      every test that needs no GPU
#
# Options are pytest's. As an ordinary user, or without apt-get: the unit tests, which need nothing of the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

# part NAME COMMAND…: says how long it took.
part() {
    local name=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    printf 'tests: %s: %d s\n' "$name" $((SECONDS - began)) >&2
    return $status
}

slow_files() { git ls-files 'tests/integration/test_*.py' 'qa/**test_*.py' ':!qa/gpu' 2>/dev/null || true; }

selected=${1:-}
case $selected in
    change | all) shift ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
# A worker for each core. Files that share an engine or a cluster run in one of them: tests/support/session.py.
pytest=(.venv/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@")
status=0
as_root=no
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then as_root=yes; fi

if [ $as_root = yes ]; then
    part "programs installed" bash tests/services.sh install
    part "services started" bash tests/services.sh start
fi
part "virtual environment" sh ekiben/bootstrap.sh --dev
part "unit tests" "${pytest[@]}" tests/unit || status=$?
if [ $as_root = yes ]; then
    "${pytest[@]}" --select "$selected" tests/integration qa || status=$?  # at the end stands pytest's own summary
else
    printf 'tests: left out, because they need root and apt-get:\n%s\n' "$(slow_files)" >&2
fi
exit $status
