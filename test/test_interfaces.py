"""The messages and services: documented field by field, generated as defined, and carried by DDS."""
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import rclpy
from rclpy.duration import Duration
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage, Image

import worldmodel_ros.action
import worldmodel_ros.msg
import worldmodel_ros.srv
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.msg import (
    ActionChunk, Candidate, CommandStatus, DeadlineStatus, Decision, PredictedFuture, Timings, WhatIfBranch)
from worldmodel_ros.srv import WhatIf

ROOT = Path(__file__).resolve().parents[1]
DEFINITIONS = sorted([*ROOT.glob('action/*.action'), *ROOT.glob('msg/*.msg'), *ROOT.glob('srv/*.srv')])
FIELD = re.compile(
    r'^(?P<type>[\w/]+(?:\[\d*\])?)\s+(?P<name>\w+)(?P<value>\s*=\s*\S+)?\s*(?:#\s*(?P<comment>.*))?$')
# Numbers without a dimension say so by their range, or by what they count.
DIMENSIONLESS = re.compile(r'\[0\.\.1\]|\[unit of the column\]|\[no unit\]')


def fields(definition):
    for line in definition.read_text().splitlines():
        if line.strip() and not line.startswith(('#', '---')):
            match = FIELD.match(line)
            assert match, f'{definition.name}: cannot read {line!r}'
            yield match


def chunk(**changes):
    values = dict(episode_id=3, sequence=7, tier=ActionChunk.TIER_TWO_STEP, step_period=0.1,
                  names=['linear.x', 'angular.z'], values=[0.25, -0.5, 0.5, 1.0])
    return ActionChunk(**{**values, **changes})


def picture(content):
    return CompressedImage(format='jpeg', data=content)


def samples():
    """One message of each type with a value of its own in every kind of field."""
    future = PredictedFuture(
        episode_id=1, sequence=2 ** 63, tier=ActionChunk.TIER_ONE_STEP,
        command_tier=ActionChunk.TIER_PLAN_ONLY, age=0.0625, step_period=0.1,
        frames=[picture(b'\xff\xd8one'), picture(b'\xff\xd8two')], actions=chunk(),
        collision_risk=[0.0, 0.75], progress=-0.125, goal='red',
        decision=Decision(terms=['reach red'], chosen='policy', walls=[1.0, 0.0, 2.5],
                          candidates=[Candidate(name='policy', score=0.5, terms=[0.5], vetoed=True, contact='wall')]),
        timings=Timings(queue=0.001, total=0.03125, predicted=0.03))
    future.header.stamp.sec, future.header.frame_id = 12, 'camera_optical_frame'
    return [
        chunk(), Timings(encode=0.005, commit=0.004, policy=0.003, denoise=0.012, decode=0.006), future,
        DeadlineStatus(tier=ActionChunk.TIER_LAST_PLAN, verdict=DeadlineStatus.DEGRADED, budget=0.05,
                       latency=0.0375, observation_age=0.04, predicted=0.0625, reason='no time for one step',
                       last_plan=4, late=1),
        CommandStatus(state=CommandStatus.STOPPED, reason='no chunk', first_reason='no chunk', age=0.25,
                      passed=9, refused_order=2, stops=1, latched=True),
        WhatIfBranch(name='left', actions=chunk(tier=ActionChunk.TIER_NONE), frames=[picture(b'jpeg')],
                     collision_risk=[0.5], progress=0.25, x=[0.03125], y=[0.0], yaw=[0.125]),
    ]


@pytest.mark.parametrize('definition', DEFINITIONS, ids=lambda path: path.name)
def test_every_field_and_constant_says_what_it_means_and_in_which_unit(definition):
    assert definition.read_text().startswith('# '), f'{definition.name} does not say what it is for'
    for field in fields(definition):
        where = f'{definition.name}: {field["name"]}'
        assert len(field['comment'] or '') > 8, f'{where} has no comment'
        if field['type'].startswith('float'):
            assert re.search(r'\[(s|m|rad)\]', field['comment']) or DIMENSIONLESS.search(field['comment']), (
                f'{where} has no unit in brackets')


@pytest.mark.parametrize('definition', DEFINITIONS, ids=lambda path: path.name)
def test_the_generated_class_has_the_fields_of_the_definition(definition):
    generated = getattr(getattr(worldmodel_ros, definition.parent.name), definition.stem)
    parts = {'.msg': (), '.srv': ('Request', 'Response'), '.action': ('Goal', 'Result', 'Feedback')}[definition.suffix]
    classes = [getattr(generated, part) for part in parts] or [generated]
    names = [name for cls in classes for name in cls.get_fields_and_field_types()]
    assert names == [field['name'] for field in fields(definition) if not field['value']]


