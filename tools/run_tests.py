"""Runs all tests in three phases and summarises them in one table: ``make test``.

    .venv/bin/python tools/run_tests.py [ARGUMENTS OF PYTEST]

First the tests without real-time bounds, in two more processes than there are cores (at most 10); then those with such bounds
that mostly wait, in one more, or two on a fast machine; then the rest, one test at a time with nothing else running.
The machine's speed is measured before, and again after a real-time phase in which something failed. The exit code
is 0 if every test of all phases passed or had a reason, known before it started, not to run; 5, pytest's, if the arguments
select none.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPEED, PHASE, REPORT, ONLY, FILES, SHARED = (
    f'WORLDMODEL_TEST_{name}' for name in ('SPEED', 'PHASE', 'REPORT', 'ONLY', 'FILES', 'SHARED'))
MOST_WORKERS = 8
FAST = 0.013  # s, the longest tick of a machine that is fast enough for one more process of waiting tests
NO_TESTS, INTERRUPTED, USAGE = 5, 2, 4  # exit codes of pytest
# Arguments that only query pytest need no phases.
QUESTIONS = {'-h', '--help', '--version', '-V', '--co', '--collect-only', '--markers', '--fixtures', '--setup-plan'}
WIDTH = 100
SLOWER = 1.25  # tick time after the tests relative to before, beyond which the machine is slower and failed tests run again
STALL = 0.05  # s that a core stood still during a test: longer than any real-time test tolerates
FRAMES = 8  # calls shown per thread of a process that a test has ended
SLOWEST = 12  # files listed with their time
LONGEST_REASON = 400  # characters of why a test failed


@dataclass
class Phase:
    """One run of pytest, from the report that test/conftest.py writes meanwhile."""

    name: str
    code: int = 0
    seconds: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)        # test -> passed, failed, error or skipped
    reasons: dict[str, str] = field(default_factory=dict)         # test that did not pass -> reason
    replays: list[tuple[str, str]] = field(default_factory=list)  # test, reason for the replay
    final: set[str] = field(default_factory=set)                  # tests that failed by a violated invariant
    stalls: dict[str, float] = field(default_factory=dict)        # failed test -> the longest stall of a core meanwhile [s]
    stacks: dict[str, str] = field(default_factory=dict)          # test that ended its process -> where each thread stood
    took: Counter = field(default_factory=Counter)                # file -> seconds of its tests
    selected: int = 0
    files: dict[str, list[str]] | None = None  # phase -> the files with tests for it; None: never reported
    running: str = ''    # the test that had begun and not ended
    gave_up: bool = False  # after as many failures as the arguments allow

    @property
    def died(self) -> str:
        """Return what ended it early, or ''."""
        if self.code >= 0:
            return ''
        return f'ended by {signal.Signals(-self.code).name} ' + (f'in {self.running}' if self.running else 'between two tests')

    @property
    def counts(self) -> Counter:
        return Counter(self.outcomes.values())

    @property
    def not_run(self) -> int:
        # A file that is skipped as a whole has no tests to select.
        return max(0, self.selected - sum('::' in test for test in self.outcomes))

    def read(self, report: Path) -> None:
        """Read the lines of a report; the last one may be cut short."""
        for line in report.read_text().splitlines() if report.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            match event['event']:
                case 'selected':
                    if self.files not in (None, event['files']):
                        raise RuntimeError(f'two selections of tests are reported for the phase {self.name}: which files have '
                                           'tests for the next ones is not known')
                    self.selected, self.files = event['count'], event['files']
                case 'start':
                    self.running = event['test']
                case 'end':
                    self.running = ''
                case 'took':
                    self.took[event['test'].partition('::')[0]] += event['seconds']
                case 'outcome':
                    # A test that passed and failed in its teardown is an error.
                    self.outcomes[event['test']] = event['outcome']
                    if event.get('final'):
                        self.final.add(event['test'])
                    if event.get('stall'):
                        self.stalls[event['test']] = event['stall']
                    if event.get('stacks'):
                        self.stacks[event['test']] = event['stacks']
                    if event['outcome'] != 'passed':
                        self.reasons[event['test']] = event['reason']
                case 'replay':
                    self.replays.append((event['test'], event['reason']))
                case 'gave up':
                    self.gave_up = True


def measure_speed() -> str:
    """Return the machine's speed: the earlier measurement, or what test/scenarios/speed.py prints, or why that failed."""
    if SPEED in os.environ:
        return os.environ[SPEED]
    done = subprocess.run([sys.executable, ROOT / 'test' / 'scenarios' / 'speed.py'], cwd=ROOT, text=True, capture_output=True,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [
                              str(ROOT / 'test'), str(ROOT), os.environ.get('PYTHONPATH', '')]))})
    lines = done.stdout.splitlines()
    return lines[-1] if done.returncode == 0 and lines else 'not measured: ' + (done.stderr.splitlines() or ['?'])[-1]


