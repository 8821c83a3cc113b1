"""What a scenario can do to a running robot, whoever started its processes, and what it can see of it."""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rcl_interfaces.srv import GetParameters, SetParametersAtomically
from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter, parameter_value_to_python
from rclpy.qos import QoSProfile
from std_msgs.msg import String
from std_srvs.srv import Trigger

from scenarios.observer import Observer, Received
from scenarios.speed import Budget
from worldmodel_ros.msg import CommandStatus, DeadlineStatus
from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient
from worldmodel_ros.nodes.common.qos import LATCHED
from worldmodel_ros.sim.scene import GOAL_DISTANCE

ROBOT, GATE, MODEL = 'sim_robot', 'command_gate', 'world_model_node'
NODES = (ROBOT, GATE, MODEL)
PATIENCE = 20.0  # s, for what has no bound of its own, on a busy machine
START_TIMEOUT = 120.0  # s, for processes to start and a model to load
_ATTEMPT = 2.0  # s, after which a request is sent again


class Processes(Protocol):
    """The processes of a running system, by the full names of their nodes."""

    def pid(self, node: str) -> int | None:
        """Return the id of the process that runs now, None when there is none."""

    def exit_codes(self, node: str) -> list[int]:
        """Return the exit codes of the runs that have ended, oldest first; -N: ended by signal N."""

    def kill(self, node: str) -> None:
        """End the process by SIGKILL; it comes back, as it is described to."""


