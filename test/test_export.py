"""Recorded drives become a LeRobot dataset, and the dataset training episodes, with nothing changed on the way."""
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from bags import gap, shift_stamps, simulated_drive, without_commands, write_bag, zero_stamps
from PIL import Image
from small_model import SMALL, small_checkpoint

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.export import episodes, export
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.cli import main as cli
from worldmodel_ros.datasets import shard, writer
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.train.data import lerobot

CAMERA, STATE, ACTION = 'observation.images.front', 'observation.state', 'action'


def ticks_of(path, preset=SMALL, config=None):
    with open_bag(path) as bag:
        return list(read_drive(bag, find_mapping(bag, preset, config), preset))


@pytest.fixture(scope='module')
def drives(tmp_path_factory):
    """Two bags: 4 s with nothing missing, and 4 s whose camera is away for half a second."""
    folder = tmp_path_factory.mktemp('bags')
    whole = simulated_drive(seconds=4.0, rate=20.0)
    return [write_bag(folder / 'whole', whole), write_bag(folder / 'gap', gap(whole, 1.0, 0.5), encoding='bgr8')]


@pytest.fixture(scope='module')
def dataset(drives, tmp_path_factory):
    folder = tmp_path_factory.mktemp('dataset') / 'set'
    return export([ticks_of(path) for path in drives], folder, SMALL)


def rows(folder):
    return [row for path in sorted(folder.glob('data/*/*.parquet')) for row in pq.read_table(path).to_pylist()]


def picture(row):
    return np.array(Image.open(io.BytesIO(row[CAMERA]['bytes'])))


def test_every_tick_is_a_frame_with_what_was_executed_before_and_after_it(drives, dataset):
    ticks = ticks_of(drives[0])
    written = [row for row in rows(dataset.folder) if row['episode_index'] == 0]
    assert len(written) == len(ticks) == 40
    for k, (tick, row) in enumerate(zip(ticks, written)):
        assert np.array_equal(picture(row), tick.image)
        assert np.array_equal(np.float32(row[STATE]), tick.executed)
        after = ticks[k + 1].executed if k + 1 < len(ticks) else tick.recorded
        assert np.array_equal(np.float32(row[ACTION]), after)
        assert (row['frame_index'], row['index']) == (k, k)
        assert row['timestamp'] == pytest.approx(0.1 * k)
    assert any(np.any(row[ACTION]) for row in written)


def test_an_episode_ends_where_frames_are_missing(drives, dataset):
    ticks = ticks_of(drives[1])
    assert len({tick.episode for tick in ticks}) == 1
    parts = [[tick.index for tick in part] for part in episodes(ticks, SMALL.step_period)]
    assert [len(part) for part in parts] == [10, 25] and parts[1][0] == 10
    lengths = [row['length'] for row in pq.read_table(
        dataset.folder / 'meta/episodes/chunk-000/file-000.parquet').to_pylist()]
    assert lengths == [40, 10, 25]
    assert (dataset.episodes, dataset.frames, dataset.dropped) == (3, 75, 0)


def test_the_folder_is_laid_out_as_lerobot_reads_it(dataset):
    folder = dataset.folder
    info = json.loads((folder / 'meta/info.json').read_text())
    assert (info['codebase_version'], info['fps'], info['splits'], info['video_path']) == (
        'v3.0', 10, {'train': '0:3'}, None)
    assert (info['total_episodes'], info['total_frames'], info['total_tasks']) == (3, 75, len(tasks_of(folder)))
    assert info['features'][CAMERA] == {
        'dtype': 'image', 'shape': [32, 32, 3], 'names': ['height', 'width', 'channels']}
    for key in (STATE, ACTION):
        assert info['features'][key] == {'dtype': 'float32', 'shape': [2], 'names': ['linear.x', 'angular.z']}
    table = pq.read_table(folder / info['data_path'].format(chunk_index=0, file_index=0))
    assert table.column_names == list(info['features'])
    assert str(table.schema.field(ACTION).type) == 'fixed_size_list<element: float>[2]'
    assert str(table.schema.field(CAMERA).type) == 'struct<bytes: binary, path: string>'
    notes = json.loads(table.schema.metadata[b'huggingface'])['info']['features']
    assert notes[CAMERA] == {'_type': 'Image'} and set(notes) == set(info['features'])
    described = pq.read_table(folder / 'meta/episodes/chunk-000/file-000.parquet').to_pylist()
    assert [(e['dataset_from_index'], e['dataset_to_index']) for e in described] == [(0, 40), (40, 50), (50, 75)]
    assert all((e['data/chunk_index'], e['data/file_index']) == (0, 0) for e in described)
    names = tasks_of(folder)
    for row in rows(folder):
        assert names[row['task_index']].startswith('drive to ')


def tasks_of(folder):
    table = pq.read_table(folder / 'meta/tasks.parquet')
    assert json.loads(table.schema.metadata[b'pandas'])['index_columns'] == ['task']
    return dict(zip(table['task_index'].to_pylist(), table['task'].to_pylist()))


