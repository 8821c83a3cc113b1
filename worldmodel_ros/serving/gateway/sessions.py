"""
Sessions of clients. They outlive connections: a client that comes back continues where it was, and no step is done twice.
"""
from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.control.ladder import MODEL_TIERS, Tier
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.service.quotas import TokenBuckets
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.transport import messages
from .accounts import Account
from .engine import Answer, EngineAway, EngineSession, NotAnswered, Resumed

if TYPE_CHECKING:
    from worldmodel_ros.serving.worlds.link import WorldLink

_NAME = re.compile(r'[\w.:@/-]{1,128}', re.ASCII)
_REPLIES = 8       # kept for clients that repeat a request
_TIMES = 512       # ticks for the median and the 99th percentile
_SAVED = 4.0       # s of openings allowed in one burst
_RETRY = 0.5       # s between two attempts to reach an engine that is away
_STAY = 15.0       # s between two keep-alives of a world in which no client moves


class Refusal(Exception):
    """A refused request; the connection stays open. ``kind`` is one word, for the counts; the text says why."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f'refused: {kind}: {text}')
        self.kind = kind


@dataclass(frozen=True)
class Note:
    """
    What the engine keeps with a session for a gateway that does not know it: the newest step, when its observation came and
    its answer was due [s, steady], the number of committed actions at the start of its plan; and ``facts`` of the dialect.
    """

    episode: int
    step: int | None
    arrival: float = 0.0
    due: float = 0.0
    committed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The note as JSON."""
        return json.dumps(vars(self))

    @classmethod
    def of(cls, text: str) -> Note | None:
        """Return the note in a text; None: there is none, or it is of another release."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


class Session:
    """One client's session, of any dialect. Used by the event loop's thread only."""

    def __init__(self, account: Account, name: str, dialect: str, socket: Path, kept: bool, linger: float = 0.0) -> None:
        """``kept``: whether it outlives its connection, and this process by ``linger`` s, in the engine."""
        self.account, self.name, self.dialect, self.kept = account, name, dialect, kept
        self.lock = asyncio.Lock()        # one request at a time
        self.holder: object | None = None  # its present connection
        self.left = time.monotonic()      # since when it has none
        self.episode = 1                  # increases whenever the session begins from nothing
        self.step: int | None = None      # newest one that was done
        self.counts: Counter[str] = Counter()
        self.seconds: deque[float] = deque(maxlen=_TIMES)
        self.label = name                 # for the engine's fair shares
        self.known_as, self.generation = '', 0  # on the engine, if a robot of its fleet names it,
        self.mobile = False                     # and whether that can connect to another host
        self.world: Any = None  # a dialect's state of what was seen; dropped when that is forgotten
        self.newest: np.ndarray | None = None  # predicted frames, uint8 (T, H, W, 3), and how often there were new ones
        self.pictures = 0
        self.recovered: tuple[Note, Answer | None] | None = None  # of the step before this process; for the dialect
        self.link: WorldLink | None = None  # its world, if an open world model answers
        self._socket, self._linger = socket, linger
        self._engine: EngineSession | None = None
        self._retry = self._stayed = 0.0
        self._number = 0
        self._forgotten = False  # its past, in a way that the engine does not know yet
        self._replies: OrderedDict[int, bytes | str] = OrderedDict()
        self._plan: tuple[np.ndarray, float] | None = None  # the newest plan, and when its observation came

    async def engine(self) -> EngineSession:
        """Return the session's engine, reconnected if it was lost. Raises Refusal; for a ``mobile`` robot, SentOn if the engine
        is on another host."""
        if self._engine and not self._engine.gone:
            return self._engine
        now = time.monotonic()
        if now < self._retry:
            raise Refusal('engine', 'it is away')
        moved = self._engine.moved if self._engine else None
        if isinstance(moved, Endpoint):
            raise Refusal('moved', f'the session goes on at {moved}: connect there')
        try:
            engine = await EngineSession.open(moved or self._socket, f'gateway/{self.account.name}/{self.label}'[:200],
                                              self.key if self.kept else self.known_as, self._linger if self.kept else 0.0,
                                              self.generation, self.mobile)
            if not engine.resumed.number:
                if self._engine:  # another engine, or the same after too long a time
                    self.begin_anew()
            elif engine.resumed.number >= self._number and not moved:
                await self._recover(engine.resumed)
        except EngineAway as error:
            if moved:
                self._engine.moved = None  # next time, ask at the original socket again
            self._retry = time.monotonic() + _RETRY
            raise Refusal('engine', str(error)) from error
        self._engine = engine
        engine.pictured = self._pictured
        if self._forgotten:
            self._forgotten = False
            self.note()
        return engine

    @property
    def spec(self) -> Preset | None:
        """The model's preset; None until the engine was reached."""
        return self._engine.spec if self._engine else None

    def stored(self, step: int | None) -> bytes | str | None:
        """Return the reply to a step that was done already; None: it was not. Raises Refusal for an old step without one."""
        if step is None:
            return None
        if step in self._replies:
            self.counts['repeated'] += 1
            return self._replies[step]
        if self.step is not None and step <= self.step:
            raise Refusal('step', f'step {step} came after {self.step}, and its reply is no longer kept')
        return None

    def store(self, step: int | None, reply: bytes | str) -> None:
        """Keep the reply to a step."""
        if step is None:
            return
        self.step = step
        self._replies[step] = reply
        while len(self._replies) > _REPLIES:
            self._replies.popitem(last=False)

    async def tick(self, frame: np.ndarray, goal: str, executed: np.ndarray | None, due: float, arrival: float,
                   delay: int = 0, count: int | None = None, step: int | None = None
                   ) -> tuple[messages.Planned, float, int]:
        """
        Have a frame of the model's size, uint8 (H, W, 3), answered with a plan by ``due``, steady time in s.

        ``executed`` (A,): mean action since the previous frame; None: the last plan's, which is the best guess. ``delay``:
        how many of the last plan's actions will be executed before the answer can take over; ``count``: how many were already
        (None: as many as fit into the time that has passed). ``step``: as counted by the client. Return the plan, the seconds
        that the engine took, and the number of committed actions at the start of the plan. Raises Refusal.
        """
        engine = await self.engine()
        done, committed = self._committed(delay, count, arrival, engine.spec)
        if executed is None:
            executed = done.mean(0) if len(done) else np.zeros(engine.spec.actions, np.float32)
        self._number += 1
        asked = time.monotonic()
        while True:
            try:
                answer = await engine.tick(self._number, frame, goal, executed, due, int(arrival * 1e9), self.episode,
                                           committed if len(committed) else None, note=Note(
                                               self.episode, step, arrival, due, len(committed)).text)
            except EngineAway as error:
                if not engine.moved:
                    raise self._refused('engine', str(error)) from error
                engine = await self.engine()  # send it again to where the session is now
            else:
                break
        took = time.monotonic() - asked
        if isinstance(answer, messages.Planned) and (
                answer.tier not in MODEL_TIERS or answer.plan.ndim != 2 or not np.isfinite(answer.plan).all()):
            answer = messages.Refused(answer.number, 0.0, 'it gave no plan')
            self.count(answer, due, arrival)
            raise Refusal('model', answer.reason)
        self.count(answer, due, arrival)
        if isinstance(answer, messages.Refused):
            raise Refusal('deadline', answer.reason)
        if isinstance(answer, messages.Failed):
            self.begin_anew()
            raise Refusal('model', answer.reason)
        self._plan = answer.plan, arrival
        return answer, took, len(committed)

    def count(self, answer: Answer, due: float, arrival: float) -> None:
        """Count the answer to an observation that arrived at a steady time [s]."""
        now = time.monotonic()
        self.counts['ticks'] += 1
        if not isinstance(answer, messages.Planned):
            self.counts['refused'] += 1
            return
        self.counts[f'tier_{Tier(answer.tier).name.lower()}'] += 1
        self.counts['late'] += now > due
        self.seconds.append(now - arrival)

    async def imagine(self, actions: np.ndarray, patience: float, keep: bool, onward: bool) -> np.ndarray:
        """
        Return the frames, uint8 (T, H, W, 3), imagined for actions (T, A), as ``EngineSession.imagine``. If the engine limits
        the rate of questions, it is asked again, for ``patience`` s. Raises Refusal.
        """
        begun, end = time.monotonic(), time.monotonic() + patience
        while True:
            try:
                frames = await (await self.engine()).imagine(actions, end, keep, onward)
            except EngineAway as error:
                raise self._refused('engine', str(error)) from error
            except NotAnswered as error:
                if not error.again or time.monotonic() + error.again > end:
                    raise self._refused('model', str(error)) from error
                await asyncio.sleep(error.again)
            else:
                self.show(frames)
                self.counts['imagined'] += len(frames)
                self.seconds.append(time.monotonic() - begun)
                return frames

    def stay(self) -> None:
        """Keep the session alive on the engine while there are no requests."""
        now = time.monotonic()
        if self.world is not None and self._engine and now - self._stayed > _STAY:
            self._stayed = now
            self._engine.stay()

    def begin_anew(self) -> None:
        """Forget all frames: the next one begins an episode."""
        self.episode += 1
        self.step, self._plan, self.world = None, None, None
        self._replies.clear()
        self.note()
        self._forgotten |= self._engine is None or bool(self._engine.gone)

    def status(self) -> dict[str, Any]:
        """Return the session's part of /v1/sessions."""
        times = np.array(self.seconds or [np.nan]) * 1e3
        median, slow = (None if np.isnan(each) else round(float(each), 2) for each in np.quantile(times, (0.5, 0.99)))
        return {'session_id': self.name, 'dialect': self.dialect, 'connected': self.holder is not None,
                'episode': self.episode, 'step_id': self.step, 'p50_ms': median, 'p99_ms': slow, 'pictures': self.pictures,
                **self.counts}

    def note(self, **facts: Any) -> None:
        """Have the engine keep the session's position, and JSON values of its dialect, for a gateway that continues it."""
        if self._engine:
            self._engine.note(Note(self.episode, self.step, facts=facts).text)

    def close(self, for_good: bool) -> None:
        """Leave the session on the engine, where it waits for the next gateway; or end it there, too."""
        for each in filter(None, (self._engine, self.link)):
            each.end() if for_good else each.close()

    @property
    def key(self) -> str:
        """Its name on the engine, unique to its account and dialect."""
        named = json.dumps([self.account.name, self.dialect, self.name])
        return 'gateway-' + hashlib.sha256(named.encode()).hexdigest()[:48]

    async def _recover(self, resumed: Resumed) -> None:
        """Continue the session that another gateway, or a lost connection, has left on the engine."""
        self._number = resumed.number
        note = Note.of(resumed.note)
        if self._forgotten:  # after that note, whose episode may be unknown here
            self.episode = max(self.episode, note.episode + 1 if note else 0)
            return
        if note is None:
            self.begin_anew()
        if note is None or note.episode < self.episode or (note.step is not None and note.step == self.step):
            return  # nothing new
        answer = None
        if resumed.answer:
            try:
                answer = await asyncio.wait_for(resumed.answer, max(0.0, note.due - time.monotonic()) + _RETRY)
            except (asyncio.TimeoutError, TimeoutError):
                pass  # continue without it
        self.episode, self.step = note.episode, note.step
        if isinstance(answer, messages.Planned) and note.arrival:  # otherwise forgotten since
            self._plan = answer.plan, note.arrival
        if isinstance(answer, messages.Failed):
            self.begin_anew()
        else:
            self.recovered = note, answer

    def _refused(self, kind: str, text: str) -> Refusal:
        self.counts['ticks'] += 1
        self.counts['refused'] += 1
        return Refusal(kind, text)

    def _committed(self, delay: int, count: int | None, arrival: float, spec: Preset) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the last plan that were executed since, and those that will be until the answer takes over."""
        if self._plan is None:
            return (np.zeros((0, spec.actions), np.float32),) * 2
        plan, at = self._plan
        passed = round((arrival - at) / spec.step_period) if count is None else count
        if delay >= spec.chunk_frames:
            raise Refusal('observation', f'inference_delay is {delay}, and the model plans {spec.chunk_frames} actions')
        return plan[:max(1, passed)], plan[passed:passed + delay]

    def _pictured(self, _: messages.Imagined, frames: np.ndarray) -> None:
        self.show(frames)

    def show(self, frames: np.ndarray) -> None:
        """Set the newest predicted frames, uint8 (T, H, W, 3)."""
        self.newest = frames
        self.pictures += 1


class Sessions:
    """All sessions, by account and name: no name reaches a session of another account."""

    def __init__(self, socket: Path, linger: float, say: Callable[..., None]) -> None:
        """``linger`` [s]: how long a session without a connection is kept. ``say(event, **facts)``: called for each event."""
        self._socket, self._linger, self._say = socket, linger, say
        self._sessions: dict[tuple[str, str], Session] = {}
        self._ended: Counter[str] = Counter()
        self._opened: dict[Account, TokenBuckets] = {}
        self._numbers = itertools.count(1)

    def claim(self, account: Account, name: str, dialect: str, holder: object) -> Session:
        """
        Return the session of a name for a connection, new or as it was left; empty: one for this connection only.

        It is taken from another connection that has it, which is mostly dead without being noticed. Raises Refusal.
        """
        kept = bool(name)
        if kept and not _NAME.fullmatch(name):
            raise Refusal('session', 'session_id must be 1 to 128 letters, digits or ._:@/-')
        name = name or f'#{next(self._numbers)}'
        key = account.name, name
        session = self._sessions.get(key)
        if session is not None and session.dialect != dialect:
            raise Refusal('session', f'{name} is a session of {session.dialect}')
        if session is None:
            free: list[tuple[float, tuple[str, str]]] = []
            taken = sum(owner == account.name for owner, _ in self._sessions)
            if taken >= account.sessions:
                # A client that comes back under another name is not locked out by the sessions that it left.
                free = [(each.left, k) for k, each in self._sessions.items() if k[0] == account.name and not each.holder]
                if not free:
                    raise Refusal('sessions', f'{taken} sessions are open, which is the limit of {account.name}')
            opened = self._opened.setdefault(account, TokenBuckets(account.openings, _SAVED))
            wait = opened.take(account.name, time.monotonic())
            if wait:  # the engine limits openings per process, which all accounts share here
                raise Refusal('sessions', f'{account.name} opens sessions too often: again in {wait:.2f} s')
            if free:
                self._end(min(free)[1], 'replaced')
            session = self._sessions[key] = Session(account, name, dialect, self._socket, kept, self._linger)
            self._say('session_begins', account=account.name, session=name, dialect=dialect)
        elif session.holder is not holder:
            self._say('session_goes_on', account=account.name, session=name, dialect=dialect)
        session.holder = holder
        return session

    def release(self, session: Session, holder: object) -> None:
        """Note that a connection has ended."""
        if session.holder is not holder:
            return
        session.holder, session.left = None, time.monotonic()
        if session.link:
            session.link.close()  # its world waits at its server, where it can make room for others
        key = session.account.name, session.name
        if not session.kept and self._sessions.get(key) is session:  # it may have ended before, with the gateway
            self._end(key, 'its connection has ended')

    def expire(self) -> None:
        """End the sessions whose clients have not come back."""
        now = time.monotonic()
        for key, session in list(self._sessions.items()):
            session.stay()
            if session.holder is None and now - session.left > self._linger:
                self._end(key, f'no client came back within {self._linger:g} s')

    def of(self, account: Account) -> list[Session]:
        """Return the sessions of an account."""
        return [session for (owner, _), session in self._sessions.items() if owner == account.name]

    def all(self) -> list[Session]:
        """Return all sessions."""
        return list(self._sessions.values())

    def counts(self) -> Counter[str]:
        """Return the counts of all sessions, including those that have ended."""
        return sum((session.counts for session in self._sessions.values()), Counter(self._ended))

    def close(self) -> None:
        """Leave all sessions; those with a name wait in the engine for the next gateway."""
        for key in list(self._sessions):
            self._end(key, 'the gateway ends', for_good=False)

    def _end(self, key: tuple[str, str], reason: str, for_good: bool = True) -> None:
        session = self._sessions.pop(key)
        session.close(for_good)
        self._ended += session.counts
        self._say('session_ends', account=key[0], session=key[1], reason=reason)
