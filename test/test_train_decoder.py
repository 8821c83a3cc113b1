"""Stage ``decoder``: images of imagined latents become sharper, and nothing else of the model changes."""
import json

import cv2
import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint, small_model

from worldmodel_ros.evaluate.drive import pictures
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.vae import to_frames
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.decoder import DecoderObjective
from worldmodel_ros.train.objectives.detail import energy_error, sharpness
from worldmodel_ros.train.run import points as points_of
from worldmodel_ros.train.run.loop import averaged_copy
from worldmodel_ros.train.run.options import DecoderOptions
from worldmodel_ros.train.run.points import Points

STEPS = 60


def stripes(episodes=4, steps=24, seed=0) -> Episodes:
    """Episodes of stripes of which the latents do not tell where each begins."""
    rng, (height, width) = np.random.default_rng(seed), SMALL.image_size
    begins = rng.integers(0, 8, (episodes, steps, 1, 1))
    bright = (np.arange(width) + begins) % 8 < 4
    frames = np.repeat(np.broadcast_to(np.where(bright, 220, 30), (episodes, steps, height, width))[..., None], 3, -1)
    latents = rng.standard_normal((episodes, steps, *SMALL.latent_size, SMALL.latent_channels))
    return Episodes(frames=torch.from_numpy(frames.astype(np.uint8)), actions=torch.zeros(episodes, steps, 2),
                    latents=torch.from_numpy(latents).bfloat16())


def begun(points=None, **changes):
    """A model that may learn, and its objective."""
    torch.manual_seed(0)
    model = small_model()
    model.vae.decoder.requires_grad_(True)
    sizes = {'batch': 8, 'streams': 4, 'ahead': 8, 'reuse': 8, 'adversary_width': 8, 'adversary_rate': 3e-4, 'judge_s': 1e9,
             'energy_weight': 0.0, 'adversary_weight': 0.0}
    episodes = stripes()
    return model, DecoderObjective(model, averaged_copy(model), episodes, DecoderOptions(**sizes | changes), episodes,
                                   points or Points())


def train(objective, optimiser, random, steps):
    """Return what was watched in each step of a plain loop, of which all is done but the beginning."""
    rows = []
    objective.done = 0.5
    for step in range(steps):
        loss, values = objective.loss(objective.draw(*random))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            objective.after_update(step)
        rows.append({name: float(value.detach()) for name, value in values.items()})
    return rows


def beginning(objective, seed=0):
    return (torch.optim.AdamW(objective.parameters(), lr=5e-3),
            (np.random.default_rng(seed), torch.Generator().manual_seed(seed)))


def detail_after(**changes):
    """Error of energies, and what the adversary makes of the images, after a short training."""
    model, objective = begun(**changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = train(objective, *beginning(objective), STEPS)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved and all(name.startswith('vae.decoder.') for name in moved)
    return {name: np.mean([row[name] for row in rows[-10:]]) for name in ('energy', 'believed')}


def test_errors_alone_leave_images_blurred_that_energies_and_an_adversary_sharpen():
    blurred = detail_after(adversary_rate=1e-3)
    with_energy = detail_after(energy_weight=1.0)
    assert with_energy['energy'] < 0.8 * blurred['energy']
    with_adversary = detail_after(adversary_rate=1e-3, adversary_weight=4.0)
    assert with_adversary['believed'] > blurred['believed'] + 0.5


def test_sharpness_of_many_images_is_that_of_the_evaluation():
    frames = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3)).astype(np.uint8)
    frames[1] = cv2.GaussianBlur(frames[1], (5, 5), 0)
    expected = [pictures.sharpness(frame) for frame in frames]
    np.testing.assert_allclose(sharpness(torch.from_numpy(frames)).numpy(), expected, rtol=1e-4)


def test_energies_err_by_blur_and_by_patterns_on_smooth_walls_and_not_by_the_cameras_noise():
    rng = np.random.default_rng(0)
    true = np.full((1, 3, 64, 64), -0.2, np.float32)
    true[..., 20:40] = 0.4
    noisy = true + rng.standard_normal(true.shape).astype(np.float32) * 3 / 127.5
    blurred = np.moveaxis(cv2.GaussianBlur(np.moveaxis(true[0], 0, -1), (5, 5), 0), -1, 0)[None]
    grid = true + 0.05 * (np.indices((64, 64)).sum(0) % 2)
    errors = {name: float(energy_error(torch.from_numpy(image.astype(np.float32)), torch.from_numpy(noisy), torch.ones(1)))
              for name, image in (('true', true), ('blurred', blurred), ('grid', grid), ('noisy', noisy))}
    assert errors['true'] < 0.35 and min(errors['blurred'], errors['grid']) > 3 * errors['true'], errors
    half = energy_error(torch.from_numpy(true) * 0.5 ** 0.5, torch.from_numpy(true), torch.tensor([0.5]))
    assert float(half) < 0.05  # half of the energy is asked for


