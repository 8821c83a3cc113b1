"""Camera poses: which are taken, the actions that they mean, and the rays of their pixels."""
import math
from dataclasses import replace

import numpy as np
import pytest
from camera_paths import INTRINSICS, camera, commands, mounted, path

from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.gateway import poses

MOUNT = (0.10, 0.0, 0.25, 0.0, 0.1396, 0.0)
SIX = replace(TINY, name='six', action_names=('linear.x', 'linear.y', 'linear.z', 'angular.x', 'angular.y', 'angular.z'),
              action_low=(-1.0,) * 6, action_high=(1.0,) * 6)


def turned(degrees, axis=2):
    a, b = [k for k in range(3) if k != axis]
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    pose = np.eye(4)
    pose[a, a] = pose[b, b] = c
    pose[a, b], pose[b, a] = -s, s
    return pose


def test_the_mount_is_the_one_of_the_simulated_robot():
    assert np.allclose(poses.mount_pose(MOUNT), mounted(), atol=1e-12)
    from worldmodel_ros.sim import scene
    assert MOUNT[:3] == (scene.CAMERA_X, 0.0, scene.CAMERA_Z) and MOUNT[4] == pytest.approx(scene.CAMERA_PITCH, abs=1e-4)


def test_the_path_of_a_robots_camera_gives_back_its_commands():
    given = commands(40)
    sent, _ = poses.read(camera(path(given)))
    mount = poses.mount_pose(MOUNT)
    actions, bases = poses.follow(poses.base_of(sent[0], mount), sent[1:], mount, TINY)
    assert np.allclose(actions, given, atol=1e-5) and actions.dtype == np.float32
    assert np.allclose(bases @ mount, sent[1:], atol=1e-6)


def test_a_model_with_all_six_motions_follows_any_path():
    rng = np.random.default_rng(0)
    given = rng.uniform(-0.9, 0.9, (30, 6))
    pose, wanted = np.eye(4), []
    for motion in given:
        for _ in range(500):
            step = np.eye(4)
            step[:3, :3] += np.cross(np.eye(3), motion[3:] * 0.1 / 500)
            u, _, v = np.linalg.svd(step[:3, :3])
            step[:3, :3], step[:3, 3] = u @ v, motion[:3] * 0.1 / 500
            pose = pose @ step
        wanted.append(pose)
    actions, bases = poses.follow(np.eye(4), np.array(wanted), np.eye(4), SIX)
    assert np.allclose(actions, given, atol=2e-3) and np.allclose(bases, wanted, atol=1e-6)


@pytest.mark.parametrize('step, reason', [
    ((2.0, 0.0, 0.0), 'missed by 0.140 m'), ((0.0, 0.3, 0.0), 'missed by 0.300 m'), ((0.0, 0.0, 0.2), 'missed by 0.200 m')])
def test_a_path_that_the_robot_cannot_drive_is_refused(step, reason):
    mount = poses.mount_pose((0.0,) * 6)
    target = np.eye(4)
    target[:3, 3] = np.array(step) * ([0.1, 1, 1])
    with pytest.raises(poses.PoseError, match=reason):
        poses.follow(np.eye(4), (target @ mount)[None], mount, TINY)


def test_small_errors_of_a_path_are_made_up_for_later():
    rng = np.random.default_rng(1)
    sent = path(np.tile([0.3, 0.5], (100, 1)))
    sent[1:, :3, 3] += rng.normal(0.0, 0.004, (100, 3))
    mount = poses.mount_pose(MOUNT)
    _, bases = poses.follow(poses.base_of(sent[0], mount), sent[1:], mount, TINY)
    assert np.linalg.norm((bases[-1] @ mount)[:3, 3] - sent[-1, :3, 3]) < 0.03


@pytest.mark.parametrize('change, reason', [
    ({'poses': None}, 'no poses'), ({'poses': np.zeros((1, 4, 4))}, 'rigid'), ({'poses': np.eye(4)}, r'must be \(N, 4, 4\)'),
    ({'poses': np.eye(4)[None] * np.nan}, 'not finite'), ({'poses': np.diag([1, 1, -1, 1.0])[None]}, 'rigid'),
    ({'poses': np.diag([1.002, 1, 1, 1])[None]}, 'rigid'), ({'poses': np.diag([1, 1, 1, 2.0])[None]}, 'rigid'),
    ({'poses': np.zeros((0, 4, 4))}, 'N from 1'), ({'poses': np.tile(np.eye(4), (poses.MOST + 1, 1, 1))}, 'N from 1'),
    ({'poses': np.array(['x'])}, 'array of numbers'), ({'poses': np.eye(4)[None] * 1e200}, 'numbers up to'),
    ({'intrinsics': np.ones((2, 4))}, r'must be \(1, 4\)'),
    ({'intrinsics': np.array([0.0, 1, 1, 1])}, 'focal'), ({'intrinsics': np.array([np.inf, 1, 1, 1])}, 'not finite')])
