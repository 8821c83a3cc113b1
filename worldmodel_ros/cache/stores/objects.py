"""Slabs in an object store (S3, GCS, Azure, a folder), using obstore; extra ``[store]``."""
from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future as Promise
from typing import Any

from .protocol import AlreadyStored, Blob, NotStored, StoreError, Threads, check_key


class ObjectStore:
    """A ``SlabStore`` in a bucket. ``url``: such as ``s3://bucket/folder`` or ``file:///folder``; ``options``: of
    ``obstore.store.from_url``, such as region and credentials."""

    def __init__(self, url: str, threads: int = 16, **options: Any):
        """Raise StoreError if obstore is not installed, or does not support the URL."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StoreError('an object store needs obstore: pip install worldmodel-ros[store]') from error
        self._obstore = obstore
        try:
            self._store = from_url(url, **options)
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            reason = str(error).partition('\n')[0]  # what follows is the library's own state
            raise StoreError(f'{url} is no object store such as s3://bucket/folder: {reason}') from error
        self._threads = Threads('objects', threads)

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        for key, _ in items:
            check_key(key)
        return self._threads.each(lambda key, parts: self._call(
            key, self._obstore.put, b''.join(parts), mode='create' if create else 'overwrite'), items)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        return self._threads.each(lambda key: memoryview(self._call(key, self._obstore.get).bytes()),
                                  [(key,) for key in keys])

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        def delete(key: str) -> None:
            try:
                self._call(key, self._obstore.delete)
            except NotStored:
                pass
        return self._threads.each(delete, [(key,) for key in keys])

    def list(self, prefix: str) -> Promise[list[str]]:
        check_key(prefix)
        return self._threads.submit(self._list, prefix)

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        def head(key: str) -> int | None:
            try:
                return int(self._call(key, self._obstore.head)['size'])
            except NotStored:
                return None
        return self._threads.each(head, [(key,) for key in keys])

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        return {}

    def close(self) -> None:
        self._threads.close()

    def _list(self, prefix: str) -> list[str]:
        return sorted(about['path'] for page in self._call(prefix, self._obstore.list) for about in page)

    def _call(self, key: str, function: Any, *arguments: Any, **options: Any) -> Any:
        check_key(key)
        errors = self._obstore.exceptions
        try:
            return function(self._store, key, *arguments, **options)
        except errors.AlreadyExistsError:
            raise AlreadyStored(f'{key} is there already') from None
        except (errors.NotFoundError, FileNotFoundError):
            raise NotStored(f'{key} is not there') from None
        except (errors.BaseError, OSError) as error:
            raise StoreError(f'{key}: {error}') from error
