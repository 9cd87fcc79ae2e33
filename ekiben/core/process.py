"""Run other programs. Every call is traced as a command that can be pasted into a shell."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ekiben.core.errors import EkibenError

Argv = Sequence[str | os.PathLike[str]]
Trace = Callable[[str], None]
TIMED_OUT = 124  # exit code of timeout(1)
PIPE = 1 << 20  # bytes of a pipe's buffer, where the system allows it: gigabytes pass through one

_trace: Trace = lambda line: None  # noqa: E731


def set_trace(trace: Trace) -> None:
    """Set where ``+ command`` lines go; by default nowhere."""
    global _trace
    _trace = trace


def name_exit(code: int) -> str:
    """Return "exit code 1", or "signal SIGTERM": a shell adds 128 to the number of the signal that ended a program."""
    name = _signal_of(code)
    return f"signal {name}" if name else f"exit code {code}"


def describe_exit(code: int) -> str:
    """Return how a program ended that failed."""
    name = _signal_of(code)
    if not name:
        return f"failed with exit code {code}"
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _signal_of(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


class ProcessError(EkibenError):
    """A program failed: its command, exit code and last lines."""

    def __init__(self, argv: Argv, returncode: int, stderr: str) -> None:
        self.returncode, self.stderr = returncode, stderr
        end = describe_exit(returncode)
        super().__init__(f"command {end}: {quoted(argv)}\n{_last_lines(stderr)}".rstrip())


def quoted(argv: Argv) -> str:
    """Return ``argv`` as a line to paste into a shell."""
    return shlex.join(os.fspath(word) for word in argv)


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-15:])


def search_path() -> list[str]:
    """Return where programs are looked for: PATH and the system's own directories, which an ordinary PATH may lack."""
    return [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/sbin", "/usr/sbin", "/sbin"]


def which(*names: str) -> str | None:
    """Return the path of the first of ``names`` that is in search_path()."""
    path = os.pathsep.join(search_path())
    return next((program for name in names if (program := shutil.which(name, path=path))), None)


def run(
    argv: Argv,
    *,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output. Raises ProcessError when it fails, unless ``check`` is off.

    timeout: seconds after which it is killed, and fails with exit code 124, as that of timeout(1).
    """
    _trace(f"+ {quoted(argv)}")
    try:
        done = subprocess.run(
            [os.fspath(word) for word in argv],
            env=env,
            input=input,
            stdin=None if input is not None else subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(
            list(argv), TIMED_OUT, "", f"{os.fspath(argv[0])}: no answer within {timeout:.0f} s"
        )
    except OSError as error:  # as a shell reports it
        done = subprocess.CompletedProcess(list(argv), 127, "", f"{os.fspath(argv[0])}: {error.strerror}")
    if check and done.returncode:
        raise ProcessError(argv, done.returncode, done.stderr or done.stdout)
    return done


def stream(
    argv: Argv, on_line: Callable[[str], None], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> int:
    """Run a program, call ``on_line`` with each line of stdout and stderr, and return the exit code.

    ``pass_fds``: descriptors that the child inherits. It gets a process group of its own, which is ended when we are
    interrupted: a compiler deep in a container must not outlive the build.
    """
    _trace(f"+ {quoted(argv)}")
    try:
        started = subprocess.Popen(
            [os.fspath(word) for word in argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except OSError as error:
        on_line(f"{os.fspath(argv[0])}: {error.strerror}")
        return 127
    with started as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                on_line(line.rstrip("\n"))
            return child.wait()
        except BaseException:
            _end_group(child)
            raise


def interact(argv: Argv, *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()) -> int:
    """Run a program on this terminal, and return its exit code: 127 where it does not start. Ctrl-C is the program's
    own.

    ``pass_fds``: descriptors that it inherits.
    """
    _trace(f"+ {quoted(argv)}")
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # SIG_IGN would be inherited
    try:
        return subprocess.run([os.fspath(word) for word in argv], env=env, pass_fds=pass_fds, check=False).returncode
    except OSError as error:
        print(f"{os.fspath(argv[0])}: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def piped(argv: Argv, *, stdin: IO[bytes] | None = None, env: Mapping[str, str] | None = None) -> Iterator[IO[bytes]]:
    """Yield the program's stdout as a stream. Raises ProcessError at the end when it failed."""
    _trace(f"+ {quoted(argv)}")
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [os.fspath(word) for word in argv],
                env=env,
                stdin=stdin or subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pipesize=PIPE,
            )
        except OSError as error:
            raise ProcessError(argv, 127, f"{os.fspath(argv[0])}: {error.strerror}") from error
        assert child.stdout is not None
        try:
            yield child.stdout
            while child.stdout.read(1 << 20):  # a reader may stop at the end of an archive; the program may not
                pass
            code = child.wait()
        except BaseException:
            _end_group(child)
            raise
        finally:
            child.stdout.close()
        if code:
            errors.seek(0)
            raise ProcessError(argv, code, errors.read().decode("utf-8", "replace"))


def _end_group(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # processes that the first one left behind


MARK = "EKIBEN_STAGING"  # marks processes that have no mount to identify them
_PATIENCE = 5.0  # seconds that an orphan has to tidy up before it is killed


def end_orphans(staging: str) -> None:
    """Kill processes of a killed build, and wait for their end: until then they write in its staging folder.

    Such have a mount of that folder, of this name, or name it in their environment, in MARK or as TMPDIR.
    """
    asked, denied = dict[int, float](), set[int]()
    end = time.monotonic() + 2 * _PATIENCE
    while (orphans := {process: sign for process, sign in _orphans(staging) if process not in denied}) and (
        time.monotonic() < end
    ):
        for process, sign in orphans.items():
            late = time.monotonic() - asked.get(process, time.monotonic()) > _PATIENCE
            if process in asked and not late:
                continue
            try:
                os.kill(process, signal.SIGKILL if late else sign)
                asked[process] = time.monotonic()
            except OSError:  # another user's process, or one that has ended
                denied.add(process)
        time.sleep(0.02)


def _orphans(staging: str) -> Iterator[tuple[int, signal.Signals]]:
    """Yield each process of a killed build, and the signal that ends it. One that has ended shows nothing here."""
    mounted = f"/staging/{staging}/mount".encode()
    # buildah has its TMPDIR there, and tidies it up when the script that it runs has ended.
    named = f"{MARK}={staging}\0".encode(), f"/staging/{staging}/".encode()
    # A mount of the initial namespace does not show its user.
    is_private = mounted not in Path("/proc/self/mountinfo").read_bytes()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if is_private and mounted in (process / "mountinfo").read_bytes():
                yield int(process.name), signal.SIGKILL
                continue
            environment = (process / "environ").read_bytes()
            if any(name in environment for name in named):
                # Root's builds work in that folder. Other users' are elsewhere, and only their owner can clean them up.
                yield int(process.name), signal.SIGTERM if os.geteuid() else signal.SIGKILL


def readable(path: Path) -> Path | None:
    """Return ``path`` if this user may read it."""
    return path if os.access(path, os.R_OK) else None
