"""A signal ends a program as an exception, wherever its handler runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The handler of the signal runs in a callback of a weak reference, where Python drops what is raised.
PROGRAM = '''
import os, signal, sys, threading, time, weakref
from worldmodel_ros import interrupts

class Thing:
    pass

def died(reference):
    {callback}
    for _ in range(1000):
        pass
    print('the callback went on', flush=True)

interrupts.raise_interrupted()
thing = Thing()
reference = weakref.ref(thing, died)
try:
    del thing
    time.sleep(20)
except interrupts.Interrupted:
    os.kill(os.getpid(), signal.{name})  # later ones are ignored
    time.sleep(0.1)
    sys.exit('ended by the signal')
'''


def run(name, callback):
    return subprocess.run([sys.executable, '-c', PROGRAM.format(name=name, callback=callback)], cwd=ROOT, capture_output=True,
                          text=True, timeout=15)


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_an_interrupt_that_python_drops_comes_again(name):
    ended = run(name, f'os.kill(os.getpid(), signal.{name})')
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, '', 'ended by the signal\n')


def test_other_dropped_exceptions_are_reported_as_before():
    ended = run('SIGINT', 'threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start(); raise ValueError("bad")')
    assert ended.returncode == 1 and 'ValueError: bad' in ended.stderr and ended.stderr.endswith('ended by the signal\n')
