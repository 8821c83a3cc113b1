"""A model that is divided among processes loses one of them."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from faults.matrix import RECOVERED, Seen, case
from faults.memory import cannot_limit, starve
from faults.seen import RESTART, afterwards, right_after_a_command
from faults.systems import DIVIDED, MODEL, Running
from scenarios.checks import stopped_within
from worldmodel_ros.msg import DeadlineStatus

DEADLINE = 0.25            # s, of this system: processes on a CPU exchange more slowly than GPUs do
SPEED = 0.0                # m/s: weights that nobody has trained may want to go slowly
STOP = 0.150 + DEADLINE    # s, to the stop


def parameters(directory: Path) -> dict[str, dict]:
    """Write a checkpoint whose preset has tiles, and return the parameters of a system that divides it in two."""
    import torch
    from tiled_model import TILED, tiled_model

    from worldmodel_ros.model import checkpoint
    preset = replace(TILED, name='divided-faults', image_size=(64, 64), depth=2, window_frames=4, sink_slabs=0)
    torch.set_num_threads(1)
    checkpoint.save(tiled_model(preset), directory / 'divided', {'trained': False}, dtype=torch.float32)
    return {'world_model_node': {'model': str(directory / 'divided'), 'backend': 'torch', 'gpus': 2,
                                 'parallel': 'sequence', 'deadline_s': DEADLINE},
            'command_gate': {'deadline_s': DEADLINE, 'command_timeout_s': 0.13 + DEADLINE - 0.05},
            'sim_robot': {'deadline_s': DEADLINE, 'cmd_vel_timeout_s': 1.0}}


def _rank(running: Running) -> int:
    """Return the process of rank 1: the child of the model node that has most memory."""
    node = running.processes.pid(f'/{MODEL}')
    children = Path(f'/proc/{node}/task/{node}/children').read_text().split()
    for task in Path(f'/proc/{node}/task').iterdir():
        children += (task / 'children').read_text().split()
    assert children, 'the model node has no process beside it'

    def resident(pid: str) -> int:
        return int(Path(f'/proc/{pid}/statm').read_text().split()[1])
    return int(max(set(children), key=resident))


def _signal(number: int, rank: int) -> float:
    start = time.monotonic()
    os.kill(rank, number)
    return start


def _rank_fails(fail: Callable[[int], float], running: Running) -> Seen:
    """``fail`` ends a process, and returns when that was (steady, s)."""
    rig = running.rig
    right_after_a_command(rig, SPEED)
    rank = _rank(running)
    start = fail(rank)
    at = stopped_within(rig, start, STOP)
    told = rig.wait_for('deadline_status', lambda m: m.verdict == DeadlineStatus.INVALID and 'RankFailure' in m.reason,
                        'the lost process to be named', since=start).message.reason
    episode = rig.observer.newest('action_chunk').message.episode_id
    outcome = afterwards(rig, RESTART)
    assert rig.observer.newest('action_chunk').message.episode_id == episode, 'a new episode has begun'
    assert _rank(running) != rank, f'the same process as before, although: {told}'
    return Seen(outcome, at - start)


for _name in ('sigkill', 'sigterm', 'sigint', 'sigstop'):
    case(DIVIDED, RECOVERED, 'to the stop', STOP, name=f'rank_{_name}',
         what=f'{_name.upper()} to one of the two processes that a model is divided among')(
        partial(_rank_fails, partial(_signal, getattr(signal, _name.upper()))))
case(DIVIDED, RECOVERED, 'from its end to the stop', STOP, needs=cannot_limit, name='rank_out_of_memory',
     what='One of these two has no more memory (a control group\'s limit): the kernel ends it')(
    partial(_rank_fails, partial(starve, name='rank 1')))