class Rig:
    """
    One robot of a running system, seen and handled over ROS.

    Node names are relative to the robot's namespace. All times are of the steady clock, in s.
    """

    def __init__(self, processes: Processes, context: Context, namespace: str = '') -> None:
        self.processes = processes
        self.namespace = namespace.strip('/')
        self.budget = Budget()
        self.observer = Observer(context, '/' + self.namespace)
        self._context = context
        self._node = self.observer.node
        self._changed_parameters: dict[tuple[str, str], Any] = {}
        self._set_values: dict[str, dict[str, Any]] = {}
        self._publishers: dict[str, Any] = {}

    def close(self) -> None:
        """Destroy the observer."""
        self.observer.close()

    # --- waiting ---

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        """Wait until a condition gives something true, and return that; fail with ``what`` was waited for."""
        end = time.monotonic() + timeout
        with self.observer.changed:
            while True:
                value = condition()
                if value:
                    return value
                left = end - time.monotonic()
                assert left > 0.0, f'waited {timeout:.1f} s in vain for {what}; {self.situation()}'
                # Some conditions depend on more than messages.
                self.observer.changed.wait(min(left, 0.05))

    def wait_for(
        self,
        topic: str,
        matches: Callable[[Any], bool],
        what: str,
        timeout: float = PATIENCE,
        since: float | None = None,
    ) -> Received:
        """Wait for the first message of a topic that matches, and arrived after ``since`` (None: now)."""
        start = time.monotonic() if since is None else since
        return self.wait(
            lambda: next((r for r in self.observer.since(topic, start) if matches(r.message)), None),
            what,
            timeout,
        )

    def watch(self, seconds: float) -> float:
        """Let time pass; return when that began."""
        start = time.monotonic()
        time.sleep(seconds)
        return start

    # --- acting ---

    def full_name(self, node: str) -> str:
        """Return the full name of one of the robot's nodes."""
        return '/' + '/'.join(part for part in (self.namespace, node) if part)

    def call(
        self, kind: type, service: str, request: Any, timeout: float = PATIENCE, attempt: float = _ATTEMPT
    ) -> Any:
        """
        Call a service and return its response.

        Sent again, by a client that knows nothing of killed servers, when no answer comes within ``attempt`` s.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            client = self._node.create_client(kind, service)
            try:
                if not client.wait_for_service(_ATTEMPT):
                    continue
                future = client.call_async(request)
                stop = time.monotonic() + attempt
                while not future.done() and time.monotonic() < stop:
                    time.sleep(0.002)
                if future.done():
                    return future.result()
            finally:
                self.observer.forget(client)
        raise AssertionError(f'{service} of {self.full_name("")} did not answer within {timeout:.0f} s')

    def set(self, node: str, **values: Any) -> None:
        """Set parameters of a node, until the scenario ends."""
        for name in values:
            if (node, name) not in self._changed_parameters:
                self._changed_parameters[node, name] = self.get(node, name)
        refusal = self.try_to_set(node, **values)
        assert not refusal, f'{self.full_name(node)} refused {values}: {refusal}'
        self._set_values.setdefault(node, {}).update(values)

    def set_again(self, node: str) -> None:
        """Set what was set on a node, whose process has been started again since, and so has its own values."""
        if values := self._set_values.get(node):
            self.set(node, **values)

    def try_to_set(self, node: str, **values: Any) -> str:
        """Set parameters of a node for good; return why that was refused, or ''."""
        request = SetParametersAtomically.Request(
            parameters=[Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]
        )
        result = self.call(SetParametersAtomically, f'{node}/set_parameters_atomically', request).result
        return '' if result.successful else result.reason or 'without a reason'

    def get(self, node: str, name: str) -> Any:
        """Return the value of a parameter."""
        response = self.call(GetParameters, f'{node}/get_parameters', GetParameters.Request(names=[name]))
        return parameter_value_to_python(response.values[0])

    def publish(self, kind: type, topic: str, message: Any, qos: QoSProfile) -> None:
        """Publish a message, as a stranger to the system would."""
        if topic not in self._publishers:
            publisher = self._publishers[topic] = self._node.create_publisher(kind, topic, qos)
            self.wait(publisher.get_subscription_count, f'a subscriber to {topic}')
        self._publishers[topic].publish(message)

    def reset(self, node: str) -> None:
        """Call a node's ~/reset."""
        response = self.call(Trigger, f'{node}/reset', Trigger.Request())
        assert response.success, f'{self.full_name(node)}: {response.message}'

    def bring_model_to(self, *states: str) -> None:
        """Take the world model through its lifecycle to each of the states in turn."""
        node = Node('scenario_manager', context=self._context, namespace='/' + self.namespace)
        try:
            client = LifecycleClient(node, self.full_name(MODEL))
            for state in states:
                client.bring_to(state, START_TIMEOUT)
        finally:
            node.destroy_node()

    def kill(self, node: str) -> float:
        """End a node by SIGKILL; return the time just before."""
        before = time.monotonic()
        self.processes.kill(self.full_name(node))
        return before

    # --- driving ---

    def drive(self, goal: str = 'red', timeout: float = PATIENCE) -> float:
        """
        Put the robot into its next room, begin a new episode, and give a goal; return once the robot moves.

        What is returned is when the goal was given.
        """
        self.set_goal('')
        for node in (ROBOT, MODEL, GATE):
            self.reset(node)
        start = time.monotonic()
        self.set_goal(goal)
        self.wait_until_driving('the robot to set out', start, timeout)
        return start

    def wait_until_driving(self, what: str, since: float, timeout: float = PATIENCE) -> Received:
        """Wait for the model's command that moves the robot; return the first one after ``since``."""
        return self.wait_for('cmd_vel', lambda m: answers(m) and not stands(m), what, timeout, since)

    def set_goal(self, goal: str) -> None:
        """Publish a goal; '' takes it away."""
        self.publish(String, 'goal', String(data=goal), LATCHED)

    def distance_to(self, goal: str, truth: Odometry | None = None) -> float:
        """Return the distance of the robot's centre to the goal object's, by the simulator's ``truth`` (None: its newest) [m];
        infinity: there is no such object, or not yet."""
        objects, newest = self.observer.newest('sim/objects'), self.observer.newest('sim/ground_truth')
        if truth is None and newest:
            truth = newest.message
        for marker in objects.message.markers if objects and truth else ():
            if marker.text == goal:
                robot, thing = truth.pose.pose.position, marker.pose.position
                return math.hypot(thing.x - robot.x, thing.y - robot.y)
        return math.inf

    def arrival(self, since: float, goal: str = 'red') -> float:
        """Return when the robot came to its goal, or was just before it, after a steady time [s]; infinity: it has not."""
        return next((r.at for r in self.observer.since('sim/ground_truth', since)
                     if self.distance_to(goal, r.message) < 1.2 * GOAL_DISTANCE), math.inf)

    def report(self, node: str) -> dict[str, str]:
        """Return the values of a node's newest diagnostics, all its parts together."""
        heard = self.observer.since('/diagnostics', -math.inf)
        return next((_values(r.message) for r in reversed(heard) if self._is_of(node, r.message)), {})

    def reports(self, node: str, since: float) -> list[tuple[float, dict[str, str]]]:
        """Return time of arrival and values of a node's diagnostics after a steady time [s], oldest first."""
        return [(r.at, _values(r.message)) for r in self.observer.since('/diagnostics', since) if self._is_of(node, r.message)]

    def next_report(self, node: str) -> dict[str, str]:
        """Wait for a node's next diagnostics, and return their values."""
        received = self.wait_for(
            '/diagnostics', lambda message: self._is_of(node, message), f'diagnostics of {self.full_name(node)}'
        )
        return _values(received.message)

    def _is_of(self, node: str, message: DiagnosticArray) -> bool:
        return message.status[0].hardware_id == self.full_name(node).lstrip('/')

    def expected_tick(self) -> float:
        """Return how long the model node expects a tick of two steps to take, by what ticks took here [s]."""
        return float(self.next_report(MODEL).get('tick_two_step_ms', 0.0)) * 1e-3

    def refused(self, node: str) -> dict[str, int]:
        """Return what a node's newest diagnostics say of refused messages: reason -> count."""
        values = self.report(node)
        return {
            key.removeprefix('refused: '): int(value)
            for key, value in values.items()
            if key.startswith('refused: ')
        }

    def wait_for_refusal(self, node: str, reason: str, before: dict[str, int]) -> None:
        """Wait until a node's diagnostics have counted more refusals for a reason than ``before``."""
        self.wait(
            lambda: self.refused(node).get(reason, 0) > before.get(reason, 0),
            f"'refused: {reason}' to rise in the diagnostics of {node}, which have {self.refused(node)}",
            5.0,
        )

    def situation(self) -> str:
        """Describe the present situation in one line, for the message of a failure."""
        gate, tick = self.observer.newest('command_status'), self.observer.newest('deadline_status')
        words = []
        if gate:
            words.append(f'the gate is in state {gate.message.state} ({gate.message.reason})')
        if tick:
            status = tick.message
            words.append(f'the model served tier {status.tier}, verdict {status.verdict} ({status.reason})')
        return ', '.join(words) or 'nothing was heard of gate and model'

    def give(self, budget: Budget) -> None:
        """Have the robot work within a budget, until the scenario ends; its time-outs go with the camera's period."""
        usual = Budget()
        if budget == usual:
            return
        self.budget = budget
        # Each node before the one that commands it: no command is judged by another deadline than it was made for.
        self.set(ROBOT, deadline_s=budget.deadline, camera_rate_hz=1.0 / budget.period)
        # Between two commands there is a period, and what the later one was longer on its way: 0.03 of 0.05 s as configured.
        longer = budget.period - usual.period + 0.6 * (budget.deadline - usual.deadline)
        self.set(GATE, deadline_s=budget.deadline, command_timeout_s=self.get(GATE, 'command_timeout_s') + longer)
        self.set(MODEL, deadline_s=budget.deadline, camera_timeout_s=self.get(MODEL, 'camera_timeout_s') + longer)

    def restore(self) -> None:
        """Undo all that was set."""
        self.budget = Budget()
        self._set_values.clear()
        while self._changed_parameters:
            (node, name), value = self._changed_parameters.popitem()
            refusal = self.try_to_set(node, **{name: value})
            assert not refusal, f'{name} of {node} could not be set back to {value}: {refusal}'


def _values(report: DiagnosticArray) -> dict[str, str]:
    return {value.key: value.value for status in report.status for value in status.values}


def answers(command: Any) -> bool:
    """Whether a command answers an observation; a stop of the gate's own does not."""
    return bool(command.header.stamp.sec or command.header.stamp.nanosec)


def stands(command: Any) -> bool:
    """Whether a command is to stand still."""
    return command.twist.linear.x == 0.0 and command.twist.angular.z == 0.0


def is_passing(status: CommandStatus) -> bool:
    """Whether the gate lets commands through."""
    return status.state == CommandStatus.PASSING


def has_verdict(verdict: int, words: str = '') -> Callable[[DeadlineStatus], bool]:
    """Return a condition on deadline_status: this verdict, with these words in its reason."""
    return lambda status: status.verdict == verdict and words in status.reason


def nanoseconds(stamp: Any) -> int:
    """Return a ROS time in ns."""
    return stamp.sec * 1_000_000_000 + stamp.nanosec
