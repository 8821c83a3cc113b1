"""
A hypothesis state machine: a command gate, its clocks, a robot, an honest model and any other publishers.

After every step it checks that what was sent is within the limits, changes no faster than the gate's own clock allows,
and answers a fresh observation; that a stop stops; that the watchdog is in time; and that nothing sent earlier
keeps a good model from driving.
"""

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from worldmodel_ros.safety.gate import MAX_ROWS, Chunk, Fault, Gate, Policy, Refusal, State
from worldmodel_ros.safety.motion import Limits, MeasuredPositions, PositionMotion, VelocityMotion

NS = 10**9
TICK = 0.02
PERIOD = 0.1
INTERVAL = 0.1
NEAR = 1e-6
NAMES = ('linear.x', 'angular.z')
LIMITS = Limits(low=(-0.3, -1.5), high=(0.6, 1.5), rate=(1.5, 6.0))
KINDS = ('velocity', 'position', 'trajectory')

NUMBER = st.one_of(
    st.sampled_from([0, 1, 2, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]), st.integers(0, 2**64 - 1))
VALUE = st.one_of(
    st.floats(-2.0, 2.0), st.floats(width=32),
    st.sampled_from([3.4028234663852886e38, -3.4028234663852886e38, 1.401298464324817e-45, -0.0]))
STEP_PERIOD = st.one_of(
    st.sampled_from([0.1, 0.01, 0.5, 0.009, 0.51, 3.0, 1000.0, 0.0, -0.1, math.nan, math.inf, 5e-324, 1e308]), st.floats())
AGE = st.one_of(  # ns, of the observation; the rest are stamps that no clock gives
    st.integers(-10_000_000, 60_000_000), st.sampled_from([0, -5_000_000, -4_999_999, 46_000_000, 46_000_001]),
    st.integers(-2**31 * NS, 2**31 * NS))
NAMES_OF_CHUNK = st.one_of(
    st.just(list(NAMES)), st.just(list(NAMES)), st.just([]), st.just(list(NAMES[::-1])),
    st.lists(st.text(max_size=8), max_size=4),
    st.just(['x'] * 1000))
FRACTION = st.floats(-1.0, 1.0)


