"""A loaded open world model: networks, prompt and pages, shared by its sessions."""
from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...cache.pool import OutOfPages
from ...kernels.pages import Precision
from ...model.checkpoint_description import WORLD_FILE, ModelError
from ...model.parallel.group import Group
from ...model.wan import checkpoint, experts
from ...model.wan.checkpoint import tensor_share
from ...model.wan.config import PATCH, VAE_FRAMES, VAE_STRIDE, WanConfig, WanPreset
from ...model.wan.dit import Prompt, WanDiT
from ...model.wan.experts import Experts, ExpertPages, ExpertSampler, ExpertSequence
from ...model.wan.graphs import GraphedSampler
from ...model.wan.parallel import join
from ...model.wan.precision import to_fp8
from ...model.wan.sampler import Sampler
from ...model.wan.schedule import Schedule
from ...model.wan.sequence import PagedSequence, PagedSequences, Window
from ...model.wan.text import encode, read_rows
from ...model.wan.vae import WanVae
from ...model.weights import PartOf
from .description import WorldDescription

if TYPE_CHECKING:
    import numpy as np

    from .session import WorldSession

FPS = 16  # of the video that these models were trained on
# By name of the engine's back ends: type of the layers, of the pages, and whether weights are in FP8.
BACKENDS = {'torch': (torch.float32, Precision.FP32, False), 'torch-bf16': (torch.bfloat16, Precision.BF16, False),
            'torch-fp8': (torch.bfloat16, Precision.FP8, True)}
_SMALLEST_PAGE = 16
_FASTEST_TURN = 3.0  # rad/s
_HOST_BOUND = 2048  # width up to which a GPU would wait for the host to launch kernels


@dataclass(frozen=True)
class WorldSpec:
    """What a node needs to know of a model: images of ``image_size`` every ``step_period`` s, moved by ``action_names``."""

    name: str
    image_size: tuple[int, int]
    step_period: float
    action_low: tuple[float, float]
    action_high: tuple[float, float]
    chunk_frames: int  # images of every chunk but the first
    action_names: tuple[str, ...] = ('linear.x', 'angular.z')
    goals: tuple[str, ...] = ()  # none, as there is no policy
    camera: None = None  # that it was trained with: it takes any, by its intrinsics

    @property
    def actions(self) -> int:
        return len(self.action_names)


@dataclass(frozen=True)
class Share:
    """A process's share of a divided network: its group of processes, and which of ``backends.PARALLEL_KINDS``."""

    group: Group
    kind: str

    def part(self, config: WanConfig) -> PartOf:
        """Return the process's part of the weights."""
        return tensor_share(config, self.group.rank, self.group.count) if self.kind == 'tensor' else lambda name: None


