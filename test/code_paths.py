"""
Prints, as JSON, which files of the package run between an image and its command, and between a question and its answer.

Both nodes run in this process, with the shipped model, over ROS. A file on a frame's path counts if it runs each time:
unrelated work of the nodes, such as their diagnostics once a second, does not run each time. The path of a question is
that of the two threads that answer it.
"""
import json
import threading
import time
from pathlib import Path

import rclpy
from rclpy.executors import SingleThreadedExecutor
from world_model_rig import Rig, Spinning, wait_for

from worldmodel_ros.engine import load
from worldmodel_ros.nodes.command_gate.node import CommandGate
from worldmodel_ros.srv import WhatIf

PACKAGE = Path(__file__).resolve().parents[1] / 'worldmodel_ros'
GENERATED = ('action/', 'msg/', 'srv/')
TICKS, QUESTIONS = 10, 3
PATIENCE = {'deadline_s': 5.0, 'command_timeout_s': 10.0}  # profiled code is slow
ANSWERS = 'answered', '_on_chunk', '_what_if'  # calls that end the path on their thread; the last two end the whole path


class Ways:
    """Records calls while a path is open, on each thread until its part of the path ends there."""

    def __init__(self):
        self.codes, self.ended, self.open = set(), set(), False
        self.threads = ()  # names of the observed threads; all, if empty

    def __call__(self, frame, event, argument):
        if not self.open or threading.get_ident() in self.ended:
            return
        if self.threads and threading.current_thread().name not in self.threads:
            return
        if event == 'call':
            self.codes.add(frame.f_code)
        elif event == 'return' and frame.f_code.co_name in ANSWERS and '/nodes/' in frame.f_code.co_filename:
            self.ended.add(threading.get_ident())
            self.open = frame.f_code.co_name == ANSWERS[0]

    def note(self, begin, *threads):
        """Return the files that ran, in some threads or all, from a call of ``begin`` to the end of the path it starts."""
        self.codes, self.ended, self.threads, self.open = set(), set(), threads, True
        begin()
        wait_for(lambda: not self.open, 'the end of the way', 60.0)
        files = {Path(code.co_filename) for code in self.codes}
        names = {str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE)}
        return {name for name in names if not name.startswith(GENERATED)}


def main():
    engine, ways = load(sessions=2), Ways()
    threading.setprofile(ways)
    rclpy.init(args=['--ros-args', *(word for name, value in PATIENCE.items() for word in ('-p', f'{name}:={value}'))])
    gate = Spinning(CommandGate(), SingleThreadedExecutor())
    rig = Rig(lambda **chosen: engine, deadline_s=PATIENCE['deadline_s'], allow_faults=False,
              camera_timeout_s=20.0, time_jump_s=30.0, executed_timeout_s=0.0)
    assert rig.change('configure', 'activate', timeout=120.0)  # profiled, the warm-up takes long on a busy machine
    rig.set_goal('red')

    def tick():
        time.sleep(0.5)  # for work after a command
        message = rig.image()
        return ways.note(lambda: rig.images.publish(message))

    def question():
        time.sleep(0.5)
        return ways.note(lambda: rig.call(WhatIf, 'what_if', WhatIf.Request(names=['left', 'right'], horizon=0.8)),
                         'services', 'engine')

    for each in (tick, question):  # the first runs import, load and compute what is cached
        each()
        each()
    found = {'frame': sorted(set.intersection(*(tick() for _ in range(TICKS)))),
             'what_if': sorted(set.intersection(*(question() for _ in range(QUESTIONS))))}
    rig.close()
    gate.close()
    rclpy.shutdown()
    print(json.dumps(found))


if __name__ == '__main__':
    main()