def test_the_statistics_are_those_of_the_data(dataset):
    stats = json.loads((dataset.folder / 'meta/stats.json').read_text())
    written = rows(dataset.folder)
    actions = np.array([row[ACTION] for row in written], np.float64)
    pixels = np.stack([picture(row) for row in written]) / 255.0
    assert stats[ACTION]['count'] == stats[CAMERA]['count'] == [75]
    for name, of in {'min': np.min, 'max': np.max, 'mean': np.mean, 'std': np.std}.items():
        assert np.allclose(stats[ACTION][name], of(actions, 0))
        assert np.allclose(np.ravel(stats[CAMERA][name]), of(pixels, (0, 1, 2)), atol=1e-6)
        assert np.shape(stats[CAMERA][name]) == (3, 1, 1)
    assert np.allclose(stats[ACTION]['q90'], np.quantile(actions, 0.9, 0))
    assert np.allclose(np.ravel(stats[CAMERA]['q50']), np.quantile(pixels, 0.5, (0, 1, 2)), atol=1.01 / 255)
    assert set(stats) == set(json.loads((dataset.folder / 'meta/info.json').read_text())['features'])


def test_large_datasets_go_to_several_files_between_episodes(drives, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, 'FILE_MB', 0.01)
    monkeypatch.setattr(shard, 'ROWS', 8)
    done = export([ticks_of(path) for path in drives], tmp_path / 'set', SMALL)
    files = sorted((done.folder / 'data/chunk-000').glob('*.parquet'))
    assert [path.name for path in files] == [f'file-{k:03d}.parquet' for k in range(3)]
    assert [set(pq.read_table(path)['episode_index'].to_pylist()) for path in files] == [{0}, {1}, {2}]
    assert [row['index'] for row in rows(done.folder)] == list(range(75))


def test_training_gets_the_frames_and_executed_actions_of_the_ticks(drives, dataset):
    loaded = lerobot.load([dataset.folder], 'cpu', SMALL)
    ticks = ticks_of(drives[0])
    assert (len(loaded), loaded.lengths.tolist(), loaded.frame_count) == (3, [40, 10, 25], 75)
    assert np.array_equal(loaded.frames[0].numpy(), np.stack([tick.image for tick in ticks]))
    assert np.array_equal(loaded.actions[0].numpy(), np.stack([tick.executed for tick in ticks]))
    assert not loaded.labelled
    assert loaded.expert is loaded.collided is loaded.goal_distance is loaded.visible is loaded.poses is None


def test_clips_are_whole_and_every_one_is_drawn(dataset):
    loaded = lerobot.load([dataset.folder], 'cpu', SMALL)
    episode, frame = loaded.clips(2000, 24, torch.Generator().manual_seed(0))
    drawn = {(e, f) for e, f in zip(episode[:, 0].tolist(), frame[:, 0].tolist())}
    assert drawn == {(0, start) for start in range(17)} | {(2, start) for start in range(2)}
    assert torch.equal(frame - frame[:, :1], torch.arange(24).expand(2000, 24))
    for each in (loaded, replace(loaded, lengths=None)):
        with pytest.raises(ValueError, match='the longest of 3 episodes has 40 frames, and a clip takes 41'):
            each.clips(1, 41, torch.Generator())


def test_a_long_drive_is_cut_into_pieces_that_lose_no_clip(dataset, monkeypatch):
    whole = lerobot.load([dataset.folder], 'cpu', SMALL).actions[0]
    monkeypatch.setattr(lerobot, 'PIECE_FRAMES', 30)
    loaded = lerobot.load([dataset.folder], 'cpu', SMALL, clip_frames=15)
    assert loaded.frames.shape[1] == 30
    clips = {tuple(piece[s:s + 15].flatten().tolist()) for piece, length in zip(loaded.actions, loaded.lengths)
             for s in range(int(length) - 14)}
    assert {tuple(whole[s:s + 15].flatten().tolist()) for s in range(26)} <= clips


def test_a_dataset_of_another_size_is_scaled_and_one_without_a_state_begins_at_rest(dataset, drives, tmp_path):
    done = export([ticks_of(drives[0], replace(SMALL, image_size=(48, 64)))], tmp_path / 'set',
                  replace(SMALL, image_size=(48, 64)))
    info = done.folder / 'meta/info.json'
    info.write_text(info.read_text().replace('"observation.state"', '"observation.other"'))
    loaded = lerobot.load([done.folder, dataset.folder], 'cpu', SMALL)
    assert loaded.frames.shape == (4, 40, 32, 32, 3)
    assert not loaded.actions[0, 0].any()
    assert torch.equal(loaded.actions[0, 1:], loaded.actions[1, 1:])


