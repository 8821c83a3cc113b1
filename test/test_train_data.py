"""Simulated drives are kept as a LeRobot dataset, and come back as they were driven."""
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_model import SMALL

from worldmodel_ros.sim.rollout import collect
from worldmodel_ros.train.data import lerobot, simulate
from worldmodel_ros.train.data.simulate import Drives
from worldmodel_ros.train.objectives.policy import check_labels

FRAMES = 12
LABELS = ('expert', 'search', 'collided', 'goal_distance', 'visible', 'poses')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('drives') / 'train'
    simulate.simulate(path, Drives(40, 3, FRAMES, SMALL, episodes_per_file=2), workers=1)
    return path


def test_training_reads_what_was_driven(folder):
    episodes = lerobot.load([folder], 'cpu', SMALL, clip_frames=4)
    driven = collect(range(40, 43), FRAMES, SMALL.image_size, workers=1)
    assert episodes.labelled and episodes.lengths is None
    for name in ('frames', 'actions', *LABELS):
        assert np.array_equal(getattr(episodes, name).numpy(), driven[name]), name


def test_the_dataset_tells_its_seeds_and_what_its_labels_are(folder):
    info = json.loads((folder / 'meta/info.json').read_text())
    assert info['simulation']['seeds'] == '40:43' and info['simulation']['mix']['expert'] > 0
    assert (info['total_episodes'], info['total_frames'], info['fps']) == (3, 3 * FRAMES, 10)
    assert info['features']['label.expert_action']['names'][:2] == ['red.linear.x', 'red.angular.z']
    assert info['features']['label.contact'] == {'dtype': 'bool', 'shape': [1], 'names': None}
    tables = [pq.read_table(path) for path in sorted(folder.glob('data/*/*.parquet'))]
    assert [row for table in tables for row in table['index'].to_pylist()] == list(range(3 * FRAMES))
    assert [set(table['episode_index'].to_pylist()) for table in tables] == [{0, 1}, {2}]
    stats = json.loads((folder / 'meta/stats.json').read_text())
    assert set(stats) == set(info['features']) and stats['label.pose']['count'] == [3 * FRAMES]


def test_the_action_of_a_frame_is_what_was_executed_after_it(folder):
    table = pq.read_table(sorted(folder.glob('data/*/*.parquet'))[1])
    longer = collect([42], FRAMES + 1, SMALL.image_size, workers=1)
    assert np.array_equal(np.float32(table['action'].to_pylist()), longer['actions'][0, 1:])
    assert np.array_equal(np.float32(table['observation.state'].to_pylist()), longer['actions'][0, :-1])


def test_several_processes_write_the_same(folder, tmp_path):
    simulate.simulate(tmp_path / 'again', Drives(40, 3, FRAMES, SMALL, episodes_per_file=2), workers=2)
    for path in sorted(folder.glob('data/*/*.parquet')):
        assert pq.read_table(path).equals(pq.read_table(tmp_path / 'again' / path.relative_to(folder)))


def test_each_process_of_a_training_has_episodes_of_its_own(folder):
    parts = [lerobot.load([folder], 'cpu', SMALL, clip_frames=4, share=(rank, 2)) for rank in range(2)]
    whole = lerobot.load([folder], 'cpu', SMALL, clip_frames=4)
    assert torch.equal(parts[0].frames, whole.frames[::2]) and torch.equal(parts[1].frames, whole.frames[1::2])
    with pytest.raises(lerobot.DatasetError, match='3 episodes are too few for 4 processes'):
        lerobot.load([folder], 'cpu', SMALL, share=(3, 4))


@pytest.mark.parametrize('clip, pieces', [(2, [6, 6, 2]), (3, [6, 6, 4]), (5, [10, 6]), (8, [12])])
def test_long_episodes_are_cut_so_that_each_clip_is_whole_in_one_piece(folder, monkeypatch, clip, pieces):
    monkeypatch.setattr(lerobot, 'PIECE_FRAMES', 6)
    episodes, whole = (lerobot.load([folder], 'cpu', SMALL, clip_frames=frames) for frames in (clip, FRAMES))
    lengths = [episodes.actions.shape[1]] * len(episodes) if episodes.lengths is None else episodes.lengths.tolist()
    assert lengths == 3 * pieces
    for first in range(FRAMES - clip + 1):
        assert any(torch.equal(found[start:start + clip], whole.frames[0, first:first + clip])
                   for found, length in zip(episodes.frames, pieces) for start in range(length - clip + 1))


