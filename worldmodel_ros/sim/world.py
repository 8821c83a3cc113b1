"""The simulated world: steps the physics, renders the cameras, gives the true state, and forks."""
import copy
import math
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.safety.motion import TwistLimits
from worldmodel_ros.sim import mjcf
from worldmodel_ros.sim.gl import mujoco
from worldmodel_ros.sim.movers import Ball, Shuttle
from worldmodel_ros.sim.render import thread_renderer
from worldmodel_ros.sim.scene import CAMERA_FOV_DEG, COLOURS, Scene, TRACK, WHEEL_RADIUS, sample_scene

TIMESTEP = 0.005  # s, of the physics
LIMITS = TwistLimits(v_min=-0.3, v_max=0.6, w_max=1.5, a_max=1.5, alpha_max=6.0)
MIN_IMAGE, MAX_IMAGE = 16, 1280  # pixels, either side of an image

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_SETTLE_STEPS = 20
_CONTACT_STEPS = 4  # physics steps between checks of the contacts
_BASE_QPOS = 3 * len(COLOURS)  # each object's three joints come first
# Largest angle from the optical axis at which a colour counts as visible: inside the image by two pixels of 64.
_VISIBLE_ANGLE = math.radians(CAMERA_FOV_DEG / 2 - 2.0)
# Points of an object that are tested for visibility, as fractions of its radius sideways and of its height.
_LOOK_AT = ((0.0, 0.6), (0.0, 0.95), (-0.7, 0.6), (0.7, 0.6), (-0.7, 0.9), (0.7, 0.9))
_SOLID_GROUP = np.array([1, 0, 0, 0, 0, 0], np.uint8)


@dataclass(frozen=True)
class Playback:
    """Outcome of T actions; entry t is the state after action t.

    frames: uint8 (T, H, W, 3) RGB. poses: float64 (T, 3), x and y in m and yaw in rad, as ``World.pose``.
    collided: bool (T,), contact with a wall or an object during the action.
    """

    frames: np.ndarray
    poses: np.ndarray
    collided: np.ndarray


