"""The demo's numbers: prediction quality, latency, tiers, goals, what-if scores and the verdict."""
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_recordings import START, TERMS, drive, encode, panorama, task_drive
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.demo.goals import REACHED_HOLD, GoalSequence
from worldmodel_ros.demo.images import decode_rgb
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import NS, Command, Option, Recording, Room, Tick
from worldmodel_ros.demo.summary import Kill, Run, summarise
from worldmodel_ros.demo.verdict import conclusion, exit_code, judge
from worldmodel_ros.evaluate.drive.pictures import PSNR_CAP_DB, psnr
from worldmodel_ros.exit_codes import TOO_SLOW

RUN = Run(seconds=4.0, deadline=0.05, late_commands=0, start_up={'processes': 3.2})


def scored(recording):
    scorer = PredictionScorer(recording)
    scorer.advance()
    return scorer


def summary_of(recording, run=RUN):
    return summarise(recording, run, scored(recording))


def test_psnr_is_that_of_the_textbook():
    a = np.full((8, 8, 3), 100, np.uint8)
    assert psnr(a, a + np.uint8(5)) == pytest.approx(20 * math.log10(255 / 5))
    assert psnr(a, a) == PSNR_CAP_DB
    with pytest.raises(ValueError, match='shapes'):
        psnr(a, a[:4])


def test_decoding_gives_rgb_and_refuses_what_is_no_picture():
    image = np.zeros((4, 4, 3), np.uint8)
    image[..., 0] = 200
    assert (decode_rgb(encode(image)) == image).all()
    for broken in (b'', b'not a picture'):
        with pytest.raises(ValueError, match='no JPEG or PNG'):
            decode_rgb(broken)


def test_predictions_are_compared_with_the_image_of_their_stamp():
    scores = scored(drive(error=4)).scores()
    assert scores['psnr_db'] == pytest.approx(20 * math.log10(255 / 4), abs=0.01)
    assert scores['psnr_copy_last_db'] < scores['psnr_db'] - 10
    assert [h['horizon_s'] for h in scores['by_horizon']] == [0.1, 0.2, 0.3, 0.4]
    copies = [h['psnr_copy_last_db'] for h in scores['by_horizon']]
    assert copies == sorted(copies, reverse=True)  # the further ahead, the less has stayed the same


def test_camera_jitter_is_matched_and_missing_images_are_counted():
    rec = drive()
    rec.image_stamps = [s + (7_000_000 if i % 2 else -7_000_000) for i, s in enumerate(rec.image_stamps)]
    before = scored(rec).scores()
    del rec.image_stamps[20], rec.images[20]
    after = scored(rec).scores()
    assert before['frames_without_image'] == 0
    assert after['frames_without_image'] == 4 + 4  # four predictions of it, and the one that started from it
    assert after['frames'] == before['frames'] - 8


def test_a_robot_that_stands_still_scores_nothing():
    scores = scored(drive(moving=False)).scores()
    assert scores['psnr_db'] is None and scores['frames'] == 0 and scores['frames_standing'] > 100


def test_unreadable_predictions_are_counted_not_raised():
    rec = drive()
    frames = (b'broken', encode(panorama(0)[:32]), *rec.futures[3].frames[2:])
    rec.futures[3] = replace(rec.futures[3], frames=frames)
    assert scored(rec).scores()['frames_unreadable'] == 2


def test_scoring_while_the_run_goes_on_gives_the_same_as_scoring_it_at_the_end():
    whole, growing = drive(), Recording()
    scorer = PredictionScorer(growing)
    for i, stamp in enumerate(whole.image_stamps):
        growing.add_image(stamp, whole.images[i])
        growing.commands.append(whole.commands[i])
        growing.futures.append(whole.futures[i])
        scorer.advance()
    assert scorer.scores() == scored(whole).scores()


