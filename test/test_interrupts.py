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


def test_an_interrupt_comes_again_until_it_is_raised_where_python_does_not_drop_it():
    """On a busy machine the second one comes while the first is still being reported as dropped."""
    slow = 'start = threading.Thread.start; threading.Thread.start = lambda thread: (start(thread), time.sleep(0.1))'
    ended = run('SIGTERM', f'{slow}; os.kill(os.getpid(), signal.SIGTERM)')
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, '', 'ended by the signal\n')


def test_other_dropped_exceptions_are_reported_as_before():
    ended = run('SIGINT', 'threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start(); raise ValueError("bad")')
    assert ended.returncode == 1 and 'ValueError: bad' in ended.stderr and ended.stderr.endswith('ended by the signal\n')


# A signal comes while a thread is being told something: it has been woken, and is not crossed off the list of those that wait.
TELLS = '''
import os, signal, sys, threading
from worldmodel_ros import interrupts
from worldmodel_ros.control.worker import WorkThread

{begin}
worker, asleep = WorkThread('worker'), threading.Event()
worker.start(asleep.set, print)

class Waiting(type(worker.wake._waiters)):
    def remove(self, waiter):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass
        super().remove(waiter)
        print('crossed off', flush=True)

worker.wake._waiters = Waiting(worker.wake._waiters)
asleep.wait()
with worker.wake:
    worker.stir()
worker.stop()
'''


@pytest.mark.parametrize('begin, said', [('end = interrupts.End()', 'crossed off\n'), ('interrupts.raise_interrupted()', '')])
def test_a_signal_after_the_start_interrupts_nothing(begin, said):
    """As an exception, which the second case shows, it would leave a thread that no later notification reaches."""
    ended = subprocess.run([sys.executable, '-c', TELLS.format(begin=begin)], cwd=ROOT, capture_output=True, text=True,
                           timeout=15)
    assert ended.stdout.startswith(said) and ('Interrupted' in ended.stderr) is (not said)


def test_an_end_that_is_asked_for_wakes_a_selector():
    program = '''
import os, selectors, signal, threading, time
from worldmodel_ros import interrupts
end, selector = interrupts.End(), selectors.DefaultSelector()
selector.register(end, selectors.EVENT_READ)
assert not selector.select(0.0) and not end.asked
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
assert selector.select(10.0) and end.asked
for _ in range(100_000):
    end.ask()
print('asked')
'''
    ended = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, 'asked\n', '')
