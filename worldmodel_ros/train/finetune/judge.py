"""Metrics before and after fine-tuning: prediction versus copying, the autoencoder alone, the effect of actions."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.evaluate.drive.bootstrap import block_labels, mean_interval
from worldmodel_ros.evaluate.drive.pictures import is_moving, psnr, ssim
from ...model.vae import VAE
from ...model.world_model import WorldModel
from .augment import mirror_signs
from .imagination import Moments, imagine, reconstruct

HORIZONS_S = (0.2, 0.5, 1.0)
STEPS = {'two_step': 2, 'one_step': 1}  # network calls per chunk
# Other actions count only if they differ by this share of the actions' range, root mean square.
_DIFFERENT = 0.1


def judge(model: WorldModel, moments: Moments) -> dict:
    """Return a model's metrics on moments that it was not trained on.

    ``prediction``: by number of steps and by horizon, PSNR [dB] and SSIM of the image predicted under the executed
    actions, of the newest image in its place (``copy``), and the differences with their 95 % intervals, over the images
    that a moving robot led to. ``autoencoder_db``: PSNR of images that were only encoded and decoded, the bound of every
    prediction. ``what_if``: how often the future predicted under the true actions is nearer to the truth than the one
    under other actions, and by how much; a model that ignores its actions has 0.5 and 0 dB.
    """
    imagined = {name: imagine(model, moments, steps) for name, steps in STEPS.items()}
    return {'prediction': {name: _by_horizon(model, moments, pictures) for name, pictures in imagined.items()},
            'autoencoder_db': round(autoencoder_db(model.vae, moments), 3),
            'what_if': _what_if(model, moments, imagined['two_step']), 'moments': len(moments)}


def score(model: WorldModel, moments: Moments) -> float:
    """Return the mean PSNR [dB] of a model's two-step predictions, the criterion for early stopping."""
    return float(_psnr(imagine(model, moments, 2), moments.followed).mean())


def autoencoder_db(vae: VAE, moments: Moments) -> float:
    """Return the mean PSNR [dB] of the moments' newest images, encoded and decoded."""
    return float(_psnr(reconstruct(vae, moments), moments.now).mean())


def _by_horizon(model: WorldModel, moments: Moments, imagined: np.ndarray) -> dict:
    blocks = block_labels(moments.drive, moments.times)
    rows = {}
    for horizon in HORIZONS_S:
        k = round(horizon / model.preset.step_period) - 1
        moving = np.array([is_moving(*action) for action in moments.ahead[:, k].tolist()])
        row = {'psnr_db': _psnr(imagined[:, k], moments.followed[:, k]),
               'copy_psnr_db': _psnr(moments.now, moments.followed[:, k]),
               'ssim': _ssim(imagined[:, k], moments.followed[:, k]),
               'copy_ssim': _ssim(moments.now, moments.followed[:, k])}
        row |= {'gain_db': row['psnr_db'] - row['copy_psnr_db'], 'gain_ssim': row['ssim'] - row['copy_ssim']}
        rows[f'{horizon:g}'] = {name: mean_interval(np.where(moving, values, np.nan), blocks).to_dict()
                                for name, values in row.items()}
    return rows


def _what_if(model: WorldModel, moments: Moments, imagined: np.ndarray) -> dict:
    """Compare with mirrored actions or, if their names do not tell how to mirror them, those of another moment."""
    preset, true = model.preset, _psnr(imagined, moments.followed).mean(1)
    signs = mirror_signs(preset)
    name, actions = ('of another moment', np.roll(moments.ahead, len(moments) // 2, 0)) if signs is None else (
        'mirrored', moments.ahead * signs.numpy())
    span = np.subtract(preset.action_high, preset.action_low)
    different = np.sqrt((((actions - moments.ahead) / span) ** 2).mean((1, 2))) >= _DIFFERENT
    gain = (true - _psnr(imagine(model, moments, 2, actions), moments.followed).mean(1))[different]
    return {'other_actions': name, 'moments': len(gain),
            'true_is_nearer': round(float((gain > 0.0).mean()), 4) if len(gain) else None,
            'gain_db': round(float(gain.mean()), 4) if len(gain) else None}


def _psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """PSNR [dB] of images (..., H, W, 3), one value per image."""
    return _each(psnr, a, b)


def _ssim(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _each(ssim, a, b)


def _each(measure, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    shape = a.shape[:-3]
    flat = zip(a.reshape(-1, *a.shape[-3:]), b.reshape(-1, *b.shape[-3:]))
    return np.array([measure(x, y) for x, y in flat]).reshape(shape)

