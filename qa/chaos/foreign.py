"""What comes from elsewhere: registries, bundles and recipes that were made to harm whoever uses them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.lab import KEPT, Case, Lab
from ekiben.registry import session
from support import hostile_registry
from support.hostile_bundles import HARMLESS, hostile_bundles
from support.hostile_recipes import SECRET, hostile_recipe
from support.registries import Answer, bad_registry, login
from support.sample_recipe import AS_SIF

GOOD = tuple(range(2, 12))  # exit codes of Ekiben's own errors: core/errors.py
SLOW = 30.0  # seconds that a refusal may take on a busy machine
_IN_OPEN = 0x20  # inotify(7)
_turn: dict[str, int] = {}


def _next(kind: str, names: list[str], dice: random.Random) -> str:
    """Take each of ``names`` in turn, beginning with a random one, so that a campaign leaves none out."""
    _turn[kind] = _turn.get(kind, dice.randrange(len(names))) + 1
    return names[_turn[kind] % len(names)]


def _check_refused(
    case: Case, what: str, argv: list[str], before: Callable[[], None], good: tuple[int, ...] = GOOD
) -> str:
    """Run a command that has to end soon with a sentence; return its output."""
    began = time.monotonic()
    running = case.start(argv, before)
    code, output = running.wait(60), running.output
    if code not in good or "Traceback" in output:
        case.problem(f"{what}: {' '.join(argv[2:4])} ended with {code}: {output[-600:]}")
    if time.monotonic() - began > SLOW:
        case.problem(f"{what}: it took {time.monotonic() - began:.0f} s")
    if control := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", output):
        case.problem(f"{what}: {control[0]!r} reaches the terminal")
    case.check_quiet()
    return output


# ----------------------------------------------------------------------------------------------------------- registries


def registry_mode(lab: Lab) -> list[str]:
    """A registry that lies about sizes, redirects, or sends garbage: pull and push end soon, no secret is sent, no file
    stays.
    """
    dice = lab.dice
    mode = _next("registry", sorted(hostile_registry.modes("")), dice)
    action = "push" if dice.random() < 0.25 else "pull"
    with lab.case() as case, _registries(mode) as (host, stolen):
        token = hostile_registry.REFRESH if dice.random() < 0.5 else ""
        login(case.folder / "home", host, identity_token=token)
        netrc = case.folder / "home/.netrc"
        netrc.write_text(f"machine 127.0.0.1 login u password {hostile_registry.NETRC}\n")
        netrc.chmod(0o600)
        target = f"{host}/lab/x:1"
        argv = (
            ["pull", target, "-o", str(case.out)]
            if action == "pull"
            else ["push", str(lab.recipes[0].path), target, "--format", "sif"]
        )
        output = _check_refused(case, mode, ["--store", str(case.store), *argv], _impatient)
        if hostile_registry.secrets_in([("", output, {})]):
            case.problem(f"{mode}: a secret is printed")
        if leaked := hostile_registry.secrets_in(stolen()):
            case.problem(f"{mode}: {', '.join(leaked)} went to another host")
        case.check_tidy()
        if case.out.exists():
            case.problem(f"{mode}: there is an output")
        return case.problems


def _impatient() -> None:
    session.TIMEOUT, session.PAUSES = (2, 1), (0.01, 0.01, 0.01, 0.01)


Requests = list[tuple[str, str, dict[str, str]]]


@contextlib.contextmanager
def _registries(mode: str) -> Iterator[tuple[str, Callable[[], Requests]]]:
    """A registry of this mode in a process of its own, as threads and forks do not mix: its host, and what another host
    was asked.
    """
    hosts, queries, answers = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with bad_registry(lambda method, path, headers: Answer(200, b'{"token": "theirs"}')) as (other, stolen):
                reply, _ = hostile_registry.modes(other)[mode]
                with bad_registry(lambda method, path, headers: reply(path, headers)) as (host, _):
                    os.write(hosts[1], host.encode())
                    os.read(queries[0], 1)
                    os.write(answers[1], json.dumps(stolen).encode())
        finally:
            os._exit(0)
    KEPT.add(pid)

    def requests() -> Requests:
        os.write(queries[1], b"?")
        return [(method, path, headers) for method, path, headers in json.loads(os.read(answers[0], 1 << 16) or b"[]")]

    try:
        yield os.read(hosts[0], 100).decode(), requests
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        KEPT.discard(pid)
        for handle in (*hosts, *queries, *answers):
            os.close(handle)


# -------------------------------------------------------------------------------------------------------------- bundles


def hostile_bundle(lab: Lab) -> list[str]:
    """A bundle that nobody's command wrote: refused, nothing is written outside of its folder, and nothing is left."""
    with lab.case() as case:
        canary = case.folder / "outside/canary"
        canary.parent.mkdir()
        made = hostile_bundles(canary)
        variant = _next("bundle", sorted(made), lab.dice)
        file = case.folder / "hostile.bundle"
        file.write_bytes(made[variant]())
        argv = [
            "--store",
            str(case.store),
            "image",
            str(lab.recipes[0].path),
            "--bundle",
            str(file),
            *AS_SIF,
            "-o",
            str(case.out),
        ]
        _check_refused(case, variant, argv, lambda: None, good=(0, *GOOD) if variant in HARMLESS else GOOD)
        if variant in HARMLESS:
            case.out.unlink(missing_ok=True)
            shutil.rmtree(case.out.with_name("own-data"), ignore_errors=True)
        if list(canary.parent.iterdir()):
            case.problem(f"{variant}: something was written outside")
        if left := [path.name for path in Path(f"{case.store.parent}/cache-root").glob("bundle-*")]:
            case.problem(f"{variant}: left over: {left}")
        case.check_tidy()
        return case.problems


