"""
The dialect of openpi: observations in, chunks of actions out, as in openpi_client 0.1.2.

The first message is the server's metadata. An observation is answered by a map with ``actions``, or, if it is refused, by
a text, which raises in the client and leaves the connection open. Keys besides the contract's are optional, so that an
unmodified client works.
"""
from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.transport.messages import Planned, Refused
from .contract import Contract, ContractError, ObservationError
from .msgpack import WireError, decode, encode
from .sessions import Refusal, Session

NAME = 'openpi'
PATHS = ('/', '/v1/realtime/robot/openpi')
_LONGEST_DEADLINE = 60_000.0  # ms
_MAX_STEP = 1 << 62
_MAX_ACTIONS = 1000  # that a client may report as executed,
_MAX_NAMES = 64      # numbers in each
_RETURN = 0.002      # s from the engine's answer to the message on the socket


@dataclass(frozen=True)
class Request:
    """An observation with its optional keys. Raises ObservationError for invalid ones."""

    session_id: str
    endpoint: str
    step_id: int | None
    deadline_ms: float
    inference_delay: int
    executed: np.ndarray | None  # (n, A) or (A,)
    observation: Mapping[str, Any]

    @classmethod
    def of(cls, observation: Mapping[str, Any], contract: Contract) -> Request:
        """Read the optional keys of an observation."""
        if not isinstance(observation, Mapping):
            raise ObservationError('an observation is a map')
        session_id, endpoint = observation.get('session_id', ''), observation.get('endpoint', 'infer')
        if not isinstance(session_id, str) or not isinstance(endpoint, str) or endpoint not in ('infer', 'reset'):
            raise ObservationError('session_id is a text, and endpoint "infer" or "reset"')
        step = observation.get('step_id')
        deadline = observation.get('deadline_ms', contract.deadline_ms)
        delay = observation.get('inference_delay', 0)
        executed = observation.get('executed_actions')
        if (step is not None and not _is_whole(step, _MAX_STEP)) or not _is_whole(delay, _MAX_ACTIONS):
            raise ObservationError('step_id and inference_delay are whole numbers, 0 or more')
        if not isinstance(deadline, (int, float, np.number)) or isinstance(deadline, bool) \
                or not 0.0 < deadline <= _LONGEST_DEADLINE:
            raise ObservationError(f'deadline_ms is a number above 0, at most {_LONGEST_DEADLINE:g}')
        if executed is not None:
            try:
                executed = np.asarray(executed) if isinstance(executed, (list, np.ndarray)) else np.array('')
            except ValueError:  # a list of rows of different lengths
                executed = np.array('')
            if executed.dtype.kind not in 'fiu' or executed.ndim not in (1, 2) or len(executed) > _MAX_ACTIONS \
                    or executed.size > _MAX_ACTIONS * _MAX_NAMES:
                raise ObservationError(f'executed_actions is (A,) or (n, A) numbers, n up to {_MAX_ACTIONS}')
        return cls(session_id, endpoint, None if step is None else int(step), float(deadline), int(delay), executed,
                   observation)


class Dialect:
    """The dialect. The gateway's loop calls ``refuses``, ``greeting``, ``read``, ``answer`` and ``refusal``."""

    name = NAME

    def __init__(self, contract: Contract) -> None:
        self._contract = contract

    def refuses(self, spec: Preset) -> str:
        """Return a text for clients of a model that cannot be served; empty: it can."""
        return ''

    def greeting(self, spec: Preset, backend: str) -> bytes:
        """Return the first message to a client."""
        contract = self._contract
        return encode({
            'model': spec.name, 'backend': backend, 'image_size': list(spec.image_size),
            'action_names': list(spec.action_names), 'action_low': list(spec.action_low),
            'action_high': list(spec.action_high), 'action_horizon': spec.chunk_frames, 'step_period': spec.step_period,
            'goals': list(spec.goals), 'keys': {'image': contract.image, 'state': contract.state, 'goal': contract.goal},
            'extensions': ['session_id', 'step_id', 'deadline_ms', 'executed_actions', 'inference_delay', 'endpoint']})

    def read(self, message: bytes | str) -> Request | None:
        """Return the request in a message; None: there is nothing to answer. Raises Refusal; WireError for a message that ends
        the connection."""
        if isinstance(message, str):
            raise WireError('a text: messages are MessagePack')
        try:
            return Request.of(decode(message), self._contract)
        except ObservationError as error:
            raise Refusal('observation', str(error)) from error

    def refusal(self, refusal: Refusal) -> str:
        """Return the message of a refusal."""
        return str(refusal)

    async def answer(self, session: Session, request: Request, arrival: float, holder: Any) -> AsyncIterator[bytes | str]:
        """Yield the messages that answer a request which arrived at a steady time [s] over a connection. Raises Refusal."""
        yield await answer(session, request, self._contract, arrival)


