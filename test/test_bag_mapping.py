"""What in a bag is the camera, the actions and the goal: guessed where it is safe, asked back where it is not."""
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bag_messages import ACTIONS, WHEELBASE, image_message, string, task
from bags import START, Drive, real_drive, simulated_drive, without_commands, write_bag

from worldmodel_ros.bags.fields import Field, YawRate
from worldmodel_ros.bags.guess import MappingQuestion, find_mapping
from worldmodel_ros.bags.problems import BagError, MessageError
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.model.presets import TINY

CONFIGS = Path(__file__).resolve().parents[1] / 'config' / 'evaluate'


def mapping_of(path, config=None):
    with open_bag(path) as bag:
        return find_mapping(bag, TINY, config)


def written(tmp_path, text):
    (tmp_path / 'bag.yaml').write_text(text)
    return tmp_path / 'bag.yaml'


def first_action(path, mapping):
    with open_bag(path) as bag:
        topic, raw, _ = next(bag.messages([mapping.action_topic]))
        return mapping.action(bag.deserialize(topic, raw))


@pytest.fixture(scope='module')
def drive():
    return simulated_drive(seconds=2.0)


@pytest.mark.parametrize(('action', 'prefix'), [('Twist', ''), ('TwistStamped', 'twist.')])
def test_a_robot_that_is_driven_by_twists_needs_no_file(drive, tmp_path, action, prefix):
    bag = write_bag(tmp_path / 'bag', drive, action=action)
    mapping = mapping_of(bag)
    assert (mapping.image_topic, mapping.action_topic, mapping.goal_topic) == (
        '/camera/image_raw/compressed', '/cmd_vel', '/goal')
    assert mapping.actions == (Field(f'{prefix}linear.x'), Field(f'{prefix}angular.z'))
    assert mapping.is_twist
    assert first_action(bag, mapping) == drive.commands[0][1]


def test_names_other_than_the_usual_ones_are_found_where_there_is_one_of_a_kind(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, image_topic='/front/rgb', action_topic='/base/command', encoding='bgr8')
    mapping = mapping_of(bag)
    assert (mapping.image_topic, mapping.action_topic) == ('/front/rgb', '/base/command')


def test_measured_motion_stands_in_for_commands_and_the_report_says_so(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, action='Odometry', action_topic='/odom')
    mapping = mapping_of(bag)
    assert (mapping.action_topic, mapping.is_twist) == ('/odom', False)
    assert first_action(bag, mapping) == drive.commands[0][1]
    assert 'measured motion of /odom' in mapping.notes[0]


def test_commands_go_before_measured_motion(drive, tmp_path):
    odometry = ACTIONS['Odometry']
    bag = write_bag(tmp_path / 'bag', drive, extra=[('/odom', odometry.type, START, odometry.make((1.0, 0.0), START))])
    mapping = mapping_of(bag)
    assert (mapping.action_topic, mapping.odometry_topic) == ('/cmd_vel', '/odom')
    assert '/odom' not in mapping.topics  # a world model takes none
    assert mapping_of(bag, written(tmp_path, 'odometry_topic: none')).odometry_topic is None
    wheels = [(name, odometry.type, START, odometry.make((1.0, 0.0), START)) for name in ('/base/odom', '/visual/odom')]
    assert mapping_of(write_bag(tmp_path / 'one', drive, extra=wheels[:1])).odometry_topic == '/base/odom'
    assert mapping_of(write_bag(tmp_path / 'two', drive, extra=wheels)).odometry_topic is None  # which one is not said


def test_a_task_is_found_by_its_type_and_a_bag_without_wheels_and_task_has_none(drive, tmp_path):
    plain = mapping_of(write_bag(tmp_path / 'plain', drive))
    assert (plain.odometry_topic, plain.task_topic) == (None, None)
    told = write_bag(tmp_path / 'told', drive, extra=[('/task', 'worldmodel_ros/msg/Task', START, task('street', 'red'))])
    assert mapping_of(told).task_topic == '/task'
    other = write_bag(tmp_path / 'other', drive, extra=[('/task', 'std_msgs/msg/String', START, string('street'))])
    assert mapping_of(other).task_topic is None