class World:
    """A differential-drive robot with a camera, in a walled room with four coloured objects that it can push, and the scene's
    ``movers``, which move by themselves.

    Everything is determined by the seed and the actions, whatever was simulated before. A world and its forks may be used
    from several threads, each of them by one thread at a time.
    """

    colours = COLOURS

    def __init__(self, seed: int = 0, image_size: tuple[int, int] = (64, 64), randomise: bool = True) -> None:
        """``image_size`` is (height, width) in pixels. Without ``randomise`` only the layout follows the seed."""
        self.image_size = _checked_size(image_size)
        self._randomise = randomise
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed`` (an integer from 0): a room, its objects and the robot at rest.

        ``collided`` says whether anything touched the robot in the last ``step``, ``touched`` what: names of objects and
        movers, ``wall0`` to ``wall3``. A restored snapshot only has ``collided``.
        """
        self.load(sample_scene(seed, self._randomise))

    def load(self, scene: Scene) -> None:
        """Start an episode in a scene, such as one of ``task_scenes``, with its movers in motion."""
        self._scene = scene
        # A new model instead of a modified one: forks of the last episode keep theirs.
        self._model = mujoco.MjModel.from_xml_string(mjcf.to_mjcf(self._scene, TIMESTEP))
        self._data = mujoco.MjData(self._model)
        self._chassis = self._model.geom('chassis').id
        self._camera, self._top = self._model.camera('camera').id, self._model.camera('top').id
        self._shapes = dict(zip(COLOURS, scene.props, strict=True)) | {mover.name: mover for mover in scene.movers}
        self._bodies = {name: self._model.body(name).id for name in self._shapes}
        self._base = self._model.body('base').id
        self._wheels = [int(self._model.joint(name).qposadr[0]) for name in ('left', 'right')]
        self._shuttles = [(mover, self._model.actuator(f'{mover.name}_place').id)
                          for mover in scene.movers if isinstance(mover, Shuttle)]
        self._geom_names = {geom: self._model.geom(geom).name for geom in range(self._model.ngeom)}
        self._hold_movers()
        mujoco.mj_step(self._model, self._data, _SETTLE_STEPS)
        self._data.time = 0.0
        self._hold_movers()
        self.collided, self.touched = False, frozenset()
        self._update_positions()

    def _hold_movers(self) -> None:
        """Put every mover into its state at time 0."""
        for mover in self._scene.movers:
            if isinstance(mover, Ball):
                for axis, speed in zip('xy', mover.velocity, strict=True):
                    joint = self._model.joint(f'{mover.name}_{axis}')
                    self._data.qpos[joint.qposadr[0]], self._data.qvel[joint.dofadr[0]] = 0.0, speed
            else:
                joint = self._model.joint(mover.name)
                self._data.qpos[joint.qposadr[0]], self._data.qvel[joint.dofadr[0]] = mover.reference(0.0)
        self._drive_shuttles()

    def _drive_shuttles(self) -> None:
        for shuttle, actuator in self._shuttles:
            # The reference at the step's end, to which the actuators should have brought the shuttle.
            self._data.ctrl[actuator:actuator + 2] = shuttle.reference(self._data.time + TIMESTEP)

    @property
    def scene(self) -> Scene:
        """The scene that the seed determined."""
        return self._scene

    @property
    def seed(self) -> int:
        return self._scene.seed

    @property
    def time(self) -> float:
        """Seconds of simulated time since the reset."""
        return self._data.time

    @property
    def pose(self) -> tuple[float, float, float]:
        """x and y in m and yaw in rad (-pi..pi) of the robot; the room's centre is the origin."""
        q = self._data.qpos[_BASE_QPOS:_BASE_QPOS + 7].tolist()
        return q[0], q[1], math.atan2(2 * (q[3] * q[6] + q[4] * q[5]), 1 - 2 * (q[5] ** 2 + q[6] ** 2))

    @property
    def twist(self) -> tuple[float, float]:
        """True forward speed (m/s) and yaw rate (rad/s) of the robot."""
        yaw = self.pose[2]
        velocity = self._data.qvel[_BASE_QPOS:_BASE_QPOS + 6]
        return float(velocity[0] * math.cos(yaw) + velocity[1] * math.sin(yaw)), float(velocity[5])

    def step(self, action: np.ndarray, duration: float = 0.1) -> None:
        """Drive with ``action`` (2,), forward m/s and yaw rad/s, for ``duration`` s (a multiple of 5 ms).

        The motors follow within some 50 ms and saturate at their top speed; nothing else limits the action. Raises
        ValueError for an action that is not two finite numbers or another duration.
        """
        v, w = _checked_action(action)
        steps = round(duration / TIMESTEP)
        if steps < 1 or abs(steps * TIMESTEP - duration) > 1e-6:
            raise ValueError(f'the duration must be a multiple of {TIMESTEP} s above 0, got {duration}')
        left, right = self._scene.wheel_gain
        self._data.ctrl[0] = left * (v - w * TRACK / 2) / WHEEL_RADIUS
        self._data.ctrl[1] = right * (v + w * TRACK / 2) / WHEEL_RADIUS
        touched: set[str] = set()
        while steps > 0:
            self._step_physics(min(steps, _CONTACT_STEPS))
            steps -= _CONTACT_STEPS
            # Only walls, objects and movers can touch the chassis; the floor meets the wheels and casters.
            geoms = self._data.contact.geom
            touching = geoms[(geoms == self._chassis).any(1)]
            if len(touching):
                touched.update(self._geom_names[geom] for geom in touching.ravel().tolist() if geom != self._chassis)
        self.collided, self.touched = bool(touched), frozenset(touched)
        self._update_positions()

    def _step_physics(self, steps: int) -> None:
        if not self._shuttles:
            mujoco.mj_step(self._model, self._data, steps)
            return
        for _ in range(steps):
            self._drive_shuttles()
            mujoco.mj_step(self._model, self._data)

    def _update_positions(self) -> None:
        # mj_step leaves the positions of bodies and cameras one step behind the state.
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def render(self, size: tuple[int, int] | None = None) -> np.ndarray:
        """Return the robot's camera image, uint8 (H, W, 3) RGB; ``size`` is (height, width), by default that of the world.

        The same state gives the same image, noise included: the noise is determined by the seed and the time.
        """
        size = self.image_size if size is None else _checked_size(size)
        picture = thread_renderer(self._model).draw(self._model, self._data, self._camera, size)
        if self._scene.camera_noise == 0.0:
            return np.ascontiguousarray(picture)
        tick = round(self._data.time / TIMESTEP)
        rng = np.random.Generator(np.random.SFC64([self._scene.seed, tick]))
        noise = rng.standard_normal(picture.shape, np.float32)
        noise *= self._scene.camera_noise
        noise += picture
        np.rint(noise, out=noise)
        return np.clip(noise, 0, 255, out=noise).astype(np.uint8)

    def draw_camera(self, size: tuple[int, int], vertical_fov: float, higher: float = 0.0, lower_pitch: float = 0.0
                    ) -> np.ndarray:
        """Return the image of another camera in the robot's place: a pinhole of ``vertical_fov`` degrees, ``higher`` m higher
        and pitched down ``lower_pitch`` rad further; uint8 (H, W, 3) RGB of ``size`` (height, width), without noise."""
        model, data, camera = self._model, self._data, self._camera
        fov, place, turned = float(model.cam_fovy[camera]), model.cam_pos[camera].copy(), model.cam_quat[camera].copy()
        try:
            model.cam_fovy[camera] = vertical_fov
            model.cam_pos[camera, 2] += higher
            # The camera's own x axis points to the right: a negative turn about it looks further down.
            down = np.array([math.cos(lower_pitch / 2), -math.sin(lower_pitch / 2), 0.0, 0.0])
            mujoco.mju_mulQuat(model.cam_quat[camera], turned, down)
            mujoco.mj_camlight(model, data)
            return np.ascontiguousarray(thread_renderer(model).draw(model, data, camera, size))
        finally:
            model.cam_fovy[camera], model.cam_pos[camera], model.cam_quat[camera] = fov, place, turned
            mujoco.mj_camlight(model, data)

    def render_top(self, size: tuple[int, int] = (480, 480)) -> np.ndarray:
        """Return the room from above (x to the right, y up), uint8 (H, W, 3) RGB, without camera noise."""
        picture = thread_renderer(self._model).draw(self._model, self._data, self._top, _checked_size(size))
        return np.ascontiguousarray(picture)

    def top_pixels(self, points: np.ndarray, size: tuple[int, int] = (480, 480)) -> np.ndarray:
        """Return columns and rows, (N, 2) pixels, of floor points, (N, 2) in m, in ``render_top(size)``."""
        height, width = size
        half_view = math.radians(mjcf.top_camera_fov(self._scene)) / 2
        scale = height / (2 * mjcf.TOP_CAMERA_HEIGHT * math.tan(half_view))
        return np.asarray(points) * (scale, -scale) + (width / 2, height / 2)

    def position(self, colour: str) -> tuple[float, float]:
        """Return x and y in m of an object's centre. Raises ValueError for a colour that is not in the room."""
        x, y, _ = self._data.xpos[self._body(colour)].tolist()
        return x, y

    def velocity(self, name: str) -> tuple[float, float]:
        """Return the true velocity of a mover in m/s along x and y. Raises ValueError for a mover that is not in the room."""
        dof = self._model.body_dofadr[self._body(name)]
        match self._shapes[name]:
            case Ball():
                x, y = self._data.qvel[dof:dof + 2].tolist()
                return x, y
            case Shuttle(axis=axis):
                speed = float(self._data.qvel[dof])
                return (0.0, speed) if axis else (speed, 0.0)
        raise ValueError(f'{name!r} is no mover of the room')

    @property
    def wheel_angles(self) -> tuple[float, float]:
        """Rotation of the left and the right wheel since the reset, rad."""
        left, right = self._data.qpos[self._wheels].tolist()
        return left, right

    def heading(self, colour: str) -> float:
        """Return the yaw of an object in the room, rad in -pi..pi; objects turn when they are pushed."""
        matrix = self._data.xmat[self._body(colour)]
        return math.atan2(matrix[3], matrix[0])

    def goal_distance(self, colour: str) -> float:
        """Return the distance in m from the robot's centre to the object's."""
        x, y = self.position(colour)
        robot_x, robot_y, _ = self.pose
        return math.hypot(x - robot_x, y - robot_y)

    def goal_bearing(self, colour: str) -> float:
        """Return the direction of the object in base_link, rad in -pi..pi, positive to the left."""
        x, y = self.position(colour)
        robot_x, robot_y, yaw = self.pose
        return math.remainder(math.atan2(y - robot_y, x - robot_x) - yaw, math.tau)

    def visible(self, colour: str) -> bool:
        """Return whether the robot's camera sees a part of the object: in its view, and not behind another one."""
        body = self._body(colour)
        if abs(self.goal_bearing(colour)) > math.pi / 2:
            return False
        eye, axes = self._data.cam_xpos[self._camera], self._data.cam_xmat[self._camera].reshape(3, 3)
        x, y, z = self._data.xpos[body].tolist()
        shape = self._shapes[colour]
        away = math.atan2(y - eye[1], x - eye[0])
        points = np.array([
            (x - math.sin(away) * side * shape.radius, y + math.cos(away) * side * shape.radius,
             z + (up - 0.5) * shape.height) for side, up in _LOOK_AT])
        rays = points - eye
        sideways, _, backwards = (rays @ axes).T
        rays = rays[np.arctan2(np.abs(sideways), -backwards) < _VISIBLE_ANGLE]
        if not len(rays):
            return False
        geoms, distances = np.empty(len(rays), np.int32), np.empty(len(rays))
        mujoco.mj_multiRay(self._model, self._data, eye, rays.ravel(), _SOLID_GROUP, True, self._base, geoms,
                           distances, None, len(rays), mujoco.mjMAXVAL)
        return bool((self._model.geom_bodyid[geoms[geoms >= 0]] == body).any())

    def snapshot(self) -> np.ndarray:
        """Return the whole state as float64 (N,); ``restore`` goes back to it exactly."""
        state = np.empty(mujoco.mj_stateSize(self._model, _STATE))
        mujoco.mj_getState(self._model, self._data, state, _STATE)
        return np.concatenate(([self._scene.seed, self.collided], state))

    def restore(self, snapshot: np.ndarray) -> None:
        """Go back to a snapshot of this scene. Raises ValueError for one of another seed or length; nothing else tells scenes
        apart."""
        size = mujoco.mj_stateSize(self._model, _STATE) + 2
        if np.shape(snapshot) != (size,):
            raise ValueError(f'a snapshot has the shape ({size},), got {np.shape(snapshot)}')
        if snapshot[0] != float(self._scene.seed):
            raise ValueError(f'the snapshot is of seed {snapshot[0]:.0f}, the world of seed '
                             f'{self._scene.seed}: call reset({snapshot[0]:.0f}) first')
        mujoco.mj_setState(self._model, self._data, snapshot[2:], _STATE)
        self.collided, self.touched = bool(snapshot[1]), frozenset()
        self._update_positions()

    def move_robot(self, pose: tuple[float, float, float]) -> None:
        """Move the robot, as it is, to x and y in m and yaw in rad, without checking that there is room for it."""
        x, y, yaw = pose
        self._data.qpos[_BASE_QPOS:_BASE_QPOS + 2] = x, y
        self._data.qpos[_BASE_QPOS + 3:_BASE_QPOS + 7] = math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)
        self._update_positions()

    def fork(self) -> 'World':
        """Return an independent world in the same state; it shares what never changes in an episode."""
        fork = copy.copy(self)
        fork._data = mujoco.MjData(self._model)
        fork.restore(self.snapshot())
        return fork

    def play(self, actions: np.ndarray, period: float = 0.1) -> Playback:
        """Drive through ``actions`` (T, 2), each for ``period`` s, and return the outcome; advances this world."""
        actions = np.asarray(actions)
        if actions.ndim != 2 or actions.shape[1] != 2:
            raise ValueError(f'actions have the shape (T, 2), got {actions.shape}')
        frames = np.empty((len(actions), *self.image_size, 3), np.uint8)
        poses, collided = np.empty((len(actions), 3)), np.empty(len(actions), bool)
        for t, action in enumerate(actions):
            self.step(action, period)
            frames[t], poses[t], collided[t] = self.render(), self.pose, self.collided
        return Playback(frames, poses, collided)

    def _body(self, colour: str) -> int:
        try:
            return self._bodies[colour]
        except KeyError:
            choices = ', '.join(self._bodies)
            raise ValueError(f'there is no {colour!r} object in the room: choose one of {choices}') from None


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    height, width = (int(side) for side in size)
    if not (MIN_IMAGE <= height <= MAX_IMAGE and MIN_IMAGE <= width <= MAX_IMAGE):
        raise ValueError(
            f'an image has {MIN_IMAGE} to {MAX_IMAGE} pixels a side, got (height, width) = {size}')
    return height, width


def _checked_action(action: np.ndarray) -> tuple[float, float]:
    v, w = (float(x) for x in action) if np.shape(action) == (2,) else (math.nan, math.nan)
    if not (math.isfinite(v) and math.isfinite(w)):
        raise ValueError(f'an action is two finite numbers (m/s, rad/s), got {action}')
    return v, w
