"""The scene forecast: frame by frame as in training, of the right things in the right frame, and a controller's to use."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel_ros.evaluate.control import controllers
from worldmodel_ros.evaluate.control.learned import _planes, slots
from worldmodel_ros.evaluate.control.run import Question, evaluate
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import PRESETS
from worldmodel_ros.model.scene_forecast import HORIZONS, SCALE, SLOTS, ForecastStream, SceneForecast, layout
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import World
from worldmodel_ros.train.scene import run as training
from worldmodel_ros.train.scene.episodes import FRAMES, SHUTTLES, Store, make, truth

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
    anchors, frames, episode = (3, 17, 21), 22, episodes[0]
    images = torch.from_numpy(episode['frames'][None, :frames]).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
    with torch.inference_mode():
        commands = [torch.from_numpy(episode[name][None, :frames]) for name in ('executed', 'measured')]
        present, one, two = forecast(images, *commands, anchors, *layout(PRESET, frames, anchors))
    stream = ForecastStream(forecast, passes)
    for t in range(frames):
        presence, places, walls = stream.observe(*(episode[name][t] for name in ('frames', 'executed', 'measured')))
        if t in anchors:
            k = anchors.index(t)
            paths = (present.paths, one, two)[passes][0, k, ..., :2] * SCALE
            np.testing.assert_allclose(places[1:], paths, atol=2e-5)
            np.testing.assert_allclose(places[0], present.now[0, k, :, :2] * SCALE, atol=2e-5)
            np.testing.assert_allclose(presence, present.presence[0, k].sigmoid(), atol=2e-5)
            np.testing.assert_allclose(walls, present.walls[0, k], atol=2e-5)


def test_queries_of_one_anchor_see_nothing_of_what_comes_nor_of_another_anchor(forecast, episodes):
    frames, anchors = 20, (4, 12)
    images = torch.from_numpy(episodes[0]['frames'][None, :frames]).permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
    commands = [torch.from_numpy(episodes[0][name][None, :frames]) for name in ('executed', 'measured')]
    with torch.inference_mode():
        before = forecast(images, *commands, anchors, *layout(PRESET, frames, anchors))
        changed = images.clone()
        changed[:, 5:] = 0.0
        after = forecast(changed, *commands, anchors, *layout(PRESET, frames, anchors))
        alone = forecast(images, *commands, anchors[:1], *layout(PRESET, frames, anchors[:1]))
    for old, new, single in zip(before[1:], after[1:], alone[1:], strict=True):
        torch.testing.assert_close(old[:, 0], new[:, 0])
        torch.testing.assert_close(old[:, 0], single[:, 0], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(old[:, 1], new[:, 1])


def test_the_truth_is_in_the_anchors_frame_and_counts_what_the_clip_has_shown(store, episodes):
    anchors = (6, 23)
    episode, start = torch.tensor([0, 1, 2]), torch.tensor([0, 10, FRAMES - 24])
    target = truth(store.arrays, episode, start, anchors, window=16)
    for b in range(3):
        arrays = episodes[int(episode[b])]
        for a, anchor in enumerate(anchors):
            t = int(start[b]) + anchor
            x, y, yaw = arrays['pose'][t]
            shown = arrays['visible'][max(int(start[b]), t - 16):t + 1].any(0)
            assert target.known[b, a, :SHUTTLES].tolist() == shown[:SHUTTLES].tolist()
            assert int(target.known[b, a].sum()) == int(shown.sum())
            for slot in np.flatnonzero(shown[:SHUTTLES]):
                now = target.now[b, a, slot].numpy()
                cos, sin = math.cos(yaw), math.sin(yaw)
                np.testing.assert_allclose((x + cos * now[0] - sin * now[1], y + sin * now[0] + cos * now[1]),
                                           arrays['place'][t, slot], atol=1e-4)
            known = target.now[b, a, SHUTTLES:][target.known[b, a, SHUTTLES:]].norm(dim=-1)
            assert (known.diff() >= 0).all(), 'the nearest first'
            inside = [t + horizon < FRAMES for horizon in HORIZONS]
            assert target.counts[b, a].any(-1).tolist() == [each and bool(shown.any()) for each in inside]


def test_walls_go_to_planes_that_are_the_rooms(store, episodes):
    target = truth(store.arrays, torch.tensor([0]), torch.tensor([0]), (5,), window=16)
    pose = episodes[0]['pose'][5].astype(float)
    planes = _planes(target.walls[0, 0].numpy(), pose)
    half = episodes[0]['room']
    for normal_x, normal_y, offset in planes:
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
    for number in range(30):
        parts = run.step(4, 0.0, held_back=1)
        totals.append(sum(float(part) for name, part in parts.items() if name != 'gradient'))
    assert np.mean(totals[-6:]) < np.mean(totals[:6]) - 0.5
    errors = run.errors(range(1), batches=1, count=2)
    assert errors and all(np.isfinite(value) for value in errors.values())
    finished = run.finish()
    checkpoint.save(finished, tmp_path, {'scene_forecast': {}}, torch.float32)
    read = SceneForecast.load(tmp_path)
    for name, value in finished.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value)
    assert json.loads((tmp_path / 'model.json').read_text())['preset']['name'] == 'narrow'


def test_controllers_drive_on_a_forecast_and_are_refused_without_one(forecast, tmp_path):
    with pytest.raises(ValueError, match="'two_step' needs a forecast"):
        Question(range(3_000_000, 3_000_001), ('intercept',), ('two_step',))
    checkpoint.save(forecast, tmp_path, {}, torch.float32)
    report = evaluate(Question(range(3_000_000, 3_000_001), ('intercept',), controllers.PASSES, forecast=str(tmp_path)))
    assert {row['n'] for row in report['tasks']['intercept'].values()} == {1}
    assert set(report['tasks']['intercept']) == set(controllers.PASSES)


def test_there_are_as_many_slots_as_names(forecast):
    assert len(slots(World().scene)) == SLOTS == forecast.present.net[-1].out_features // (4 + 3 * len(HORIZONS))
