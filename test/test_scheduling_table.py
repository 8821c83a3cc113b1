"""The step table: what a batch is expected to take, from what batches took."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.serving.scheduler import StepTable

SAMPLES = st.dictionaries(st.integers(1, 12), st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30), min_size=1,
                          max_size=5)


def measured(times, padded=False, count=20):
    table = StepTable(padded)
    for batch, seconds in times.items():
        for _ in range(count):
            table.record('net', batch, seconds)
    return table


@given(SAMPLES, st.booleans())
def test_times_never_fall_with_the_batch_size_and_the_high_quantile_is_never_below_the_typical_time(samples, padded):
    table = StepTable(padded)
    for batch, times in samples.items():
        for seconds in times:
            table.record('net', batch, seconds)
    sizes = range(1, table.largest('net') + 1)
    for of in (table.typical, table.high):
        times = [of('net', size) for size in sizes]
        assert times == sorted(times)
    assert all(table.typical('net', size) <= table.high('net', size) for size in sizes)


def test_a_size_between_measured_ones_is_interpolated():
    table = measured({1: 0.010, 4: 0.016})
    assert table.typical('net', 2) == pytest.approx(0.012)
    assert table.largest('net') == 4


def test_a_size_that_is_padded_takes_what_the_next_larger_one_takes():
    table = measured({1: 0.010, 4: 0.016}, padded=True)
    assert table.typical('net', 2) == table.typical('net', 4) == pytest.approx(0.016)
    for _ in range(60):
        table.record('net', 3, 0.020)  # counted for the size it was padded to
    assert table.typical('net', 4) == pytest.approx(0.020)


def test_one_interruption_changes_nothing():
    table = measured({1: 0.010}, count=100)
    table.record('net', 1, 5.0)
    assert table.high('net', 1) == pytest.approx(0.010)


def test_repeated_interruptions_raise_the_high_quantile_but_not_the_typical_time():
    table = measured({1: 0.010}, count=100)
    for seconds in (0.050, 0.010, 0.010, 0.010) * 3:
        table.record('net', 1, seconds)
    assert table.high('net', 1) == pytest.approx(0.050)
    assert table.typical('net', 1) == pytest.approx(0.010)


def test_a_device_that_slows_down_is_believed_after_three_batches_and_slower_at_everything():
    table = measured({1: 0.010}, count=100)
    for _ in range(20):
        table.record('other', 4, 0.030)
    for _ in range(3):
        table.record('net', 1, 0.020)
    assert table.typical('net', 1) == table.high('net', 1) == pytest.approx(0.020)
    assert table.typical('other', 4) == table.high('other', 4) == pytest.approx(0.060)
    for _ in range(3):
        table.record('other', 4, 0.030)
    assert table.typical('net', 1) == table.high('net', 1) == pytest.approx(0.010)


def test_a_network_that_became_slower_than_the_others_is_believed_by_itself():
    table = measured({1: 0.010}, count=100)
    for _ in range(200):
        for seconds in (0.020, 0.020, 0.020):
            table.record('other', 1, seconds)
        table.record('net', 1, 0.030)
    assert table.typical('net', 1) == pytest.approx(0.030, rel=0.05)
    assert table.typical('other', 1) == pytest.approx(0.020, rel=0.05)


def test_what_is_old_counts_no_more_once_there_are_twenty_newer_samples():
    table = StepTable()
    for k in range(30):
        table.record('net', 1, 0.050 if k % 4 == 0 else 0.010, now=0.1 * k)
    assert table.high('net', 1) == pytest.approx(0.050)
    for k in range(30, 65):
        assert table.high('net', 1) > 0.010
        table.record('net', 1, 0.010, now=0.1 * k)
        if table.high('net', 1) == 0.010:
            break
    assert 5.0 < 0.1 * k < 6.5


def test_a_saved_table_says_the_same_when_it_is_loaded(tmp_path):
    table = measured({1: 0.010, 2: 0.013, 8: 0.030}, padded=True)
    table.save(tmp_path / 'table.json', machine='a machine', preset='tiny')
    values = json.loads((tmp_path / 'table.json').read_text())
    assert values['machine'] == 'a machine' and values['rows'][0] == {
        'network': 'net', 'batch': 1, 'p50_ms': 10.0, 'p95_ms': 10.0, 'p99_ms': 10.0, 'samples': 20}
    loaded = StepTable.load(tmp_path / 'table.json')
    assert loaded.curve('net') == table.curve('net') and loaded.padded


def test_what_is_measured_replaces_what_was_loaded():
    table = StepTable.from_dict(measured({1: 0.010}).to_dict('m', 'p'))
    for _ in range(100):
        table.record('net', 1, 0.004)
    assert table.high('net', 1) == pytest.approx(0.004)


def test_tables_of_several_presets_make_one():
    small = {'rows': [{'network': 'small/denoise', 'batch': 1, 'p50_ms': 1.0, 'p99_ms': 1.5}]}
    table = StepTable.from_dict(measured({1: 0.010}).to_dict('m', 'p'), small)
    assert table.high('small/denoise', 1) == pytest.approx(0.0015) and table.typical('net', 1) == pytest.approx(0.010)


@pytest.mark.parametrize('text, complaint', [
    ('{"rows": [', 'not JSON'), ('{}', 'not a step table'), ('[1]', 'not a step table'),
    ('{"rows": [{"network": "a", "batch": 1, "p50_ms": -1, "p99_ms": 2}]}', 'impossible')])
def test_what_is_no_step_table_is_refused(tmp_path, text, complaint):
    (tmp_path / 'table.json').write_text(text)
    with pytest.raises(ValueError, match=complaint):
        StepTable.load(tmp_path / 'table.json')


def test_a_network_that_was_never_measured_is_named():
    with pytest.raises(ValueError, match="no time of network 'other'.*net"):
        measured({1: 0.010}).typical('other', 1)


@pytest.mark.parametrize('batch, seconds', [(0, 0.1), (1, -0.1), (1, float('nan'))])
def test_a_duration_that_cannot_be_is_refused(batch, seconds):
    with pytest.raises(ValueError, match='cannot have taken'):
        StepTable().record('net', batch, seconds)


def test_a_calibration_says_nothing_about_the_speed_of_the_device():
    table = measured({1: 0.010}, count=100)
    for _ in range(20):
        table.record('other', 1, 0.030)
    for _ in range(20):
        table.record('net', 1, 0.020, calibrating=True)
    assert table.typical('net', 1) == pytest.approx(0.020) and table.typical('other', 1) == pytest.approx(0.030)
