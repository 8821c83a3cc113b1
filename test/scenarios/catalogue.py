"""Which scenarios there are, and the system that each of them needs."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenarios import camera, clock, driving, fleet, lifecycle, model, server, speed, strangers
from scenarios.checks import Invariants
from scenarios.rig import GATE, MODEL, NODES, START_TIMEOUT, Rig
from scenarios.stalls import InvariantViolation, watching

SEED = 2_000_000  # of the first room; the model was trained in those below 1000000

# What a scenario is expected to kill, by the end of which the node is there again.
KILLS = {
    model.model_is_killed: (MODEL,),
    model.gate_is_killed: (GATE,),
    server.the_server_is_killed: (server.SERVER,),
}
# What wants predictions in time, and so a budget that goes with the measured tick. All others run as configured.
SCALED = {
    driving.reaches_a_goal_at_ten_commands_a_second,
    driving.every_command_answers_an_observation_and_has_its_future,
    driving.what_if_questions_do_not_make_a_tick_late,
    driving.without_a_goal_nothing_is_commanded,
    model.model_is_slow,
    server.both_drive_by_one_server,
    server.the_server_answers_questions_and_keeps_sessions,
    server.the_server_is_killed,
    server.the_server_hangs,
}
# What asks what-if questions, which are answered in the time that ticks leave over.
ASKS = {
    driving.what_if_questions_do_not_make_a_tick_late,
    server.the_server_answers_questions_and_keeps_sessions,
}
OTHERS = 0.25  # of the cores, that other programs may take where a system needs all of them
PARAMETERS = Path(__file__).with_name('parameters.yaml')
# The longest path of a socket is short, and no other run of the tests has this one.
SOCKET = f'{os.environ.get("ROS_HOME", "/tmp")}/engine.sock'


@dataclass(frozen=True)
class System:
    """
    One or several simulated robots, and what is tried on them, in this order.

    ``arguments`` are those of the launch file, and of the description that it reads. A system of several
    robots has a namespace for each; its scenarios take as many rigs. ``shared``: processes that serve all of them.
    ``slowest_tick``: where a tick of the shipped model takes longer [s], the machine has not got the cores for all that;
    nor where other programs take more than OTHERS of them.
    """

    name: str
    launch_file: str
    scenarios: Sequence[Callable[..., None]]
    arguments: Mapping[str, str] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ('',)
    shared: tuple[str, ...] = ()
    slowest_tick: float = math.inf

    @property
    def needs_all_cores(self) -> bool:
        """Return whether what other programs take of the cores decides whether it can be played."""
        return self.slowest_tick < math.inf

    def lacks(self) -> str:
        """Return what the machine lacks to play it, by the speed that was measured before anything runs; '' if nothing."""
        now = speed.measured()
        if now.tick_s > self.slowest_tick:
            return (f'{self.name} needs a machine on which a tick of the shipped model takes at most '
                    f'{self.slowest_tick * 1e3:.0f} ms; here it takes {now.tick_s * 1e3:.0f}')
        if now.busy > OTHERS and self.needs_all_cores:
            return (f'{self.name} needs all cores, of which other programs may take {OTHERS:.0%} before it starts; '
                    f'here they take {now.busy:.0%}')
        return ''

    def nodes(self) -> list[str]:
        """Return the full names of all nodes, and of the processes that they share."""
        own = [f'/{namespace}/{node}'.replace('//', '/') for namespace in self.namespaces for node in NODES]
        return [*self.shared, *own]

    def kills(self, scenarios: Sequence[Callable[..., None]]) -> dict[str, int]:
        """Return how often the scenarios kill each node, by its full name."""
        kills: dict[str, int] = {}
        for scenario in scenarios:
            for node in KILLS.get(scenario, ()):
                name = node if node in self.shared else f'/{self.namespaces[0]}/{node}'.replace('//', '/')
                kills[name] = kills.get(name, 0) + 1
        return kills


SYSTEMS = (
    System(
        'one_robot',
        'sim_demo.launch.py',
        (
            driving.reaches_a_goal_at_ten_commands_a_second,
            driving.every_command_answers_an_observation_and_has_its_future,
            driving.what_if_questions_do_not_make_a_tick_late,
            driving.without_a_goal_nothing_is_commanded,
            driving.other_processes_take_both_cores,
            camera.camera_stops,
            camera.camera_freezes,
            camera.images_are_broken,
            camera.stamps_are_of_another_time,
            camera.camera_is_faster_than_the_model,
            model.model_gives_nan,
            model.model_raises,
            strangers.garbage_on_every_topic,
            strangers.garbage_in_requests,
            strangers.broken_compressed_images,
            lifecycle.lifecycle_cycles,
            model.model_is_slow,
            model.gate_is_killed,
            model.model_is_killed,
        ),
        {'seed': str(SEED)},
    ),
    System(
        'simulated_time',
        'sim_demo.launch.py',
        (clock.clock_stops, clock.time_jumps_back, clock.time_jumps_ahead),
        {'seed': str(SEED), 'use_sim_time': 'true'},
    ),
    System(
        'two_robots',
        'multi_robot.launch.py',
        (
            fleet.a_goal_moves_one_robot_only,
            fleet.each_robot_executes_its_own_commands,
            fleet.a_fault_of_one_robot_leaves_the_other_alone,
        ),
        {'seed': str(SEED)},
        ('robot1', 'robot2'),
    ),
    System(
        'two_robots_one_server',
        'multi_robot.launch.py',
        (
            server.both_drive_by_one_server,
            server.the_server_answers_questions_and_keeps_sessions,
            server.the_server_is_killed,
            server.the_server_hangs,
        ),
        {'seed': str(SEED), 'server': SOCKET},
        ('robot1', 'robot2'),
        (server.SERVER,),
        # Two robots, their own models, which stand by and are tried, and the server: of two cores that leaves nothing over.
        slowest_tick=speed.USUAL_TICK,
    ),
)


def wait_until_up(rigs: Sequence[Rig]) -> None:
    """Wait until all nodes of the robots are heard, and the models are active."""
    for rig in rigs:
        rig.wait(
            lambda rig=rig: all(
                rig.observer.newest(topic)
                for topic in ('camera/image_raw', 'command_status', 'deadline_status')
            ),
            'all nodes to be heard',
            START_TIMEOUT,
        )


def play(scenario: Callable[..., None], rigs: Sequence[Rig]) -> None:
    """
    Play a scenario, undo what it has set, and check what must hold in each of them.

    What must hold is checked also where the scenario has failed. Raises ``InvariantViolation``, which is final, if
    anything of that was violated, whatever else failed; and what the scenario failed by otherwise.
    """
    watching()
    if scenario in SCALED:
        budget = speed.budget(len(rigs), scenario in ASKS, max(rig.expected_tick() for rig in rigs))
        for rig in rigs:
            rig.give(budget)
    invariants = [Invariants(rig) for rig in rigs]
    failures: list[Exception] = []

    def attempt(step: Callable[..., None], *arguments: Any) -> None:
        try:
            step(*arguments)
        except Exception as error:
            failures.append(error)

    attempt(scenario, *rigs)
    for rig in rigs:
        attempt(rig.restore)
    for rig, invariant in zip(rigs, invariants):
        attempt(invariant.check, KILLS.get(scenario, ()))
    raise_worst(failures)


def raise_worst(failures: Sequence[Exception]) -> None:
    """Raise a violated invariant, if there is one, that names all of the failures; else the first failure, if any."""
    violations = [error for error in failures if isinstance(error, InvariantViolation)]
    if violations and len(failures) > 1:
        others = [error for error in failures if error not in violations]
        raise InvariantViolation('; '.join(map(str, [*violations, *others]))) from failures[0]
    if failures:
        raise (violations or failures)[0]
