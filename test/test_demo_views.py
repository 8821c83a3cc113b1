"""The layouts for Foxglove and RViz show topics and fields that exist."""
import json
import re
from pathlib import Path

import pytest
import yaml
from geometry_msgs.msg import TwistStamped

from worldmodel_ros import msg

CONFIG = Path(__file__).parents[1] / 'config'
TYPES = {'/action_chunk': msg.ActionChunk, '/deadline_status': msg.DeadlineStatus, '/command_status': msg.CommandStatus,
         '/decision': msg.Decision, '/predicted_future': msg.PredictedFuture, '/cmd_vel': TwistStamped}
TOPICS = {*TYPES, '/camera/image_raw', '/predicted_image/compressed', '/predicted_path', '/sim/objects',
          '/sim/ground_truth', '/diagnostics', '/goal', '/decision_paths'}


@pytest.fixture(scope='module')
def layout():
    return json.loads((CONFIG / 'foxglove_layout.json').read_text())


def values(node, key):
    """All values of ``key`` anywhere below a JSON node."""
    if isinstance(node, dict):
        yield from ([node[key]] if key in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from values(child, key)


def leaves(tree):
    return {tree} if isinstance(tree, str) else leaves(tree['first']) | leaves(tree['second'])


def test_every_panel_is_in_the_layout_and_configured(layout):
    assert leaves(layout['layout']) == set(layout['configById'])


def test_every_topic_is_one_of_the_system(layout):
    topics = {*values(layout, 'imageTopic'), *values(layout, 'topicName'), *values(layout, 'topicToRender'),
              *values(layout, 'topicPath')}
    topics |= {name for shown in values(layout, 'topics') for name in shown}
    assert topics == TOPICS - {'/action_chunk', '/deadline_status', '/decision', '/predicted_future', '/cmd_vel'}


def test_every_plotted_path_is_a_field_of_its_message(layout):
    plotted = [value for value in values(layout, 'value') if value.startswith('/')]
    assert len(plotted) >= 8
    for value in plotted:
        topic, *fields = value.split('.')
        message = TYPES[topic]()
        for field in fields:
            name = re.sub(r'\[(\d+|:)]$', '', field)
            assert hasattr(message, name), value
            each = re.fullmatch(r'sequence<worldmodel_ros/(\w+)>', message.get_fields_and_field_types()[name])
            message = getattr(msg, each[1])() if each else getattr(message, name)


def test_rviz_shows_topics_of_the_system():
    rviz = yaml.safe_load((CONFIG / 'worldmodel.rviz').read_text())
    shown = {d['Topic']['Value'] for d in rviz['Visualization Manager']['Displays'] if 'Topic' in d}
    assert shown <= TOPICS and '/predicted_image/compressed' in shown


def test_foxglove_plots_what_a_rerun_recording_does(layout):
    pytest.importorskip('rerun', reason='needs the extra [view]: rerun-sdk, 170 MB')
    from worldmodel_ros.evaluate import view
    kinds = {'/camera/image_raw': 'sensor_msgs/msg/Image', '/predicted_future': 'worldmodel_ros/msg/PredictedFuture',
             '/decision': 'worldmodel_ros/msg/Decision', '/action_chunk': 'worldmodel_ros/msg/ActionChunk',
             '/deadline_status': 'worldmodel_ros/msg/DeadlineStatus', '/command_status': 'worldmodel_ros/msg/CommandStatus',
             '/cmd_vel': 'geometry_msgs/msg/TwistStamped'}
    plotted = {value for value in values(layout, 'value') if value.startswith('/')}
    shown = {'scores': ['/decision.candidates[:].score'], 'tier': ['/deadline_status.tier'],
             'latency and budget [s]': ['/deadline_status.latency', '/deadline_status.budget'],
             'gate': ['/command_status.state', '/command_status.limited', '/command_status.stops'],
             'commands': ['/cmd_vel.twist.linear.x', '/cmd_vel.twist.angular.z']}
    seen, decided, plots = view.panels(kinds)
    assert {panel.name for panel in plots} == shown.keys() and len(decided) == 1 and seen[0].name == '/camera/image_raw'
    assert all(set(paths) <= plotted for paths in shown.values())
    images, lines = set(values(layout, 'imageTopic')), {name for each in values(layout, 'topics') for name in each}
    assert {'/camera/image_raw', '/predicted_image/compressed'} <= images and {'/predicted_path', '/decision_paths'} <= lines
