"""Checkpoints with two networks, one for high and one for low noise (Wan2.2 A14B).

At or above the boundary timestep the first one denoises, below it the second one. Each is on its own device, with its pages
there; only the latents of a chunk move between them. A chunk may be a whole video, as the published networks have it. If
another one follows, as for a robot, both have seen its clean latents, since each has its own keys.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint_description import ModelError
from . import checkpoint
from .config import WanConfig, read_json
from .dit import CameraControl, Modulation, Prompt, SelfAttention, WanDiT
from .sampler import Passes, Sequence as PassSequence, denoise, each_pass, finished, with_condition
from .schedule import TRAINED_STEPS, Schedule, Step
from .sequence import PagedSequence, PagedSequences

# Folders of the two networks, and default boundaries: with an image condition (True), or with text alone (False).
LAYOUTS = {'original': ('high_noise_model', 'low_noise_model'), 'diffusers': ('transformer', 'transformer_2')}
PUBLISHED_BOUNDARIES = {True: 0.9, False: 0.875}


@dataclass(frozen=True)
class Experts:
    """Two networks and the share of noise, 0 to 1, from which on the first one is used."""

    high: WanDiT
    low: WanDiT
    boundary: float

    def __post_init__(self):
        if not 0.0 < self.boundary < 1.0:
            raise ValueError(f'boundary {self.boundary}: a share of noise between 0 and 1')
        if self.high.config != self.low.config:
            raise ValueError(f'the two networks differ: {self.high.config}, {self.low.config}')

    @property
    def networks(self) -> tuple[WanDiT, WanDiT]:
        return self.high, self.low

    def at(self, timestep: float) -> int:
        """Return which of the two denoises."""
        return int(timestep < self.boundary * TRAINED_STEPS)

    @property
    def config(self) -> WanConfig:
        """The configuration of both."""
        return self.high.config

    def prompt(self, text: Tensor) -> tuple[Prompt, Prompt]:
        """``WanDiT.prompt`` of both."""
        return tuple(network.prompt(text.to(network.device)) for network in self.networks)


class ExpertPages:
    """``PagedSequences`` of two networks: an open sequence has pages of both, each on its network's device."""

    def __init__(self, owners: Sequence[PagedSequences]):
        self.owners = tuple(owners)

    def open(self) -> ExpertSequence:
        """Open a new sequence. Raises OutOfPages, and takes no pages, if no window can be guaranteed any more."""
        with ExitStack() as stack:
            parts = []
            for owner in self.owners:
                parts.append(owner.open())
                stack.callback(parts[-1].close)
            stack.pop_all()
        return ExpertSequence(parts)


