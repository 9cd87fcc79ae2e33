"""The fork server of the tests (tests/support/forkserver.py): its scripts start and end as in a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import forkserver
from support.forkserver import Options


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """Return the stand-in of a server that has imported json."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("OMP_NUM_THREADS", "1")
        folder = forkserver.start_server(("json", "no_such_module"))
        changes.setattr(forkserver, "_shared", folder)
        yield f"{folder}/python"


def end_of(program: str, *arguments: str, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, env={**os.environ, **env}
    )
    return done.returncode, done.stdout, done.stderr


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDS = {
    "returns": "print('x')",
    "exit code": "import sys; sys.exit(3)",
    "exit code above 255": "import sys; sys.exit(259)",
    "exit with None": "import sys; sys.exit(None)",
    "exit with a text": "import sys; sys.exit('a reason')",
    "exception": "def f():\n    1 / 0\nf()",
    "syntax error": "a b",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGABRT": "import os; os.abort()",
    "^C": "raise KeyboardInterrupt",
    "os._exit": "import os; os._exit(7)",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('x')",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "object at the end": "class A:\n    def __del__(self): print('deleted')\na = A()",
    "streams": "import sys; print('o'); print('e', file=sys.stderr); print(len(sys.stdin.read()))",
    "arguments and path": "import sys, os; print(sys.argv, sys.path[0] == '', __name__, os.getcwd())",
    "warnings": (
        "import warnings; warnings.warn('odd', stacklevel=1); warnings.warn('old', DeprecationWarning, stacklevel=1)"
    ),
}


@pytest.mark.parametrize("script", ENDS.values(), ids=ENDS)
def test_code_ends_as_in_a_new_interpreter(script: str, program: str, tmp_path: Path) -> None:
    arguments = ("-c", script, "one", "two words")
    assert end_of(program, *arguments, cwd=tmp_path) == end_of(sys.executable, *arguments, cwd=tmp_path)


@pytest.mark.parametrize("options", [[], ["-W", "ignore"], ["-Werror", "-u"]], ids=str)
def test_script_and_module_run_as_in_a_new_interpreter(options: list[str], program: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("WORD = 'beside'\n")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(
        "import sys, os, warnings, beside\nwarnings.warn('odd')\nprint(sys.argv, beside.WORD, __file__, sys.path[:4],"
        " os.environ['COLOUR'], sys.warnoptions)\nraise ValueError('no')\n"
    )
    env = {"COLOUR": "blue", "PYTHONPATH": f"{tmp_path}/there:{tmp_path}/there:other", "PYTHONWARNINGS": "default"}
    for what in (["scripts/script.py"], [str(script)], ["-m", "script"], ["-m", "no.module"]):
        arguments = [*options, *what, "--word"]
        expected = end_of(sys.executable, *arguments, cwd=tmp_path, **env)
        assert end_of(program, *arguments, cwd=tmp_path, **env) == (
            expected[0],
            expected[1],
            expected[2].replace(sys.executable, program),
        )


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(["-I"], {}), (["-X", "dev"], {}), ([], {"TRITON_INTERPRET": "1"}), ([], {"OMP_NUM_THREADS": "2"})],
    ids=str,
)
def test_requests_that_need_a_real_interpreter_get_one(arguments: list[str], env: dict[str, str], program: str) -> None:
    look = "import sys; print(sys.executable, sys.flags.isolated)"
    assert end_of(program, *arguments, "-c", look, **env) == (0, f"{sys.executable} {int('-I' in arguments)}\n", "")
    assert end_of(program, "-c", look) == (0, f"{program} 0\n", "")
    known = {forkserver.FOLDER: str(Path(program).parent)}
    assert end_of(program, "-c", f"{look}; sys.exit(9)", **known) == (9, f"{sys.executable} 0\n", "")


def test_inherited_pipes_need_a_real_interpreter(program: str) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        done = subprocess.run([program, "-c", f"import os; os.write({writer}, b'x')"], pass_fds=[writer], timeout=60)
        assert done.returncode == 0 and os.read(reader, 1) == b"x"


