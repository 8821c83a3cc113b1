"""Kernels of one warp that set flags in the memory of other GPUs, and wait for own ones."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=['flag', 'first', 'own'])
def set_flags(bases, flag, first, own):
    """Set word ``flag`` of the memory of processes ``first`` and on, one for each program; not in that of process ``own``.
    ``bases``: the addresses of all processes' words."""
    peer = first + tl.program_id(0)
    if peer != own:
        word = tl.load(bases + peer).to(tl.pointer_type(tl.int32)) + flag
        tl.atomic_xchg(word, 1, sem='release', scope='sys')


@triton.jit(do_not_specialize=['first', 'own'])
def await_flags(words, stop, first, own, LOOKS: tl.constexpr = 64):
    """Wait for words ``first`` and on, one for each program, and clear them; not for word ``own``. If ``stop``, a word in the
    host's memory, is set, nothing is waited for. It is read after every ``LOOKS`` looks at a flag, since that takes longer."""
    at = first + tl.program_id(0)
    if at != own:
        seen = tl.atomic_cas(words + at, 1, 0, sem='acquire', scope='sys')
        stopped, looks = 0, 0
        while (seen == 0) & (stopped == 0):
            looks += 1
            if looks % LOOKS == 0:
                stopped = tl.load(stop, volatile=True)
            seen = tl.atomic_cas(words + at, 1, 0, sem='acquire', scope='sys')
