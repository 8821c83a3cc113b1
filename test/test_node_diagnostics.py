"""Diagnostics and the count of refused messages."""

import threading
from types import SimpleNamespace

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor

from worldmodel_ros.nodes.common.diagnostics import WARN, Diagnostics, Refusals, Report
from worldmodel_ros.nodes.world_model.outputs import Statistics


def test_reports_arrive_under_the_name_of_the_node_with_readable_values():
    context = Context()
    rclpy.init(context=context)
    try:
        node = rclpy.create_node('subject', namespace='/robot1', context=context)
        arrived = []
        node.create_subscription(DiagnosticArray, '/diagnostics', arrived.append, 10)
        report = Report(WARN, 'slow', {'rate_hz': 9.87654321, 'frames': 3})
        diagnostics = Diagnostics(node, {'camera': lambda: report}, 1.0)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        diagnostics.publish()
        for _ in range(100):
            executor.spin_once(timeout_sec=0.1)
            if arrived:
                break
        status = arrived[0].status[0]
        assert (status.name, status.level, status.message) == ('robot1/subject: camera', WARN, 'slow')
        assert {pair.key: pair.value for pair in status.values} == {'rate_hz': '9.87654', 'frames': '3'}
        assert arrived[0].header.stamp.sec > 0
        executor.remove_node(node)
        node.destroy_node()
    finally:
        rclpy.shutdown(context=context)


def test_refusals_are_counted_by_reason():
    refusals = Refusals()
    refusals.count('wrong encoding')
    assert refusals.count('wrong encoding') == 2
    refusals.count('empty image')
    assert refusals.values() == {'refused: wrong encoding': 2, 'refused: empty image': 1}
    assert refusals.total == 3


def test_endlessly_new_reasons_do_not_fill_the_memory():
    refusals = Refusals(kinds=4)
    for number in range(1000):
        refusals.count(f'reason {number}')
    assert refusals.total == 1000
    assert refusals.values()['refused: other'] == 996


def test_refusals_from_several_threads_all_count():
    refusals = Refusals()
    threads = [threading.Thread(target=lambda: [refusals.count('x') for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals.total == 8000


@pytest.mark.parametrize('rate', [10, 60])
def test_the_rate_of_predictions_is_right_at_any_rate_of_ticks_and_few_are_told(rate):
    statistics = Statistics()
    for tick in range(5 * rate):
        now = tick / rate
        statistics.image(SimpleNamespace(received=now, stamp=tick * 10**9 // rate, episode=1), 0.0)
        statistics.predicted(now)
    assert statistics.values(now, 1.0 / rate)['predictions_rate'] == pytest.approx(rate, rel=0.02)
    assert statistics.few_predictions(now, rate) == ''
    assert 'predictions come at 0.0 Hz' in statistics.few_predictions(now + 4.0, rate)
