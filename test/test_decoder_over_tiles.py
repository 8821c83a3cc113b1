"""Stage ``decoder`` over tiles: it learns from clips that go on with what the model imagines, each time a chunk deeper."""
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import small_checkpoint
from test_tile_training import TILED, decided_model, tiled_episodes
from test_train_decoder import beginning, train

from worldmodel_ros.model import checkpoint
from worldmodel_ros.train.objectives import streams
from worldmodel_ros.train.objectives.decoder import DecoderObjective
from worldmodel_ros.train.run import points as points_of
from worldmodel_ros.train.run.config import read_config
from worldmodel_ros.train.run.loop import averaged_copy
from worldmodel_ros.train.run.options import DecoderOptions
from worldmodel_ros.train.run.points import Points

pytestmark = pytest.mark.usefixtures('one_thread')
CONFIGS = Path(__file__).resolve().parents[1] / 'config/train'


@pytest.fixture(scope='module')
def model():
    return decided_model()


def pictured(frames=40):
    """Episodes whose images tell their episode and frame."""
    episodes = tiled_episodes(frames)
    numbers = torch.arange(4 * frames).view(4, frames)
    images = numbers.to(torch.uint8)[..., None, None, None].expand(-1, -1, *TILED.image_size, 3)
    return replace(episodes, frames=images.contiguous(), latents=episodes.latents.bfloat16())


def options(**changes):
    return DecoderOptions(**{'batch': 8, 'streams': 2, 'ahead': 12, 'reuse': 2, 'adversary_width': 8, 'judge_s': 1e9} | changes)


def objective_of(model, episodes=None, **changes):
    model.vae.decoder.requires_grad_(True)
    episodes = episodes or pictured()
    return DecoderObjective(model, averaged_copy(model), episodes, options(**changes), pictured(), Points())


def test_streams_are_what_was_imagined_next_to_the_truth_of_the_same_frames(model):
    episodes = pictured()
    source, random = streams.source(model, episodes, options()), (np.random.default_rng(0), torch.Generator().manual_seed(0))
    seen, depths = set(), []
    for _ in range(8):
        drawn = source.draw(*random)
        imagined, encoded = drawn.latents
        assert torch.equal(encoded, episodes.latents[drawn.episode, drawn.frame])
        assert torch.equal(imagined[:, 0], encoded[:, 0]) or int(drawn.frame[0, 0]) in seen  # observed, or imagined earlier
        assert not (imagined[:, 1:] == encoded[:, 1:]).flatten(2).all(-1).any()
        assert (drawn.frame.diff() == 1).all() and imagined.shape[1] % TILED.chunk_frames == 1
        deepest = int(drawn.ahead.max())
        assert drawn.ahead.tolist() == [min(n, deepest) for n in range(len(drawn.ahead))]
        seen.update(drawn.frame.flatten().tolist())
        depths.append(deepest)
    assert set(depths) <= {4, 8, 12} and len(set(depths)) > 1


def test_moments_are_all_so_many_frames_ahead(model):
    source = streams.source(model, pictured(), options())
    found, again = source.moments(10), source.moments(10)
    assert torch.equal(found.images, again.images) and torch.equal(found.imagined[2], again.imagined[2])
    chunks = options().ahead // TILED.chunk_frames
    assert len(found.images) == 2 * (chunks - 2) and set(found.imagined) == {1, 2}
    numbers = found.images[:, 0, 0, 0].long()
    episodes = pictured()
    for pair, number in zip(found.encoded, numbers):
        episode, frame = divmod(int(number), 40)
        assert torch.equal(pair, episodes.latents[episode, frame - 1:frame + 1].float())
        # The first frame that any chunk is judged at is the tenth after the window.
        assert frame >= TILED.staying_frames + TILED.window_frames + 9 - 1 - TILED.chunk_frames
    assert not torch.equal(found.imagined[1], found.imagined[2])


def test_the_decoder_alone_learns(model):
    objective = objective_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(np.isfinite(list(row.values())).all() for row in train(objective, *beginning(objective), 4))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved and all(name.startswith('vae.decoder.') for name in moved)


