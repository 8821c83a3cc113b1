"""Another program on the same GPU: large matrix products, one after the other, for as long as its parent lives.

    python benchmarks/gpu_load.py --share 0.5
"""
from __future__ import annotations

import argparse
import os
import time

SIZE, AT_ONCE = 4096, 8  # about 1.5 ms of an H100 before the next are queued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--share', type=float, default=1.0, help='of the time, in which it wants the GPU')
    share = parser.parse_args().share
    import torch
    parent = os.getppid()
    a, b = torch.randn(2, SIZE, SIZE, device='cuda', dtype=torch.bfloat16)
    out = torch.empty_like(a)
    while os.getppid() == parent:
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            torch.matmul(a, b, out=out)
        torch.cuda.synchronize()
        time.sleep((time.perf_counter() - start) * (1.0 / share - 1.0))


if __name__ == '__main__':
    main()
