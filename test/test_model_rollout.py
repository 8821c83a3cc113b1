"""The dense rollout makes plain passes of the network, in training and in evaluation: the same numbers, bit for bit."""
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import SMALL, small_model

from worldmodel_ros.evaluate.quality.imagination import Imagination
from worldmodel_ros.model.rollout import Rollout, frame_mask
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.sampling import FLOW, ONE_STEP, TWO_STEP, Steps
from worldmodel_ros.train.objectives.sampler import roll_out

STREAMS, OBSERVED, CHUNKS = 2, 3, 4
AHEAD = CHUNKS * SMALL.chunk_frames


@pytest.fixture(scope='module')
def model():
    return small_model()


@pytest.fixture(scope='module')
def inputs():
    """Latents, actions and noise of streams, observed and ahead."""
    rng = np.random.default_rng(0)
    latent = *SMALL.latent_size, SMALL.latent_channels
    arrays = (rng.normal(size=(STREAMS, OBSERVED + AHEAD, *latent)), rng.uniform(-0.3, 0.6, (STREAMS, OBSERVED + AHEAD, 2)),
              rng.normal(size=(STREAMS, AHEAD, *latent)))
    return [torch.from_numpy(array.astype(np.float32)) for array in arrays]


@torch.no_grad()
def plain_passes(dit, latents, actions, noise, steps, end):
    """The definition: every pass by itself; ``end`` gives a chunk from its last step's z and prediction."""
    window, seen, k = None, latents.shape[1], SMALL.chunk_frames

    def one(z, first, tau, row, committed):
        kept = 0 if window is None else window[0].shape[3] // SMALL.tokens
        level, times = torch.full(z.shape[:2], tau), np.arange(first, first + z.shape[1])
        mask = torch.from_numpy(frame_mask(SMALL, kept, len(times), committed).astype(np.float32))
        rotary = torch.from_numpy(rotary_angles(SMALL, times))
        return dit(z, level, torch.full_like(level, row, dtype=torch.long), actions[:, first:first + len(times)], rotary,
                   mask, *(window or (None, None)))

    chunks, block = [], latents
    for first in range(seen, seen + noise.shape[1], k):
        new = one(block, first - block.shape[1], 1.0, FLOW, True)[2:]
        joined = new if window is None else [torch.cat(parts, 3) for parts in zip(window, new)]
        window = tuple(part[:, :, :, -SMALL.window_frames * SMALL.tokens:] for part in joined)
        z = noise[:, first - seen:first - seen + k]
        for step in range(steps.count):
            tau = step / steps.count
            x = one(z, first, tau, steps.row, False)[0]
            last = step + 1 == steps.count
            z = end(z, x) if last else z + (x - z) * (1.0 / (steps.count * (1.0 - tau)))
        chunks.append(z)
        block = z
    return torch.cat(chunks, 1)


@pytest.mark.parametrize('steps', [ONE_STEP, TWO_STEP, Steps(FLOW, 5)], ids=['one', 'two', 'flow'])
def test_a_rollout_is_made_of_plain_passes(model, inputs, steps):
    latents, actions, noise = inputs
    rollout = Rollout(model.dit)
    with torch.no_grad():
        streams = rollout.observe(latents[:, :OBSERVED], actions[:, :OBSERVED])
        found, after = rollout.roll(streams, noise, actions[:, OBSERVED:], steps)
        halves, between = rollout.roll(streams, noise[:, :8], actions[:, OBSERVED:][:, :8], steps)
        rest, _ = rollout.roll(between, noise[:, 8:], actions[:, OBSERVED:][:, 8:], steps)
    assert torch.equal(found, plain_passes(model.dit, latents[:, :OBSERVED], actions, noise, steps, lambda z, x: x))
    assert torch.equal(torch.cat([halves, rest], 1), found)  # it goes on where it ended
    assert after.newest == OBSERVED + AHEAD - 1 and streams.newest == OBSERVED - 1
    assert after.keys.shape[3] == SMALL.window_frames * SMALL.tokens and torch.equal(after.latent, found[:, -1])


