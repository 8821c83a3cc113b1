"""What a machine that is too slow excuses, and what it does not."""
import pytest

from scenarios import speed
from scenarios.speed import NO_ROOM, USUAL, excuse, needs_two_steps


@pytest.fixture
def tick(monkeypatch):
    def takes(seconds):
        monkeypatch.setattr(speed, 'tick_seconds', lambda: seconds)
    return takes


@needs_two_steps
def fails(error):
    raise error


def test_a_failure_on_the_usual_machine_is_a_failure(tick):
    tick(USUAL)
    assert excuse(NO_ROOM) is None
    with pytest.raises(KeyError, match='predicted_future'):
        fails(KeyError('predicted_future'))


def test_a_failure_where_two_steps_have_no_room_is_skipped_and_told(tick):
    tick(1.5 * USUAL)
    with pytest.raises(pytest.skip.Exception, match='a tick takes 31.5 ms .* 30 ms or less.*AssertionError: late'):
        fails(AssertionError('late'))


def test_what_passes_is_not_measured(monkeypatch):
    monkeypatch.setattr(speed, 'tick_seconds', lambda: pytest.fail('measured'))
    needs_two_steps(lambda: None)()