async def answer(session: Session, request: Request, contract: Contract, arrival: float) -> bytes | str:
    """
    Return the reply to an observation that arrived at a steady time [s]; the same reply if it was answered already.

    Raises Refusal for a request that was not done and may be repeated.
    """
    observation = request.observation
    async with session.lock:
        if request.endpoint == 'reset':
            session.begin_anew()
            return encode({'status': 'reset', 'session_id': session.name, 'episode': session.episode})
        stored = session.stored(request.step_id)
        if stored is not None:
            return stored
        spec = (await session.engine()).spec
        if session.recovered:
            _recover(session)
            stored = session.stored(request.step_id)
            if stored is not None:
                return stored
        try:
            contract.check(spec)
            frame = fit(contract.image_of(observation), spec.image_size)
            goal = contract.goal_of(observation, spec)
            executed, count = _executed(request, observation, contract, spec)
        except (ObservationError, ContractError) as error:
            raise Refusal('observation', str(error)) from error
        due = arrival + 1e-3 * request.deadline_ms
        try:
            planned, engine_took, committed = await session.tick(
                frame, goal, executed, due - _RETURN, arrival, request.inference_delay, count, request.step_id)
        except Refusal as refusal:
            if refusal.kind in ('deadline', 'model'):  # the engine has seen the frame: the step is done
                session.store(request.step_id, str(refusal))
            raise
        reply = _reply(session.episode, request.step_id, planned, committed, engine_took, arrival, due, time.monotonic())
        session.store(request.step_id, reply)
        return reply


def _reply(episode: int, step: int | None, planned: Planned, committed: int, engine_took: float, arrival: float, due: float,
           now: float) -> bytes:
    reply = {'actions': planned.plan, 'valid_steps': len(planned.plan), 'committed_steps': committed, 'episode': episode,
             'server_timing': {'infer_ms': 1e3 * engine_took, 'queue_ms': 1e3 * planned.queue,
                               'total_ms': 1e3 * (now - arrival), 'slack_ms': 1e3 * (due - now),
                               'tier': Tier(planned.tier).name.lower()}}
    if step is not None:
        reply['step_id'] = step
    return encode(reply)


def _recover(session: Session) -> None:
    """Store the reply to the newest step, done through another gateway, or through this one before it lost the engine."""
    (note, answer), session.recovered = session.recovered, None
    if isinstance(answer, Refused):
        session.store(note.step, str(Refusal('deadline', answer.reason)))
    elif isinstance(answer, Planned):
        session.store(note.step, _reply(note.episode, note.step, answer, note.committed, answer.finish - note.arrival,
                                        note.arrival, note.due, answer.finish))


def _executed(request: Request, observation: Mapping[str, Any], contract: Contract,
              spec: Preset) -> tuple[np.ndarray | None, int | None]:
    """Return the mean action since the previous observation, and the number of actions; None: the client does not say."""
    if request.executed is None:
        mean, count = contract.executed_of(observation), None
    elif request.executed.size == 0:
        mean, count = np.zeros(spec.actions, np.float32), 0
    else:
        rows = request.executed.reshape(-1, request.executed.shape[-1]).astype(np.float32)
        mean, count = rows.mean(0), None if request.executed.ndim == 1 else len(rows)
    if mean is not None and (mean.shape != (spec.actions,) or not np.isfinite(mean).all()):
        raise ObservationError(f'executed actions are finite numbers {", ".join(spec.action_names)}')
    return mean, count


def _is_whole(value: Any, largest: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return 0 <= value <= largest and math.isfinite(value)
