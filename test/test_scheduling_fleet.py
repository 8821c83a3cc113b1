"""The fleet simulation: robots are placed once, overload is what the policies say it is, invented times stay out."""
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fleet_sim.__main__ import POLICIES, RESULTS, main
from benchmarks.fleet_sim.availability import Assumptions, Measured, Month, capacity_of
from benchmarks.fleet_sim.device import Device
from benchmarks.fleet_sim.durations import PLACEHOLDER, Durations, read_tables
from benchmarks.fleet_sim.scenarios import DETECTION, Scenario, histories


def play(robots, policy, seconds=2.0, **scenario):
    scenario = Scenario('test', robots, 1, seconds, **scenario)
    gpu = histories(scenario, 1)[0]
    return Device(gpu, [PLACEHOLDER], POLICIES[policy], scenario.staggered, seconds, 1).run().row()


def test_every_robot_is_on_one_gpu_at_a_time_and_lost_gpus_are_emptied_evenly():
    gpus = histories(Scenario('loss', 120, 12, 9.0, lost=3), seed=1)
    stays = sorted((stay.robot, stay.start, stay.end) for gpu in gpus for stay in gpu.stays)
    for robot in range(120):
        mine = [(start, end) for number, start, end in stays if number == robot]
        assert mine in ([(0.0, 9.0)], [(0.0, 3.0 + DETECTION), (3.0 + DETECTION, 9.0)])
    assert Counter(len(gpu.stays) for gpu in gpus[3:]) == {13: 6, 14: 3}
    assert [gpu.dies for gpu in gpus[:4]] == [3.0, 3.0, 3.0, float('inf')]


def test_every_tick_is_counted_once():
    row = play(20, 'edf_ladder')
    assert row['ticks'] == sum(row['outcomes'].values()) == 20 * 20


def test_a_gpu_with_time_to_spare_answers_everything_in_time_whatever_the_policy():
    for policy in POLICIES:
        row = play(8, policy)
        assert row['late_ratio'] == row['refused_ratio'] == 0.0 and row['tiers'] == {'two_step': 1.0}


def test_under_threefold_load_only_the_ladder_answers_in_time():
    assert play(78, 'fifo')['late_ratio'] > 0.9
    row = play(78, 'edf_ladder')
    assert row['late_ratio'] < 0.01 and row['refused_ratio'] < 0.05 and row['p99_ms'] < 50.0


def test_robots_that_start_together_are_helped_by_the_advised_phases():
    together, staggered = (play(12, 'edf_ladder', burst=0.005, staggered=staggered) for staggered in (False, True))
    assert together['tiers']['two_step'] < 0.9 < staggered['tiers']['two_step']


def test_a_session_whose_gpu_was_lost_is_warm_again_elsewhere():
    gpus = histories(Scenario('loss', 20, 2, 6.0, lost=1), seed=1)
    rows = [Device(gpu, [PLACEHOLDER], POLICIES['edf_ladder'], False, 6.0, 1).run().row() for gpu in gpus]
    assert rows[0]['outcomes']['lost'] > 0 and 'lost' not in rows[1]['outcomes']
    assert rows[1]['warm_again_s']['p99'] < 5.0


def test_durations_have_the_quantiles_of_the_table():
    durations = Durations([{'padded': True, 'rows': [{'network': 'n', 'batch': b, 'p50_ms': 10.0, 'p95_ms': 12.0,
                                                      'p99_ms': 15.0} for b in (1, 4)]}], random.Random(0))
    times = sorted(durations.draw('n', 3) for _ in range(20_000))
    assert [times[round(q * 20_000)] for q in (0.5, 0.95, 0.99)] == pytest.approx([0.010, 0.012, 0.015], rel=0.02)


def test_times_that_nobody_measured_do_not_get_among_the_results(capsys):
    with pytest.raises(SystemExit):
        main(['--out', str(RESULTS)])
    assert 'NOT MEASURED' in capsys.readouterr().err


def test_one_command_writes_rows_and_pictures(tmp_path):
    (tmp_path / 'table.json').write_text(json.dumps(PLACEHOLDER | {'measured': True, 'machine': 'a test'}))
    main(['--table', str(tmp_path / 'table.json'), '--out', str(tmp_path), '--scale', '0.003', '--scenario', 'together',
          '--processes', '1'])
    rows = json.loads((tmp_path / 'fleet_sim.json').read_text())['rows']
    assert {(row['scenario'], row['policy']) for row in rows} == {
        (name, policy) for name in ('start together', 'start together, staggered') for policy in POLICIES}
    assert {'robots', 'gpus', 'utilisation', 'late_ratio', 'refused_ratio', 'tiers', 'p50_ms', 'p99_ms'} <= set(rows[0])
    assert (tmp_path / 'fleet_sim.png').stat().st_size > 10_000
    assert (tmp_path / 'fleet_sim_timeline.png').stat().st_size > 5_000


