"""``make test``: three phases, one table, one exit code."""
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
RUNNER = ROOT / 'tools' / 'run_tests.py'
SPEED = {'tick_s': 0.0215, 'product_s': 0.00108}

TESTS = '''
import os, signal
import pytest
from scenarios import stalls

def test_passes():
    assert not os.environ.get('TRITON_INTERPRET') == '0'

@pytest.mark.skipif(True, reason='no such device here')
def test_of_a_device():
    pass

@pytest.mark.ros
@pytest.mark.waiting
def test_that_waits():
    pass

@pytest.mark.realtime
def test_in_time():
    stalls.REPLAYS.append(stalls.Replay('in time', 'missed by 3 ms, in a stall of the machine of 9 ms'))
'''
FAILS = '''
def test_fails():
    assert 0

@pytest.fixture
def broken():
    yield
    raise OSError('cannot be closed')

def test_that_leaves_something(broken):
    pass
'''
DIES = '''
@pytest.mark.realtime
def test_dies():
    signal.raise_signal(signal.SIGSEGV)  # in this thread: any other one may take a signal to the process, later

@pytest.mark.realtime
def test_after_it():
    pass
'''


def module():
    spec = importlib.util.spec_from_file_location('run_tests', RUNNER)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules['run_tests'] = loaded  # dataclasses look there
    spec.loader.exec_module(loaded)
    return loaded


def run(where, tests, *arguments, folder=False):
    """
    Run tests, with what test/conftest.py adds, and return the exit code and the lines of the table.

    ``folder``: all that is in it, and not their file alone.
    """
    file = where / 'test_some.py'
    file.write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYTEST_', 'WORLDMODEL_TEST_'))}
    environment['PYTHONPATH'] = os.pathsep.join([str(ROOT / 'test'), str(ROOT), environment.get('PYTHONPATH', '')])
    environment['WORLDMODEL_TEST_SPEED'] = json.dumps(SPEED)
    plugins = ('-p', 'conftest', '-p', 'no:cacheprovider', '-p', 'no:hypothesispytest')
    core = min(os.sched_getaffinity(0))  # fewer cores, fewer processes to start
    done = subprocess.run([sys.executable, RUNNER, *plugins, '-q', str(where if folder else file), *arguments],
                          env=environment, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert 'summary of all phases' in done.stdout, done.stdout + done.stderr
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout.partition('summary of all phases')[2].splitlines()[1:]


def numbers(lines, phase):
    """Passed, failed, errors, skipped, not run and played again, of a phase."""
    (line,) = [line for line in lines if line.startswith(phase)]
    return [int(word) for word in line.removeprefix(phase).split()[:6]]


RUNS_PYTEST = '''
import subprocess, sys

def test_that_runs_pytest():
    subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'conftest', {!r}], check=True)
'''
NOTES = "open({!r}, 'a').write(__file__ + ' ' + __import__('os').environ['WORLDMODEL_TEST_PHASE'] + chr(10))\n"


@pytest.fixture(scope='module')
def passing(tmp_path_factory):
    """
    What comes of two files that pass, one of which has tests for every phase and another pytest that one of them starts.

    Returns the folder, the second file's text, and of the run the exit code, the lines of the table and which file was read for
    which phase.
    """
    folder = tmp_path_factory.mktemp('passing')
    log, inner = folder / 'read', folder / 'inner' / 'inner.py'
    inner.parent.mkdir()
    inner.write_text('def test_inner():\n    pass\n')
    (folder / 'test_other.py').write_text(NOTES.format(str(log)) + '\ndef test_other():\n    pass\n')
    tests = TESTS + RUNS_PYTEST.format(str(inner)) + NOTES.format(str(log))
    return folder, tests, *run(folder, tests, folder=True), read_files(log)


def read_files(log):
    names = {line.rpartition('/')[2] for line in log.read_text().splitlines()}
    log.unlink()
    return names


@pytest.mark.parametrize('tick_s, waiting', [(0.0106, 4), (0.0215, 3)])
def test_a_fast_machine_runs_one_more_of_the_tests_that_wait(tick_s, waiting):
    runner, speed = module(), json.dumps({**SPEED, 'tick_s': tick_s})
    assert [runner.processes(phase, 2, speed) for phase in ('parallel', 'waiting')] == [4, waiting]
    assert runner.processes('waiting', 64, speed) == waiting + 6
    assert runner.processes('waiting', 2, 'not measured: ?') == 3


def test_the_table_names_what_was_skipped_and_played_again_with_reasons_and_the_machines_speed(passing):
    _, _, code, lines, _ = passing
    text = '\n'.join(lines)
    assert code == 0, text
    assert numbers(lines, 'parallel') == [3, 0, 0, 1, 0, 0]
    assert numbers(lines, 'waiting') == [1, 0, 0, 0, 0, 0]
    assert numbers(lines, 'real time') == [1, 0, 0, 0, 0, 1]
    assert '[1] ' in text and 'no such device here' in text
    assert 'test_in_time: missed by 3 ms, in a stall of the machine of 9 ms' in text
    assert 'tick of the shipped model 21.5 ms; product of 384x384 float32 matrices by one thread 1.08 ms' in text
    assert ' 5 passed, 0 failed, 0 errors, 1 skipped in ' in lines[-1]


def test_in_the_background_of_a_shell_which_has_it_ignore_interrupts_what_tests_start_can_be_interrupted(tmp_path):
    (tmp_path / 'test_some.py').write_text(
        'import signal, subprocess, sys\n\ndef test_child():\n'
        '    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"\n'
        '    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\\n"\n')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'conftest', '-p', 'no:cacheprovider', tmp_path / 'test_some.py'],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT / 'test'), str(ROOT)])}, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_pytest_that_a_test_starts_hides_no_phase(passing):
    _, _, code, lines, _ = passing
    assert code == 0 and [numbers(lines, phase)[0] for phase in ('parallel', 'waiting', 'real time')] == [3, 1, 1]


