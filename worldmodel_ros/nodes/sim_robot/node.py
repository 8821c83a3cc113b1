"""
The simulated robot: camera, odometry and a base that takes velocity commands, in real time.

It also measures the age of the observation that each command answers, and publishes the truth about the world: pose, objects,
and, on request, the outcome of action sequences.
"""

import math
import sys
import threading
import time
from typing import Any

import numpy as np
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String
from visualization_msgs.msg import MarkerArray

from worldmodel_ros import realtime
from worldmodel_ros.clocks import wall_minus_steady
from worldmodel_ros.msg import Task
from worldmodel_ros.nodes.common import diagnostics, qos
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import nanoseconds, time_message, to_jpeg
from worldmodel_ros.nodes.common.parameters import Parameters
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.nodes.sim_robot import messages
from worldmodel_ros.nodes.sim_robot.messages import spoil
from worldmodel_ros.nodes.sim_robot.futures import Observation, Observations, TrueFutures
from worldmodel_ros.nodes.sim_robot.judge import CommandJudge
from worldmodel_ros.nodes.sim_robot.pacing import Pacer, Rate
from worldmodel_ros.nodes.sim_robot.tasks import PAUSE, Episodes
from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD
from worldmodel_ros.parameters.sim_robot import MAX_CLOCK_OFFSET, PARAMETERS
from worldmodel_ros.safety.motion import Silences
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.world import LIMITS, World

SLICE = 0.01              # s, physics step; each step reads the newest command
MAX_LAG = 0.2             # s behind real time, beyond which time is dropped
ODOMETRY_RATE = 20.0      # Hz
MARKER_RATE = 1.0         # Hz; MOVING_MARKER_RATE if something in the room moves
MOVING_MARKER_RATE = 10.0
RESET_TIMEOUT = 5.0       # s
SILENCE = 0.14            # s without a command, beyond which the diagnostics report it: the gate stops after 0.13
CLOCK_START = int((MAX_CLOCK_OFFSET + 100) * 1e9)  # ns; so that no stamp is negative, whatever the offset


