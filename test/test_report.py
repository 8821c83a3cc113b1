"""The report in a real browser: it is there, whole, by itself, and says the numbers that were found."""
import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest
from bags import frozen, gap, simulated_drive
from browser import browser
from evaluations import PROVENANCE, engine, evaluated
from test_evaluate_metrics import columns_of, parked_then_driven, window

from worldmodel_ros.evaluate.drive.compare import compare
from worldmodel_ros.evaluate.drive.pictures import psnr
from worldmodel_ros.evaluate.drive.verdict import judge
from worldmodel_ros.evaluate.report import render
from worldmodel_ros.evaluate.report.plot import MAX_POINTS, over_time, ticks

VOID = {'meta', 'link', 'img', 'br', 'line', 'path', 'rect', 'circle'}


@pytest.fixture(scope='module')
def kitchen():
    return evaluated(simulated_drive(12.0, teleport_at=8.0), 'kitchen')


@pytest.fixture(scope='module')
def hall():
    return evaluated(frozen(gap(simulated_drive(7.0), 2.0, 1.2), 4.0, 1.2), 'hall')


def page_of(*evaluations):
    comparison = compare(*evaluations) if len(evaluations) == 2 else None
    return render(evaluations, [judge(e) for e in evaluations], comparison, PROVENANCE)


@pytest.fixture(scope='module')
def one(kitchen, tmp_path_factory):
    path = tmp_path_factory.mktemp('one') / 'report.html'
    path.write_text(page_of(kitchen))
    return path


@pytest.fixture(scope='module')
def two(kitchen, hall, tmp_path_factory):
    path = tmp_path_factory.mktemp('two') / 'report.html'
    path.write_text(page_of(kitchen, hall))
    return path


