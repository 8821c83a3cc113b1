"""Sessions of a model with tiles on this machine's GPU, compared with the kernels' definitions in float32.

    python benchmarks/tile_correctness.py --json benchmarks/results/tile_correctness_<gpu>.json

The tiles, heads and patterns are those of ``robot_3b``, and so the kernels; width and depth are smaller, and the weights
random. The definitions, in plain PyTorch, run on the same GPU. Each back end sees the same images, with and without
CUDA graphs: in one window that is not full yet and in one from which slabs were dropped. Errors are relative RMS errors
of the imagined latents and of a branch's second chunk. Exits with 1 if one exceeds its limit. Without a GPU,
the back ends are compared as they run on a CPU.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'test'))

from result_file import command, write_result
from tiled_model import decided

from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.kernels import page_write, qk_norm, reference
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.precision import to_fp8
from worldmodel_ros.model.presets import ROBOT_3B, Preset
from worldmodel_ros.model.weights import RandomWeights, build
from worldmodel_ros.model.world_model import WorldModel

LARGE = replace(ROBOT_3B, name='tiles', width=512, heads=4, depth=9, vae_width=16, chunk_frames=8, window_frames=16)
# About twice the error of rounding alone on a CPU; wrong tiles in the lists, with six layers, give 0.16 to 0.3.
LIMITS = {'fp32': 2e-3, 'bf16': 0.04, 'fp8 pages': 0.05, 'fp8': 0.2}
MOMENTS = (5, 27)


@contextmanager
def definitions() -> Iterator[None]:
    """On a GPU, replace the kernels in float32 layers by their definitions."""
    with ExitStack() as patches:
        if torch.cuda.is_available():
            from worldmodel_ros.kernels import attention_triton, page_write_triton, qk_norm_triton
            for module, kernel, definition in (
                    (attention_triton, 'paged_attention_triton', reference.paged_attention),
                    (page_write_triton, 'write_qkv_triton', page_write.write_qkv),
                    (qk_norm_triton, 'rotate_qk_triton', qk_norm.rotate_qk)):
                patches.enter_context(patch.object(module, kernel, definition))
        yield


def truth(model: WorldModel, preset: Preset) -> dict[str, np.ndarray]:
    made = TorchBackend(copy.deepcopy(model), len(os.sched_getaffinity(0)), graphs=False)
    with definitions():
        return answers(Engine(made, Path('truth'), 1), preset)


def backend(name: str, model: WorldModel, graphs: bool) -> TorchBackend:
    precision = Precision.FP32 if name == 'fp32' else Precision.BF16 if name == 'bf16' else Precision.FP8
    made = TorchBackend(copy.deepcopy(model), precision=precision, graphs=graphs)
    if name == 'fp8':
        to_fp8(made.model.dit, fused=True)
    return made


def answers(engine: Engine, preset: Preset) -> dict[str, np.ndarray]:
    """Return the imagined latents, by name, at each of MOMENTS."""
    rng, session, found = np.random.default_rng(0), engine.open_session(), {}
    actions = np.tile(np.float32([0.3, 0.5]), (2 * preset.chunk_frames, 1))
    for number in range(1, MOMENTS[-1] + 1):
        frame = rng.integers(0, 256, (*preset.image_size, 3), dtype=np.uint8)
        session.observe(frame, np.array([0.2, 0.4], np.float32))
        if number in MOMENTS:
            for steps in (1, 2):
                found[f'{number} frames, {steps} steps'] = session.imagine(actions[:preset.chunk_frames], steps).latents
            found[f'{number} frames, second chunk'] = branch(session, actions)[preset.chunk_frames:]
    return found


def branch(session, actions: np.ndarray) -> np.ndarray:
    question = session.what_if(actions)
    try:
        while True:
            next(question)
    except StopIteration as end:
        return end.value.latents


def error(result: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(result).all():
        return float('inf')
    return float(np.sqrt(np.mean((result - expected) ** 2) / np.mean(expected ** 2)))


def rows(preset: Preset = LARGE) -> Iterator[dict]:
    """Yield, for each back end, its errors against the definitions, or why it failed."""
    model, on_gpu = decided(build(preset, RandomWeights())), torch.cuda.is_available()
    expected = truth(model, preset)
    for name, graphs in ((name, graphs) for name in LIMITS for graphs in ((False, True) if on_gpu else (False,))):
        row, start = {'backend': name, 'graphs': graphs, 'limit': LIMITS[name]}, time.perf_counter()
        try:
            engine = Engine(backend(name, model, graphs), Path(name), 1)
            row['errors'] = {case: error(latents, expected[case]) for case, latents in answers(engine, preset).items()}
            row['kept'] = max(row['errors'].values()) <= row['limit']
        except Exception as failure:  # keep measuring the others
            row |= {'failed': f'{type(failure).__name__}: {failure}', 'kept': False}
        yield row | {'seconds': round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--width', type=int, default=LARGE.width, help='a multiple of the width of a head, 128')
    parser.add_argument('--frames', type=int, default=LARGE.chunk_frames, help='of a chunk')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    preset = replace(LARGE, width=options.width, heads=options.width // 128, chunk_frames=options.frames)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    result = {'command': command(),
              'gpu': torch.cuda.get_device_name() if torch.cuda.is_available() else None,
              **machine(), 'versions': versions(('torch', 'triton')), 'weights': 'random', 'rows': []}
    for row in rows(preset):
        result['rows'].append(row)
        print(json.dumps(row), flush=True)
        write_result(result, options.json)
    return int(not all(row['kept'] for row in result['rows']))


if __name__ == '__main__':
    sys.exit(main())