@pytest.mark.parametrize('change, complaint', [
    (lambda info: info.update(codebase_version='v2.1'), 'is of format v2.1, and v3.0 is read: convert it'),
    (lambda info: info.update(fps=30), 'has 30 frames per second, and small-test takes 10'),
    (lambda info: info['features'][ACTION].update(names=['left', 'right']), 'has the actions left, right'),
    (lambda info: info['features'].pop(ACTION), "has no feature 'action'"),
    (lambda info: info['features'][CAMERA].update(dtype='video'), f'has videos: {CAMERA}'),
    (lambda info: info.pop('features'), "cannot be read .*'features'"),
])
def test_a_dataset_that_does_not_fit_is_refused_with_the_remedy(dataset, tmp_path, change, complaint):
    info = json.loads((dataset.folder / 'meta/info.json').read_text())
    change(info)
    (tmp_path / 'meta').mkdir()
    (tmp_path / 'meta/info.json').write_text(json.dumps(info))
    with pytest.raises(lerobot.DatasetError, match=complaint) as error:
        lerobot.load([tmp_path], 'cpu', SMALL)
    assert str(tmp_path) in str(error.value)


def test_nothing_is_overwritten_and_nothing_empty_is_written(drives, dataset, tmp_path):
    with pytest.raises(FileExistsError, match='name a new folder'):
        export([ticks_of(drives[0])], dataset.folder, SMALL)
    with pytest.raises(ValueError, match='not one frame'):
        export([[]], tmp_path / 'empty', SMALL)
    assert not lerobot.is_dataset(tmp_path / 'empty')
    with pytest.raises(ValueError, match='no whole number of frames per second'):
        export([], tmp_path / 'odd', replace(SMALL, step_period=0.15))


def test_frames_without_a_recorded_action_stand_for_a_robot_at_rest_and_the_last_is_dropped(tmp_path):
    bag = write_bag(tmp_path / 'bag', without_commands(simulated_drive(seconds=2.0)))
    ticks = ticks_of(bag)
    assert ticks[-1].recorded is None
    done = export([ticks], tmp_path / 'set', SMALL)
    assert (done.frames, done.dropped) == (len(ticks) - 1, 1)


def test_the_command_exports_several_bags_and_training_takes_the_folder(drives, tmp_path, capsys):
    model = small_checkpoint(tmp_path)
    assert cli(['export', *map(str, drives), '--out', str(tmp_path / 'set'), '--model', str(model)]) == 0
    assert f'75 frames in 3 episodes in {tmp_path / "set"}' in capsys.readouterr().out
    assert len(lerobot.load([tmp_path / 'set', tmp_path / 'set'], 'cpu', SMALL)) == 6
    assert cli(['export', str(tmp_path / 'nowhere'), '--out', str(tmp_path / 'x')]) == 1
    assert 'nowhere does not exist' in capsys.readouterr().err


@pytest.mark.parametrize(('fault', 'config', 'code', 'told'), [
    (lambda d: d, None, 0, None),
    (without_commands, None, 1, 'has no actions'),
    (without_commands, 'action_topic: none\n', 0, 'note: .*bag: No actions were recorded'),
    (lambda d: shift_stamps(d, 0.0, -30.0), None, 0, 'note: .*bag: .*the camera has a clock of its own'),
    (zero_stamps, None, 1, 'not one frame to write\n(note: .*\n)*note: .*bag: Images without a stamp'),
    (lambda d: simulated_drive(seconds=4.0, rate=5.0), None, 1, 'not one frame to write\n.*bag: The images are 0.200 s apart')])
def test_a_recording_of_little_worth_is_refused_or_exported_with_a_note(tmp_path, capsys, fault, config, code, told):
    bag, given = write_bag(tmp_path / 'bag', fault(simulated_drive(seconds=4.0))), []
    if config:
        (tmp_path / 'bag.yaml').write_text(config)
        given = ['--config', str(tmp_path / 'bag.yaml')]
    assert cli(['export', str(bag), *given, '--out', str(tmp_path / 'set'), '--model', str(small_checkpoint(tmp_path))]) == code
    assert lerobot.is_dataset(tmp_path / 'set') is not bool(code)
    error = capsys.readouterr().err
    assert re.search(told, error) if told else not error


ROOT = Path(__file__).resolve().parents[1]
LAP = Path(os.environ.get('WORLDMODEL_TEST_BAG') or ROOT.parent / 'shared' / 'data' / 'donkeycar_lap_a')


@pytest.mark.skipif(not LAP.is_dir(), reason=f'the real drive is not at {LAP}: name it in WORLDMODEL_TEST_BAG')
def test_a_real_drive_is_exported_by_one_command(tmp_path, capsys):
    assert cli(['export', str(LAP), '--config', str(ROOT / 'config/evaluate/donkeycar.yaml'),
                '--out', str(tmp_path / 'lap')]) == 0
    loaded = lerobot.load([tmp_path / 'lap'], 'cpu', TINY)
    assert loaded.frame_count > 350
    assert loaded.actions[..., 0].max() <= 0.6 and loaded.frames.float().std() > 20.0
