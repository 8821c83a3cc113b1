"""Subcommands that bring up nodes: what they say, what ends them, and that no node is left behind."""
import argparse
from types import SimpleNamespace
from typing import ClassVar

import pytest
from bags import simulated_drive, write_bag

from worldmodel_ros.bringup import description, supervisor
from worldmodel_ros.cli import main as cli
from worldmodel_ros.cli.supervision import supervise


class FakeSupervisor:
    """Notes what is done with it."""

    processes: ClassVar = {}

    def __init__(self, environment, logs, domain_id, *, this_machine_only, activation_timeout):
        self.done, self.environment = [this_machine_only], {'ROS_DOMAIN_ID': str(domain_id)}

    def __enter__(self):
        FakeSupervisor.last = self
        return self

    def __exit__(self, *_):
        self.done.append('stopped')

    def add(self, nodes, namespace):
        self.done.append((namespace, tuple(nodes)))

    def start(self):
        self.done.append('started')

    def wait_ready(self, timeout, progress):
        self.done.append(timeout)

    def wait_for_end(self):
        return 0


@pytest.fixture(autouse=True)
def supervised(monkeypatch):
    monkeypatch.setattr(supervisor, 'Supervisor', FakeSupervisor)
    monkeypatch.setattr('signal.signal', lambda *_: None)
    monkeypatch.delenv('ROS_DOMAIN_ID', raising=False)


@pytest.fixture
def run():
    chosen = argparse.Namespace(logs='log', activation_timeout=7.0)

    def with_wait(wait, robots=lambda found: [('left', ['gate'])]):
        return supervise('up', chosen, robots, lambda running: 'Starting it', wait, this_machine_only=False)
    return with_wait


def raising(error):
    def wait(running):
        raise error
    return wait


def test_nodes_are_brought_up_and_stopped_and_the_exit_code_is_that_of_the_wait(run, capsys):
    assert run(lambda running: 3) == 3
    assert FakeSupervisor.last.done == [False, ('left', ('gate',)), 'started', 7.0, 'stopped']
    assert capsys.readouterr().out == 'Starting it\n'


def test_an_interrupt_is_no_failure_and_stops_the_nodes(run, capsys):
    assert run(raising(KeyboardInterrupt())) == 0
    assert FakeSupervisor.last.done[-1] == 'stopped' and 'stopped' in capsys.readouterr().out


def test_what_cannot_be_started_is_said_on_standard_error(run, capsys):
    assert run(raising(RuntimeError('gate does not answer'))) == 1
    assert FakeSupervisor.last.done[-1] == 'stopped'
    assert capsys.readouterr().err == 'worldmodel up: gate does not answer\n'

    def no_such_argument(found):
        raise description.DescriptionError('no argument sead')
    assert run(lambda running: 0, no_such_argument) == 1
    assert 'worldmodel up: no argument sead' in capsys.readouterr().err


@pytest.mark.parametrize('codes', [[0], [-9], [2], [1]])
def test_a_replay_whose_recorder_has_failed_says_so_and_fails(tmp_path, monkeypatch, capsys, codes):
    bag = write_bag(tmp_path / 'bag', simulated_drive(seconds=1.0))
    monkeypatch.setattr(FakeSupervisor, 'processes', {
        '/replay/bag_player': SimpleNamespace(exit_codes=[0]), '/replay/recorder': SimpleNamespace(exit_codes=codes)})
    assert cli(['replay', str(bag), '--record', str(tmp_path / 'out')]) == int(codes != [0])
    said = capsys.readouterr()
    assert ('Recorded in' in said.out) == (codes == [0])
    assert (f'the recorder ended with exit code {codes[0]}' in said.err) == (codes != [0])


def test_in_a_replay_the_model_listens_to_what_is_played_whatever_the_parameters_of_the_robot_are(tmp_path):
    bag, robot = write_bag(tmp_path / 'bag', simulated_drive(seconds=1.0)), tmp_path / 'robot.yaml'
    robot.write_text('/**/world_model_node:\n'
                     '  ros__parameters: {enable_stamped_cmd_vel: false, executed_action_topic: /base/cmd}\n')
    assert cli(['replay', str(bag), '--parameters', str(robot)]) == 0
    (_, nodes), = (done for done in FakeSupervisor.last.done if isinstance(done, tuple))
    said = ' '.join(nodes[0].ros_arguments())
    assert nodes[0].name == 'world_model_node' and str(robot) in said
    after = said.partition(str(robot))[2]
    assert "-p executed_action_topic:='cmd_vel'" in after and '-p enable_stamped_cmd_vel:=true' in after
