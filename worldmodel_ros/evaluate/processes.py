"""Runs independent jobs in any number of processes."""
from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

Job, Result = TypeVar('Job'), TypeVar('Result')


def each(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Future[Result]]]:
    """Do each job, and yield it with its result or error when it is done; one worker is this process."""
    if workers == 1 or not jobs:
        for job in jobs:
            done: Future[Result] = Future()
            try:
                done.set_result(work(job))
            except Exception as error:
                done.set_exception(error)
            yield job, done
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context('spawn')) as pool:
        running = {pool.submit(work, job): job for job in jobs}
        try:
            for done in as_completed(running):
                yield running[done], done
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