class SimRobot(Node):
    """
    The simulated robot node. The simulation runs in its own thread, on the steady clock; callbacks only store commands.

    Publishes camera/image_raw (and /compressed), camera/camera_info, odom (from wheel encoders that slip), sim/ground_truth
    (Odometry in frame ``world``), sim/objects (MarkerArray, latched), /clock if configured, and with a task ``task`` and
    sim/judgement; subscribes to cmd_vel; serves ~/what_if and ~/reset.
    """

    def __init__(self) -> None:
        super().__init__('sim_robot')
        self.refusals = diagnostics.Refusals()
        self._settings = Parameters(self, PARAMETERS, self._on_change)
        prefix, slash, _ = self._settings['base_frame'].rpartition('/')
        self._frame_prefix = prefix + slash
        self._judge = CommandJudge(self._settings['deadline_s'])
        self._silences = Silences(lambda: SILENCE)
        self._observations = Observations(self._settings['snapshots'])
        self._world = World(self._settings['seed'], randomise=self._settings['randomise'])
        self._begins = -math.inf  # steady time at which the episode of a task begins [s]
        self._command = (0.0, 0.0, -math.inf)  # m/s, rad/s, steady time of receipt [s]
        self._stop = threading.Event()
        self._reset_wanted, self._reset_done = threading.Event(), threading.Event()
        self._episodes: Episodes | None = None
        self._steps = self._images = self._collisions = self._brakings = self._resets = 0
        self._late_before, self._dropped_before = 0, 0.0
        self._render_time = 0.0
        self._make_publishers()
        kind, callback = ((TwistStamped, self._on_twist_stamped) if self._settings['enable_stamped_cmd_vel']
                          else (Twist, self._on_twist))
        self.create_subscription(kind, 'cmd_vel', callback, qos.COMMAND)
        self._diagnostics = diagnostics.Diagnostics(
            self, {'simulation': self._report_simulation, 'commands': self._report_commands},
            self._settings[DIAGNOSTICS_PERIOD.name])
        self._futures = TrueFutures(
            self, self._observations, self._settings['what_if_horizon_s'], self._next_seed)
        realtime.apply(self.get_logger(), self._settings['realtime_priority'], all_threads=True)
        self._pacer = Pacer(SLICE, MAX_LAG)
        self._thread = threading.Thread(target=self._simulate, name='simulation', daemon=True)
        self._futures.start()
        self._thread.start()

    def on_shutdown(self) -> None:
        """End the threads."""
        self._stop.set()
        self._futures.stop()
        self._thread.join()

    def _on_change(self, name: str, value: Any) -> None:
        if name == 'deadline_s':
            self._judge.deadline = value

    def _make_publishers(self) -> None:
        self._image = self.create_publisher(Image, 'camera/image_raw', qos.CAMERA)
        self._compressed = self.create_publisher(CompressedImage, 'camera/image_raw/compressed', qos.CAMERA)
        self._camera_info = self.create_publisher(CameraInfo, 'camera/camera_info', qos.CAMERA)
        self._odometry = self.create_publisher(Odometry, 'odom', qos.STATUS)
        self._ground_truth = self.create_publisher(Odometry, 'sim/ground_truth', qos.STATUS)
        self._objects = self.create_publisher(MarkerArray, 'sim/objects', qos.LATCHED)
        if task := self._settings['task']:
            told = self.create_publisher(Task, 'task', qos.LATCHED)
            judgement = self.create_publisher(String, 'sim/judgement', qos.LATCHED)
            self._episodes = Episodes(task, told.publish, lambda text: judgement.publish(String(data=text)))
        # Same QoS as rclpy's own /clock subscription: best effort, depth 1.
        self._clock_publisher = (self.create_publisher(Clock, '/clock', qos.CAMERA)
                                 if self._settings['publish_clock'] else None)

    def _on_twist_stamped(self, message: TwistStamped) -> None:
        now = time.monotonic()
        self._judge.received(nanoseconds(message.header.stamp), now)
        self._take(message.twist, now)

    def _on_twist(self, message: Twist) -> None:
        now = time.monotonic()
        self._judge.received(0, now)
        self._take(message, now)

    def _take(self, twist: Twist, now: float) -> None:
        v, w = twist.linear.x, twist.angular.z
        self._silences.end(now)
        if (v, w) != (0.0, 0.0):
            self._silences.begin(now)
        if not (math.isfinite(v) and math.isfinite(w)):
            self.refusals.count('cmd_vel: not finite')
            return
        # As the motors of a base would limit any command.
        self._command = (
            min(max(v, LIMITS.v_min), LIMITS.v_max), min(max(w, -LIMITS.w_max), LIMITS.w_max), now)

    def _next_seed(self) -> int:
        self._reset_done.clear()
        self._reset_wanted.set()
        if not self._reset_done.wait(RESET_TIMEOUT):
            raise TimeoutError(f'the simulation did not reset within {RESET_TIMEOUT} s: see the log of '
                               f'{self.get_name()}')
        return self._world.seed

    def _simulate(self) -> None:
        # Below the threads that receive commands, here and in other robots; each needs a core for less than a millisecond.
        realtime.apply(self.get_logger(), self._settings['realtime_priority'] - 1)
        self._camera_rate, self._odometry_rate, self._marker_rate = Rate(), Rate(), Rate()
        self._begin_episode(self._settings['seed'])
        self._render()  # creates this thread's OpenGL context, which takes longer than a step may
        while not self._stop.is_set():
            try:
                self._step(self._pacer.next())
            except Exception as error:
                # One bad image or message must not end the simulation.
                self.refusals.count(f'exception: {type(error).__name__} in the simulation')
                self.get_logger().error(
                    f'a step of the simulation failed: {error!r}', **at_most_every(5.0))

    def _begin_episode(self, seed: int) -> None:
        if self._episodes:
            self._episodes.begin(self._world, seed)
            self._begins = time.monotonic() + PAUSE
        elif self._world.seed != seed:
            self._world.reset(seed)
        self._command = (0.0, 0.0, -math.inf)
        self._wheels = WheelOdometry(self._world)
        self._picture: np.ndarray | None = None
        self._observations.clear()
        # Forks are made from this static copy, not from the world that this thread advances.
        self._episode = self._world.fork()

    def _step(self, due: float) -> None:
        if self._reset_wanted.is_set():
            self._reset_wanted.clear()
            self._begin_episode(self._world.seed + 1)
            self._publish_objects(self._stamp(due))
            self._resets += 1
            self._reset_done.set()
        self._steps += 1
        stamp = self._stamp(due)
        if self._clock_publisher and not self._settings['clock_stop']:
            self._clock_publisher.publish(Clock(clock=time_message(stamp)))
        if due < self._begins:
            return
        collided = self._world.collided
        self._world.step(self._action(due), SLICE)
        self._collisions += self._world.collided and not collided
        if self._episodes and self._episodes.look():
            self._begin_episode(self._world.seed + 1)
            self._publish_objects(stamp)
            return
        elapsed = self._steps * SLICE
        # Before the image of the same time, which is used together with it.
        if self._odometry_rate.due(elapsed, ODOMETRY_RATE):
            self._ground_truth.publish(messages.odometry(self._world.pose, self._world.twist, stamp, 'world'))
            self._wheels.update(self._world)
            odometry = messages.odometry(self._wheels.pose, self._wheels.twist, stamp, f'{self._frame_prefix}odom')
            odometry.child_frame_id = self._settings['base_frame']
            self._odometry.publish(odometry)
        if self._camera_rate.due(elapsed, self._settings['camera_rate_hz']):
            self._take_picture(stamp, due)
        if self._marker_rate.due(elapsed, MOVING_MARKER_RATE if self._world.scene.movers else MARKER_RATE):
            self._publish_objects(stamp)

    def _action(self, now: float) -> tuple[float, float]:
        v, w, received = self._command
        timeout = self._settings['cmd_vel_timeout_s']
        if timeout and now - received > timeout:
            if (v, w) != (0.0, 0.0):
                self._brakings += 1
                self._command = (0.0, 0.0, received)
            return 0.0, 0.0
        return v, w

    def _stamp(self, due: float) -> int:
        """Return the stamp [ns] of the state due at a steady time [s]."""
        offset = round(self._settings['clock_offset_s'] * 1e9)
        if self._clock_publisher:
            return CLOCK_START + round(self._steps * SLICE * 1e9) + offset
        # When the state was due, not when this thread got to it: the delay is part of the camera's latency.
        return round(due * 1e9) + wall_minus_steady() + offset

    def _take_picture(self, stamp: int, due: float) -> None:
        settings = self._settings
        if settings['camera_stop']:
            return
        start = time.monotonic()
        frame = self._picture
        if frame is None or not settings['camera_freeze']:
            frame = self._picture = self._render()
        self._render_time = time.monotonic() - start
        # Both before publishing the image, so that no answer can arrive first.
        self._judge.observed(stamp, due)
        self._observations.add(Observation(stamp, self._world.snapshot(), self._episode))
        message, info = messages.image(frame, stamp), messages.camera_info(frame.shape[:2], stamp)
        message.header.frame_id = info.header.frame_id = self._frame_prefix + messages.CAMERA_FRAME
        spoil(message, settings)
        self._image.publish(message)
        self._camera_info.publish(info)
        if settings['publish_compressed']:
            self._compressed.publish(to_jpeg(frame, message.header.stamp, info.header.frame_id))
        self._images += 1

    def _render(self) -> np.ndarray:
        return self._world.render((self._settings['camera_height'], self._settings['camera_width']))

    def _publish_objects(self, stamp: int) -> None:
        self._objects.publish(messages.markers(self._world, stamp))

    def _report_simulation(self) -> diagnostics.Report:
        dropped, self._dropped_before = self._pacer.dropped - self._dropped_before, self._pacer.dropped
        level, message = diagnostics.OK, 'in real time'
        if dropped > 0.0:
            level = diagnostics.WARN
            message = (f'slower than real time: {dropped:.2f} s dropped; take smaller images, a lower '
                       'camera_rate_hz, or load off this machine')
        return diagnostics.Report(level, message, {
            'seed': self._world.seed, 'simulated_s': self._steps * SLICE, 'dropped_s': self._pacer.dropped,
            'images': self._images, 'render_ms': self._render_time * 1e3, 'collisions': self._collisions,
            'resets': self._resets})

    def _report_commands(self) -> diagnostics.Report:
        tally = self._judge.tally()
        p50, p99, greatest = (np.percentile(tally.window, (50, 99, 100)) * 1e3 if len(tally.window)
                              else (math.nan,) * 3)
        late = tally.late - self._late_before
        self._late_before = tally.late
        level, message = ((diagnostics.WARN, f'{late} of the last commands were late') if late
                          else (diagnostics.OK, 'on time'))
        return diagnostics.Report(level, message, {
            'received': tally.received, 'late': tally.late, 'without_observation': tally.unstamped,
            'unknown_observation': tally.unknown, 'deadline_ms': self._judge.deadline * 1e3,
            'latency_p50_ms': p50, 'latency_p99_ms': p99, 'latency_max_ms': greatest,
            # One per command since the last report, for the whole distribution.
            'late_commands': ' '.join(f'{captured:.6f}:{received:.6f}' for captured, received in tally.late_ones),
            'latencies_ms': ' '.join(f'{latency * 1e3:.3f}' for latency in tally.fresh),
            'silences': self._silences.tell(), 'brakings': self._brakings, **self.refusals.values()})


def main() -> int:
    """Run the node; return the exit code of the process."""
    realtime.share_one_heap()
    # The simulation may delay a command by this much each time its callback needs the GIL; Python's default of 5 ms is most of
    # what the gate reserves for delivery.
    sys.setswitchinterval(realtime.SWITCH_INTERVAL)
    return run(SimRobot)
