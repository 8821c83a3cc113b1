"""Fine-tuning adapts a model to another camera, learns nothing of what judges it, and says what it cannot use."""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bag_messages import camera_info_message
from bags import START, gap, real_drive, shift_stamps, shift_time, simulated_drive, without_commands, write_bag
from camera_infos import camera_info
from evaluations import TIMES
from small_model import SMALL, small_checkpoint, small_model
from tiled_model import tiled_model

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.cli import main as cli
from worldmodel_ros.engine import load
from worldmodel_ros.evaluate.drive.bag_evaluation import Task, evaluate_bag
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.train.finetune import imagination, recording
from worldmodel_ros.train.finetune.augment import Light, mirror_signs
from worldmodel_ros.train.finetune.clips import encoded_variants, episodes
from worldmodel_ros.train.finetune.imagination import imagine, moments
from worldmodel_ros.train.finetune.options import FineTuning
from worldmodel_ros.train.finetune.recording import Recording, RecordingError
from worldmodel_ros.train.finetune.run import fine_tune
from worldmodel_ros.train.finetune.split import split

CONFIG = Path(__file__).resolve().parents[1] / 'config' / 'evaluate' / 'donkeycar.yaml'
pytestmark = pytest.mark.usefixtures('one_thread')

CLIP = 24
SKIP = 9.0  # s; where the held-out quarter of the tinted bag begins


def tinted(drive):
    """The same drive seen by a camera of another white balance, from nearer: a narrower field of view."""
    return replace(drive, frames=tuple(
        (f[8:-8, 8:-8].astype(np.float32) * (1.0, 0.6, 0.3)).astype(np.uint8) for f in drive.frames))


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    """12 s of the simulated robot at 20 Hz, through another camera."""
    drive = tinted(simulated_drive(seconds=12.0, rate=20.0, size=(48, 48)))
    return write_bag(tmp_path_factory.mktemp('bags') / 'tinted', drive, encoding='png')


@pytest.fixture(scope='module')
def recorded(bag):
    return recording.read(bag, SMALL)


def made_up(seconds=12.0, rate=20.0, seed=0):
    """A recording whose pictures hold their own number, so that it can be told where they went."""
    count = round(seconds * rate)
    frames = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((32, 32, 3), np.uint8)
    times = np.arange(count) / rate
    actions = np.random.default_rng(seed).uniform(-0.3, 0.5, (count, 2)).astype(np.float32)
    return Recording(Path('made_up'), frames, times, times, actions, np.zeros(count, int))


def numbers(chains):
    return [chain.frames[:, 0, 0, 0].tolist() for chain in chains]


def test_a_camera_of_twice_the_models_rate_gives_two_chains_and_the_first_is_what_the_live_node_sees(bag, recorded):
    first, second = recording.chains(recorded, SMALL, 0.0, 100.0)
    assert len(first) == len(second) == 120
    assert np.array_equal(np.stack([first.frames, second.frames], 1).reshape(recorded.frames.shape), recorded.frames)
    with open_bag(bag) as opened:
        ticks = list(read_drive(opened, find_mapping(opened, SMALL), SMALL))
    assert np.array_equal(first.frames, np.stack([tick.image for tick in ticks]))
    np.testing.assert_allclose(first.actions, np.stack([tick.executed for tick in ticks]), atol=1e-6)
    assert np.abs(first.actions).max() > 0.1


def test_a_chain_ends_where_a_picture_is_missing_and_every_picture_is_in_one_chain():
    whole = made_up(seconds=4.0, rate=30.0)
    kept = [k for k in range(120) if not 40 <= k < 50]
    part = replace(whole, **{name: getattr(whole, name)[kept]
                             for name in ('frames', 'stamps', 'received', 'executed', 'episode')})
    found = numbers(recording.chains(part, SMALL, 0.0, 10.0))
    assert sorted(sum(found, [])) == kept
    assert sorted(len(chain) for chain in found) == [13, 13, 14, 23, 23, 24]
    assert all(np.diff(chain).max() == 3 for chain in found)


@pytest.mark.parametrize(('rate', 'count', 'used', 'shortest', 'longest'), [
    (60.0, 6, 1.0, 100, 100), (29.97, 3, 1.0, 100, 100), (24.0, 2, 0.83, 83, 125), (25.0, 2, 0.8, 80, 120),
    (12.0, 1, 1.0, 83, 83)])
def test_chains_have_the_steps_of_a_live_node_at_any_rate(rate, count, used, shortest, longest):
    whole = made_up(seconds=4.0, rate=rate)
    found = numbers(recording.chains(whole, SMALL, 0.0, 100.0))
    taken = sum(found, [])
    assert len(found) == count and len(set(taken)) == len(taken) == pytest.approx(used * len(whole.frames), abs=2)
    steps = np.concatenate([np.diff(whole.stamps[chain]) for chain in found]) * 1e3
    assert (steps.min(), steps.max()) == pytest.approx((shortest, longest), abs=0.5)
    assert steps.mean() == pytest.approx(83.3 if rate == 12.0 else 100.0, abs=0.6)


