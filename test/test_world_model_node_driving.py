"""
The world model node on a ROS graph: commands in time or not at all, whatever the camera and the model do.
"""
import time

import numpy as np
import pytest
from world_model_rig import MOTION, NS, active, rig, stamp_of, wait_for

from worldmodel_ros.msg import ActionChunk, DeadlineStatus

pytestmark = [pytest.mark.ros, pytest.mark.waiting]

DEADLINE = 0.05


def assert_never_late(node, deadline=DEADLINE):
    """No motion was answered to an image that was older than the deadline."""
    arrivals = {stamp_of(m): at for at, m in node.received['action_chunk'] if m.tier in MOTION}
    statuses = {stamp_of(m): m for m in node.statuses if m.tier in MOTION}
    for stamp in arrivals:
        assert statuses[stamp].observation_age <= deadline, statuses[stamp]


def verdicts(node, verdict):
    return [m for m in node.statuses if m.verdict == verdict]


def test_each_image_is_answered_by_a_chunk_that_bears_its_stamp():
    with active(deadline_s=0.5) as node:
        node.film(1.0)
        node.film_until(lambda: len(node.messages()) >= 7, 'commands')
        wait_for(lambda: len(node.statuses) >= 7, 'statuses')
        chunks = node.messages()
        good = [m for m in chunks if m.tier == ActionChunk.TIER_TWO_STEP]
        assert len(good) >= 5
        chunk = good[0]
        assert (list(chunk.names), chunk.step_period, chunk.header.frame_id) == (
            ['linear.x', 'angular.z'], 0.1, 'base_link')
        assert np.reshape(chunk.values, (4, 2))[:, 0] == pytest.approx(0.4)
        assert len({m.episode_id for m in chunks}) == 1
        sequences = [m.sequence for m in chunks]
        assert sequences == sorted(set(sequences))
        by_stamp = {stamp_of(m): m for m in node.statuses}
        assert by_stamp[stamp_of(chunk)].verdict == DeadlineStatus.ON_TIME
        assert_never_late(node, 0.5)


