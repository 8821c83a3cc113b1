"""
Messages between a robot's front end and the engine's server, version 9.

Times are of CLOCK_MONOTONIC in s, which all processes of a machine share, and stamps are in ns. Every Tick is
answered by exactly one Planned, Refused or Failed of its number; a Question by its branches and one Answered; a
SessionFile by one Done. A robot that has been silent for long gets Idle, one whose session has moved to another server
Moved. Images travel in shared memory next to the message (``pictures.py``), frames in slots (``frames.py``).

Servers with a common store move sessions among each other: see docs/fleet.md. Move, Prepare and TakeOver are answered by
Done.

The server of an open world model takes WorldHello in place of Hello, and then Walk and Forget, each answered by one Walked of
its number.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .codec import doubles, f64, flag, floats, i64, many, message, text, u8, u32, u64

LONGEST_LINGER = 600.0  # s that a session or a world may wait after its connection is lost

# --- from the front end ---


@message(1)
class Hello:
    """The first message of a robot; answered by Welcome or Rejected."""

    robot: str = text()  # full name of its node
    session: str = text(default='')  # its name for the session; the server continues it, if it is in its store
    generation: int = u64(default=0)  # of that session, the highest that the robot was told
    linger: float = f64(default=0.0)  # s that the session waits for its robot when the connection is lost
    mobile: bool = flag(default=False)  # the robot has the credentials for gateways of other hosts, and may be sent to one


@message(2)
class Tick:
    """An observation. From now on until its answer the slot belongs to the server."""

    number: int = u64()      # increases by one
    slot: int = u8()         # where the frame is; it carries ``number``
    stamp: int = i64()       # of the observation, ns
    episode: int = u64()
    goal: str = text()       # empty: nothing is commanded
    due: float = f64()       # by when the front end must have the answer, s
    answer: bool = flag()    # False: the frame is only taken in
    executed: np.ndarray = floats()  # (A,), mean since the previous tick, SI units
    prefix: np.ndarray | None = floats(default=None)  # (n, A), executed before the answer can take over; None: none
    note: str = text(default='')  # as Note
    spacing: float = f64(default=0.0)  # s between the camera's images; 0: no choice of another image
    moved: float = f64(default=0.0)    # s by which ticks have moved earlier so far, as Planned offered
    plan: np.ndarray | None = floats(default=None)  # (T, A), decided by the robot, to be imagined; None: the server plans


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence to be imagined; ``actions`` (T, A), or (0, 0) for the model's own plan of ``steps``."""

    name: str = text()
    steps: int = u32()
    actions: np.ndarray = floats()


@message(3)
class Question:
    """A what-if question; as ``engine.what_if.Question``."""

    number: int = u64()
    goal: str = text()
    due: float = f64()
    stamp: int = i64()
    branches: tuple[Branch, ...] = many(Branch)
    denoising_steps: int = u8()
    keep: bool = flag(default=False)    # keep the end of the branch, to continue from it
    onward: bool = flag(default=False)  # continue from the one that was kept last


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
    """Has the server move a session to another server. Needs no Hello before it."""

    number: int = u64()
    session: str = text()
    target: str = text()  # the other server's socket


@message(7)
class Prepare:
    """From server to server: read the stored part of a session that is about to come."""

    number: int = u64()
    session: str = text()


@message(8)
class TakeOver:
    """From server to server: become the owner of a session; the sender writes no more of it."""

    number: int = u64()
    session: str = text()
    generation: int = u64()  # to be claimed


@message(9)
class Goodbye:
    """The session is over, whatever its ``linger``."""


@message(10)
class Note:
    """A note that Welcome returns when the front end comes back to the session; replaces the one before."""

    note: str = text()


@message(11)
class WorldHello:
    """The first message for a world of an open world model; answered by WorldWelcome or Rejected."""

    session: str = text()  # the server continues its world, if it has one
    linger: float = f64()  # s that the world waits when the connection is lost


@message(12)
class Walk:
    """Imagine what a camera sees along poses. An image that comes with it begins a world; without one, the world continues."""

    number: int = u64()
    event: str = text()                    # a repeated event is answered by the same frames; empty: never repeated
    poses: np.ndarray = doubles()          # (N, 4, 4), camera-to-world, optical frame; with an image, the first is the image's
    intrinsics: np.ndarray = doubles()     # (N, 4), fx, fy, cx, cy of an image of the world's size
    note: str = text(default='')           # with an image: kept for a client that comes back to the world


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
    number: int = u64(default=0)      # of the newest tick that it got
    answered: bool = flag(default=False)  # the answer to that tick follows, now or when it is ready
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
    predicted: float = f64()       # finish predicted by the scheduler, s
    finish: float = f64()          # real one, s
    reason: str = text()           # why not the best tier
    plan: np.ndarray = floats()    # (T, A), the first action is for now
    queue: float = f64(default=0.0)  # from the tick's arrival to the beginning of its first network call, s
    earlier: float = f64(default=0.0)  # s by which this robot's ticks should come earlier, for all robots to fit better


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
    """The imagined future of the tick's plan; the images come with it."""

    number: int = u64()
    tier: int = u8()
    actions: np.ndarray = floats()         # (T, A)
    collision_risk: np.ndarray = floats()  # (T,)
    progress: np.ndarray = floats()        # one for each goal of the spec, m
    timings: np.ndarray = floats()         # TIMINGS, s


TIMINGS = ('queue', 'encode', 'commit', 'policy', 'denoise', 'decode', 'total', 'predicted')  # of control.responder.Prediction


@message(71)
class ImaginedBranch:
    """One branch of the answer to a question; the images come with it."""

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
    again: float = f64(default=0.0)  # s after which a refused question may be asked again; 0: never as it is


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
    """Nothing came for a long time: the session has ended, the connection is closed. The next observation may open one."""

    reason: str = text()


@message(76)
class Moved:
    """The session belongs to another server from now on; the connection is closed. Send open ticks there."""

    address: str = text()    # the other server's socket
    generation: int = u64()  # that it owns


@message(77)
class WorldWelcome:
    """The session of WorldHello is open."""

    begun: bool = flag()  # there is a world to continue
    note: str = text()    # of the walk that began it
    about: str = text()   # the model, as JSON


@message(78)
class Walked:
    """The answer to Walk and Forget. With a ``refusal`` there are no frames, else those of all poses come with it."""

    number: int = u64()
    imagined: int = u64(default=0)     # frames of the world so far, without the image,
    added: int = u64(default=0)        # and how many of them are of this walk
    queue: float = f64(default=0.0)    # from the arrival to the beginning, s
    observe: float = f64(default=0.0)  # for the image, s
    imagine: float = f64(default=0.0)  # s
    repeated: bool = flag(default=False)  # it was answered before
    kind: str = text(default='')       # of the refusal, one word
    refusal: str = text(default='')
