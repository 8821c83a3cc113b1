"""Has one system running at a time, for as many cases as it is good for."""

from __future__ import annotations

from pathlib import Path

from faults.matrix import Case, Result, play
from faults.systems import PLANS, Running
from scenarios.catalogue import SYSTEMS
from scenarios.stalls import PLAYS, watching


def lacking(system: str) -> str:
    """Return what this machine lacks for a system that is one of the scenarios', too, by its measured speed; '' if nothing."""
    return next((each.lacks() for each in SYSTEMS if each.name == system), '')


class Stage:
    """Plays cases; a system that a case has failed on is given up, and the next case gets another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = 0
        self._running: Running | None = None

    def play(self, row: Case) -> Result:
        """
        Play a case.

        It is played again, which its result says, only where nothing is wrong but that a bound of quality was missed, and
        that by less than one stall of the machine took meanwhile. What cannot be played on this machine is skipped, with
        the reason; that is asked before it begins.
        """
        if reason := row.needs() or lacking(row.system):
            return Result(row.name, expected=row.outcome, skipped=reason)
        again: list[str] = []
        for _ in range(PLAYS):
            try:
                result = play(row, self._get(row.system))
            except Exception as error:  # of its start: no case can be played on it, but those of other systems can
                result = Result(row.name, expected=row.outcome, failures=[f'{row.system} did not start: {error!r}'])
            result.played_again = list(again)
            if not result.failures:
                break
            self.end()
            miss = result.missed
            stall = watching().longest(miss.start, miss.end) if miss else 0.0
            if miss is None or stall <= miss.by:
                break
            again.append(f'{miss}, in a stall of the machine of {stall * 1e3:.0f} ms')
        return result

    def end(self) -> None:
        """Stop what runs."""
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()

    def _get(self, system: str) -> Running:
        if self._running is None or self._running.plan.name != system:
            self.end()
            self._started += 1
            running = Running(PLANS[system], self._directory / f'{self._started:02d}_{system}')
            self._running = running  # also where its start fails: ``end`` clears it away
            running.start()
        return self._running