def test_a_folder_that_holds_something_is_not_written_to(folder):
    with pytest.raises(FileExistsError, match='is not empty'):
        simulate.simulate(folder, Drives(0, 1, 2, SMALL), workers=1)
    with pytest.raises(ValueError, match='tourist.*expert, searcher, smooth, steps, ram'):
        simulate.simulate(folder, Drives(0, 1, 2, SMALL), workers=1, mix={'tourist': 1.0})


def copy_renamed(folder, target, name, other):
    """The dataset with other names of its columns."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    info = target / 'meta/info.json'
    info.write_text(info.read_text().replace(name, other))


def test_labels_count_only_where_all_datasets_have_them(folder, tmp_path, capsys):
    copy_renamed(folder, tmp_path, '"label.', '"other.')
    episodes = lerobot.load([folder, tmp_path], 'cpu', SMALL, clip_frames=4)
    assert not episodes.labelled and len(episodes) == 6
    assert 'some of the datasets have no labels' in capsys.readouterr().err


def test_a_dataset_of_before_the_search_keeps_its_other_labels(folder, tmp_path):
    copy_renamed(folder, tmp_path, '"label.search_action"', '"label.of_another_time"')
    episodes = lerobot.load([folder, tmp_path], 'cpu', SMALL, clip_frames=4)
    assert episodes.labelled and episodes.search is None
    with pytest.raises(ValueError, match='lack: simulate them again'):
        check_labels(episodes, search=True)


def change_info(change):
    def damage(folder):
        path = folder / 'meta/info.json'
        info = json.loads(path.read_text())
        path.write_text(json.dumps(change(info) or info))
    return damage


def change_table(change):
    def damage(folder):
        path = min(folder.glob('data/*/*.parquet'))
        pq.write_table(change(pq.read_table(path)), path)
    return damage


def with_column(name, value):
    return change_table(lambda table: table.set_column(table.schema.get_field_index(name), name,
                                                       pa.array([value] * len(table))))


def cut_off(folder):
    path = min(folder.glob('data/*/*.parquet'))
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize('damage, complaint', [
    (change_info(lambda info: [1]), 'info.json cannot be read .*: give the folder of a LeRobot dataset'),
    (change_info(lambda info: info.update(features=[])), 'info.json cannot be read'),
    (change_info(lambda info: info.update(codebase_version=3)), 'is of format 3, and v3.0 is read'),
    (change_info(lambda info: info.update(fps='ten')), 'info.json cannot be read'),
    (change_info(lambda info: info['features']['action'].update(names=5)), 'info.json cannot be read'),
    (change_info(lambda info: info['features']['action'].pop('dtype') and None), "info.json cannot be read .*'dtype'"),
    (cut_off, r'file-000.parquet cannot be read \(.*\): copy or export the dataset again'),
    (change_table(lambda table: table.drop(['episode_index'])), 'file-000.parquet cannot be read'),
    (change_table(lambda table: table.drop(['label.pose'])), 'file-000.parquet cannot be read'),
    (with_column('action', 1.0), 'file-000.parquet does not hold what meta/info.json says .*: export it again'),
    (with_column('action', [float('nan'), 0.0]), 'does not hold .*actions are not finite'),
    (with_column('observation.images.front', {'path': 'elsewhere.png'}), "does not hold .*'bytes'"),
    (with_column('observation.images.front', {'bytes': b'no image'}), 'an image cannot be decoded')])
def test_a_dataset_that_is_damaged_or_of_another_kind_is_refused_with_its_file(folder, damage, complaint, tmp_path):
    copy = tmp_path / 'copy'
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(lerobot.DatasetError, match=complaint):
        lerobot.load([copy], 'cpu', SMALL, clip_frames=4)
