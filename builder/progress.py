"""Says on stderr what is going on: one live line on a terminal, plain lines elsewhere. Results go to stdout, not here."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.status import Status


class Progress:
    """``step`` wraps a piece of work; ``tell`` is a line that stays; ``note`` the newest detail of the step."""

    def __init__(self, stream: TextIO = sys.stderr, *, quiet: bool = False) -> None:
        self._stream, self._quiet = stream, quiet
        self._live = stream.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._status: Status | None = None
        self._title, self._began, self._total, self._done, self._noted = "", 0.0, 0, 0, 0.0

    def tell(self, line: str) -> None:
        if not self._quiet:
            print(line, file=self._stream, flush=True)

    def mark(self, line: str) -> None:
        """Where nothing is live, a line about the step that takes long."""
        if not self._live:
            self.tell(f"{self._title}: {line}")

    def note(self, detail: str) -> None:
        now = time.monotonic()
        if self._status is not None and now - self._noted > 0.1:
            self._noted = now
            from rich.markup import escape

            self._status.update(
                f"{escape(self._title)} [dim]{now - self._began:.0f} s  {escape(detail.strip()[:100])}[/]"
            )

    def count(self, size: int) -> None:
        """Bytes of the step's ``total`` that are through."""
        self._done += size
        if self._total:
            self.note(f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB")

    @contextlib.contextmanager
    def step(self, title: str, *, total: int = 0) -> Iterator[None]:
        self._title, self._began, self._total, self._done = title, time.monotonic(), total, 0
        if not self._live:
            self.tell(f"{title} …")
            yield
        else:
            from rich.console import Console
            from rich.markup import escape

            with Console(file=self._stream).status(escape(title)) as self._status:
                try:
                    yield
                finally:
                    self._status = None
        self.tell(f"{title}: {time.monotonic() - self._began:.1f} s")
