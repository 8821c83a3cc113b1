"""What a machine that is too slow excuses, and what it does not."""
import pytest

from scenarios import speed
from scenarios.speed import NO_ROOM, USUAL, USUAL_PRODUCT, excuse, needs_two_steps


@pytest.fixture
def machine(monkeypatch):
    def takes(tick, product):
        monkeypatch.setattr(speed, 'tick_seconds', lambda: tick * USUAL)
        monkeypatch.setattr(speed, 'product_seconds', lambda: product * USUAL_PRODUCT)
    return takes


@needs_two_steps
def fails(error):
    raise error


@pytest.mark.parametrize('tick, product', [(1.0, 1.0), (1.0, 2.0), (1.5, 1.0)])  # the last: the engine became slow
def test_a_failure_where_the_machine_is_as_usual_or_the_tick_is_a_failure(machine, tick, product):
    machine(tick, product)
    assert excuse(NO_ROOM) is None
    with pytest.raises(KeyError, match='predicted_future'):
        fails(KeyError('predicted_future'))


def test_a_failure_where_two_steps_have_no_room_is_skipped_and_told(machine):
    machine(1.5, 1.5)
    with pytest.raises(pytest.skip.Exception, match='a tick takes 31.5 ms .* 30 ms or less.*AssertionError: late'):
        fails(AssertionError('late'))


def test_what_passes_is_not_measured(monkeypatch):
    monkeypatch.setattr(speed, 'tick_seconds', lambda: pytest.fail('measured'))
    needs_two_steps(lambda: None)()