def test_details_that_fade_count_less_the_farther_ahead_an_image_is(model):
    def pulled(fade):
        """Return what energy and adversary add to the gradient of a near and of a far image."""
        found = []
        for weights in ({}, {'energy_weight': 0.0, 'adversary_weight': 0.0}):
            objective = objective_of(model, details_fade=fade, encoded_share=0.0, **weights)
            objective.done = 1.0
            torch.manual_seed(0)
            batch = objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))
            batch.latents, batch.before = (part[:1].expand(8, -1, -1, -1).clone() for part in (batch.latents, batch.before))
            batch.images, batch.noise = batch.images[:1].expand(8, -1, -1, -1), batch.noise[:, :1].expand(-1, 8, -1, -1, -1)
            batch.ahead = torch.tensor([1] * 4 + [100] * 4)
            batch.latents.requires_grad_(True)
            objective.loss(batch)[0].backward()
            found.append(batch.latents.grad)
        near, far = (found[0] - found[1])[[0, 4]].flatten(1).norm(dim=1)
        return float(far / near)
    assert pulled(False) == pytest.approx(1.0, rel=1e-3)
    assert pulled(True) == pytest.approx((1.0 + TILED.step_period) / (1.0 + 100 * TILED.step_period), rel=1e-3)


def test_a_resumed_stage_goes_on_with_its_clips_unless_its_episodes_are_others(model):
    first, random = objective_of(model), (np.random.default_rng(0), torch.Generator().manual_seed(0))
    first.draw(*random)
    state = {name: value.clone() for name, value in first.state().items()}
    again = objective_of(model)
    again.restore(state)
    assert again.left == first.left == 1
    assert torch.equal(again._streams.latents, first._streams.latents)
    others = replace(pictured(), latents=pictured().latents.flip(0))
    restarted = objective_of(model, others)
    restarted.restore(state)
    assert restarted.left == 0
    drawn = restarted.draw(*random)
    assert torch.isfinite(drawn.latents).all()


def test_a_stage_that_could_not_be_judged_is_refused(model):
    with pytest.raises(ValueError, match='ahead is 8, and images are judged 10 frames ahead: give at least 12'):
        objective_of(model, ahead=8)
    with pytest.raises(ValueError, match='ahead is 6: it must be whole chunks of 4 frames'):
        objective_of(model, ahead=6)


def test_the_shipped_configuration_has_episodes_for_its_clips():
    config = read_config(CONFIGS / 'small_tiles_decoder.yaml')
    preset, decoder = config.model_preset, config.decoder.objective
    assert config.clip_frames == preset.staying_frames + preset.window_frames + decoder.ahead
    assert config.data.frames > config.clip_frames and decoder.details_fade


@pytest.mark.parametrize('dtype', [torch.int8, torch.bfloat16])
def test_a_new_decoder_leaves_the_other_files_as_they_are_stored(tmp_path, dtype):
    folder = tmp_path / 'model'
    checkpoint.save(checkpoint.load(small_checkpoint(tmp_path)), folder, {}, dtype)
    assert checkpoint.is_8_bit(folder) is (dtype is torch.int8)
    old = checkpoint.load(folder)
    points = Points(tmp_path)
    scores = {'psnr_db': 23.0, 'sharpness': 0.8, 'median_sharpness': 0.8}
    points.before = {'two_step': scores}
    points.add({'step': 7, 'two_step': scores, 'encoded': scores},
               {name: value + 1.0 for name, value in old.vae.decoder.state_dict().items()})
    assert points_of.main([str(tmp_path / points_of.FILE), '--model', str(folder), '--out', str(tmp_path / 'new')]) == 0
    assert checkpoint.is_8_bit(tmp_path / 'new') is (dtype is torch.int8)
    for name, value in checkpoint.load(tmp_path / 'new').state_dict().items():
        assert torch.equal(value, old.state_dict()[name]) is not name.startswith('vae.decoder.'), name
