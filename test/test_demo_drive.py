"""The course of a drive, on a clock of its own; the live view; the load; what is written at the end."""
import io
import json
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from demo_recordings import START, TERMS, drive as driven, task_drive, what_if
from worldmodel_ros.demo.drive import NothingDriven, Plan, drive, goal_distance, outcome
from worldmodel_ros.demo.goals import REACHED_DISTANCE
from worldmodel_ros.demo.live import LiveView, as_line, as_table, view
from worldmodel_ros.demo.load import CpuLoad
from worldmodel_ros.demo.outputs import draw_all, write_summary
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import NS, Command, Pose, Recording, Thing
from worldmodel_ros.demo.report import write_report
from worldmodel_ros.demo.summary import Run, summarise
from worldmodel_ros.demo.verdict import conclusion, judge
from worldmodel_ros.machine import machine, versions
from worldmodel_ros.sim.scene import GOAL_DISTANCE


class Robot:
    """An observer of a robot that drives at 0.5 m/s along x, on a clock that moves when it is slept on."""

    def __init__(self, answers=True):
        self.recording = Recording(things={'a': Thing('red', 2.0, 0.0, 0.0, 0.2, 0.2, (1, 0, 0)),
                                           'b': Thing('blue', 4.0, 0.0, 0.0, 0.2, 0.2, (0, 0, 1))})
        self.time, self.alive, self.answers = 0.0, True, answers
        self.goals, self.questions, self.begun = [], [], False

    def begin(self):
        self.begun = True

    def set_goal(self, goal):
        self.goals.append((round(self.time, 1), goal))

    def wait_for_command(self, timeout):
        return self.answers

    def ask_what_if(self, names, goal, horizon):
        self.questions.append((round(self.time, 1), goal))
        self.recording.what_ifs.append(what_if(self.now()))

    def now(self):
        return START + round(self.time * NS)

    def clock(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        self.recording.poses.append(Pose(self.now(), 0.5 * self.time, 0.0, 0.0, 0.5, 0.0))
        stamp = self.now() - 30_000_000 if self.alive else 0
        self.recording.commands.append(Command(stamp, self.now(), 0.5, 0.0))

    def kill(self):
        self.alive = False


def run(robot, **plan):
    stream = io.StringIO()
    scorer = PredictionScorer(robot.recording)
    plan = Plan(**{'seconds': 8.0, 'goals': [] if 'task' in plan else ['red', 'blue'], **plan})
    result = drive(plan, robot, robot.kill, LiveView(stream), scorer, robot.clock, robot.sleep)
    return result, stream.getvalue()


def test_next_goal_is_given_when_one_is_reached():
    robot = Robot()
    (seconds, kills), output = run(robot)
    assert seconds == pytest.approx(8.0, abs=0.03) and kills == []
    assert [goal for _, goal in robot.goals] == ['red', 'blue', 'red']
    reached = robot.recording.goals[0].reached
    assert reached == pytest.approx((2.0 - REACHED_DISTANCE) / 0.5 + 0.3, abs=0.1)
    assert 6 <= len(output.splitlines()) <= 9  # a line a second


def test_questions_are_asked_about_the_goal_of_the_moment():
    robot = Robot()
    run(robot)
    assert [t for t, _ in robot.questions] == [1.0, 4.0, 7.0]
    assert [goal for _, goal in robot.questions] == ['red', 'blue', 'blue']


def test_of_a_task_no_goals_are_given_and_questions_are_about_what_the_robot_was_told():
    robot = Robot()
    robot.recording.target = 'blue'
    _, output = run(robot, task='street')
    assert robot.begun and robot.goals == [] and robot.recording.goals == []
    assert [goal for _, goal in robot.questions] == ['', '', '']
    assert 'goal blue' in output


def test_kills_happen_once_each_and_their_outcome_is_measured():
    robot = Robot()
    (_, kills), output = run(robot, kill_at=[2.0], seconds=4.0)
    assert len(kills) == 1 and kills[0].at == pytest.approx(2.0, abs=0.03)
    assert kills[0].stop == pytest.approx(0.02, abs=0.01) and kills[0].driving is None
    assert 'killing' in output


def test_outcome_of_a_kill_is_the_first_stop_after_it_and_the_first_command_after_that():
    at = [(1.0, 1), (1.1, 1), (1.25, 0), (1.3, 0), (4.0, 1)]
    rec = Recording(commands=[Command(stamp, round(t * NS), 0.0, 0.0) for t, stamp in at])
    kill = outcome(rec, 1.05, round(1.05 * NS))
    assert (kill.stop, kill.driving) == (pytest.approx(0.2), pytest.approx(2.95))
    assert outcome(rec, 4.5, round(4.5 * NS)).stop is None


def test_no_command_is_an_error_that_says_what_was_waited_for():
    with pytest.raises(NothingDriven, match='no command answered a camera image within 30 s'):
        run(Robot(answers=False))


def test_distance_is_unknown_until_robot_and_goal_have_been_seen():
    assert goal_distance(Recording(), 'red') == math.inf
    robot = Robot()
    robot.recording.poses.append(Pose(0, -1.0, 4.0, 0.0, 0.0, 0.0))
    assert goal_distance(robot.recording, 'red') == pytest.approx(5.0)
    assert goal_distance(robot.recording, 'green') == math.inf


def test_goal_distance_of_the_demo_is_that_of_the_task():
    assert REACHED_DISTANCE == GOAL_DISTANCE


def test_live_view_shows_the_numbers_of_the_recording():
    rec = driven()
    scorer = PredictionScorer(rec)
    scorer.advance()
    shown = view(rec, 3.9, 30.0, 0.05, 1.23, scorer.scores())
    assert shown.rate == pytest.approx(10.0) and shown.p50 == pytest.approx(0.03) and shown.late == 0
    line, table = as_line(shown), '\n'.join(as_table(shown))
    for text in (line, table):
        assert '1.23 m' in text and 'blue' in text and '90%' in text and 'dB' in text
    assert max(map(len, table.splitlines())) <= 80


def test_live_view_of_a_task_shows_rooms_and_how_the_last_command_was_decided():
    rec = task_drive()
    shown = view(rec, 3.9, 30.0, 0.05, 1.23, PredictionScorer(rec).scores())
    line, table = as_line(shown), as_table(shown)
    for text in (line, '\n'.join(table)):
        assert 'room 2, 1 of 1 done' in text and 'right 0.8 s of 4, 1 vetoed' in text and 'red' in text
    assert len(table) == 7 and max(map(len, table)) <= 80


def test_live_view_of_nothing_says_so():
    shown = view(Recording(), 0.0, 30.0, 0.05, math.inf, PredictionScorer(Recording()).scores())
    assert 'no frames compared yet' in as_line(shown) and len(as_table(shown)) == 6


def test_a_terminal_gets_a_table_that_is_drawn_over():
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    stream = Terminal()
    live = LiveView(stream)
    shown = view(driven(), 1.0, 2.0, 0.05, 1.0, PredictionScorer(Recording()).scores())
    live.show(shown)
    assert '\x1b[6F' not in stream.getvalue()
    live.show(shown)
    assert stream.getvalue().count('\x1b[6F') == 1


def test_load_burns_and_leaves_no_process():
    def ticks(pid):
        return sum(map(int, open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[11:13]))
    with CpuLoad(processes=1) as load:
        pid = load._processes[0].pid
        end = time.monotonic() + 5.0
        while ticks(pid) < 10 and time.monotonic() < end:
            time.sleep(0.02)
        assert ticks(pid) >= 10
    assert not os.path.exists(f'/proc/{pid}')


def test_load_ends_with_a_parent_that_was_killed():
    script = ('import sys; from worldmodel_ros.demo.load import CpuLoad\n'
              'with CpuLoad(processes=1) as load:\n'
              '    print(load._processes[0].pid, flush=True); sys.stdin.read()')
    parent = subprocess.Popen([sys.executable, '-c', script], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10.0
    while os.path.exists(f'/proc/{pid}') and time.monotonic() < end:
        if open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[0] == 'Z':
            break  # over; nobody reaps it in a container without an init
        time.sleep(0.02)
    else:
        assert not os.path.exists(f'/proc/{pid}')


def test_machine_names_processor_and_versions():
    assert machine()['cores'] >= 1 and machine()['cpu'] and machine()['memory_gib'] > 0.1
    assert versions(('numpy', 'no-such-package')) == {'numpy': np.__version__, 'no-such-package': None}


def test_everything_is_written(tmp_path):
    rec = driven()
    scorer = PredictionScorer(rec)
    scorer.advance()
    summary = summarise(rec, Run(4.0, 0.05, 0, {'processes': 2.0}), scorer) | {'machine': machine()}
    assert json.loads(write_summary(tmp_path, summary).read_text()) == summary
    drawn = {path.name for path in draw_all(tmp_path, rec, scorer, summary)}
    assert drawn == {'latency.png', 'path.png', 'film_strip.png', 'prediction.gif', 'what_if.png'}
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)


def test_of_a_task_the_futures_are_drawn_and_one_page_shows_it_all(tmp_path):
    rec = task_drive()
    scorer = PredictionScorer(rec)
    scorer.advance()
    summary = summarise(rec, Run(4.0, 0.05, 0, {'processes': 2.0}, task='street'), scorer) | {'machine': machine()}
    drawn = draw_all(tmp_path, rec, scorer, summary)
    assert {'futures.png', 'futures.gif', 'path.png'} <= {path.name for path in drawn}
    checks = judge(summary)
    page = write_report(tmp_path, summary, checks, conclusion(checks, summary), drawn).read_text()
    shown = set(re.findall(r'<img src="([^"]+)"', page))
    assert shown == {path.name for path in drawn}
    for text in ('contact with mover', TERMS[1], 'done, 2.0 s', 'PASS'):
        assert text in page
    assert not re.search(r'(src|href)="(?!data:,)[^"]*[:/]', page)  # nothing that is not next to it


def test_a_run_in_which_nothing_came_is_written_without_pictures(tmp_path):
    rec = Recording()
    scorer = PredictionScorer(rec)
    summary = summarise(rec, Run(4.0, 0.05, None, {}), scorer) | {'machine': machine()}
    write_summary(tmp_path, summary)
    assert draw_all(tmp_path, rec, scorer, summary) == []
