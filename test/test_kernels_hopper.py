"""Kernels for Hopper are compiled here; where there is one, benchmarks/kernel_correctness.py and fp8.py run them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('triton')
SHARED_MEMORY = 232_448  # bytes that a program may have on an H100
VARIANTS = {'attention, bf16, added to others': 'attention-nny', 'attention, fp8': 'attention-ynn',
            'attention, fp8 and fp4': 'attention-yyn', 'product in fp8': 'product-nnn',
            'product in fp8, then gelu': 'product-ynn', 'product in fp8, specialised': 'product-nyn',
            'product in fp8, normalised and rotated': 'product-nny', 'product of few rows': 'product-nnny',
            'product of few rows, then GELU': 'product-ynny', 'product of few rows, rotated': 'product-nnyy',
            'attention, bf16, keys split': 'attention-nnny', 'attention, fp8, keys split': 'attention-ynny',
            'attention to a prompt': 'cross-n', 'attention to a prompt, rounded': 'cross-y'}
PAGES = {'bf16 pages written': 'page-n', 'fp8 pages written': 'page-y', 'fp8 pages written from e4m3': 'page-yy',
         'bf16 pages written from e4m3': 'page-ny', 'bf16 flat pages written': 'flat-nn', 'fp8 flat pages written': 'flat-yn',
         'bf16 flat queries written': 'flat-ny', 'fp8 flat queries written': 'flat-yy',
         'rows in bf16': 'rows-nn', 'rows in fp8 with the camera': 'rows-yy'}


@pytest.fixture(scope='module')
def kernels():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name('compile_hopper.py'), *(VARIANTS | PAGES).values()],
        capture_output=True, text=True, timeout=300, env={**os.environ, 'TRITON_INTERPRET': '0'})
    assert done.returncode == 0, done.stderr
    return dict(zip(VARIANTS | PAGES, json.loads(done.stdout)))


@pytest.mark.parametrize('variant', VARIANTS)
def test_it_compiles_to_asynchronous_products_within_the_memory_of_an_sm(kernels, variant):
    kernel = kernels[variant]
    # Where attention to a prompt is rounded, ptxas says that it serialises products; each is waited for at once there anyway.
    assert kernel['products'] > 0 and (not kernel['serialised'] or variant == 'attention to a prompt, rounded')
    assert kernel['shared'] <= SHARED_MEMORY


@pytest.mark.parametrize('variant', VARIANTS | PAGES)
def test_its_loops_or_its_page_fit_into_the_registers(kernels, variant):
    # Bytes of a thread; a few outside the loop cost nothing, and more cost less than a tile of 128 rows that are not there.
    assert kernels[variant]['spilled'] <= (256 if variant == 'product of few rows, rotated' else 64)


@pytest.mark.parametrize('variant', ['attention, fp8', 'attention, fp8, keys split'])
def test_the_accumulator_of_fp8_pages_is_scaled_while_the_product_with_the_next_keys_runs(kernels, variant):
    assert kernels[variant]['under_product'] >= 64  # a thread's part of 64 rows of 128 values, in four warps
