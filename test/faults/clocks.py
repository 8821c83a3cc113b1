"""A wall clock that jumps: of one process, and of all, as when the machine's clock is set."""

import signal
import time
from functools import partial

from faults.matrix import RECOVERED, Seen, case
from faults.seen import RESTART, afterwards, right_after_a_command, stop
from faults.shim import no_compiler
from faults.systems import GATE, MODEL, ROBOT, SHIMMED, Running
from scenarios.checks import STOP_LATENCY, stays_stopped, stopped_within

NOTICED = 0.1                       # s, after which a node's main loop has seen a signal at the latest
JUMP = 3600.0                       # s
PERIOD = 0.1                        # s, of the camera
STOP_AFTER_TICK = PERIOD + STOP_LATENCY


def _one_jumps(node: str, offset: float, running: Running) -> Seen:
    """The clock of one process differs: what it hears from others, or says to them, is from another time."""
    rig = running.rig
    right_after_a_command(rig)
    start = time.monotonic()
    running.shim(f'/{node}').set_wall_clock(offset)
    at = stopped_within(rig, start, STOP_AFTER_TICK)
    stays_stopped(rig, at)
    running.shim(f'/{node}').clear()
    return Seen(afterwards(rig), at - start)


for _node, _name in ((MODEL, 'model'), (GATE, 'gate'), (ROBOT, 'driver')):
    for _offset, _direction in ((JUMP, 'ahead'), (-JUMP, 'back')):
        case(SHIMMED, RECOVERED, 'to the stop', STOP_AFTER_TICK, needs=no_compiler, name=f'clock_{_name}_{_direction}',
             what=f'The wall clock of the {_name} alone jumps {_direction} by an hour, until it is set right')(
            partial(_one_jumps, _node, _offset))


def _all_jump(offset: float, running: Running) -> Seen:
    rig = running.rig
    right_after_a_command(rig)
    start = time.monotonic()
    for shim in running.shims():
        shim.set_wall_clock(offset)
    outcome = afterwards(rig)
    rig.watch(1.0)
    took = rig.wait_until_driving('driving to go on', start + PERIOD, 10.0).at - start
    return Seen(outcome, took)


for _offset, _direction in ((JUMP, 'ahead'), (-JUMP, 'back')):
    case(SHIMMED, RECOVERED, 'to the next command', 2.0, needs=no_compiler, name=f'clock_all_{_direction}',
         what=f"The machine's wall clock jumps {_direction} by an hour, and stays there")(partial(_all_jump, _offset))


@case(SHIMMED, RECOVERED, 'to the stop', STOP_LATENCY + NOTICED, ends=(f'/{MODEL}',), needs=no_compiler)
def clock_back_before_restart(running: Running) -> Seen:
    """The machine's wall clock jumps back by an hour, then SIGTERM to the model node"""
    rig = running.rig
    for shim in running.shims():
        shim.set_wall_clock(-JUMP)
    right_after_a_command(rig)
    took = stop(rig, running.send(f'/{MODEL}', signal.SIGTERM), STOP_LATENCY + NOTICED)
    return Seen(afterwards(rig, RESTART), took)
