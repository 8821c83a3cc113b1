"""What was driven to along a recording is told by its decisions, and an image that was given is shown."""
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bag_messages import TYPES, header, image_message
from bags import START, simulated_drive, write_bag
from rosbags.typesys import get_types_from_msg

from worldmodel_ros.bags.goals import read_goals
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.evaluate.drive import step_times

ROOT = Path(__file__).resolve().parents[1]
for _name in ('Candidate', 'ForecastThing', 'Decision'):
    TYPES.register(get_types_from_msg((ROOT / 'msg' / f'{_name}.msg').read_text(), f'worldmodel_ros/msg/{_name}'))
SHOWN = np.full((48, 64, 3), (200, 40, 40), np.uint8)


def decision(at, task, vetoed=False):
    none = np.zeros(0, np.float32)
    candidate = TYPES.types['worldmodel_ros/msg/Candidate']('policy', 0.5, none, vetoed, '', none, none)
    message = TYPES.types['worldmodel_ros/msg/Decision'](
        header(at, 'base_link'), 1, 1, 1, 1, task, [f'reach {task}'], 'policy', 0.0, none, [candidate], [], none, 0.0, 0.0)
    return '/decision', 'worldmodel_ros/msg/Decision', at, message


@pytest.fixture
def bag(tmp_path):
    """Red for 0.5 s, from 1 s on an image with a veto each time, a place, red again, and once more after a pause."""
    extra = [decision(START + k * 100_000_000, task, vetoed=task == 'image') for k, task in enumerate(
        ['red'] * 6 + [None] * 4 + ['image'] * 11 + ['place (1.000, 2.000)'] * 2 + ['red'] + [None] * 12 + ['red']) if task]
    image = image_message(SHOWN, START + 950_000_000, 'rgb8')
    extra.append(('/goal_image', 'sensor_msgs/msg/Image', START + 950_000_000, image))
    return write_bag(tmp_path / 'bag', simulated_drive(4.0), extra=tuple(sorted(extra, key=lambda row: row[2])))


def test_goals_follow_one_another_as_they_were_decided_by(bag):
    with open_bag(bag) as opened:
        found = read_goals(opened)
    assert [goal.name for goal in found] == ['red', 'image', 'place (1.000, 2.000)', 'red', 'red']
    assert [goal.decisions for goal in found] == [6, 11, 2, 1, 1] and [goal.vetoed for goal in found] == [0, 11, 0, 0, 0]
    assert [goal.seconds for goal in found] == pytest.approx([0.5, 1.0, 0.1, 0.0, 0.0], abs=1e-6)
    assert np.array_equal(found[1].image, SHOWN) and all(goal.image is None for goal in found if goal.name != 'image')
    assert found[0].terms == ('reach red',) and found[1].to_dict()['image']


def test_a_recording_without_decisions_has_no_goals(tmp_path):
    with open_bag(write_bag(tmp_path / 'bag', simulated_drive(1.0))) as opened:
        assert read_goals(opened) == []


def test_the_report_has_them_with_the_image_that_was_given(bag, tmp_path, monkeypatch):
    from worldmodel_ros import cli
    out = tmp_path / 'out'
    monkeypatch.setattr(step_times, 'measure', partial(step_times.measure, ticks=5))
    assert cli.main(['evaluate', 'bag', str(bag), '--limit', '1', '--out', str(out)]) == 0
    assert len(step_times.MeasuredTimes.load(out / 'step_times.json').ticks) == 5
    text = (out / 'report.html').read_text()
    section = text[text.index('id="goals"'):text.index('id="prediction"')]
    assert 'place (1.000, 2.000)' in section and section.count('data:image/jpeg') == 1
    assert 'what the camera shall see' in section and 'href="#goals"' in text
