"""The command gate as the robot sees it: a real process, real messages."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_gate_rig import DEADLINE, ROOT, Rig, as_time, gate_process, happens, wait_for
from rosgraph_msgs.msg import Clock
from scenarios.checks import STOP_RESERVE
from scenarios.speed import as_the_nodes_run
from scenarios.stalls import past, watching
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from worldmodel_ros.bringup.description import load
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.msg import ActionChunk, CommandStatus

pytestmark = [pytest.mark.ros, pytest.mark.waiting]
STOP_WITHIN = 0.150  # s


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def gate(rig):
    with gate_process(rig) as process:
        yield process


def stamp_ns(message) -> int:
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec


def refused(status) -> int:
    return status.refused_late + status.refused_invalid + status.refused_order + status.refused_shape


def test_a_fresh_command_passes_with_the_stamp_of_its_observation(rig, gate):
    chunk = rig.send(0.1, 0.2)
    _, command = wait_for(lambda: rig.commands, 'the command')[0]
    assert (command.twist.linear.x, command.twist.angular.z) == pytest.approx((0.1, 0.2))
    assert command.header.stamp == chunk.header.stamp
    assert command.header.frame_id == 'base_link'
    wait_for(lambda: rig.passing and rig.status.passed == 1, 'the status')
    assert (rig.status.episode_id, rig.status.sequence) == (1, 1)


def test_it_has_no_shared_memory_where_dds_is_kept_to_this_machine_either(rig, tmp_path):
    """A write to the port of a process that was killed can wait for a second, and this one must stop the robot."""
    description = load()
    with Supervisor(description.environment, tmp_path, int(os.environ['ROS_DOMAIN_ID']), this_machine_only=True) as supervisor:
        supervisor.add([node for node in description.resolve('sim') if node.name == 'command_gate'])
        supervisor.start()
        rig.drive(1)
        pid = supervisor.processes['/command_gate'].pid
        assert 'fastrtps_port' in Path('/proc/self/maps').read_text()  # the rig has: the two could use it
        assert 'fastrtps_port' not in Path(f'/proc/{pid}/maps').read_text()


def test_bad_chunks_are_refused_counted_by_kind_and_end_nothing(rig, gate):
    rig.drive(1)
    passed = len(rig.commands)
    bad = [
        {'values': [math.nan, 0.0]}, {'values': [math.inf, 0.0]}, {'step_period': 0.0}, {'values': []},
        {'values': [0.1]}, {'names': ['a', 'b']}, {'names': []}, {'age': 0.06},
        {'age': -1.0}, {'header': type(ActionChunk().header)()}]
    before = rig.status
    for number, fields in enumerate(bad, start=1):
        rig.send(**fields)
        # One by one: in a queue of depth 1 a burst overwrites itself.
        wait_for(lambda: refused(rig.status) - refused(before) == number, f'the refusal of {fields}')
    after = rig.status
    assert after.refused_invalid - before.refused_invalid == 5
    assert after.refused_shape - before.refused_shape == 4
    assert after.refused_late - before.refused_late == 1
    assert all(stamp_ns(command) == 0 for _, command in rig.commands[passed:])
    assert gate.poll() is None
    rig.drive(1)


def test_a_chunk_that_comes_twice_is_refused_the_second_time(rig):
    # For longer than its age alone keeps it out.
    with gate_process(rig, '-p', 'command_timeout_s:=5.0'):
        rig.drive(1)
        rig.sequence -= 1
        rig.send()
        wait_for(lambda: rig.status.refused_order == 1, 'the refusal')


def test_the_robot_is_stopped_within_150_ms_of_the_last_command(rig, gate):
    watching()
    for _ in range(5):
        rig.drive(3, v=0.3)
        with as_the_nodes_run():  # or other programs may come between the time and the command that is sent then
            rig.send(0.3)
        wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
        at, command = next((at, c) for at, c in rig.commands if at > rig.sent_at and stamp_ns(c) == 0)
        assert command.twist.linear.x == command.twist.angular.z == 0.0
        late = past(rig.sent_at, at, STOP_WITHIN, STOP_RESERVE)
        assert late <= 0.0, f'told to stop {(at - rig.sent_at) * 1e3:.0f} ms after the last command'
    assert rig.status.latched and 'no command passed' in rig.status.first_reason


def test_a_gate_that_stood_still_tells_by_its_own_clock_that_its_stop_was_late(rig, gate):
    rig.drive(3, v=0.3)
    rig.send(0.3)
    time.sleep(0.02)
    gate.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    gate.send_signal(signal.SIGCONT)
    told = wait_for(lambda: [value for _, array in rig.diagnostics for status in array.status for pair in status.values
                             if pair.key == 'silences' for value in pair.value.split()], 'the silence in the diagnostics')
    begun, over = map(float, told[-1].split(':'))
    assert 0.45 < over - begun < 5.0 and abs(begun - rig.sent_at) < 0.1
    gaps = [float(pair.value) for _, array in rig.diagnostics for status in array.status for pair in status.values
            if pair.key == 'watchdog_gap_max_ms']
    assert max(gaps) > 450.0


def test_driving_goes_on_by_itself_and_the_first_reason_stays_until_reset(rig, gate):
    rig.drive(2)
    wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
    rig.drive(2)  # which waits until the gate passes commands
    assert rig.status.latched
    wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the next stop')
    assert 'no command passed' in rig.reset().message
    wait_for(lambda: not rig.status.latched and not rig.status.first_reason, 'the reset')


def test_a_model_that_asks_to_stop_is_obeyed(rig, gate):
    rig.drive(v=0.3)
    rig.send(tier=ActionChunk.TIER_STOP, values=[], names=[])
    wait_for(lambda: 'model asked to stop' in rig.status.reason, 'the stop')
    assert rig.commands[-1][1].twist.linear.x == 0.0


def test_a_clock_that_stands_still_does_not_disable_the_watchdog(rig):
    def drive(start: float, episode_id: int) -> None:
        """Drive for six control periods of a simulation, by its clock."""
        rig.episode_id = episode_id
        for k in range(6):
            rig.clock.publish(Clock(clock=as_time(start + 0.1 * k)))
            time.sleep(0.03)
            rig.send(header=_header(start + 0.1 * k - 0.01))
            time.sleep(0.07)

    watching()
    with gate_process(rig, '-p', 'use_sim_time:=true'):
        wait_for(rig.clock.get_subscription_count, 'the gate to listen to /clock')
        drive(1000.0, episode_id=1)
        wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop, while ROS time stands still')
        last_passed = max(at for at, command in rig.commands if stamp_ns(command))
        at = next(at for at, command in rig.commands if at > last_passed)
        late = past(last_passed, at, STOP_WITHIN, STOP_RESERVE)
        assert late <= 0.0, f'told to stop {(at - last_passed) * 1e3:.0f} ms after the last command'
        # ROS time is set back: the old episode is over, a new one drives on.
        passed = rig.status.passed
        drive(10.0, episode_id=2)
        assert rig.status.passed > passed


def _header(seconds: float):
    header = ActionChunk().header
    header.stamp = as_time(seconds)
    return header


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_robot_and_ends_the_process_with_code_0(rig, gate, number):
    rig.drive(3, v=0.3)
    rig.send(0.3)
    time.sleep(0.03)
    gate.send_signal(number)
    assert gate.wait(DEADLINE) == 0
    wait_for(lambda: stamp_ns(rig.commands[-1][1]) == 0, 'the farewell')
    assert rig.commands[-1][1].twist.linear.x == 0.0
    wait_for(lambda: rig.status.reason == 'the gate is shutting down', 'the last status')
    # If this process paused between two commands, the gate had stopped before.
    assert rig.status.latched
    assert rig.status.first_reason == rig.status.reason or 'no command passed' in rig.status.first_reason


def test_status_and_diagnostics_keep_coming_and_name_what_was_refused(rig, gate):
    rig.drive(1)
    rig.send(values=[math.nan, 0.0])

    def report():
        for _, array in reversed(rig.diagnostics):
            for status in array.status:
                values = {pair.key: pair.value for pair in status.values}
                # The first report of a refusal may come before the stop.
                if (status.name == 'command_gate: commands' and values['refused: invalid'] == '1'
                        and 'no command passed' in status.message):
                    return values

    values = wait_for(report, 'the diagnostics')
    assert 'linear.x is nan' in values['last refused']
    count, begun = len(rig.statuses), time.monotonic()
    wait_for(lambda: len(rig.statuses) >= count + 20, 'as many statuses as come in 2 s')
    assert time.monotonic() - begun > 1.4  # messages that waited for this process come together


def test_limits_can_be_changed_while_driving_and_nonsense_is_refused_with_the_reason(rig, gate):
    assert rig.set_parameter('v_max', 0.3).successful, 'by its former name'
    assert rig.set_parameter('linear.x.max_velocity', 0.2).successful
    rig.drive(5, v=0.5)
    passed = [command.twist.linear.x for _, command in rig.commands if stamp_ns(command)]
    assert max(passed) == pytest.approx(0.2)
    assert rig.status.limited > 0
    refused = rig.set_parameter('delivery_reserve_s', 0.5)
    assert not refused.successful and 'less than the deadline' in refused.reason
    assert 'read-only' in rig.set_parameter('output', 'twist').reason
    assert 'use one of: hold, slow, stop' in rig.set_parameter('on_timeout', 'pray').reason


def test_slow_brakes_within_the_acceleration_limit(rig):
    with gate_process(rig, '-p', 'on_timeout:=slow'):
        rig.drive(v=0.3)
        wait_for(lambda: rig.status.state == CommandStatus.STOPPED, 'the stop')
    # After the last chunk: where this process had to wait for its core, the gate has begun to brake before it, too.
    last = max(k for k, (_, c) in enumerate(rig.commands) if stamp_ns(c))
    braking = [(at, c.twist.linear.x) for at, c in rig.commands[last:] if stamp_ns(c) == 0 and c.twist.linear.x]
    speeds = [0.3, *(v for _, v in braking)]
    assert len(braking) > 3
    # 1.5 m/s^2 (linear.x.max_acceleration), for 0.1 s at most (command_interval_max_s) where the machine has paused for longer
    # between two.
    assert all(0.0 < a - b < 0.15 + 1e-6 for a, b in zip(speeds, speeds[1:]))
    assert braking[-1][0] - braking[0][0] > 0.1


ARM = ('-p', "joint_names:=['a', 'b']", '-p', 'joint_low:=[-1.0, -1.0]', '-p', 'joint_high:=[1.0, 1.0]',
       '-p', 'joint_rate:=[1.0, 1.0]', '-p', 'interface:=position')


def test_a_joint_trajectory_carries_the_whole_chunk_with_explicit_times():
    rig = Rig(JointTrajectory, 'joint_trajectory')
    try:
        with gate_process(rig, '-p', 'output:=joint_trajectory', *ARM):
            trajectory = _first_command(rig, {'a': 0.45, 'b': 0.0}, values=[0.5, 0.0, 0.55, 0.0, 0.9, 0.0])
            # Nothing follows: the arm is held where the trajectory has come to, and not sent to zero.
            wait_for(lambda: len(rig.commands) == 2, 'the arm to be held')
            held = rig.commands[-1][1]
    finally:
        rig.close()
    assert trajectory.joint_names == ['a', 'b']
    assert stamp_ns(trajectory) == 0
    assert [point.time_from_start.nanosec for point in trajectory.points] == [10**8, 2 * 10**8, 3 * 10**8]
    assert [point.positions[0] for point in trajectory.points] == pytest.approx([0.5, 0.55, 0.65])
    # One step from where it was measured, as this arm has not moved.
    assert len(held.points) == 1 and 0.45 <= held.points[0].positions[0] <= 0.55 + 1e-6


def _first_command(rig, measured, **fields):
    """Send a chunk as soon as the gate has heard where the joints are; return what it commands."""
    rig.measured = measured
    wait_for(rig.joint_states.get_subscription_count, 'the gate to listen to joint_states')
    time.sleep(0.1)
    # Again where nothing came of it: on a busy machine it may have been too old when it came.
    wait_for(lambda: rig.send(names=list(measured), **fields) and happens(lambda: rig.commands, 1.0), 'the command')
    return rig.commands[0][1]


def test_a_plain_array_warns_that_it_has_no_time_out():
    rig = Rig(Float64MultiArray, 'commands')
    try:
        with gate_process(rig, '-p', 'output:=float64_multi_array', *ARM) as process:
            command = _first_command(rig, {'a': 0.45, 'b': 0.15}, values=[0.5, 0.2])
            assert command.data.tolist() == pytest.approx([0.5, 0.2])
            process.send_signal(signal.SIGTERM)
            assert 'neither stamp nor time-out' in process.stdout.read()
    finally:
        rig.close()


@pytest.mark.parametrize('arguments, complaint', [
    (('-p', 'deadline_s:=1'), 'decimal point'),
    (('-p', 'delivery_reserve_s:=0.06'), 'less than the deadline'),
    (('-p', 'output:=joint_trajectory'), 'set interface to position'),
    (('-p', 'output:=float64_multi_array'), 'needs joint_names'),
    (('-p', 'linear.x.max_velocity:=-1.0'), 'linear.x.max_velocity'),
    (('-p', 'v_max:=0.5', '-p', 'linear.x.max_velocity:=0.6'), 'give linear.x.max_velocity alone')])
def test_parameters_that_cannot_work_are_refused_at_the_start_with_the_reason(rig, arguments, complaint):
    with gate_process(rig, *arguments, connected=False) as process:
        output = process.stdout.read()
        process.wait(DEADLINE)
    assert process.returncode == 2
    assert 'cannot start' in output and complaint in output and 'Traceback' not in output


def test_the_gate_needs_none_of_the_models_libraries():
    code = ('import sys, worldmodel_ros.nodes.command_gate.node\n'
            'print({"torch", "mujoco", "onnxruntime", "cv2", "scipy"} & set(sys.modules))')
    result = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == 'set()'
