"""The command gate trusts no field of a message: a real process, and real messages from a hostile or broken publisher."""

import math
import os
import select
import signal
import subprocess
import sys
import time
from array import array

import pytest
from command_gate_rig import DEADLINE, ROOT, Rig, as_time, gate_process, wait_for
from dds import without_shared_memory
from rclpy.serialization import serialize_message
from scenarios.checks import STOP_LATENCY, STOP_RESERVE
from scenarios.stalls import past, watching
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from worldmodel_ros.msg import ActionChunk, CommandStatus

pytestmark = [pytest.mark.ros, pytest.mark.waiting]
HIGHEST = 2**64 - 1
ARM = ('-p', "joint_names:=['a', 'b']", '-p', 'joint_low:=[-4.0, -4.0]', '-p', 'joint_high:=[4.0, 4.0]',
       '-p', 'joint_rate:=[1.0, 1.0]', '-p', 'interface:=position')

# Publishes 10 MB of names, serialised once, for so many seconds as fast as it can; says when it begins.
FLOOD = '''
import sys, time
import rclpy
from rclpy.serialization import serialize_message
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.common.qos import COMMAND
rclpy.init()
node = rclpy.create_node('flood')
publisher = node.create_publisher(ActionChunk, 'action_chunk', COMMAND)
data = serialize_message(ActionChunk(names=['x'] * 1_250_000))
assert len(data) >= 10_000_000
while not publisher.get_subscription_count():
    time.sleep(0.01)
print('begins', flush=True)
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    publisher.publish(data)
    count += 1
print(count, flush=True)
'''


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def gate(rig):
    with gate_process(rig) as process:
        yield process


def speeds(rig) -> list:
    return [(command.twist.linear.x, command.twist.angular.z) for _, command in rig.commands]


def goes_on(rig) -> None:
    """Send good chunks at 10 Hz; they must pass without a reset."""
    passed = rig.status.passed
    wait_for(lambda: (rig.send(), time.sleep(0.1), rig.passing and rig.status.passed >= passed + 3)[-1],
             'commands to pass again')


def test_a_step_period_of_1000_gives_no_full_speed(rig, gate):
    rig.send(0.6, 1.5, step_period=1000.0)
    rig.wait_for_refusal('step_period is 1000 s, 0.01 to 0.5 s are admitted')
    assert not rig.commands
    rig.send(0.6, 1.5, step_period=0.5)
    wait_for(lambda: rig.commands, 'a command')
    assert speeds(rig)[0] == pytest.approx((0.15, 0.6))
    for period in (math.nan, math.inf, -0.1, 1e-320):
        before = rig.status.refused_invalid
        rig.send(step_period=period)
        wait_for(lambda before=before: rig.status.refused_invalid > before, f'the refusal of {period}')


def test_a_long_pause_gives_no_full_speed(rig):
    with gate_process(rig, '-p', 'command_timeout_s:=5.0'):
        rig.drive(1, v=0.0)
        time.sleep(1.0)
        rig.send(0.6, 1.5)
        wait_for(lambda: any(v for v, _ in speeds(rig)), 'a command that moves')
    assert next(speed for speed in speeds(rig) if any(speed)) == pytest.approx((0.15, 0.6))


@pytest.mark.parametrize(
    'identity', [{'episode_id': HIGHEST}, {'sequence': HIGHEST}, {'episode_id': HIGHEST, 'sequence': HIGHEST}])
@pytest.mark.parametrize('stop', [True, False])
def test_the_highest_identity_blocks_nothing_that_comes_later(rig, identity, stop):
    # The time-out is so long that nothing else stops the robot, on a machine that stands still for a while either; a command of
    # the highest identity, which blocks others until it has timed out, is not waited for as long.
    with gate_process(rig, '-p', f'command_timeout_s:={5.0 if stop else 1.0}'):
        rig.drive(3, v=0.3)
        stops = rig.status.stops
        fields = {'tier': ActionChunk.TIER_STOP, 'names': [], 'values': []} if stop else {}
        rig.send(**{**identity, **fields})
        if stop:
            wait_for(lambda: rig.status.stops > stops, 'the stop')
            assert speeds(rig)[-1] == (0.0, 0.0)
        goes_on(rig)