def processes(phase: str, cores: int, speed: str) -> int:
    """Return the number of processes for a phase, more than there are cores, since many of its tests wait for processes to
    start and end. ``speed``: as measured."""
    if phase == 'parallel':
        return min(cores, MOST_WORKERS) + 2
    try:
        fast = json.loads(speed)['tick_s'] <= FAST
    except ValueError:
        fast = False
    return min(cores, MOST_WORKERS) + 1 + fast


def run(name: str, options: list[str], arguments: list[str], environment: dict[str, str]) -> Phase:
    phase, start = Phase(name), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / 'report.jsonl'
        process = subprocess.Popen([sys.executable, '-m', 'pytest', *options, *arguments], cwd=ROOT,
                                   env={**os.environ, **environment, PHASE: name, REPORT: str(report)})
        try:
            phase.code = process.wait()
        except KeyboardInterrupt:  # the child received the signal, too
            phase.code = process.wait() or INTERRUPTED
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        phase.seconds = time.monotonic() - start
        phase.read(report)
    return phase


def read_only(phase: Phase) -> dict[str, str]:
    """Return the environment in which a run only reads the files with tests for a phase, as it reported itself."""
    return {FILES: json.dumps(phase.files[phase.name])} if phase.files else {}


def slower(before: str, after: str) -> str:
    """Describe how the machine became slower between two measurements; '' if it did not."""
    try:
        first, second = (json.loads(speed)['tick_s'] * 1e3 for speed in (before, after))
    except ValueError:
        return ''
    return f'a tick took {first:.1f} ms before the tests and {second:.1f} ms after them' if second > SLOWER * first else ''


def play_again(phase: Phase, before: str, arguments: list[str]) -> None:
    """
    Run once more, alone, the real-time tests that failed for an external cause; that result is final.

    Such causes are a core that stood still during the test for longer than STALL (test/scenarios/stalls.py), and a machine
    that is slower after the tests than before. Violated invariants are not run again.
    """
    failed = [test for test, outcome in phase.outcomes.items()
              if outcome in ('failed', 'error') and test not in phase.final]
    if not failed or phase.died or phase.gave_up or phase.not_run:
        return
    after = measure_speed()
    became_slower = slower(before, after)
    causes = {test: became_slower or f'a core stood still for {phase.stalls[test] * 1e3:.0f} ms' for test in failed
              if became_slower or phase.stalls.get(test, 0.0) > STALL}
    if not causes:
        return
    print(f'{len(causes)} failed and run once more:', *causes.items(), sep='\n  ', flush=True)
    again = run('real time', [], arguments, {SPEED: after, ONLY: json.dumps(list(causes)), **read_only(phase)})
    phase.seconds += again.seconds
    for test, cause in causes.items():
        phase.outcomes[test] = again.outcomes.get(test, phase.outcomes[test])
        phase.reasons[test] = again.reasons.get(test, phase.reasons.get(test, ''))
        phase.replays.append((test, f'{cause}; {phase.outcomes[test]} when run again'))
    if not again.died and all(outcome in ('passed', 'skipped') for outcome in phase.outcomes.values()):
        phase.code = 0


def exit_code(phases: list[Phase]) -> int:
    """Return the one code for all phases; one that died, or lost tests, has failed."""
    codes = [phase.code for phase in phases]
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    if any(phase.died or (phase.not_run and not phase.gave_up and phase.code in (0, NO_TESTS)) for phase in phases):
        return 1
    return max(code for code in codes if code != NO_TESTS)


def innermost(stacks: str) -> list[str]:
    """Return faulthandler's output with only the innermost FRAMES calls of each thread."""
    lines, frames = [], 0
    for line in filter(None, stacks.splitlines()):
        frames = frames + 1 if line.startswith('  ') else 0
        if frames <= FRAMES:
            lines.append(line)
    return lines


