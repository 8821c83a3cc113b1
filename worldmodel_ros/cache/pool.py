"""A pool of pages: who holds them and what is in them."""
from __future__ import annotations

from dataclasses import dataclass

from .allocator import PageAllocator
from .storage import Storage


@dataclass(frozen=True)
class PagePool:
    """One tier of the cache; ``name`` is what statistics and files call it."""

    name: str
    allocator: PageAllocator
    storage: Storage

    @classmethod
    def of(cls, name: str, storage: Storage) -> PagePool:
        return cls(name, PageAllocator(storage.pages), storage)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that are held by anyone."""
        return self.allocator.usage().used * self.storage.page_bytes