def test_goal_and_task_of_a_robot_whose_camera_has_another_name_are_found_where_there_is_one_of_each(drive, tmp_path):
    def of(folder, image='/robot1/front/image_raw', goal='/robot1/goal', others=()):
        extra = [('/robot1/task', 'worldmodel_ros/msg/Task', START, task('street', 'red')),
                 *((name, 'std_msgs/msg/String', START, string('red')) for name in others)]
        mapping = mapping_of(write_bag(tmp_path / folder, drive, image_topic=image, goal_topic=goal, extra=extra))
        return mapping.goal_topic, mapping.task_topic

    assert of('one', others=['/robot1/goal_name']) == ('/robot1/goal', '/robot1/task')
    assert of('root', goal='/goal', others=['/robot1/goal']) == ('/goal', '/robot1/task')
    assert of('two', others=['/robot2/goal']) == (None, '/robot1/task')  # which one is not said
    assert of('other robot', '/robot2/camera/image_raw') == (None, None)


def test_without_actions_the_pictures_remain(drive, tmp_path):
    mapping = mapping_of(write_bag(tmp_path / 'bag', without_commands(drive), goal_topic=None))
    assert (mapping.action_topic, mapping.actions, mapping.goal_topic) == (None, (), None)
    assert mapping.topics == ['/camera/image_raw/compressed']


def camera(drive, topic, encoding='jpeg'):
    kind = 'CompressedImage' if encoding in ('jpeg', 'png') else 'Image'
    return topic, f'sensor_msgs/msg/{kind}', START, image_message(drive.frames[0], START, encoding)


def test_of_several_cameras_the_one_that_the_node_listens_to_is_taken(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, extra=[camera(drive, '/rear/image_raw/compressed')])
    assert mapping_of(bag).image_topic == '/camera/image_raw/compressed'


@pytest.mark.parametrize(('namespace', 'image'), [('', '/front/image_raw'), ('/replay', '/replay/camera/image_raw')])
def test_what_the_world_model_node_shows_is_no_camera(drive, tmp_path, namespace, image):
    extra = [camera(drive, f'{namespace}/predicted_image/compressed'), camera(drive, f'{namespace}/goal_image', 'rgb8')]
    bag = write_bag(tmp_path / 'bag', drive, image_topic=image, action_topic=f'{namespace}/cmd_vel',
                    goal_topic=f'{namespace}/goal', extra=extra)
    mapping = mapping_of(bag)
    assert mapping.image_topic.removesuffix('/compressed') == image
    assert (mapping.action_topic, mapping.goal_topic) == (f'{namespace}/cmd_vel', f'{namespace}/goal')


def test_of_one_camera_recorded_twice_the_raw_pictures_are_taken(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, image_topic='/front', extra=[camera(drive, '/front', 'rgb8')])
    assert mapping_of(bag).image_topic == '/front'


def test_depth_beside_colour_is_no_camera(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, image_topic='/front', extra=[camera(drive, '/depth', '16UC1')])
    assert mapping_of(bag).image_topic == '/front/compressed'


def test_depth_alone_is_refused_with_the_reason(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, encoding='16UC1')
    with pytest.raises(BagError, match='depth images only .*record the colour camera'):
        mapping_of(bag)


def test_a_bag_without_images_is_refused_with_what_it_has(drive, tmp_path):
    with pytest.raises(BagError, match=r'no images.*/goal \(String\).*Record the camera'):
        mapping_of(write_bag(tmp_path / 'blind', Drive((), (), (), drive.commands, drive.goals)))


@pytest.mark.parametrize(('options', 'key', 'answer'), [
    (dict(image_topic='/left'), 'image_topic', '/right/compressed'),
    (dict(action_topic='/teleop'), 'action_topic', '/nav')])
