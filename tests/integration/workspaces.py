"""What the tests with real engines share: a workspace that two users reach, the command line, engines, recipes."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ekiben import executors

ROOT = Path(__file__).resolve().parents[2]
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
USER = "builder"  # an ordinary user with subordinate ids; tests/services.sh makes it
ME = getpass.getuser()


def need(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which plays an ordinary user, too")
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (tests/services.sh install)")


@dataclass(frozen=True)
class Workspace:
    """A folder that root and the ordinary user share: ``checkout`` to read, ``stores/<user>/<name>`` to write.

    The caches of downloads lie beside the stores, so each package is fetched once for each user.
    """

    path: Path
    checkout: Path
    made: list[Path] = field(default_factory=list)

    def store(self, user: str, name: str) -> Path:
        return self.path / "stores" / user / name

    def folder(self, name: str, user: str = ME) -> Path:
        """An empty folder of the user's own."""
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.path))
        made.chmod(0o755)
        give(made, user)
        self.made.append(made)
        return made


@dataclass(frozen=True)
class Cli:
    """build.py as a user starts it."""

    workspace: Workspace
    user: str = ME
    checkout: Path = field(default=Path())

    def argv(self, *args: str | Path) -> list[str]:
        checkout = self.checkout if self.checkout.is_absolute() else self.workspace.checkout
        return [str(checkout / ".venv/bin/python"), str(checkout / "build.py"), *map(str, args)]

    def settings(self, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        account = {"HOME": home_of(self.user), "USER": self.user, "LOGNAME": self.user, "NO_COLOR": "1"}
        caches = {} if self.user == ME else dict.fromkeys(("UV_CACHE_DIR", "PIP_CACHE_DIR"))  # these are root's
        merged: dict[str, str | None] = {**os.environ, "XDG_RUNTIME_DIR": None, **caches, **account, **(extra or {})}
        return {name: value for name, value in merged.items() if value is not None}

    def start(
        self, *args: str | Path, cwd: Path, env: Mapping[str, str | None] | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """In a process group of its own, as a terminal's foreground job is."""
        return subprocess.Popen(
            [*prefix, *self.argv(*args)],
            cwd=cwd,
            env=self.settings(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            **as_user(self.user),
        )

    def run(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        code: int | None = 0,
        prefix: Sequence[str] = (),
        timeout: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        with self.start(*args, cwd=cwd or self.workspace.path, env=env, prefix=prefix) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if code is not None:
            assert process.returncode == code, f"{' '.join(self.argv(*args))}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def image(self, store: Path, recipe: str | Path, *args: str | Path, **options: Any) -> dict[str, Any]:
        """build.py build with --json: the result."""
        out = self.run("--store", store, "image", recipe, "--json", *args, **options).stdout
        result = json.loads(out)
        assert isinstance(result, dict)
        return result


def home_of(user: str) -> str:
    return pwd.getpwnam(user).pw_dir


def give(path: Path, user: str) -> None:
    os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)


def path_without(folder: Path, *programs: str) -> str:
    """A PATH with links in ``folder`` to all programs that are on PATH, but these."""
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).glob("*"):
            if program.name not in programs:
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def as_user(user: str) -> dict[str, Any]:
    return {} if user == ME else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def copy_files(to: Path) -> None:
    """What a clone would hold, with what is not committed yet."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def copy_checkout(to: Path) -> Path:
    """The same with the virtual environment."""
    copy_files(to)
    shutil.copytree(Path(sys.prefix), to / ".venv", symlinks=True)
    return to


NewStore = Callable[..., Path]


def share_layers(source: Path, store: Path, layers: Sequence[str], user: str) -> None:
    for folder in ("blobs/sha256", "keys"):
        (store / folder).mkdir(parents=True)
    found = set()
    for key in (source / "keys").iterdir():
        record = json.loads(key.read_text())
        if record["name"] in layers:
            found.add(record["name"])
            shutil.copy(key, store / "keys")
            blob = f"blobs/sha256/{record['digest'][7:]}"
            os.link(source / blob, store / blob)
    assert found == set(layers)
    for path in (store, store / "blobs", store / "blobs/sha256", store / "keys"):
        give(path, user)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock against the other processes of a run."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class BuiltImage:
    """lora-opencalm as `make image` leaves it in a checkout, and what that printed."""

    checkout: Path
    store: Path
    stdout_file: Path

    @property
    def sif(self) -> Path:
        return self.checkout / "lora-opencalm.sif"

    @property
    def stdout(self) -> str:
        return self.stdout_file.read_text()

    def cli(self, workspace: Workspace) -> Cli:
        return Cli(workspace, ME, self.checkout)


def make_image(image: BuiltImage, recipe: str = "lora-opencalm") -> subprocess.CompletedProcess[str]:
    """Run `make image` of ``recipe`` in the checkout of ``image``."""
    # Not the variables of the make that runs the tests.
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS")) and name != "options"
    }
    environment = {**settings, "EKIBEN_STORE": str(image.store)}
    command = ["make", "image", f"recipe={recipe}"]
    return subprocess.run(command, cwd=image.checkout, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Engine:
    """An engine as one kind of user meets it."""

    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name}-{'root' if self.user == ME else 'rootless'}"


# Every executor as both; Docker's daemon answers root here.
ENGINES = tuple(
    Engine(name, user) for name in executors.names() for user in (ME, USER) if (name, user) != ("docker", USER)
)


@dataclass(frozen=True)
class RecipeFolder:
    """A recipe outside the repository, with layers of its own."""

    path: Path

    def layer(self, name: str, parent: str, post: str, more: str = "") -> None:
        body = "".join(f"    {line}\n" if line else "\n" for line in post.strip("\n").split("\n"))
        text = f"Bootstrap: localimage\nFrom: {parent}.sif\n\n%post\n{body}{more}"
        (self.path / "images" / f"{name}.def").write_text(text)

    def top(self, layer: str, test: str = "true") -> None:
        about = {
            "name": self.path.name,
            "description": "a test",
            "stack": "cu130",
            "layer": layer,
            "tasks": {},
            "test": test,
        }
        (self.path / "recipe.yaml").write_text(json.dumps(about))


def end_of(user: str, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code of a user's command, and what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": home_of(user), **(env or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, **as_user(user)
    )
    return done.returncode, done.stdout + done.stderr


def run_as(user: str, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    code, output = end_of(user, *command, cwd=cwd, env=env)
    assert code == 0, f"{command}\n{output}"
    return output