@given(st.just(0.3))
@settings(max_examples=1)
def test_an_example_that_takes_long_on_a_busy_core_is_no_failure(seconds):
    time.sleep(seconds)


def test_the_files_that_wait_longest_begin_first(tmp_path):
    for name, mark, count in (('a', 'waiting', 2), ('b', 'waiting(seconds=30)', 1), ('c', 'waiting(seconds=0.1)', 5)):
        (tmp_path / f'test_{name}.py').write_text(f'import pytest\n\npytestmark = pytest.mark.{mark}\n' + ''.join(
            f'\ndef test_{number}():\n    pass\n' for number in range(count)))
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '--co', '-q', '-p', 'conftest', '-p', 'no:cacheprovider', tmp_path],
        capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT / 'test'), str(ROOT)]),
                        'WORLDMODEL_TEST_PHASE': 'waiting', 'WORLDMODEL_TEST_FILES': ''})
    files = [line.partition('::')[0][-4:] for line in done.stdout.splitlines() if '::' in line]
    assert list(dict.fromkeys(files)) == ['b.py', 'a.py', 'c.py'] and len(files) == 8, done.stdout + done.stderr


def test_two_selections_for_one_phase_are_an_error(tmp_path):
    report = tmp_path / 'report.jsonl'
    told = [{'event': 'selected', 'count': 4, 'files': {'parallel': ['a.py'], 'real time': ['a.py']}}] * 2
    report.write_text('\n'.join(map(json.dumps, told)))
    phase = module().Phase('parallel')
    phase.read(report)  # each worker tells the same
    report.write_text(json.dumps({'event': 'selected', 'count': 1, 'files': {'parallel': ['b.py'], 'real time': []}}))
    with pytest.raises(RuntimeError, match='two selections'):
        phase.read(report)


def test_later_phases_read_only_the_files_that_have_something_for_them_and_do_not_begin_without(passing):
    folder, tests, _, _, read = passing
    assert read == {'test_some.py parallel', 'test_other.py parallel', 'test_some.py waiting', 'test_some.py real time'}
    code, lines = run(folder, tests, '-k', 'test_other or test_that_waits', folder=True)
    assert code == 0 and [numbers(lines, phase)[0] for phase in ('parallel', 'waiting', 'real time')] == [1, 1, 0]
    assert read_files(folder / 'read') == {'test_some.py parallel', 'test_other.py parallel', 'test_some.py waiting'}


