"""Two robots in two namespaces: neither hears the other's nodes."""

import time

from scenarios.checks import always_holds, comes_to_rest, stays_stopped, stopped_after_last_command
from scenarios.rig import MODEL, ROBOT, Rig, answers, nanoseconds, stands


def a_goal_moves_one_robot_only(rig: Rig, other: Rig) -> None:
    for one, two in ((rig, other), (other, rig)):
        two.set_goal('')
        comes_to_rest(two)
        start = time.monotonic()
        one.drive()
        one.watch(2.0)
        stays_stopped(two, start)
        with always_holds():
            assert not [r for r in two.observer.since('action_chunk', start) if r.message.values]
        assert two.observer.since('camera/image_raw', start), 'the other robot sees nothing'


def a_fault_of_one_robot_leaves_the_other_alone(rig: Rig, other: Rig) -> None:
    other.drive()
    rig.drive()
    start = time.monotonic()
    rig.set(ROBOT, camera_stop=True)
    rig.set(MODEL, fault_nan=True)
    stop = stopped_after_last_command(rig, start)
    rig.watch(2.0)
    stays_stopped(rig, stop)
    commands = [r.message for r in other.observer.since('cmd_vel', start)]
    assert sum(answers(c) for c in commands) >= 15, (
        f'the other robot was driven by {len(commands)} commands in 2 s'
    )


def each_robot_executes_its_own_commands(rig: Rig, other: Rig) -> None:
    for one in (rig, other):
        one.drive()
    start = rig.watch(2.0)
    for one, two in ((rig, other), (other, rig)):
        mine = {
            nanoseconds(r.message.header.stamp) for r in one.observer.since('camera/image_raw', start - 1.0)
        }
        commands = [r for r in one.observer.since('cmd_vel', start) if not stands(r.message)]
        assert commands
        with always_holds():
            assert {nanoseconds(r.message.header.stamp) for r in commands if answers(r.message)} <= mine
        assert (
            not {
                nanoseconds(r.message.header.stamp)
                for r in two.observer.since('camera/image_raw', start - 1.0)
            }
            & mine
        )
