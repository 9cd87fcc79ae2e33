"""The one door to other programs: output, failures and interruptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.process import (
    MARK,
    ProcessError,
    describe_exit,
    end_orphans,
    name_exit,
    piped,
    quoted,
    readable,
    run,
    set_trace,
    stream,
    which,
)

ROOT = Path(__file__).resolve().parents[4]


def test_run_returns_stdout_and_stderr_without_a_terminal() -> None:
    done = run(["sh", "-c", "echo out; echo err >&2; cat"])
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert run(["cat"], input="typed").stdout == "typed"
    assert run(["printf", r"\377"]).stdout == "\ufffd"


def test_process_error_names_command_code_and_last_lines() -> None:
    with pytest.raises(ProcessError) as caught:
        run(["sh", "-c", "seq 100 >&2; exit 3"])
    assert caught.value.returncode == 3
    first, *last = str(caught.value).splitlines()
    assert first == "command failed with exit code 3: sh -c 'seq 100 >&2; exit 3'"
    assert last == [str(number) for number in range(86, 101)]
    assert run(["false"], check=False).returncode == 1


def test_a_missing_program_is_a_process_error(tmp_path: Path) -> None:
    assert run(["ekiben-none"], check=False).returncode == 127
    with pytest.raises(ProcessError, match="exit code 127: ekiben-none\nekiben-none: No such file"):
        run(["ekiben-none"])
    with pytest.raises(ProcessError, match="exit code 127"), piped(["ekiben-none"]):
        pass
    lines: list[str] = []
    assert stream(["ekiben-none"], lines.append) == 127
    assert lines == ["ekiben-none: No such file or directory"]
    (tmp_path / "plain").write_text("x")
    assert run([tmp_path / "plain"], check=False).returncode == 127


def test_program_that_takes_longer_than_the_timeout_is_killed() -> None:
    done = run(["sh", "-c", "echo $$; exec sleep 60"], check=False, timeout=0.5)
    assert (done.returncode, done.stderr) == (124, "sh: no answer within 0 s")
    with pytest.raises(ProcessError, match=r"exit code 124: sleep 60\nsleep: no answer within"):
        run(["sleep", "60"], timeout=0.5)


def test_stream_calls_on_line_as_lines_arrive() -> None:
    lines: list[str] = []
    assert stream(["sh", "-c", r"echo a; echo b >&2; printf '1\r2\rend'; exit 4"], lines.append) == 4
    assert lines == ["a", "b", "1", "2", "end"]


def test_piped_yields_stdout_and_raises_on_failure() -> None:
    with piped(["sh", "-c", "echo a; echo b"]) as out:
        assert out.readline() == b"a\n"  # the rest need not be read
    with (
        pytest.raises(ProcessError, match=r"exit code 5: .*\noh no"),
        piped(["sh", "-c", "echo a; echo oh no >&2; exit 5"]) as out,
    ):
        assert out.read() == b"a\n"


def gone(pid: int) -> bool:
    """Whether it ended, within some seconds; one that waits for its parent to look has ended, too."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("way", ["stream", "piped"])
def test_an_interrupt_kills_the_process_group(way: str) -> None:
    """The grandchild ignores SIGTERM, as a compiler's driver may."""
    script = "(trap '' TERM; echo $(sh -c 'echo $PPID'); sleep 60; sleep 60) & echo $$; wait"
    pids: list[int] = []

    def take(line: str) -> None:
        pids.append(int(line))
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if way == "stream":
            stream(["sh", "-c", script], take)
        else:
            with piped(["sh", "-c", script]) as out:
                for line in out:
                    take(line.decode())
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_sigint_kills_the_child(tmp_path: Path) -> None:
    script = (
        "from ekiben.core.process import stream; stream(['sh', '-c', 'echo $$; exec sleep 60'], lambda line:"
        " print(line, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT or process.returncode == 130
    assert gone(pid)


@pytest.fixture
def traced() -> Iterator[list[str]]:
    lines: list[str] = []
    set_trace(lines.append)
    yield lines
    set_trace(lambda line: None)


def test_commands_are_traced_as_shell_lines(traced: list[str], tmp_path: Path) -> None:
    run(["echo", "it's", tmp_path / "a b"])
    stream(["true"], lambda line: None)
    with piped(["true"]):
        pass
    assert traced == [f"+ echo 'it'\"'\"'s' '{tmp_path}/a b'", "+ true", "+ true"]
    assert run(["sh", "-c", traced[0][2:]]).stdout == f"it's {tmp_path}/a b\n"
    assert quoted(["a", Path("b c")]) == "a 'b c'"


def test_which_searches_system_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "ekiben-tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert which("ekiben-none", "ekiben-tool") == str(tool)
    assert which("ekiben-none") is None
    assert Path(which("ldconfig") or "").parent in (Path("/usr/sbin"), Path("/sbin"))


def test_readable_returns_only_existing_paths(tmp_path: Path) -> None:
    assert readable(tmp_path / "none") is None
    assert readable(tmp_path) == tmp_path


@pytest.mark.parametrize("variable", [{MARK: "here__1__x"}, {"TMPDIR": "/store/staging/here__1__x/scratch"}])
def test_orphans_have_ended_when_their_folder_is_removed(
    variable: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's are asked to end, and tidy up meanwhile: what they still write must not be left."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script = f"trap 'sleep 0.5; touch {tmp_path}/last; exit' TERM; touch {tmp_path}/ready; while :; do sleep 0.01; done"
    with subprocess.Popen(["sh", "-c", script], env=os.environ | variable) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        end_orphans("here__1__other")
        assert process.poll() is None
        end_orphans("here__1__x")
        assert (tmp_path / "last").exists()


@pytest.mark.parametrize(
    ("code", "text", "name"),
    [
        (3, "failed with exit code 3", "exit code 3"),
        (-15, "was ended by SIGTERM", "signal SIGTERM"),
        (137, "was ended by SIGKILL (out of memory?)", "signal SIGKILL"),
        (139, "was ended by SIGSEGV", "signal SIGSEGV"),
        (128, "failed with exit code 128", "exit code 128"),
        (255, "failed with exit code 255", "exit code 255"),
    ],
)
def test_the_end_by_a_signal_has_its_name(code: int, text: str, name: str) -> None:
    assert (describe_exit(code), name_exit(code)) == (text, name)


def test_a_program_ended_by_a_signal_is_named_in_its_error() -> None:
    with pytest.raises(ProcessError, match="command was ended by SIGTERM: sh -c"):
        run(["sh", "-c", "kill -TERM $$"])
