"""Problems and errors of bags: a problem is noted and reading goes on, an error ends it."""
from __future__ import annotations

from dataclasses import dataclass


class BagError(ValueError):
    """Nothing can be read, or what was requested is missing; the text says what, where, and what to do."""


class MessageError(ValueError):
    """One message cannot be read."""


@dataclass(frozen=True)
class Problem:
    """
    A fault in the files of a bag that can still be read.

    ``kind`` is for counting: 'truncated', 'no index', 'damaged', 'no metadata', 'metadata', 'missing file',
    'unreadable file', 'too large', 'packed message', 'missing messages', 'unsaved journal', 'time set back', 'topic'.
    ``text`` says what, where, and what to do; ``count`` is the number of places.
    """

    kind: str
    text: str
    count: int = 1