def test_images_that_do_not_move_on_are_dropped():
    rec = Recording()
    for stamp in (10, 20, 20, 15, 30):
        rec.add_image(stamp, panorama(stamp))
    assert rec.image_stamps == [10, 20, 30] and len(rec.images) == 3


@given(st.lists(st.floats(0.01, 0.3), min_size=1, max_size=8), st.floats(0.0, 1.0), st.floats(0.05, 1.0))
def test_mean_command_of_a_constant_command_is_that_command(gaps, start, length):
    times = np.cumsum([0.0, *gaps])
    rec = Recording(commands=[Command(1, round(t * NS), 0.3, -0.7) for t in times])
    v, w = rec.mean_command(round(start * NS), round((start + length) * NS))
    assert v == pytest.approx(0.3, abs=1e-6) and w == pytest.approx(-0.7, abs=1e-6)


def test_mean_command_weighs_by_time():
    rec = Recording(commands=[Command(1, 0, 1.0, 0.0), Command(1, 3 * NS, 0.0, -2.0)])
    assert rec.mean_command(2 * NS, 6 * NS) == pytest.approx((0.25, -1.5))
    assert rec.mean_command(-2 * NS, 2 * NS) == pytest.approx((0.5, 0.0))  # it stood before the first command


def test_latency_counts_commands_that_answer_an_observation_only():
    rec = drive(latency=0.03)
    rec.commands.append(Command(0, START + 99 * NS, 0.0, 0.0))
    latency = summary_of(rec)['camera_to_command_ms']
    assert latency['commands'] == 40
    assert latency['p50'] == latency['p99'] == latency['max'] == pytest.approx(30.0)


def test_the_robots_own_measurement_is_the_one_that_counts():
    rec = drive(latency=0.03)
    rec.robot_latencies = [0.02] * 40 + [0.5]   # the last after the drive
    summary = summary_of(rec)
    assert summary['camera_to_command_ms']['max'] == pytest.approx(20.0)
    assert summary['camera_to_command_ms']['measured_by'] == 'robot'
    assert summary['camera_to_command_observed_ms']['max'] == pytest.approx(30.0)


def test_reasons_for_lower_tiers_are_counted_without_their_numbers():
    rec = drive()
    rec.ticks += [Tick(1, 2, False, 0.03, f'two steps would be ready {late} ms after the limit; 1 of 3')
                  for late in (1.5, -0.25, 12)]
    reasons = summary_of(rec)['lower_tiers_because']
    assert reasons['two steps would be ready # ms after the limit'] == 3


def test_decisions_are_counted_by_what_was_chosen_and_none_are_made_up():
    rec = drive()
    assert summary_of(rec)['decisions'] == {}
    counted = summary_of(task_drive())['decisions']
    assert (counted['chosen'], counted['candidates'], counted['vetoed']) == ({'right 0.8 s': 40}, 4.0, 40)
    assert counted['against_the_policy'] == 40 and counted['passes'] == {'1': 40}


def test_an_option_is_rejected_for_its_contact_or_for_the_term_that_it_loses_most_by():
    chosen = task_drive().choices[0]
    assert {option.name: chosen.rejected_for(option) for option in chosen.options} == {
        'policy': 'contact with mover', 'right 0.8 s': '', 'stop 0.8 s': TERMS[0], 'left 0.8 s': TERMS[1]}
    assert summary_of(task_drive())['decisions']['rejected_for'] == {
        'contact with mover': 40, TERMS[0]: 40, TERMS[1]: 40}
    equal = replace(chosen, chosen='stop', options=(Option('stop', 1.0, (1.0, 0.0)), Option('policy', 1.0, (1.0, 0.0))))
    assert equal.rejected_for(equal.options[1]) == ''


@pytest.mark.parametrize('off', [0.0, 0.2])
def test_a_forecast_is_compared_with_where_movers_really_were_in_the_same_room(off):
    errors = summary_of(task_drive(off))['decisions']['movers_off_by_m']
    assert errors == {ahead: pytest.approx(off, abs=0.01) for ahead in ('0.0', '0.4', '0.8', '1.6')}