class ExpertSequence(tuple[PagedSequence, PagedSequence]):
    """One sequence in the pages of both networks, in their order, as ``ExpertSampler`` takes it."""

    @property
    def frame(self) -> int:
        """The number of the next frame."""
        return self[0].frame

    def fork(self) -> ExpertSequence:
        """Return a branch, as ``PagedSequence.fork``."""
        return ExpertSequence(part.fork() for part in self)

    def close(self) -> None:
        """Release all pages."""
        for part in self:
            part.close()

    def save(self) -> dict[str, Tensor]:
        """Return what both hold, on the host, for a file."""
        return {f'{at}.{name}': tensor for at, part in enumerate(self) for name, tensor in part.save().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what both hold by what ``save`` returned. Raises ValueError for what does not fit, after which the
        sequence cannot be used."""
        for at, part in enumerate(self):
            part.restore({name.partition('.')[2]: tensor for name, tensor in tensors.items() if name.startswith(f'{at}.')})
        if self[0].frame != self[1].frame:
            raise ValueError(f'the two networks have seen {self[0].frame} and {self[1].frame} frames')


class ExpertSampler:
    """``Sampler`` of two networks: sequences and prompts come for both, in their order."""

    def __init__(self, experts: Experts, schedule: Schedule):
        self.experts, self.schedule = experts, schedule
        with torch.inference_mode():
            self._modulation: list[dict[float, Modulation]] = [
                {timestep: network.modulation(timestep) for timestep in schedule.timesteps
                 if timestep == schedule.commit or experts.at(timestep) == index}
                for index, network in enumerate(experts.networks)]

    @torch.inference_mode()
    def chunk(self, sequences: Sequence[PassSequence], prompts: Sequence[Prompt], noise: Callable[[int], Tensor],
              condition: Tensor | None = None, rays: Tensor | None = None) -> Tensor:
        """Return the next chunk's clean latents, on the noise's device, and append it to the sequences of both networks. As
        ``Sampler.chunk``."""
        return finished(self.pass_by_pass(sequences, prompts, noise, condition, rays))

    @torch.inference_mode()
    def pass_by_pass(self, sequences: Sequence[PassSequence], prompts: Sequence[Prompt], noise: Callable[[int], Tensor],
                     condition: Tensor | None = None, rays: Tensor | None = None) -> Passes:
        """``chunk``, as ``Sampler.pass_by_pass``."""
        latents, cameras = noise(0), self._controls(rays)
        with _chunks(sequences, latents.shape[1], False) as attentions:
            def velocity(step: Step, x: Tensor) -> Tensor:
                index = self.experts.at(step.timestep)
                return self._network(index)(*self._given(index, x, step.timestep, prompts, condition, cameras, attentions)
                                            ).to(latents.device)
            clean = yield from each_pass(denoise(self.schedule, lambda step: noise(step) if step else latents), velocity)
            self._keep(clean, prompts, condition, cameras, attentions)
        return clean

    @torch.inference_mode()
    def commit(self, sequences: Sequence[PassSequence], prompts: Sequence[Prompt], latents: Tensor,
               condition: Tensor | None = None, rays: Tensor | None = None) -> None:
        """Append observed frames to both, as ``Sampler.commit``."""
        cameras = self._controls(rays)
        with _chunks(sequences, latents.shape[1], True) as attentions:
            self._keep(latents, prompts, condition, cameras, attentions)

    def _keep(self, clean: Tensor, *others: object) -> None:
        for index in range(2):
            self._network(index).keep(*self._given(index, clean, self.schedule.commit, *others))

    def _controls(self, rays: Tensor | None) -> list[CameraControl] | None:
        return None if rays is None else [network.camera_control(rays) for network in self.experts.networks]

    def _network(self, index: int) -> WanDiT:
        return self.experts.networks[index]

    def _given(self, index: int, latents: Tensor, timestep: float, prompts: Sequence[Prompt], condition: Tensor | None,
               cameras: Sequence[CameraControl] | None, attentions: Sequence[SelfAttention]) -> tuple:
        inputs = with_condition(latents, condition).to(self._network(index).device)
        return (inputs, self._modulation[index][timestep], prompts[index], None if cameras is None else cameras[index],
                attentions[index])


@contextmanager
def _chunks(sequences: Sequence[PassSequence], frames: int, observed: bool) -> Iterator[list[SelfAttention]]:
    """Open a chunk of both sequences, which both end or neither: if a pass fails, each context ends with that exception."""
    with ExitStack() as stack:
        yield [stack.enter_context(sequence.chunk(frames, observed)) for sequence in sequences]


def has_experts(path: Path) -> bool:
    """Return whether a folder holds two networks."""
    return any(all((path / name).is_dir() for name in names) for names in LAYOUTS.values())


def folders(path: Path) -> tuple[Path, Path]:
    """Return the folders of the two networks, high noise first. Raises ModelError."""
    for names in LAYOUTS.values():
        if all((path / name).is_dir() for name in names):
            return path / names[0], path / names[1]
    wanted = ', or '.join(' and '.join(names) for names in LAYOUTS.values())
    raise ModelError(f'{path} has no two networks: they are in {wanted}')


def load(path: Path, devices: Sequence[torch.device | str] = ('cpu', 'cpu'), layers: torch.dtype = torch.bfloat16,
         boundary: float | None = None) -> Experts:
    """Load both networks from a folder of either layout, each onto its device. ``boundary`` defaults to that of the folder
    (``model_index.json``), or else to the published one. Raises ModelError."""
    high, low = (checkpoint.load(folder, device, layers) for folder, device in zip(folders(path), devices, strict=True))
    if boundary is None and (path / 'model_index.json').is_file():
        boundary = read_json(path / 'model_index.json').get('boundary_ratio')
    if boundary is None:
        boundary = PUBLISHED_BOUNDARIES[high.config.condition_channels > 0]
    try:
        return Experts(high, low, float(boundary))
    except (TypeError, ValueError) as error:
        raise ModelError(f'{path}: {error}') from error
