"""The deadline replayed: the engine's own ladder, in virtual time, on frames as they came."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import SMALL
from tiled_model import TILED, tiled_model

from worldmodel_ros.control.ladder import Settings, Tier
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.session import Session
from worldmodel_ros.evaluate.drive.deadline import Arrival, Budget
from worldmodel_ros.evaluate.drive.deadline_replay import replay
from worldmodel_ros.evaluate.drive.step_times import PARTS, MeasuredTimes, StepTimesError, measure
from worldmodel_ros.evaluate.drive.virtual_time import VirtualClock
from worldmodel_ros.model.presets import TINY

MS = 1_000_000
BUDGET = Budget(0.05, Settings(0.012, 0.003, 3))
START = 1_700_000_000_000_000_000


def times(scale=1.0, rows=20):
    row = {'encode': 0.003, 'commit': 0.003, 'policy': 0.0002, 'denoise': 0.007, 'decode': 0.008}
    return MeasuredTimes([{part: scale * seconds for part, seconds in row.items()}] * rows, 'tiny', 'test', {})


def arrivals(count=100, delay_ms=5, period_ms=100):
    return [Arrival(START + k * period_ms * MS, START + (k * period_ms + delay_ms) * MS, 0) for k in range(count)]


def tiers(result):
    return {tier.name: count for tier, count in result.tiers.items() if count}


@pytest.mark.parametrize('scale, expected', [
    (1.0, {'TWO_STEP': 100}), (2.0, {'ONE_STEP': 100}), (3.0, {'PLAN_ONLY': 100}), (20.0, {'STOP': 100})])
def test_slower_machines_get_lower_tiers(scale, expected):
    assert tiers(replay(TINY, arrivals(), times(scale), BUDGET)) == expected


def test_latency_is_the_age_of_the_image_and_the_work():
    result = replay(TINY, arrivals(delay_ms=5), times(), BUDGET)
    work = 3.0 + 3.0 + 0.2 + 2 * 7.0
    assert result.latency_ms() == pytest.approx({'p50': 5.0 + work, 'p99': 5.0 + work, 'max': 5.0 + work})
    assert result.delay == pytest.approx(0.005) and len(result.latency) == 100


def test_an_image_that_took_long_leaves_less_time():
    late = arrivals()
    late[40:60] = [a._replace(log_ns=a.log_ns + 15 * MS) for a in late[40:60]]
    result = replay(TINY, late, times(), BUDGET)
    # 38 - 20 ms are left for these: one step (13.2 ms) fits, two (20.2 ms) do not.
    assert result.tiers[Tier.ONE_STEP] >= 20 and result.tiers[Tier.TWO_STEP] >= 75
    assert any('two steps would be ready' in reason for reason in result.reasons)


def test_an_image_older_than_the_deadline_is_not_answered():
    result = replay(TINY, arrivals(delay_ms=60), times(), BUDGET)
    assert result.stale == 100 and tiers(result) == {'NONE': 100} and result.latency_ms() is None


def test_log_times_that_say_nothing_are_not_taken_for_delays():
    for delay_ms in (0, 3_600_000):
        result = replay(TINY, arrivals(delay_ms=delay_ms), times(), BUDGET)
        assert result.delay is None and tiers(result) == {'TWO_STEP': 100}


def test_one_interruption_is_bridged_and_forgotten():
    slow = times(rows=60)
    slow.ticks[7] = {part: 8 * seconds for part, seconds in slow.ticks[7].items()}
    result = replay(TINY, arrivals(count=300), slow, BUDGET)
    assert 0 < result.late < 20 and result.tiers[Tier.TWO_STEP] > 200
    assert result.tiers[Tier.STOP] + result.tiers[Tier.NONE] <= result.late
    assert max(result.latency) <= 0.05


def test_the_same_drive_has_the_same_answers():
    uneven = times(rows=50)
    for k, row in enumerate(uneven.ticks):
        uneven.ticks[k] = {part: seconds * (1.0 + 0.05 * (k % 30)) for part, seconds in row.items()}
    first, second = (replay(TINY, arrivals(), uneven, BUDGET).to_dict() for _ in range(2))
    assert first == second and sum(first['tiers'].values()) == 100
    json.dumps(first, allow_nan=False)


def test_time_that_is_set_back_and_an_empty_drive_are_no_obstacle():
    back = arrivals(30) + [a._replace(episode=1) for a in arrivals(30)]
    assert replay(TINY, back, times(), BUDGET).tiers[Tier.TWO_STEP] == 60
    assert replay(TINY, [], times(), BUDGET).ticks == 0


def test_the_budget_is_that_of_the_node_as_it_is_brought_up():
    budget = Budget.from_config()
    assert budget.deadline == 0.05 and budget.limit == pytest.approx(0.038)


@pytest.mark.parametrize('preset, seen', [(SMALL, 1), (replace(TILED, keyframe_slabs=3), 8 + 6 + 1)], ids=['frames', 'tiles'])
def test_passes_over_tiles_are_timed_once_a_session_has_all_that_it_keeps(preset, seen, monkeypatch):
    engine, ticks = Engine(TorchBackend(tiled_model(preset)), Path('.'), 1), []
    monkeypatch.setattr(engine, 'warm_up', lambda: None)
    plan = Session.plan

    def noted(session, goal):
        ticks.append((session.frames_seen, len(session._cache.table)))
        return plan(session, goal)
    monkeypatch.setattr(Session, 'plan', noted)
    assert len(measure(engine, 'test', 3).ticks) == 3
    frames, slabs = zip(*ticks)
    assert frames == (seen, seen + 1, seen + 2)
    assert preset.tile is None or set(slabs) <= {8, 9}  # window, sink and keyframes, and the slab that is being filled


def test_step_times_go_through_a_file(tmp_path):
    times(1.5).save(tmp_path / 'times.json')
    loaded = MeasuredTimes.load(tmp_path / 'times.json')
    assert loaded.model == 'tiny' and len(loaded.ticks) == 20
    assert loaded.ticks[0] == pytest.approx({part: 1.5 * times().ticks[0][part] for part in PARTS})


@pytest.mark.parametrize('content', [
    '', '{}', '{"seconds": []}', '{"seconds": [{"encode": 1}]}',
    '{"seconds": [{"encode": -1, "commit": 1, "policy": 1, "denoise": 1, "decode": 1}]}'])
def test_a_file_without_step_times_is_refused_with_the_remedy(content, tmp_path):
    (tmp_path / 'times.json').write_text(content)
    with pytest.raises(StepTimesError, match='times.json'):
        MeasuredTimes.load(tmp_path / 'times.json')
    with pytest.raises(StepTimesError, match='step_times --out'):
        MeasuredTimes.load(tmp_path / 'missing.json')


def test_the_virtual_clock_calls_at_the_time_that_was_asked_for():
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append(clock()))
    clock.at(1.0, lambda: (seen.append(clock()), clock.at(1.5, lambda: seen.append(clock()))))
    clock.advance(3.0)
    assert seen == [1.0, 1.5, 2.0] and clock() == 3.0 and clock.next_event() is None