@pytest.mark.parametrize('count', [1, 2])
def test_training_rolls_out_in_the_same_passes(model, inputs, count):
    latents, actions, noise = inputs
    found = roll_out(model.dit, latents[:, :OBSERVED], actions, noise, count)
    expected = plain_passes(model.dit, latents[:, :OBSERVED], actions, noise, Steps.of(count), lambda z, x: z + (x - z))
    assert torch.equal(found, expected)
    assert not found.is_inference()  # gradients flow through what goes on from it


def test_evaluation_rolls_out_in_the_same_passes(model):
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (STREAMS, OBSERVED, *SMALL.image_size, 3), dtype=np.uint8)
    actions = rng.uniform(-0.3, 0.6, (STREAMS, OBSERVED + AHEAD, 2)).astype(np.float32)
    batch, shape = Imagination(model), (SMALL.chunk_frames, *SMALL.latent_size, SMALL.latent_channels)
    memory = batch.observe(frames, actions[:, :OBSERVED], (3, 4))
    found, after = batch.roll(memory, actions[:, OBSERVED:], TWO_STEP)
    noise = np.stack([np.concatenate([
        np.random.Generator(np.random.Philox(key=[seed, first])).standard_normal(shape, np.float32)
        for first in range(OBSERVED, OBSERVED + AHEAD, SMALL.chunk_frames)]) for seed in memory.seeds])
    with torch.inference_mode():
        expected = plain_passes(model.dit, batch.encode(frames), torch.from_numpy(actions), torch.from_numpy(noise),
                                TWO_STEP, lambda z, x: x)
    assert torch.equal(found, expected) and after.seeds == (3, 4)


def test_the_last_chunk_is_only_committed_where_somebody_goes_on_from_it(model, inputs):
    latents, actions, noise = inputs
    rollout, passes = Rollout(model.dit), []
    hook = model.dit.register_forward_hook(lambda *_: passes.append(1))
    try:
        with torch.no_grad():
            streams = rollout.observe(latents[:, :OBSERVED], actions[:, :OBSERVED])
            passes.clear()
            rollout.roll(streams, noise, actions[:, OBSERVED:], TWO_STEP)
            with_last = len(passes)
            passes.clear()
            rollout.roll(streams, noise, actions[:, OBSERVED:], TWO_STEP, commit_last=False)
    finally:
        hook.remove()
    assert (with_last, len(passes)) == (3 * CHUNKS, 3 * CHUNKS - 1)


def test_sinks_take_the_place_of_the_oldest_frames():
    preset = replace(SMALL, name='sinks-test', window_frames=8, sink_frames=4)
    dit, rng = small_model(preset=preset).dit, np.random.default_rng(2)
    shape = (1, 8 + 12, *preset.latent_size, preset.latent_channels)
    latents, noise = (torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for _ in range(2))
    actions, rollout = torch.zeros(1, 20, 2), Rollout(dit)
    with torch.no_grad():
        streams = rollout.observe(latents[:, :8], actions[:, :8])
        sinks = rollout.sinks(latents[:, :8], actions[:, :8])
        plain, _ = rollout.roll(streams, noise[:, :12], actions[:, :12], ONE_STEP)
        held, _ = rollout.roll(replace(streams, sinks=sinks), noise[:, :12], actions[:, :12], ONE_STEP)
    assert torch.equal(sinks[0], latents[:, 4:8])
    assert torch.equal(plain[:, :8], held[:, :8]) and not torch.equal(plain[:, 8:], held[:, 8:])


def test_no_steps_are_refused(model, inputs):
    latents, actions, noise = inputs
    rollout = Rollout(model.dit)
    with torch.no_grad(), pytest.raises(ValueError, match='at least one step'):
        rollout.roll(rollout.observe(latents[:, :1], actions[:, :1]), noise, actions[:, 1:AHEAD + 1], Steps(FLOW, 0))
