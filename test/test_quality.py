"""Evaluation on unseen rooms: what is measured is found in pictures of which the truth is known."""
import contextlib
import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint
from tiled_model import TILED, tiled_model

from worldmodel_ros import cli
from worldmodel_ros.control.planning import Planner, PlannerSettings, candidates
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session import Future
from worldmodel_ros.evaluate.quality import closed_loop, drift, horizons, ranking, run, summary
from worldmodel_ros.evaluate.quality.displacement import find_pose
from worldmodel_ros.evaluate.quality.drives import drive_branch, record_drive, resimulate
from worldmodel_ros.evaluate.quality.imagination import Imagination
from worldmodel_ros.evaluate.quality.objects import NEAR, compare_objects, find_objects
from worldmodel_ros.evaluate.quality.seeds import QualityError, parse_seeds
from worldmodel_ros.evaluate.quality.task import Task
from worldmodel_ros.evaluate.quality.tiled_imagination import TiledImagination
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.model.sampling import FLOW, ONE_STEP, TRUNCATED, TWO_STEP, Steps
from worldmodel_ros.motion import MANEUVERS, maneuver
from worldmodel_ros.sim.scene import CAMERA_FOV_DEG, COLOURS
from worldmodel_ros.sim.world import World

SEED = 3_100_003
PERIOD = TINY.step_period


@pytest.fixture(scope='module')
def drive():
    return record_drive(SEED, horizons.drive_frames(PERIOD, 2), (64, 64), {'expert': 1.0})


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    return load(str(small_checkpoint(tmp_path_factory.mktemp('model'))), 'torch')


def test_objects_are_found_where_they_are():
    errors, ratios, missed = [], [], 0
    for seed in range(SEED, SEED + 5):
        room = record_drive(seed, 60, (64, 64))
        for t in range(0, 60, 3):
            found = find_objects(room.frames[t], room.scene)
            for i, colour in enumerate(COLOURS):
                if room.visible[t, i] and abs(room.bearings[t, i]) < math.radians(35) and room.distances[t, i] > 0.6:
                    missed += colour not in found
                    if colour in found:
                        errors.append(math.degrees(abs(found[colour].bearing - room.bearings[t, i])))
                        if found[colour].distance:
                            ratios.append(found[colour].distance / room.distances[t, i])
    assert len(errors) > 30 and missed <= 0.02 * len(errors)
    assert np.median(errors) < 0.6 and np.quantile(errors, 0.95) < 4.0
    assert np.median(ratios) == pytest.approx(1.0, abs=0.1) and np.quantile(np.abs(np.log(ratios)), 0.8) < 0.3


def test_nothing_is_found_in_a_room_without_objects():
    rng = np.random.default_rng(0)
    grey = np.clip(rng.normal(150, 25, (64, 64, 1)) + rng.normal(0, 8, (64, 64, 3)), 0, 255).astype(np.uint8)
    assert find_objects(grey, World(SEED).scene) == {}


def test_an_object_that_is_imagined_elsewhere_is_found_but_not_in_place(drive):
    true = drive.frames[::3]
    same = compare_objects(true, true, drive.scene)
    assert same['there'] and same['found'] == same['found_in_place'] == same['there'] and not same['not_there']
    assert same['sightings']['true'] == same['sightings']['imagined'] == same['sightings']['in_place'] > len(same['there'])

    floor = np.full((64, 64, 3), 150, np.uint8)
    floor[40:] = 160, 20, 20  # all red: its middle is straight ahead, where every object is at some time of a turn
    around = drive_branch(drive, len(drive.frames) - 1, np.tile([[0.0, 1.2]], (53, 1)), PERIOD).frames
    red = [sight['red'].bearing for sight in (find_objects(image, drive.scene) for image in around) if 'red' in sight]
    assert any(abs(bearing) < NEAR for bearing in red)
    tinted = compare_objects(around, [floor] * len(around), drive.scene)
    assert tinted['found'] == ['red'] and not tinted['found_in_place']
    assert tinted['sightings']['imagined'] == len(around) and tinted['sightings']['in_place'] < 0.5 * len(red)

    grey = np.full((64, 64, 3), 150, np.uint8)
    blank = compare_objects(true, [grey] * len(true), drive.scene)
    assert not blank['found'] and not blank['sightings']['imagined']
    green = grey.copy()
    green[30:40, 30:40] = 20, 120, 40
    assert compare_objects([grey], [green], drive.scene)['not_there'] == ['green']