def test_what_is_held_out_and_the_gap_before_it_are_in_no_training_clip():
    whole = made_up(seconds=12.0)
    parts = split([whole], SMALL, CLIP)
    trained = {n for part in parts.training for n in sum(numbers(part.chains(SMALL)), [])}
    judged = {n for part in parts.held_out for n in sum(numbers(part.chains(SMALL)), [])}
    assert judged == set(range(round(parts.held_out[0].start * 20), 240)) and len(judged) == 60
    window = SMALL.window_frames * SMALL.step_period
    assert max(trained) / 20 + window < min(judged) / 20
    assert len(trained) >= 119
    watched = moments(parts.validation, SMALL, 100)
    assert trained.isdisjoint(watched.followed[..., 0, 0, 0].flatten().tolist())


def test_a_clock_that_was_set_forward_changes_nothing_of_the_split_but_times():
    whole = made_up(seconds=20.0)
    times = whole.received + 0.013  # no part ends exactly at an image
    plain, jumped = (split([replace(whole, received=each, stamps=each)], SMALL, CLIP)
                     for each in (times + seconds * (times > 5.0) for seconds in (1.95, 3600.05)))
    for name in ('training', 'validation', 'held_out'):
        (before,), (after,) = getattr(plain, name), getattr(jumped, name)
        assert numbers(before.chains(SMALL)) == numbers(after.chains(SMALL)) != []
        assert after.end - before.end == pytest.approx(3598.1)


def test_another_bag_that_judges_leaves_all_of_the_first_for_training():
    parts = split([made_up(seconds=8.0)], SMALL, CLIP, held_out=[made_up(seconds=5.0)])
    assert parts.gap_s == 0.0 and parts.validation[0].end == pytest.approx(8.05, abs=0.01)
    assert (parts.held_out[0].start, parts.held_out[0].end) == (0.0, pytest.approx(5.05))


@pytest.mark.parametrize('seconds', [2.0, 4.5, 6.0])
def test_a_bag_that_is_too_short_is_refused_with_what_would_do(seconds):
    with pytest.raises(RecordingError, match=r'too short.*made_up has .* Record at least \d+ s'):
        split([made_up(seconds=seconds)], SMALL, CLIP)


def test_a_mirrored_drive_turns_the_other_way(recorded):
    generator = torch.Generator().manual_seed(0)
    plain = episodes(recording.chains(recorded, SMALL, 0.0, 3.0), CLIP, torch.device('cpu'))
    varied = encoded_variants(plain, small_model().vae, SMALL, 2, True, generator)
    n = len(plain)
    assert torch.equal(varied.actions[n:, :, 0], plain.actions[:, :, 0])
    assert torch.equal(varied.actions[n:, :, 1], -plain.actions[:, :, 1])
    plain.encode(small_model().vae)
    assert torch.equal(varied.latents[:n], plain.latents) and not torch.equal(varied.latents[n:], plain.latents)
    assert mirror_signs(replace(SMALL, action_names=('joint_1', 'joint_2'))) is None


def test_what_comes_after_time_was_set_back_stays_behind_what_came_before(tmp_path):
    back = shift_time(simulated_drive(seconds=4.0), 3.0, -2.5)
    read = recording.read(write_bag(tmp_path / 'back', back, encoding='png'), SMALL)
    assert len(read.received) == 40 and read.seconds == pytest.approx(2.9)
    assert set(read.episode) == {0, 1} and (np.diff(read.received) >= 0.0).all()


def test_light_changes_the_picture_as_a_whole_and_leaves_what_is_not_to_be_changed():
    images = torch.linspace(-1.0, 1.0, 2 * 3 * 64).reshape(2, 1, 3, 8, 8)
    changed = Light(2, torch.Generator().manual_seed(1), unchanged=1)(images)
    torch.testing.assert_close(changed[0], images[0])
    assert (changed[1] - images[1]).abs().mean() > 0.01
    assert (changed[1].flatten(2).diff(dim=-1) >= 0.0).all(), 'what was brighter must stay brighter'


