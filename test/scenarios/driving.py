"""Driving as it should be: to the goal, at the model's rate, while questions are answered."""

import time

from builtin_interfaces.msg import Duration

from scenarios.checks import always_holds, drives_on, stays_stopped
from scenarios.rig import MODEL, PATIENCE, Rig, answers, has_verdict, nanoseconds, stands
from scenarios.speed import question_time
from worldmodel_ros.demo.load import CpuLoad
from worldmodel_ros.msg import ActionChunk, DeadlineStatus
from worldmodel_ros.sim.scene import GOAL_DISTANCE
from worldmodel_ros.srv import WhatIf

ROOMS = 4  # to reach a goal in one of; how often it is reached is for the model's evaluation to say
TIME_IN_A_ROOM = 15.0  # s
RECOVERY = 5.0  # s
MODEL_TIERS = (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_ONE_STEP)


def reaches_a_goal_at_ten_commands_a_second(rig: Rig) -> None:
    for _ in range(ROOMS):
        start = rig.drive()
        while time.monotonic() - start < TIME_IN_A_ROOM and rig.distance_to('red') >= GOAL_DISTANCE:
            time.sleep(0.05)
        if rig.distance_to('red') < GOAL_DISTANCE:
            break
    else:
        raise AssertionError(
            f'a goal was reached in none of {ROOMS} rooms within {TIME_IN_A_ROOM:.0f} s each'
        )
    commands = [r for r in rig.observer.since('cmd_vel', start) if answers(r.message)]
    rate = (len(commands) - 1) / (commands[-1].at - commands[0].at)
    assert 0.8 <= rate * rig.budget.period <= 1.05, f'{rate:.1f} commands a second'
    ticks = [r.message.tier for r in rig.observer.since('deadline_status', start)]
    share = sum(tier in MODEL_TIERS for tier in ticks) / len(ticks)
    assert share >= 0.5, f'only {share:.0%} of the ticks were answered by the model itself'


def every_command_answers_an_observation_and_has_its_future(rig: Rig) -> None:
    start = rig.drive()
    rig.watch(2.0)
    images = {
        nanoseconds(r.message.header.stamp) for r in rig.observer.since('camera/image_raw', start - 2.0)
    }
    commands = [r.message for r in rig.observer.since('cmd_vel', start) if answers(r.message)]
    chunks = [r.message for r in rig.observer.since('action_chunk', start)]
    assert {nanoseconds(c.header.stamp) for c in commands} <= images & {
        nanoseconds(c.header.stamp) for c in chunks
    }
    numbers = [(c.episode_id, c.sequence) for c in chunks]
    assert numbers == sorted(set(numbers)), 'chunks are not in order'
    for future in (r.message for r in rig.observer.since('predicted_future', start)):
        assert nanoseconds(future.header.stamp) in images
        assert len(future.frames) == len(future.collision_risk) == len(future.actions.values) // 2
        for k, frame in enumerate(future.frames):
            ahead = nanoseconds(frame.header.stamp) - nanoseconds(future.header.stamp)
            assert abs(ahead - (k + 1) * future.step_period * 1e9) < 1e3
    futures = len(rig.observer.since('predicted_future', start))
    assert futures >= len(commands) // 2, f'{futures} predicted futures for {len(commands)} commands'


def what_if_questions_do_not_make_a_tick_late(rig: Rig) -> None:
    rig.drive()
    start = time.monotonic()
    seconds = question_time(rig.budget.tick)
    request = WhatIf.Request(names=['forward', 'left', 'right', 'stop'], deadline=Duration(sec=seconds))
    for _ in range(3):
        answer = rig.call(WhatIf, f'{MODEL}/what_if', request, PATIENCE + seconds, attempt=2.0 + seconds)
        assert answer.success and not answer.deadline_exceeded, answer.message
        assert [branch.name for branch in answer.branches] == request.names
        assert all(
            branch.frames and len(branch.frames) == len(branch.collision_risk) for branch in answer.branches
        )
    ticks = [r.message for r in rig.observer.since('deadline_status', start)]
    late = sum(tick.verdict == DeadlineStatus.LATE for tick in ticks)
    assert late <= 0.05 * len(ticks) + 1, (
        f'{late} of {len(ticks)} ticks were late while questions were answered'
    )
    commands = [r.message for r in rig.observer.since('cmd_vel', start)]
    assert sum(answers(c) for c in commands) >= 0.8 * len(commands), 'the robot was stopped for the questions'


def other_processes_take_both_cores(rig: Rig) -> None:
    rig.drive()
    with CpuLoad():
        start = rig.watch(5.0)
    ticks = rig.observer.since('deadline_status', start)
    assert len(ticks) >= 10, f'{len(ticks)} ticks in 5 s'
    # How well the robot is driven meanwhile is the scheduler's affair. That no command is late is checked of
    # every scenario.
    drives_on(rig, RECOVERY)


def without_a_goal_nothing_is_commanded(rig: Rig) -> None:
    rig.drive()
    start = time.monotonic()
    rig.set_goal('')
    with always_holds():
        rig.wait_for('deadline_status', has_verdict(DeadlineStatus.IDLE), 'a tick without a goal', 0.5, since=start)
        # On a slow machine it may have been told so before, and is not told again.
        rig.wait(lambda: stands(rig.observer.newest('cmd_vel').message), 'a stop', 0.5)
    stop = time.monotonic()

    def ticks() -> list[DeadlineStatus]:
        return [r.message for r in rig.observer.since('deadline_status', stop + 0.2)]

    rig.watch(1.0)
    rig.wait(
        lambda: sum(tick.verdict == DeadlineStatus.IDLE for tick in ticks()) >= 5, 'five ticks without a goal'
    )
    stays_stopped(rig, stop)
    # Where the machine itself pauses for longer than camera_timeout_s, that is said instead.
    others = [
        tick
        for tick in ticks()
        if tick.tier != ActionChunk.TIER_NONE
        or tick.verdict not in (DeadlineStatus.IDLE, DeadlineStatus.STALE_INPUT)
    ]
    assert not others, f'not idle without a goal: {others}'
    rig.wait_for('predicted_future', lambda future: True, 'the model to go on looking', since=stop)
