"""The rate below which a registry is not waited for."""

from __future__ import annotations

from collections.abc import Callable

from ekiben.core.files import format_size

# 1 kB/s over half a minute, which curl, too, takes for a speed limit's time: no line in use is slower, and 10 GB take 4
# months.
MINIMUM_BYTES = 30_000
WINDOW = 30.0  # seconds
LONGEST_WAIT = 10.0  # maximum seconds counted of one wait: an interruption of a minute does not make a connection slow
MAX_HEADERS = 1 << 20  # bytes, including interim responses (100 Continue)


class Pace:
    """Counts the bytes of one connection, and the seconds that were spent on waiting for them."""

    def __init__(self, on_slow: Callable[[str], None]) -> None:
        self._on_slow = on_slow
        self.begin()

    def begin(self, *, headers: bool = False) -> None:
        """Start a request or a body; or ``headers``, for whose first byte a server may need time."""
        self._headers, self._is_first = headers, headers
        self._total = 0
        self._start_window()

    def _start_window(self) -> None:
        self._bytes, self._counted, self._waited = 0, 0.0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count ``size`` bytes that took ``seconds``. Calls ``on_slow`` when a window ends with too few of them."""
        self._bytes += size
        self._total += size
        if self._headers and self._total > MAX_HEADERS:
            self._on_slow(f"sends headers of more than {format_size(MAX_HEADERS)}")
        if self._is_first:
            self._is_first = False
            return
        self._waited += seconds
        self._counted += min(seconds, LONGEST_WAIT)
        if self._counted < WINDOW:
            return
        if self._headers:
            self._on_slow(f"is too slow: its headers are not complete {self._waited:.0f} seconds after they began")
        if self._bytes < MINIMUM_BYTES:
            self._on_slow(
                f"is too slow: {format_size(self._bytes)} in {self._waited:.0f} seconds; at least"
                f" {format_size(MINIMUM_BYTES)} in {WINDOW:.0f} seconds, {format_size(MINIMUM_BYTES / WINDOW)}/s, are"
                " required"
            )
        self._start_window()
