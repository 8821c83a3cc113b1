"""The Wan VAE as a stream, by ``diffusers.AutoencoderKLWan`` (extra ``[wan]``).

It is causal: each latent frame needs what its convolutions kept of the previous frames, a state that the caller holds. States
are never written in place, so keeping one is a fork that copies nothing.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint_description import ModelError
from ..parallel.group import Group
from .config import VAE_FRAMES
from .vae_layers import FIRST, Rows, fuse

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


@dataclass(frozen=True)
class StreamState:
    """What the convolutions kept of a stream: for each, in order, a tensor, or a mark or None at its start."""

    features: tuple[Tensor | str | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.features if isinstance(part, Tensor))

    def each(self, call: Callable[[Tensor], Tensor]) -> StreamState:
        """Return the state with a function applied to its tensors."""
        return StreamState(tuple(call(part) if isinstance(part, Tensor) else part for part in self.features))

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors for a file; ``of_tensors`` is the inverse."""
        marks = {str(at): torch.zeros(0) for at, part in enumerate(self.features) if isinstance(part, str)}
        return marks | {str(at): part for at, part in enumerate(self.features) if isinstance(part, Tensor)}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], count: int, mark: str) -> StreamState:
        """Return a state of ``count`` convolutions; ``mark`` is what the VAE keeps in place of a tensor (``WanVae.MARK``)."""
        held = (tensors.get(str(at)) for at in range(count))
        return cls(tuple(mark if part is not None and not part.numel() else part for part in held))


