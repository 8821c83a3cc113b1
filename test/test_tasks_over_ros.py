"""Tasks over real topics: the simulated robot plays and judges them, and the robot decides on a forecast of its own."""
import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
from test_forecast_onnx import PRESET, narrow_forecast

from worldmodel_ros import cli
from worldmodel_ros.control.pilot import SLOTS
from worldmodel_ros.control.task import Task
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.motion import PERIOD
from worldmodel_ros.nodes.common.tasks import read_task, task_message
from worldmodel_ros.nodes.sim_robot.messages import markers
from worldmodel_ros.nodes.sim_robot.tasks import Episodes
from worldmodel_ros.parameters import sim_robot, world_model_node
from worldmodel_ros.paths import cache_folder
from worldmodel_ros.sim.task_scenes import SCENES
from worldmodel_ros.sim.world import World

SEED = 4000000


@pytest.fixture(scope='module')
def world():
    return World(0)


@pytest.mark.parametrize('name', TASKS)
def test_a_task_is_told_in_names_that_the_robot_knows(name, world):
    told, judged = [], []
    Episodes(name, told.append, judged.append).begin(world, SEED)
    message, = told
    task = read_task(message)  # raises for a name that is unknown
    assert task.name == name and [type(term) for term in task.terms] == [type(t) for t in TASKS[name].setup(SEED).terms()]
    known = {slot.name for slot in SLOTS}
    assert all(term.target in known for term in task.terms if hasattr(term, 'target') and getattr(term, 'place', None) is None)
    report, = map(json.loads, judged)
    assert (report['task'], report['seed'], report['succeeded'], report['seconds']) == (name, SEED, None, 0.0)
    assert task_message(Task(name, task.terms), {}) == message


def test_what_moves_is_drawn(world):
    world.load(TASKS['street'].setup(SEED).scene)
    movers = [marker for marker in markers(world, 0).markers if marker.ns == 'movers']
    assert [marker.text for marker in movers] == ['shuttle 1', 'shuttle 2', 'shuttle 3']
    for marker in movers:
        assert (marker.pose.position.x, marker.pose.position.y) == pytest.approx(world.position(marker.text))
        assert 0.2 < marker.scale.x < 0.35


def test_an_episode_ends_with_what_the_judge_says(world):
    told, judged = [], []
    episodes = Episodes('intercept', told.append, judged.append)
    episodes.begin(world, SEED)
    over, steps = False, 0
    while not over:
        world.step((0.0, 0.0), 0.01)
        over, steps = episodes.look(), steps + 1
    assert steps <= 401
    end = json.loads(judged[-1])
    assert end['succeeded'] is False and end['reason'] == 'time over' and end['seconds'] == pytest.approx(4.0, abs=0.02)


def test_another_goal_is_told_at_each_arrival(world):
    told = []
    episodes = Episodes('recall', told.append, lambda text: None)
    episodes.begin(world, SEED)
    goal = told[0].terms[0].target
    x, y = world.position(goal)
    world.move_robot((x + 0.3, y, 0.0))
    assert not episodes.look()
    assert len(told) == 2 and told[1].terms[0].target != goal


def test_the_simulated_robot_plays_every_task_and_decisions_are_as_far_apart_as_steps():
    played = {name for name, task in TASKS.items() if not task.to_places}  # a place is told in the frame of one's odometry
    assert set(SCENES) == played
    choices = next(param.choices for param in sim_robot.PARAMETERS if param.name == 'task')
    assert set(choices) == {'', *played}
    assert PERIOD == PRESET.step_period
    assert next(param.default for param in world_model_node.PARAMETERS if param.name == 'forecast') == ''


@pytest.fixture
def exported_graphs(monkeypatch):
    """What other tests have exported: a forecast of theirs, and the shipped model, which is kept where a user's is."""
    shared = Path(os.environ['WORLDMODEL_TEST_SHARED'])
    shared.mkdir(parents=True, exist_ok=True)
    for graphs in cache_folder().glob('tiny-fp32-*'):
        with contextlib.suppress(FileExistsError):
            (shared / graphs.name).symlink_to(graphs)
    monkeypatch.setenv('WORLDMODEL_CACHE', str(shared))


@pytest.mark.ros
@pytest.mark.waiting(seconds=20)
@pytest.mark.slow
@pytest.mark.usefixtures('exported_graphs')
def test_rooms_are_driven_over_real_topics_and_judged(tmp_path, capsys):
    """With random weights: what is shown is that it runs, is told its tasks, decides in time and is judged."""
    folder, result = narrow_forecast(tmp_path), tmp_path / 'control.json'
    threads = threading.active_count()
    assert cli.main(['evaluate', 'control', '--ros', '--seeds', f'{SEED}:{SEED + 2}', '--tasks', 'intercept', '--forecast',
                     str(folder), '--backend', 'onnx', '--log', str(tmp_path / 'log'), '--json', str(result)]) == 0
    found = json.loads(result.read_text())
    assert found['tasks']['intercept']['robot']['n'] == 2
    served = found['served']['intercept']
    # 4 s at most in each room, an observation each 0.1 s, of which an overloaded machine may lose some.
    assert 20 <= sum(served['chosen'].values()) and served['camera_to_command_ms']['n'] >= 20
    assert served['ticks'].keys() <= {'two_step', 'one_step', 'plan_only', 'last_plan', 'stop'}
    assert threading.active_count() <= threads + 1