def test_what_is_taken_for_a_mover_where_none_is_has_no_part_in_the_error():
    assert summary_of(task_drive(0.8))['decisions']['movers_off_by_m'] == dict.fromkeys(('0.0', '0.4', '0.8', '1.6'))


def test_rooms_are_told_with_what_came_of_them_and_jumps_between_them_are_no_way():
    rec = task_drive()
    plain = summary_of(rec)['robot']['distance_m']
    rec.poses = [replace(pose, x=pose.x + 100.0 * (i >= 20)) for i, pose in enumerate(rec.poses)]
    summary = summary_of(rec, replace(RUN, task='street'))
    assert summary['robot']['distance_m'] == pytest.approx(plain, abs=0.06)
    assert [(room['seed'], room['fate'], room['target']) for room in summary['rooms']] == [
        (7, 'done, 2.0 s', 'red'), (8, 'goes on', 'red')]
    assert summary['goal_reached'] and summary['goals_reached'] == 1
    assert any('street: 1 of 1 rooms done' in claim.claim for claim in judge(summary))


def test_rooms_that_passed_before_the_first_command_are_not_the_run_s():
    rec = task_drive()
    rec.rooms.insert(0, Room('street', 6, rec.rooms[0].begun - 5 * NS, {}, 'red', False, 'time over', 20.0))
    assert [room.seed for room in rec.driven] == [7, 8]
    assert Recording(rooms=rec.rooms).driven == []


def test_times_are_told_by_part():
    rec = task_drive()
    rec.ticks = [replace(tick, age=0.005, latency=0.02) for tick in rec.ticks]
    times = summary_of(rec)['part_times_ms']
    assert {name: part['p50'] for name, part in times.items()} == {
        'image': 5.0, 'node': 20.0, 'forecast': 12.0, 'comparing': 4.0}


def test_diagnostics_become_numbers_where_they_are():
    rec = drive()
    rec.robot |= {'received': '40', 'render_ms': '1.5', 'latency_p50_ms': 'nan'}
    rec.model |= {'model': 'tiny', 'backend': 'onnx', 'frame_rate_node': '10.0'}
    summary = summary_of(rec)
    del summary['robot']['distance_m'], summary['robot']['turned_rad']
    assert summary['robot'] == {'received': 40, 'render_ms': 1.5, 'latency_p50_ms': None}
    assert summary['model'] == {'model': 'tiny', 'backend': 'onnx'}


def test_summary_has_what_is_promised():
    summary = summary_of(drive())
    assert summary['tiers'] == {
        'two_step': 36, 'one_step': 4, 'smaller': 0, 'plan_only': 0, 'last_plan': 0, 'stop': 0}
    assert (summary['ticks'], summary['rate_hz'], summary['deadline_ms']) == (40, 10.0, 50.0)
    assert summary['late_commands_published'] == 0 and summary['goal_reached'] is True
    assert summary['goals'][0]['took_s'] == 2.1 and summary['goals'][1]['took_s'] is None
    assert {'branches', 'ms_p50', 'ms_p99'} <= summary['what_if'].keys()
    assert {'psnr_db', 'psnr_copy_last_db'} <= summary['prediction'].keys()


def test_a_stop_between_rooms_for_want_of_images_is_no_tick():
    rec = task_drive()
    before = summary_of(rec)['tiers']
    rec.ticks.append(Tick(1, int(Tier.STOP), False, 0.0, 'no image that can be used has come for 0.25 s', silent=True))
    assert summary_of(rec)['tiers'] == before


def test_summary_of_a_run_in_which_nothing_came_is_empty_and_fails():
    summary = summary_of(Recording())
    assert summary['camera_to_command_ms']['p99'] is None and summary['goal_reached'] is False
    checks = judge(summary)
    assert exit_code(checks) == 1 and all('nan' not in str(c) for c in checks)


