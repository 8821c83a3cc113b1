"""The demo's pictures: each is written from recorded data, and its size and content are checked."""
import numpy as np
import pytest
from PIL import Image

from demo_recordings import drive
from worldmodel_ros.demo import charts, film, what_if_picture
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
    return picture.shape, len(np.unique(picture.reshape(-1, 3), axis=0))


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
