"""A progress bar on a terminal; silent elsewhere."""
from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 28       # characters
_INTERVAL = 0.2   # s between two drawings


class Progress:
    """Redraws one line on a terminal; a context manager, which clears the line at the end."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr  # as it is now: it may have changed since the import
        self._began, self._drawn = time.monotonic(), 0.0
        self._shown = self._stream.isatty()

    def __call__(self, share: float) -> None:
        """Show that this share of the work is done, 0 to 1."""
        now = time.monotonic()
        if not self._shown or now - self._drawn < _INTERVAL:
            return
        self._drawn, share = now, min(1.0, max(0.0, share))
        elapsed = now - self._began
        left = f'{elapsed / share - elapsed:4.0f} s left' if share > 0.02 else ''
        bar = '#' * round(share * _WIDTH)
        self._stream.write(f'\r{self._what} [{bar:<{_WIDTH}}] {share:4.0%} {left}\x1b[K')
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write('\r\x1b[K')
            self._stream.flush()
