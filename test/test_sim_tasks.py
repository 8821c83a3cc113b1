"""Movers, the scenes of tasks, and odometry: pinned, deterministic, and as they are said to be."""
import json
import math
from pathlib import Path

import numpy as np
import pytest

from worldmodel_ros.sim.movers import Ball, Shuttle
from worldmodel_ros.sim.odometry import EncoderErrors, WheelOdometry
from worldmodel_ros.sim.scene import COLOURS, sample_scene
from worldmodel_ros.sim.task_scenes import BAND, SCENES, Variant, fingerprint, goal_colour, task_scene
from worldmodel_ros.sim.world import World

PINNED = json.loads((Path(__file__).resolve().parents[1] / 'worldmodel_ros' / 'sim' / 'task_scenes.json').read_text())
MOVING = [kind for kind in SCENES if kind not in ('rooms', 'recall')]


@pytest.fixture(scope='module')
def world():
    return World(0)


def loaded(world, kind, seed=4000000, variant=Variant()):
    world.load(task_scene(kind, seed, variant))
    return world


@pytest.mark.parametrize('kind', SCENES)
def test_the_scenes_are_those_that_were_committed(kind):
    first, end = PINNED['seeds']
    for name, variant in (('plain', Variant()), ('shifted', Variant(shifted=True)), ('stops', Variant(stops=True))):
        assert fingerprint(kind, range(first, end), variant) == PINNED[name][kind], \
            'the generator has changed: what models were trained on is no longer what it draws'


def test_static_rooms_have_no_movers_and_are_those_of_their_seed():
    for kind in ('rooms', 'recall'):
        assert task_scene(kind, 7) == sample_scene(7)


def test_an_unknown_kind_of_scene_is_named():
    with pytest.raises(ValueError, match='juggle'):
        task_scene('juggle', 0)


@pytest.mark.parametrize('kind', MOVING)
def test_movers_begin_ahead_and_touch_nothing(kind, world):
    ahead = []
    for seed in range(4000000, 4000012):
        loaded(world, kind, seed)
        assert not len(world.touched)
        world.step((0.0, 0.0))
        assert not world.collided, f'the robot of seed {seed} stands in something'
        ahead += [world.visible(mover.name) for mover in world.scene.movers]
    assert np.mean(ahead) > 0.5


@pytest.mark.parametrize('shifted', [False, True])
def test_speeds_counts_and_restitution_are_those_of_the_variant(shifted):
    low, high = (0.8, 1.0) if shifted else (0.4, 0.8)
    for seed in range(4000000, 4000020):
        ball, = task_scene('intercept', seed, Variant(shifted=shifted)).movers
        assert low <= math.hypot(*ball.velocity) <= high
        assert (ball.restitution < 0.7) == shifted
        street = task_scene('street', seed, Variant(shifted=shifted))
        assert len(street.movers) == (5 if shifted else 3)
        assert all(low <= shuttle.speed <= high for shuttle in street.movers)
        lanes = [(shuttle.x, shuttle.y)[1 - shuttle.axis] for shuttle in street.movers]
        assert max(map(abs, lanes)) < BAND / 2
        goal = street.props[COLOURS.index(goal_colour('street', seed))]
        along = 1 - street.movers[0].axis
        assert street.start[along] < -BAND / 2 < BAND / 2 < (goal.x, goal.y)[along]


@pytest.mark.parametrize('restitution', [0.5, 0.8, 0.95])
def test_a_ball_bounces_off_a_wall_with_its_restitution_and_rolls_without_resistance(world, restitution):
    scene = task_scene('intercept', 4000000)
    half_x, half_y = scene.width / 2, scene.depth / 2
    # Head on at the wall at +x, along a line that is free in this room.
    y = next(y for y in np.linspace(-half_y + 0.4, half_y - 0.4, 40)
             if all(abs(prop.y - y) > 0.5 for prop in scene.props) and abs(scene.start[1] - y) > 0.5)
    ball = Ball('ball', 'magenta', (1, 0, 1), half_x - 0.5, float(y), (0.6, 0.0), restitution)
    world.load(type(scene)(**{**scene.__dict__, 'movers': (ball,)}))
    world.step((0.0, 0.0), 0.3)
    assert world.velocity('ball')[0] == pytest.approx(0.6, abs=1e-6)
    for _ in range(6):
        world.step((0.0, 0.0), 0.1)
    assert world.velocity('ball')[0] == pytest.approx(-0.6 * restitution, abs=0.05)
    assert world.position('ball')[1] == pytest.approx(y, abs=1e-3)