def test_a_failure_in_one_phase_and_a_signal_that_ends_another_fail_and_are_named(tmp_path):
    code, lines = run(tmp_path, TESTS + FAILS + DIES)
    text = '\n'.join(lines)
    assert code == 1
    assert numbers(lines, 'parallel') == [1, 1, 1, 1, 0, 0]
    assert 'test_some.py::test_fails: assert 0\n' in text
    assert 'test_some.py::test_that_leaves_something: OSError: cannot be closed\n' in text
    assert 'ended by SIGSEGV in ' in text and 'test_some.py::test_dies; 2 tests were not run' in text
    assert numbers(lines, 'real time') == [1, 0, 0, 0, 2, 1]
    assert ' 3 passed, 1 failed, 2 errors, 1 skipped in ' in lines[-1]


HANGS = '''
def test_hangs():
    {}signal.pause()

def test_after_it():
    pass
'''


def test_tests_that_hang_fail_with_where_they_stood_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('WORLDMODEL_HUNG_TEST_S', '8')
    (tmp_path / 'test_blocked.py').write_text('import signal\n' + HANGS.format(
        'signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]), '))
    code, lines = run(tmp_path, TESTS + HANGS.format(''), '--timeout', '3', folder=True)
    assert code == 1
    passed, failed, errors, *_, not_run, _ = numbers(lines, 'parallel')
    assert (passed, failed + errors, not_run) == (3, 2, 0) and numbers(lines, 'real time')[0] == 1
    shown = capsys.readouterr().out
    for file, said, where in (('some', 'Timeout (>3.0s)', 'signal.pause()'),
                              ('blocked', 'crashed while running', 'in test_hangs')):
        assert f'test_{file}.py::test_hangs' in '\n'.join(lines) and said in shown and where in shown


def test_after_a_process_that_died_in_the_last_test_of_its_file_the_other_files_run(tmp_path):
    (tmp_path / 'test_tail.py').write_text('def test_one():\n    pass\n\ndef test_two():\n    pass\n')
    code, lines = run(tmp_path, TESTS + DIES.replace('realtime', 'untimed'), '-n', '1', '-k', 'not after_it', folder=True)
    assert code == 1
    assert numbers(lines, 'parallel') == [3, 0, 1, 1, 0, 0] and numbers(lines, 'real time')[0] == 1
    named = next(k for k, line in enumerate(lines) if line.endswith('test_some.py::test_dies ended its process:'))
    assert 'Segmentation fault' in lines[named + 1] and 'in test_dies' in '\n'.join(lines[named:])


@pytest.mark.parametrize('arguments, code, passed', [
    (['-k', 'in_time'], 0, 1),  # of the second phase alone
    (['-k', 'nothing_at_all'], 5, 0),
    (['-x', '-n0'], 1, 1)])     # gives up in the first phase
def test_arguments_are_those_of_pytest(tmp_path, arguments, code, passed):
    found, lines = run(tmp_path, TESTS + FAILS, *arguments)
    assert found == code, '\n'.join(lines)
    assert f' {passed} passed, ' in lines[-1]
    assert any(line.startswith('real time') for line in lines) is (code != 1)


@pytest.mark.parametrize('codes, expected', [
    ([0, 0], 0), ([0, 5], 0), ([5, 0], 0), ([5, 5], 5), ([1, 0], 1), ([0, 1], 1), ([0, -11], 1), ([-9, 0], 1), ([3, 0], 3)])
def test_one_exit_code_for_both_phases(codes, expected):
    runner = module()
    assert runner.exit_code([runner.Phase(str(code), code) for code in codes]) == expected


def test_a_phase_that_lost_tests_without_a_word_has_failed():
    runner = module()
    assert runner.exit_code([runner.Phase('parallel', 0, outcomes={'a::b': 'passed'}, selected=2)]) == 1