def test_moments_imagine_what_a_session_imagines_that_saw_the_same(recorded, tmp_path, monkeypatch):
    some = moments(split([recorded], SMALL, CLIP).held_out, SMALL, 1)
    some.frames[:, 0] = some.frames[:, 1]  # a session begins with a frame that stands in for its own past
    session, model = load(str(small_checkpoint(tmp_path)), 'torch').open_session(), small_model()
    for frame, action in zip(some.frames[0, 1:some.window + 1], some.actions[0]):
        session.observe(frame, action)
    noise = [np.random.Generator(np.random.Philox(key=[0, SMALL.window_frames + k])).standard_normal(
        (SMALL.chunk_frames, *SMALL.latent_size, SMALL.latent_channels), np.float32) for k in (0, 4, 8)]
    monkeypatch.setattr(imagination.torch, 'randn', lambda *_, **__: torch.from_numpy(np.concatenate(noise)[None]))
    branch = session.what_if(some.ahead[0])
    with pytest.raises(StopIteration) as end:
        while True:
            next(branch)
    expected, imagined = end.value.value.frames, imagine(model, some, 2)
    assert imagined.shape == some.followed.shape == (1, 10, 32, 32, 3)
    assert np.abs(imagined[0].astype(int) - expected).max() <= 1
    assert not np.array_equal(imagined, imagine(model, some, 2, -some.ahead))


def test_fine_tuning_improves_what_is_held_out_and_the_result_runs_in_the_engine(bag, tmp_path, capsys):
    out = tmp_path / 'tuned'
    assert cli(['finetune', str(bag), '--model', str(small_checkpoint(tmp_path)), '--out', str(out), '--device', 'cpu',
                '--steps', '80', '60', '--no-report']) == 0
    result = json.loads((out / 'finetune.json').read_text())
    before, after = result['before'], result['after']
    assert after['autoencoder_db'] > before['autoencoder_db'] + 3.0
    for horizon in ('0.2', '0.5', '1'):
        pictures = [numbers['prediction']['two_step'][horizon] for numbers in (before, after)]
        assert pictures[1]['psnr_db']['mean'] > pictures[0]['psnr_db']['mean'] + 1.0
        assert pictures[1]['copy_psnr_db'] == pictures[0]['copy_psnr_db']
    assert result['split']['held_out'][0]['start_s'] == SKIP
    assert 'SSIM' in capsys.readouterr().out
    evaluation = evaluate_bag(Task(bag, 'tuned', skip=SKIP), load(str(out), 'torch'), TIMES, tmp_path / 'windows.jsonl')
    assert evaluation.numbers['pace']['ticks'] == 30
    assert evaluation.numbers['reconstruction_db']['mean'] == pytest.approx(after['autoencoder_db'], abs=1.0)


def test_what_is_held_out_decides_nothing(recorded, tmp_path):
    weights = []
    for noise in (False, True):
        frames = recorded.frames.copy()
        if noise:
            frames[-60:] = np.random.default_rng(0).integers(0, 256, frames[-60:].shape)
        model = small_model()
        fine_tune(model, split([replace(recorded, frames=frames)], SMALL, CLIP),
                  FineTuning(1.0, steps=(2, 2), variants=2, batch=2), tmp_path)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_recordings_that_cannot_be_used_are_refused_with_the_remedy(tmp_path, capsys):
    model = str(small_checkpoint(tmp_path))
    short = simulated_drive(seconds=4.0)
    still = write_bag(tmp_path / 'still', without_commands(short))
    plain = write_bag(tmp_path / 'plain', short)
    other_clock = write_bag(tmp_path / 'other_clock', shift_stamps(short, 0.0, -30.0))
    lossy = write_bag(tmp_path / 'lossy', gap(short, 2.0, 0.5))
    wrong = tmp_path / 'wrong.yaml'
    wrong.write_text('action_topic: /cmd_vel\nactions: {linear.x: twist.speed, angular.z: twist.angular.z}\n')
    for arguments, said in (([str(still)], 'no actions'), ([str(plain)], 'too short'),
                            ([str(other_clock)], 'image_stamps: log'), ([str(lossy)], f'note: {lossy}: Gaps between images'),
                            ([str(plain), '--config', str(wrong)], 'can be read'),
                            ([str(tmp_path / 'nothing')], 'nothing')):
        assert cli(['finetune', *arguments, '--model', model, '--out', str(tmp_path / 'out')]) == 1
        assert said in capsys.readouterr().err


def info_of(across, **other):
    """A CameraInfo that the recorder gets before the first image, of a camera of 64 x 64 pixels."""
    message = camera_info_message(camera_info((64, 64), across, **other))
    return '/camera/camera_info', 'sensor_msgs/msg/CameraInfo', START, message


def test_images_count_as_those_of_the_trained_camera_only_if_a_calibration_was_applied(tmp_path):
    drive = simulated_drive(seconds=4.0)
    infos = {'trained': info_of(90.0), 'wide': info_of(110.0), 'not_calibrated': info_of(90.0, k=[0.0] * 9)}
    assert {name: recording.read(write_bag(tmp_path / name, drive, encoding='png', extra=(info,)), SMALL).calibrated
            for name, info in infos.items()} == {'trained': True, 'wide': True, 'not_calibrated': False}