SLEEPER = """
import os, signal, sys, time
def tell(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, tell)
other = os.fork()
if other:
    print(os.getpid(), other, flush=True)
for _ in range(1000):
    time.sleep(0.1)  # a signal that comes just before a sleep is seen after it
"""


@pytest.fixture
def sleeper(program: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start SLEEPER, and return the stand-in and the two processes of the script."""
    with subprocess.Popen([program, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pids = [int(word) for word in process.stdout.readline().split()]
        yield process, pids
        process.kill()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_signals_are_passed_on(sleeper: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, _ = sleeper
    process.send_signal(signal.SIGTERM)
    assert process.stdout and process.stdout.readline() == "got SIGTERM\n"
    assert process.wait(timeout=30) == 5


# The calls between the signal and the wait are of C alone: Python runs no handler there, as after a signal that comes
# just before a system call.
LATE_SIGNAL = """
import ctypes, functools, operator, select, signal, socket
from support import forked_python
connection, server = socket.socketpair()
noted = forked_python.note_signals()
signal.signal(signal.SIGTERM, lambda *_: server.sendall(bytes([0, 0, 0, 7])))
kill, wait = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGTERM), select.select
select.select = lambda *lists: list(map(operator.call, (kill, functools.partial(wait, *lists))))[1]
forked_python.wait_for_data(connection, noted)
print(forked_python.receive(connection))
"""


def test_a_signal_just_before_the_stand_in_waits_is_handled() -> None:
    folder = str(Path(forkserver.__file__).parents[1])
    assert end_of(sys.executable, "-c", LATE_SIGNAL, PYTHONPATH=folder) == (0, "7\n", "")


def test_script_and_its_processes_die_with_the_stand_in(sleeper: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = sleeper
    assert all(is_alive(pid) for pid in pids) and process.pid not in pids
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    for pid in pids:
        wait_for_end(pid)


def test_stand_in_dies_with_the_script(sleeper: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = sleeper
    os.kill(pids[0], signal.SIGUSR1)
    assert process.wait(timeout=30) == -signal.SIGUSR1


def test_child_has_the_number_and_the_group_of_its_process(program: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        child = forkserver.Child(["-c", SLEEPER], os.environ, (nothing.fileno(), log.fileno(), log.fileno()))
        assert child.poll() is None and os.getpgid(child.pid) == child.pid
        while not (pids := (tmp_path / "log").read_text().split()):
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        os.killpg(child.pid, signal.SIGKILL)
        assert child.wait(30) == child.poll() == child.returncode == -signal.SIGKILL
        for pid in pids:
            wait_for_end(int(pid))


def test_scripts_and_server_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Without an orderly end of that process, too."""
    script = (
        "import os, subprocess, sys\nfrom support import forkserver\nfolder = forkserver.start_server(['json'])\n"
        "process = subprocess.Popen([folder + '/python', '-c', 'import time; print(1, flush=True); time.sleep(100)'],\n"
        "                           stdout=subprocess.PIPE)\n"
        "process.stdout.readline()\nprint(folder, process.pid, flush=True)\n"
        "os._exit(0) if sys.argv[1:] else sys.exit()"
    )
    for options in ([], ["suddenly"]):
        env = {**os.environ, "PYTHONPATH": str(Path(forkserver.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script, *options], capture_output=True, text=True, env=env, timeout=60
        )
        folder, pid = done.stdout.split()
        wait_for_end(int(pid))
        if options:  # the folder stays, and what is there becomes a real interpreter
            assert end_of(f"{folder}/python", "-c", "import sys; print(sys.executable)")[1].strip() == sys.executable
        else:
            assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["-u", "-W", "ignore", "-Werror", "a.py", "-c"],
            Options("script", "a.py", ("-c",), ("ignore", "error"), True),
        ),
        (["-m", "a.b", "-u"], Options("m", "a.b", ("-u",))),
        (["-c", "x"], Options("c", "x", ())),
        (["-I", "a.py"], None),
        (["-c"], None),
        ([], None),
    ],
)
def test_options_of_an_interpreter(arguments: list[str], expected: Options | None) -> None:
    assert Options.parse(arguments) == expected