def test_a_gamble_is_asked_back_and_the_answer_is_one_line(drive, tmp_path, options, key, answer):
    twist = ACTIONS['TwistStamped']
    extra = [camera(drive, '/right/compressed')] if key == 'image_topic' else [
        ('/nav', twist.type, START, twist.make((0.1, 0.0), START))]
    bag = write_bag(tmp_path / 'bag', drive, extra=extra, **options)
    with pytest.raises(MappingQuestion) as question:
        mapping_of(bag)
    text = str(question.value)
    assert answer in text and next(iter(options.values())) in text and '--config' in text and f'{key}: ' in text
    assert getattr(mapping_of(bag, written(tmp_path, f'{key}: {answer}\n')), key) == answer


@pytest.mark.parametrize(('action', 'answer'), [
    ('AckermannDriveStamped', 'linear.x: drive.speed\n  angular.z: {speed: drive.speed, steering: '
                              f'drive.steering_angle, wheelbase: {WHEELBASE}}}'),
    ('Float64MultiArray', 'linear.x: data[0]\n  angular.z: data[1]'),
    ('JointState', 'linear.x: velocity[drive]\n  angular.z: {field: "velocity[turn]", scale: 1.0}')])
def test_actions_whose_meaning_is_not_in_their_type_are_asked_for(drive, tmp_path, action, answer):
    bag = write_bag(tmp_path / 'bag', drive, action=action)
    with pytest.raises(MappingQuestion, match='--config'):
        mapping_of(bag)
    mapping = mapping_of(bag, written(tmp_path, f'action_topic: /cmd_vel\nactions:\n  {answer}\n'))
    with open_bag(bag) as opened:
        for (_, (v, w)), record in zip(drive.commands, opened.messages(['/cmd_vel'])):
            expected = (v, w if v or action != 'AckermannDriveStamped' else 0.0)
            assert mapping.action(opened.deserialize(record.topic, record.raw)) == pytest.approx(expected, abs=1e-6)


def test_the_example_in_a_question_about_a_car_is_an_answer_once_its_wheelbase_is_filled_in(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, action='AckermannDriveStamped')
    with pytest.raises(MappingQuestion) as question:
        mapping_of(bag)
    text = str(question.value)
    mapping = mapping_of(bag, written(tmp_path, text[text.index('action_topic:'):].replace('METRES', '0.3')))
    assert mapping.actions == (Field('drive.speed'), YawRate(Field('drive.speed'), Field('drive.steering_angle'), 0.3))


@pytest.mark.parametrize(('text', 'words'), [
    ('{', ('YAML',)), ('- a', ('not known', 'image_topic')), ('camera: /x', ('camera', 'image_topic')),
    ('image_topic: /no', ('/no', '/camera/image_raw/compressed')), ('image_topic: [1]', ('name of a topic',)),
    ('image_topic: none', ('name of a topic', 'needs images')),
    ('image_topic: /goal', ('/goal is a std_msgs/msg/String', 'sensor_msgs/msg/Image')),
    ('goal_topic: /cmd_vel', ('TwistStamped', 'std_msgs/msg/String')),
    ('executed_timeout_s: -1', ('0 or more', '-1')), ('executed_timeout_s: .nan', ('0 or more',)),
    ('executed_timeout_s: soon', ('soon',)),
    ('image_rectified: 1', ('true or false', '1')), ('camera_pitch_deg: down', ('down is positive', "'down'")),
    ('camera_pitch_deg: .nan', ('-90 to 90',)), ('camera_pitch_deg: true', ('-90 to 90',)),
    ('image_stamps: mine', ('header, log', 'mine')), ('actions: {v: x}', ('linear.x, angular.z', 'got v')),
    ('actions: {linear.x: 3, angular.z: x}', ('linear.x', 'field:')),
    ('actions: {linear.x: {field: x, scale: y}, angular.z: x}', ('linear.x', 'scale')),
    ('actions: {linear.x: "a b", angular.z: x}', ("'a b'", 'data[0]')),
    ('actions: {linear.x: x, angular.z: {speed: x, steering: y, wheelbase: 0}}', ('wheelbase', 'axles')),
    ('actions: {linear.x: x, angular.z: {speed: x, steering: y, wheelbase: .inf}}', ('wheelbase', 'axles')),
    ('actions: {linear.x: {field: x, scale: .nan}, angular.z: y}', ('linear.x', 'finite')),
    ('actions: {linear.x: {field: x, factor: 0.5}, angular.z: y}', ('linear.x', 'write {field', 'factor'))])
