"""The demo's pictures: each is written from recorded data, and its size and content are checked."""
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from demo_recordings import drive, task_drive
from worldmodel_ros.demo import charts, film, futures, what_if_picture
from worldmodel_ros.demo.images import enlarge
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import Recording


@pytest.fixture(scope='module')
def run():
    recording = drive()
    scorer = PredictionScorer(recording)
    scorer.advance()
    return recording, scorer


def colours(path):
    picture = np.asarray(Image.open(path).convert('RGB'))
    return picture.shape, len(np.unique(picture @ np.array([1 << 16, 1 << 8, 1])))  # of whole rows it takes half a second


def test_enlarging_repeats_pixels():
    big = enlarge(np.arange(12, dtype=np.uint8).reshape(2, 2, 3), 3)
    assert big.shape == (6, 6, 3) and (big[:3, 3:6] == [3, 4, 5]).all()


def test_film_strip_shows_a_moment_of_each_part(run, tmp_path):
    strip = film.moments(*run)
    assert [int(m.time // (3.6 / 2)) for m in strip] == [0, 1]
    assert all(len(m.predicted) == len(m.seen) == 4 for m in strip)
    film.draw_film_strip(tmp_path / 'film.png', strip)
    (height, width, _), count = colours(tmp_path / 'film.png')
    assert width > 800 and height > 700 and count > 2000  # of them many from the frames


def test_moments_are_chosen_by_the_camera_not_by_the_prediction(run):
    recording, scorer = run
    worst = PredictionScorer(recording)
    worst.matches = [m.__class__(m.future, m.k, 60.0 - m.psnr, m.psnr_copy, m.moving) for m in scorer.matches]
    chosen, chosen_by_worst = film.moments(recording, scorer), film.moments(recording, worst)
    assert [m.time for m in chosen_by_worst] == [m.time for m in chosen]


def test_animation_runs_in_real_time(run, tmp_path):
    film.draw_animation(tmp_path / 'film.gif', run[0], 0.03)
    gif = Image.open(tmp_path / 'film.gif')
    assert gif.info['duration'] == 100 and gif.n_frames > 30 and gif.width > 3 * 64 * 3


def test_latency_picture_is_drawn_even_for_ticks_of_unknown_tier(run, tmp_path):
    charts.draw_latency(tmp_path / 'latency.png', run[0], 0.05, 'note')
    late = drive(latency=0.2)
    late.ticks.clear()
    charts.draw_latency(tmp_path / 'late.png', late, 0.05, 'note')
    for name in ('latency.png', 'late.png'):
        assert colours(tmp_path / name)[0][1] > 800


def test_path_picture_is_drawn(run, tmp_path):
    charts.draw_path(tmp_path / 'path.png', run[0], 4.0)
    assert colours(tmp_path / 'path.png')[1] > 100


def test_paths_of_a_task_are_drawn_room_by_room(tmp_path):
    charts.draw_path(tmp_path / 'path.png', task_drive(), 4.0)
    assert colours(tmp_path / 'path.png')[0][1] > 900  # two panels


def test_the_chosen_future_is_green_and_the_others_red_around_what_is_there():
    recording = task_drive()
    choice = recording.choices[0]
    seen = futures.birds_eye(choice, 100)
    assert seen.shape == (450, 450, 3)

    def at(x, y):
        """Colour at a place in base_link [m]."""
        return seen[round((futures.AHEAD - x) * 100), round((futures.ASIDE - y) * 100)].astype(int).tolist()
    assert at(0.6, -0.675) == list(futures._CHOSEN)     # 1.5 s to the right
    red, green, _ = at(0.6, 0.675)
    assert red > green + 50                             # to the left: rejected
    red, green, _ = at(0.6, 0.0)
    assert red > green + 100                            # ahead: vetoed
    red, green, blue = at(2.0, 0.0)
    assert red > 200 > 120 > green                      # the red object
    truth = futures.Truth.of(recording, choice.stamp)
    assert truth.in_base(truth.now) == [(pytest.approx(1.5), pytest.approx(-1.0), 0.135)]
    assert truth.in_base(truth.later)[0][1] == pytest.approx(-0.6, abs=0.01)  # 0.8 s at 0.5 m/s
    assert (futures.birds_eye(choice, 100, truth) != seen).any()


def test_moments_that_are_shown_are_those_that_went_most_against_the_policy():
    recording = task_drive()
    recording.choices[33] = replace(recording.choices[33], options=tuple(
        replace(option, score=option.score - 10.0 * (option.name == 'policy')) for option in recording.choices[33].options))
    chosen = futures.moments(recording, 0.03)
    assert len(chosen) == futures.MOMENTS and recording.choices[33] in chosen
    told = futures.words(chosen[-1])
    assert told[0] == ('right 0.8 s', '-0.75', 'chosen') and ('policy', '-12.50', 'vetoed: contact with mover') in told


def test_two_moments_are_not_of_the_same_second(monkeypatch):
    monkeypatch.setattr(futures, 'APART', 1.0)
    recording, apart = task_drive(), 1_000_000_000
    border = len(recording.choices) // futures.MOMENTS  # of the first part
    for number in (border - 1, border):  # neighbours in different parts, which go most against the policy
        choice = recording.choices[number]
        recording.choices[number] = replace(choice, options=tuple(
            replace(option, score=option.score - 10.0 * (option.name == 'policy')) for option in choice.options))
    stamps = [choice.stamp for choice in recording.choices]
    assert stamps[2 * border - 1] - stamps[border - 1] >= apart  # the second part has others
    first, second, _ = futures.moments(recording, 0.03)
    assert first is recording.choices[border - 1] and second.stamp - first.stamp >= apart


def test_what_was_imagined_is_animated_in_real_time(tmp_path):
    recording = task_drive()
    futures.draw_animation(tmp_path / 'futures.gif', recording, 0.03)
    gif = Image.open(tmp_path / 'futures.gif')
    assert gif.info['duration'] == 100 and gif.n_frames == len(recording.choices)


def test_what_if_picture_takes_the_answer_with_truth_and_can_do_without(run, tmp_path):
    recording, _ = run
    answer = what_if_picture.most_telling(recording.what_ifs)
    assert answer.truth
    what_if_picture.draw_what_if(tmp_path / 'a.png', answer, recording.images[5])
    what_if_picture.draw_what_if(tmp_path / 'b.png', recording.what_ifs[1], None)
    assert colours(tmp_path / 'a.png')[1] > colours(tmp_path / 'b.png')[1]


def test_no_answer_and_no_prediction_give_no_picture():
    empty = Recording()
    assert what_if_picture.most_telling([]) is None
    assert film.moments(empty, PredictionScorer(empty)) == []