def test_a_view_tells_from_where_it_was_taken(drive):
    errors = []
    for frame in (24, 40, 50):
        world = World(SEED, (64, 64))
        world.restore(drive.snapshots[frame])
        x, y, yaw = world.pose
        world.move_robot((x + 0.1, y, yaw + math.radians(10.0)))
        assert world.pose == pytest.approx((x + 0.1, y, yaw + math.radians(10.0)))
        metres, degrees = find_pose(world.render(), drive, frame)
        errors.append((abs(metres - 0.1), abs(degrees - 10.0)))
    assert (np.max(errors, 0) < (0.03, 1.0)).all()
    assert max(find_pose(drive.frames[40], drive, 40)) < 0.03


def test_the_simulator_without_latencies_is_a_bound_near_the_truth(drive):
    start, steps = horizons.CONTEXT - 1, 10
    exact = resimulate(drive, start, [4, steps], PERIOD, nominal_gains=False)
    nominal = resimulate(drive, start, [4, steps], PERIOD, nominal_gains=True)
    true = drive.frames[[start + 4, start + steps]].astype(float)
    still = np.abs(drive.frames[start] - true).mean()
    assert np.abs(exact - true).mean() < np.abs(nominal - true).mean() < still


def assert_sessions_imagine_it(engine, batch, frames, executed, actions, steps, latents):
    """What a batch has imagined for streams, latents (S, T, h, w, Z), is what sessions that have seen the same imagine."""
    shown = np.array([3, actions.shape[1] - 1])
    for stream in range(len(frames)):
        with contextlib.closing(engine.open_session(seed=3 + stream)) as session:
            for frame, action in zip(frames[stream], executed[stream], strict=True):
                session.observe(frame, action)
            future = horizons.finish(session.what_if(actions[stream], steps))
        np.testing.assert_allclose(latents[stream].numpy(), future.latents, atol=1e-5)
        pictures = batch.decode(latents[stream, shown], latents[stream, shown - 1])
        assert np.abs(pictures.astype(int) - future.frames[shown]).max() <= 1


def test_a_batch_imagines_what_a_session_does(engine):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 15, *SMALL.image_size, 3), dtype=np.uint8)
    executed, actions = rng.uniform(-0.3, 0.6, (2, 15, 2)), rng.uniform(-0.3, 0.6, (2, 12, 2))
    batch = Imagination(engine.backend.model)
    memory = batch.observe(frames, executed, (3, 4))
    for steps, sampler in ((2, TWO_STEP), (1, ONE_STEP), (5, Steps(FLOW, 5))):
        latents, after = batch.roll(memory, actions, sampler)
        assert after.newest == 26 and memory.newest == 14
        assert_sessions_imagine_it(engine, batch, frames, executed, actions, steps, latents)


def test_branches_of_one_memory_do_not_meet(engine):
    rng = np.random.default_rng(1)
    batch = Imagination(engine.backend.model)
    frames = rng.integers(0, 256, (2, 8, *SMALL.image_size, 3), dtype=np.uint8)
    memory = batch.observe(frames, np.zeros((2, 8, 2)), (0, 1))
    actions = rng.uniform(-0.3, 0.6, (4, 4, 2))
    together, _ = batch.roll(memory.branches(2), actions, TWO_STEP)
    for i in range(2):
        alone, _ = batch.roll(memory, actions[[i, 2 + i]], TWO_STEP)
        torch.testing.assert_close(together[[i, 2 + i]], alone, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope='module')
