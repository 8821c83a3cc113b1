"""One GPU of the fleet on a virtual clock, under the server's own scheduler."""
from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from worldmodel_ros.serving.scheduler import (
    Batch, Completion, Kind, Outcome, Policy, Request, Scheduler, Settings, StepTable, Tier, Unit)

from .durations import Durations
from .scenarios import PERIOD, Gpu, Stay
from .tally import Tally

DEADLINE = 0.050  # s from the camera's stamp to the command at the robot
UPLINK, UPLINK_JITTER = 0.009, 0.0015  # s: compression 4 ms and network 5 ms, normal, never less than half of the mean
DOWNLINK = 0.006  # s: network 5 ms and the gate 1 ms; reserved, so it is not drawn
WARM_UP_BUDGET = 5.0  # s that a moved session's window may take to be committed again

SETTINGS = Settings()


def routes(networks: set[str]) -> dict[Tier, tuple[Unit, ...]]:
    """Return what each tier computes; the smaller model only where its times are known."""
    observe, denoise = 'base/observe', 'base/denoise'
    tiers = {Tier.TWO_STEP: (Unit(observe), Unit(denoise, 0, 2), Unit(denoise, 1, 2)),
             Tier.ONE_STEP: (Unit(observe), Unit(denoise))}
    if {'small/observe', 'small/denoise'} <= networks:
        tiers[Tier.SMALLER] = Unit('small/observe'), Unit('small/denoise')
    return tiers


class Device:
    """Plays a GPU's history. ``watch``, if given, is called with each batch and the time at which it ended [s]."""

    def __init__(self, history: Gpu, tables: list[dict], policy: Policy, staggered: bool, seconds: float, seed: int,
                 watch: Callable[[Batch, float], None] | None = None) -> None:
        self._history, self._staggered, self._seconds, self._watch = history, staggered, seconds, watch
        self._rng = random.Random(seed)
        self._durations = Durations(tables, self._rng)
        self._scheduler = Scheduler(StepTable.from_dict(*tables), policy, SETTINGS)
        self._networks = {row['network'] for table in tables for row in table['rows']}
        self._routes = routes(self._networks)
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._count = 0
        self._tally = Tally(device_seconds=min(seconds, history.dies))
        self._running: tuple[float, Batch] | None = None

    def run(self) -> Tally:
        """Play the whole history; return the tally of its ticks."""
        for stay in self._history.stays:
            self._at(stay.start, self._join, stay)
        while self._events or self._running:
            if self._running and (not self._events or self._running[0] <= self._events[0][0]):
                now = self._finish()
            else:
                now, _, action, arguments = heapq.heappop(self._events)
                action(now, *arguments)
            if now >= self._history.dies:
                self._die()
                continue
            self._collect()
            self._begin(now)
            self._collect()
        return self._tally

    def _at(self, time: float, action: Callable, *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action, arguments))

    def _join(self, now: float, stay: Stay) -> None:
        phase = stay.phase
        if self._staggered:
            phase = (self._scheduler.phase(PERIOD) - now - UPLINK) % PERIOD
        first = now + phase
        self._scheduler.expect(stay.robot, first + UPLINK)
        self._at(first + self._uplink(), self._arrive, stay, first, 0)
        if stay.warm_up:
            request = Request(('warm', stay.robot), stay.robot, 0, Kind.WHAT_IF, now, now + WARM_UP_BUDGET,
                              {Tier.TWO_STEP: (Unit('base/observe'),) * stay.warm_up})
            if now < self._history.dies:
                self._scheduler.submit(request, now)

    def _arrive(self, now: float, stay: Stay, stamp: float, sequence: int) -> None:
        following = stamp + PERIOD
        if following < stay.end:
            self._at(following + self._uplink(), self._arrive, stay, following, sequence + 1)
        if now >= self._history.dies:
            self._tally.tick('lost', stamp)
            return
        request = Request((stay.robot, stamp), stay.robot, sequence, Kind.TICK, now, stamp + DEADLINE - DOWNLINK,
                          self._routes)
        if not self._scheduler.submit(request, now).admitted:
            self._tally.tick('refused', stamp)
        if following < stay.end:
            self._scheduler.expect(stay.robot, following + UPLINK)

    def _begin(self, now: float) -> None:
        if self._running:
            return
        batch = self._scheduler.next(now)
        if batch:
            slow = self._history.slowdown if now >= self._history.slow_from else 1.0
            self._running = now + slow * self._durations.draw(batch.network, len(batch.entries)), batch
            return
        wake = self._scheduler.wake_at(now)
        if wake is not None and (not self._events or wake < self._events[0][0]):
            self._at(wake, lambda now: None)

    def _finish(self) -> float:
        now, batch = self._running
        self._running = None
        self._tally.busy[batch.kind.name] += now - batch.begun
        self._tally.batches[len(batch.entries)] += batch.kind is Kind.TICK
        self._scheduler.finished(batch, now)
        if self._watch:
            self._watch(batch, now)
        return now

    def _die(self) -> None:
        """Lose the GPU: no open request is answered."""
        self._running = None
        for stay in self._history.stays:
            self._scheduler.close(stay.robot, self._history.dies)
        for completion in self._scheduler.completions():
            if completion.request.kind is Kind.TICK:
                self._tally.tick('lost', completion.request.id[1])

    def _collect(self) -> None:
        for completion in self._scheduler.completions():
            if completion.request.kind is Kind.TICK:
                self._answer(completion)
            elif completion.outcome is Outcome.DONE:
                if completion.request.kind is Kind.IDLE:
                    self._tally.pictures += 1
                else:
                    self._tally.warm.append(completion.finish - completion.request.arrival)

    def _answer(self, completion: Completion) -> None:
        request, stamp = completion.request, completion.request.id[1]
        if completion.outcome is not Outcome.DONE:
            self._tally.tick(completion.outcome.name.lower(), stamp)
            return
        self._tally.tick('met' if completion.met else 'late', stamp)
        self._tally.tiers[completion.tier.name.lower()] += 1
        self._tally.latencies.append(completion.finish + DOWNLINK - stamp)
        if completion.admission.expected is not None:
            self._tally.promised.append(completion.finish - completion.admission.expected)
        decode = 'small/decode' if completion.tier is Tier.SMALLER else 'base/decode'
        if decode in self._networks:
            # The images of a prediction are useful only until the next one comes.
            self._scheduler.submit(Request(('picture', *request.id), request.session, 0, Kind.IDLE, completion.finish,
                                           completion.finish + PERIOD, {completion.tier: (Unit(decode),)}),
                                   completion.finish)

    def _uplink(self) -> float:
        return max(0.5 * UPLINK, self._rng.gauss(UPLINK, UPLINK_JITTER))
