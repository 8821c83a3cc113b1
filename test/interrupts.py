"""Starts a process as the launch files do, and interrupts it as Ctrl-C in a terminal does."""
import re
import signal
import subprocess
import time
from pathlib import Path

from worldmodel_ros.bringup.process import HOLD_INTERRUPT, signal_prefix


def start(*command):
    """Start a client as the launch files do; on return it holds interrupts back, which takes ``env`` 1 ms."""
    process = subprocess.Popen([*signal_prefix(HOLD_INTERRUPT), *command], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    status = Path(f'/proc/{process.pid}/status')
    while not int(re.search(r'SigBlk:\s+(\w+)', status.read_text())[1], 16) & 1 << signal.SIGINT - 1:
        time.sleep(0.0002)
    return process


def interrupt(process):
    """Interrupt a process as Ctrl-C and then a launcher do; return its exit code, its output, and the duration [s]."""
    start = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    words = process.communicate(timeout=30.0)[0]
    return process.returncode, words, time.monotonic() - start
