"""
A joystick takes over from the model by twist_mux's rules, with the real gate in front of it, over real DDS.

twist_mux is part of a distribution. ``Mux`` keeps the rules that its documentation states, on config/twist_mux.yaml as shipped:
of the topics heard within their ``timeout``, the one of the highest ``priority`` passes, unless a lock of no lower priority is
on. What is tested is that gate, configuration and these rules go together; the node itself is loaded by test_launch_files.py.
"""
import threading
import time

import pytest
import yaml
from command_gate_rig import ROOT, Rig, gate_process, wait_for
from geometry_msgs.msg import TwistStamped
from std_msgs.msg import Bool

from worldmodel_ros.msg import CommandStatus

pytestmark = [pytest.mark.ros, pytest.mark.waiting]
MODEL, PERSON = 0.1, -0.2  # m/s, by which commands are told apart
LATE = 0.1                 # s, that a step of the test may take on a busy machine


class Mux:
    """Passes commands on by config/twist_mux.yaml; ``passed`` are (time, speed), ``heard`` the same by topic."""

    def __init__(self, node):
        told = yaml.safe_load((ROOT / 'config' / 'twist_mux.yaml').read_text())['/**/twist_mux']['ros__parameters']
        self.topics, (lock,) = told['topics'], told['locks'].values()
        self.heard, self.passed, self.locked, self.lock = {name: [] for name in self.topics}, [], False, lock
        for name, topic in self.topics.items():
            node.create_subscription(TwistStamped, topic['topic'], lambda message, name=name: self._hear(name, message), 10)
        node.create_subscription(Bool, lock['topic'], lambda message: setattr(self, 'locked', message.data), 10)

    def _hear(self, name, message):
        now, speed = time.monotonic(), message.twist.linear.x
        self.heard[name].append((now, speed))
        priority = self.topics[name]['priority']
        above = any(other['priority'] > priority and self.heard[key] and now - self.heard[key][-1][0] < other['timeout']
                    for key, other in self.topics.items())
        if not above and not (self.locked and self.lock['priority'] >= priority):
            self.passed.append((now, speed))

    def since(self, begin, end=float('inf')):
        return [speed for at, speed in list(self.passed) if begin <= at < end]


@pytest.fixture
def driven():
    """A gate whose model drives on all the time, behind a mux; and a joystick."""
    rig = Rig(command_topic='cmd_vel_model')
    mux, stick, stop = Mux(rig.node), *(rig.node.create_publisher(kind, topic, 10) for kind, topic in (
        (TwistStamped, 'joy_vel'), (Bool, 'stop_robot')))
    over = threading.Event()

    def model():
        while not over.wait(0.1):
            rig.send(MODEL)
    driving = threading.Thread(target=model)
    with gate_process(rig, '-r', 'cmd_vel:=cmd_vel_model'):
        driving.start()
        try:
            wait_for(lambda: rig.passing and mux.since(time.monotonic() - 0.3), 'the model to drive')
            yield rig, mux, stick, stop, over
        finally:
            over.set()
            driving.join()
    rig.close()


def push(stick, seconds, period=0.05):
    """Push the joystick for so long; return when the first and the last command were sent."""
    begun = time.monotonic()
    while (last := time.monotonic()) < begun + seconds:
        message = TwistStamped()
        message.twist.linear.x = PERSON
        stick.publish(message)
        time.sleep(period)
    return begun, last


def test_a_joystick_takes_over_at_once_and_gives_back_after_its_timeout_without_a_fight(driven):
    rig, mux, stick, _, _ = driven
    stops = rig.status.stops
    begun, last = push(stick, 1.5)
    timeout = mux.topics['joystick']['timeout']
    wait_for(lambda: MODEL in [round(speed, 3) for speed in mux.since(last + timeout)], 'the model to drive again')
    person = mux.since(begun + LATE, last + timeout - LATE)
    assert len(person) >= 15 and set(person) == {PERSON}  # not one command of the model in between
    again = next(at for at, speed in mux.passed if at > last and speed != PERSON)
    assert timeout - LATE < again - last < timeout + 0.2 + LATE
    # Nothing of it reached the gate, which went on as before: its own commands would have passed at any time.
    assert rig.status.state == CommandStatus.PASSING and rig.status.stops == stops
    during = [at for at, speed in mux.heard['model'] if begun < at < last]
    assert len(during) > 10 and max(b - a for a, b in zip(during, during[1:])) < mux.topics['model']['timeout'] + LATE


def test_nothing_passes_while_the_lock_is_on_and_the_joystick_does_not_either(driven):
    _, mux, stick, stop, _ = driven
    stop.publish(Bool(data=True))
    wait_for(lambda: mux.locked, 'the lock')
    locked = time.monotonic()
    push(stick, 0.5)
    assert mux.since(locked + 0.02) == []
    stop.publish(Bool(data=False))
    wait_for(lambda: mux.since(locked + 0.02), 'something to pass again')


def test_a_gate_that_has_stopped_falls_silent_so_that_a_joystick_drives_alone(driven):
    rig, mux, stick, _, over = driven
    over.set()  # the model dies
    wait_for(lambda: rig.status.state != CommandStatus.PASSING, 'the stop')
    wait_for(lambda: mux.since(0.0)[-1] == 0.0, 'the stop behind the mux')
    silent = 1.0 + LATE  # s: stop_repeat_s
    wait_for(lambda: time.monotonic() - mux.heard['model'][-1][0] > silent / 2, 'the gate to fall silent')
    begun, last = push(stick, 0.5)
    assert set(mux.since(begun, last)) == {PERSON} and not any(at > begun for at, _ in mux.heard['model'])