def test_what_was_saved_goes_on_exactly():
    whole, objective = begun(energy_weight=0.1, adversary_weight=1.0)
    optimiser, random = beginning(objective)
    train(objective, optimiser, random, 5)
    state = {name: value.clone() for name, value in objective.state().items()}
    weights, moments = {k: v.clone() for k, v in whole.state_dict().items()}, optimiser.state_dict()
    moments = {**moments, 'state': {k: {n: v.clone() for n, v in row.items()} for k, row in moments['state'].items()}}
    numpy_state, torch_state = random[0].bit_generator.state, random[1].get_state()
    train(objective, optimiser, random, 6)  # into other streams

    again, second = begun(energy_weight=0.1, adversary_weight=1.0)
    again.load_state_dict(weights)
    second.restore(state)
    optimiser, random = beginning(second, seed=9)
    optimiser.load_state_dict(moments)
    random[0].bit_generator.state = numpy_state
    random[1].set_state(torch_state)
    train(second, optimiser, random, 6)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def row(step, sharp, db, encoded=1.0):
    def way(share, psnr):
        return {'psnr_db': psnr, 'sharpness': share, 'median_sharpness': share}
    return {'step': step, 'two_step': way(sharp, db), 'one_step': way(sharp, db), 'encoded': way(encoded, 36.0)}


@pytest.mark.parametrize('rows, best', [
    ([row(1, 0.6, 23.5), row(2, 0.7, 23.4), row(3, 0.65, 23.3)], 2),  # the sharpest
    ([row(1, 0.8, 23.0), row(2, 0.85, 22.9), row(3, 0.95, 22.0)], 2),  # the latest that is sharp, and near the truth
    ([row(1, 0.8, 23.0), row(2, 0.8, 23.0, encoded=0.8)], 1)])
def test_the_point_that_is_left_is_sharp_at_little_cost(rows, best):
    points = Points()
    points.before = row(0, 0.45, 23.5, 0.77)
    for each in rows:
        points.add(each, {})
    assert points.chosen[0]['step'] == best


def test_points_are_on_disk_at_once_and_the_best_outlive_the_others(tmp_path):
    points = Points(tmp_path)
    points.before = row(0, 0.45, 23.5, 0.77)
    points.add(row(1, 0.8, 23.4), {'inp.weight': torch.ones(2)})
    assert Points(tmp_path).chosen[0]['step'] == 1
    for step in range(2, points_of.MOST + 4):
        points.add(row(step, 0.5, 23.4), {'inp.weight': torch.full((2,), float(step))})
    before, kept = points_of.read(tmp_path / points_of.FILE)
    assert before == points.before and len(kept) == points_of.MOST and kept[0][0]['step'] == 1
    assert all(torch.equal(weights['inp.weight'], torch.full((2,), float(each['step'])).bfloat16()) for each, weights in kept)


def test_the_stage_leaves_the_best_point_and_not_the_last_one(tmp_path):
    model, objective = begun(Points(tmp_path))
    train(objective, *beginning(objective), 2)
    good = {name: torch.full_like(value, 0.25) for name, value in model.vae.decoder.state_dict().items()}
    objective.points.add(row(1, 0.8, 60.0), good)
    objective.points.before = row(0, 0.45, 23.5, 0.77)
    objective.finish()
    assert [each['step'] for each, _ in objective.points.points] == [1, 2]
    assert all(torch.equal(value, good[name]) for name, value in model.vae.decoder.state_dict().items())


def test_a_point_and_a_share_of_it_become_models_that_differ_in_their_decoder_alone(tmp_path, capsys):
    folder = small_checkpoint(tmp_path)
    old = checkpoint.load(folder)
    points = Points(tmp_path)
    points.before = row(0, 0.45, 23.5, 0.77)
    points.add(row(7, 0.8, 23.0), {name: value + 1.0 for name, value in old.vae.decoder.state_dict().items()})
    file = str(tmp_path / points_of.FILE)
    assert points_of.main([file]) == 0 and 'best: 7' in capsys.readouterr().out
    for share in (1.0, 0.5):
        assert points_of.main([file, '--model', str(folder), '--share', str(share), '--out', str(tmp_path / 'new')]) == 0
        for name, value in checkpoint.load(tmp_path / 'new').state_dict().items():
            expected = old.state_dict()[name] + (share if name.startswith('vae.decoder.') else 0.0)
            torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)
    described = json.loads((tmp_path / 'new' / 'model.json').read_text())['provenance']
    assert described['stages']['decoder']['share'] == 0.5 and described['continues'] == [{'trained': False}]
    assert points_of.main([file, '--model', str(folder), '--step', '8', '--out', str(tmp_path / 'none')]) == 1
    assert 'choose --step from 7' in capsys.readouterr().err


def test_the_judge_finds_what_the_evaluation_would():
    model, objective = begun()
    found, judge = objective.points.before['encoded'], objective._judge
    latents, true = judge._latents['encoded'], judge._truth.numpy()
    images = to_frames(model.vae.decode_after(latents[:, 1], latents[:, 0])).numpy()
    assert found['psnr_db'] == pytest.approx(np.mean([pictures.psnr(*pair) for pair in zip(images, true)]), abs=1e-3)
    ratios = [pictures.sharpness(image) / pictures.sharpness(truth) for image, truth in zip(images, true)]
    assert found['sharpness'] == pytest.approx(np.mean(ratios), abs=1e-3)


def test_frames_that_are_no_whole_chunks_are_refused():
    with pytest.raises(ValueError, match='ahead is 6: it must be whole chunks of 4 frames'):
        begun(ahead=6)


@pytest.mark.parametrize('change, complaint', [
    ({'batch': 0}, r'batch \(0\) must be above zero'), ({'encoded_share': 1.5}, 'encoded_share is 1.5: it must be from 0 to 1'),
    ({'adversary_weight': -1.0}, 'adversary_weight is -1.0: it must be zero or more'), ({'aim': 0.0}, 'aim is 0.0: it must')])
def test_options_that_make_no_sense_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        DecoderOptions(**change)
