"""The states of a session of the service, and the transitions between them."""
from __future__ import annotations

import enum

from .messages import SessionError


class State(enum.Enum):
    """What a session has and what is in flight; the text completes 'session 3 ...'."""

    EMPTY = 'has seen no frame'
    STARTING = 'waits for its first frame to be taken in'
    READY = 'has seen frames'
    TICKING = 'has a tick in flight'
    ASKING = 'has questions in flight'
    BUSY = 'has a tick and questions in flight'
    CLOSED = 'is closed'


class Event(enum.Enum):
    """What happens to a session; the text completes 'it cannot ...'."""

    TICK = 'take a tick'
    OBSERVED = 'take in a frame'
    SETTLED = 'end its ticks'  # none is in flight any more
    ASK = 'be asked'
    ANSWERED = 'end its questions'  # none is in flight any more
    RESET = 'be reset'
    FAIL = 'fail'
    CLOSE = 'be closed'


# An event that a state does not list is illegal in it. Events that restart a session end what was in flight.
_ALWAYS = {Event.RESET: State.EMPTY, Event.FAIL: State.EMPTY, Event.CLOSE: State.CLOSED}
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.EMPTY: {Event.TICK: State.STARTING, Event.OBSERVED: State.READY, **_ALWAYS},
    State.STARTING: {Event.TICK: State.STARTING, Event.OBSERVED: State.TICKING, Event.SETTLED: State.EMPTY, **_ALWAYS},
    State.READY: {Event.TICK: State.TICKING, Event.OBSERVED: State.READY, Event.ASK: State.ASKING, **_ALWAYS},
    State.TICKING: {Event.TICK: State.TICKING, Event.OBSERVED: State.TICKING, Event.SETTLED: State.READY,
                    Event.ASK: State.BUSY, **_ALWAYS},
    State.ASKING: {Event.TICK: State.BUSY, Event.OBSERVED: State.ASKING, Event.ASK: State.ASKING,
                   Event.ANSWERED: State.READY, **_ALWAYS},
    State.BUSY: {Event.TICK: State.BUSY, Event.OBSERVED: State.BUSY, Event.SETTLED: State.ASKING, Event.ASK: State.BUSY,
                 Event.ANSWERED: State.TICKING, **_ALWAYS},
    State.CLOSED: {},
}


def after(session: int, state: State, event: Event) -> State:
    """Return the state that an event leads to; raises SessionError if the event is illegal."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise SessionError(f'session {session} {state.value}: it cannot {event.value}')
    return following
