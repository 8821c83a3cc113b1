"""The watch that tells a machine that stood still from processes that did."""

import os
import signal
import time

from scenarios.stalls import NOTICEABLE, Stalls


def test_no_stall_is_as_long_as_the_watch_itself_while_the_machine_runs():
    with Stalls() as stalls:
        time.sleep(0.3)
    assert 0.0 <= stalls.longest < 0.3


def test_a_stall_is_noticed_and_its_length_is_right():
    with Stalls() as stalls:
        os.kill(stalls.process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(stalls.process.pid, signal.SIGCONT)
    assert stalls.noticeable
    assert 0.5 - 0.05 <= stalls.longest < 5.0
    assert NOTICEABLE < 0.5
