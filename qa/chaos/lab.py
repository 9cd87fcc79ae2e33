"""Where faults happen: a small recipe without an engine, a store, a shared folder and an output, and commands as forks
of this process.

A command is a fork: the modules are loaded already, so that a kill meets its work and not its imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.cli import commands, main
from ekiben.core.inner_path import InnerPath
from ekiben.images.published import read_records
from ekiben.publish.publish import PublishOptions, publish
from ekiben.store import Store
from ekiben.store.shared import SharedStore
from support.sample_recipe import AS_SIF, GROUND, RECIPE, SampleRecipe, image_of, quiet, seeded

ROOF = "Bootstrap: localimage\nFrom: ground.sif\n\n%files\n    files/data.bin /opt/data\n"
VERSIONS = 6
LAYER_BYTES = 2_000_000
EDITS, EDIT_BYTES = 3, 12_000_000
PATIENCE = 180.0  # seconds that a command may take on a busy machine
_PR_SET_CHILD_SUBREAPER = 36


def load_commands() -> None:
    """Import what commands import late, and let orphans of killed commands become children of this process."""
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"{commands.__name__}.{module.name}")
    for name in (
        "requests",
        "zstandard",
        "deflate",
        "ekiben.inspect.sbom",
        "ekiben.signing.gpg",
        "ekiben.publish.publish",
    ):
        importlib.import_module(name)
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@dataclass
class Running:
    """A command that was started. ``log`` takes its stdout and stderr."""

    pid: int
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, of a signal as a negative number; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end. One that hangs is killed, and counts as -99."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -99
            else:
                time.sleep(0.002)
        assert self.code is not None
        return self.code

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Lab:
    """One folder of a campaign. ``dice`` decides everything that is random in it."""

    folder: Path
    dice: random.Random
    name: str = RECIPE["name"]
    _count: int = 0

    def path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @cached_property
    def recipes(self) -> list[SampleRecipe]:
        """One recipe in several versions, which differ in one layer."""
        recipes = []
        for number in range(VERSIONS):
            recipe = SampleRecipe(self.path(f"recipes/{number}/own"))
            recipe.recipe(tasks={}, test="")
            recipe.stack(arguments={})
            recipe.write("images/ground.def", GROUND)
            recipe.write("images/roof.def", ROOF)
            recipe.write("files/data.bin", "")
            data = random.Random(number).randbytes(LAYER_BYTES)
            (recipe.path / "files/data.bin").write_bytes(data)
            recipes.append(recipe)
        return recipes

    @cached_property
    def edits(self) -> list[SampleRecipe]:
        """Version 0 of the recipe with other files in its last layer."""
        edits = []
        for number in range(EDITS):
            recipe = SampleRecipe(self.copy(self.recipes[0].path, f"recipes/edit{number}/own"))
            recipe.recipe(tasks={}, test="", data=["data.bin"])
            (recipe.path / "data.bin").write_bytes(random.Random(100 + number).randbytes(EDIT_BYTES))
            edits.append(recipe)
        return edits

    @cached_property
    def store(self) -> Path:
        """A store with the base alone: each case has a copy."""
        return seeded(self.recipes[0], self.path("seed/store"), "ground").root

    @cached_property
    def expected(self) -> list[str]:
        """The SHA-256 of each version's SIF, and then of each edit's, built where nothing disturbs."""
        store, digests = Store(self.copy(self.store, "reference/store")), []
        for recipe in [*self.recipes, *self.edits]:
            make_sif(image_of(recipe, store), store, self.path("reference/x.sif"), squash=False)
            digests.append(digest(self.path("reference/x.sif")))
        self.path("reference/x.sif").unlink()
        return digests

    @cached_property
    def shared(self) -> Path:
        """A shared folder with version 0 in it."""
        store, shared = Store(self.copy(self.store, "reference/publisher")), self.path("seed/lab")
        publish(image_of(self.recipes[0], store), store, shared, PublishOptions(check=False), quiet())
        return shared

    def copy(self, source: Path, name: str) -> Path:
        """Return a copy below this folder instead of an earlier one."""
        target = self.path(name)
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(source, target, symlinks=True))

    @contextlib.contextmanager
    def case(self) -> Iterator[Case]:
        """An own store, shared folder and output for one fault."""
        self._count += 1
        folder = self.path(f"cases/{self._count}")
        for name in ("out", "tmp", "logs", "home"):
            (folder / name).mkdir(parents=True)
        yield Case(
            self,
            folder,
            self.copy(self.store, f"cases/{self._count}/store"),
            self.copy(self.shared, f"cases/{self._count}/lab"),
        )
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Case:
    lab: Lab
    folder: Path
    store: Path
    shared: Path
    problems: list[str] = field(default_factory=list)
    _runs: int = 0

    @property
    def out(self) -> Path:
        return self.folder / "out" / "own.sif"

    def build(self, version: int) -> list[str]:
        """The arguments that build a version and export it."""
        return ["--store", str(self.store), "image", str(self.lab.recipes[version].path), *AS_SIF, "-o", str(self.out)]

    def edit(self, number: int) -> list[str]:
        """The arguments that build an edit, and rewrite its layer in the output."""
        recipe = str(self.lab.edits[number].path)
        return ["--store", str(self.store), "image", recipe, *AS_SIF, "-o", str(self.out), "--in-place"]

    def publish(self, version: int, *more: str) -> list[str]:
        recipe = str(self.lab.recipes[version].path)
        return ["--store", str(self.store), "publish", recipe, "--to", str(self.shared), "--no-verify", *more]

    def start(self, argv: Sequence[str], before: Callable[[], None] = lambda: None) -> Running:
        """Start a command in a fork; ``before`` runs in it first."""
        self._runs += 1
        log = self.folder / "logs" / str(self._runs)
        log.touch()
        sys.stdout.flush()
        signals = {signal.SIGINT, signal.SIGTERM}
        before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the command has its own streams
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before_fork)
            return Running(pid, log)
        code = 70
        try:
            os.setsid()
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for stream in (1, 2):
                os.dup2(handle, stream)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(
                {
                    "TMPDIR": str(self.folder / "tmp"),
                    "HOME": str(self.folder / "home"),
                    "EKIBEN_SHARED": "",
                    "NO_COLOR": "1",
                }
            )
            os.chdir(self.folder / "out")
            signal.pthread_sigmask(signal.SIG_SETMASK, before_fork)
            before()
            sys.argv = ["ekiben", *(str(word) for word in argv)]
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
            os._exit(code)

    def run(self, argv: Sequence[str], *, good: Sequence[int] = (0,)) -> Running:
        """Run a command to its end; another exit code or a traceback is a problem."""
        running = self.start(argv)
        code = running.wait()
        if code not in good or "Traceback" in running.output:
            self.problem(f"`{' '.join(argv[2:4])}` ended with {code}: {running.output.strip()[-600:]}")
        return running

    def reset_store(self) -> None:
        """Have the base alone in the store, and no output."""
        self.lab.copy(self.lab.store, str(self.store.relative_to(self.lab.folder)))
        self.out.unlink(missing_ok=True)

    def reset_shared(self) -> None:
        """Have version 0 alone in the shared folder."""
        self.lab.copy(self.lab.shared, str(self.shared.relative_to(self.lab.folder)))

    def put_base(self) -> None:
        """Put back what was made by hand, where mmdebstrap would make another."""
        shutil.copytree(self.lab.store, self.store, dirs_exist_ok=True)

    def problem(self, text: str) -> None:
        self.problems.append(text.replace(str(self.folder), "…"))

    # -- what has to hold

    def check_quiet(self) -> None:
        """No process that a command started is left. Those that are about to end have a moment."""
        end = time.monotonic() + 5
        while (left := children()) and time.monotonic() < end:
            time.sleep(0.01)
        for pid, name in left.items():
            self.problem(f"a process is left: {name}")
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def check_complete(self, *, versions: Sequence[int]) -> None:
        """Whatever is there is whole: the output, blobs, records of the store, versions in the shared folder."""
        if self.out.exists() and digest(self.out) not in [self.lab.expected[version] for version in versions]:
            self.problem(f"{self.out.name} is none of the versions that were built")
        for top in (self.store, self.shared / "store"):
            for blob in (top / "blobs/sha256").glob("*"):
                with contextlib.suppress(FileNotFoundError):  # a running prune was here
                    if digest(blob) != blob.name:
                        self.problem(f"blob {blob.name[:12]} has other bytes")
            for record in (*top.glob("keys/*"), *top.glob("refs/*"), *top.glob("last/*")):
                try:
                    json.loads(record.read_bytes())
                except FileNotFoundError:
                    continue
                except ValueError:
                    self.problem(f"{record.parent.name}/{record.name} is cut short")
        images = self.shared / "images/own"
        records, skipped = read_records(InnerPath.below(images))
        for name, reason in skipped:
            self.problem(f"{name} {reason}")
        for one in records:
            try:
                if digest(images / one.file) != one.sha256:
                    self.problem(f"{one.file} has other bytes than its record says")
            except FileNotFoundError:
                if (images / f"{one.stem}.json").exists():  # a prune removes the record first
                    self.problem(f"{one.file} is gone, and its record is there")
        if not (images / "current").exists():
            self.problem("current points nowhere")

    def check_tidy(self) -> None:
        """Nothing temporary is left once a command succeeded and the next one began to write."""
        for store in (Store(self.store), SharedStore(self.shared)):
            store.open_for_writing()
        folders = {
            "staging": self.store / "staging",
            "shared staging": self.shared / "store/staging",
            "TMPDIR": self.folder / "tmp",
        }
        left = [f"{name}: {path.name}" for name, folder in folders.items() for path in folder.iterdir()]
        left += [f"beside the output: {path.name}" for path in self.out.parent.iterdir() if path != self.out]
        for item in left:
            self.problem(f"left over: {item}")

    def check_output(self, version: int) -> None:
        if not self.out.exists():
            self.problem("there is no output")
        elif digest(self.out) != self.lab.expected[version]:
            self.problem("the output has other bytes than an undisturbed build gives")


def digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def children() -> dict[int, str]:
    """The live children of this process, which orphans become, too: number → command line. Zombies are collected."""
    alive = {}
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                os.waitpid(int(pid), os.WNOHANG)
            else:
                alive[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return {pid: name for pid, name in alive.items() if pid not in KEPT}


KEPT: set[int] = set()  # processes of the campaign itself: the registry, a proxy