def test_a_file_that_is_wrong_is_refused_with_what_to_write(drive, tmp_path, text, words):
    bag = write_bag(tmp_path / 'bag', drive)
    with pytest.raises(BagError) as refusal:
        mapping_of(bag, written(tmp_path, text))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_scales_and_offsets_make_si_units():
    message = SimpleNamespace(twist=SimpleNamespace(linear=SimpleNamespace(x=0.5)))
    assert Field('twist.linear.x', scale=4.0, offset=-1.0).read(message) == 1.0


def test_the_yaw_rate_of_a_car_is_that_of_the_bicycle_model():
    message = SimpleNamespace(speed=0.5, steering_angle=math.radians(20.0))
    assert YawRate(Field('speed'), Field('steering_angle'), 0.25).read(message) == pytest.approx(
        0.5 / (0.25 / math.tan(math.radians(20.0))))


@pytest.mark.parametrize('angle', [math.inf, -math.inf, math.nan])
def test_the_yaw_rate_at_an_angle_that_is_not_finite_is_no_number(angle):
    assert math.isnan(YawRate(Field('speed'), Field('angle'), 0.25).read(SimpleNamespace(speed=0.5, angle=angle)))


@pytest.mark.parametrize(('path', 'words'), [
    ('twist.linear.x', ("'twist'", 'name, velocity')), ('velocity[2]', ('entry 2',)),
    ('velocity[arm]', ('left, right',)), ('velocity', ('no number',)), ('name[0]', ('no number',)),
    ('effort', ('no number',)), ('position', ('no number',))])
def test_a_field_that_a_message_has_not_is_named(path, words):
    message = SimpleNamespace(name=['left', 'right'], velocity=[1.0, 2.0], effort=np.ones(2), position=np.ones(1))
    with pytest.raises(MessageError) as refusal:
        Field(path).read(message)
    assert path in str(refusal.value) and all(word in str(refusal.value) for word in words), str(refusal.value)


def test_the_commented_example_says_what_would_be_guessed(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, encoding='rgb8')
    assert mapping_of(bag, CONFIGS / 'example.yaml') == mapping_of(bag)


def test_the_real_drive_is_mapped_by_its_file_and_the_assumed_scale_is_said():
    path = real_drive()
    mapping = mapping_of(path, CONFIGS / 'donkeycar.yaml')
    assert 'assumed' in mapping.notes[0]
    with open_bag(path) as bag:
        for topic, raw, _ in bag.messages(['/cmd_vel']):
            message = bag.deserialize(topic, raw)
            v, w = mapping.action(message)
            assert v == pytest.approx(0.6 * message.twist.linear.x)
            assert w * message.twist.angular.z >= 0.0  # left stays left
            assert abs(w) < TINY.action_high[1]


def test_a_mapping_can_be_written_as_json(drive, tmp_path):
    mapping = mapping_of(write_bag(tmp_path / 'bag', drive))
    first, _ = json.loads(json.dumps(mapping.to_dict()))['actions']
    assert first == {'path': 'twist.linear.x', 'scale': 1.0, 'offset': 0.0}


def test_goals_of_another_type_are_no_goals(drive, tmp_path):
    twist = ACTIONS['Twist']
    message = '/goal', twist.type, START, twist.make((0, 0), 0)
    other = write_bag(tmp_path / 'bag', drive, goal_topic=None, extra=[message])
    with open_bag(other) as bag:
        assert find_mapping(bag, TINY, written(tmp_path, 'action_topic: /cmd_vel')).goal_topic is None
