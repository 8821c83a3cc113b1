"""The scene forecast: frame by frame as in training, of the right things in the right frame, and a controller's to use."""
import json
import math
import re
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch

from worldmodel_ros.engine.forecast.loading import TorchStream
from worldmodel_ros.evaluate.control import controllers
from worldmodel_ros.control.scene_view import planes
from worldmodel_ros.evaluate.control.learned import AnotherFuture, MotionUnseen, mean_command, slots
from worldmodel_ros.evaluate.control.run import Question, evaluate
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.presets import PRESETS
from worldmodel_ros.model.scene_forecast import HORIZONS, SCALE, SLOTS, Ahead, ForecastStream, SceneForecast, odometry
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.task_scenes import task_scene
from worldmodel_ros.sim.world import World
from worldmodel_ros.train.scene import average as averaging
from worldmodel_ros.train.scene import run as training
from worldmodel_ros.train.scene.episodes import FRAMES, SHUTTLES, Glance, Store, make, truth

pytestmark = pytest.mark.usefixtures('one_thread')
PRESET = replace(PRESETS['tiny'], name='narrow', width=32, depth=2, heads=2, vae_width=8, head_features=8)


@pytest.fixture(scope='module')
def forecast():
    torch.manual_seed(0)
    net = SceneForecast.from_world_model(WorldModel(PRESET))
    for parameter in net.parameters():  # what begins at zero would hide what it multiplies
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return net.eval()


@pytest.fixture(scope='module')
def episodes():
    world = World()
    return [make(seed, world) for seed in range(3)]


@pytest.fixture(scope='module')
def store(episodes):
    store = Store(len(episodes), 'cpu')
    store.add(episodes)
    return store


@pytest.mark.parametrize('passes', [0, 1, 2])
def test_frame_by_frame_it_forecasts_what_it_does_in_training(forecast, episodes, passes):
    frames, episode = 22, episodes[0]
    with torch.inference_mode():
        outputs = forecast(*clip(episode, frames), torch.arange(frames))
    stream = ForecastStream(forecast, passes)
    for t in range(frames):
        presence, places, walls = stream.observe(*(episode[name][t] for name in ('frames', 'executed', 'measured')))
        now = outputs[passes].now[0, t, :, :2]
        paths = outputs[passes].paths[0, t, ..., :2] if passes else now.expand(len(HORIZONS), -1, -1)
        np.testing.assert_allclose(places[0], now * SCALE, atol=2e-5)
        np.testing.assert_allclose(places[1:], paths * SCALE, atol=2e-5)
        np.testing.assert_allclose(presence, outputs[passes].presence[0, t].sigmoid(), atol=2e-5)
        np.testing.assert_allclose(walls, outputs[passes].walls[0, t], atol=2e-5)


def clip(episode, frames):
    images = torch.from_numpy(episode['frames'][None, :frames]).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
    return images, *(torch.from_numpy(episode[name][None, :frames]) for name in ('executed', 'measured'))


def test_a_frame_sees_nothing_of_what_comes_nor_an_anchor_of_another(forecast, episodes):
    images, *commands = clip(episodes[0], 20)
    with torch.inference_mode():
        before = forecast(images, *commands, torch.tensor([4, 12]))
        changed = images.clone()
        changed[:, 5:] = 0.0
        after = forecast(changed, *commands, torch.tensor([4, 12]))
        alone = forecast(images, *commands, torch.tensor([4]))
    for old, new in zip(before[:2], after[:2], strict=True):
        torch.testing.assert_close(old.now[:, :5], new.now[:, :5])
        assert not torch.allclose(old.now[:, 5:], new.now[:, 5:])
    torch.testing.assert_close(before[2].paths[:, 0], after[2].paths[:, 0])
    torch.testing.assert_close(before[2].paths[:, 0], alone[2].paths[:, 0], atol=1e-5, rtol=1e-4)


