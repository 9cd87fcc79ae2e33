"""Start the only process of a job, and pass signals on to it.

It behaves as launch_group.py does with one process, and imports little: a job that starts on a thousand nodes reads its
image from one file system.
"""

import ctypes
import os
import signal
import sys

REQUEUE, INTERRUPTED = 75, 130  # EX_TEMPFAIL; ^C, after saving likewise
ENDINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP)
FAILURE_DIR = "EKIBEN_FAILURE_DIR"  # as ekiben_tasks/distributed/failures.py calls it
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0  # between looks for the file that ends the process
NO_PROGRAM = 127
_OPTIONS = ("--node", "--nodes", "--processes", "--port", "--key", "--notice", "--logs")


class Request:
    """Describe the process: its command, its node's name, and the file on whose appearance it saves and ends."""

    def __init__(self, command: list[str], node: str, stop_file: str) -> None:
        self.command, self.node, self.stop_file = command, node, stop_file


def parse(arguments: list[str]) -> Request | None:
    """Return the request of a job of one process; None for all others, and for arguments that are wrong."""
    if "--" not in arguments:
        return None
    end = arguments.index("--")
    names, values = arguments[:end:2], arguments[1:end:2]
    options = dict(zip(names, values, strict=False))
    if len(names) != len(values) or not options.keys() <= set(_OPTIONS) or not arguments[end + 1 :]:
        return None
    node = options.get("--nodes", "localhost")
    if options.get("--node", "0") != "0" or "," in node or options.get("--processes", "1") != "1":
        return None
    return Request(arguments[end + 1 :], node, options.get("--notice", ""))


def run(request: Request) -> int:
    """Run the process until it ends, and return the job's exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched = {*ENDINGS, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    folder = _make_folder()
    try:
        process, error = _start(request.command, {**os.environ, FAILURE_DIR: folder}, mask)
        if error:
            print_line(
                f"error: {request.node}: {request.command[0]}: {os.strerror(error)}; is it a task of this image?"
            )
            return NO_PROGRAM
        code, stopped = _wait(process, watched, request)
        if stopped is not None and -code in ENDINGS:
            return stopped  # it got a signal before there was anything to save
        if code in (0, REQUEUE, INTERRUPTED):
            return code
        print_line(f"error: {_reason(folder) or describe_end(0, request.node, code)}")
        return 128 - code if code < 0 else code
    finally:
        _remove(folder)


def _start(command: list[str], environment: dict[str, str], mask: set[int] | set[signal.Signals]) -> tuple[int, int]:
    """Return the id of the started process, and the error number of a start that failed."""
    result, report = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.setsid()
            die_with_parent()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(report, str(error.errno).encode())
        finally:
            os._exit(NO_PROGRAM)
    os.close(report)
    with os.fdopen(result, "rb") as stream:
        error_number = int(stream.read() or 0)
    if error_number:
        os.waitpid(process, 0)
    return process, error_number


def _wait(process: int, watched: set[signal.Signals], request: Request) -> tuple[int, int | None]:
    """Return the process's exit code, negative for a signal, and the job's after a signal to save and end, or None."""
    stopped, stop_file = None, request.stop_file
    while True:
        received = signal.sigtimedwait(watched, LOOK_SECONDS)
        if received is not None and received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), stopped
            continue
        number = received.si_signo if received is not None else 0
        if received is None and stop_file and os.path.exists(stop_file):
            # The job script's file: a signal to all of a job would also end what serves the image's files.
            number, stop_file = signal.SIGUSR1, ""
        if not number:
            continue
        if stopped is None:
            print_line(f"{request.node} received {signal.Signals(number).name}: the processes save and end")
        stopped = INTERRUPTED if number == signal.SIGINT else REQUEUE
        os.kill(process, forwarded(number))  # it has not been waited for: the kernel gives the id to no other
        os.kill(process, signal.SIGCONT)  # a stopped process would never answer


def forwarded(number: int) -> int:
    """Return the signal that a task knows: Grid Engine warns with SIGUSR2, or SIGXCPU, and tasks know SIGUSR1."""
    return signal.SIGUSR1 if number in (signal.SIGUSR2, signal.SIGXCPU) else number


def describe_end(rank: int, node: str, code: int) -> str:
    """Return how a process ended in words. code: its exit code, negative for a signal."""
    ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = "; that is how a system that runs out of memory ends a process" if -code == signal.SIGKILL else ""
    return f"rank {rank} on {node} {ending}{hint}"


def die_with_parent() -> None:
    """Make the kernel kill this process when its launcher dies: prctl(2). Runs between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def print_line(text: str) -> None:
    """Print a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def _make_folder() -> str:
    """Make the folder in which the process writes why it fails; tempfile would import half of the library."""
    path = f"{os.environ.get('TMPDIR') or '/tmp'}/ekiben-failures-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def _reason(folder: str) -> str:
    """Return the reason that the process itself has written, or nothing."""
    try:
        with open(f"{folder}/rank-0", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _remove(folder: str) -> None:
    try:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
    except OSError:
        pass  # it lies in the folder of temporary files
