"""B2: the policy that is cloned from the oracle's planner, its labels, and the controller that drives by it."""
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from worldmodel_ros.engine.forecast.loading import Forecasts, TorchStream
from worldmodel_ros.evaluate.control import controllers
from worldmodel_ros.evaluate.control.cloned import Cloned, policy_file
from worldmodel_ros.evaluate.control.run import Question, evaluate
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.cloned_policy import FACTS, MODES, ClonedPolicy, facts
from worldmodel_ros.model.presets import PRESETS
from worldmodel_ros.model.scene_forecast import QUERIES, SLOTS, SceneForecast
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.world import World
from worldmodel_ros.train.scene import cloning

SEED = 3_200_000
pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def network():
    torch.manual_seed(0)
    preset = replace(PRESETS['tiny'], name='narrow', vae_width=8, width=64, depth=2, heads=2, head_features=8)
    return SceneForecast(preset).eval()


@pytest.fixture(scope='module')
def forecasts(network):
    preset = network.preset
    return Forecasts('narrow', 'torch', preset.image_size, preset.step_period, lambda: TorchStream(network))


def saying(*modes, scale=-2.0):
    """A policy that says the same of everything: modes of a logit and a command, in units of COMMAND."""
    policy = ClonedPolicy(16, dropout=0.0).eval()
    last = policy.body[-1]
    torch.nn.init.zeros_(last.weight)
    numbers = torch.full((5 * MODES,), -30.0)
    numbers[MODES:3 * MODES], numbers[3 * MODES:] = 0.0, scale
    for number, (logit, command) in enumerate(modes):
        numbers[number] = logit
        numbers[MODES + 2 * number:MODES + 2 * number + 2] = torch.tensor(command)
    last.bias.data = numbers
    return policy


def test_a_planner_that_passes_on_either_side_is_not_cloned_as_one_that_drives_between():
    told = torch.zeros(2, FACTS)
    left_and_right = torch.tensor([[0.6, 1.2], [0.6, -1.2]])
    sides, between = saying((0.1, [1.0, 1.0]), (0.0, [1.0, -1.0])), saying((0.0, [1.0, 0.0]))
    losses = [policy.loss(torch.ones(2, QUERIES, 16), told, left_and_right).item() for policy in (sides, between)]
    assert losses[0] < losses[1] - 1.0
    assert sides.command(np.ones((QUERIES, 16)), told[0].numpy()) == pytest.approx([0.6, 1.2])


def test_the_loss_counts_metres_and_radians_by_what_a_robot_can_do():
    policy = saying((0.0, [0.0, 0.0]), scale=0.0)
    features, told = torch.ones(1, QUERIES, 16), torch.zeros(1, FACTS)
    by_v, by_w = (policy.loss(features, told, torch.tensor([command])).item() for command in ([0.6, 0.0], [0.0, 1.2]))
    assert by_v == pytest.approx(by_w) and by_v == pytest.approx(1.0, abs=1e-5)


def test_facts_name_the_target_and_say_where_the_robot_has_it():
    told = facts(4, 0.42, 0.9, np.array([2.0, -1.0]), np.array([0.3, 0.6]), np.array([0.6, 0.0]))
    assert told.shape == (FACTS,) and told[:SLOTS].argmax() == 4 and told[:SLOTS].sum() == 1.0
    assert told[SLOTS:] == pytest.approx([0.42, 0.9, 1.0, -0.5, 0.5, 0.5, 1.0, 0.0])


def test_labels_are_the_oracles_whoever_drives(forecasts):
    """The oracle's command at the first tick depends on the scene alone, and what it would do later on where it is led."""
    world, found = World(), {}
    for driver in ('oracle', 'random'):
        found[driver] = cloning.episode(SEED, replace_known(forecasts), {driver: 1.0}, None, world)
    features, told, commands = found['oracle']
    assert len(features) == len(told) == len(commands) > 5 and features.shape[1:] == (QUERIES, 64)
    np.testing.assert_allclose(commands[0], found['random'][2][0])
    assert np.abs(commands[:5] - found['random'][2][:5]).max() > 0.01