def test_tiers_count_down_from_the_best_to_the_stop():
    c = ActionChunk
    tiers = [c.TIER_NONE, c.TIER_TWO_STEP, c.TIER_ONE_STEP, c.TIER_SMALLER, c.TIER_PLAN_ONLY, c.TIER_LAST_PLAN,
             c.TIER_STOP]
    assert tiers == list(range(7))


def test_the_tiers_of_the_messages_are_those_of_the_ladder():
    assert {name: getattr(ActionChunk, f'TIER_{name}') for name in Tier.__members__} == {t.name: t.value for t in Tier}


@pytest.mark.parametrize('message', samples(), ids=lambda message: type(message).__name__)
def test_a_message_survives_serialisation(message):
    assert deserialize_message(serialize_message(message), type(message)) == message


PEER = textwrap.dedent('''
    """Sends every message back, and answers WhatIf with one branch per name."""
    import rclpy
    import worldmodel_ros.msg
    from worldmodel_ros.msg import WhatIfBranch
    from worldmodel_ros.srv import WhatIf

    rclpy.init()
    node = rclpy.create_node('peer')
    for name in %r:
        back = node.create_publisher(getattr(worldmodel_ros.msg, name), 'from_peer/' + name, 1)
        node.create_subscription(getattr(worldmodel_ros.msg, name), 'to_peer/' + name, back.publish, 1)

    def answer(request, response):
        response.success, response.step_period = True, request.horizon / 4
        response.branches = [WhatIfBranch(name=n, actions=a) for n, a in zip(request.names, request.actions)]
        return response

    node.create_service(WhatIf, 'what_if', answer)
    rclpy.spin(node)
''')


@pytest.fixture
def node():
    rclpy.init()
    node = rclpy.create_node('test_interfaces')
    yield node
    node.destroy_node()
    rclpy.try_shutdown()


@pytest.mark.ros
@pytest.mark.untimed
def test_messages_and_services_reach_another_process_and_return_unchanged(node):
    sent = {type(message).__name__: message for message in samples()}
    received, publishers = {}, {}
    for name, message in sent.items():
        publishers[name] = node.create_publisher(type(message), 'to_peer/' + name, 1)
        node.create_subscription(type(message), 'from_peer/' + name,
                                 lambda m, n=name: received.update({n: m}), 1)
    client = node.create_client(WhatIf, 'what_if')
    peer = subprocess.Popen([sys.executable, '-c', PEER % list(sent)])
    try:
        end = node.get_clock().now() + Duration(seconds=20)
        while len(received) < len(sent) and node.get_clock().now() < end:
            for name in set(sent) - set(received):
                publishers[name].publish(sent[name])
            rclpy.spin_once(node, timeout_sec=0.05)
        assert received == sent

        assert client.wait_for_service(timeout_sec=10)
        request = WhatIf.Request(names=['left', 'right'], actions=[chunk(), chunk(sequence=8)], horizon=0.5)
        future = client.call_async(request)
        rclpy.spin_until_future_complete(node, future, timeout_sec=10)
        response = future.result()
        assert response.success and response.step_period == 0.125
        assert [(b.name, b.actions.sequence) for b in response.branches] == [('left', 7), ('right', 8)]
    finally:
        peer.kill()
        peer.wait()


@pytest.mark.ros
@pytest.mark.untimed
def test_best_effort_vga_images_arrive_with_the_shipped_profile(node):
    source = textwrap.dedent('''
        import time
        import rclpy
        from rclpy.qos import QoSProfile, ReliabilityPolicy
        from sensor_msgs.msg import Image

        rclpy.init()
        node = rclpy.create_node('camera')
        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        publisher = node.create_publisher(Image, 'vga', qos)
        while not publisher.get_subscription_count():
            time.sleep(0.02)
        image = Image(height=480, width=640, encoding='rgb8', step=1920, data=bytes(480 * 1920))
        for number in range(40):
            image.header.stamp.sec = number
            publisher.publish(image)
            time.sleep(1 / 30)
    ''')
    numbers = []
    qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    node.create_subscription(Image, 'vga', lambda m: numbers.append(m.header.stamp.sec), qos)
    camera = subprocess.Popen([sys.executable, '-c', source])
    try:
        end = node.get_clock().now() + Duration(seconds=20)
        while camera.poll() is None and node.get_clock().now() < end:
            rclpy.spin_once(node, timeout_sec=0.1)
        assert camera.returncode == 0
        assert len(numbers) >= 36, f'{len(numbers)} of 40 images arrived'
    finally:
        camera.kill()
        camera.wait()
