"""Stage ``decoder``: images of imagined latents become sharper, and nothing else of the model changes."""
import numpy as np
import pytest
import torch
from small_model import SMALL, small_model

from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.decoder import DecoderObjective
from worldmodel_ros.train.run.options import DecoderOptions

STEPS = 60


def stripes(episodes=4, steps=24, seed=0) -> Episodes:
    """Episodes of stripes of which the latents do not tell where each begins."""
    rng, (height, width) = np.random.default_rng(seed), SMALL.image_size
    begins = rng.integers(0, 8, (episodes, steps, 1, 1))
    bright = (np.arange(width) + begins) % 8 < 4
    frames = np.repeat(np.broadcast_to(np.where(bright, 220, 30), (episodes, steps, height, width))[..., None], 3, -1)
    count = len(SMALL.goals)
    return Episodes(
        frames=torch.from_numpy(frames.astype(np.uint8)), actions=torch.zeros(episodes, steps, 2),
        expert=torch.zeros(episodes, steps, count, 2), collided=torch.zeros(episodes, steps, dtype=torch.bool),
        goal_distance=torch.ones(episodes, steps, count), visible=torch.ones(episodes, steps, count, dtype=torch.bool),
        poses=torch.zeros(episodes, steps, 3),
        latents=torch.from_numpy(rng.standard_normal((episodes, steps, *SMALL.latent_size, SMALL.latent_channels))).bfloat16())


def begun(**changes):
    """A model that may learn, and its objective."""
    torch.manual_seed(0)
    model = small_model()
    model.vae.decoder.requires_grad_(True)
    sizes = {'batch': 16, 'streams': 4, 'ahead': 8, 'reuse': 8, 'adversary_width': 16, 'adversary_rate': 3e-4}
    return model, DecoderObjective(model, stripes(), DecoderOptions(**sizes | changes))


def train(objective, optimiser, random, steps):
    """Return what was watched in each step of a plain loop."""
    rows = []
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


def test_the_adversary_takes_images_for_true_that_errors_alone_do_not_lead_to():
    found = {}
    for weight in (0.0, 2.0):
        model, objective = begun(adversary_weight=weight)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rows = train(objective, *beginning(objective), STEPS)
        assert weight or rows[-1]['mse'] < 0.95 * rows[0]['mse']
        found[weight] = np.mean([row['believed'] for row in rows[-10:]])
        moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
        assert moved and all(name.startswith('vae.decoder.') for name in moved)
    assert found[2.0] > found[0.0] + 0.3, found


def test_what_was_saved_goes_on_exactly():
    whole, objective = begun()
    optimiser, random = beginning(objective)
    train(objective, optimiser, random, 5)
    state = {name: value.clone() for name, value in objective.state().items()}
    weights, moments = {k: v.clone() for k, v in whole.state_dict().items()}, optimiser.state_dict()
    moments = {**moments, 'state': {k: {n: v.clone() for n, v in row.items()} for k, row in moments['state'].items()}}
    numpy_state, torch_state = random[0].bit_generator.state, random[1].get_state()
    train(objective, optimiser, random, 6)  # into other streams

    again, second = begun()
    again.load_state_dict(weights)
    second.restore(state)
    optimiser, random = beginning(second, seed=9)
    optimiser.load_state_dict(moments)
    random[0].bit_generator.state = numpy_state
    random[1].set_state(torch_state)
    train(second, optimiser, random, 6)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_frames_that_are_no_whole_chunks_are_refused():
    with pytest.raises(ValueError, match='ahead is 6: it must be whole chunks of 4 frames'):
        begun(ahead=6)


@pytest.mark.parametrize('change, complaint', [
    ({'batch': 0}, r'batch \(0\), streams .* must be above zero'), ({'encoded_share': 1.5}, r'encoded_share \(1.5\) must be'),
    ({'adversary_weight': -1.0}, r'adversary_weight \(-1.0\) not below zero')])
def test_options_that_make_no_sense_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        DecoderOptions(**change)
