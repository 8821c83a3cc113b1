"""Which quality a prediction of an open world gets by its deadline."""
import math

import pytest

from worldmodel_ros.engine.open_world.ladder import Ladder, Rung
from worldmodel_ros.model.wan.schedule import Schedule

FULL, HALF = Rung(4, True), Rung(2, False)
SMALL, SMALL_HALF = Rung(4, True, True), Rung(2, False, True)


def warm(ladder):
    for rung in ladder.rungs:
        ladder.took(rung, 60.0, 1)
    return ladder


def test_rungs_are_all_steps_then_fewer_then_the_smaller_model():
    assert Ladder(4, 4).rungs == [FULL, HALF, SMALL, SMALL_HALF]
    assert Ladder(1).rungs == [Rung(1, True)] and Ladder(4).rungs == [FULL, HALF]


def test_the_best_that_is_expected_in_time_is_taken_and_else_the_last():
    ladder = warm(Ladder(4, 4))
    assert ladder.choose(0.1, 1) == (FULL, 0.0)  # nothing is known yet
    ladder.took(FULL, 2.0, 2)
    assert ladder.choose(1.0, 1) == (FULL, 1.0)
    rung, expected = ladder.choose(0.7, 1)
    assert rung == HALF and expected == pytest.approx(3 / 5)  # three passes instead of five
    ladder.took(HALF, 0.8, 1)
    assert ladder.choose(0.7, 1) == (SMALL, 0.0)
    ladder.took(SMALL, 0.3, 1)
    assert ladder.choose(0.7, 2)[0] == SMALL and ladder.choose(0.5, 2)[0] == SMALL_HALF
    ladder.took(SMALL_HALF, 0.2, 1)
    assert ladder.choose(0.1, 1) == (SMALL_HALF, 0.2)  # which will be late
    assert ladder.choose(math.inf, 100)[0] == FULL
    assert ladder.choose(0.1, 1, smaller=False)[0] == HALF


def test_a_rung_that_was_too_slow_once_is_tried_again():
    ladder = warm(Ladder(4))
    ladder.took(FULL, 9.0, 1)
    ladder.took(HALF, 0.1, 1)
    chosen = [ladder.choose(0.5, 1)[0] for _ in range(40)]
    assert chosen[:31] == [HALF] * 31 and FULL in chosen[31:]


def test_what_a_rung_compiles_when_it_is_taken_first_is_not_expected_again():
    ladder, first, taken = Ladder(4), {FULL: 8.0, HALF: 6.0}, []
    for _ in range(60):
        taken.append(ladder.choose(0.75, 1)[0])
        ladder.took(taken[-1], first.pop(taken[-1], 0.43), 1)
    assert taken == [FULL] * 60
    assert ladder.choose(0.2, 1) == (HALF, pytest.approx(0.43 * 3 / 5))  # not taken yet: estimated


def test_fewer_steps_keep_the_first_and_are_spread():
    schedule = Schedule.unipc((0, 179, 358, 679), shift=10.0)
    assert schedule.fewer(4) == schedule
    assert schedule.fewer(2).steps == (schedule.steps[0], schedule.steps[2]) and schedule.fewer(1).steps == schedule.steps[:1]
    for count in (0, 5):
        with pytest.raises(ValueError, match='steps of 4'):
            schedule.fewer(count)