def test_each_bag_has_a_report_of_its_own(tmp_path, monkeypatch):
    folders, bags = [], ('monday/drive', 'tuesday/drive', 'run.1', 'run.2', 'other/drive-2')
    monkeypatch.setattr('worldmodel_ros.cli.finetune._finetune', lambda chosen: [(Path(bag), 0.0, False) for bag in bags])
    monkeypatch.setattr('worldmodel_ros.cli.main', lambda arguments: folders.append(Path(arguments[-1])) or 0)
    assert cli(['finetune', *bags, '--out', str(tmp_path)]) == 0
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        'report-drive', 'report-drive-2', 'report-run', 'report-run-2', 'report-drive-2-2']


def test_a_camera_that_does_not_cover_the_trained_view_is_adapted_to_as_if_it_had_no_camera_info(tmp_path, capsys, monkeypatch):
    drive, config = simulated_drive(seconds=12.0), tmp_path / 'bag.yaml'
    narrow = write_bag(tmp_path / 'narrow', drive, encoding='png', extra=(info_of(60.0),))
    config.write_text('camera_info_topic: none\n')
    read, plain = recording.read(narrow, SMALL), recording.read(narrow, SMALL, config)
    assert np.array_equal(read.frames, plain.frames) and (read.refused, plain.refused) == (True, False)
    assert not (read.calibrated or plain.calibrated)
    (note,) = read.notes
    assert 'camera_info is left out' in note and 'has 60 x 60' in note and 'adapt the model' not in note and not plain.notes
    wide = recording.read(write_bag(tmp_path / 'wide', drive, encoding='png', extra=(info_of(110.0),)), SMALL)
    assert wide.calibrated and not wide.refused and not np.array_equal(wide.frames, plain.frames)
    out, reports = tmp_path / 'tuned', []
    monkeypatch.setattr('worldmodel_ros.cli.main', lambda arguments: reports.append(arguments) or 0)
    assert cli(['finetune', str(narrow), '--model', str(small_checkpoint(tmp_path)), '--out', str(out), '--device', 'cpu',
                '--steps', '1', '1']) == 0
    assert checkpoint.load(out, 'cpu').preset.camera is None and f'note: {note}' in capsys.readouterr().err
    (report,) = reports
    assert np.array_equal(recording.read(narrow, SMALL, Path(report[report.index('--config') + 1])).frames, plain.frames)


def test_a_model_with_tiles_is_refused_before_anything_is_read(tmp_path, capsys):
    model = tmp_path / 'tiled'
    checkpoint.save(tiled_model(), model, {'trained': False})
    assert cli(['finetune', 'nowhere', '--model', str(model), '--out', str(tmp_path / 'out')]) == 1
    assert 'has tiles' in capsys.readouterr().err


def test_a_dataset_is_read_as_the_bag_that_it_was_made_of(tmp_path):
    bag = write_bag(tmp_path / 'drive', gap(simulated_drive(seconds=4.0), 2.0, 0.5), encoding='png')
    assert cli(['export', str(bag), '--out', str(tmp_path / 'set'), '--model', str(small_checkpoint(tmp_path))]) == 0
    of_bag, of_set = (recording.chains(recording.read(path, SMALL), SMALL, 0.0, 100.0)
                      for path in (bag, tmp_path / 'set'))
    assert [len(chain) for chain in of_set] == [len(chain) for chain in of_bag] == [20, 15]
    for a, b in zip(of_bag, of_set):
        assert np.array_equal(a.frames, b.frames)
        np.testing.assert_allclose(a.actions[1:], b.actions[1:], atol=1e-6)


def test_an_evaluation_begins_where_it_is_told_to(bag):
    with open_bag(bag) as opened:
        mapping = find_mapping(opened, SMALL)
        whole = list(read_drive(opened, mapping, SMALL))
        end = list(read_drive(opened, mapping, SMALL, skip=SKIP))
    assert [tick.stamp_ns for tick in end] == [tick.stamp_ns for tick in whole[90:]]
    assert np.array_equal(end[1].executed, whole[91].executed)


def test_every_picture_of_a_real_drive_is_used_and_its_last_quarter_judges():
    read = recording.read(real_drive(), TINY, CONFIG)
    assert [len(chain) for chain in recording.chains(read, TINY, 0.0, 100.0)] == [375, 375]
    parts = split([read], TINY, FineTuning(1.0).clip_frames(TINY))
    assert parts.held_out[0].start == 28.1 and parts.training[0].end < 24.0
    assert len(moments(parts.held_out, TINY, 1000)) == 136
