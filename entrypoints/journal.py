"""Answers as they come: whole lines in one file per process, put in order at the end. A killed run loses one batch at most."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings import TaskError


class Journal:
    """``done``: index → line of what an earlier start of the same run has answered, whatever its number of processes."""

    def __init__(self, output: Path, fingerprint: str, rank: int, *, fresh: bool) -> None:
        """Errors: TaskError for a finished output, or one begun by another run; with ``fresh`` both are written anew."""
        self.output, self.fingerprint = output, fingerprint
        self.mine = output.with_name(f".{output.name}.part-{rank}")
        self.done: dict[int, dict[str, Any]] = {}
        if fresh:
            for part in self._parts() if rank == 0 else ():
                part.unlink()
            return
        if output.exists() and not self._parts():
            raise TaskError(f"{output}: is there already; give another --output, or write it anew with --fresh")
        for part in self._parts():
            header, *lines = _whole_lines(part) or [{"run": fingerprint}]
            if header["run"] != fingerprint:
                raise TaskError(
                    f"{output}: was begun with other settings or data; give another --output, or start again with --fresh"
                )
            self.done |= {line["index"]: line for line in lines}

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Errors: TaskError where the disk is full: what is whole stays."""
        try:
            with self.mine.open("a+b") as out:
                out.seek(0)
                whole = out.read().rfind(b"\n") + 1
                out.truncate(whole)  # what a killed run cut short
                out.writelines(_encode(line) for line in ([] if whole else [{"run": self.fingerprint}]))
                out.writelines(_encode(line) for line in lines)
        except OSError as error:
            raise TaskError(
                f"{self.output}: cannot be written: {error.strerror}; what was answered before is kept, and the same "
                "command goes on from there"
            ) from None

    def finish(self) -> int:
        """All parts as one file, in the order of the data; the number of lines. Errors: TaskError."""
        lines = {line["index"]: line for part in self._parts() for line in _whole_lines(part)[1:]}
        staged = self.output.with_name(f".{self.output.name}.staged-{os.getpid()}")
        try:
            with staged.open("wb") as out:
                out.writelines(_encode(lines[index]) for index in sorted(lines))
            staged.replace(self.output)
        except OSError as error:
            raise TaskError(
                f"{self.output}: cannot be written: {error.strerror}; make room and start it again"
            ) from None
        finally:
            staged.unlink(missing_ok=True)
        for part in self._parts():
            part.unlink()
        return len(lines)

    def _parts(self) -> list[Path]:
        return sorted(self.output.parent.glob(f".{self.output.name}.part-*"))


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _whole_lines(part: Path) -> list[dict[str, Any]]:
    *whole, _ = part.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]
