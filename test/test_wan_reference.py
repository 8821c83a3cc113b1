"""Networks of the Wan family against what their published code gives, at a tiny size: test/fixtures/wan, which
tools/wan_reference.py has written."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import wan_tiny as tiny

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.wan import camera
from worldmodel_ros.model.wan.checkpoint import build, original_shapes
from worldmodel_ros.model.wan.config import WanConfig
from worldmodel_ros.model.wan.dense import DenseSequence
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.schedule import Schedule
from worldmodel_ros.model.wan.sequence import PagedSequences, Window

CASES = 'lingbot_world', 'lingbot_world_v2', 'self_forcing'
SIZE = tuple(8 * side for side in tiny.LATENT)


class Recorded:
    """A network that keeps the velocities it gives."""

    def __init__(self, dit):
        self.dit, self.given = dit, []

    def __getattr__(self, name):
        return getattr(self.dit, name)

    def __call__(self, *inputs):
        self.given.append(self.dit(*inputs))
        return self.given[-1]

    def keep(self, *inputs):
        self(*inputs)  # nothing needs this velocity, but the published code computes it
        self.dit.keep(*inputs)


class Case:
    """A fixture, and the same run of this package."""

    def __init__(self, name):
        with np.load(Path(__file__).parent / 'fixtures' / 'wan' / f'{name}.npz') as file:
            self.wanted = {key: file[key] for key in file.files}
        self.facts, self.checkpoint = (json.loads(str(self.wanted[key])) for key in ('facts', 'checkpoint'))
        camera_width = self.checkpoint['shapes'].get('patch_embedding_wancamctrl.weight', [0, 0])[1]
        self.config = WanConfig.from_json({**self.checkpoint['config'], 'text_dim': tiny.TEXT_WIDTH}, camera_width)
        shift = self.facts['shift']
        self.schedule = Schedule.unipc(self.facts['indices'], shift) if 'indices' in self.facts else \
            Schedule.self_forcing(self.facts['steps'], shift)
        self.dit = Recorded(build(self.config, tiny.Drawn()))
        self.chunk = self.facts['chunk']

    def window(self, **changes):
        found = {'frames': self.facts['window'], 'sinks': self.facts['sinks'],
                 'slab': int(np.gcd.reduce([self.facts[key] for key in ('chunk', 'window', 'sinks')])), **changes}
        return Window(**found)

    def paged(self, window=None):
        return PagedSequences(self.config, window or self.window(), tiny.GRID, Precision.FP32, page_tokens=16).open()

    @torch.inference_mode()
    def run(self, sequence, chunks=5):
        sampler, prompt, out = Sampler(self.dit, self.schedule), self.dit.prompt(tiny.text()), []
        for chunk in range(chunks):
            rays = self.rays(chunk)
            out.append(sampler.chunk(
                sequence, prompt, tiny.noise(chunk, self.chunk),
                tiny.condition(chunk, self.chunk) if self.config.condition_channels else None,
                None if rays is None else camera.ray_tokens(rays)))
        return torch.stack(out)

    def rays(self, chunk):
        if not self.config.camera_width:
            return None
        poses = self.wanted['poses'].astype(np.float64)
        first, end = chunk * self.chunk, (chunk + 1) * self.chunk
        relative = camera.relative_poses(poses[first:end], poses[first - 1] if chunk else None, camera.longest_step(poses))
        return camera.rays(relative, camera.Intrinsics(*tiny.INTRINSICS), SIZE)


def difference(found, wanted):
    """Relative to the size of what is wanted, all in float64."""
    found, wanted = (torch.as_tensor(x).double() for x in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize('name', CASES)
def test_passes_and_five_chunks_with_rolling_window_and_sinks_are_those_of_the_published_code(name):
    case = Case(name)
    chunks = case.run(case.paged())
    assert difference(case.dit.given[0], case.wanted['first_velocity']) <= 1e-5
    assert difference(case.dit.given[-1], case.wanted['last_velocity']) <= 2e-5
    assert max(difference(*pair) for pair in zip(chunks, case.wanted['chunks'])) <= 2e-5
    assert len(case.dit.given) == 5 * len(case.schedule.timesteps)
    case.dit = case.dit.dit
    assert torch.equal(case.run(case.paged()), chunks)


def test_a_sequence_without_pages_gives_the_same():
    case = Case('lingbot_world')
    chunks = case.run(DenseSequence(case.config, case.window(), tiny.GRID))
    assert max(difference(*pair) for pair in zip(chunks, case.wanted['chunks'])) <= 2e-5


@pytest.mark.parametrize('changes', [{'sinks': 0}, {'frames': 9}])
def test_another_window_would_be_noticed(changes):
    case = Case('lingbot_world')
    case.run(case.paged(case.window(**changes)), 3)
    other = case.dit.given[-1]
    case.dit.given.clear()
    case.run(case.paged(), 3)
    assert difference(other, case.dit.given[-1]) > 1e-2


@pytest.mark.parametrize('name', CASES)
def test_timesteps_and_tensors_of_a_checkpoint_are_those_of_the_published_code(name):
    case = Case(name)
    assert [step.timestep for step in case.schedule.steps] == case.wanted['timesteps'].tolist()
    assert {name: list(shape) for name, shape in original_shapes(case.config).items()} == case.checkpoint['shapes']
    assert case.config.parameters == sum(int(np.prod(shape)) for shape in case.checkpoint['shapes'].values())


def test_poses_and_rays_are_those_of_the_published_code():
    case = Case('lingbot_world')
    frames = len(case.wanted['poses'])
    every = 4 * (frames - 1) + 1
    times = np.arange(every) / 16
    poses = camera.resample_poses(times, tiny.poses(every), np.linspace(0, every - 1, frames) / 16)
    assert np.abs(poses - case.wanted['poses']).max() <= 1e-6
    relative = camera.relative_poses(poses, None, camera.longest_step(poses))
    assert np.abs(relative - case.wanted['relative_poses']).max() <= 2e-6
    rays = camera.rays(relative, camera.Intrinsics(*tiny.INTRINSICS), SIZE)
    assert np.abs(rays[::7, ::9, ::11].numpy() - case.wanted['rays']).max() <= 2e-6
    # The published network takes a channel of each pixel of a latent, then four latents a token.
    tokens = camera.ray_tokens(rays).view(frames, *tiny.GRID, 384, 2, 2)
    assert np.abs(tokens[1, 0, 0, :, 0, 0].numpy() - case.wanted['rays_first_column']).max() <= 2e-6
