"""
What the front end of a robot and the engine's server say to each other, version 9.

Times are of CLOCK_MONOTONIC in s, which all processes of a machine share, and stamps are in ns. Every Tick is
answered by exactly one Planned, Refused or Failed of its number; a Question by its branches and one Answered; a
SessionFile by one Done. A robot of which nothing has come for long is told Idle, one whose session has gone to another
server Moved. Images travel as memory next to the message (pictures.py), frames in slots (frames.py).

Servers of one store move sessions among each other: see docs/fleet.md. Move, Prepare and TakeOver are answered by Done.

The server of an open world model takes WorldHello in place of Hello, and then Walk and Forget, each answered by one Walked of
its number.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .codec import doubles, f64, flag, floats, i64, many, message, text, u8, u32, u64

# --- from the front end ---


@message(1)
class Hello:
    """The first message of a robot; answered by Welcome or Rejected."""

    robot: str = text()  # full name of its node
    session: str = text(default='')  # what it calls its session; the server goes on with it, if it is in its store
    generation: int = u64(default=0)  # of that session, the highest that the robot has been told
    linger: float = f64(default=0.0)  # s, for which the session waits for its robot when the connection is lost
    mobile: bool = flag(default=False)  # the robot has what gateways of other hosts ask for, and may be sent to one


@message(2)
class Tick:
    """An observation. From now on until its answer the slot belongs to the server."""

    number: int = u64()      # rises by one
    slot: int = u8()         # where the frame is; it carries ``number``
    stamp: int = i64()       # of the observation, ns
    episode: int = u64()
    goal: str = text()       # empty: nothing is commanded
    due: float = f64()       # by when the front end must have the answer, s
    answer: bool = flag()    # False: the frame is only to be taken in
    executed: np.ndarray = floats()  # (A,), mean since the previous tick, SI units
    prefix: np.ndarray | None = floats(default=None)  # (n, A), executed before the answer can take over; None: none
    note: str = text(default='')  # as Note
    spacing: float = f64(default=0.0)  # s, of the camera's images, of which this is one; 0: there is no choice
    moved: float = f64(default=0.0)    # s, by which ticks have come earlier so far, as Planned has offered
    plan: np.ndarray | None = floats(default=None)  # (T, A), decided by the robot, to be imagined; None: the server plans


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence to be imagined; ``actions`` (T, A), or (0, 0) for the model's own plan of ``steps``."""

    name: str = text()
    steps: int = u32()
    actions: np.ndarray = floats()


@message(3)
class Question:
    """What if? As engine.what_if.Question."""

    number: int = u64()
    goal: str = text()
    due: float = f64()
    stamp: int = i64()
    branches: tuple[Branch, ...] = many(Branch)
    denoising_steps: int = u8()
    keep: bool = flag(default=False)    # the branch is to be gone on from
    onward: bool = flag(default=False)  # it goes on from the one that was kept last


@message(4)
class SessionFile:
    """Have the session saved to a file, or loaded from one."""

    number: int = u64()
    load: bool = flag()
    name: str = text()  # in the server's session directory


@message(5)
class StatusRequest:
    """Asks for Status; needs no Hello before it."""


@message(6)
class Move:
    """Has the server move a session to another one. Needs no Hello before it."""

    number: int = u64()
    session: str = text()
    target: str = text()  # the other server's socket


@message(7)
class Prepare:
    """From server to server: read what is in the store of a session that is about to come."""

    number: int = u64()
    session: str = text()


@message(8)
class TakeOver:
    """From server to server: become the owner of a session; nothing more of it is written."""

    number: int = u64()
    session: str = text()
    generation: int = u64()  # to be claimed


@message(9)
class Goodbye:
    """The session is over, however long it was to wait."""


@message(10)
class Note:
    """What the front end wants to be told of the session by Welcome when it comes back to it; replaces the one before."""

    note: str = text()


@message(11)
class WorldHello:
    """The first message for a world of an open world model; answered by WorldWelcome or Rejected."""

    session: str = text()  # the server goes on with its world, if it has one
    linger: float = f64()  # s, for which the world waits when the connection is lost


@message(12)
class Walk:
    """Imagine what a camera sees along poses. The image that the world begins with comes next to it; none: it goes on."""

    number: int = u64()
    event: str = text()                    # what was answered already is answered by the same frames; empty: it never was
    poses: np.ndarray = doubles()          # (N, 4, 4), camera-to-world, optical frame; with an image, the first is the image's
    intrinsics: np.ndarray = doubles()     # (N, 4), fx, fy, cx, cy of an image of the world's size
    note: str = text(default='')           # with an image: kept, for who comes back to the world


