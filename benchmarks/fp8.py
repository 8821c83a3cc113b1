"""FP8 layers on a GPU: the products, what lies between them, and whole layers compared with bfloat16, in one run.

    python benchmarks/fp8.py --folder benchmarks/results          # writes fp8_<gpu>.json there, part by part

``correct``: every kernel against its definition. ``layers``: a layer whose frames attend within themselves, in
bfloat16, eager and compiled by torch, and in FP8, with the MLP's product separate from GELU or fused with it, by a
bound or a calibrated scale; errors are those of what the layer adds, against float32. ``products``: TFLOP/s of the
four products of a layer at the numbers of tokens that occur, random data. ``between``: GB/s of the kernels between
them, counting each byte that must be read or written once, compared with a copy. ``specialised``: one more form of the
product, separately. A part that fails is named in ``failed``, and the others still run. Without a GPU all of it runs
at a small size in Triton's interpreter (TRITON_INTERPRET=1), which tests the code and measures nothing.
"""
from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path

from result_file import command, short_name, write_result
import torch
from attention_cases import gpu_name
from fp8_cases import GPU
from fp8_kernels import between, correct, products, specialised
from fp8_layers import layers

from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.precision import KEPT

PARTS = {'correct': correct, 'layers': layers, 'products': products, 'between': between,
         'specialised': specialised}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    parser.add_argument('--folder', type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    gpu = gpu_name() if GPU else 'none'
    file = options.folder and options.folder / f'fp8_{short_name([gpu])}.json'
    result = {'command': command(), 'gpu': gpu, 'machine': machine(),
              'versions': versions(('torch', 'triton')), 'kept_in_bf16': KEPT, 'seconds': {}, 'failed': {}}
    for name in options.parts:
        start, result[name] = time.perf_counter(), []
        try:
            for row in PARTS[name]():
                result[name].append(row)
                print(json.dumps({'part': name, **row}), flush=True)
                write_result(result, file)
        except Exception as error:  # keep measuring the other parts
            traceback.print_exc()
            result['failed'][name] = f'{type(error).__name__}: {error}'
        result['seconds'][name] = round(time.perf_counter() - start, 1)
        write_result(result, file)
    wrong = [row['kernel'] for name in options.parts for row in result[name] if not row.get('kept', True)]
    print(json.dumps({'failed': result['failed'], 'wrong': wrong, 'seconds': result['seconds']}, indent=1))
    return 1 if result['failed'] or wrong else 0


if __name__ == '__main__':
    raise SystemExit(main())
