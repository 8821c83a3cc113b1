"""What the benchmarks of residency and rounding compare: sessions that came back with twins that never left."""
import threading
import time

import pytest

from benchmarks import rounding
from benchmarks.residency import Comparison, Recorder, Robot, compare_at_the_end
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.session_store import StoredSession
from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings
from worldmodel_ros.serving.scheduler.step_table import StepTable
from worldmodel_ros.serving.service.service import Service, ServiceSettings

pytestmark = pytest.mark.slow
PLACES, ROBOTS = 3, 4


@pytest.fixture
def compared():
    """A function that runs robots for so many ticks each, and compares them."""
    engine = load_random('tiny', 'torch-bf16', sessions=PLACES + 1)
    engine.backend.sizes = 1, 2, 4  # as on a GPU
    table = StepTable()  # nothing is due within ten minutes: to measure what each step takes would take longer than all else
    for part in ('observe', 'policy', 'denoise', 'decode', 'commit', 'snapshot'):
        for size in engine.backend.sizes:
            # A batch is worth it until one has been run: a machine that was busy at the first tick would run none.
            table.record(f'{engine.spec.name}/{part}', size, 0.05 if size == 1 else 0.001)
    service = Service(engine, settings=ServiceSettings(sessions=ROBOTS, pictures=False), table=table)
    held, step = threading.Event(), service.step
    # Ticks of those that are here share a batch, however busy the machine is.
    service.step = lambda: 0.001 if held.is_set() else step()
    service.start()
    recorder = Recorder(engine.backend)
    keeper = Keeper(service, engine, HostStore(), '/here', KeeperSettings(period=1e6, patience=30.0, places=PLACES))

    def run(count: int, ticks: int) -> Comparison:
        robots = [Robot(number, keeper, engine.spec) for number in range(count)]
        for number, robot in enumerate(robots):
            robot.open(f'robot{number}')
        for _ in range(ticks):
            held.set()
            for robot in robots:
                robot.tick(600.0)
            time.sleep(0.05)  # until they have come there
            held.clear()
            end = time.monotonic() + 60.0
            while any(len(robot.replies) < robot.sequence for robot in robots) and time.monotonic() < end:
                time.sleep(0.001)
        return compare_at_the_end(engine, service, keeper, recorder, robots)
    yield run
    service.stop()


def test_sessions_that_came_back_are_compared_in_batches_of_the_same_sizes(compared):
    comparison = compared(ROBOTS, 6)
    found = comparison.to_dict()
    before, after = found['before_it_left'], found['after_it_came_back']
    assert before['plans'] + after['plans'] == ROBOTS * 6 and after['plans'] > 0
    assert found['plans_from_batches_of_several'] > 0 and found['sessions_begun_again'] == 0
    assert before['differ'] == after['differ'] == 0 and not comparison.wrong
    control = found['control_two_twins_in_other_batches']
    assert control['differ'] > 0  # so that a twin that is always alone would have been taken for another session
    assert 0.0 < control['largest_difference'] < 0.01 * found['largest_in_a_plan']


def test_a_session_that_comes_back_as_another_one_is_told_from_rounding(compared, monkeypatch):
    read = StoredSession.read

    def damaged(stored, manifest):
        read(stored, manifest)
        stored.state['encoder_state'] = stored.state['encoder_state'] * 0.5
    monkeypatch.setattr(StoredSession, 'read', damaged)
    comparison = compared(ROBOTS, 6)
    found = comparison.to_dict()
    assert comparison.wrong and found['after_it_came_back']['differ'] > 0
    assert found['before_it_left']['differ'] == 0


def test_where_no_session_has_left_nothing_is_shown(compared):
    comparison = compared(2, 3)
    found = comparison.to_dict()
    assert found['before_it_left'] == {'plans': 6, 'differ': 0, 'largest_difference': 0.0}
    assert found['after_it_came_back']['plans'] == 0 and comparison.wrong


def test_a_session_by_way_of_a_store_plans_the_same_and_one_in_a_batch_does_not(monkeypatch):
    row = rounding.row('tiny', 'torch-bf16', 3)
    same = ('again', 'by_way_of_a_store', 'second_engine', 'second_engine_other_thread')
    assert [row[name]['differ'] for name in same] == [0] * 4
    for name in ('batch_of_2', 'batch_of_4'):
        assert row[name]['differ'] > 0 and row[name]['largest_difference'] < 0.01 * row['largest_in_a_plan']
    read = StoredSession.read

    def damaged(stored, manifest):
        read(stored, manifest)
        stored.state['encoder_state'] = stored.state['encoder_state'] * 0.5
    monkeypatch.setattr(StoredSession, 'read', damaged)
    assert rounding.row('tiny', 'torch-bf16', 3)['by_way_of_a_store']['differ'] == 2