def reports(drive):
    """Of a model that foresees the truth, one that copies, and one that sees an empty room."""
    records = []
    for start in horizons.starts(drive, 50):
        for horizon in horizons.HORIZONS:
            steps = horizons.steps_of(horizon, PERIOD)
            pictures = {'two_step': drive.frames[start + steps], 'copy_last': drive.frames[start],
                        'truncated': np.full_like(drive.frames[0], 128)}
            records += horizons._records(drive, start, steps, horizon, pictures)
    return summary.horizons(records), records


def test_a_perfect_model_is_measured_as_perfect(reports):
    report, records = reports
    for horizon, ways in report.items():
        perfect, copy, blind = ways['two_step'], ways['copy_last'], ways['truncated']
        assert perfect['psnr_db'] == 60.0 and perfect['ssim'] == 1.0 and perfect['sharpness_of_true'] == 1.0
        assert perfect['yaw_error_deg'] <= 0.5 and perfect['position_error_m'] < 0.02
        assert copy['psnr_db'] < 30.0 and blind['sharpness_of_true'] == 0.0
        everything = perfect['all_objects']
        assert everything['found'] == 1.0 and everything['bearing_deg'] < 4.0
        assert blind['all_objects']['found'] == 0.0 and blind['all_objects']['bearing_deg'] == summary.MISSED_DEG
        gain = ways['gains_db']['two_step_over_copy_last']
        assert gain['mean'] == pytest.approx(60.0 - copy['psnr_db'], abs=0.01)
        assert gain['count'] == perfect['moments'] == sum(
            r['moving'] for r in records if r['way'] == 'two_step' and f'{r["horizon"]:.1f}' == horizon)


def test_the_goal_is_that_of_the_whole_way(drive):
    changes = np.flatnonzero(np.diff(drive.goals))
    assert drive.goal(0, 1) in range(4)
    for change in changes:
        assert drive.goal(change, 2) == -1 and drive.goal(change + 1, 1) == drive.goals[change + 1]


def test_ranking_rewards_who_tells_the_branches_apart(drive):
    start = next(s for s in range(horizons.CONTEXT, 60) if drive.is_moving(s, 10))
    truth = {name: drive_branch(drive, start, maneuver(name, 10), PERIOD) for name in MANEUVERS}
    assert truth['left'].poses[-1, 2] > truth['right'].poses[-1, 2]
    assert np.abs(np.diff(truth['left'].actions, axis=0)).max() <= 0.6 + 1e-6  # within the accelerations
    perfect = ranking._ranks({name: branch.frames[-1] for name, branch in truth.items()}, truth)
    assert len(perfect) >= 4 and all(r['nearest'] == r['branch'] for r in perfect)
    assert perfect[0]['sensitivity'] == pytest.approx(1.0)
    deaf = ranking._ranks(dict.fromkeys(MANEUVERS, drive.frames[start]), truth)
    assert sum(r['nearest'] == r['branch'] for r in deaf) <= 1 and deaf[0]['sensitivity'] == 0.0
    rows = [{'seed': SEED, 'way': 'two_step', **r} for r in perfect + deaf]
    share = sum(r['nearest'] == r['branch'] for r in rows) / len(rows)
    assert summary.what_if(rows)['what_if_ranking'] == {'1.0': round(share, 4)}
    assert [r['contact'] for r in perfect] == [truth[r['branch']].collided.any() for r in perfect]
    hit = [{**r, 'contact': r['nearest'] != r['branch']} for r in rows]  # as if every mistake were one of contacts
    told = summary.what_if(hit)['what_if']['two_step']
    assert (told['contact']['share'], told['free']['share']) == (0.0, 1.0)
    assert told['contact']['branches'] + told['free']['branches'] == len(rows)