def test_what_if_is_compared_with_the_simulator_on_moving_branches():
    scores = summary_of(drive())['what_if']
    assert (scores['branches'], scores['calls'], scores['calls_with_truth']) == (4, 2, 1)
    assert scores['psnr_db'] > scores['psnr_ignoring_action_db']
    assert scores['best_branch_agrees'] == 1.0
    assert scores['ms_p50'] == pytest.approx(110.0)


def test_a_good_run_passes_and_says_its_numbers():
    checks = judge(summary_of(drive()))
    by_claim = {str(c) for c in checks if c.passed}
    assert exit_code(checks) == 0
    assert any('p99 30 ms (budget 50 ms)' in c for c in by_claim)
    assert any('red in 2.1 s' in c for c in by_claim)
    assert any(c.startswith('WEAK') and '90.0%' in c for c in map(str, checks))  # of two-step ticks
    assert conclusion(checks, summary_of(drive())) == 'The run worked, but less well than it should: 1 of its lines is WEAK.'
    assert conclusion([c for c in checks if c.passed], {}) == 'The run worked.'


@pytest.mark.parametrize('late, passes', [(0, True), (1, False), (None, False)])
def test_a_late_command_or_an_unknown_count_of_them_fails_the_run(late, passes):
    assert exit_code(judge(summary_of(drive(), replace(RUN, late_commands=late)))) == (0 if passes else 1)


def test_a_robot_that_did_not_move_fails_the_run():
    checks = judge(summary_of(drive(moving=False)))
    assert exit_code(checks) == 1 and any(str(c).startswith('FAIL') and 'the robot drove' in str(c) for c in checks)


def test_a_robot_that_turns_in_place_has_moved():
    rec = drive()
    rec.poses = [replace(pose, x=0.0, y=0.0, yaw=math.remainder(0.1 * i, math.tau))
                 for i, pose in enumerate(rec.poses)]
    summary = summary_of(rec)
    assert summary['robot']['distance_m'] == 0.0 and summary['robot']['turned_rad'] == pytest.approx(3.9)
    assert exit_code(judge(summary)) == 0


def test_slow_but_punctual_commands_do_not_fail_the_run_yet_are_named():
    checks = judge(summary_of(drive(latency=0.06)))
    assert exit_code(checks) == 0
    assert any(str(c).startswith('WEAK') and 'p99 60 ms' in str(c) for c in checks)


def without_predictions(rec):
    rec.futures.clear()


def without_imagination(rec):
    rec.ticks = [replace(tick, tier=int(Tier.PLAN_ONLY)) for tick in rec.ticks]


def with_old_predictions(rec):
    rec.futures = [replace(future, age=0.11) for future in rec.futures]


@pytest.mark.parametrize('spoil', [without_predictions, without_imagination, with_old_predictions])
def test_a_safe_run_without_predictions_in_time_fails_by_a_code_and_words_of_its_own(spoil):
    rec = drive()
    rec.model |= {'tick_two_step_ms': '58.4', 'tick_one_step_ms': '43.1', 'predictions_possible_hz': '9.5'}
    spoil(rec)
    summary = summary_of(rec)
    checks = judge(summary)
    assert exit_code(checks) == TOO_SLOW
    words = conclusion(checks, summary)
    assert 'safe, but the model is too slow' in words and '58 ms' in words and '9.5 Hz' in words
    late = replace(RUN, late_commands=1)
    assert exit_code(judge(summary_of(rec, late))) == 1


