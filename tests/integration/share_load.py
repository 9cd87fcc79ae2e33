"""Many at work in one published folder, killed at random: share_load.py FOLDER SECONDS, with PYTHONPATH=.:tests

Writers publish (some pin what they published, some prune), as two users of one group; readers, users of none, hash
whatever they see. Each says what it did in a file of its own, line by line. The last line printed is the sum, as JSON.
"""

from __future__ import annotations

import grp
import hashlib
import io
import json
import os
import pwd
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.files import open_regular
from ekiben.core.inner_path import InnerPath
from ekiben.core.progress import Progress
from ekiben.images.published import read_records
from ekiben.publish.prune import prune
from ekiben.publish.publish import PublishOptions, publish
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store
from ekiben.store.shared import open_shared
from support.sample_recipe import GROUND, SampleRecipe, seeded

LAB = "ekiben-lab"
USERS = ("builder", "colleague")
IMAGES = 8
ROOF = "Bootstrap: localimage\nFrom: ground.sif\n\n%files\n    files/data.bin /opt/data\n"


def prepare(folder: Path) -> tuple[list[Image], Store]:
    """Images on one base; each has 1 MB of its own."""
    sample = SampleRecipe(folder / "own")
    sample.recipe(tasks={}, test="")
    sample.stack(arguments={})
    sample.write("images/ground.def", GROUND)
    sample.write("images/roof.def", ROOF)
    sample.write("files/data.bin", "")
    store = seeded(sample, folder / "store", "ground")
    store.root.chmod(0o755)  # the writers are other users
    images = []
    for number in range(IMAGES):
        (sample.path / "files/data.bin").write_bytes(random.Random(number).randbytes(1_000_000))
        images.append(
            build(
                BuildContext(
                    resolve(find_recipe(str(sample.path))), store, Options(), Progress(io.StringIO(), quiet=True)
                )
            )
        )
    return images, store


def writer(number: int, say: Callable[[str], None], shared_dir: Path, images: list[Image], store: Store) -> None:
    dice, quiet = random.Random(), Progress(io.StringIO(), quiet=True)
    while True:
        if number % 4 == 0 and dice.random() < 0.6:
            prune(shared_dir, names=["own"] if dice.random() < 0.5 else [], unused_for=0, grace=1)
            say("pruned")
            continue
        # A few versions are pinned and are to be there at the end; the others come and go.
        which, pinned = dice.randrange(len(images)), dice.random() < 0.2
        version = f"keep{which}" if pinned else f"go{dice.randrange(4)}"
        done = publish(
            images[which], store, shared_dir, PublishOptions(version=version, pin=pinned, check=False), quiet
        )
        say(f"{'pinned' if pinned else 'published'} {done.sif.name}")


def reader(number: int, say: Callable[[str], None], shared_dir: Path, images: list[Image], store: Store) -> None:
    dice, folder = random.Random(), shared_dir / "images" / "own"
    while True:
        time.sleep(dice.random() / 10)  # 64 that do nothing else leave the writers no processor
        if number % 4:
            path = dice.choice([*folder.glob("own-*.sif"), folder / "current"])
            try:
                with path.open("rb") as stream:
                    name = Path(f"/proc/self/fd/{stream.fileno()}").readlink().name
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
            except FileNotFoundError:
                # Pruned since it was listed. Where `current` came to lead to it meanwhile, it is put back at once.
                assert path.name != "current" or comes_back(path), "current points nowhere"
                continue
            name = name.removesuffix(" (deleted)").rpartition("__")[2]  # or in trash/ by now
            assert name.removesuffix(".sif").endswith(found[:12]), f"{name} has the digest {found}"
            say(f"read {path.name}")
        else:
            shared = open_shared(shared_dir)
            for layer in dice.choice(images).layers:
                found_layer = shared.layer(layer.cache_key)
                if found_layer is not None:
                    assert found_layer.digest == layer.digest
                    part = shared.partition(layer)
                    try:
                        with open_regular(part.path) as stream:
                            stream.seek(part.offset)
                            data = stream.read(part.size)
                    except FileNotFoundError:
                        continue
                    assert "sha256:" + hashlib.sha256(data).hexdigest() == layer.digest
            for record in read_records(InnerPath.below(folder))[0]:
                assert record.layers
            say("looked")


