"""
Controls a robot with a world model: images and executed actions in, commands and predicted futures out, by a deadline.

The executor's thread only receives, and answers when the engine is late. The engine, the publishing of images and the slow
services each have their own thread.
"""

import functools
import gc
import ssl  # noqa: F401  before rclpy, whose libraries may load another OpenSSL, which Python's ssl would then get
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from geometry_msgs.msg import PoseStamped
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from worldmodel_ros import realtime
from worldmodel_ros.control import pilot
from worldmodel_ros.control.deciding_worker import Decided, DecidingWorker
from worldmodel_ros.control.deliberation import Effort
from worldmodel_ros.control.ladder import Counts, Tier, Verdict
from worldmodel_ros.control.responder import Answer, Prediction, Responder
from worldmodel_ros.control.sight import Sight
from worldmodel_ros.control.task import Task, TaskError, in_words, to_goal, to_place, to_sight
from worldmodel_ros.control.terms import Reach, needs_odometry
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.faults import Faults, FaultyBackend
from worldmodel_ros.engine.loading import is_world
from worldmodel_ros.engine.session_folder import SessionFolder, default_folder
from worldmodel_ros.inputs import images
from worldmodel_ros.motion import PERIOD
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.msg import Task as TaskMessage
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import NS
from worldmodel_ros.nodes.common.parameters import Parameters
from worldmodel_ros.nodes.common.qos import CAMERA, STATUS
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.nodes.common.tasks import read_task
from worldmodel_ros.nodes.world_model.camera import CameraTopics
from worldmodel_ros.nodes.world_model.drive_to import DriveToServer
from worldmodel_ros.nodes.world_model.inputs import (
    ExecutedTopic, Intake, IntakeSettings, LargeImageAdvice, LatchedTopic, OdometryTopic, require_base)
from worldmodel_ros.nodes.world_model.open_world import World
from worldmodel_ros.nodes.world_model.outputs import Outputs, Statistics, judge
from worldmodel_ros.nodes.world_model.parameters import (
    ENGINE, base_limits, inconsistency, ladder_settings, parameters, set_faults)
from worldmodel_ros.nodes.world_model.services import Context, SlowServices
from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD
from worldmodel_ros.serving.client.failover import FailoverWorker
from worldmodel_ros.serving.client.network import server_address
from worldmodel_ros.serving.client.shared_model import SharedModel
from worldmodel_ros.srv import SetTask

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
IMAGE_TOPIC = 'camera/image_raw'
SESSIONS = 2  # at a time: the robot's and, for a moment, its replacement; eight may not fit into a GPU
_LOG_INTERVAL = 2.0  # s


