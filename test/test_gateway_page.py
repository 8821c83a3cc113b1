"""The page for people, in a real browser, and the requests behind it."""
import base64
import io

import numpy as np
import pytest
from browser import browser
from fake_service import FakeService, wait_for
from gateway_rig import gateway, get, infer, robot
from PIL import Image

from worldmodel_ros.serving.gateway import page
from worldmodel_ros.serving.gateway.accounts import Account, Accounts, digest

PINK = 250, 40, 160
HERE = '--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1'  # the last one of its name counts


class Pink(FakeService):
    """A service whose predictions are easily found on a page."""

    def open(self, listener, **values):
        pictured = listener.pictured

        def painted(picture):
            picture.future.frames[...] = PINK
            pictured(picture)
        listener.pictured = painted
        return super().open(listener, **values)


@pytest.fixture
def running(tmp_path):
    accounts = Accounts((Account('ours', digest('token'), openings=0.0), Account('theirs', digest('other'), openings=0.0)))
    with gateway(tmp_path, Pink(sessions=8), accounts=accounts) as started:
        yield started


def basic(token):
    return {'Authorization': 'Basic ' + base64.b64encode(f'anybody:{token}'.encode()).decode()}


def test_the_page_shows_ones_sessions_and_what_they_predict(running, tmp_path):
    with robot(running, token='token') as connection, robot(running, token='other') as other:
        infer(other, session_id='not-mine')
        for step in range(3):
            infer(connection, session_id='kitchen', step_id=step)
        running.service.answer = 'refusal'
        infer(connection, session_id='kitchen', step_id=3)
        wait_for(lambda: any(each.newest is not None for each in running.gateway.sessions.all()))
        url = f'http://anybody:token@127.0.0.1:{running.port}/'
        chromium = browser(tmp_path)
        console, dom, image = look(chromium, url)
    assert not console, console
    assert 'kitchen' in dom and 'not-mine' not in dom and 'The engine answers.' in dom
    assert 'two step 3' in dom and 'tiny on fake, 64x64, linear.x and angular.z' in dom
    found = (np.abs(image.astype(int) - PINK).max(-1) < 12).sum()
    assert found > 20_000, 'the predicted frames are not on the page'


def look(chromium, url):
    """What the console says, the page's elements, and its picture, after it has asked twice."""
    options = [HERE, '--virtual-time-budget=2500', '--window-size=1000,800']
    dom = chromium._run([*options, '--dump-dom', url])
    shot = chromium.folder / 'page.png'
    drawn = chromium._run([*options, f'--screenshot={shot}', url])
    console = [line for done in (dom, drawn) for line in done.stderr.splitlines() if 'CONSOLE' in line]
    return console, dom.stdout, np.asarray(Image.open(shot).convert('RGB'))


def test_without_an_engine_the_page_says_so(tmp_path):
    with gateway(tmp_path) as running:
        running.server.stop()
        _, dom, _ = look(browser(tmp_path), f'http://127.0.0.1:{running.port}/')
    assert 'The engine does not answer.' in dom and 'No sessions of yours are open.' in dom


def test_the_page_needs_a_token_as_everything_does(running):
    status, headers, _ = get(running, '/')
    assert status == 401 and headers.get_all('WWW-Authenticate')[1].startswith('Basic realm=')
    status, headers, text = get(running, '/', token='token')
    assert status == 200 and text == page.HTML and headers['Content-Type'] == 'text/html; charset=utf-8'
    assert "default-src 'none'" in headers['Content-Security-Policy'] and 'unsafe' not in headers['Content-Security-Policy']


def test_the_frames_of_a_session_are_its_accounts_alone(running):
    import urllib.request
    with robot(running, token='token') as connection:
        infer(connection, session_id='a/b:c')
        wait_for(lambda: any(each.newest is not None for each in running.gateway.sessions.all()))
        path = '/v1/sessions/frames?session_id=a%2Fb%3Ac'
        request = urllib.request.Request(running.url(path).replace('ws', 'http', 1), headers=basic('token'))
        with urllib.request.urlopen(request) as answer:
            image = Image.open(io.BytesIO(answer.read()))
            assert answer.headers['Content-Type'] == 'image/jpeg' and image.size == (4 * 64, 64)
        assert get(running, path, token='other')[0] == 404 and get(running, path)[0] == 401
        for path in ('/v1/sessions/frames', '/v1/sessions/frames?session_id=x&session_id=y'):
            assert get(running, path, token='token')[0] == 404


@pytest.mark.parametrize('header', ['Basic', 'Basic !', 'Basic ' + base64.b64encode(b'token').decode(),
                                    'Basic ' + base64.b64encode(b'\xff:\xff').decode(), basic('wrong')['Authorization']])
def test_what_is_no_token_as_a_password_is_nobodys(header):
    accounts = Accounts((Account('ours', digest('token')),))
    assert accounts.find(header, '') is None
    assert accounts.find(basic('token')['Authorization'], '').name == 'ours'


def test_many_predicted_frames_are_shown_by_eight():
    frames = np.zeros((25, 8, 10, 3), np.uint8)
    assert Image.open(io.BytesIO(page.strip(frames))).size == (80, 8)
    assert Image.open(io.BytesIO(page.strip(frames[:1]))).size == (10, 8)