# -------------------------------------------------------------------------------------------------------------- recipes


def foreign_recipe(lab: Lab) -> list[str]:
    """A recipe from elsewhere: no command that only reads it runs its code, or opens a file outside of its folder."""
    with lab.case() as case:
        canary = case.folder / "canary"
        sample, outside = hostile_recipe(case.folder / "recipe", canary, lab.dice)
        recipe, store = str(sample.path), ["--store", str(case.store)]
        target = case.folder / "new"
        commands = {
            "plan": ["plan", recipe],
            "inspect": ["inspect", recipe],
            "list": ["list"],
            "doctor": ["doctor", recipe],
            "lock": ["lock", recipe],
            "render": ["render", recipe, "--to", lab.dice.choice(["dockerfile", "def", "compose"]), "-o", str(target)],
            "init": ["init", str(target / "init"), "--from", lab.dice.choice([recipe, "roof", "../own/images/roof"])],
        }

        def inside() -> None:
            os.chdir(sample.path.parent)
            os.environ.update(UV_OFFLINE="1")

        for name in ("plan", "inspect", "list", "doctor", lab.dice.choice(["lock", "render", "init"])):
            with _watch(outside) as was_read:
                output = _check_refused(case, f"recipe, {name}", [*store, *commands[name]], inside, good=(0, *GOOD))
            if outside and was_read():
                case.problem(f"{name}: {outside.name} outside of the recipe was opened")
            if SECRET in output:
                case.problem(f"{name}: prints what is outside of the recipe")
            if canary.exists():
                case.problem(f"{name}: runs code of the recipe")
                canary.unlink()
        return case.problems


@contextlib.contextmanager
def _watch(path: Path | None) -> Iterator[Callable[[], bool]]:
    """Watch a file, or the files of a folder: whether one was opened, which looking at it does not do."""
    libc, last = ctypes.CDLL(None, use_errno=True), False
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    files = [] if path is None else [path, *path.rglob("*")] if path.is_dir() else [path]
    for file in (file for file in files if file.is_file()):
        libc.inotify_add_watch(handle, os.fsencode(file), _IN_OPEN)

    def was_read() -> bool:
        return last

    try:
        yield was_read
    finally:
        with contextlib.suppress(BlockingIOError):
            last = bool(os.read(handle, 4096))
        os.close(handle)


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    "registry mode": registry_mode,
    "hostile bundle": hostile_bundle,
    "foreign recipe": foreign_recipe,
}