def _contained(transition: Callable) -> Callable:
    """Log an exception of a transition, undo the transition, and fail; rclpy would swallow the exception silently."""
    @functools.wraps(transition)
    def run_transition(node: 'WorldModelNode', state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return transition(node, state)
        except Exception as error:
            trace = '' if isinstance(error, ModelError) else f'\n{traceback.format_exc()}'  # that one says what to do
            node.get_logger().error(f'{transition.__name__[3:]} failed: {error}{trace}')
            end_if_lost(error)
        node.release(keep_engine=transition.__name__ in ('on_activate', 'on_deactivate'))
        gc.collect()  # the next attempt needs the session's memory; only now, because the traceback kept it alive
        return FAILURE
    return run_transition


class WorldModelNode(LifecycleNode):
    """
    The lifecycle node: configure loads the model; activate begins to observe and, once there is a goal, to command. With an
    open world model (``open_world``) it predicts and answers, and never commands.

    ``load_engine`` is called in configure, with the parameters ENGINE by name; by default it is worldmodel_ros.engine.load.
    With the parameter ``forecast``, so is ``load_forecast``, by default engine.forecast.loading.load_forecast; commands are
    then decided on the forecast.
    """

    def __init__(self, load_engine: Callable[..., Any] | None = None, load_forecast: Callable[..., Any] | None = None,
                 **options: Any) -> None:
        super().__init__('world_model_node', **options)
        realtime.keep_freed_memory()  # for images
        self.refusals = diagnostics.Refusals()
        self._load_engine, self._load_forecast = load_engine or _load, load_forecast or _load_forecast
        self._engine: Any = None
        self._deciding: Deciding | None = None  # with a forecast
        self._world: World | None = None  # with an open world model
        self._activation: Activation | Any = None
        self._configured = ExitStack()  # undoes configure, as far as it came
        self._faults = Faults()
        self._settings = Parameters(
            self, parameters(lambda: self._engine is not None, self._goal_refusal), self._on_parameter,
            consistent=inconsistency)
        self._goal, self._task = self._settings['goal'], Task()
        self.goals_set = 0  # incremented with every goal and task
        self._warm_up = 0.0
        self._statistics = Statistics()
        diagnostics.Diagnostics(self, {'world model': self._report}, self._settings[DIAGNOSTICS_PERIOD.name])
        self.create_service(Trigger, '~/reset', self._on_reset)
        self.create_service(SetTask, '~/set_task', self._on_set_task)
        self._slow_services = SlowServices(self)
        self._drive_to = DriveToServer(self)

    @_contained
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the model and measure it; subscribe."""
        settings, undo = self._settings, self._configured
        start = time.monotonic()
        engine = self._engine = self._load_engine(**{name: settings[name] for name in ENGINE})
        if is_world(settings['model']):
            self._configure_world(start)
            return super().on_configure(state)
        undo.callback(engine.close)
        spec = engine.spec
        require_base(spec)
        if refusal := self._goal_refusal(self._goal):
            raise ValueError(f'goal: {refusal}')
        images.converter()
        loaded = time.monotonic()
        # After loading, which can take half a minute of a core, and before the warm-up, whose measured times it changes. For
        # all threads: DDS receives in its own threads, and an image that waits for a core there is late already. The engine's
        # thread inherits it.
        realtime.apply(self.get_logger(), settings['realtime_priority'], all_threads=True)
        engine.warm_up()
        if settings['forecast']:
            self._deciding = self._load_deciding()
            undo.callback(self._deciding.odometry.destroy)
            self._task = self._task if self._task.terms else to_goal(self._goal)
        elif self._task.terms:  # from before the last cleanup
            self._goal = self._goal if self._task == to_goal(self._goal) else ''
            self._task = Task()
        self._warm_up = time.monotonic() - loaded
        if settings['allow_faults']:
            engine.backend = FaultyBackend(engine.backend, self._faults)
            set_faults(self._faults, settings)
        self._outputs = Outputs(self, spec.action_names, spec.step_period, settings['base_frame'])
        undo.callback(self._outputs.destroy)
        self._subscribe()
        two, one = (engine.step_times.predict(steps) * 1e3 for steps in (2, 1))
        rate = engine.step_times.prediction_rate(spec.step_period)
        self.get_logger().info(
            f'model {spec.name} on {engine.backend.name}: loaded in {loaded - start:.1f} s, warmed up in '
            f'{self._warm_up:.1f} s; a tick takes {two:.1f} ms with two steps, {one:.1f} ms with one; predictions at '
            f'up to {rate:.1f} Hz; goals: '
            f'{", ".join(spec.goals)}')
        if self._deciding:
            two, one, none = (self._deciding.times.predict(effort) * 1e3
                              for effort in (Effort.THREE_ROUNDS, Effort.ONE_ROUND, None))
            self.get_logger().info(
                f'commands are decided on the scene forecast {self._deciding.forecasts.name} '
                f'({self._deciding.forecasts.backend}): {two:.1f} ms in two steps, {one:.1f} ms in one, '
                f'{none:.1f} ms without comparing; ~/set_task takes tasks')
        return super().on_configure(state)

    def _configure_world(self, start: float) -> None:
        world, settings = self._engine, self._settings
        self._configured.callback(world.close)
        if wrong := next((name for name in ('forecast', 'server') if settings[name]), ''):
            raise ValueError(f'{wrong} is set, and an open world model drives nothing: leave it empty')
        if refusal := self._goal_refusal(self._goal):
            raise ValueError(f'goal: {refusal}')
        images.converter()
        self._world = World(self, world, settings, self.refusals)
        self._configured.callback(self._world.destroy)
        self._subscribe()
        self.get_logger().info(
            f'open world model {world.spec.name} ({world.preset.name}) on {world.backend}: loaded in '
            f'{time.monotonic() - start:.1f} s; images of {world.spec.image_size[0]}x{world.spec.image_size[1]} at '
            f'{1.0 / world.spec.step_period:.0f} Hz; it predicts, and commands nothing')

    def _load_deciding(self) -> 'Deciding':
        settings, spec = self._settings, self._engine.spec
        if spec.step_period > PERIOD:
            raise ValueError(f'model {spec.name} has a step of {spec.step_period} s, and commands decided on a forecast are '
                             f'{PERIOD} s apart: choose a model with a step of at most that')
        forecasts = self._load_forecast(settings['forecast'], settings['backend'], settings['threads']).fitted(
            spec.image_size, spec.step_period)
        if None not in (forecasts.camera, spec.camera) and forecasts.camera != spec.camera:
            raise ValueError(f'forecast {forecasts.name} was trained with {forecasts.camera}, model {spec.name} with '
                             f'{spec.camera}: choose models that go together')
        if unknown := set(spec.goals) - {slot.name for slot in pilot.SLOTS}:
            raise ValueError(f'the forecast knows nothing of the goals {", ".join(sorted(unknown))} of model {spec.name}')
        times = pilot.deciding_times()
        pilot.warm_up(forecasts.open, spec.image_size, times)
        return Deciding(forecasts, times, OdometryTopic(self, spec, self.refusals))

    @_contained
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin a new episode with an empty session."""
        self._activation = self._world.activation(self._executed, self._advice) if self._world else Activation(
            self, self._engine, self._settings, self._goal, self._task, self._executed, self._camera, self._outputs,
            self._advice, self.refusals, self._deciding)
        self._statistics = self._activation.statistics
        result = super().on_activate(state)
        self._activation.start()
        self._slow_services.context = self._context_of_services()
        self._drive_to.driver = self if self._deciding else None
        return result

    @_contained
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Request a stop, and end observing."""
        self.release(keep_engine=True)
        return super().on_deactivate(state)

    @_contained
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Release the model."""
        self.release(keep_engine=False)
        return SUCCESS

    @_contained
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Deactivate and clean up, from any state."""
        self.release(keep_engine=False)
        return SUCCESS

    def destroy_node(self) -> None:
        """End the threads and destroy the node."""
        self.release(keep_engine=False)
        self._slow_services.stop()
        self._drive_to.stop()
        super().destroy_node()

    def release(self, keep_engine: bool) -> None:
        """Undo activate, and configure unless ``keep_engine``, as far as they came."""
        self._slow_services.context = self._drive_to.driver = None
        activation, self._activation = self._activation, None
        try:
            if activation:
                activation.stop()
        finally:
            if not keep_engine:
                self._engine = self._deciding = self._world = None
                self._configured.close()
                gc.collect()

    def _subscribe(self) -> None:
        settings, spec, undo = self._settings, self._engine.spec, self._configured
        compressed = settings['image_transport'] == 'compressed'
        topic = self.resolve_topic_name(IMAGE_TOPIC) + ('/compressed' if compressed else '')
        self._advice = LargeImageAdvice(self, topic)
        self._camera = CameraTopics(self, topic, spec, settings, self._on_camera)
        undo.callback(self._camera.destroy)
        camera = self.create_subscription(CompressedImage if compressed else Image, topic, self._on_image, CAMERA)
        undo.callback(self.destroy_subscription, camera)
        self._executed = ExecutedTopic(self, spec, settings, self.refusals)
        undo.callback(self._executed.destroy)
        undo.callback(LatchedTopic(self, String, 'goal', lambda message: self._on_goal(message.data)).destroy)
        undo.callback(self.destroy_subscription,
                      self.create_subscription(PoseStamped, 'goal_pose', self._on_goal_pose, STATUS))
        if self._deciding:
            undo.callback(LatchedTopic(self, TaskMessage, 'task', self._on_task).destroy)

    def _on_image(self, message: Image | CompressedImage) -> None:
        if self._activation:
            self._activation.take(message)

    def _on_camera(self) -> None:
        if self._activation:
            self._activation.camera_changed()

    def _on_goal(self, goal: str) -> None:
        goal = goal.strip()
        if refusal := self._goal_refusal(goal):
            self.refusals.count('goal: unknown')
            self.get_logger().warning(f'goal refused: {refusal}', **at_most_every(_LOG_INTERVAL))
        else:
            self._set_goal(goal)

    def _on_goal_pose(self, message: PoseStamped) -> None:
        try:
            self.drive('', self.place_of(message))
        except TaskError as error:
            self.refusals.count('goal_pose')
            self.get_logger().warning(f'goal_pose refused: {error}', **at_most_every(_LOG_INTERVAL))

    def _goal_refusal(self, goal: str) -> str | None:
        if self._engine is None or not goal or goal in self._engine.spec.goals:
            return None
        known = ', '.join(self._engine.spec.goals) or 'none, for it has no policy'
        return f'{goal!r} is unknown; this model knows {known}'

    def _set_goal(self, goal: str) -> None:
        task = to_goal(goal) if self._deciding else Task()
        if (goal, task) == (self._goal, self._task):
            return
        self.get_logger().info(f'goal: {goal or "none"}')
        self._take(goal, task)

    def _take(self, goal: str, task: Task) -> None:
        self._goal, self._task = goal, task
        self.goals_set += 1
        if self._activation:
            self._activation.set_goal(goal, task)

    def place_of(self, pose: PoseStamped) -> Task:
        """Return the task of driving to a pose; a quaternion of zeros leaves the orientation open. Raises TaskError."""
        if self._deciding is None:
            raise TaskError('a pose needs a forecast of the scene: set the parameter forecast, and configure the node')
        return to_place(self._deciding.odometry.place(pose, self._settings['base_frame']))

    def task_of_image(self, image: Image) -> Task:
        """Return the task of driving to where the camera sees ``image``, which is corrected like the camera's images.
        Thread-safe. Raises TaskError."""
        deciding, activation = self._deciding, self._activation
        if deciding is None or activation is None:
            raise TaskError('an image needs a forecast of the scene: set the parameter forecast, and activate the node')
        try:
            pixels = images.read(image, deciding.forecasts.image_size, activation.intake.frames.view)
        except images.ImageError as error:
            raise TaskError(f'the image is not understood: {error}') from None
        return to_sight(Sight.of(deciding.forecasts.open(), pixels), pilot.STANDING)

    def drive(self, goal: str, task: Task) -> None:
        """Drive to a goal, or by a task if ``goal`` is empty, from the next image on. Raises TaskError."""
        if self._deciding is None:
            raise TaskError('tasks need a forecast of the scene: set the parameter forecast, and configure the node')
        if goal and (refusal := self._goal_refusal(goal)):
            raise TaskError(refusal)
        if needs_odometry(task.terms) and (reason := self._deciding.odometry.degraded_reason()):
            raise TaskError(f'a place or region needs odometry, and {reason}')
        # If the task is to reach a goal that the world model knows, its predictions report progress towards that goal.
        goal = next((term.target for term in task.terms
                     if isinstance(term, Reach) and term.target in self._engine.spec.goals), '')
        self.get_logger().info(f'task {task.name!r}: {in_words(task)}')
        self._take(goal, task)

    def stand(self) -> None:
        """Clear the goal and stop at once."""
        self._set_goal('')

    def newest_decision(self) -> Decided | None:
        """Return how the newest command was decided; None while the node is not active or has decided nothing."""
        activation = self._activation
        return activation.newest_decision if activation else None

    def _on_task(self, message: TaskMessage) -> None:
        try:
            self._set_task(message)
        except TaskError as error:
            self.get_logger().warning(f'task refused: {error}', **at_most_every(_LOG_INTERVAL))

    def _on_set_task(self, request: SetTask.Request, response: SetTask.Response) -> SetTask.Response:
        try:
            response.success, response.message = True, self._set_task(request.task)
        except TaskError as error:
            response.success, response.message = False, str(error)
        return response

    def _set_task(self, message: TaskMessage) -> str:
        """Drive by a task from the next image on; return the task in words. Raises TaskError."""
        try:
            task = read_task(message)
            self.drive('', task)
        except TaskError:
            self.refusals.count('task')
            raise
        return in_words(task)

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._activation is None:
            response.message = 'the node is not active, so there is no session: activate it'
            return response
        self._activation.intake.begin_episode()
        response.success, response.message = True, 'a new episode begins with the next image'
        return response

    def _on_parameter(self, name: str, value: Any) -> None:
        if name == 'goal':
            self._set_goal(value)
        elif name.startswith('fault_'):
            set_faults(self._faults, self._settings)
        elif self._activation:
            self._activation.settings_changed()
            self._slow_services.context = self._context_of_services()

    def _context_of_services(self) -> Context:
        activation, settings = self._activation, self._settings
        folder = settings['session_directory']
        return Context(
            activation.worker, activation.intake, self._engine.spec, settings['base_frame'], settings['what_if_horizon_s'],
            settings['what_if_timeout_s'], settings['what_if_denoising_steps'],
            lambda: SessionFolder(Path(folder).expanduser() if folder else default_folder(),
                                  settings['session_files_max'], settings['session_disk_mb']))

    def _report(self) -> diagnostics.Report:
        engine, activation = self._engine, self._activation
        if engine is None:
            return diagnostics.Report(diagnostics.STALE, 'not configured', self.refusals.values())
        if self._world:
            return self._world.report(activation)
        backend = activation.worker.backend if activation else engine.backend.name
        values = {'model': engine.spec.name, 'backend': backend, 'goal': self._goal, 'warmup_s': self._warm_up,
                  'messages_skipped': self._outputs.skipped,
                  'ticks_moved_ms': activation.intake.frames.moved * 1e3 if activation else 0.0,
                  'tick_two_step_ms': engine.step_times.predict(2) * 1e3,
                  'tick_one_step_ms': engine.step_times.predict(1) * 1e3,
                  'predictions_possible_hz': engine.step_times.prediction_rate(engine.spec.step_period),
                  **self._camera.values(),
                  **self._statistics.values(time.monotonic(), engine.spec.step_period), **self.refusals.values()}
        if self._deciding:
            values |= self._deciding.values(activation, self._task)
        level, text = judge(engine, activation) if activation else (diagnostics.STALE, 'not active')
        return diagnostics.Report(level, text, values)


def _load(**chosen: Any) -> Any:
    from worldmodel_ros.engine.loading import load, load_world
    if is_world(chosen['model']):
        return load_world(**chosen)
    return load(**chosen, sessions=SESSIONS)


def _load_forecast(name: str, backend: str, threads: int) -> Any:
    from worldmodel_ros.engine.forecast.loading import load_forecast
    return load_forecast(name, backend, threads)


class Deciding:
    """What decisions need: ``forecasts``, the measured ``times`` of decisions, and the ``odometry`` topic."""

    def __init__(self, forecasts: Any, times: Any, odometry: OdometryTopic) -> None:
        self.forecasts, self.times, self.odometry = forecasts, times, odometry

    def values(self, activation: 'Activation | None', task: Task) -> dict[str, Any]:
        """Return key-value pairs of a diagnostics report."""
        measured = activation is not None and activation.worker.measures_odometry
        return {'forecast': self.forecasts.name, 'forecast_backend': self.forecasts.backend, 'task': in_words(task),
                'odometry': self.odometry.in_words(measured),
                **{f'tick_{tier}_ms': self.times.predict(Effort.of(task.terms, steps)) * 1e3
                   for tier, steps in (('two_step', 2), ('one_step', 1), ('plan_only', 0))}}


class Activation:
    """
    One activation of a node: a new episode, with an empty session.

    ``settings`` are the node's parameters, read here and in ``settings_changed``. A failed construction leaves nothing behind.
    It is a ``control.responder.Listener``; except for the methods of that, call its methods on the executor's thread.
    """

    def __init__(self, node: LifecycleNode, engine: Any, settings: Mapping[str, Any], goal: str, task: Task,
                 executed: ExecutedTopic, camera: CameraTopics, outputs: Outputs, advice: LargeImageAdvice, refusals: Refusals,
                 deciding: Deciding | None = None) -> None:
        self._node, self._settings, self.executed, self.camera = node, settings, executed, camera
        self._outputs, self._advice, self._refusals = outputs, advice, refusals
        self.missing_input = ''  # why the robot is stopped for lack of observations
        self.newest_decision: Decided | None = None
        self.statistics = Statistics()
        self.intake = Intake(engine.spec, IntakeSettings.of(settings), executed.actions,
                             lambda: node.get_clock().now().nanoseconds, refusals, advice, node.get_logger())
        self.intake.goal, self.intake.task = goal, task
        self.intake.frames.view = camera.correction.view
        self.responder = Responder(self, ladder_settings(settings), engine.spec.step_period)
        self._camera_timeout = settings['camera_timeout_s']
        self.worker = make_worker(node, settings, engine, executed.actions, self.responder, self, deciding)
        self._undo = ExitStack()

    def start(self) -> None:
        """Begin to answer; ``stop`` also undoes a partly failed start."""
        undo = self._undo
        undo.callback(self._outputs.stop)
        self._outputs.start()
        undo.callback(self.worker.stop)
        self.worker.start()
        self._begun = time.monotonic()
        self._answer_timer = OneShot(self._node, self.responder.overdue)
        undo.callback(self._answer_timer.destroy)
        self._camera_timer = OneShot(self._node, self._on_camera_silent)
        undo.callback(self._camera_timer.destroy)
        self._camera_timer.arm(self._camera_timeout)
        # What exists now lives until the node is deactivated; traversing it in each collection would cost milliseconds.
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)

    def stop(self) -> None:
        """Request a stop, if there is a goal, and end the threads."""
        with self._undo:
            self._halt(Tier.STOP if self._drives else Tier.NONE, Verdict.IDLE, 'the node is being deactivated')

    def take(self, message: Image | CompressedImage) -> None:
        """Submit an image as an observation, if it is a tick."""
        self.intake.frames.size = self.worker.image_size
        sound, observation = self.intake.take(message)
        if sound:
            self._camera_timer.arm(self._camera_timeout)
        if self.intake.frames.frozen:
            self._stop_for_missing_input('the camera is frozen: it repeats one image although the robot moves, or although '
                                         'its images have differed by noise before')
        if observation is None:
            return
        self.missing_input = observation.stale
        self.statistics.image(observation, self.intake.delay)
        if observation.wants_answer:
            self._answer_timer.arm(observation.due - self.responder.settings.reserve - time.monotonic())
        # Last, because from here on the engine's thread competes for the GIL.
        self.statistics.dropped += self.worker.submit(observation)

    @property
    def _drives(self) -> bool:
        return bool(self.intake.goal or self.intake.task.terms)

    def set_goal(self, goal: str, task: Task) -> None:
        """Drive to another goal, or by another task, from the next image on; stop at once if both are empty."""
        self.intake.goal, self.intake.task = goal, task
        if not self._drives:
            self._halt(Tier.STOP, Verdict.IDLE, 'the goal was cleared')

    def camera_changed(self) -> None:
        """Correct images by the newest calibration, in a new episode: images of the former view are not a valid history."""
        self.intake.frames.view = self.camera.correction.view
        self.intake.begin_episode()

    def settings_changed(self) -> None:
        """Apply the current parameters."""
        self.intake.settings = IntakeSettings.of(self._settings)
        self.responder.settings = ladder_settings(self._settings)
        self._camera_timeout = self._settings['camera_timeout_s']
        if isinstance(self.worker, DecidingWorker):
            self.worker.limits = base_limits(self._settings)

    def answered(self, answer: Answer) -> None:
        """Publish an answer, the command first. Called on the engine's or the executor's thread, one at a time."""
        self._outputs.command(answer)
        age = self._node.get_clock().now().nanoseconds / NS - answer.stamp / NS if answer.stamp else 0.0
        self.executed.commanded(answer, time.monotonic())
        self.statistics.answered(answer, age)
        self._outputs.status(answer, age, self.intake.camera_frame)

    def predicted(self, prediction: Prediction) -> None:
        """Publish a predicted future."""
        self.statistics.predicted(time.monotonic())
        self._outputs.prediction(prediction, self.intake.camera_frame)

    def decided(self, decided: Decided) -> None:
        """Publish how a command was decided."""
        self.newest_decision = decided
        self._outputs.decided(decided)

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Report a contained failure of the engine. Does not return if the GPU is lost."""
        end_if_lost(error)
        self._refusals.count(f'engine: {type(error).__name__}')
        self._node.get_logger().error(
            f'the engine failed: {reason}\n{"".join(traceback.format_exception(error))}',
            **at_most_every(_LOG_INTERVAL))
        if restarted:
            self.intake.begin_episode()

    def _on_camera_silent(self) -> None:
        silent = self._camera_timeout
        self._camera_timer.arm(silent)
        self._stop_for_missing_input(f'no image that can be used has come for {silent:g} s')
        self._advice.silent(time.monotonic() - self._begun)

    def _stop_for_missing_input(self, reason: str) -> None:
        """Stop once, but report the reason as long as it lasts."""
        first, self.missing_input = reason != self.missing_input, reason
        if first:
            self._node.get_logger().warning(f'{reason}: commanding nothing but a stop')
        self._halt(Tier.STOP if first and self._drives else Tier.NONE, Verdict.STALE_INPUT, reason)

    def _halt(self, tier: Tier, verdict: Verdict, reason: str) -> None:
        # The stamp of the newest observation keeps the stop in order with earlier commands.
        intake = self.intake
        self.responder.halt(
            Answer(intake.stamp, intake.episode, intake.next_sequence(), tier, verdict, reason, Counts()))


class OneShot:
    """
    A one-shot timer on the node's executor, by the steady clock, so independent of ROS time.

    It costs nothing while it waits, unlike polling with a periodic timer.
    """

    def __init__(self, node: Node, callback: Callable[[], None]) -> None:
        self._node, self._callback = node, callback
        self._timer = node.create_timer(3600.0, self._fire, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()

    def arm(self, seconds: float) -> None:
        """Fire in ``seconds``, instead of when armed before. Call it on the executor's thread."""
        self._timer.timer_period_ns = max(1, round(seconds * NS))
        self._timer.reset()

    def destroy(self) -> None:
        """Destroy the timer; it never fires again."""
        self._timer.cancel()
        self._node.destroy_timer(self._timer)

    def _fire(self) -> None:
        self._timer.cancel()
        self._callback()


def make_worker(node: Node, settings: Mapping[str, Any], engine: Any, executed: Any, responder: Responder,
                listener: 'Activation', deciding: Deciding | None = None) -> Worker | FailoverWorker:
    """
    Return the worker for the observations, as the parameters ``forecast`` and ``server`` say: local, with decisions on a
    forecast if there is one, or on a shared server. ``executed``: the ExecutedActions.

    With both, the robot decides and the server predicts the outcome of its decisions (docs/decisions.md).
    """
    logger = node.get_logger()
    files = tuple(settings[name] for name in ('server_token_file', 'server_ca_file', 'server_certificate_file'))
    server = settings['server'] and server_address(settings['server'], *files)
    name = node.get_fully_qualified_name()

    def say(text: str) -> None:
        if worker.degraded_reason:
            logger.warning(text)
        else:
            logger.info(text)

    if deciding:
        shared = SharedModel(server, name, engine.spec, executed.mean, responder, listener, say, files) if server else None
        worker = DecidingWorker(engine, executed, responder, listener, deciding.forecasts.open, deciding.times,
                                deciding.odometry.readings.at, settings['command_delay_s'],
                                rounds=settings['candidate_rounds'], shared=shared,
                                candidates=settings['candidates'], limits=base_limits(settings))
        return worker
    own = worker = Worker(engine, executed.mean, responder, listener)
    if server:
        worker = FailoverWorker(server, name, own, engine.spec, executed.mean, responder, listener, say,
                                listener.intake.frames.come_earlier, files)
    return worker


def main() -> int:
    """Run the node until SIGINT or SIGTERM."""
    sys.setswitchinterval(realtime.SWITCH_INTERVAL)  # the engine's thread may hold the GIL while an answer is due in this one
    return run(WorldModelNode)
