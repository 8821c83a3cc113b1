"""Runs a script and answers each line of standard input with a line that gives the memory in use.

    PYTHONMALLOC=malloc python memory_counter.py SCRIPT

Resident memory is a poor indicator of a leak: the C library keeps what a program frees, and how much depends on which threads
freed when (10 MiB between one run and the next). Memory in use is exact. Python's own allocator would hide its objects.
"""
import ctypes
import runpy
import sys
import threading
from pathlib import Path

MIB = 2 ** 20


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2 [bytes, except counts]."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        'arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks', 'uordblks', 'fordblks', 'keepcost')]


def in_use():
    """Return allocated memory plus resident file pages [MiB]."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    info = mallinfo()
    status = Path('/proc/self/status').read_text().splitlines()
    files = next(int(line.split()[1]) * 1024 for line in status if line.startswith('RssFile:'))
    return (info.uordblks + info.hblkhd + files) / MIB


def answer():
    for _ in sys.stdin:
        sys.stdout.write(f'{in_use()}\n')
        sys.stdout.flush()


if __name__ == '__main__':
    threading.Thread(target=answer, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name='__main__')
