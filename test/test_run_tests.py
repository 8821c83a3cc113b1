"""`make test`: two phases, one table, one exit code."""
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

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
    os.kill(os.getpid(), signal.SIGSEGV)

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


def run(folder, tests, *arguments):
    """Run tests, with what test/conftest.py adds, and return the exit code and the lines of the table."""
    file = folder / 'test_some.py'
    file.write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYTEST_', 'WORLDMODEL_TEST_'))}
    environment['PYTHONPATH'] = os.pathsep.join([str(ROOT / 'test'), str(ROOT), environment.get('PYTHONPATH', '')])
    environment['WORLDMODEL_TEST_SPEED'] = json.dumps(SPEED)
    done = subprocess.run([sys.executable, RUNNER, '-p', 'conftest', '-p', 'no:cacheprovider', '-q', str(file), *arguments],
                          env=environment, capture_output=True, text=True)
    assert 'summary of both phases' in done.stdout, done.stdout + done.stderr
    return done.returncode, done.stdout.partition('summary of both phases')[2].splitlines()[1:]


def numbers(lines, phase):
    """Passed, failed, errors, skipped, not run and played again, of a phase."""
    (line,) = [line for line in lines if line.startswith(phase)]
    return [int(word) for word in line.removeprefix(phase).split()[:6]]


def test_the_table_names_what_was_skipped_and_played_again_with_reasons_and_the_machines_speed(tmp_path):
    code, lines = run(tmp_path, TESTS)
    text = '\n'.join(lines)
    assert code == 0, text
    assert numbers(lines, 'parallel') == [1, 0, 0, 1, 0, 0]
    assert numbers(lines, 'real time') == [1, 0, 0, 0, 0, 1]
    assert '[1] ' in text and 'no such device here' in text
    assert 'test_in_time: missed by 3 ms, in a stall of the machine of 9 ms' in text
    assert 'tick of the shipped model 21.5 ms; product of 384x384 float32 matrices by one thread 1.08 ms' in text
    assert ' 2 passed, 0 failed, 0 errors, 1 skipped in ' in lines[-1]


def test_a_failure_in_either_phase_fails_and_is_named(tmp_path):
    code, lines = run(tmp_path, TESTS + FAILS)
    text = '\n'.join(lines)
    assert code == 1
    assert numbers(lines, 'parallel') == [1, 1, 1, 1, 0, 0] and numbers(lines, 'real time')[0] == 1
    assert 'test_some.py::test_fails' in text and 'test_some.py::test_that_leaves_something' in text
    assert ' 2 passed, 1 failed, 1 errors, 1 skipped in ' in lines[-1]


def test_a_phase_that_dies_of_a_signal_fails_and_tells_in_which_test(tmp_path):
    code, lines = run(tmp_path, TESTS + DIES)
    text = '\n'.join(lines)
    assert code == 1
    assert 'ended by SIGSEGV in ' in text and 'test_some.py::test_dies; 2 tests were not run' in text
    assert numbers(lines, 'real time') == [1, 0, 0, 0, 2, 1]
    assert ' 2 passed, 0 failed, 1 errors, 1 skipped in ' in lines[-1]


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


def test_what_failed_is_run_once_more_only_where_the_machine_became_slower(monkeypatch):
    runner = module()
    runs = []

    def again(name, options, arguments, environment):
        runs.append(arguments)
        return runner.Phase(name, 0, 1.0, {'test/a.py::test_a': 'passed'})

    def phase(**changes):
        return runner.Phase('real time', 1, 10.0, **{'outcomes': {'test/a.py::test_a': 'failed'}, 'selected': 1, **changes})

    before = json.dumps({'tick_s': 0.020, 'product_s': 0.001})
    monkeypatch.setattr(runner, 'run', again)
    for after, violated, code in ((0.024, False, 1), (0.036, True, 1), (0.036, False, 0)):
        monkeypatch.setattr(runner, 'measure_speed', lambda after=after: json.dumps({'tick_s': after, 'product_s': 0.001}))
        one = phase(final={'test/a.py::test_a'} if violated else set())
        runner.play_again(one, before)
        assert one.code == code and len(one.replays) == (1 - code)
    assert runs == [['test/a.py::test_a']]
    assert one.outcomes == {'test/a.py::test_a': 'passed'} and '20.0 ms before the tests and 36.0 ms after' in one.replays[0][1]
