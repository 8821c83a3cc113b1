"""How much detail images have: the sharpness that ``worldmodel evaluate quality`` reports, and a loss on local energies.

Squared errors reward blur where the truth is uncertain. How strong an edge is near a place is known better than where exactly
it is, so a loss on the energy of details in small windows asks for as much of it as the truth has, and no more: a pattern on a
smooth wall costs as much as a missing edge.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_GREY = (0.299, 0.587, 0.114)
_WINDOW, _STRIDE = 8, 4  # pixels
_FLOOR = 0.1  # quantile of an image's windows that show nothing but the camera's noise, which no decoder can know
_NOISIEST, _NOISY = 2.0, 1.4  # energy of noise in the noisiest windows, and on average, relative to that quantile
# Filters, and the energy of white noise of deviation 1 after each: below it, of 255 grey values, details do not count.
_FILTERS = (((0., 1., 0.), (1., -4., 1.), (0., 1., 0.)), ((0., 0., 0.), (0., -1., 1.), (0., 0., 0.)),
            ((0., 0., 0.), (0., -1., 0.), (0., 1., 0.)))
_NOISE = (20.0, 2.0, 2.0)
_KNEE = 0.3  # of the logarithm of a ratio: above it, the loss is linear


def sharpness(frames: Tensor) -> Tensor:
    """Return the variance of the Laplacian of the grey values of uint8 (B, H, W, 3), float64 (B,): a batched
    ``evaluate.drive.pictures``, without OpenCV."""
    grey = (frames.double() @ torch.tensor(_GREY, dtype=torch.float64, device=frames.device)).round()
    return _filtered(grey[:, None], _FILTERS[:1]).flatten(1).var(1, correction=0)


def energy_error(images: Tensor, truth: Tensor, aim: Tensor) -> Tensor:
    """Return how far (B,) the detail energies of images (B, 3, H, W) in [-1, 1], in windows and as a whole, are from the share
    ``aim`` (B,) of the truth's. Energies are compared by their logarithms: 0.1 is about 10 %."""
    windows, whole = _energies(images)
    with torch.no_grad():
        target, target_whole = _energies(truth)
        floor = target.flatten(3).quantile(_FLOOR, 3)[..., None, None]
        target = aim[:, None, None, None, None] * (target - _NOISIEST * floor).clamp_min(0.0)
        target_whole = aim * (target_whole - _NOISY * floor[:, 0, -1, 0, 0]).clamp_min(0.0)
    noise = torch.tensor(_NOISE, device=images.device)[:, None, None, None]
    local = _huber(((windows + noise) / (target + noise)).log()).flatten(1).mean(1)
    return local + _huber(((whole + _NOISE[0]) / (target_whole + _NOISE[0])).log())


def _energies(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squares of details of images in [-1, 1], in units of 255 grey values: in windows (B, filters, 4, h, w), of the
    channels and of grey, and (B,), of grey after the Laplacian over the whole image."""
    weights = torch.tensor(_GREY, device=images.device)[:, None, None]
    channels = 127.5 * torch.cat([images, (images * weights).sum(1, keepdim=True)], 1)
    squares = _filtered(channels.flatten(0, 1)[:, None], _FILTERS).square()
    windows = F.avg_pool2d(squares, _WINDOW, _STRIDE).unflatten(0, (len(images), 4)).transpose(1, 2)
    return windows, squares.unflatten(0, (len(images), 4))[:, 3, 0].mean((1, 2))


def _filtered(grey: Tensor, filters: tuple) -> Tensor:
    """Apply 3 x 3 filters to (B, 1, H, W), with OpenCV's default border."""
    kernel = torch.tensor(filters, dtype=grey.dtype, device=grey.device)[:, None]
    return F.conv2d(F.pad(grey, (1, 1, 1, 1), mode='reflect'), kernel)


def _huber(x: Tensor) -> Tensor:
    return F.huber_loss(x, torch.zeros_like(x), reduction='none', delta=_KNEE) / _KNEE
