"""A short round of every fuzzing target, the same inputs every time; ``make fuzz`` runs them for long."""
import json
import mmap
from pathlib import Path

import fuzzing
import pytest
from fuzzing import harness
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

RESULTS = sorted((Path(__file__).resolve().parents[1] / 'benchmarks' / 'results').glob('fuzz_*.json'))
# Each of them some tenths of a second.
INPUTS = {'codec': 2000, 'gateway': 1000, 'shared_memory': 300, 'mcap': 30, 'sqlite': 60, 'session_files': 200,
          'checkpoints': 6, 'images': 300, 'pictures': 100, 'requests': 200, 'commands': 300, 'goals': 300}
RUNS = 3


@pytest.mark.parametrize('name', fuzzing.BYTES)
def test_no_bytes_do_more_than_be_refused(name, tmp_path):
    crashes = harness.try_some(fuzzing.load(name), INPUTS[name], tmp_path)
    assert not crashes, '\n'.join(path.read_text() for path in tmp_path.glob('*.txt'))


@pytest.mark.parametrize('name', fuzzing.STATES)
def test_no_sequence_of_calls_breaks_what_holds(name):
    target = fuzzing.load(name)
    run_state_machine_as_test(target.machine, settings=settings(
        max_examples=RUNS, stateful_step_count=target.steps, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck)))


def judged(run, tmp_path, **bounds):
    target = harness.Bytes(lambda: [b'seed'], run, inputs=1, **bounds)
    return harness.try_some(target, 5, tmp_path)


def test_an_exception_that_is_not_documented_is_a_crash_and_its_input_is_kept(tmp_path):
    def run(data):
        if data != b'seed':
            raise IndexError(f'{len(data)} bytes')
    (kind, count), = judged(run, tmp_path).items()
    assert kind.startswith('IndexError-test_fuzz') and count == 4
    assert (tmp_path / f'{kind}.input').read_bytes() != b'seed'
    assert 'bytes' in (tmp_path / f'{kind}.txt').read_text()


@pytest.mark.parametrize('resident', [False, True])
def test_an_input_that_takes_more_memory_than_its_size_allows_is_a_crash(tmp_path, resident):
    def run(data):
        size = 40 * 2 ** 20 if data != b'seed' else 0
        if resident and size:
            # Not by malloc: it may have as much, from what other tests of this process have given back to it.
            with mmap.mmap(-1, size) as memory:
                for page in range(0, size, mmap.PAGESIZE):
                    memory[page] = 1
        else:
            bytearray(size)
    (kind, count), = judged(run, tmp_path, resident=resident, constant=2 ** 20).items()
    assert kind.startswith('TooMuchMemory') and count == 4


@pytest.mark.parametrize('path', RESULTS, ids=lambda path: path.name)
def test_the_figures_that_are_committed_are_of_every_target_and_as_many_as_the_documents_say(path):
    rows = json.loads(path.read_text())['rows']
    assert {row['target'] for row in rows} == set(fuzzing.TARGETS)
    assert not any(row['crashes'] for row in rows)
    assert sum(row['inputs'] for row in rows if row['target'] == 'codec') >= 1_000_000
    assert sum(row['inputs'] for row in rows if row['target'] in fuzzing.STATES) >= 10_000
    assert max(row['rss_growth'] for row in rows) <= harness.GROWTH