def test_the_slowest_files_are_named_with_their_time():
    runner = module()
    phase = runner.Phase('parallel', took=Counter({'test/test_a.py': 12.4, 'test/test_b.py': 3.0, 'test/test_c.py': 0.2}))
    assert 'slowest [s]: test_a.py 12, test_b.py 3' in runner.table([phase], json.dumps(SPEED), 20.0)


@pytest.mark.parametrize('after, stall, violated, passes', [
    (0.024, 0.0, False, False), (0.036, 0.0, True, False), (0.036, 0.0, False, True),
    (0.020, 0.03, False, False), (0.020, 0.08, True, False), (0.020, 0.08, False, True)])
def test_what_failed_is_run_once_more_only_where_the_machine_is_to_blame(monkeypatch, after, stall, violated, passes):
    runner, test, runs = module(), 'test/a.py::test_a', []

    def again(name, options, arguments, environment):
        runs.append(json.loads(environment['WORLDMODEL_TEST_ONLY']))
        return runner.Phase(name, 0, 1.0, {test: 'passed'})

    monkeypatch.setattr(runner, 'run', again)
    monkeypatch.setattr(runner, 'measure_speed', lambda: json.dumps({'tick_s': after, 'product_s': 0.001}))
    phase = runner.Phase('real time', 1, 10.0, {test: 'failed', 'test/a.py::test_b': 'passed'}, selected=2,
                         final={test} if violated else set(), stalls={test: stall} if stall else {})
    runner.play_again(phase, json.dumps({'tick_s': 0.020, 'product_s': 0.001}), [])
    assert (phase.code, runs, phase.outcomes[test]) == ((0, [[test]], 'passed') if passes else (1, [], 'failed'))
    cause = 'a core stood still for 80 ms' if stall else 'a tick took 20.0 ms before the tests and 36.0 ms after them'
    assert phase.replays == ([(test, f'{cause}; passed when run again')] if passes else [])


def test_what_has_a_cause_is_run_again_also_where_another_test_has_none(monkeypatch):
    runner = module()
    monkeypatch.setattr(runner, 'run', lambda name, *_: runner.Phase(name, 0, 1.0, {'a.py::stalled': 'passed'}))
    monkeypatch.setattr(runner, 'measure_speed', lambda: json.dumps(SPEED))
    phase = runner.Phase('real time', 1, 10.0, {'a.py::stalled': 'failed', 'a.py::wrong': 'failed'}, selected=2,
                         stalls={'a.py::stalled': 0.2})
    runner.play_again(phase, json.dumps(SPEED), [])
    assert phase.outcomes == {'a.py::stalled': 'passed', 'a.py::wrong': 'failed'} and phase.code == 1


STALLS = '''
import os, signal, subprocess, sys, time
import pytest

@pytest.mark.PHASE
def test_in_a_stall():
    """The watches of its phase are stopped for a while, once, as a host stops a core."""
    phase = os.getppid() if 'PYTEST_XDIST_WORKER' in os.environ else os.getpid()
    watches = [int(pid) for pid in subprocess.check_output(['pgrep', '-P', str(phase), '-f', 'stalls.py'], text=True).split()]
    if not os.path.exists('stalled'):
        open('stalled', 'w').close()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in watches:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            time.sleep(0.2)
        assert 0

@pytest.mark.realtime
def test_that_is_not_run_again():
    assert not os.environ.get('WORLDMODEL_TEST_ONLY')
'''


def test_tests_that_failed_in_a_stall_pass_at_their_second_run(tmp_path):
    tests = ''.join(STALLS.replace('test_in_a_stall', f'test_{mark}_in_a_stall').replace('PHASE', mark)
                    .replace("'stalled'", repr(str(tmp_path / mark))) for mark in ('realtime', 'waiting'))
    code, lines = run(tmp_path, tests)
    text = '\n'.join(lines)
    assert code == 0, text
    assert numbers(lines, 'real time') == [2, 0, 0, 0, 0, 1] and numbers(lines, 'waiting') == [1, 0, 0, 0, 0, 1]
    assert text.count('a core stood still for ') == 2
