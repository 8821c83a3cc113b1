"""Strangers on the topics and services: what they send is refused, counted, and ends no node."""

import math

from builtin_interfaces.msg import Time
from geometry_msgs.msg import TwistStamped
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header, String

from scenarios.checks import drives_on
from scenarios.rig import GATE, MODEL, ROBOT, Rig
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.common.qos import CAMERA, COMMAND, LATCHED
from worldmodel_ros.srv import SessionFile, WhatIf

RECOVERY = 5.0  # s
TIMES = 3  # that each message is sent

# Between two ticks an image is passed over, whatever it contains.
_LONG_AGO = Header(stamp=Time(sec=1))


def garbage_on_every_topic(rig: Rig) -> None:
    rig.drive()
    before = {node: rig.refused(node) for node in (ROBOT, GATE, MODEL)}
    newest = rig.observer.newest('action_chunk').message
    for _ in range(TIMES):
        rig.publish(String, 'goal', String(data='the moon'), LATCHED)
        rig.publish(String, 'goal', String(data='x' * 100_000), LATCHED)
        rig.publish(TwistStamped, 'cmd_vel', _twist(math.nan), COMMAND)
        for chunk in _chunks(newest):
            rig.publish(ActionChunk, 'action_chunk', chunk, COMMAND)
            rig.watch(0.005)  # or the next one takes its place in the gate's queue
        for image in _images():
            rig.publish(Image, 'camera/image_raw', image, CAMERA)
            rig.watch(0.005)
        rig.watch(0.1)
    for node, reason in (
        (MODEL, 'goal: unknown'),
        (MODEL, 'executed action: not finite'),
        (ROBOT, 'cmd_vel: not finite'),
        (GATE, 'shape'),
        (GATE, 'invalid'),
        (GATE, 'order'),
        (MODEL, 'image: wrong encoding'),
        (MODEL, 'image: wrong size'),
        (MODEL, 'image: empty'),
        (MODEL, 'image: zero stamp'),
    ):
        rig.wait_for_refusal(node, reason, before[node])
    drives_on(rig, RECOVERY)


def garbage_in_requests(rig: Rig) -> None:
    rig.drive()
    nothing = ActionChunk(step_period=0.1, names=['linear.x', 'angular.z'])
    for request in (
        WhatIf.Request(),
        WhatIf.Request(names=['sideways']),
        WhatIf.Request(names=['stop'], horizon=math.nan),
        WhatIf.Request(names=['stop'], horizon=-1.0),
        WhatIf.Request(names=['stop'], horizon=1e9),
        WhatIf.Request(names=['stop'], goal='the moon'),
        WhatIf.Request(actions=[nothing]),
    ):
        for node in (MODEL, ROBOT):
            answer = rig.call(WhatIf, f'{node}/what_if', request)
            assert not answer.success and answer.message, f'{node} answered {request}'
    for name in ('', '/dev/null', 'no/such/file.safetensors', '../up.safetensors', '~/home.safetensors'):
        for service in ('load_session', 'save_session'):
            answer = rig.call(SessionFile, f'{MODEL}/{service}', SessionFile.Request(path=name))
            assert not answer.success and 'without a folder' in answer.message, f'{service} took {name!r}'
    for node, values in (
        (MODEL, {'deadline_s': -1.0}),
        (MODEL, {'goal': 'the moon'}),
        (MODEL, {'model': 'another'}),
        (MODEL, {'reserve_s': 'much'}),
        (GATE, {'linear.x.max_velocity': math.nan}),
        (GATE, {'on_timeout': 'go'}),
        (ROBOT, {'camera_rate_hz': 1e6}),
        (GATE, {'no_such_parameter': 1}),
    ):
        assert rig.try_to_set(node, **values), f'{node} took {values}'
    drives_on(rig, RECOVERY)


def broken_compressed_images(rig: Rig) -> None:
    rig.set(ROBOT, publish_compressed=True)
    rig.bring_model_to('unconfigured')
    rig.set(MODEL, image_transport='compressed')
    try:
        rig.bring_model_to('active')
        _send_broken_compressed_images(rig)
    finally:
        rig.bring_model_to('unconfigured')
        rig.restore()
        rig.bring_model_to('active')
    rig.drive()


def _send_broken_compressed_images(rig: Rig) -> None:
    rig.drive()
    before = rig.refused(MODEL)
    for _ in range(TIMES):
        for image in _compressed_images():
            rig.publish(CompressedImage, 'camera/image_raw/compressed', image, CAMERA)
            rig.watch(0.02)
    for reason in ('not decodable', 'empty', 'cut short'):
        rig.wait_for_refusal(MODEL, f'image: {reason}', before)
    drives_on(rig, RECOVERY)


def _twist(value: float) -> TwistStamped:
    message = TwistStamped()
    message.twist.linear.x = message.twist.angular.z = value
    return message


def _chunks(newest: ActionChunk) -> list[ActionChunk]:
    def chunk(**changes) -> ActionChunk:
        fields = {
            'header': newest.header,
            'episode_id': newest.episode_id,
            'sequence': newest.sequence + 1_000_000,
            'tier': ActionChunk.TIER_TWO_STEP,
            'step_period': 0.1,
            'names': ['linear.x', 'angular.z'],
            'values': [0.5, 0.5] * 4,
            **changes,
        }
        return ActionChunk(**fields)

    return [
        chunk(values=[math.nan] * 8),
        chunk(values=[0.1, math.inf]),
        chunk(values=[]),
        chunk(values=[0.1] * 3),
        chunk(names=['joint']),
        chunk(step_period=0.0),
        chunk(step_period=math.nan),
        chunk(sequence=newest.sequence),
        chunk(tier=255),
        chunk(values=[0.5] * 100_000, names=[]),
    ]


def _images() -> list[Image]:
    sound = {'header': _LONG_AGO, 'height': 2, 'width': 2, 'step': 6, 'encoding': 'rgb8', 'data': bytes(12)}
    broken = (
        {'encoding': 'rgb7'},
        {'encoding': ''},
        {'encoding': '32FC1'},
        {'height': 0},
        {'data': b''},
        {'data': bytes(5)},
        {'step': 1},
        {'step': 2**32 - 1},
        {'height': 2**32 - 1, 'width': 2**32 - 1},
        {'header': Header()},
    )
    return [Image(**{**sound, **change}) for change in broken]


def _compressed_images() -> list[CompressedImage]:
    return [
        CompressedImage(header=_LONG_AGO, format='jpeg', data=data)
        for data in (b'', b'no picture', b'\xff\xd8\xff\xe0 cut short')
    ]