def test_a_shuttle_follows_its_reference_and_stands_when_it_stops():
    shuttle = Shuttle('s', 'violet', (0, 0, 1), 0.0, 0.0, 1, 1.0, 0.5, 0.0, stops=((1.0, 0.5),))
    assert shuttle.reference(0.0) == (0.0, 0.5)
    assert shuttle.reference(1.2) == (pytest.approx(0.5), 0.0)
    assert shuttle.reference(2.5) == (pytest.approx(1.0), pytest.approx(-0.5))
    assert shuttle.reference(4.5)[0] == pytest.approx(0.0)
    assert shuttle.reference(8.5) == (pytest.approx(0.0), 0.5)


def test_shuttles_really_move_along_their_references_and_push_a_robot_that_stands_in_the_way(world):
    loaded(world, 'street', variant=Variant(stops=True))
    worst = 0.0
    for _ in range(40):
        world.step((0.0, 0.0), 0.1)
        for mover in world.scene.movers:
            offset = world.position(mover.name)[mover.axis] - (mover.x, mover.y)[mover.axis]
            worst = max(worst, abs(offset - mover.reference(world.time)[0]))
    assert worst < 0.1
    mover = world.scene.movers[0]
    world.move_robot((mover.x, mover.y, 0.0))
    before, names = world.pose, set()
    for _ in range(80):
        world.step((0.0, 0.0), 0.1)
        names |= world.touched
    assert mover.name in names
    assert math.dist(world.pose[:2], before[:2]) > 0.1


@pytest.mark.parametrize('kind', ['second_ball', 'street'])
def test_snapshots_forks_and_replays_are_exact_with_movers(kind, world):
    loaded(world, kind, variant=Variant(stops=True))
    world.step((0.3, 0.4), 0.135)
    snapshot, fork = world.snapshot(), world.fork()
    actions = np.random.default_rng(0).uniform((-0.2, -1.0), (0.6, 1.0), (15, 2))
    played = world.play(actions)
    assert np.array_equal(fork.play(actions).frames, played.frames)
    assert np.array_equal(fork.snapshot(), world.snapshot())
    other = World(1)
    loaded(other, kind, variant=Variant(stops=True))
    other.restore(snapshot)
    assert np.array_equal(other.play(actions).poses, played.poses)
    assert np.array_equal(other.snapshot(), world.snapshot())


def test_what_was_touched_is_named(world):
    world.reset(7)
    world.move_robot((world.scene.width / 2 - 0.2, 0.0, 0.0))
    world.step((0.5, 0.0), 0.3)
    assert world.collided
    assert 'wall0' in world.touched


def test_a_mover_has_a_velocity_and_an_object_has_none(world):
    loaded(world, 'intercept')
    assert world.velocity('ball') == pytest.approx(world.scene.movers[0].velocity)
    with pytest.raises(ValueError, match='red'):
        world.velocity('red')
    with pytest.raises(ValueError, match='ball'):
        world.velocity('cat')


def drive(world, seed, errors, seconds=10.0):
    """Returns odometry and true pose in the frame of the start, after a winding drive without a contact."""
    world.reset(seed)
    start, odometry = world.pose, WheelOdometry(world, errors)
    for t in np.arange(0.0, seconds, 0.1):  # no jerks: wheels that are torn about really slip
        world.step((0.12 * math.sin(1.3 * t), 1.0 * math.sin(0.7 * t)))
        odometry.update(world)
        assert not world.collided, f'the drive of seed {seed} is no drive without contacts'
    x, y, yaw = world.pose
    dx, dy, cos, sin = x - start[0], y - start[1], math.cos(start[2]), math.sin(start[2])
    return odometry, (cos * dx + sin * dy, cos * dy - sin * dx, math.remainder(yaw - start[2], math.tau))


def test_odometry_follows_the_truth_and_drifts(world):
    exact = EncoderErrors(scale=0.0, slip=0.0, noise=0.0, ticks=100000)
    errors = []
    for seed in (3, 4, 5):
        ideal, truth = drive(world, seed, exact)
        assert math.dist(ideal.pose[:2], truth[:2]) < 0.1
        assert abs(math.remainder(ideal.pose[2] - truth[2], math.tau)) < 0.15
        real, _ = drive(world, seed, EncoderErrors())
        errors.append(abs(math.remainder(real.pose[2] - ideal.pose[2], math.tau)))
    assert 0.001 < np.mean(errors) < 0.5


def test_odometry_is_the_same_when_it_is_driven_again_and_measures_nothing_at_rest(world):
    assert drive(world, 3, EncoderErrors(), 1.0)[0].pose == drive(world, 3, EncoderErrors(), 1.0)[0].pose
    world.reset(3)
    odometry = WheelOdometry(world)
    for _ in range(5):
        world.step((0.0, 0.0))
        odometry.update(world)
    assert np.allclose(odometry.pose, 0.0, atol=2e-3)
