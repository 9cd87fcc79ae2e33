"""The command of a %post that failed, found with the shells of this machine; the script itself notices nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.builder import failed_line
from ekiben.builder.failed_line import ScriptWatch
from ekiben.executors import SOURCED, JobFailed

FUNCTION = "f() {\n  true\n  false\n}\n\nf a  # called\necho after\n"
LOOP = "echo 1\nfor i in 1 2; do\n  echo $i\n  false\ndone\necho after\n"
HERE = "cat <<X\n$(echo 'a b')\nX\n# a remark\n\ncat <<X | false \\\n  || exit 7\n)\nX\necho after\n"
LONG = "true\n: '" + "x" * 9000 + "'\nfalse\ntrue\n"
LAST = "true\nfalse"

# shell → script → exit code, line and beginning of the command
DASH = {
    FUNCTION: (1, 6, "f a  # called"),
    LOOP: (1, 2, "for i in 1 2; do\n  echo $i\n  false\ndone"),
    HERE: (7, 6, "cat <<X | false \\\n  || exit 7\n)\nX"),
    LONG: (1, 3, "false"),
    LAST: (1, 2, "false"),
    "echo a\nexit 3\necho b\n": (3, 2, "exit 3"),
    "if true; then\n  nosuchprogram\nfi\n": (127, 1, "if true; then"),
    'x=$(echo "\n"); kill -TERM $$\ntrue\n': (-15, 1, 'x=$(echo "\n"); kill'),
    "true\n)\ntrue\n": (2, 2, ")"),
    'exec sh -e "$0.other"\n': (4, 1, "exec sh"),
    'cat "${0%/*}"/* >/dev/null\nfalse\n': (1, 2, "false"),  # reads all files beside it, and nothing of the script
}
BASH = {
    FUNCTION: (1, 3, "false"),
    LOOP: (1, 4, "false"),
    LAST: (1, 2, "false"),
    "true\nx=$(\n  nosuchprogram a\n)\n": (127, 4, "x=$("),
}


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(failed_line, "BUILD_MOUNT", str(tmp_path).lstrip("/"))
    (tmp_path / "post.sh.other").write_text("exit 4\n")
    return tmp_path


def run(mount: Path, shell: str, text: str, command: str = SOURCED) -> JobFailed:
    (mount / "post.sh").write_text(text)
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    with pytest.raises(JobFailed) as caught, ScriptWatch(mount, shell, command) as watch:
        argv = [program, "-e", "-c", watch.command, str(mount / "post.sh")]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False, timeout=60)
        raise JobFailed(done.returncode)
    return caught.value


@pytest.mark.parametrize(
    ("shell", "text", "expected"),
    [("dash", *case) for case in DASH.items()] + [("bash", *case) for case in BASH.items()],
)
def test_command_that_failed(mount: Path, shell: str, text: str, expected: tuple[int, int, str]) -> None:
    code, line, begin = expected
    failed = run(mount, shell, text)
    assert failed.returncode == code
    assert failed.command is not None
    assert failed.command.line == line
    assert failed.command.text.startswith(begin)
    assert failed.command.is_last_failure == (shell == "bash")


def test_line_of_a_script_for_bash(mount: Path) -> None:
    bash = shutil.which("bash")
    failed = run(
        mount, "dash", "false\n[ -z ${BASH_ENV-} ] || exit 9\nls /nonexistent 2>/dev/null\nexit 5\n", f'{bash} "$0"'
    )
    assert failed.returncode == 5
    assert failed.command is not None
    assert (failed.command.line, failed.command.text) == (3, "ls /nonexistent 2> /dev/null")


SEEN = (
    'echo "$0 $-"; set -- a; (exit 3) || echo $?; ls /none b 2>/dev/null || true; trap; echo "$_ $?"; wc -l "$0"; alias'
)


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_script_runs_as_without_the_watch(mount: Path, shell: str) -> None:
    """Its options, arguments, variables, files and output; a trap of its own; after its end nothing waits."""
    (mount / "post.sh").write_text(f"{SEEN}\ntrap 'echo bye' EXIT\nset\nread -r line || echo none\nls -l /proc/$$/fd\n")
    program = shutil.which(shell)
    assert program is not None

    def output(command: str) -> list[str]:
        argv = [program, "-e", "-c", command, str(mount / "post.sh")]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60, text=True)
        varying = (
            "PPID=",
            "total",
            "BASH_EXECUTION_STRING=",
            "BASHPID",
            "SRANDOM",
            "RANDOM",
            "BASH_LINENO",
            "lr-x",
            "l-wx",
            "lrwx",
        )
        return [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(varying)]

    with ScriptWatch(mount, shell, SOURCED) as watch:
        watched = output(watch.command)
    usual = output(SOURCED)
    assert [line for line in watched if "trap -- '{ builtin" not in line] == usual


def test_other_shells_and_a_file_system_without_pipes_are_left_alone(mount: Path) -> None:
    (mount / "feed").mkdir()
    assert run(mount, "dash", "false\n").command is None
    assert ScriptWatch(mount, "mksh", SOURCED).command == SOURCED
    assert ScriptWatch(mount, "dash", '/usr/bin/python3 "$0"').command == '/usr/bin/python3 "$0"'
    assert ScriptWatch(mount, "bash", SOURCED, has_bash_env=True).command == SOURCED
