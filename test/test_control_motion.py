"""Named action sequences and the paths they lead along."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.motion import MANEUVERS, maneuver, path


@pytest.mark.parametrize('name', MANEUVERS)
def test_a_maneuver_repeats_one_action(name):
    actions = maneuver(name, 5)
    assert actions.shape == (5, 2) and actions.dtype == np.float32
    assert (actions == actions[0]).all()


def test_left_is_counter_clockwise_and_backward_is_backward():
    assert maneuver('left', 1)[0, 1] > 0.0 > maneuver('right', 1)[0, 1]
    assert maneuver('backward', 1)[0, 0] < 0.0
    assert not maneuver('stop', 3).any()


def test_an_unknown_maneuver_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match='forward, left, right'):
        maneuver('sideways', 3)
    with pytest.raises(ValueError, match='at least one step'):
        maneuver('left', 0)


def test_straight_on_leads_straight_on():
    poses = path(np.float32([[0.5, 0.0]] * 4), 0.1)
    assert poses[:, 0] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert not poses[:, 1:].any()


def test_a_full_circle_leads_back():
    turn = 2 * np.pi / 40
    poses = path(np.float32([[0.3, turn / 0.1]] * 40), 0.1)
    assert poses[-1] == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)
    assert poses[19, 1] == pytest.approx(2 * 0.3 * 0.1 / turn, rel=1e-4)


@given(st.lists(st.tuples(st.floats(-0.3, 0.6), st.floats(-1.5, 1.5)), min_size=1, max_size=20))
def test_a_path_is_that_of_a_fine_integration(actions):
    x = y = yaw = 0.0
    substeps = 400
    for v, w in np.float32(actions).tolist():
        for _ in range(substeps):
            yaw += w * 0.1 / substeps / 2
            x, y = x + v * 0.1 / substeps * np.cos(yaw), y + v * 0.1 / substeps * np.sin(yaw)
            yaw += w * 0.1 / substeps / 2
    end = path(np.float32(actions), 0.1)[-1]
    assert end[:2] == pytest.approx([x, y], abs=1e-4)
    assert np.cos(end[2] - yaw) == pytest.approx(1.0, abs=1e-6)