def test_a_task_that_was_not_decided_by_imagination_in_time_says_so_and_why_and_what_could_be():
    rec = task_drive()
    rec.model |= {'tick_two_step_ms': '58.4', 'tick_one_step_ms': '43.1', 'predictions_possible_hz': '9.5'}
    run = replace(RUN, task='street')
    assert exit_code(judge(summary_of(rec, run))) == 0
    rec.ticks = [replace(tick, tier=int(Tier.PLAN_ONLY), reason='one step would be ready 9.1 ms after the limit; a plan alone')
                 for tick in rec.ticks]
    summary = summary_of(rec, run)
    assert exit_code(judge(summary)) == TOO_SLOW
    words = conclusion(judge(summary), summary)
    assert 'not by what it imagined' in words and 'one step would be ready some ms after the limit' in words
    assert '58 ms' in words and '9.5 Hz' in words


def test_images_that_come_late_do_not_fail_a_task_whose_commands_need_none():
    rec, run = task_drive(), replace(RUN, task='street')
    del rec.futures[1:]
    summary = summary_of(rec, run)
    assert summary['predictions']['in_time'] == 1
    checks = judge(summary)
    assert exit_code(checks) == 0 and any(not check.passed and 'predictions were published' in check.claim for check in checks)
    rec.futures.clear()  # but a run that shows nothing of what it imagined is no demo
    summary = summary_of(rec, run)
    checks = judge(summary)
    assert exit_code(checks) == TOO_SLOW and 'not one image of that came in time' in conclusion(checks, summary)


def test_without_diagnostics_of_the_model_the_conclusion_has_no_numbers():
    rec = drive()
    without_predictions(rec)
    summary = summary_of(rec)
    assert 'A tick takes' not in conclusion(judge(summary), summary)


@pytest.mark.parametrize('stop, driving, passes', [
    (0.09, 6.0, True), (0.3, 6.0, False), (0.09, None, False), (None, 6.0, False)])
def test_a_killed_model_must_lead_to_a_stop_in_time_and_to_driving_again(stop, driving, passes):
    run = replace(RUN, kills=[Kill(at=1.0, stop=stop, driving=driving)])
    assert exit_code(judge(summary_of(drive(), run))) == (0 if passes else 1)


def test_two_step_share_is_not_asked_for_under_load():
    assert not any('two-step' in c.claim for c in judge(summary_of(drive(), replace(RUN, loaded=True))))


def test_goal_counts_when_the_robot_stays_near_it():
    goals = GoalSequence(['red', 'blue'])
    assert goals.start(0.0) == 'red'
    assert goals.update(1.0, 0.4) is None
    assert goals.update(1.2, 0.5) is None          # left again: the time starts anew
    assert goals.update(1.3, 0.4) is None
    assert goals.update(1.3 + REACHED_HOLD, 0.44) == 'blue'
    assert goals.attempts[0].reached == pytest.approx(1.6) and goals.attempts[0].closest == 0.4
    assert goals.current.given == pytest.approx(1.6)


def test_a_goal_that_takes_too_long_is_given_up():
    goals = GoalSequence(['red', 'blue'], patience=5.0)
    goals.start(0.0)
    assert goals.update(4.9, 2.0) is None
    assert goals.update(5.0, 2.0) == 'blue'
    assert goals.attempts[0].reached is None and goals.attempts[0].abandoned == 5.0


def test_goals_start_over_and_a_single_goal_is_kept():
    goals = GoalSequence(['red', 'blue'], patience=1.0)
    goals.start(0.0)
    assert [goals.update(t, 9.0) for t in (1.0, 2.0, 3.0)] == ['blue', 'red', 'blue']
    alone = GoalSequence(['red'], patience=1.0)
    alone.start(0.0)
    assert [alone.update(t, 0.1) for t in (0.1, 0.5, 0.9, 2.0)] == [None] * 4
    assert len(alone.attempts) == 1 and alone.current.reached == 0.5
    with pytest.raises(ValueError, match='at least one'):
        GoalSequence([])


def test_idle_ticks_count_as_ticks_but_not_as_a_tier():
    rec = drive()
    rec.ticks.append(Tick(0, 0, False, math.nan))
    summary = summary_of(rec)
    assert summary['ticks'] == 41 and sum(summary['tiers'].values()) == 40