def replace_known(forecasts):
    """The same forecasts, whose streams say of all things that they are there, so that no target has to be looked for."""
    def make():
        stream = forecasts.open()
        observe = stream.observe

        def all_there(*arguments):
            presence, places, walls = observe(*arguments)
            return np.ones_like(presence), places, walls
        stream.observe = all_there
        return stream
    return Forecasts(forecasts.name, forecasts.backend, forecasts.image_size, forecasts.step_period, make)


def test_the_controller_reads_the_features_of_the_newest_frame(forecasts):
    policy = ClonedPolicy(64).eval()
    stream, world = replace_known(forecasts).open(), World()
    setup = TASKS['intercept'].setup(SEED)
    world.load(setup.scene)
    controller, odometry = Cloned(policy, stream, forecasts.image_size), WheelOdometry(world)
    command = controller.decide(world, odometry, setup.terms(), [(0.015, np.zeros(2))], np.zeros(2))
    seen = controller.observe(world, odometry, setup.terms(), np.zeros(2), np.zeros(2))
    assert command.shape == (2,) and np.isfinite(command).all()
    np.testing.assert_array_equal(seen[0], stream.features)
    assert seen[1][:SLOTS].argmax() == 4  # the magenta ball


def test_it_is_evaluated_with_its_forecast_and_refused_without_weights(network, tmp_path):
    checkpoint.save(network, tmp_path, {}, torch.float32)
    question = Question(range(SEED, SEED + 1), ('intercept',), tuple(controllers.CLONED), backend='torch',
                        forecast=str(tmp_path))
    with pytest.raises(ModelError, match='no cloned policy at .*cloning'):
        evaluate(question)
    for seed in controllers.CLONED.values():
        file = policy_file(tmp_path, seed)
        file.parent.mkdir(exist_ok=True)
        save_file(ClonedPolicy(64).state_dict(), file)
    report = evaluate(question)
    assert {row['n'] for row in report['tasks']['intercept'].values()} == {1}
    for foreign in (torch.ones(64), torch.tensor(1.0)):
        save_file({'norm.weight': foreign}, policy_file(tmp_path, 0))
        with pytest.raises(ModelError, match='of no cloned policy'):
            ClonedPolicy.load(policy_file(tmp_path, 0))
    policy_file(tmp_path, 0).write_bytes(policy_file(tmp_path, 0).read_bytes()[:-1])
    with pytest.raises(ModelError, match='seed-0.safetensors cannot be read .*; restore it from the release or train again'):
        ClonedPolicy.load(policy_file(tmp_path, 0))


def test_training_clones_what_it_is_shown_and_rounds_are_kept(tmp_path, monkeypatch, capsys):
    rng, shown = np.random.default_rng(0), []
    for _ in range(20):
        told = np.zeros((30, FACTS), np.float32)
        told[:, 0] = 1.0
        told[:, -1] = rng.uniform(-1.0, 1.0, 30)
        commands = np.stack([np.full(30, 0.3), 0.6 * told[:, -1]], 1).astype(np.float32)
        shown.append((rng.standard_normal((30, QUERIES, 16)).astype(np.float16), told, commands))
    monkeypatch.setattr(cloning, 'BATCH', 64)
    monkeypatch.setattr(cloning, 'collect', lambda *arguments: shown)
    line = ['--out', str(tmp_path / 'out'), '--data', str(tmp_path / 'data'), '--trainings', '1', '--epochs', '12',
            '--workers', '1']
    assert cloning.main(line) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row['ticks'] for row in result['rounds']] == [600, 600]
    assert result['losses'][0]['held back'] < -1.0
    policy = ClonedPolicy.load(tmp_path / 'out' / 'seed-0.safetensors')
    v, w = policy.command(shown[0][0][3], shown[0][1][3])
    assert v == pytest.approx(0.3, abs=0.15) and w == pytest.approx(shown[0][2][3, 1], abs=0.3)
    monkeypatch.setattr(cloning, 'collect', lambda *arguments: pytest.fail('a round that is kept was driven again'))
    assert cloning.main(line) == 0