class Balance(HTMLParser):
    """Every element that is opened is closed, in order; ids and links are noted."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.sources = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values['id']] if 'id' in values else []
        self.links += [values['href']] if tag == 'a' else []
        self.sources += [values['src']] if 'src' in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize('which', ['one', 'two'])
def test_the_page_is_whole_and_needs_nothing_else(which, request):
    text = request.getfixturevalue(which).read_text()
    found = Balance(text)
    assert len(set(found.ids)) == len(found.ids)
    assert found.links and all(link.startswith('#') and link[1:] in found.ids for link in found.links)
    assert len(found.sources) > 30 and all(source.startswith('data:image/jpeg;base64,') for source in found.sources)
    assert '<script' not in text and not re.search(r'(src|href)="(?!#|data:)|url\(|@import', text)
    assert len(text) < 3_000_000 and 'nan' not in re.findall(r'>([^<]*)<', text)


def test_it_is_drawn_with_its_pictures_and_an_empty_console(one, tmp_path):
    chromium = browser(tmp_path)
    drawn, console = chromium.draw(one, 1100, 3000)
    assert console == [] and drawn.shape == (3000, 1100, 3)
    assert (drawn[:20] > 250).all()                                    # paper
    blue = (np.abs(drawn.astype(int) - (0x25, 0x63, 0xeb)).sum(2) < 12).sum()
    assert blue > 300                                                  # the lines of the plots
    assert drawn[1400:].reshape(-1, 3).std(0).min() > 25               # film strips
    dark, console = chromium.draw(one, 1100, 400, dark=True)
    assert console == [] and dark.mean() < 60 and (dark > 180).any()


@pytest.mark.parametrize('which, width', [('one', 1100), ('two', 390)])
def test_pictures_load_nothing_sticks_out_and_nothing_is_asked_for(which, width, request, tmp_path):
    found = browser(tmp_path).ask(request.getfixturevalue(which), '''{
        pictures: document.images.length,
        broken: [...document.images].filter(i => !i.complete || i.naturalWidth !== 64).length,
        hidden: [...document.images].filter(i => i.clientWidth < 40).length,
        overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        sections: [...document.querySelectorAll('section h2')].map(h => h.textContent),
        requests: performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length,
        empty_plots: [...document.querySelectorAll('svg.plot')].filter(s => s.getBBox().height < 50).length,
        outside: [...document.querySelectorAll('svg.plot')].filter(s => {
            const b = s.getBBox(), v = s.viewBox.baseVal;
            return b.x < -1 || b.y < -1 || b.x + b.width > v.width + 1 || b.y + b.height > v.height + 1;
        }).length}''', width)
    sections = ['Prediction', 'Surprise', 'Commands', 'What if', 'Deadline', 'Data health']
    assert found.pop('pictures') > 30
    assert found == {'broken': 0, 'hidden': 0, 'overflow': 0, 'requests': 0, 'empty_plots': 0, 'outside': 0,
                     'sections': sections if which == 'one' else ['Comparison', *sections]}


def plain(text):
    """The text of a page as a reader sees it."""
    return re.sub(r'\s+', ' ', re.sub(r'<[^>]+>', ' ', text).replace('&#8239;', ' ').replace('&minus;', '-'))


def test_the_numbers_on_the_page_are_those_that_were_found(kitchen, one):
    text = plain(one.read_text())
    moving = kitchen.numbers['prediction']['moving']
    gain, known = moving['gain_db'], kitchen.numbers['reconstruction_db']
    assert f'{gain["mean"]:+.1f} dB' in text and f'{gain["low"]:+.1f} to {gain["high"]:+.1f}' in text
    assert f'{known["mean"]:.1f} dB' in text and f'{moving["ssim"]["mean"]:.3f}' in text
    assert f'pictures {moving["pictures"]}' in text
    worst = max(kitchen.moments, key=lambda moment: moment.score)
    assert f'{worst.time_s:.1f} s' in text and f'{worst.surprise_db:.1f} dB worse than known' in text
    assert f'two steps 100.0 % ({len(kitchen.columns)})' in text
    assert f'{kitchen.numbers["policy"]["known_goal"]["linear.x"]["mae"]:.3f}' in text
    assert judge(kitchen).sentence.replace('\u2212', '-') in text.replace('\u2212', '-')


def test_pictures_are_what_they_are_said_to_be(two):
    """Below each predicted picture is its PSNR: it must be that of the two pictures on the page, but for their JPEG."""
    checked = 0
    for film in two.read_text().split('<div class="film"')[1:]:
        camera = {}
        for data, what, below in re.findall(r'base64,([^"]+)"[^>]*alt="([^"]+)">(.*?)</figure>', film):
            pixels = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
            if what.startswith('camera image +'):
                camera[what.removeprefix('camera image ')] = pixels
            elif what.startswith('predicted image '):
                said = float(below.replace('&#8239;', ' ').split()[0])
                assert psnr(pixels, camera[what.removeprefix('predicted image ')]) == pytest.approx(said, abs=1.0)
                checked += 1
    assert checked > 40


def test_every_moment_has_its_mark_on_the_timeline_and_its_pictures(kitchen, one):
    text = one.read_text()
    for moment in kitchen.moments:
        anchor = f'moment-a-{moment.peak}'
        assert f'href="#{anchor}"' in text
        card = text[text.index(f'id="{anchor}"'):]
        assert card[:card.index('</div></div>')].count('<img') >= 4


def test_findings_come_with_their_remedies_and_their_places(hall):
    text = plain(page_of(hall))
    for finding in hall.findings:
        assert finding.text.split('.')[0].replace("'", '&#x27;') in text
    assert 'At 3.2 s' in text  # the first picture after the gap


def test_a_comparison_says_what_is_different_and_by_how_much(kitchen, hall, two):
    text, comparison = plain(two.read_text()), compare(kitchen, hall)
    assert 'A (kitchen)' in text and 'B (hall)' in text
    difference = comparison.differences['reconstruction_db']
    assert f'autoencoder alone {difference.mean:+.1f} dB' in text


def test_names_cannot_break_the_page(hall):
    evil = replace(hall, subject=replace(hall.subject, bag='<script>alert(1)</script>"&', mapping=('</style><b>',)))
    evil.__dict__.update({name: hall.__dict__[name] for name in ('numbers', 'moments') if name in hall.__dict__})
    for text in (page_of(evil), page_of(hall, evil)):
        Balance(text)
        assert '<script' not in text and '&lt;script&gt;' in text


def test_a_drive_with_nothing_to_judge_has_a_page_too(hall):
    empty = replace(hall, columns=columns_of([]), deadline=None, findings=[], has_actions=False)
    Balance(page_of(empty))
    still = replace(hall, columns=columns_of([window(k, moving=[False] * 4) for k in range(20)]))
    assert 'hardly moves' in page_of(still)


def test_plans_are_judged_by_a_constant_command_where_a_goal_was_set_and_both_counts_are_told(kitchen, hall):
    waits = replace(hall, columns=parked_then_driven())
    assert not any('constant command' in remark for remark in judge(waits).remarks)
    assert '400 windows, of which 100 have a goal.' in page_of(waits)
    assert page_of(waits).count('where a goal is set') == 2 and 'where a goal is set' not in page_of(kitchen)


def test_the_page_of_a_long_drive_is_not_a_long_page(hall):
    long = replace(hall, columns=columns_of([window(k, surprise_db=4.0 + k % 7) for k in range(20_000)]))
    assert len(page_of(long)) < len(page_of(hall)) + 200_000


def test_lines_over_time_keep_their_peaks_and_break_between_episodes():
    times, values = np.arange(10_000) / 10, np.zeros(10_000)
    values[7777] = 9.0
    xs, ys = over_time(times, values, np.repeat([0, 1], 5000), np.max)
    assert len(xs) <= MAX_POINTS + 4 and np.nanmax(ys) == 9.0 and abs(xs[np.nanargmax(ys)] - 777.7) < 1.5
    assert np.isnan(ys).sum() == 2


@pytest.mark.parametrize('low, high', [(0.0, 1.0), (-3.2, 18.0), (0.31, 0.34), (0.0, 36000.0)])
def test_ticks_are_round_numbers_inside_the_range(low, high):
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 7 and all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    steps = np.diff(found)
    assert np.allclose(steps, steps[0]) and f'{steps[0]:.6e}'[:3] in ('1.0', '2.0', '2.5', '5.0')


def test_the_shipped_model_is_what_was_evaluated(kitchen):
    assert kitchen.subject.model == 'tiny' and kitchen.subject.backend == engine().backend.name