@pytest.mark.parametrize('changes', [
    {'episode_id': 0}, {'sequence': 0}, {'step_period': math.nan}, {'age': -1e9}, {'age': 100.0},
    {'header': ActionChunk().header}])
def test_a_stop_stops_whatever_its_other_fields_hold(rig, changes):
    with gate_process(rig, '-p', 'command_timeout_s:=5.0'):  # as above
        rig.drive(2, v=0.3)
        rig.send(0.3)
        stops = rig.status.stops
        rig.send(tier=ActionChunk.TIER_STOP, **changes)
        wait_for(lambda: rig.status.stops > stops, 'the stop')
        assert 'model asked to stop' in rig.status.reason
        goes_on(rig)


def test_a_model_that_starts_again_after_the_clock_was_set_back_drives_without_a_reset(rig, gate):
    rig.episode_id = time.time_ns()
    rig.drive(3)
    wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop after the model died')
    rig.episode_id, rig.sequence = rig.episode_id - 3600 * 10**9, 0
    goes_on(rig)
    assert rig.status.episode_id == rig.episode_id


def test_episodes_of_two_processes_differ_though_the_wall_clock_says_the_same():
    code = ('import time\n'
            'time.time_ns = lambda: 1_700_000_000 * 10**9\n'
            'time.time = lambda: 1.7e9\n'
            'from worldmodel_ros.nodes.world_model.inputs import Intake\n'
            'from types import SimpleNamespace\n'
            'spec = SimpleNamespace(step_period=0.1, image_size=(8, 8))\n'
            'print(*(Intake(spec, None, None, None, None, None, None).episode for _ in range(3)))\n')
    first, second = (
        [int(word) for word in subprocess.run(
            [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()] for _ in range(2))
    assert not set(first) & set(second)
    assert first == sorted(set(first)) and max(first + second) < 2**53


def joint_rig(output: str):
    return Rig(JointTrajectory, 'joint_trajectory') if output == 'joint_trajectory' else Rig(Float64MultiArray, 'commands')


@pytest.mark.parametrize('output', ['joint_trajectory', 'float64_multi_array'])
def test_no_joint_is_sent_to_a_far_target_at_once_nor_from_an_unknown_position(output):
    rig = joint_rig(output)

    def first_point():
        command = rig.commands[-1][1]
        return command.points[0].positions[0] if output == 'joint_trajectory' else command.data[0]

    try:
        with gate_process(rig, '-p', f'output:={output}', *ARM):
            rig.send(names=['a', 'b'], values=[3.0, 0.0])
            rig.wait_for_refusal('the position of a never was on joint_states')
            rig.measured = {'a': 0.25, 'b': 0.0}
            time.sleep(0.2)
            rig.send(names=['a', 'b'], values=[3.0, 0.0], step_period=3.0)
            rig.wait_for_refusal('step_period is 3 s')
            assert not rig.commands
            rig.send(names=['a', 'b'], values=[3.0, 0.0])
            wait_for(lambda: rig.commands, 'a command')
            assert first_point() == pytest.approx(0.35)
            # Others move the arm while the gate is silent.
            wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
            rig.measured = {'a': -2.0, 'b': 0.0}
            time.sleep(1.5)
            count = len(rig.commands)
            wait_for(lambda: (rig.send(names=['a', 'b'], values=[3.0, 0.0]), time.sleep(0.1), len(rig.commands) > count)[-1],
                     'a command after the stop')
            assert first_point() == pytest.approx(-1.9, abs=1e-3)
    finally:
        rig.close()


def test_a_tier_that_nobody_knows_is_refused_by_name(rig, gate):
    rig.send(tier=200)
    rig.wait_for_refusal('tier is 200, known are 0 (TIER_NONE)')
    assert not rig.commands
    goes_on(rig)


def test_a_stamp_of_too_many_nanoseconds_or_before_1970_is_refused(rig, gate):
    header = ActionChunk().header
    header.stamp = as_time(time.time() - 2.0)
    header.stamp.nanosec += 2 * 10**9
    rig.send(header=header)
    rig.wait_for_refusal('header.stamp.nanosec is')
    header.stamp.sec, header.stamp.nanosec = -2**31, 0
    rig.send(header=header)
    rig.wait_for_refusal('header.stamp is -2.14748e+09 s')
    assert not rig.commands


def test_bytes_that_are_no_chunk_are_counted_and_end_nothing(rig, gate):
    rig.drive(1)
    good = serialize_message(rig.send())
    # Not a whole header, a length that is not there, names that are no text, and too long for the two axes.
    broken = [good[:4], good[:60], good[:64] + b'\xff\xff\xff\xff' + good[68:], good[:4] + b'\xff' * 200,
              serialize_message(rig.send(values=array('f', bytes(4 * 100_000))))]
    # By its length, before it is deserialised: that takes the watchdog's time.
    rig.wait_for_refusal('are the most that is read')
    wait_for(lambda: rig.status.refused_shape == 1, 'the count of that refusal')
    for number, data in enumerate(broken, start=2):
        rig.chunks.publish(data)
        wait_for(lambda number=number: rig.status.refused_shape == number, f'the refusal of {data[:80]}')
    assert gate.poll() is None
    goes_on(rig)


@pytest.mark.realtime  # the flood takes a core
def test_a_flood_of_10_mb_chunks_does_not_keep_the_watchdog_from_stopping_in_time(rig, gate):
    watching()
    rig.drive(3, v=0.3)
    flood = subprocess.Popen([sys.executable, '-c', FLOOD, '2.0'], cwd=ROOT, env=without_shared_memory(),
                             stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (rig.send(0.3), time.sleep(0.05), _begun(flood))[-1], 'the flood')
        rig.send(0.3)
        refused, statuses = rig.status.refused_shape, len(rig.statuses)
        assert flood.wait(DEADLINE) == 0
        wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
    finally:
        flood.kill()
        flood.wait()
    passed = max(at for at, command in rig.commands if command.header.stamp.sec)
    stop = next(at for (at, _), speed in zip(rig.commands, speeds(rig)) if at > passed and not any(speed))
    late = past(passed, stop, STOP_LATENCY, STOP_RESERVE)
    assert late <= 0.0, f'told to stop {(stop - passed) * 1e3:.0f} ms after the last command'
    assert len(rig.statuses) - statuses > 10, 'the status has fallen silent'
    assert rig.status.refused_shape > refused
    goes_on(rig)
    with open(f'/proc/{gate.pid}/status') as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))
    assert peak < 500_000, f'the gate has taken {peak / 1024:.0f} MiB'


def _begun(process) -> bool:
    return bool(select.select([process.stdout], [], [], 0.0)[0])


def test_the_robot_is_stopped_and_driven_again_while_nobody_reads_the_gates_output(rig):
    """As of a launcher that hangs: a line that the gate logs must not wait for it."""
    with gate_process(rig) as process:
        rig.drive(1)
        for stream in (1, 2):
            fill(f'/proc/{process.pid}/fd/{stream}')
        for _ in range(2):
            passed = rig.status.passed
            rig.drive(2, v=0.3)
            rig.send(values=[math.nan, 0.0])  # which is logged
            wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
            assert rig.status.passed > passed
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: rig.statuses[-1][1].first_reason and rig.commands[-1][1].twist.linear.x == 0.0, 'the farewell')


def fill(pipe: str) -> None:
    """Fill a pipe, and those that a process hands its contents on to, until nothing more goes in for a while."""
    descriptor, end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), time.monotonic() + 0.5
    try:
        while time.monotonic() < end:
            try:
                os.write(descriptor, b'.' * 65536)
                end = time.monotonic() + 0.5
            except BlockingIOError:
                time.sleep(0.01)
    finally:
        os.close(descriptor)
