"""What holds for the command gate whatever a model sends, and whenever."""

import math

from gate_machine import GateMachine
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel_ros.safety.gate import Chunk, Gate, Policy, State
from worldmodel_ros.safety.motion import TwistLimits, VelocityMotion

NAMES = ('linear.x', 'angular.z')
LIMITS = TwistLimits(v_min=-0.3, v_max=0.6, w_max=1.5, a_max=1.5, alpha_max=6.0)
TICK = 0.01
ALLOWED = 0.044

SANE = st.floats(-2.0, 2.0)
ANY_VALUE = st.one_of(SANE, st.floats(width=32))
# Mostly what a working model sends, so that the gate is often driving when something goes wrong.
GOOD = {
    'pause': st.sampled_from([0.1, 0.1, 0.1, 0.09, 0.12, 0.01]), 'age': st.floats(0.0, 0.04),
    'episode': st.just(1), 'step': st.just(1), 'values': st.lists(SANE, min_size=2, max_size=2),
    'step_period': st.just(0.1), 'stop': st.just(False), 'clock_stands': st.just(False)}
BAD = {
    'pause': st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.15, 0.4, 1.5]),
    'age': st.floats(-0.1, 0.2),
    'episode': st.integers(0, 2), 'step': st.integers(-2, 3), 'values': st.lists(ANY_VALUE, max_size=6),
    'step_period': st.sampled_from([0.1, 0.0, math.nan]), 'stop': st.booleans(),
    'clock_stands': st.booleans()}
EVENT = st.one_of(
    st.fixed_dictionaries(GOOD), st.fixed_dictionaries(GOOD),
    # One thing wrong at a time gets further into the checks than everything at once.
    *(st.fixed_dictionaries({**GOOD, name: BAD[name]}) for name in BAD), st.fixed_dictionaries(BAD))
EVENTS = st.lists(EVENT, min_size=5, max_size=25)
POLICY = st.builds(
    Policy, on_timeout=st.sampled_from(['hold', 'slow', 'stop']), resume_after=st.integers(0, 4))


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def play(events, policy):
    """Drive a gate through the events; return it, [(time, command, chunk, age)], [(time, state, reason)]."""
    gate = Gate(NAMES, VelocityMotion(LIMITS.axes()), policy)
    now, ticked, ros, sequence = 10.0, 10.0, 10.0, 10
    sent, states = [], [(now, gate.state, gate.reason)]

    def note(command, chunk=None, age=0.0):
        if command:
            sent.append((now, command, chunk, age))
        if (gate.state, gate.reason) != states[-1][1:]:
            states.append((now, gate.state, gate.reason))

    for event in [*events, None]:
        until = now + (event['pause'] if event else 5.0)
        while ticked + TICK <= until:
            ticked += TICK
            now = ticked
            note(gate.on_tick(now))
        now = until
        if event:
            ros = ros if event['clock_stands'] else now
            sequence += event['step']
            age = event['age']
            stamp = int((ros - age) * 1e9)
            chunk = Chunk(stamp, event['episode'], max(sequence, 0), event['step_period'], NAMES,
                          event['values'], event['stop'])
            note(gate.on_chunk(chunk, stamp + round(age * 1e9), now), chunk, age)
    return gate, sent, states


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, policy=POLICY)
def test_nothing_passes_out_of_order_while_its_episode_drives(events, policy):
    _, sent, _ = play(events, policy)
    last = None
    for now, command, chunk, _ in sent:
        if not command.stamp:
            continue
        if last is not None and last[1].episode_id == chunk.episode_id and now - last[0] < policy.memory:
            assert chunk.sequence > last[1].sequence and chunk.stamp >= last[1].stamp
        last = now, chunk


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, policy=POLICY)
def test_the_robot_is_at_rest_in_bounded_time_after_the_last_command(events, policy):
    gate, sent, _ = play(events, policy)
    passed = [now for now, command, _, _ in sent if command.stamp]
    if not passed:
        return
    hold = policy.hold if policy.on_timeout == 'hold' else 0.0
    braking = 0.0 if policy.on_timeout == 'stop' else max(0.6 / 1.5, 1.5 / 6.0)
    bound = passed[-1] + policy.command_timeout + hold + braking + 3 * TICK
    assert gate.state is State.STOPPED
    assert [command.rows[0] for now, command, _, _ in sent if now >= bound][:1] in ([], [(0.0, 0.0)])
    at_rest = next(now for now, command, _, _ in sent if now > passed[-1] and command.rows[0] == (0.0, 0.0))
    assert at_rest <= bound + 1e-9


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, policy=POLICY)
def test_the_latched_reason_is_the_first(events, policy):
    gate, _, states = play(events, policy)
    driven = False
    expected = ''
    for _, state, reason in states:
        if driven and state is not State.PASSING:
            expected = reason
            break
        driven = driven or state is State.PASSING
    assert gate.first_reason == expected


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, policy=POLICY)
def test_every_chunk_is_counted_once_or_withheld_while_stopped(events, policy):
    counts = play(events, policy)[0].counts
    judged = counts.passed + counts.late + counts.invalid + counts.order + counts.shape
    assert judged <= len(events)
    assert counts.limited <= counts.passed