def test_predictions_follow_their_command_with_pictures_a_strip_and_a_path():
    with active() as node:
        node.film(1.0)
        wait_for(lambda: node.messages('predicted_image/compressed'), 'a strip')
        future = wait_for(lambda: node.messages('predicted_future'), 'a prediction')[-1]
        assert len(future.frames) == 4 and len(future.collision_risk) == 4
        stamps = [stamp_of(frame) - stamp_of(future) for frame in future.frames]
        assert stamps == [NS // 10 * k for k in (1, 2, 3, 4)]
        assert (future.goal, future.header.frame_id) == ('red', 'camera_optical_frame')
        assert future.progress == pytest.approx(0.2)
        assert future.timings.decode > 0.0 and future.timings.total > future.timings.denoise > 0.0
        arrived = {stamp_of(m): at for at, m in node.received['predicted_future']}
        # Not the stop that follows when images cease: it has the newest image's stamp.
        commanded = {stamp_of(m): at for at, m in node.received['action_chunk'] if m.tier in MOTION}
        # On a machine that is overloaded what is predicted may come of an image that no command answers any more.
        answered = arrived.keys() & {stamp_of(m) for m in node.statuses if m.tier in MOTION}
        assert answered and all(commanded[stamp] <= arrived[stamp] for stamp in answered)
        marker = node.messages('predicted_path')[-1].markers[0]
        assert marker.header.frame_id == 'base_link' and len(marker.points) == 5
        assert marker.points[-1].x == pytest.approx(0.16, abs=0.01)
        # As long as the plan: that of a model that has died vanishes from the screen.
        assert (marker.lifetime.sec, marker.lifetime.nanosec) == (0, 400_000_000)


def test_without_a_goal_nothing_is_commanded_but_the_future_is_predicted():
    with active(goal='') as node:
        node.film(0.5)
        future = wait_for(lambda: node.messages('predicted_future'), 'a prediction')[-1]
        assert not any(future.actions.values)
        assert not node.messages()
        assert {m.verdict for m in node.statuses if stamp_of(m)} == {DeadlineStatus.IDLE}


def test_clearing_the_goal_stops_the_robot():
    with active() as node:
        node.film(0.3)
        node.set_goal('')
        stop = wait_for(lambda: [m for m in node.messages() if m.tier == ActionChunk.TIER_STOP], 'a stop')[-1]
        assert len(stop.values) == 0
        assert stop.sequence == max(m.sequence for m in node.messages())


def test_a_goal_that_the_model_does_not_know_is_refused_and_the_old_one_stays():
    with active() as node:
        from std_msgs.msg import String
        node.goals.publish(String(data='purple'))
        wait_for(lambda: node.refused().get('goal: unknown'), 'the refusal')
        assert node.subject._goal == 'red'


def test_a_slow_model_commands_nothing_late_and_ends_in_a_stop():
    with active() as node:
        node.film(0.5)
        assert node.subject.set_parameters_atomically([parameter('fault_delay_ms', 80.0)]).successful
        node.film(1.5)
        assert node.messages()[-1].tier == ActionChunk.TIER_STOP
        assert any(m.tier == ActionChunk.TIER_LAST_PLAN for m in node.messages())
        assert_never_late(node)
        node.subject.set_parameters_atomically([parameter('fault_delay_ms', 0.0)])
        node.film(1.5)
        assert node.messages()[-1].tier in MOTION


def test_the_last_plan_goes_on_in_time_when_the_model_is_suddenly_late():
    with active() as node:
        node.engine.predicted = dict(node.engine.costs)
        for _ in range(3):
            node.engine.costs['commit'] = node.engine.predicted['commit']
            node.film(0.5)
            node.engine.costs['commit'] = 0.3
            before = len(verdicts(node, DeadlineStatus.LATE))  # of a machine that stood still
            node.images.publish(node.image())
            late = wait_for(lambda: verdicts(node, DeadlineStatus.LATE)[before:], 'the fallback')[0]
            if late.tier != ActionChunk.TIER_NONE:
                break  # else the machine stood still just then, and had no time for any command
        assert late.tier == ActionChunk.TIER_LAST_PLAN
        assert late.latency <= DEADLINE
        assert late.latency >= 0.03
        assert late.late == before + 1


@pytest.mark.parametrize(('fault', 'word'), [('fault_nan', 'not finite'), ('fault_raise', 'InjectedFault')])
def test_a_broken_model_stops_the_robot_and_recovers(fault, word):
    with active() as node:
        node.film(0.5)
        node.subject.set_parameters_atomically([parameter(fault, True)])
        node.film(0.5)
        invalid = wait_for(lambda: verdicts(node, DeadlineStatus.INVALID), 'INVALID')
        assert word in invalid[0].reason
        assert node.messages()[-1].tier == ActionChunk.TIER_STOP
        assert any(reason.startswith('engine: ') for reason in node.refused())
        node.subject.set_parameters_atomically([parameter(fault, False)])
        node.film(1.2)
        assert node.messages()[-1].tier in MOTION
        assert all(np.isfinite(m.values).all() for m in node.messages())


def test_a_silent_camera_stops_the_robot_once_and_is_reported_while_it_lasts():
    with active() as node:
        node.film(0.5)
        last, filmed = time.monotonic(), len(node.messages())

        def stops():  # on a busy machine there may have been some for images before
            return [r for r in node.received['action_chunk'][filmed:] if r[1].tier == ActionChunk.TIER_STOP]

        at, stop = wait_for(stops, 'a stop')[0]
        assert at - last < 0.35
        before = next(m for m in reversed(node.messages()) if m.sequence < stop.sequence)
        assert stamp_of(stop) == stamp_of(before)  # keeps the order that the gate asks for
        wait_for(lambda: len(verdicts(node, DeadlineStatus.STALE_INPUT)) >= 3, 'reports')
        assert len(stops()) == 1
        node.film(0.5)
        assert node.messages()[-1].tier in MOTION


def test_a_frozen_camera_stops_the_robot_until_the_picture_changes():
    with active(executed_timeout_s=0.0) as node:  # each command is given once here
        node.film(0.5)
        node.drive(0.3)
        node.film(1.0, publish=lambda: node.images.publish(node.image(value=7)))
        stop = node.messages()[-1]
        assert stop.tier == ActionChunk.TIER_STOP
        assert 'frozen' in node.statuses[-1].reason
        assert node.refused()['image: frozen camera'] >= 2
        node.drive(0.0)
        # The robot stands by now, so the picture changes once and then no more.
        node.film(1.0, publish=lambda: node.images.publish(node.image(value=8)))
        assert node.messages()[-1].tier in MOTION
        assert node.messages()[-1].episode_id > stop.episode_id


def test_a_camera_that_shows_the_same_to_a_robot_that_stands_is_not_frozen():
    with active() as node:
        node.drive(0.0)
        node.film(1.0, publish=lambda: node.images.publish(node.image(value=7)))
        assert not node.refused().get('image: frozen camera')
        # On a busy machine an image may come late, and be answered by a stop.
        assert sum(m.tier in MOTION for m in node.messages()) > sum(m.tier not in MOTION for m in node.messages())


def test_an_old_image_is_seen_but_commands_nothing():
    with active() as node:
        node.film(0.5, publish=lambda: node.images.publish(node.image(stamp=node.now() - NS // 5)))
        wait_for(lambda: verdicts(node, DeadlineStatus.STALE_INPUT), 'STALE_INPUT')
        assert not [m for m in node.messages() if m.tier in MOTION]
        assert len(node.engine.sessions[-1].observed) >= 2


def test_a_camera_of_three_times_the_rate_is_decimated_to_the_model_s():
    with active() as node:
        node.film(1.5, rate=30.0)
        stamps = [stamp_of(m) for m in node.messages()]
        assert 12 <= len(stamps) <= 16
        assert min(np.diff(stamps)) >= 0.05 * NS  # after an image that was lost on the way


@pytest.mark.parametrize(('jump', 'resets'), [(-5 * NS, True), (2 * NS, True), (0, False)])
def test_a_jump_in_time_begins_a_new_episode(jump, resets):
    with active(future_tolerance_s=10.0, deadline_s=10.0) as node:
        node.film(0.5)
        before = node.messages()[-1]
        node.film(0.5, publish=lambda: node.images.publish(node.image(stamp=node.now() + jump)))
        after = node.messages()[-1]
        assert stamp_of(after) - stamp_of(before) - jump > 0
        assert (after.episode_id > before.episode_id) == resets
        assert node.engine.sessions[-1].resets == (2 if resets else 1)


def test_messages_that_are_broken_are_refused_and_counted_and_driving_goes_on():
    with active() as node:
        def publish(change=lambda message: None, **options):
            message = node.image(**options)
            change(message)
            node.images.publish(message)
            time.sleep(0.03)
        node.film(0.3)
        publish(encoding='16UC1')
        publish(encoding='nonsense')
        publish(lambda m: m.data.__delitem__(slice(None)))
        publish(lambda m: m.data.__delitem__(slice(100, None)))
        publish(lambda m: setattr(m, 'height', 128))
        publish(lambda m: setattr(m, 'step', 3))
        publish(lambda m: setattr(m, 'width', 0))
        publish(stamp=0)
        publish(stamp=node.now() + 60 * NS)
        repeated = node.now()
        publish(stamp=repeated)
        publish(stamp=repeated)
        publish(stamp=repeated - NS // 100)
        node.film(1.0)
        refused = node.refused()
        for reason, count in (('image: depth image', 1), ('image: wrong encoding', 1), ('image: empty', 2),
                              ('image: wrong size', 3), ('image: zero stamp', 1),
                              ('image: stamp in the future', 1), ('image: duplicate stamp', 1),
                              ('image: stamp out of order', 1)):
            assert refused.get(reason) == count, refused
        assert node.messages()[-1].tier in MOTION


def test_executed_actions_reach_the_model_as_their_mean_over_the_interval():
    with active() as node:
        node.drive(0.4, 1.0)
        time.sleep(0.15)
        node.images.publish(node.image())
        time.sleep(0.1)
        node.drive(0.0, 0.0)
        time.sleep(0.1)
        node.images.publish(node.image())
        observed = wait_for(lambda: len(node.engine.sessions[-1].observed) == 2
                            and node.engine.sessions[-1].observed, 'observations')
        assert observed[0][1] == pytest.approx((0.4, 1.0))
        assert 0.1 < observed[1][1][0] < 0.3
        assert observed[1][1][1] == pytest.approx(2.5 * observed[1][1][0])


def test_plain_twists_and_compressed_images_are_taken_too():
    from geometry_msgs.msg import Twist
    with active(enable_stamped_cmd_vel=False, executed_action_topic='cmd_vel_plain',
                image_transport='compressed', executed_timeout_s=0.0) as node:
        twist = Twist()
        twist.linear.x = 0.25
        node.plain_twists.publish(twist)
        wait_for(lambda: node.subject._executed.actions.moving(node.now()), 'the executed action')
        node.film(0.8, publish=lambda: node.compressed.publish(node.jpeg()))
        assert node.messages()[-1].tier in MOTION
        assert node.engine.sessions[-1].observed[-1][1] == pytest.approx((0.25, 0.0))
        broken = node.jpeg()
        del broken.data[200:]
        node.compressed.publish(broken)
        wait_for(lambda: node.refused().get('image: cut short'), 'the refusal')


def test_executed_actions_that_are_not_finite_are_refused():
    with active() as node:
        from geometry_msgs.msg import TwistStamped
        message = TwistStamped()
        for count, value in enumerate((float('nan'), 1e20), 1):  # the squares of the second are not finite in float32
            message.twist.linear.x = value
            node.twists.publish(message)
            wait_for(lambda: node.refused().get('executed action: not finite') == count, 'the refusal')
        assert not node.subject._executed.actions.moving(node.now())


def test_a_large_image_that_arrives_broken_brings_the_remedy(capfd):
    with active() as node:
        message = node.image(size=(480, 640))
        message.data = message.data[:1000]
        node.images.publish(message)
        wait_for(lambda: node.refused().get('image: wrong size'), 'the refusal')
        assert 'fastdds_large_images.xml' in capfd.readouterr().err


def test_a_best_effort_camera_that_is_never_heard_brings_the_remedy(capfd):
    with active(camera_timeout_s=0.1):
        text = ''

        def warned():
            nonlocal text
            text += capfd.readouterr().err
            return 'it has a publisher' in text
        wait_for(warned, 'the warning')
        assert 'fastdds_large_images.xml' in text


def test_a_larger_image_is_scaled_to_the_model():
    with active() as node:
        node.film(0.5, publish=lambda: node.images.publish(node.image(size=(120, 160))))
        assert node.messages()[-1].tier in MOTION


def test_diagnostics_tell_rates_latencies_tiers_and_refusals():
    with active() as node:
        node.images.publish(node.image(stamp=0))
        wait_for(lambda: node.refused().get('image: zero stamp'), 'the refusal')
        node.film(2.2)
        _, text, values = node.report()
        for key in (
                'frame_rate_node', 'frame_rate_msg', 'current_delay_from_realtime_ms', 'expected_frequency',
                'tolerance', 'deadline_miss_count', 'latency_p50_ms', 'latency_p99_ms', 'latency_max_ms',
                'observation_age_ms', 'two_step', 'one_step', 'smaller', 'plan_only', 'last_plan', 'stop', 'predictions',
                'predictions_rate', 'warmup_s', 'model', 'backend'):
            assert key in values, key
        assert float(values['predictions_possible_hz']) == pytest.approx(10.0)
        assert float(values['frame_rate_msg']) == pytest.approx(10.0, abs=1.0)
        assert 0.0 < float(values['latency_p50_ms']) < 50.0
        assert values['refused: image: zero stamp'] == '1'
        assert (values['model'], values['backend']) == ('fake', 'fake')


def test_two_nodes_in_two_namespaces_do_not_hear_each_other():
    with active(namespace='one') as one, active(namespace='two', goal='') as two:
        one.film(0.5)
        assert one.messages()
        assert not two.messages() and not two.engine.sessions[-1].observed


def parameter(name, value):
    from rclpy.parameter import Parameter
    return Parameter(name, value=value)


def test_deadline_and_reserve_can_be_changed_while_driving():
    with active() as node:
        node.film(0.3)
        changed = node.subject.set_parameters_atomically(
            [parameter('deadline_s', 0.2), parameter('reserve_s', 0.02)])
        assert changed.successful
        node.film(0.3)
        wait_for(lambda: node.statuses[-1].budget > 0.15, 'the new budget')
        refused = node.subject.set_parameters_atomically([parameter('reserve_s', 0.3)])
        assert not refused.successful and 'less than deadline_s' in refused.reason


def test_a_goal_parameter_is_a_goal_from_the_start():
    with rig('configure', 'activate', goal='') as node:
        assert node.subject.set_parameters_atomically([parameter('goal', 'blue')]).successful
        node.film(0.4)
        assert node.messages()[-1].tier in MOTION
        refused = node.subject.set_parameters_atomically([parameter('goal', 'purple')])
        assert not refused.successful and 'red, green, blue, yellow' in refused.reason
