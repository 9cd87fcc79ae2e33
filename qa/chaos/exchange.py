"""A colleague who may write a shared folder exchanges a part of a path for a link while a command is about to name it.

At a system call of the command each folder on the way, or the entry itself, becomes a link to a copy in the home of who
runs the command. When the call has returned, what was there comes back. Nothing in the home may be changed, and nothing
there be read.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.lab import Case, Lab, digest
from chaos.tracer import OPENS, Call, trace, trace_me

_calls: dict[str, int] = {}  # paths in the shared folder that a command names
sent = 0  # exchanges, since the campaign last looked


@dataclass
class Colleague:
    """Exchanges what ``choose`` returns of a path below ``shared``, for as long as one system call takes."""

    case: Case
    shared: Path
    home: Path
    choose: Callable[[int, Path], Path | None]
    calls: int = 0
    exchanges: int = 0
    _seen: dict[Path, tuple[object, ...]] = field(default_factory=dict)
    _exchanged: dict[int, tuple[Path, Path]] = field(default_factory=dict)  # by process: the path, and what was there
    _aside: Path | None = None

    def before(self, call: Call) -> None:
        """Exchange one path of the call, unless another call is being waited for."""
        for path in call.paths:
            if not path.is_relative_to(self.shared) or path == self.shared:
                continue
            self.calls += 1
            chosen = self.choose(self.calls, path)
            if chosen and not self._exchanged and not chosen.is_symlink():
                self._exchange(call.pid, chosen)
                return

    def _exchange(self, pid: int, path: Path) -> None:
        self.exchanges += 1
        aside, copy = self.home.with_name("aside") / str(self.exchanges), self.home / str(self.exchanges) / path.name
        aside.parent.mkdir(exist_ok=True)
        copy.parent.mkdir()
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True)
        elif path.is_file():
            shutil.copy(path, copy)
        else:
            copy.write_text("precious")
        for item in (copy, *copy.rglob("*")):
            if not item.is_symlink():
                item.chmod(0o700 if item.is_dir() else 0o600)
        self._seen |= {item: state(item) for item in (copy, *copy.rglob("*"))}
        if os.path.lexists(path):
            path.rename(aside)
        path.symlink_to(copy)
        self._exchanged[pid] = (path, aside)

    def after(self, call: Call, result: int) -> None:
        """Put back what was there, unless the command put something else in its place."""
        if call.number in OPENS and result >= 0:
            with contextlib.suppress(OSError):
                file = Path(f"/proc/{call.pid}/fd/{result}").readlink()
                if file.is_relative_to(self.home):
                    self.case.problem(
                        f"{file.relative_to(self.home)} was read: system call {call.number} of {call.paths[-1].name}"
                    )
        if call.pid not in self._exchanged:
            return
        path, aside = self._exchanged.pop(call.pid)
        if path.is_symlink() and path.readlink().is_relative_to(self.home):
            path.unlink()
            if os.path.lexists(aside):
                aside.rename(path)

    def check(self) -> None:
        """Nothing in the home is changed, gone or new."""
        left = {item: state(item) for copy in self.home.glob("*/*") for item in (copy, *copy.rglob("*"))}
        for item in sorted(left.keys() | self._seen.keys()):
            if left.get(item) != self._seen.get(item):
                kind = "new" if item not in self._seen else "gone" if item not in left else "changed"
                self.case.problem(f"{kind} in the home: {item.relative_to(self.home)}")


def state(path: Path) -> tuple[object, ...]:
    """Return what changes when a file does, but for the time when it was read."""
    status = path.lstat()
    content = str(path.readlink()) if path.is_symlink() else digest(path) if path.is_file() else ""
    return status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_nlink, content


def folders_on_the_way(shared: Path) -> Callable[[int, Path], Path | None]:
    """Return a choice of one folder above the entry that a call names, another one each time; of all calls."""

    def choose(number: int, path: Path) -> Path | None:
        way = path.relative_to(shared).parts[:-1]
        return shared.joinpath(*way[: 1 + number % len(way)]) if way else None

    return choose


def entry_of_call(number: int) -> Callable[[int, Path], Path | None]:
    """Return a choice of the entry itself, of one call."""
    return lambda count, path: path if count == number else None


def _publish(case: Case) -> list[str]:
    case.run(case.build(1))
    return case.publish(1, "--modulefile", "--pin")


def _prune(case: Case) -> list[str]:
    case.run(_publish(case))
    abandoned = case.shared / "store/staging" / f"{platform.node()}__999999__left"
    (abandoned / "sub").mkdir(parents=True)
    (abandoned / "sub/file").write_text("x")
    (case.shared / "trash" / "1__aa__old.sif").write_text("x")
    (case.shared / "trash" / "1__ab__old").mkdir()
    for path in (case.shared / "images/own").glob("*.pin"):
        path.unlink()
    return ["--store", str(case.store), "prune", "--in", str(case.shared), "--unused-for", "0", "--grace", "0"]


def _prune_named(case: Case) -> list[str]:
    argv = _prune(case)
    return [*argv[:-4], case.lab.name, "--grace", "0"]


def _catalog(case: Case) -> list[str]:
    case.run(_publish(case))
    case.run(["--store", str(case.store), "catalog", str(case.shared)])
    return ["--store", str(case.store), "catalog", str(case.shared)]


def _build(case: Case) -> list[str]:
    """With layers that are in the shared folder alone."""
    case.run(_publish(case))
    case.reset_store()
    return ["--shared", str(case.shared), *case.build(1)]


def _list(case: Case) -> list[str]:
    return ["--store", str(case.store), "--shared", str(case.shared), "list"]


COMMANDS: dict[str, Callable[[Case], list[str]]] = {
    "publish": _publish,
    "prune --in": _prune,
    "prune --in NAME": _prune_named,
    "catalog": _catalog,
    "image --shared": _build,
    "list --shared": _list,
}


def exchanged(case: Case, argv: list[str], choose: Callable[[int, Path], Path | None]) -> Colleague:
    """Run a command beside the colleague; a traceback is a problem, and so is what the colleague finds."""
    global sent
    home = case.folder / "home/thesis"
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(home.with_name("aside"), ignore_errors=True)
    home.mkdir(parents=True)
    colleague = Colleague(case, case.shared, home, choose)
    running = case.start(argv, trace_me)
    running.code = trace(running.pid, colleague.before, colleague.after)
    colleague.check()
    sent += colleague.exchanges
    if "Traceback" in running.output:
        case.problem(f"`{argv[2]}` with {colleague.exchanges} exchanges: {running.output[-900:]}")
    return colleague


def exchange(command: str) -> Callable[[Lab], list[str]]:
    """Return the kind of fault of one command: at first all folders on the way, one at each call; then one entry, at
    any call.
    """

    def kind(lab: Lab) -> list[str]:
        with lab.case() as case:
            case.shared.chmod(0o2775)
            argv = COMMANDS[command](case)
            if command in _calls:
                exchanged(case, argv, entry_of_call(lab.dice.randint(1, _calls[command])))
            else:
                colleague = exchanged(case, argv, folders_on_the_way(case.shared))
                _calls[command] = colleague.calls
                if colleague.exchanges == 0:
                    case.problem("the command named nothing in the shared folder")
                case.check_complete(versions=range(len(lab.recipes)))
            return case.problems

    return kind


KINDS = {f"exchange {command}": exchange(command) for command in COMMANDS}