def test_a_table_without_the_base_model_is_refused(tmp_path):
    (tmp_path / 'table.json').write_text(json.dumps({'rows': []}))
    with pytest.raises(ValueError, match='base/denoise, base/observe'):
        read_tables([tmp_path / 'table.json'])


def test_the_fleets_router_places_every_robot_once_and_those_of_a_lost_rack_elsewhere():
    gpus = histories(Scenario('rack', 120, 32, 9.0, lost=16, router=True, restored=0.5), seed=1)
    stays = sorted((stay.robot, stay.start, stay.end) for gpu in gpus for stay in gpu.stays)
    moved = [robot for robot, start, _ in stays if start > 0.0]
    assert len(stays) == 120 + len(moved) and 0 < len(moved) == sum(len(gpu.stays) for gpu in gpus[:16])
    assert all(stay.start in (0.0, 3.0 + DETECTION + 0.5) and not stay.warm_up for gpu in gpus for stay in gpu.stays)
    assert max(len(gpu.stays) for gpu in gpus) <= 9  # 85 % of 11.3


def test_robots_without_a_server_in_time_are_placed_nowhere():
    gpus = histories(Scenario('full', 400, 32, 9.0, router=True), seed=1)
    assert sum(len(gpu.stays) for gpu in gpus) < 400


def month(robots, days=2.0, **changed):
    return Month(robots, 32, Assumptions(**changed), Measured(resume=0.1, takeover=0.11), days, seed=3)


NEVER = {f'{name}_fails': 1e15 for name in ('process', 'host', 'rack', 'router', 'store', 'network', 'own')}
SERVER, LAST_PLAN, BOTH = 'any server', 'or the last plan', 'or the last plan, then the own model'


def test_where_nothing_fails_every_robot_has_a_server_all_the_time():
    calm = month(200, **NEVER)
    shares = calm.run()
    assert shares[SERVER] == shares[BOTH] == 1.0 and shares['gaps'] == 0 and not calm.counts


def test_each_rung_of_the_ladder_fills_a_part_of_what_the_one_before_leaves():
    shares = month(200).run()
    assert shares['server, with the session as it was'] <= shares[SERVER] < shares[LAST_PLAN] < shares[BOTH] < 1.0
    assert shares['or the own model, without the last plan'] < shares[BOTH]


def test_a_lost_process_costs_detection_and_reading_and_a_rack_more_where_there_is_no_room():
    often = month(200, **{**NEVER, 'process_fails': 40_000.0})
    shares = often.run()
    assert shares['gaps'] > 100 and shares['longest_gap_s'] == pytest.approx(0.35, abs=0.051) and 'no room' not in often.counts
    full = month(260, **{**NEVER, 'rack_fails': 100_000.0})
    assert full.run()['longest_gap_s'] > 600 and full.counts['no room']


def test_while_the_router_is_away_robots_find_a_server_by_themselves():
    alone = month(200, **{**NEVER, 'process_fails': 40_000.0, 'router_fails': 1.0, 'router_back': 1e9})
    shares = alone.run()
    assert alone.counts['placed without the router'] > 50 and shares['longest_gap_s'] < 0.5


def test_without_the_store_sessions_begin_anew():
    again = month(200, **{**NEVER, 'process_fails': 40_000.0, 'store_fails': 1.0, 'store_back': 1e9})
    shares = again.run()
    assert again.counts['begun again'] > 50 and shares['server, with the session as it was'] < shares[SERVER]


def test_a_fleets_capacity_is_what_all_draws_of_a_measurement_bore():
    rows = [{'way': 'offers', 'robots': robots, 'two_steps': share, 'in_time': in_time, 'busy': busy}
            for robots, share, in_time, busy in ((7, 1.0, 1.0, 0.84), (7, 0.995, 1.0, 0.83), (8, 0.96, 1.0, 0.88),
                                                 (8, 0.98, 1.0, 0.9), (9, 1.0, 0.99, 0.95), (10, 0.94, 1.0, 0.97))]
    result = {'rate_hz': 10.0, 'rows': [*rows, {'way': 'fifo', 'robots': 12, 'two_steps': 1.0, 'in_time': 1.0, 'busy': 0.9}]}
    assert capacity_of(result) == {'cost': pytest.approx(0.012), 'full': 0.85}
    assert capacity_of(result, 0.95) == {'cost': pytest.approx(0.9 / 80), 'full': 0.9}
    with pytest.raises(ValueError, match='had 100% of their ticks in two steps there, and all others in time'):
        capacity_of({**result, 'rows': rows[1:]}, 1.0)
