"""How the process of a node lives and ends, with both executors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import interrupts
import pytest

pytestmark = [pytest.mark.ros, pytest.mark.untimed]

ROOT = Path(__file__).resolve().parent.parent
EXECUTORS = ('events', 'single')
NODE = '''
import sys, time
import rclpy
from lifecycle_msgs.srv import ChangeState
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.node import Node
from std_msgs.msg import Int64
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.parameters import ParameterError
from worldmodel_ros.nodes.common.spin import run

def say(*words):
    print(*words, flush=True)

class Subject({base}):
    def __init__(self):
        super().__init__('subject')
        self.refusals = Refusals()
        say('building')
        self.first = self.create_timer(0.01, self.on_first)
        {body}

    def on_first(self):
        self.first.cancel()
        say('spinning')

    {methods}

sys.exit(run(Subject, executor={executor!r}))
'''


def start(body='pass', methods='pass', base='Node', executor='events'):
    code = NODE.format(
        body=body.replace('\n', '\n        '), methods=methods.replace('\n', '\n    '), base=base,
        executor=executor)
    return subprocess.Popen(
        [sys.executable, '-u', '-c', code], env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process, word):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return ''.join(lines)
    raise AssertionError(f'{word!r} never came:\n{"".join(lines)}')


def end(process, number=signal.SIGTERM):
    process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_quiet_node_with_code_0_after_its_farewell(executor, number):
    process = start(
        body="self.publisher = self.create_publisher(Int64, 'farewell', 1)",
        methods='''
def on_shutdown(self):
    self.publisher.publish(Int64(data=1))
    say('farewell', rclpy.ok())''',
        executor=executor)
    read_until(process, 'spinning')
    code, output = end(process, number)
    assert code == 0 and 'farewell True' in output and 'Traceback' not in output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_node_is_built_ends_it_with_code_0(number):
    process = start(body='time.sleep(30)')
    read_until(process, 'building')
    code, output = end(process, number)
    assert code == 0 and 'Traceback' not in output


def test_a_second_signal_does_not_cut_the_farewell_short():
    process = start(methods='''
def on_shutdown(self):
    say('leaving')
    time.sleep(0.5)
    say('left')''')
    read_until(process, 'spinning')
    process.send_signal(signal.SIGINT)
    read_until(process, 'leaving')
    code, output = end(process, signal.SIGINT)
    assert code == 0 and 'left' in output


@pytest.mark.parametrize('executor', EXECUTORS)
def test_a_failing_callback_is_counted_and_reported_once_and_the_node_goes_on(executor):
    process = start(
        body='''
self.count = 0
self.publisher = self.create_publisher(Int64, 'numbers', 10)
self.create_subscription(Int64, 'numbers', self.on_number, 10)
self.create_timer(0.01, self.on_tick, clock=Clock(clock_type=ClockType.STEADY_TIME))''',
        methods='''
def on_tick(self):
    self.count += 1
    self.publisher.publish(Int64(data=self.count))
def on_number(self, message):
    if message.data == 50:
        say('fifty', self.refusals.values())
    if message.data % 2:
        raise ValueError('an odd number')''',
        executor=executor)
    output = read_until(process, 'fifty')
    assert "'refused: exception: ValueError in <string>" in output and ': 2' in output.splitlines()[-1]
    assert output.count('a callback failed and was abandoned') == 1
    assert end(process)[0] == 0


@pytest.mark.parametrize('executor', EXECUTORS)
def test_a_lifecycle_node_takes_its_transitions_and_is_shut_down_at_the_end(executor):
    process = start(
        base='LifecycleNode',
        body='''
self.client = self.create_client(ChangeState, '~/change_state')
self.create_timer(0.05, self.on_tick, clock=Clock(clock_type=ClockType.STEADY_TIME))
self.asked = False''',
        methods='''
def on_tick(self):
    if not self.asked and self.client.service_is_ready():
        self.asked = True
        request = ChangeState.Request()
        request.transition.id = 1
        future = self.client.call_async(request)
        future.add_done_callback(lambda future: say('configured', future.result().success))
def on_configure(self, state):
    return TransitionCallbackReturn.SUCCESS
def on_shutdown(self, state):
    say('shut down from', state.label)
    return TransitionCallbackReturn.SUCCESS''',
        executor=executor)
    assert 'configured True' in read_until(process, 'configured')
    code, output = end(process)
    assert code == 0 and 'shut down from inactive' in output


def test_what_a_node_was_built_of_is_not_walked_by_the_garbage_collector():
    process = start(
        body='''
self.built = [[] for _ in range(100_000)]
self.create_timer(0.2, self.on_tick)''',
        methods='''
def on_tick(self):
    import gc
    walked = gc.get_objects()
    say('walked', len(walked), any(found is self.built[0] for found in walked))''')
    words = read_until(process, 'walked').split()
    end(process)
    assert int(words[-2]) < 20_000 and words[-1] == 'False', words


def test_a_node_whose_parameters_are_refused_ends_with_code_2_and_the_reason():
    process = start(body="raise ParameterError('speed: 9 is too much; use at most 1')")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert 'cannot start: speed: 9 is too much' in output and 'Traceback' not in output


def test_an_unknown_executor_is_refused_by_name():
    process = start(executor='threads')
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 2 and 'WORLDMODEL_EXECUTOR' in output and 'events, single' in output


@pytest.mark.parametrize('name', ['command_gate', 'engine_server', 'gateway_server', 'sim_robot', 'world_model_node'])
def test_a_node_that_is_interrupted_while_it_is_imported_ends_with_code_0(name):
    for moment in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
        process = interrupts.start(sys.executable, ROOT / 'scripts' / name)
        time.sleep(moment)
        returned, words, _ = interrupts.interrupt(process)
        assert returned == 0 and 'Traceback' not in words, f'interrupted after {moment} s: {words}'
