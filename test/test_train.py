"""Training: targets mean what they say, losses fall, stages resume, the command writes what it promises."""
import argparse
import functools
import json

import numpy as np
import pytest
import torch
from small_model import SMALL, small_model

from worldmodel_ros.model import checkpoint, presets
from worldmodel_ros.train import calibrate, cli, clips, metrics, world
from worldmodel_ros.train.data import Episodes, command_chunks
from worldmodel_ros.train.log import Log
from worldmodel_ros.train.vae import train_vae


def moving_squares(episodes=6, steps=40, seed=0) -> dict[str, np.ndarray]:
    """Episodes of a bright square that moves by the action: a world that a model can learn in seconds."""
    rng = np.random.default_rng(seed)
    size = SMALL.image_size[0]
    actions = np.repeat(rng.uniform(-1, 1, (episodes, steps // 4, 2)), 4, 1).astype(np.float32)
    place = np.clip(np.cumsum(actions * 1.5, 1) + size / 2, 4, size - 5)
    grid = np.arange(size)
    row = np.abs(grid[None, None, :, None] - place[..., 0, None, None]) < 4
    column = np.abs(grid[None, None, None, :] - place[..., 1, None, None]) < 4
    frames = np.where((row & column)[..., None], 220, 40).astype(np.uint8).repeat(3, -1)
    goals = len(SMALL.goals)
    return {'frames': frames, 'actions': actions, 'expert': np.repeat(actions[:, :, None], goals, 2) * 0.3,
            'collided': rng.random((episodes, steps)) < 0.1, 'visible': np.ones((episodes, steps, goals), bool),
            'goal_distance': rng.uniform(0.3, 4.0, (episodes, steps, goals)).astype(np.float32)}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('episodes')
    for name, array in moving_squares().items():
        np.save(path / f'{name}.npy', array)
    return path


def losses(log_file, name):
    return [json.loads(line)[name] for line in log_file.read_text().splitlines()]


def test_a_command_chunk_follows_the_expert_only_while_the_robot_does():
    expert = torch.zeros(1, 6, 1, 2)
    expert[0, :, 0, 0] = torch.arange(6) * 0.05
    actions = torch.zeros(1, 6, 2)
    actions[0, 1:] = expert[0, :-1, 0]  # the robot does what the expert said ...
    actions[0, 3] = torch.tensor([0.6, 1.5])  # ... but for the action that led to frame 3
    target, mask = command_chunks(expert, actions, SMALL)
    torch.testing.assert_close(target[0, 0, 0, :, 0], torch.tensor([0.0, 0.05, 0.10, 0.15]))
    assert mask[0, :, 0].tolist() == [[True, True, True, False], [True, True, False, False], [True, False, False, False]]


def test_a_chunk_sees_its_window_and_itself_and_no_other_chunk():
    starts = np.array([2, 9])
    bias = clips.noisy_bias(SMALL, 14, starts) == 0
    first, second = bias[0], bias[SMALL.chunk_frames]
    assert np.flatnonzero(first[:14]).tolist() == [0, 1]
    assert np.flatnonzero(second[:14]).tolist() == list(range(3, 9))  # window_frames is 6
    assert np.flatnonzero(first[14:]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(second[14:]).tolist() == [4, 5, 6, 7]


def test_the_vae_learns(folder, tmp_path):
    model = small_model().requires_grad_(True)
    episodes = Episodes.load(folder, 'cpu')
    train_vae(model.vae, episodes, 0.0, Log(tmp_path, 'vae', every=0.0), batch=8, compile_model=False, limit=60)
    error = losses(tmp_path / 'vae.jsonl', 'mse')
    assert np.mean(error[-5:]) < 0.5 * np.mean(error[:5])
    episodes.encode(model.vae)
    spread = episodes.latents.float().std((0, 1, 2, 3))
    assert ((spread > 0.3) & (spread < 3.0)).all(), 'latents are not normalised'


def test_teacher_and_student_learn(folder, tmp_path):
    model = small_model().requires_grad_(True)
    episodes = Episodes.load(folder, 'cpu')
    episodes.encode(model.vae)
    world.train_world(model, episodes, 0.0, Log(tmp_path, 'teacher', every=0.0), batch=4, compile_model=False, limit=40)
    flow = losses(tmp_path / 'teacher.jsonl', 'flow')
    imitation = losses(tmp_path / 'teacher.jsonl', 'imitation')
    assert np.mean(flow[-5:]) < 0.9 * np.mean(flow[:5])
    assert np.mean(imitation[-5:]) < 0.9 * np.mean(imitation[:5])
    teacher = world.frozen_copy(model)
    world.train_world(model, episodes, 0.0, Log(tmp_path, 'student', every=0.0), teacher=teacher, batch=4,
                      compile_model=False, limit=40)
    for name in ('half', 'whole'):
        error = losses(tmp_path / 'student.jsonl', name)
        assert np.mean(error[-8:]) < 0.9 * np.mean(error[:8]), name


def arguments(folder, out, *extra):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(['--preset', 'small-test', '--data', str(folder), '--out', str(out),
                              '--steps', '3', '3', '3', '--batch', '2', '--vae-batch', '4', '--no-compile',
                              '--device', 'cpu', *extra])


def test_the_command_writes_checkpoint_curves_and_metrics_and_resumes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(presets.PRESETS, 'small-test', SMALL)
    monkeypatch.setattr(metrics, 'SAMPLERS', {'two_step': (1, 2), 'one_step': (2, 1)})
    monkeypatch.setattr(metrics, 'evaluate', functools.partial(metrics.evaluate, batches=1, batch=2))
    assert cli.main(arguments(folder, tmp_path, '--eval-data', str(folder))) == 0
    assert checkpoint.load(tmp_path / 'final').preset == SMALL
    assert (tmp_path / 'curves.png').stat().st_size > 1000
    table = json.loads((tmp_path / 'metrics.json').read_text())['psnr_db']
    assert set(table) == {'two_step', 'one_step', 'copy_last', 'vae'}
    assert np.isfinite([row['mean'] for row in table.values()]).all()
    capsys.readouterr()
    assert cli.main(arguments(folder, tmp_path)) == 0
    assert '[student] taken from' in capsys.readouterr().out


def test_steps_instead_of_minutes_repeat_to_the_bit(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, 'small-test', SMALL)
    weights = []
    for run in ('a', 'b'):
        cli.main(arguments(folder, tmp_path / run))
        weights.append(checkpoint.load(tmp_path / run / 'final').state_dict())
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name


def test_missing_episodes_are_named_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match='frames.*worldmodel_ros.sim.rollout'):
        Episodes.load(tmp_path, 'cpu')


def test_training_goes_on_from_a_model_and_keeps_its_vae(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, 'small-test', SMALL)
    cli.main(arguments(folder, tmp_path / 'first'))
    cli.main(arguments(folder, tmp_path / 'second', '--init', str(tmp_path / 'first' / 'final')))
    first, second = (checkpoint.load(tmp_path / run / 'final').state_dict() for run in ('first', 'second'))
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith('vae.'))
    assert not torch.equal(first['dit.embed.weight'], second['dit.embed.weight'])
    provenance = json.loads((tmp_path / 'second' / 'final' / 'model.json').read_text())['provenance']
    assert provenance['continues'][0]['episodes'] == 5  # one of six is held back for calibration


def test_calibration_finds_the_true_odds_of_overconfident_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator) - 2.0
    truth = (torch.rand(20_000, generator=generator) < torch.sigmoid(logits)).float()
    scale, shift = calibrate.fit(4.0 * logits + 1.0, truth)
    assert scale == pytest.approx(0.25, rel=0.05)
    assert shift == pytest.approx(-0.25, abs=0.05)


def test_calibrated_probabilities_are_those_that_the_head_then_gives(folder):
    model = small_model().requires_grad_(True)
    episodes = Episodes.load(folder, 'cpu')
    episodes.encode(model.vae)
    torch.manual_seed(0)  # the noise that the chunks start from
    result = calibrate.calibrate(model, episodes, batches=1, batch=4)
    torch.manual_seed(0)
    logits, truth = calibrate.contact_logits(model, episodes, batches=1, batch=4)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth)
    assert float(loss) == pytest.approx(result['log_loss'], abs=1e-3)
    assert result['log_loss'] <= result['log_loss_before']


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order():
    assert calibrate.area_under_curve(torch.tensor([0.1, 0.9, 0.4, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0])) == 0.75