@message(13)
class Forget:
    """End the world; the next Walk must begin one."""

    number: int = u64()


# --- from the server ---


@message(65)
class Welcome:
    """The session is open. The memory of the slots comes with it."""

    model: str = text()
    backend: str = text()
    spec: str = text()   # JSON of the model's preset
    slots: int = u8()
    generation: int = u64(default=0)  # of the session, if the server keeps it in a store; else 0
    frames: int = u64(default=0)      # that the session has seen already, if it is from the store
    number: int = u64(default=0)      # of the newest tick that it has been given
    answered: bool = flag(default=False)  # the answer to that tick follows, or comes when there is one
    note: str = text(default='')      # the newest one


@message(66)
class Rejected:
    """No session; the connection is closed after this."""

    reason: str = text()


@message(67)
class Planned:
    """The answer to a tick."""

    number: int = u64()
    tier: int = u8()               # ladder.Tier
    predicted: float = f64()       # finish that the scheduler expected, s
    finish: float = f64()          # real one, s
    reason: str = text()           # why not the best tier
    plan: np.ndarray = floats()    # (T, A), the first action is for now
    queue: float = f64(default=0.0)  # from the tick's arrival to the beginning of its first network call, s
    earlier: float = f64(default=0.0)  # s, by which this robot's ticks should come earlier, for all to fit better


@message(68)
class Refused:
    """The tick was not served: there is no time for it, or a newer one came first."""

    number: int = u64()
    predicted: float = f64()       # when it would have been finished, s
    reason: str = text()


@message(69)
class Failed:
    """The model failed on the tick; the session begins again with the next one."""

    number: int = u64()
    reason: str = text()


@message(70)
class Imagined:
    """What the tick's plan is expected to lead to; the pictures come with it."""

    number: int = u64()
    tier: int = u8()
    actions: np.ndarray = floats()         # (T, A)
    collision_risk: np.ndarray = floats()  # (T,)
    progress: np.ndarray = floats()        # one for each goal of the spec, m
    timings: np.ndarray = floats()         # TIMINGS, s


TIMINGS = ('queue', 'encode', 'commit', 'policy', 'denoise', 'decode', 'total', 'predicted')  # of answers.Prediction


@message(71)
class ImaginedBranch:
    """One branch of the answer to a question; the pictures come with it."""

    number: int = u64()
    name: str = text()
    actions: np.ndarray = floats()
    collision_risk: np.ndarray = floats()
    progress: np.ndarray = floats()


@message(72)
class Answered:
    """The end of the answer to a question. With a ``refusal`` there is none."""

    number: int = u64()
    stamp: int = i64()      # of the observation that was branched from, ns
    complete: bool = flag()
    refusal: str = text()
    again: float = f64(default=0.0)  # s, after which what was refused may be asked again; 0: not as it is


@message(73)
class Done:
    """A session has been saved or loaded, or, with a ``refusal``, not."""

    number: int = u64()
    refusal: str = text()


@message(74)
class Status:
    """The server's state as JSON."""

    json: str = text()


@message(75)
class Idle:
    """Nothing came for long: the session has ended, and the connection is closed. The next observation may open one."""

    reason: str = text()


@message(76)
class Moved:
    """The session is another server's from now on; the connection is closed. What is not answered is to be sent there."""

    address: str = text()    # the other server's socket
    generation: int = u64()  # that it owns


@message(77)
class WorldWelcome:
    """What WorldHello asks for is open."""

    begun: bool = flag()  # there is a world to go on in
    note: str = text()    # of the walk that began it
    about: str = text()   # the model, as JSON


@message(78)
class Walked:
    """The answer to Walk and Forget. With a ``refusal`` there are no frames, else those of all poses come with it."""

    number: int = u64()
    imagined: int = u64(default=0)     # frames of the world by now, without the image,
    added: int = u64(default=0)        # and how many of them by this
    queue: float = f64(default=0.0)    # from the arrival to the beginning, s
    observe: float = f64(default=0.0)  # for the image, s
    imagine: float = f64(default=0.0)  # s
    repeated: bool = flag(default=False)  # it was answered before
    kind: str = text(default='')       # of the refusal, one word
    refusal: str = text(default='')