def test_a_camera_that_makes_no_sense_is_refused(change, reason):
    with pytest.raises(poses.PoseError, match=reason):
        poses.read({'poses': np.eye(4)[None], 'intrinsics': INTRINSICS, **change})


def test_a_rotation_that_is_nearly_one_is_made_one():
    read, intrinsics = poses.read({'poses': np.float32(turned(30.0) * (1 + 3e-4) - np.diag([0, 0, 0, 3e-4]))[None],
                                   'intrinsics': INTRINSICS})
    assert np.allclose(read[0, :3, :3] @ read[0, :3, :3].T, np.eye(3), atol=1e-12) and intrinsics.shape == (1, 4)


@pytest.mark.parametrize('degrees', [0.0, 1e-7, 1e-3, 20.0, 170.0])
def test_a_motion_leads_where_its_transform_says(degrees):
    for axis in range(3):
        pose = turned(degrees, axis)
        pose[:3, 3] = 0.1, -0.2, 0.3
        assert np.allclose(poses.transform(poses.twist(pose)), pose, atol=1e-9)
    with pytest.raises(poses.PoseError, match='half a turn'):
        poses.twist(turned(180.0))


def independent_ray(pose, intrinsics, row, column):
    """Origin, unit direction and moment of one pixel's ray, in Python's own float64, through the inverse of the matrix K."""
    fx, fy, cx, cy = map(float, intrinsics)
    k = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], np.float64)
    a, b, c = (float(each) for each in np.linalg.solve(k, [column + 0.5, row + 0.5, 1.0]))
    length = math.sqrt(a * a + b * b + c * c)
    d = [sum(float(pose[i, j]) * part for j, part in enumerate((a, b, c))) / length for i in range(3)]
    o = [float(pose[i, 3]) for i in range(3)]
    return o, d, [o[1] * d[2] - o[2] * d[1], o[2] * d[0] - o[0] * d[2], o[0] * d[1] - o[1] * d[0]]


def test_rays_are_those_of_an_independent_float64_implementation():
    rng = np.random.default_rng(5)
    sent, size = path(commands(3)), (6, 9)
    intrinsics = rng.uniform(4.0, 9.0, (len(sent), 4))  # of each frame its own
    rays = {form: poses.pluecker(sent, intrinsics, size, form) for form in ('origin', 'moment')}
    for frame, row, column in np.ndindex(len(sent), *size):
        o, d, m = independent_ray(sent[frame], intrinsics[frame], row, column)
        assert np.allclose(rays['origin'][frame, row, column], [*o, *d], rtol=0, atol=1e-5)
        assert np.allclose(rays['moment'][frame, row, column], [*m, *d], rtol=0, atol=1e-5)
    moments, directions = rays['moment'][..., :3], rays['moment'][..., 3:]
    assert np.abs((moments * directions).sum(-1)).max() < 1e-6  # what makes six numbers a line


def test_rays_are_those_that_the_open_world_models_take():
    from worldmodel_ros.model.wan import camera as wan
    sent = path(commands(2))
    theirs = wan.rays(sent, wan.Intrinsics(*map(float, INTRINSICS)), (64, 64)).numpy()
    ours = poses.pluecker(sent, np.broadcast_to(INTRINSICS, (3, 4)), (64, 64))
    assert np.abs(theirs - ours).max() < 1e-5


def test_intrinsics_follow_the_image_that_is_cut_and_scaled():
    """A bright point goes where the rays say that it goes."""
    image = np.zeros((120, 200, 3), np.uint8)
    image[48:54, 90:96] = 255
    fitted = fit(image, (64, 64)).astype(float).mean(-1)
    rows, columns = np.mgrid[:64, :64] + 0.5
    at = np.array([(fitted * columns).sum(), (fitted * rows).sum()]) / fitted.sum()
    k = np.array([[150.0, 140.0, 101.0, 57.0]])
    fx, fy, cx, cy = poses.fitted(k, (120, 200), (64, 64))[0]
    assert ((at[0] - cx) / fx, (at[1] - cy) / fy) == pytest.approx(((93 - 101) / 150, (51 - 57) / 140), abs=1e-3)


def test_a_model_whose_actions_are_no_motion_cannot_follow_a_camera():
    assert poses.unsupported(TINY) == poses.unsupported(SIX) == ''
    arm = replace(TINY, name='arm', action_names=('elbow', 'angular.z'))
    assert poses.unsupported(arm) == 'the actions elbow of model arm are no motion of a camera'
