"""Schedules the chunks of worlds on the device: earliest deadline first, pass by pass, with the scheduler that serves robots.

A chunk fills a device by itself, so a batch is one pass. Between two passes of a chunk, passes of another world may run whose
images are needed sooner.
"""
from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.model.wan.camera import Intrinsics
from worldmodel_ros.serving.scheduler import (
    EDF, EDF_LADDER, Batch, Completion, Kind, Outcome, Request, Route, Scheduler, Settings, StepTable, Unit)
from .walk import WalkChunk

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.world import OpenWorld

_RUNS = 2  # recorded runs of a chunk over a full window


class Late(Exception):
    """A chunk that would be late at any quality; the text says by how much."""


class Turns:
    """Runs the chunks of all worlds of one model. Call the methods from the event loop; the networks run in ``networks``."""

    def __init__(self, world: OpenWorld, networks: ThreadPoolExecutor, deadline: float = 0.0) -> None:
        """
        ``deadline`` [s]: by when the first chunk of a request must be there; one that would be late gets half of the steps, or
        is refused. 0: none is refused, and only the order depends on when images are needed.
        """
        self._world, self._networks, self.deadline = world, networks, deadline
        steps = len(world.preset.schedule.steps)
        self._steps = {Tier.TWO_STEP: steps} | ({Tier.ONE_STEP: steps // 2} if deadline and steps > 1 else {})
        self.table = StepTable()
        # Late chunks, which are background work, wait only for those in time, and no world has a share of its own.
        settings = Settings(reserve=0.0, share=1.0, background_share=1.0)
        self._scheduler = Scheduler(self.table, EDF_LADDER if deadline else EDF, settings)
        self._jobs: dict[int, _Job] = {}
        self._count = 0
        self._wake = asyncio.Event()
        self.counts = {'chunks': 0, 'fewer_steps': 0, 'late': 0}

    async def calibrate(self) -> None:
        """Measure how long a chunk's units take over a full window, after a warm-up."""
        await asyncio.get_running_loop().run_in_executor(self._networks, self._calibrate)

    async def run(self) -> None:
        """Run the device until cancelled."""
        while True:
            self._wake.clear()
            while batch := self._scheduler.next(time.monotonic()):
                await self._run(batch)
            self._tell()
            wake_at = self._scheduler.wake_at(time.monotonic())
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), None if wake_at is None else max(0.0, wake_at - time.monotonic()))

    async def take(self, world: str, chunk: WalkChunk, due: float, refusable: bool) -> np.ndarray:
        """
        Return the images of a chunk, which are needed at steady time ``due`` [s]. ``refusable``: Late may be raised, and the
        world is unchanged then; otherwise the chunk is imagined however late it is. Raises what imagining it raises.
        """
        try:
            return await self._take(world, chunk, Kind.TICK, due)
        except Late:
            if refusable:
                raise
            self.counts['late'] += 1
            return await self._take(world, chunk, Kind.IDLE, math.inf)

    def close(self, world: str) -> None:
        """Forget a world."""
        self._scheduler.close(world, time.monotonic())
        self._tell()

    async def _take(self, world: str, chunk: WalkChunk, kind: Kind, due: float) -> np.ndarray:
        self._count += 1
        now = time.monotonic()
        job = _Job(chunk.imagining, self._steps, asyncio.get_running_loop().create_future())
        admission = self._scheduler.submit(Request(
            self._count, world, self._count, kind, now, due, {tier: self._route(steps) for tier, steps in self._steps.items()}),
            now)
        if not admission.admitted:
            raise Late(admission.reason)
        self._jobs[self._count] = job
        self._wake.set()
        return await job.images

    def _route(self, steps: int) -> Route:
        units = self._world.units(steps)
        return tuple(Unit(f'{self._world.spec.name}/{unit} of {steps}', at, len(units)) for at, unit in enumerate(units))

    async def _run(self, batch: Batch) -> None:
        entry, = batch.entries
        job = self._jobs[entry.request.id]
        try:
            await asyncio.get_running_loop().run_in_executor(self._networks, self._unit, job, entry.tier)
        except Exception as error:  # of this chunk: passed to its caller
            job.error = error
            self._scheduler.failed(batch, time.monotonic(), str(error))
        else:
            self._scheduler.finished(batch, time.monotonic())
        self._tell()

    def _unit(self, job: _Job, tier: Tier) -> None:
        job.step(tier)
        self._world.settle()

    def _tell(self) -> None:
        """Pass the results of ended chunks to their callers."""
        for completion in self._scheduler.completions():
            job = self._jobs.pop(completion.request.id)
            if completion.outcome is not Outcome.DONE:
                self._networks.submit(job.close)  # behind the unit that may be running now
            if not job.images.done():
                self._settle(job, completion)

    def _settle(self, job: _Job, completion: Completion) -> None:
        if completion.outcome is Outcome.DONE:
            self.counts['chunks'] += 1
            self.counts['fewer_steps'] += completion.tier is Tier.ONE_STEP
            job.images.set_result(job.result)
        elif completion.outcome is Outcome.FAILED:
            job.images.set_exception(job.error)
        elif completion.outcome is Outcome.GIVEN_UP:
            job.images.set_exception(Late(completion.reason))
        else:
            job.images.cancel()

    def _calibrate(self) -> None:
        world = self._world
        image = np.random.default_rng(0).integers(0, 256, (*world.spec.image_size, 3), dtype=np.uint8)
        height, width = world.spec.image_size
        intrinsics = Intrinsics(width / 2, width / 2, width / 2, height / 2)
        session = world.open(image, np.eye(4))
        try:
            for _ in range(world.window.frames // world.preset.chunk_frames):
                self._measure(session, intrinsics, self._steps[Tier.TWO_STEP], False)
            for steps in self._steps.values():
                for run in range(_RUNS + 1):
                    self._measure(session, intrinsics, steps, run > 0)
        finally:
            session.close()

    def _measure(self, session: Any, intrinsics: Intrinsics, steps: int, kept: bool) -> None:
        poses = np.stack([session.pose] * (session.images_of_chunk // self._world.frame_images))
        running, route = session.imagining(poses, intrinsics, steps), self._route(steps)
        for unit in route:
            start = time.monotonic()
            with contextlib.suppress(StopIteration):
                next(running)
            self._world.settle()
            if kept:
                self.table.record(unit.network, 1, time.monotonic() - start, time.monotonic(), calibrating=True)


class _Job:
    """A chunk in flight; ``step`` is called from the thread of the networks."""

    def __init__(self, imagining: Callable[[int], Generator[None, None, np.ndarray]], steps: dict[Tier, int],
                 images: asyncio.Future[np.ndarray]) -> None:
        self.images = images
        self.result: np.ndarray | None = None
        self.error: Exception | None = None
        self.running: Generator[None, None, np.ndarray] | None = None
        self._imagining, self._steps, self._tier = imagining, steps, None

    def step(self, tier: Tier) -> None:
        """Run the next unit; start over if the tier has changed."""
        if tier is not self._tier:
            if self.running:
                self.running.close()
            self._tier, self.running = tier, self._imagining(self._steps[tier])
        try:
            next(self.running)
        except StopIteration as end:
            self.result = end.value

    def close(self) -> None:
        """Abandon the chunk: its session is as before."""
        if self.running:
            self.running.close()
