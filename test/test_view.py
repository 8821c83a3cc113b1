"""A bag becomes a Rerun recording, which is opened and read back. Needs the extra [view]."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bag_messages import TYPES, header
from bags import simulated_drive, write_bag
from rosbags.typesys import get_types_from_msg

rerun = pytest.importorskip('rerun', reason='needs the extra [view]: rerun-sdk, 170 MB')
ROOT = Path(__file__).resolve().parents[1]
START = 1_700_000_000_000_000_000
for _name in ('Timings', 'ActionChunk', 'Candidate', 'ForecastThing', 'Decision', 'PredictedFuture', 'DeadlineStatus',
              'CommandStatus'):
    TYPES.register(get_types_from_msg((ROOT / 'msg' / f'{_name}.msg').read_text(), f'worldmodel_ros/msg/{_name}'))


def zero(type_name):
    """A message of a type with nothing in it."""
    fields = {}
    for name, node in TYPES.fielddefs[type_name][1]:
        kind, detail = node[0].name, node[1]
        if kind == 'BASE':
            fields[name] = '' if detail[0] == 'string' else False if detail[0] == 'bool' else 0
        elif kind == 'NAME':
            fields[name] = zero(detail)
        else:
            inner = detail[0]
            plain = inner[0].name == 'BASE' and inner[1][0] != 'string'
            fields[name] = np.zeros(0, getattr(np, inner[1][0])) if plain else []
    return TYPES.types[type_name](**fields)


def message(kind, /, **given):
    """Return a message of this package with some of its fields."""
    empty = zero(f'worldmodel_ros/msg/{kind}')
    for field, value in given.items():
        object.__setattr__(empty, field, value)
    return empty


@pytest.fixture(scope='module')
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp('view')
    drive = simulated_drive(1.0)
    frame = TYPES.types['sensor_msgs/msg/CompressedImage'](
        header(START, ''), 'png', np.frombuffer(b'\x89PNG\r\n\x1a\n', np.uint8))
    extra = []
    for tick in range(5):
        at = START + tick * 100_000_000
        told = header(at, 'base_link')
        path = np.linspace(0.0, 1.0, 4, dtype=np.float32)
        candidates = [message('Candidate', name='policy', score=0.5 + tick, x=path, y=0 * path),
                      message('Candidate', name='left 0.4 s', score=-1.0, x=path, y=path, vetoed=True)]
        chunk = message('ActionChunk', header=told, names=['linear.x', 'angular.z'], step_period=0.1, tier=1,
                        values=np.array([0.3, 0.1] * 4, np.float32))
        extra += [('/decision', 'worldmodel_ros/msg/Decision', at,
                   message('Decision', header=told, task='street', chosen='policy', candidates=candidates)),
                  ('/predicted_future', 'worldmodel_ros/msg/PredictedFuture', at,
                   message('PredictedFuture', header=told, frames=[frame] * 4,
                           collision_risk=np.array([0.1, 0.4], np.float32))),
                  ('/action_chunk', 'worldmodel_ros/msg/ActionChunk', at, chunk),
                  ('/deadline_status', 'worldmodel_ros/msg/DeadlineStatus', at,
                   message('DeadlineStatus', header=told, tier=tick % 2 + 1, latency=0.02, budget=0.05)),
                  ('/command_status', 'worldmodel_ros/msg/CommandStatus', at,
                   message('CommandStatus', header=told, limited=tick, reason='a reason'))]
    bag = write_bag(folder / 'bag', drive, extra=tuple(extra))
    target = folder / 'bag.rrd'
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'view', str(bag), '--out', str(target)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 'Warning' not in done.stderr and 'WARN' not in done.stderr, done.stderr
    return target


@pytest.fixture(scope='module')
def chunks(recording):
    """What was recorded, by entity: a list of chunks."""
    from rerun.chunk import RrdReader
    found = {}
    for chunk in RrdReader(str(recording)).stream().to_chunks():
        found.setdefault(chunk.entity_path, []).append(chunk)
    return found


def column(chunks, entity, ending):
    """Return the values of one component of an entity, in the order of the recording."""
    values = []
    for chunk in chunks[entity]:
        batch = chunk.to_record_batch()
        for name in batch.schema.names:
            if name.endswith(ending):
                values += batch.column(name).to_pylist()
    return values


def test_camera_predictions_candidates_plan_tiers_and_limits_are_there(chunks):
    for entity in ('/camera/image_raw/compressed', '/predicted_future/frames/1', '/predicted_future/frames/4',
                   '/decision/candidates', '/action_chunk/path', '/deadline_status/tier', '/command_status/limited',
                   '/cmd_vel/linear.x'):
        assert entity in chunks, sorted(chunks)
        assert all('ROS time' in chunk.timeline_names for chunk in chunks[entity])


def test_numbers_and_names_are_those_of_the_messages(chunks):
    assert [value for value, in column(chunks, '/decision/scores/policy', 'scalars')] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [value for value, in column(chunks, '/deadline_status/tier', 'scalars')] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert [value for value, in column(chunks, '/command_status/limited', 'scalars')] == [0.0, 1.0, 2.0, 3.0, 4.0]
    labels = column(chunks, '/decision/candidates', ':labels')
    assert len(labels) == 5 and labels[0] == ['policy 0.50', 'left 0.4 s -1.00']


def test_a_message_is_at_the_stamp_of_its_observation(chunks):
    times = []
    for chunk in chunks['/deadline_status/latency']:
        times += [int(value.value) for value in chunk.to_record_batch().column('ROS time')]
    assert times == [START + tick * 100_000_000 for tick in range(5)]


def test_a_bag_that_is_none_is_refused_in_words(tmp_path, capsys):
    from worldmodel_ros import cli
    assert cli.main(['view', str(tmp_path / 'nowhere')]) == 1
    assert 'worldmodel view:' in capsys.readouterr().err