def comes_back(path: Path) -> bool:
    end = time.monotonic() + 5
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def start(
    role: Callable[..., None], number: int, folder: Path, shared_dir: Path, images: list[Image], store: Store
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder / "logs" / f"{role.__name__}-{number}").open("a", buffering=1) as out:
            group, user = grp.getgrnam(LAB).gr_gid, pwd.getpwnam(USERS[number % 2])
            os.setgroups([group] if role is writer else [])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.umask((0o022, 0o077)[number // 2 % 2])
            role(number, lambda line: print(line, file=out), shared_dir, images, store)
    except BaseException:
        (folder / "failed" / f"{role.__name__}-{number}-{os.getpid()}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def main(folder: Path, seconds: float, writers: int, readers: int) -> dict[str, object]:
    images, store = prepare(folder)
    shared_dir = folder / "lab"
    shared_dir.mkdir()
    os.chown(shared_dir, -1, grp.getgrnam(LAB).gr_gid)
    shared_dir.chmod(0o2775)
    for name in ("logs", "failed"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    quiet = Progress(io.StringIO(), quiet=True)
    publish(images[0], store, shared_dir, PublishOptions(version="keep0", pin=True, check=False), quiet)
    roles = [(writer, number) for number in range(writers)] + [(reader, number) for number in range(readers)]
    running = {start(role, number, folder, shared_dir, images, store): (role, number) for role, number in roles}
    end, kills = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        time.sleep(0.05)
        victim = random.choice(list(running))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        role, number = running.pop(victim)
        running[start(role, number, folder, shared_dir, images, store)] = (role, number)
        kills += 1
    for child in running:
        os.kill(child, signal.SIGKILL)
    for child in running:
        os.waitpid(child, 0)
    return {"kills": kills, **count(folder), **look(shared_dir, folder)}


def count(folder: Path) -> dict[str, object]:
    lines = [line for path in (folder / "logs").iterdir() for line in path.read_text().splitlines()]
    events = [line.split()[0] for line in lines]
    return {word: events.count(word) for word in ("published", "pinned", "pruned", "read", "looked")}


def look(shared_dir: Path, folder: Path) -> dict[str, object]:
    """What is there when all is quiet: every version whole, every pinned one, nothing lost after the next publisher
    came.
    """
    lines = [line for path in (folder / "logs").iterdir() for line in path.read_text().splitlines()]
    pinned = {line.split()[1] for line in lines if line.startswith("pinned ") and line.endswith(".sif")}
    images = shared_dir / "images/own"
    there = {record.file: record for record in read_records(InnerPath.below(images))[0]}
    shared = open_shared(shared_dir)
    damaged = [
        path.name
        for path in images.glob("own-*.sif")
        if not path.stem.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:12])
    ]
    damaged += [
        path.name
        for path in (shared_dir / "store/blobs/sha256").iterdir()
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name
    ]
    without = [
        name
        for name, record in there.items()
        if name in pinned and not all(shared.layer(layer.cache_key) for layer in record.layers)
    ]
    open_modes = sorted(
        {
            oct(path.lstat().st_mode & 0o7777)
            for path in shared_dir.rglob("*")
            if path.is_file()
            and not path.name.startswith(".")
            and not path.is_symlink()
            and "staging" not in path.parts
        }
    )
    return {
        "versions": len(there),
        "lost": sorted(pinned - set(there)),
        "damaged": damaged,
        "without layers": without,
        "modes": open_modes,
        "current": str((images / "current").readlink()) in there,
        "failed": [path.read_text() for path in sorted((folder / "failed").iterdir())],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]), writers=16, readers=64), indent=1))