class OpenWorld:
    """One model, whose pages hold ``sessions`` sessions and, besides, ``branches`` branches of a chunk."""

    def __init__(self, description: WorldDescription, backend: str = 'auto', threads: int = 1, sessions: int = 1,
                 branches: int = 2, share: Share | None = None):
        """Load all files. ``threads``: of this process's networks on a CPU; ``share``: of a divided network. Raises
        ModelError."""
        torch.set_num_threads(threads)
        self.device = share.group.link.device if share else torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        self._share, self._numbers = share, itertools.count()
        if backend == 'auto':
            backend = 'torch-bf16' if self.device.type == 'cuda' else 'torch'
        if backend not in BACKENDS:
            raise ModelError(f'back end {backend!r} does not run open world models: choose auto, {", ".join(BACKENDS)}')
        layers, precision, fp8 = BACKENDS[backend]
        self.description, self.backend, self._sessions = description, backend, sessions
        self._open: weakref.WeakSet[WorldSession] = weakref.WeakSet()
        config = description.network()
        self.preset: WanPreset = description.sampled(config)
        self._network = self._load(layers)
        if fp8:
            for each in self._networks:
                to_fp8(each)
        if share:
            join(self._network, share.group)
        self._samplers: dict[int, Sampler | GraphedSampler | ExpertSampler] = {}
        height, width = description.size
        self.latent_size = height // VAE_STRIDE, width // VAE_STRIDE
        divided = share is not None and self.latent_size[0] % share.group.count == 0
        self.vae = WanVae.load(description.vae, self.device, layers, share.group if divided else None)
        rows = read_rows(description.text) if description.text else encode(
            description.text_encoder, description.prompt, config.text_tokens, self.device)
        if rows.dim() != 2 or rows.shape[1] != config.text_width or len(rows) > config.text_tokens:
            raise ModelError(f'text of {tuple(rows.shape)}: the network takes up to {config.text_tokens} rows of '
                             f'{config.text_width}')
        with torch.inference_mode():
            self.prompt: Prompt | tuple[Prompt, Prompt] = self._network.prompt(rows.to(self.device))
        grid = height // (VAE_STRIDE * PATCH), width // (VAE_STRIDE * PATCH)
        self.window = Window.of(self.preset)
        small = self.device.type == 'cpu' and grid[0] * grid[1] < 128
        owners = [PagedSequences(config, self.window, grid, precision, each.device, sessions, branches,
                                 _SMALLEST_PAGE if small else 128, share.group if share else None) for each in self._networks]
        self.pages: PagedSequences | ExpertPages = owners[0] if len(owners) == 1 else ExpertPages(owners)
        speed = description.top_speed
        self.smaller = None if description.smaller is None else self._smaller(description.smaller, backend, threads)
        self.spec = WorldSpec(description.name, description.size, 1.0 / FPS, (-speed, -_FASTEST_TURN),
                              (speed, _FASTEST_TURN), VAE_FRAMES * self.preset.chunk_frames)

    def _load(self, layers: torch.dtype) -> WanDiT | Experts:
        described = self.description
        if not described.two_networks:
            if described.devices or described.boundary is not None:
                raise ModelError(f'{described.checkpoint} has one network: devices and boundary are for two')
            part = self._share.part(described.network()) if self._share else lambda name: None
            return checkpoint.load(described.checkpoint, self.device, layers, part)
        devices = described.devices or (str(self.device),) * 2
        try:
            return experts.load(described.checkpoint, devices, layers, described.boundary)
        except (RuntimeError, AssertionError) as error:  # what torch raises for a missing device
            raise ModelError(f'{described.name}: its networks cannot be placed on {", ".join(devices)}: {error}') from error

    @property
    def _networks(self) -> tuple[WanDiT, ...]:
        return self._network.networks if isinstance(self._network, Experts) else (self._network,)

    @property
    def sampler(self) -> Sampler | GraphedSampler | ExpertSampler:
        """Sampler that takes all steps."""
        return self.sampler_of(len(self.preset.schedule.steps))

    def sampler_of(self, steps: int) -> Sampler | GraphedSampler | ExpertSampler:
        """Return a sampler that takes ``steps`` of the schedule's steps. Raises ValueError."""
        if steps not in self._samplers:
            self._samplers[steps] = self._sampler(self.preset.schedule.fewer(steps))
        return self._samplers[steps]

    def _sampler(self, schedule: Schedule) -> Sampler | GraphedSampler | ExpertSampler:
        if isinstance(self._network, Experts):
            return ExpertSampler(self._network, schedule)
        sampler = Sampler(self._network, schedule)
        # A host starts messages and kernels more slowly than several GPUs run them (docs/open_models.md).
        share = self._share
        hosted = share.kind != 'tensor' if share else self._network.config.width <= _HOST_BOUND
        return GraphedSampler(sampler) if hosted and self.device.type == 'cuda' else sampler

    @classmethod
    def load(cls, folder: str | Path, backend: str = 'auto', threads: int = 1, sessions: int = 1, smaller: bool = True,
             **options: Any) -> OpenWorld:
        """Load a world from a folder with ``world.json``, with its ``smaller`` one, if it has one and that is wanted;
        ``options`` are those of the class. Raises ModelError."""
        description = WorldDescription.read(Path(folder).expanduser())
        return cls(description if smaller else replace(description, smaller=None), backend, threads, sessions, **options)

    def _smaller(self, folder: Path, backend: str, threads: int) -> OpenWorld:
        """Load the model for the last rungs of the ladder."""
        # Without its own smaller one, which would never be used, and may be this model again.
        world = OpenWorld(replace(WorldDescription.read(folder), smaller=None), backend, threads)
        if world.description.size != self.description.size or world.preset.chunk_frames != self.preset.chunk_frames:
            raise ModelError(f'{world.description.name} makes {world.preset.chunk_frames} frames of {world.description.size}, '
                             f'and stands in for {self.description.name}, which makes {self.preset.chunk_frames} of '
                             f'{self.description.size}: give both the same size and chunk_frames')
        return world

    def open(self, image: np.ndarray, pose: np.ndarray, seed: int = 0) -> WorldSession:
        """Return a session that begins with an image, uint8 (H, W, 3) of the world's size, taken at a camera's pose (4, 4).
        Raises OutOfPages."""
        from .session import WorldSession
        return WorldSession(self, image, pose, seed)

    def pages_for(self, session: WorldSession) -> PagedSequence | ExpertSequence:
        """Return an empty sequence for one of the ``sessions``. Raises OutOfPages if these are used up: the remaining pages are
        for branches."""
        if len(self._open) >= self._sessions:
            raise OutOfPages(f'{self._sessions} sessions of {self.spec.name} are open, which is all that it was loaded for')
        sequence = self.pages.open()
        self._open.add(session)
        return sequence

    def closed(self, session: WorldSession) -> None:
        """Note that a session was closed."""
        self._open.discard(session)

    @property
    def decodes(self) -> bool:
        """Whether this process decodes what is imagined: of several, all do if an image's rows can be divided among them, else
        only rank 0."""
        return self._share is None or self._share.group.rank == 0 or self.vae.rows is not None

    def units(self, steps: int) -> list[str]:
        """Return the units, in order, of a chunk of ``steps`` steps, between which ``WorldSession.imagining`` pauses: passes,
        then the rest, which is the pass that commits and the decoder; or the whole chunk, where passes are one graph or run on
        several processes."""
        if self._share or isinstance(self.sampler_of(steps), GraphedSampler):
            return ['chunk']
        return ['pass'] * steps + ['rest']

    def settle(self) -> None:
        """Wait for all queued work on the devices."""
        for network in self._networks:
            if network.device.type == 'cuda':
                torch.cuda.synchronize(network.device)

    def tell(self, name: str, number: int, *arguments: Any) -> None:
        """Called before anything is done with session ``number``; a divided world tells its other processes."""

    def jointly(self) -> AbstractContextManager[None]:
        """Return the context of a session's work after ``tell``; in a divided world all processes end where one alone fails."""
        return nullcontext()

    def next_number(self) -> int:
        """Return a number for a new session."""
        return next(self._numbers)

    def close(self) -> None:
        """End the processes that a divided world has started."""

    @property
    def frame_images(self) -> int:
        """Number of images per latent frame."""
        return VAE_FRAMES

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex); only worlds with the same one can exchange sessions. Of network, sampling, size, precision, and the
        names and sizes of the files, whose contents are too large to read for this."""
        described, files = self.description, []
        for path in (described.checkpoint, described.vae):
            found = sorted(path.rglob('*')) if path.is_dir() else [path]
            files += [(file.name, file.stat().st_size) for file in found if file.is_file() and file.name != WORLD_FILE]
        told = [asdict(self.preset), described.size, self.backend, files]
        if isinstance(self._network, Experts):
            told.append(self._network.boundary)
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
