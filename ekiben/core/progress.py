"""Progress on stderr: live bars and spinners on a terminal, plain lines elsewhere. Results go to stdout, not here."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TextIO

from ekiben.core.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Display

Style = Literal["auto", "plain"]
_SHOWN = 6  # lines of a script's output below its step


class Progress:
    """``step`` wraps a piece of work; ``log`` prints a line that stays; ``note`` shows the step's newest detail, and
    ``output`` a line that a script printed.

    ``style``: "plain" prints all that scripts print, also on a terminal; "auto" shows the last lines there, and none
    elsewhere.
    """

    def __init__(self, stream: TextIO = sys.stderr, *, quiet: bool = False, style: Style = "auto") -> None:
        self._stream, self._quiet, self._is_plain = stream, quiet, style == "plain"
        self._live = stream.isatty() and not quiet and not self._is_plain and os.environ.get("TERM") != "dumb"
        self._display: Display | None = None  # the step is its only task
        self._title, self._noted = "", 0.0
        self._shown: deque[str] = deque(maxlen=_SHOWN)

    @property
    def is_live(self) -> bool:
        """Return whether a step is shown live, on a terminal."""
        return self._live

    def log(self, line: str) -> None:
        """Print a line above the live display."""
        line = printable(line)
        if self._display is not None:
            self._display.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)

    def mark(self, line: str) -> None:
        """Print a line about a long step, where no live display is shown."""
        if not self._live:
            self.log(f"{self._title}: {line}")

    def note(self, detail: str) -> None:
        """Show a detail of the step on a live display."""
        now = time.monotonic()
        if self._display is not None and now - self._noted > 0.1:
            self._noted = now
            self._display.update(self._display.task_ids[0], detail=printable(detail.strip())[:100])

    def output(self, line: str) -> None:
        """Show a line that a script of the step printed."""
        if self._is_plain:
            self.log(f"  {line}")
        elif self._display is not None and line.strip():
            self._shown.append(printable(line.rstrip()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to the block."""
        display = self._display
        if display is None:
            yield
            return
        display.stop()
        try:
            yield
        finally:
            display.start()

    def count(self, size: int) -> None:
        """Advance the step's bar by ``size`` bytes."""
        if self._display is not None:
            self._display.advance(self._display.task_ids[0], size)

    @contextlib.contextmanager
    def step(self, title: str, *, total: int = 0) -> Iterator[None]:
        """Show a step while the block runs, and then its duration. ``total``: bytes that count() will report."""
        self._title, began = title, time.monotonic()
        if not self._live:
            self.log(f"{title} …")
            yield
        else:
            with self._new_display(has_total=bool(total)) as self._display:
                self._display.add_task(title, total=total or None, detail="")
                try:
                    yield
                finally:
                    self._display = None
                    self._shown.clear()
        self.log(f"{title}: {time.monotonic() - began:.1f} s")

    def _new_display(self, *, has_total: bool) -> Display:
        from rich import progress  # imported here: slow to import, and needed on a terminal only
        from rich.console import Console, Group
        from rich.text import Text

        title = progress.TextColumn("{task.description}", markup=False)
        detail = progress.TextColumn("{task.fields[detail]}", style="dim", markup=False)
        columns: list[progress.ProgressColumn] = [progress.SpinnerColumn(), title, progress.TimeElapsedColumn(), detail]
        if has_total:
            columns = [
                title,
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                detail,
            ]
        shown = self._shown

        class WithOutput(progress.Progress):
            """The bar, and below it the last lines of output of the step."""

            def get_renderable(self) -> RenderableType:
                lines = [Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in [*shown]]
                return Group(super().get_renderable(), *lines)

        return WithOutput(*columns, console=Console(file=self._stream), transient=True)
