"""Another program on the same GPU: large matrix products one after the other, for as long as its parent lives.

    python benchmarks/gpu_load.py
"""
from __future__ import annotations

import os

SIZE, AT_ONCE = 4096, 8  # about 1.5 ms of an H100 before the next are queued


def main() -> None:
    import torch
    parent = os.getppid()
    a, b = torch.randn(2, SIZE, SIZE, device='cuda', dtype=torch.bfloat16)
    out = torch.empty_like(a)
    while os.getppid() == parent:
        for _ in range(AT_ONCE):
            torch.matmul(a, b, out=out)
        torch.cuda.synchronize()


if __name__ == '__main__':
    main()
