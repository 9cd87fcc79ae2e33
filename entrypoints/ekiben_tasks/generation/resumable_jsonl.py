"""Write a JSONL file from several processes, each to a part of its own. A killed run loses one batch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError


class ResumableJsonlWriter:
    """Append lines to this process's part, and join the parts of all processes at the end.

    ``done``: index → line that an earlier start of the same run has written, whatever its number of processes.
    """

    def __init__(self, output: Path, fingerprint: str, rank: int, *, fresh: bool) -> None:
        """Read the parts of an earlier start, or remove them when ``fresh``.

        Raises:
            TaskError: the output is finished, was begun by another run, or is damaged.
        """
        self.output, self.fingerprint = output, fingerprint
        self.part = output.with_name(f".{output.name}.part-{rank}")
        self.done: dict[int, dict[str, Any]] = {}
        if fresh:
            for part in self._parts() if rank == 0 else ():
                part.unlink()
            return
        if output.exists() and not self._parts():
            raise TaskError(f"{output}: exists already; give another --output, or overwrite it with --overwrite")
        for part in self._parts():
            header, *lines = _complete_lines(part) or [{"run": fingerprint}]
            if header.get("run") != fingerprint:
                raise TaskError(
                    f"{output}: was begun with other settings or data; give another --output, or start again with"
                    " --overwrite"
                )
            self.done |= {line["index"]: line for line in lines}

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append ``lines``.

        Raises:
            TaskError: the disk is full; the complete lines stay.
        """
        try:
            with self.part.open("a+b") as out:
                out.seek(0)
                end = out.read().rfind(b"\n") + 1
                out.truncate(end)  # a killed run may have left half a line
                out.writelines(_encode(line) for line in ([] if end else [{"run": self.fingerprint}]))
                out.writelines(_encode(line) for line in lines)
        except OSError as error:
            raise TaskError(
                f"{self.output}: cannot be written: {error.strerror}; earlier answers are kept, and the same command "
                "continues after them"
            ) from None

    def finish(self) -> int:
        """Join all parts in the order of the data and return the number of lines.

        Raises:
            TaskError: the output cannot be written.
        """
        lines = {line["index"]: line for part in self._parts() for line in _complete_lines(part)[1:]}
        staged = self.output.with_name(f".{self.output.name}.staged-{os.getpid()}")
        try:
            with staged.open("wb") as out:
                out.writelines(_encode(lines[index]) for index in sorted(lines))
            staged.replace(self.output)
        except OSError as error:
            raise TaskError(f"{self.output}: cannot be written: {error.strerror}; free disk space and retry") from None
        finally:
            staged.unlink(missing_ok=True)
        for part in self._parts():
            part.unlink()
        return len(lines)

    def _parts(self) -> list[Path]:
        return sorted(self.output.parent.glob(f".{self.output.name}.part-*"))


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _complete_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines. Raises TaskError if it cannot be read, or a complete line is damaged."""
    advice = "start again with --overwrite"
    lines: list[dict[str, Any]] = []
    for number, content in input_files.read_lines(file, advice):
        if content.endswith(b"\n"):  # a killed run may have left half a line
            try:
                line = input_files.as_object(input_files.parse_json(input_files.decode(content)))
                if lines and not isinstance(line.get("index"), int):
                    raise ValueError("has no index")
            except ValueError as error:
                raise TaskError(f"{file}: line {number} {error}; {advice}") from None
            lines.append(line)
    return lines
