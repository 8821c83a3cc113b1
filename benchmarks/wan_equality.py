"""Compares the Wan family here with its published code, diffusers and its own definitions, at a tiny size on a CPU.

    pip install -c constraints.txt -e '.[wan]'
    python benchmarks/wan_equality.py --json benchmarks/results/wan_equality.json

The published code's outputs are the fixtures of test/fixtures/wan, which name its commits. Weights and inputs are random. Every
row has a limit; the command fails if one is exceeded. ``difference`` is the norm of the difference relative to that of the
expected output; for images ``ssim`` of the first and the last frame, through a random VAE, from -1 to 1.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))

import test_wan_diffusers as peers
import test_wan_model as own
import test_wan_reference as reference
import wan_tiny as tiny

from worldmodel_ros.evaluate.drive.pictures import ssim
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.wan import camera
from worldmodel_ros.model.wan.checkpoint import build
from worldmodel_ros.model.wan.dense import DenseSequence
from worldmodel_ros.model.wan.precision import to_fp8
from worldmodel_ros.model.wan.vae import WanVae

CHUNKS = 6  # for the comparison of precisions: sinks have moved in the last ones
Row = tuple[str, str, str, float, float]  # reference, what, measure, found, limit


def images(vae: WanVae, chunks: torch.Tensor) -> np.ndarray:
    """Return latents (chunks, C, F, h, w), decoded as one stream, as uint8 (n, H, W, 3)."""
    state, parts = vae.start(), []
    for chunk in chunks:
        part, state = vae.decode(chunk, state)
        parts.append(part)
    return ((torch.cat(parts, 1) + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def published(vae: WanVae) -> Iterator[Row]:
    """Compare with the published code: passes, chunks, images, poses and rays."""
    for name in reference.CASES:
        case, source = reference.Case(name), f'{name}, published code'
        chunks = case.run(case.paged())
        wanted = torch.from_numpy(case.wanted['chunks'])
        yield source, 'first pass, float32', 'difference', reference.difference(
            case.dit.given[0], case.wanted['first_velocity']), 1e-5
        yield source, 'last pass, float32', 'difference', reference.difference(
            case.dit.given[-1], case.wanted['last_velocity']), 2e-5
        yield source, 'worst of 5 chunks with rolling window and sinks', 'difference', max(
            map(reference.difference, chunks, wanted)), 2e-5
        found, same = images(vae, chunks), images(vae, wanted)
        for what, at in (('first', 0), ('last', -1)):
            yield source, f'{what} frame of {len(found)}', 'ssim', float(ssim(found[at], same[at])), 0.999
    case = reference.Case('lingbot_world')
    frames = len(case.wanted['poses'])
    every = 4 * (frames - 1) + 1
    poses = camera.resample_poses(np.arange(every) / 16, tiny.poses(every), np.linspace(0, every - 1, frames) / 16)
    relative = camera.relative_poses(poses, None, camera.longest_step(poses))
    rays = camera.rays(relative, camera.Intrinsics(*tiny.INTRINSICS), reference.SIZE)[::7, ::9, ::11]
    for what, one in (('poses', poses), ('relative_poses', relative), ('rays', rays.numpy())):
        yield 'lingbot_world, published code', what, 'largest difference', float(np.abs(one - case.wanted[what]).max()), 2e-6


def diffusers(vae: WanVae) -> Iterator[Row]:
    """Compare with diffusers: the transformer's first chunk by its own checkpoint, the VAE streamed and whole."""
    with tempfile.TemporaryDirectory() as folder:
        found, wanted = peers.first_chunk(Path(folder))
    yield 'diffusers', 'first pass of its checkpoint, float32', 'difference', own.difference(found, wanted), 1e-5
    z = tiny.draw('z', 16, 5, 4, 6)
    plain = WanVae(vae.model, fused=False)
    whole = vae.model.decode(z[None] * plain._std + plain._mean, return_dict=False)[0][0]
    state, parts = vae.start(), []
    for part in z.split([2, 1, 2], 1):
        one, state = vae.decode(part, state)
        parts.append(one)
    yield 'diffusers', 'VAE: decoded in three pieces, and whole', 'largest difference', float(
        (torch.cat(parts, 1) - whole).abs().max()), 0.0
    video = tiny.draw('images', 3, 13, 32, 48).clamp(-1, 1)
    whole = (vae.model.encode(video[None]).latent_dist.mode() - vae._mean)[0] / vae._std[0]
    state, parts = vae.start(encoder=True), []
    for part in video.split([1, 8, 4], 1):
        one, state = vae.encode(part, state)
        parts.append(one)
    yield 'diffusers', 'VAE: encoded in three pieces, and whole', 'largest difference', float(
        (torch.cat(parts, 1) - whole).abs().max()), 0.0


def definitions() -> Iterator[Row]:
    """Compare with this package's own float32: pages and a dense window, bf16, FP8."""
    dit = build(own.CONFIG, tiny.Drawn())
    dense = DenseSequence(own.CONFIG, own.WINDOW, tiny.GRID)
    wanted = [own.chunk_of(dit, dense, number) for number in range(CHUNKS)]

    def worst(network: object, precision: Precision) -> float:
        sequence = own.pages(precision).open()
        return max(own.difference(own.chunk_of(network, sequence, number), wanted[number]) for number in range(CHUNKS))
    yield 'a dense window in float32', 'pages in float32, sinks moved', 'difference', worst(dit, Precision.FP32), 2e-5
    low = build(own.CONFIG, tiny.Drawn(), layers=torch.bfloat16)
    yield 'a dense window in float32', 'bf16 layers and pages', 'difference', worst(low, Precision.BF16), 0.01
    yield 'a dense window in float32', 'FP8 layers and pages', 'difference', worst(to_fp8(low), Precision.FP8), 0.06


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from diffusers import AutoencoderKLWan
    torch.manual_seed(0)
    # With diffusers' own layers, since the whole video goes through those.
    vae, rows = WanVae(peers.randomise(AutoencoderKLWan(base_dim=8)), fused=False), []
    with torch.inference_mode():
        for part in (published(vae), diffusers(vae), definitions()):
            for against, what, measure, found, limit in part:
                passed = found >= limit if measure == 'ssim' else found <= limit
                rows.append({'against': against, 'what': what, 'measure': measure, 'found': found, 'limit': limit,
                             'passed': passed})
                print(rows[-1], flush=True)
    commits = {name: {key: value for key, value in reference.Case(name).facts.items() if key in ('commit', 'repository')}
               for name in reference.CASES}
    write_result({**provenance(('torch', 'diffusers')), 'weights': 'drawn', 'size': 'width 256, 3 layers, 10x14 latents',
                  'published': commits, 'rows': rows}, options.json)
    return 0 if all(row['passed'] for row in rows) else 1


if __name__ == '__main__':
    raise SystemExit(main())
