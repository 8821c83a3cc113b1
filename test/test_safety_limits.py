"""Limits on commands and on their rate of change."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel_ros.safety.motion import Limits, TwistLimiter, TwistLimits

LIMITS = TwistLimits(v_min=-0.3, v_max=0.6, w_max=1.5, a_max=1.5, alpha_max=6.0)
LIMITER = TwistLimiter(LIMITS)
FINITE = st.floats(-1e6, 1e6)
WITHIN = st.tuples(st.floats(-0.3, 0.6), st.floats(-1.5, 1.5))


def test_a_command_within_all_limits_is_left_alone():
    assert LIMITER.limit((0.35, -0.2), (0.3, 0.0), 0.1) == ((0.35, -0.2), False)


def test_speed_is_clamped():
    assert LIMITER.limit((9.0, -9.0), None, 0.1) == ((0.6, -1.5), True)
    assert LIMITER.limit((-9.0, 9.0), None, 0.1) == ((-0.3, 1.5), True)


def test_change_is_clamped_to_the_acceleration():
    (v, w), limited = LIMITER.limit((0.6, 1.5), (0.0, 0.0), 0.1)
    assert limited
    assert (v, w) == pytest.approx((0.15, 0.6))


def test_braking_ends_at_exactly_zero():
    twist = (0.6, -1.5)
    for _ in range(100):
        twist = LIMITER.limit((0.0, 0.0), twist, 0.01).twist
    assert twist == (0.0, 0.0)


def test_time_that_stands_still_or_runs_back_allows_no_change():
    assert LIMITER.limit((0.6, 1.5), (0.1, 0.2), 0.0).twist == (0.1, 0.2)
    assert LIMITER.limit((0.6, 1.5), (0.1, 0.2), -1.0).twist == (0.1, 0.2)


def test_speed_limit_wins_where_it_was_tightened_while_driving():
    assert LIMITER.limit((0.6, 0.0), (2.0, 0.0), 0.01).twist == (0.6, 0.0)


@settings(deadline=None)
@given(target=st.tuples(FINITE, FINITE), previous=WITHIN, dt=st.floats(0.0, 1.0))
def test_no_command_leaves_the_limits(target, previous, dt):
    (v, w), limited = LIMITER.limit(target, previous, dt)
    assert LIMITS.v_min <= v <= LIMITS.v_max and abs(w) <= LIMITS.w_max
    assert abs(v - previous[0]) <= LIMITS.a_max * dt + 1e-9
    assert abs(w - previous[1]) <= LIMITS.alpha_max * dt + 1e-9
    assert limited == ((v, w) != target)


@settings(deadline=None)
@given(target=st.tuples(FINITE, FINITE), previous=WITHIN, dt=st.floats(0.0, 1.0))
def test_limiting_twice_is_limiting_once(target, previous, dt):
    once = LIMITER.limit(target, previous, dt).twist
    assert LIMITER.limit(once, previous, dt) == (once, False)


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_a_command_that_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match='finite'):
        LIMITER.limit((bad, 0.0), (0.0, 0.0), 0.1)
    with pytest.raises(ValueError, match='finite'):
        LIMITER.limit((0.0, 0.0), (0.0, 0.0), bad)


@pytest.mark.parametrize('change, complaint', [
    ({'v_min': 0.1}, 'v_min'), ({'v_max': -0.1}, 'v_max'), ({'w_max': -1.0}, 'w_max'),
    ({'a_max': 0.0}, 'a_max'), ({'alpha_max': math.nan}, 'alpha_max'), ({'v_max': math.nan}, 'v_max')])
def test_limits_that_forbid_a_stop_are_refused_by_name(change, complaint):
    values = {'v_min': -0.3, 'v_max': 0.6, 'w_max': 1.5, 'a_max': 1.5, 'alpha_max': 6.0, **change}
    with pytest.raises(ValueError, match=complaint):
        TwistLimits(**values)


def test_axis_limits_must_be_complete_and_ordered():
    with pytest.raises(ValueError, match='2, 2 and 1'):
        Limits((0.0, 0.0), (1.0, 1.0), (1.0,))
    with pytest.raises(ValueError, match='axis 1'):
        Limits((0.0, 2.0), (1.0, 1.0), (1.0, 1.0))
