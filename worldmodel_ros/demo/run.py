"""Runs the demo from start to end: start processes, drive, judge, plot."""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT
from worldmodel_ros.bringup.description import DescriptionError, load
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.demo.drive import Plan, drive
from worldmodel_ros.demo.live import LiveView
from worldmodel_ros.demo.load import CpuLoad
from worldmodel_ros.demo.outputs import draw_all, write_summary
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import Recording
from worldmodel_ros.demo.report import write_report
from worldmodel_ros.demo.summary import Run, summarise
from worldmodel_ros.demo.verdict import conclusion, exit_code, judge
from worldmodel_ros.machine import machine, versions

REPORT_TIMEOUT = 3.0   # for a report of the robot, which comes once a second [s]
MODEL_NODE, ROBOT_NODE = 'world_model_node', 'sim_robot'


@dataclass(frozen=True)
class Options:
    """Options from the command line."""

    plan: Plan
    out: Path
    arguments: dict[str, object] = field(default_factory=dict)  # of the bring-up, such as seed and model
    parameters: list[Path] = field(default_factory=list)        # files that override the bring-up's
    namespace: str = ''
    load: bool = False
    domain_id: int | None = None    # None: a free one


def run_demo(options: Options, observing: Callable[[Recording, str, Mapping[str, str]], AbstractContextManager]) -> int:
    """
    Run the demo; return the exit code: that of the verdict, 1 if it could not run, 130 if interrupted.

    ``observing(recording, namespace, remappings)`` returns the context manager of an observer (``nodes.demo.observer``); it is
    called once the environment of the ROS graph is set.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    recording = Recording()
    scorer = PredictionScorer(recording)
    try:
        run = _drive(options, recording, scorer, observing)
    except KeyboardInterrupt:
        print('\ninterrupted: all processes have been stopped, nothing was written')
        return 130
    except (DescriptionError, RuntimeError) as error:
        print(f'\nThe demo could not run: {error}\nLogs of the nodes: {options.out / "log"}', file=sys.stderr)
        return 1
    return _conclude(options, recording, scorer, run)


def _drive(options: Options, recording: Recording, scorer: PredictionScorer,
           observing: Callable[[Recording, str, Mapping[str, str]], AbstractContextManager]) -> Run:
    began = time.monotonic()
    start_up: dict[str, float] = {}

    def done(phase: str) -> None:
        start_up[phase] = time.monotonic() - began - sum(start_up.values())

    log = options.out / 'log'
    shutil.rmtree(log, ignore_errors=True)
    description = load()
    live = LiveView()
    with Supervisor(description.environment, log, options.domain_id) as supervisor:
        nodes = description.resolve('sim', {**options.arguments, 'task': options.plan.task}, options.parameters)
        supervisor.add(nodes, options.namespace)
        os.environ.update(supervisor.environment)  # before loading rclpy, so that this process joins the nodes' graph
        live.note(f'Starting {", ".join(node.name for node in nodes)} '
                  f'(ROS_DOMAIN_ID={supervisor.domain_id}, logs in {log})')
        supervisor.start()
        robot, = (node for node in nodes if node.name == ROBOT_NODE)
        with observing(recording, options.namespace, robot.remappings) as observer:
            done('observer')
            supervisor.wait_ready(ACTIVATION_TIMEOUT, live.note)
            done('processes')
            live.note(f'All processes run after {sum(start_up.values()):.1f} s. '
                      f'Driving for {options.plan.seconds:.0f} s.')
            if options.plan.task:  # start over: rooms that have passed while the model was loading do not count
                supervisor.restart(f'{options.namespace}/{ROBOT_NODE}')
            name = f'{options.namespace}/{MODEL_NODE}'
            with CpuLoad() if options.load else contextlib.nullcontext():
                seconds, kills = drive(options.plan, observer, lambda: supervisor.kill(name), live, scorer)
            start_up['first_command'] = observer.waited
            late = observer.finish(REPORT_TIMEOUT)
    return Run(seconds, options.plan.deadline, late, start_up, kills, options.load, options.plan.task)


def _conclude(options: Options, recording: Recording, scorer: PredictionScorer, run: Run) -> int:
    scorer.advance()
    summary = summarise(recording, run, scorer)
    summary |= {'machine': machine(), 'versions': versions()}
    path = write_summary(options.out, summary)
    pictures = draw_all(options.out, recording, scorer, summary)
    checks = judge(summary)
    verdict = conclusion(checks, summary)
    report = write_report(options.out, summary, checks, verdict, pictures)
    print('\n' + '\n'.join(f'  {check}' for check in checks))
    print(f'\n{verdict} {report} shows it; {path.name} and {", ".join(p.name for p in pictures)} are next to it.')
    return exit_code(checks)


def _interrupt(*_) -> None:
    raise KeyboardInterrupt