def test_a_dream_that_fades_is_told_from_one_that_does_not(drive):
    steps = 60
    frames, actions = drive.frames[20:20 + steps], drive.actions[20:20 + steps]
    same, faded = drift._Observer(steps, actions), drift._Observer(steps, actions)
    for i, frame in enumerate(frames):
        same.see(frames[i % (steps // 2)])
        faded.see((128 + (frame.astype(float) - 128) * (1.0 if i < 30 else 0.3)).astype(np.uint8))
    for observer, answers in ((same, (20.0, 20.0)), (faded, (20.0, 5.0))):
        observer.fork(0, answers[0])
        observer.fork(30, 99.0)  # neither at the beginning nor at the end
        observer.fork(steps - 2, answers[1])
    record = {'seed': SEED, 'seconds': 6.0, 'true': same.compare()}
    report = summary.drift([record | {'imagined': faded.compare()}])
    assert report['sharpness_ratio'] < 0.5 and 0.0 < report['histogram_distance'] <= 1.0
    assert report['colour_ratio'] < 0.6 and report['fork_difference_ratio'] == 0.25
    assert report['fork_of_true'] == {'first': 1.0, 'last': 0.25}
    assert report['sharpness_of_true']['last'] < report['sharpness_of_true']['first']


def test_a_turn_to_the_left_moves_the_picture_to_the_right():
    world, frames, turns = World(SEED, (64, 64)), [], []
    for turn in 0.8 * np.sin(np.arange(40) / 4):
        world.step(np.array([0.0, turn]))
        frames.append(world.render())
        turns.append((0.0, turn))
    observer = drift._Observer(40, np.array(turns))
    for step, frame in enumerate(frames):
        observer.see(frame)
        observer.fork(step, 1.0)
    ends = observer.compare()
    # 1 rad/s moves the middle of the picture by a tenth of the focal length in 0.1 s, and its sides by more.
    pixels = 3.2 / np.tan(np.radians(CAMERA_FOV_DEG) / 2)
    assert [ends[end]['response'] for end in ('first', 'last')] == pytest.approx([pixels, pixels], rel=0.2)


@pytest.mark.parametrize('share, wall, response', [(0.3, 'grainy', 3.0), (0.3, 'bare', 3.0), (0.7, 'bare', 0.0)])
def test_moments_before_a_wall_do_not_count_until_they_are_most(share, wall, response):
    rng = np.random.default_rng(0)
    turns, frame = rng.choice([-1.0, 1.0], 200), rng.integers(0, 255, (64, 64, 3), np.uint8)
    observer = drift._Observer(200, np.stack([0.0 * turns, turns], 1))
    for step, turn in enumerate(turns):
        frame = np.roll(frame, round(3 * turn), 1)
        grain = rng.integers(80, 255 if wall == 'grainy' else 81, frame.shape, np.uint8)
        observer.see(grain if step % 40 < 40 * share else frame)
        observer.fork(step, 1.0)
    assert [observer.compare()[end]['response'] for end in ('first', 'last')] == pytest.approx([response] * 2, abs=0.3)


def test_as_many_rooms_are_dreamt_in_as_asked_for():
    jobs = run._jobs(Task(range(2_000_000, 2_000_009), parts=('drift', 'what_if'), dreams=7))
    assert [job.seed for job in jobs if job.part == 'drift'] == list(range(2_000_000, 2_000_007))
    assert len(jobs) == 7 + 9


def test_the_expert_drives_to_its_goal_and_the_limits_of_time_hold():
    episode = closed_loop.drive(SEED, closed_loop.expert, (64, 64))
    assert episode.reached and 0 < episode.seconds < 30 and episode.contacts == 0 and episode.jumps is None
    short = closed_loop.drive(SEED, closed_loop.expert, (64, 64), seconds=0.5)
    assert not short.reached and short.seconds == pytest.approx(0.5)


@pytest.mark.parametrize('name', ['two_step', 'planner'])
def test_models_drive_in_the_loop(engine, name):
    episode = closed_loop.drive(SEED, closed_loop.drivers(engine)[name](), SMALL.image_size, seconds=0.5)
    assert episode.seconds == pytest.approx(0.5) and len(episode.jumps) == 2
    report = summary.closed_loop([{'driver': name, **vars(episode)}])
    assert report[name]['success'] == 0.0 and report[name]['seconds'] is None


class Oracle:
    """A session that foresees what it is told: progress ahead by the speed, a contact for all that turn left."""

    spec = TINY

    def __init__(self, plan):
        self._plan = np.tile(np.float32(plan), (4, 1))

    def plan(self, goal):
        return self._plan

    def imagine(self, actions, steps):
        v, w = actions[0]
        return Future(actions, np.zeros(0), np.array([0.0, float(w > 0.1)]), {'red': 0.4 * float(v)}, np.zeros(0))


def test_the_planner_takes_the_best_outcome_and_keeps_the_plan_in_doubt():
    assert Planner(Oracle((0.3, 0.9))).choose('red').name == 'forward'   # the plan would hit something
    assert Planner(Oracle((0.3, 0.0))).choose('red').name == 'plan'      # faster is better by less than the margin
    assert Planner(Oracle((0.3, 0.0)), PlannerSettings(margin=0.0)).choose('red').name == 'forward'
    low, high = np.array(TINY.action_low) - 1e-6, np.array(TINY.action_high) + 1e-6
    for actions in candidates(np.tile(np.float32((0.6, 1.4)), (4, 1)), TINY).values():
        assert actions.shape == (4, 2) and (actions >= low).all() and (actions <= high).all()


@pytest.mark.parametrize('text, complaint', [
    ('0:10', 'training'), ('999999:1000005', 'training'), ('2000000:2000000', 'none'), ('7', 'FIRST:END'),
    ('a:b', 'FIRST:END')])
def test_seeds_that_cannot_judge_are_refused(text, complaint, capsys):
    with pytest.raises(QualityError, match=complaint):
        parse_seeds(text)
    assert cli.main(['evaluate', 'quality', '--seeds', text]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize('wrong, complaint', [
    ({'parts': ('horizon',)}, 'horizons, what_if, drift, closed_loop'), ({'parts': ()}, 'choose from'),
    ({'drift_seconds': 1.0}, 'at least 4 s'),
    ({'dreams': 0}, '0 long rollouts')])
def test_tasks_that_cannot_be_done_are_refused(wrong, complaint):
    with pytest.raises(QualityError, match=complaint):
        Task(range(2_000_000, 2_000_001), **wrong)


def tiles(tmp_path):
    preset = replace(TILED, image_size=(64, 64), patterns=((0, 1, 1), (3, 1, 2)), heading_pairs=4, step_period=PERIOD)
    checkpoint.save(tiled_model(preset), tmp_path, {})
    return checkpoint.load(tmp_path)


def test_a_model_with_tiles_imagines_what_its_sessions_do(tmp_path):
    model, rng = tiles(tmp_path), np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 11, 64, 64, 3), dtype=np.uint8)
    executed, actions = rng.uniform(-0.3, 0.6, (2, 11, 2)), rng.uniform(-0.3, 0.6, (2, 8, 2))
    batch = TiledImagination(model, tmp_path, 2)
    memory = batch.observe(frames, executed, (3, 4))
    engine = load(str(tmp_path), 'torch', sessions=1)
    for steps, sampler in ((2, TWO_STEP), (5, Steps(FLOW, 5))):
        first, after = batch.roll(memory, actions[:, :4], sampler)
        second, end = batch.roll(after, actions[:, 4:], sampler)
        assert (memory.newest, after.newest, end.newest) == (10, 14, 18)
        latents = torch.cat([first, second], 1)
        torch.testing.assert_close(end.latent, latents[:, -1])
        assert_sessions_imagine_it(engine, batch, frames, executed, actions, steps, latents)
    commands = np.stack([actions[0, :4], actions[1, 4:], actions[1, :4], actions[1, 4:]])
    branches, _ = batch.roll(memory.branches(2), commands, TWO_STEP)
    torch.testing.assert_close(branches[[0, 2]], batch.roll(memory, actions[:, :4], TWO_STEP, keep=False)[0])
    cut = batch.roll(memory, actions[:, :4], TRUNCATED, keep=False)[0]  # other steps than a session's two
    assert not torch.allclose(cut, branches[[0, 2]])


def test_a_model_with_tiles_is_judged(tmp_path, monkeypatch):
    tiles(tmp_path)
    monkeypatch.setattr(run, 'STARTS', 2)
    run._open.cache_clear()
    task = Task(range(SEED, SEED + 1), str(tmp_path), backend='torch', parts=('what_if', 'drift'), drift_seconds=4.0, dreams=1)
    report, strips = run.evaluate(task)
    run._open.cache_clear()
    assert not report['failed'] and report['drift']['dreams'] == 1 and list(strips) == [f'dream_{SEED}']


def test_one_json_object_tells_everything(tmp_path, monkeypatch):
    model = small_checkpoint(tmp_path)
    monkeypatch.setattr(closed_loop, 'SECONDS', 0.3)
    monkeypatch.setattr('worldmodel_ros.evaluate.quality.run.STARTS', 1)
    code = cli.main(['evaluate', 'quality', '--seeds', f'{SEED}:{SEED + 1}', '--model', str(model),
                     '--teacher', str(model), '--backend', 'torch', '--workers', '1',
                     '--drift-seconds', '4', '--json', str(tmp_path / 'q.json'),
                     '--pictures', str(tmp_path / 'pictures')])
    report = json.loads((tmp_path / 'q.json').read_text())
    assert code == 0 and report['failed'] == []
    assert list(report['horizons']) == ['0.4', '1.0', '2.0', '5.0']
    for ways in report['horizons'].values():
        for way in ('copy_last', 'teacher', 'two_step', 'one_step', 'truncated'):
            assert {'psnr_db', 'ssim', 'bearing_deg'} <= set(ways[way])
    assert set(report['what_if_ranking']) == {'1.0'}
    assert set(report['closed_loop']) == {'expert', 'two_step', 'one_step', 'planner'}
    for driver in report['closed_loop'].values():
        assert {'success', 'collisions', 'seconds'} <= set(driver)
    assert {'sharpness_ratio', 'colour_ratio', 'action_response_ratio'} <= set(report['drift'])
    assert report['seeds'] == f'{SEED}:{SEED + 1}' and report['episodes'] == 1 and report['model'] == str(model)
    assert 'cpu' in report['machine']
    assert sorted(file.stem for file in (tmp_path / 'pictures').glob('*.png')) == [
        f'dream_{SEED}', f'first_{SEED}', f'worst_{SEED}']


@pytest.mark.parametrize('told', [[], ['--json'], ['--json', '-']])
def test_without_a_file_the_object_is_printed(tmp_path, capsys, told):
    code = cli.main(['evaluate', 'quality', *told, '--seeds', f'{SEED}:{SEED + 1}', '--parts', 'drift', '--drift-seconds', '4',
                     '--workers', '1', '--backend', 'torch', '--model', str(small_checkpoint(tmp_path))])
    assert code == 0 and json.loads(capsys.readouterr().out)['seeds'] == f'{SEED}:{SEED + 1}'


def test_the_model_card_is_what_the_results_say():
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location('model_card', root / 'tools' / 'model_card.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    card = module.CARD.read_text()
    assert '<!-- targets tiny -->' in card
    assert module.filled(card) == card, 'run .venv/bin/python tools/model_card.py'