class WanVae:
    """Converts between images float32 (3, n, height, width) from -1 to 1 and latents float32 (16, F, height / 8, width / 8),
    normalised as the networks take them."""

    MARK = FIRST

    def __init__(self, model: AutoencoderKLWan, fused: bool = True, channels_last: bool = True,
                 blocks: bool = True, group: Group | None = None):
        """``fused``: the decoder's layers are replaced (``vae_layers.fuse``), on a GPU with channels-last weights if
        ``channels_last``, and then with our own residual blocks if ``blocks``. ``group``: each of its processes decodes some
        rows of every image; their number must divide the latents' rows."""
        self.model = model.eval().requires_grad_(False)
        self.rows = None if group is None else Rows(group)
        if fused or group is not None:
            last = channels_last and next(model.parameters()).is_cuda
            fuse(model.decoder, last, last and blocks, self.rows)
        shape = 1, -1, 1, 1, 1
        parameter = next(model.parameters())
        self._mean = torch.tensor(model.config.latents_mean, device=parameter.device).view(shape)
        self._std = torch.tensor(model.config.latents_std, device=parameter.device).view(shape)
        self.dtype, self.device = parameter.dtype, parameter.device

    @classmethod
    def load(cls, path: Path, device: torch.device | str = 'cpu', dtype: torch.dtype = torch.float32,
             group: Group | None = None) -> WanVae:
        """Load from a folder in diffusers' layout, or the file of the original weights (``Wan2.1_VAE.pth``). Raises
        ModelError."""
        try:
            from diffusers import AutoencoderKLWan
            from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
        except ImportError as error:
            raise ModelError(f'the VAE needs diffusers ({error}): pip install "worldmodel-ros[wan]"') from error
        try:
            if path.is_dir():
                model = AutoencoderKLWan.from_pretrained(path, torch_dtype=dtype, local_files_only=True, use_safetensors=True)
            else:
                model = AutoencoderKLWan()
                weights = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
                model.load_state_dict(convert_wan_vae_to_diffusers(weights), strict=True)
        except Exception as error:  # diffusers, safetensors and torch each raise their own
            raise ModelError(f'no VAE can be read from {path}: {error}') from error
        return cls(model.to(device, dtype), group=group)

    def start(self, encoder: bool = False) -> StreamState:
        """Return the state before the first frame."""
        return StreamState((None,) * self._count(encoder))

    @torch.inference_mode()
    def decode(self, latents: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Return the images of the next latent frames (16, F, h, w), four each, one for the first of a stream; and the new
        state."""
        z = latents[None].to(self.device, torch.float32) * self._std + self._mean
        z, features, out = self.model.post_quant_conv(z.to(self.dtype)), list(state.features), []
        z = z if self.rows is None else self.rows.own(z)
        first = all(part is None for part in features)
        # On a GPU all at once, except the first frame, which is not like the others: fewer, larger products. A CPU gains
        # nothing by it, and frame by frame its results equal those of the whole video, bit for bit.
        count = z.shape[2]
        sizes = [1] * count if self.device.type == 'cpu' else [1, count - 1] if first and count > 1 else [count]
        for part in z.split(sizes, 2):
            out.append(self.model.decoder(part, feat_cache=features, feat_idx=[0], first_chunk=first))
            first = False
        images = torch.cat(out, 2)
        images = images if self.rows is None else self.rows.whole(images)
        return images[0].float().clamp(-1.0, 1.0), StreamState(tuple(features))

    def whole(self, decoded: StreamState) -> StreamState:
        """Return a decoder's state with the rows of all processes, for a file; ``own`` is the inverse. Every process takes
        part."""
        return decoded if self.rows is None else decoded.each(self.rows.whole)

    def own(self, decoded: StreamState) -> StreamState:
        """Return this process's part of a decoder's state."""
        return decoded if self.rows is None else decoded.each(self.rows.own)

    @torch.inference_mode()
    def encode(self, images: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Return the latents of the next images, and the new state. A stream takes one image first, then four per latent
        frame. Raises ValueError for other counts."""
        count, features, out = images.shape[1], list(state.features), []
        head = 1 if all(part is None for part in features) else 0
        if count < head or (count - head) % VAE_FRAMES:
            raise ValueError(f'{count} images are no latent frames: a stream takes one first, then {VAE_FRAMES} each')
        edges = [*([0] if head else []), *range(head, count + 1, VAE_FRAMES)]
        x = images[None].to(self.device, self.dtype)
        for begin, end in zip(edges, edges[1:]):
            out.append(self.model.encoder(x[:, :, begin:end], feat_cache=features, feat_idx=[0]))
        mean = self.model.quant_conv(torch.cat(out, 2)).float().chunk(2, 1)[0]
        return ((mean - self._mean) / self._std)[0], StreamState(tuple(features))

    def _count(self, encoder: bool) -> int:
        return self.model._cached_conv_counts['encoder' if encoder else 'decoder']


@dataclass(frozen=True)
class Decoded:
    """Images being decoded."""

    _images: Tensor
    _done: torch.cuda.Event | None

    def images(self) -> Tensor:
        """Return float32 (3, n, height, width), for work queued on the current stream from now on."""
        if self._done is not None:
            torch.cuda.current_stream(self._images.device).wait_event(self._done)
            self._images.record_stream(torch.cuda.current_stream(self._images.device))
        return self._images

    def wait(self) -> None:
        """Wait until they are decoded."""
        if self._done is not None:
            self._done.synchronize()


class DecodeStream:
    """Decodes one stream of latents in the background, on its own CUDA stream of the lowest priority. The caller's stream
    should have a higher one: then decoding fills the gaps of the next chunk's passes, and is done before it, since it is
    much less work."""

    def __init__(self, vae: WanVae, state: StreamState | None = None):
        self.state = vae.start() if state is None else state
        self._vae = vae
        self.stream = torch.cuda.Stream(vae.device) if vae.device.type == 'cuda' else None

    def decode(self, latents: Tensor) -> Decoded:
        """Start ``WanVae.decode`` of latents computed on the current stream."""
        if self.stream is None:
            images, self.state = self._vae.decode(latents, self.state)
            return Decoded(images, None)
        self.stream.wait_stream(torch.cuda.current_stream(self._vae.device))
        with torch.cuda.stream(self.stream):
            images, self.state = self._vae.decode(latents, self.state)
            latents.record_stream(self.stream)
            return Decoded(images, self.stream.record_event())


class ImageCondition:
    """The first image as networks with image condition see it: float32 (20, F, h, w), chunk after chunk.

    Four channels of mask, 1 on the first latent frame, and the latents of the image followed by grey ones. Far from the image
    these no longer change; from then on nothing is encoded.

    ``image`` float32 (3, height, width), from -1 to 1; ``state`` of the encoder; the ``newest`` latents (16, 1, h, w), None
    before the first; ``settled`` once they change no more.
    """

    def __init__(self, vae: WanVae, image: Tensor):
        self._vae, self.image, self.state = vae, image, vae.start(encoder=True)
        self.newest: Tensor | None = None
        self.settled = False

    @classmethod
    def of(cls, vae: WanVae, image: Tensor, state: StreamState, newest: Tensor | None, settled: bool) -> ImageCondition:
        """Return one that was saved."""
        made = cls(vae, image)
        made.state, made.newest, made.settled = state, newest, settled
        return made

    def next(self, frames: int) -> Tensor:
        """Return the condition of the next latent frames."""
        first = self.newest is None
        latents = [self._next_frame() for _ in range(frames)]
        condition = torch.cat(latents, 1)
        mask = torch.zeros(VAE_FRAMES, *condition.shape[1:], device=condition.device)
        if first:
            mask[:, 0] = 1.0
        return torch.cat([mask, condition])

    def fork(self) -> ImageCondition:
        """Return a copy for a branch."""
        return ImageCondition.of(self._vae, self.image, self.state, self.newest, self.settled)

    def _next_frame(self) -> Tensor:
        if self.settled:
            return self.newest
        if self.newest is None:
            images = self.image[:, None]
        else:
            images = torch.zeros(3, VAE_FRAMES, *self.image.shape[1:])
        before = self.newest, self.state.features
        self.newest, self.state = self._vae.encode(images, self.state)
        self.settled = (before[0] is not None and torch.equal(before[0], self.newest)
                        and _same(before[1], self.state.features))
        return self.newest


def _same(one: tuple, other: tuple) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape else a is b
               for a, b in zip(one, other))
