"""Short predictions of models that differ in size, on the same clips and at one size of the pictures."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from episodes import moving_squares
from small_model import SMALL, small_model

from worldmodel_ros.train.run import metrics

WIDER = replace(SMALL, name='wider-test', latent_channels=SMALL.latent_channels * 2)  # draws more noise


def judged(preset, **chosen):
    model, episodes = small_model(preset=preset), moving_squares()
    episodes.encode(model.vae)
    return metrics.evaluate(model, episodes, batches=2, batch=4, **chosen)


def test_a_pixel_of_an_averaged_picture_is_the_mean_of_its_square():
    pictures = torch.arange(-8.0, 8.0).reshape(1, 1, 4, 4).expand(2, 3, 4, 4) / 8
    expected = torch.tensor([[-5.5, -3.5], [2.5, 4.5]]) / 8
    assert torch.equal(metrics.averaged_down(pictures, 2), expected.expand(2, 3, 2, 2))
    assert metrics.averaged_down(pictures, 4) is pictures and metrics.averaged_down(pictures, None) is pictures


def test_a_size_that_the_pictures_are_no_multiple_of_is_named():
    with pytest.raises(ValueError, match='32 rows cannot be averaged down to 24'):
        judged(SMALL, samplers=['one_step'], picture_size=24)


def test_models_of_different_shapes_are_judged_on_the_same_clips():
    one, other = (judged(preset, samplers=['one_step'])['psnr_db'] for preset in (SMALL, WIDER))
    assert one['copy_last'] == other['copy_last'] and len(one['copy_last']['by_batch']) == 2
    assert one['one_step'] != other['one_step']


def test_pictures_are_compared_at_the_size_that_is_asked_for():
    whole, small = (judged(SMALL, samplers=['two_step'], picture_size=size) for size in (None, 16))
    assert (whole['picture_size'], small['picture_size']) == (32, 16)
    assert set(small['psnr_db']) == {'two_step', 'copy_last', 'vae'}
    # The edges of a square that has moved are averaged with what is beside them.
    assert small['psnr_db']['copy_last']['mean'] > whole['psnr_db']['copy_last']['mean']
    assert np.isfinite(small['psnr_db']['vae']['mean'])


def test_a_sampler_that_is_not_known_is_named(capsys):
    with pytest.raises(SystemExit):
        metrics.main(['--data', 'nowhere', '--samplers', 'two_step,three_step'])
    assert 'unknown three_step; known: teacher_32, two_step' in capsys.readouterr().err
