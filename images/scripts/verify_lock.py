"""Is what is installed what the lock file says? Versions, and every file's size as RECORD has it: check.py LOCK…"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")


def find_problems(lock: Path) -> list[str]:
    pins = [match.groups() for line in lock.read_text().splitlines() if (match := PIN.match(line))]
    if not pins:
        return [f"{lock}: no name==version line in it"]
    return [problem for name, version in pins for problem in _package_problems(name, version)]


def _package_problems(name: str, version: str) -> list[str]:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return [f"{name} {version} is not installed"]
    if found.version != version:
        return [f"{name} is {found.version}, the lock says {version}"]
    return _file_problems(name, found)


def _file_problems(name: str, found: Distribution) -> list[str]:
    problems = []
    for file in found.files or []:
        path = Path(str(file.locate()))
        if not path.is_file():
            problems.append(f"{name}: {path} is missing")
        elif file.size is not None and path.stat().st_size != file.size:
            problems.append(f"{name}: {path} has {path.stat().st_size} bytes, RECORD says {file.size}")
    return problems


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: check.py LOCK…   (requirements with hashes)", file=sys.stderr)
        return 2
    problems = [problem for lock in arguments for problem in find_problems(Path(lock))]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