def test_where_the_robot_has_come_from_and_for_how_long_changes_nothing(forecast, episodes):
    """The attention knows poses and times relative to one another alone."""
    episode, streams = episodes[0], [ForecastStream(forecast, 2), ForecastStream(forecast, 2)]
    streams[1]._pose = torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)
    streams[1]._time = 36_000  # an hour
    for t in range(12):
        told = [stream.observe(*(episode[name][t] for name in ('frames', 'executed', 'measured'))) for stream in streams]
        for one, other in zip(*told, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


def test_odometry_goes_along_arcs():
    quarter = torch.full((1, 10, 2), math.pi / 2)  # for 1 s: a quarter of a circle of 1 m
    np.testing.assert_allclose(odometry(quarter)[0, -1], (1.0, 1.0, math.pi / 2), atol=1e-6)


def test_the_truth_is_in_each_frames_base_and_counts_what_the_clip_has_shown(store, episodes):
    frames, episode, start = 24, torch.tensor([0, 1, 2]), torch.tensor([0, 10, FRAMES - 24])
    target = truth(store.arrays, episode, start, frames)
    for b in range(3):
        arrays = episodes[int(episode[b])]
        for anchor in (6, 23):
            t = int(start[b]) + anchor
            x, y, yaw = arrays['pose'][t]
            shown = arrays['visible'][int(start[b]):t + 1].any(0)
            assert target.known[b, anchor].tolist() == shown.tolist()
            back = arrays['visible'][int(start[b]):t + 1][::-1].argmax(0)
            assert target.unseen[b, anchor][shown].tolist() == back[shown].tolist()
            for slot in np.flatnonzero(shown):
                now = target.now[b, anchor, slot].numpy()
                cos, sin = math.cos(yaw), math.sin(yaw)
                np.testing.assert_allclose((x + cos * now[0] - sin * now[1], y + sin * now[0] + cos * now[1]),
                                           arrays['place'][t, slot], atol=1e-4)
            inside = [t + horizon < FRAMES for horizon in HORIZONS]
            assert target.counts[b, anchor].any(-1).tolist() == [each and bool(shown.any()) for each in inside]


def test_a_driver_looks_away_from_what_it_has_seen_and_back():
    world, in_view = World(), []
    world.load(task_scene('street', 3))
    driver, name = Glance(np.random.default_rng(2), world.scene), None
    for _ in range(400):
        world.step(tuple(driver(world, np.zeros(2)).tolist()), 0.1)
        if driver._target != name:
            name, watched = driver._target, []
            in_view.append(watched)
        watched.append(world.visible(name))
    gaps = [len(gap) for watched in in_view for gap in ''.join('.x'[seen] for seen in watched).strip('.').split('x') if gap]
    assert len(in_view) >= 3 and max(gaps, default=0) >= 10, 'nothing was seen, lost for 1 s and seen again'


def test_a_mirrored_clip_has_left_and_right_exchanged(store, episodes):
    rows = torch.tensor([0]), torch.tensor([3])
    plain, mirrored = (truth(store.arrays, *rows, 6, torch.tensor([flag])) for flag in (False, True))
    torch.testing.assert_close(mirrored.now, plain.now * torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(mirrored.ahead, plain.ahead * torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(mirrored.walls[..., [0, 2, 4]], plain.walls[..., [0, 2, 4]])
    torch.testing.assert_close(mirrored.walls[..., [1, 3, 5]], plain.walls[..., [1, 5, 3]] * torch.tensor([-1.0, 1.0, 1.0]))


def test_no_episode_is_replaced_while_a_clip_of_it_is_read(episodes, monkeypatch):
    store = Store(2, 'cpu')
    store.add(episodes[:2])
    before = store.arrays['frames'].clone()
    with store.reading:
        adding = Thread(target=store.add, args=(episodes[2:],))
        adding.start()
        adding.join(0.2)
        assert adding.is_alive() and torch.equal(store.arrays['frames'], before) and store.added == 2
    adding.join()
    assert not torch.equal(store.arrays['frames'], before) and store.added == 3
    held, draw = [], training.truth
    monkeypatch.setattr(training, 'truth', lambda *what: held.append(store.reading.locked()) or draw(*what))
    training.Training(SceneForecast(PRESET), store, 1e-3)._forecasts(1, range(2))
    assert held == [True] and not store.reading.locked()


@pytest.mark.parametrize('held, kept', [(20_000, 192), (100, 50), (2, 1)])
def test_at_most_half_of_the_episodes_are_for_judging(held, kept, tmp_path, monkeypatch):
    made = []

    def no_memory(*what):
        made.append(what)
        raise MemoryError
    monkeypatch.setattr(training, 'Store', no_memory)
    assert training.main(['--resume', 'tiny', '--episodes', str(held), '--out', str(tmp_path)]) == 1
    assert (made[0][0], made[0][2]) == (held, kept)


@pytest.mark.parametrize('option', [('--episodes', '1'), ('--first-seed', '1000000'), ('--first-seed', '-1')])
def test_what_cannot_be_simulated_is_refused(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        training.main(['--resume', 'tiny', *option, '--out', str(tmp_path)])
    assert 'must be 2 or more, and --first-seed' in capsys.readouterr().err


def test_new_episodes_replace_the_oldest_but_not_those_that_judge(episodes):
    store = Store(4, 'cpu', kept=1)
    for number in range(9):
        store.add([{**episodes[0], 'pose': np.full((FRAMES, 3), number, np.float32)}])
        assert (store.count, store.added) == (min(number + 1, 4), number + 1)
    assert store.arrays['pose'][:, 0, 0].tolist() == [0.0, 7.0, 8.0, 6.0]


def test_the_light_of_a_clip_changes_its_images_alone(store):
    plain, varied = (training.clips(store, 6, range(3), torch.Generator().manual_seed(1), flag) for flag in (False, True))
    torch.testing.assert_close(varied.measured, plain.measured)
    torch.testing.assert_close(varied.target.now, plain.target.now)
    apart = (varied.images - plain.images).abs()
    assert varied.images.abs().max() <= 1.0 and 0.01 < apart.mean() < 0.3
    assert len({round(float(each.mean()), 3) for each in apart}) == 6  # each clip has its own


def test_shuttles_are_compared_in_the_order_that_fits(store):
    target = truth(store.arrays, torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), 8)
    shuffled = torch.cat([torch.arange(SHUTTLES), SHUTTLES + torch.tensor([2, 0, 4, 1, 3])])
    now = torch.cat([target.now, torch.zeros_like(target.now)], -1)[:, :, shuffled] / SCALE
    paths = torch.cat([target.ahead, torch.zeros_like(target.ahead)], -1)[..., shuffled, :] / SCALE
    known = target.known[..., shuffled]
    out = Ahead(torch.where(known, 5.0, -5.0), now, target.walls, paths)
    fitted = training.ordered(target, out)
    assert (fitted.known == known).all()
    for told, truly, counts in ((now, fitted.now, known), (paths, fitted.ahead, fitted.counts)):
        torch.testing.assert_close((told[..., :2] * SCALE)[counts], truly[counts])


def test_the_loss_is_least_where_the_truth_is(store):
    """A forecast of 0, the robot's own place, once had the least loss: it never errs across the line of sight to the truth."""
    target = truth(store.arrays, torch.tensor([0]), torch.tensor([0]), 8)
    fitted = {}
    for name, place in (('truth', target.now / SCALE), ('origin', torch.zeros_like(target.now))):
        scale = torch.zeros_like(place, requires_grad=True)
        optimiser = torch.optim.Adam([scale], lr=0.1)
        for _ in range(120):
            loss = training._laplace(torch.cat([place, scale], -1), target.now, target.known)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        fitted[name] = loss.item()
    assert fitted['truth'] < fitted['origin'] - 2.0


def test_walls_go_to_planes_that_are_the_rooms(store, episodes):
    target = truth(store.arrays, torch.tensor([0]), torch.tensor([0]), 6)
    pose = episodes[0]['pose'][5].astype(float)
    found = planes(target.walls[0, 5].numpy(), pose)
    half = episodes[0]['room']
    for normal_x, normal_y, offset in found:
        assert offset == pytest.approx(abs(normal_x) * half[0] + abs(normal_y) * half[1], abs=1e-3)
        assert max(abs(normal_x), abs(normal_y)) == pytest.approx(1.0, abs=1e-4)


def test_episodes_are_their_seeds_and_no_two_slots_have_one_thing(episodes):
    world = World()
    again = make(1, world)
    for name, array in episodes[1].items():
        np.testing.assert_array_equal(array, again[name])
    names = [name for name in slots(world.scene) if name]
    assert names[:len(COLOURS)] == list(COLOURS) and len(names) == len(set(names)) == len(COLOURS) + len(world.scene.movers)


def test_training_lowers_the_loss_and_leaves_a_forecast_that_is_read_back(store, tmp_path):
    torch.manual_seed(0)
    run = training.Training(SceneForecast(PRESET), store, rate=3e-2)  # of which the first steps have little
    totals = []
    for number in range(24):
        parts = run.step(2, 0.0, held_back=1)
        totals.append(sum(float(part) for name, part in parts.items() if name != 'gradient'))
    assert np.mean(totals[-6:]) < np.mean(totals[:6]) - 0.5
    errors = run.errors(range(1), batches=1, count=2)
    assert errors and all(np.isfinite(value) for value in errors.values())
    finished = run.finish()
    checkpoint.save(finished, tmp_path, {'scene_forecast': {}}, torch.float32)
    read = SceneForecast.load(tmp_path)
    for name, value in finished.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value)
    assert all(parameter.requires_grad for parameter in read.parameters())  # it may be trained further
    assert json.loads((tmp_path / 'model.json').read_text())['preset']['name'] == 'narrow'


@pytest.mark.parametrize('change', [{'head_features': 65536}, {'width': 512}, {'depth': 1024}])
def test_a_forecast_whose_description_asks_for_a_larger_network_is_refused_at_once(change, tmp_path):
    checkpoint.save(SceneForecast(PRESET), tmp_path, {})
    description = json.loads((tmp_path / 'model.json').read_text())
    description['preset'] |= change
    (tmp_path / 'model.json').write_text(json.dumps(description))
    with pytest.raises(ModelError, match='are of no scene forecast'):
        SceneForecast.load(tmp_path)


def test_a_forecast_to_go_on_from_that_is_not_there_is_refused_before_anything_is_simulated(tmp_path, capsys):
    with pytest.raises(SystemExit):
        training.main(['--resume', str(tmp_path), '--out', str(tmp_path / 'out')])
    assert 'neither a shipped one (tiny) nor a folder with model.json' in capsys.readouterr().err


def test_more_episodes_than_there_is_memory_for_are_refused_with_their_size(tmp_path, capsys):
    assert training.main(['--resume', 'tiny', '--episodes', '1000000000', '--out', str(tmp_path)]) == 1
    assert re.fullmatch(r'1000000000 episodes are \d{7}\.\d GB, which (cpu|cuda) has no room for: keep fewer by --episodes\n',
                        capsys.readouterr().err)


def test_weights_before_and_after_a_further_training_are_averaged_and_those_of_other_networks_refused(tmp_path, capsys):
    torch.manual_seed(0)
    forecasts = [SceneForecast(PRESET), SceneForecast(PRESET)]
    for folder, each in zip(('before', 'after'), forecasts, strict=True):
        checkpoint.save(each, tmp_path / folder, {'scene_forecast': {'steps': len(folder)}}, torch.float32)
    before_and_after = [str(tmp_path / 'before'), str(tmp_path / 'after')]
    assert averaging.main([*before_and_after, '--share', '0.25', '--out', str(tmp_path / 'both')]) == 0
    read = SceneForecast.load(tmp_path / 'both').state_dict()
    for name, value in read.items():
        before, after = (each.state_dict()[name].float() for each in forecasts)
        torch.testing.assert_close(value.float(), 0.75 * before + 0.25 * after, rtol=1e-3, atol=1e-3)
    trained = json.loads((tmp_path / 'both' / 'model.json').read_text())['provenance']
    assert [each['scene_forecast']['steps'] for each in trained['of']] == [6, 5]

    checkpoint.save(SceneForecast(replace(PRESET, width=2 * PRESET.width)), tmp_path / 'other', {}, torch.float32)
    for second, reason in (('other', 'not of one network'), ('absent', 'no scene forecast')):
        assert averaging.main([str(tmp_path / 'before'), str(tmp_path / second), '--out', str(tmp_path / 'no')]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / 'no').exists()


def test_controllers_drive_on_a_forecast_and_are_refused_without_one(forecast, tmp_path):
    with pytest.raises(ValueError, match="'two_step' needs a forecast"):
        Question(range(3_000_000, 3_000_001), ('intercept',), ('two_step',))
    checkpoint.save(forecast, tmp_path, {}, torch.float32)
    report = evaluate(Question(range(3_000_000, 3_000_001), ('intercept',), controllers.STEPS, backend='torch',
                               forecast=str(tmp_path)))
    assert {row['n'] for row in report['tasks']['intercept'].values()} == {1}
    assert set(report['tasks']['intercept']) == set(controllers.STEPS)


def test_the_mean_command_of_a_period_is_of_what_was_sent_and_of_what_followed():
    one, two, then = np.array([0.4, 0.0]), np.array([0.0, 1.0]), np.array([0.2, -1.0])
    np.testing.assert_allclose(mean_command([], then), then)
    np.testing.assert_allclose(mean_command([(0.02, one), (0.03, two)], then), 0.2 * one + 0.3 * two + 0.5 * then)
    np.testing.assert_allclose(mean_command([(0.08, one), (0.12, two)], then), 0.8 * one + 0.2 * two)


def test_there_are_as_many_slots_as_names(forecast):
    assert len(slots(World().scene)) == SLOTS == (forecast.present[-1].out_features - 6) // 5


def test_ablations_see_no_motion_or_that_of_another_room(forecast, episodes):
    """Where things are, an ablation knows as well as the forecast itself; only what they will do is taken away."""
    frames, size = episodes[0]['frames'], forecast.preset.image_size
    moving = [np.array([0.3, 0.5]), np.array([0.2, 0.4])]
    unseen = MotionUnseen(lambda: TorchStream(forecast))
    first, again = (unseen.observe(frame, *moving, 1) for frame in (frames[0], frames[0]))
    np.testing.assert_array_equal(first[1], again[1])  # nothing is left of the frame before
    scene = task_scene('street', 3_000_001)
    plain, other, ablated = (TorchStream(forecast) for _ in range(3))
    another, world = AnotherFuture(ablated, other, scene, size), World()
    world.load(scene)
    alone = TorchStream(forecast).observe(world.render(size), np.zeros(2), np.zeros(2), 1)
    expected, given = plain.observe(frames[0], *moving, 1), another.observe(frames[0], *moving, 1)
    np.testing.assert_array_equal(given[0], expected[0])
    np.testing.assert_allclose(given[1][0], expected[1][0], atol=1e-6)
    there = (alone[0] > 0.5)[:, None]
    np.testing.assert_allclose(given[1] - given[1][0], (alone[1] - alone[1][0]) * there, atol=1e-5)