def table(phases: list[Phase], speed: str, seconds: float) -> list[str]:
    """Return the lines of the summary, the last of which is like pytest's own."""
    lines = [' summary of all phases '.center(WIDTH, '='),
             f'{"":14}{"passed":>8}{"failed":>8}{"errors":>8}{"skipped":>9}{"not run":>9}{"played again":>14}{"seconds":>9}']
    for phase in phases:
        counts = phase.counts
        lines.append(f'{phase.name:14}{counts["passed"]:8}{counts["failed"]:8}{counts["error"]:8}{counts["skipped"]:9}'
                     f'{phase.not_run:9}{len(phase.replays):14}{phase.seconds:9.0f}')
    slowest = [f'{file.removeprefix("test/")} {seconds:.0f}' for phase in phases
               for file, seconds in phase.took.most_common(SLOWEST // len(phases)) if seconds >= 1.0]
    if slowest:
        lines += textwrap.wrap('slowest [s]: ' + ', '.join(slowest), WIDTH, subsequent_indent='  ', break_on_hyphens=False)
    for title, outcome in (('failed', 'failed'), ('errors', 'error')):
        found = {test: phase.reasons.get(test, '') for phase in phases
                 for test, its in phase.outcomes.items() if its == outcome}
        if found:
            lines += [f'{title}:', *(f'  {test}: {textwrap.shorten(why, LONGEST_REASON)}' for test, why in found.items())]
    deaths = [f'  {phase.name}: {phase.died}; {phase.not_run} tests were not run' for phase in phases if phase.died]
    lines += ['died:', *deaths] if deaths else []
    by_reason = defaultdict(list)
    skipped = {test: phase.reasons[test] for phase in phases for test, its in phase.outcomes.items() if its == 'skipped'}
    for test, reason in skipped.items():
        by_reason[reason].append(test)
    lines.append('skipped, each with the reason that was known before it started:' if by_reason else 'skipped: none')
    for reason, tests in by_reason.items():
        shown = tests[0] if len(tests) == 1 else f'{tests[0].partition("::")[0]} and others' if len(
            {test.partition('::')[0] for test in tests}) > 1 else tests[0].partition('::')[0]
        lines.append(f'  [{len(tests)}] {shown}: {reason}')
    replays = [f'  {test}: {reason}' for phase in phases for test, reason in phase.replays]
    lines += ['played again:', *replays] if replays else ['played again: none']
    for phase in phases:
        for test, stacks in phase.stacks.items():
            lines += [f'{test} ended its process:', *(f'  {line}' for line in innermost(stacks))]
    try:
        measured = json.loads(speed)
        speed = (f'tick of the shipped model {measured["tick_s"] * 1e3:.1f} ms; product of 384x384 float32 matrices by '
                 f'one thread {measured["product_s"] * 1e3:.2f} ms')
    except ValueError:
        pass
    lines.append(f'machine: {speed}')
    total = sum((phase.counts for phase in phases), Counter())
    total['error'] += len(deaths)
    what = ', '.join(f'{total[outcome]} {word}' for outcome, word in (
        ('passed', 'passed'), ('failed', 'failed'), ('error', 'errors'), ('skipped', 'skipped')))
    lines.append(f' {what} in {seconds:.2f}s '.center(WIDTH, '='))
    return lines


def main(arguments: list[str]) -> int:
    if QUESTIONS.intersection(arguments):
        return subprocess.call([sys.executable, '-m', 'pytest', *arguments], cwd=ROOT)
    start, speed = time.monotonic(), measure_speed()
    environment = {} if speed.startswith('not') else {SPEED: speed}
    cores = len(os.sched_getaffinity(0))
    # Each test file runs in one process, which makes its shared fixtures once.
    parallel = ['--dist', 'loadfile', '--no-loadscope-reorder', '-n']
    # Several processes share the cores, so PyTorch's own threads would only wait for each other.
    one_thread = {'OMP_NUM_THREADS': '1'}
    # Without bytecode, each process would compile all tests, and each node that they start the whole package.
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
    phases = []
    for name, options, changes in (
            ('parallel', [*parallel, str(processes('parallel', cores, speed))], one_thread),
            ('waiting', [*parallel, str(processes('waiting', cores, speed))], one_thread),
            ('real time', [], {})):
        known = phases[0].files if phases else None
        if known is not None and not known[name]:
            phases.append(Phase(name, NO_TESTS))
            continue
        phase = run(name, options, arguments, {**environment, **changes, **({FILES: json.dumps(known[name])} if known else {})})
        phases.append(phase)
        if name != 'parallel':
            play_again(phase, speed, arguments)
        if phase.gave_up or phase.code in (INTERRUPTED, USAGE):
            break
    print('\n'.join(table(phases, speed, time.monotonic() - start)), flush=True)
    return exit_code(phases)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as os.environ[SHARED]:  # shared by the phases, such as exported graphs
        code = main(sys.argv[1:])
    sys.exit(code)