class GateMachine(RuleBasedStateMachine):
    """Drives a gate of any kind of interface with good and hostile messages."""

    @initialize(kind=st.sampled_from(KINDS), on_timeout=st.sampled_from(['hold', 'slow', 'stop']),
                resume_after=st.integers(0, 3), episode=NUMBER)
    def begin(self, kind, on_timeout, resume_after, episode):
        self.kind = kind
        self.policy = Policy(on_timeout=on_timeout, resume_after=resume_after, stop_repeat=0.3, hold=0.1)
        if kind == 'velocity':
            motion = VelocityMotion(LIMITS, INTERVAL)
        else:
            motion = PositionMotion(
                LIMITS, MeasuredPositions(NAMES), whole_chunk=kind == 'trajectory', interval=INTERVAL)
        self.gate = Gate(NAMES, motion, self.policy)
        self.now, self.ros_ahead, self.stands = 1000.0, 600 * NS, None
        self.episode, self.sequence = episode, 0
        self.at = (0.0, 0.0)             # positions of the joints
        self.heard = None                # last joint states heard, and when
        self.measures, self.stuck = True, False
        self.row, self.sent_at = self.gate.motion.row, -math.inf  # in force
        self.plan = None                 # start, rows, step period and time of a trajectory
        self.passed_at = -math.inf
        self.measure()

    # Events in the world.

    @rule(seconds=st.sampled_from([0.02, 0.1, 0.1, 0.14, 0.3, 0.6]))
    def pause(self, seconds):
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            if self.kind != 'velocity':
                self.move()
                if self.measures:
                    self.measure()
            self.sends(self.gate.on_tick(self.now))
            if self.kind != 'velocity' and self.gate.state is State.STOPPED and not self.gate.repeats_stop(self.now):
                self.row = None  # the joints are left to others
            if self.gate.state is State.PASSING:
                assert self.now - self.passed_at < self.policy.command_timeout + NEAR, 'the watchdog was late'

    @rule(seconds=st.floats(0.0, 2.0))
    def stall(self, seconds):
        """Advance time without running the gate."""
        self.now += seconds

    @rule(ahead=st.one_of(st.integers(-3600 * NS, 3600 * NS), st.just(0), st.integers(-50_000_000, 50_000_000)))
    def ros_time_jumps(self, ahead):
        self.ros_ahead = max(self.ros_ahead + ahead, NS)

    @rule()
    def ros_time_stands_still(self):
        self.stands = self.ros_now()

    @rule()
    def ros_time_goes_on(self):
        self.ros_ahead, self.stands = self.ros_now() - round(self.now * NS), None

    @precondition(lambda self: self.kind != 'velocity')
    @rule(to=st.tuples(FRACTION, FRACTION))
    def others_move_the_joints(self, to):
        self.at, self.plan = tuple(fraction * 4.0 for fraction in to), None

    @precondition(lambda self: self.kind != 'velocity')
    @rule(measures=st.booleans())
    def joint_states_come_or_cease(self, measures):
        self.measures = measures

    @precondition(lambda self: self.kind != 'velocity')
    @rule(stuck=st.booleans())
    def something_holds_the_joints(self, stuck):
        self.stuck = stuck

    @precondition(lambda self: self.kind != 'velocity')
    @rule(names=NAMES_OF_CHUNK, positions=st.lists(VALUE, max_size=4))
    def hostile_joint_states(self, names, positions):
        self.hear(names, positions)

    # Published messages.

    @rule(count=st.integers(1, 5), v=FRACTION, w=FRACTION, step_period=st.sampled_from([0.1, 0.01, 0.5]))
    def good_model(self, count, v, w, step_period):
        for _ in range(count):
            self.offer(self.good(v, w, step_period))
            self.pause(PERIOD)

    @rule(episode=NUMBER)
    def model_starts_again(self, episode):
        self.episode, self.sequence = episode, 0

    @rule(age=AGE, episode=NUMBER, sequence=NUMBER, step_period=STEP_PERIOD, names=NAMES_OF_CHUNK,
          values=st.lists(VALUE, max_size=8), rows=st.sampled_from([1, 1, 1, MAX_ROWS]))
    def hostile_chunk(self, age, episode, sequence, step_period, names, values, rows):
        self.offer(Chunk(self.ros_now() - age, episode, sequence, step_period, names, values * rows))

    @rule(change=st.sampled_from(['stamp', 'episode_id', 'sequence', 'step_period', 'values', 'names']),
          age=AGE, number=NUMBER, step_period=STEP_PERIOD, names=NAMES_OF_CHUNK, values=st.lists(VALUE, min_size=2, max_size=2))
    def good_chunk_with_one_field_changed(self, change, age, number, step_period, names, values):
        """Gets further into the checks than a chunk with everything wrong."""
        good = self.good(1.0, 1.0)
        fields = {name: getattr(good, name) for name in good.__slots__}
        fields[change] = {'stamp': self.ros_now() - age, 'episode_id': number, 'sequence': number,
                          'step_period': step_period, 'values': values, 'names': names}[change]
        self.offer(Chunk(**fields))

    @rule(age=AGE, episode=NUMBER, sequence=NUMBER, step_period=STEP_PERIOD, names=NAMES_OF_CHUNK,
          values=st.lists(VALUE, max_size=4))
    def stop(self, age, episode, sequence, step_period, names, values):
        before = self.gate.state
        at = self.now
        command = self.gate.on_chunk(
            Chunk(self.ros_now() - age, episode, sequence, step_period, names, values, True), self.ros_now(), self.now)
        self.sends(command)
        assert self.gate.state is not State.PASSING
        if before in (State.PASSING, State.HOLDING):
            assert (command is not None) == (self.policy.on_timeout == 'stop')
            # At rest in bounded time, with nothing else to move the robot.
            while self.gate.state is not State.STOPPED:
                self.pause(TICK)
                assert self.now - at <= 1.5 / 1.5 + 3 * TICK
            if self.kind == 'velocity':
                assert self.row == (0.0, 0.0)

    @rule()
    def bytes_that_are_no_chunk(self):
        self.gate.refuse(Refusal(Fault.SHAPE, 'no chunk'))

    @rule()
    def reset(self):
        self.gate.reset()

    @rule(same_episode=st.booleans(), stranger=st.booleans())
    def recovers(self, same_episode, stranger):
        """
        Whatever happened to the gate, a good model drives again, without a reset, in bounded time.

        ``stranger``: another publisher goes on to send messages that are refused.
        """
        self.ros_time_goes_on()
        self.measures, self.stuck = True, False
        self.at = tuple(min(max(at, low), high) for at, low, high in zip(self.at, LIMITS.low, LIMITS.high))
        if not same_episode:
            self.episode, self.sequence = (self.episode + 12345) % 2**64, 0
        policy = self.policy
        if policy.resume_after == 0:
            self.gate.reset()
        # Sum of the order, of a command that the joints did not follow, and of the debounce.
        bound = (policy.memory + policy.command_timeout + policy.hold + 1.0 + policy.stop_repeat
                 + PERIOD * (policy.resume_after + 3))
        end = self.now + bound
        while True:
            self.pause(PERIOD)
            if stranger:
                self.bytes_that_are_no_chunk()
                self.offer(Chunk(self.ros_now(), self.episode ^ 1, 1, PERIOD, list(NAMES), [math.nan, 0.0]))
            passed = self.gate.counts.passed
            self.offer(self.good(0.1, 0.1))
            if self.gate.counts.passed > passed:
                return
            if policy.resume_after == 0:
                self.gate.reset()
            assert self.now < end, f'blocked: {self.gate.last_refusal}'

    # Helpers.

    def teardown(self):
        if hasattr(self, 'gate'):
            self.recovers(same_episode=False, stranger=False)

    def ros_now(self) -> int:
        return round(self.now * NS) + self.ros_ahead if self.stands is None else self.stands

    def good(self, v, w, step_period=PERIOD) -> Chunk:
        self.sequence += 1
        rows = [(v, w)] * 4
        if self.kind != 'velocity':
            rows = [(self.at[0] + 0.2 * v * k, self.at[1] + 0.2 * w * k) for k in range(1, 5)]
        return Chunk(self.ros_now() - 20_000_000, self.episode, self.sequence, step_period, list(NAMES),
                     [x for row in rows for x in row])

    def offer(self, chunk: Chunk) -> None:
        counts = self.gate.counts
        before = counts.passed
        command = self.gate.on_chunk(chunk, self.ros_now(), self.now)
        assert (command is not None) == (counts.passed > before)
        if command is None:
            return
        age = (self.ros_now() - chunk.stamp) * 1e-9
        assert -self.policy.future_tolerance - NEAR <= age <= 0.044 + NEAR and command.stamp == chunk.stamp > 0
        assert list(chunk.names) == list(NAMES) and all(map(math.isfinite, chunk.values))
        assert 0.01 <= chunk.step_period <= 0.5
        self.passed_at = self.now
        self.sends(command)

    def sends(self, command) -> None:
        if command is None:
            return
        for row in command.rows:
            assert all(low <= value <= high for value, low, high in zip(row, LIMITS.low, LIMITS.high)), row
        getattr(self, f'sends_{self.kind}')(command)
        if command.stamp or command.rows[0] != self.row:  # a repeated stop is the same command, still in force
            self.row, self.sent_at = command.rows[0], self.now

    def sends_velocity(self, command) -> None:
        (row,) = command.rows
        if command.stamp == 0 and row == (0.0, 0.0):
            return  # a stop, which may be immediate
        self.is_within(row, self.row, min(self.now - self.sent_at, INTERVAL))

    def sends_position(self, command) -> None:
        (row,) = command.rows
        if command.stamp == 0:
            assert row == self.row, 'a stop is to stay where it is'
        elif self.row is not None:
            self.is_within(row, self.row, min(self.now - self.sent_at, INTERVAL))
        else:
            self.is_within(row, self.known(), INTERVAL)
        self.plan = row, (row,), PERIOD, self.now

    def sends_trajectory(self, command) -> None:
        if command.stamp:
            self.is_within(command.rows[0], self.known(), command.step_period)
        for row, before in zip(command.rows[1:], command.rows):
            self.is_within(row, before, command.step_period)
        self.plan = self.at, command.rows, command.step_period, self.now

    def known(self):
        assert self.heard and all(self.now - self.heard[name][1] <= 0.2 + NEAR for name in NAMES), 'its position was unknown'
        return tuple(self.heard[name][0] for name in NAMES)

    @staticmethod
    def is_within(row, before, seconds) -> None:
        for value, other, rate in zip(row, before, LIMITS.rate):
            assert abs(value - other) <= rate * seconds + NEAR, f'{row} after {before} in {seconds} s'

    def measure(self) -> None:
        if self.kind != 'velocity':
            self.hear(NAMES, self.at)

    def hear(self, names, positions) -> None:
        if self.gate.motion.joints.hear(names, positions, self.now) == '' and positions:
            self.heard = {**(self.heard or {}), **{name: (at, self.now) for name, at in zip(names, positions)}}

    def move(self) -> None:
        """Move the joints along the plan, unless something holds them."""
        if self.plan is None or self.stuck:
            return
        start, rows, step, begun = self.plan
        steps = (self.now - begun) / step
        index = min(int(steps), len(rows) - 1)
        share = min(steps - index, 1.0)
        before = start if index == 0 else rows[index - 1]
        self.at = tuple(a + (b - a) * share for a, b in zip(before, rows[index]))
