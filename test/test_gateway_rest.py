"""What is asked over HTTP: each path answers as docs/gateway.md says, whatever is asked, and however."""
import http.client
import json
import re

import pytest
from fake_service import FakeService, wait_for
from gateway_rig import TIMEOUT, gateway, get, infer, robot
from hypothesis import given, settings, strategies as st

from worldmodel_ros.serving.gateway.accounts import Account, Accounts, digest
from worldmodel_ros.serving.server import server as server_module

TOKEN = 'a token of the test'
PATHS = ('/', '/healthz', '/readyz', '/metrics', '/v1/models', '/v1/sessions', '/v1/sessions/frames')
SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"\})? [0-9.e+-]+')
JSON, TEXT = 'application/json', 'text/plain'


@pytest.fixture(scope='module')
def running(tmp_path_factory):
    accounts = Accounts((Account('arm', digest(TOKEN), openings=0.0),))
    with gateway(tmp_path_factory.mktemp('run'), FakeService(sessions=4), accounts=accounts,
                 origins=('https://listed.example',)) as started:
        with robot(started, token=TOKEN) as connection:
            infer(connection, session_id='arm/1')
            yield started


@pytest.fixture(scope='module')
def open_to_all(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp('run')) as started:
        yield started


@pytest.mark.parametrize('path, kind', [('/healthz', TEXT), ('/readyz', TEXT), ('/metrics', TEXT), ('/v1/models', JSON),
                                        ('/v1/sessions', JSON), ('/', 'text/html')])
def test_each_path_answers_with_its_type(running, path, kind):
    status, headers, text = get(running, path, TOKEN)
    assert status == 200 and headers['Content-Type'].startswith(kind) and int(headers['Content-Length']) == len(text.encode())


def test_models_and_sessions_have_the_fields_that_tools_read(running):
    model, = json.loads(get(running, '/v1/models', TOKEN)[2])['data']
    assert model['object'] == 'model' and model['id'] == 'tiny' and model['action_names'] == ['linear.x', 'angular.z']
    assert {type(model[name]) for name in ('step_period', 'action_horizon')} == {float, int}
    found = json.loads(get(running, '/v1/sessions', TOKEN)[2])
    session, = found['sessions']
    assert found['engine'] is True and session['session_id'] == 'arm/1' and session['tier_two_step'] == 1
    assert session['connected'] is True and session['episode'] == 1 and session['p50_ms'] <= session['p99_ms']


def test_every_line_of_the_metrics_is_prometheus_text(running):
    lines = get(running, '/metrics', TOKEN)[2].splitlines()
    typed = {line.split()[2]: line.split()[3] for line in lines if line.startswith('# TYPE ')}
    samples = [line for line in lines if not line.startswith('#')]
    assert set(typed.values()) == {'counter', 'gauge', 'histogram'}
    for line in samples:
        assert SAMPLE.fullmatch(line), line
        name = re.sub(r'_(bucket|sum|count)$', '', re.match('[a-z_]+', line)[0])
        assert name in typed, f'{name} has no type'
    assert {'worldmodel_engine_waiting 1', 'worldmodel_engine_pages{state="used"} 3', 'worldmodel_gateway_sessions 1',
            'worldmodel_gateway_ticks_total{tier="two_step"} 1', 'worldmodel_gateway_late_total 0'} <= set(samples)


def ask(running, method, path, headers=(), body=b''):
    connection = http.client.HTTPConnection('127.0.0.1', running.port, timeout=TIMEOUT)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True, skip_host='Host' in dict(headers))
        for name, value in headers:
            connection.putheader(name, value)
        if body:
            connection.putheader('Content-Length', str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize('host, status', [
    ('127.0.0.1:8000', 200), ('127.0.0.1', 200), ('[::1]:8000', 200), ('localhost:8000', 200), ('evil.example:8000', 403),
    ('127.0.0.1.evil.example', 403), ('evil.example#127.0.0.1', 403), ('[', 403), ('', 403)])
def test_a_page_whose_name_resolves_to_this_machine_reads_nothing_of_a_gateway_without_accounts(open_to_all, host, status):
    for path in ('/', '/metrics', '/v1/models', '/v1/sessions'):
        assert ask(open_to_all, 'GET', path, [('Host', host)])[0] == status
    assert ask(open_to_all, 'GET', '/healthz', [('Host', host)])[0] == 200


@pytest.mark.parametrize('origin, status', [
    ('http://cell.example:8000', 200), ('https://listed.example', 200), ('http://evil.example', 403), ('null', 403)])
def test_pages_of_its_own_and_of_listed_origins_are_answered_by_a_gateway_of_any_name(running, origin, status):
    headers = [('Authorization', f'Bearer {TOKEN}'), ('Host', 'cell.example:8000'), ('Origin', origin)]
    assert ask(running, 'GET', '/v1/sessions', headers)[0] == status


def test_an_engine_without_room_for_another_connection_is_not_away(tmp_path, monkeypatch):
    with gateway(tmp_path, FakeService(sessions=4)) as running, robot(running) as one, robot(running) as two:
        infer(one), infer(two)
        wait_for(lambda: len(running.server.server._peers) == 2)
        monkeypatch.setattr(server_module, '_CONNECTIONS', 2)
        with robot(running) as three:
            assert 'refused: engine: 2 connections are open' in infer(three)
        running.gateway._status.forget()
        assert get(running, '/readyz')[0] == 200 and 'worldmodel_engine_up 1\n' in get(running, '/metrics')[2]
        with robot(running) as again:  # a refused client, or another account's
            assert again.metadata['model'] == 'tiny'


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('method', ['POST', 'PUT', 'DELETE', 'PATCH'])
def test_nothing_is_changed_over_http(running, method, path):
    try:
        status, _ = ask(running, method, path, [('Authorization', f'Bearer {TOKEN}')], b'{}')
    except (http.client.BadStatusLine, ConnectionError):
        return  # cut: it speaks of nothing but GET
    assert 400 <= status < 500 or status == 501, status


@settings(max_examples=300, deadline=None)
@given(path=st.one_of(st.sampled_from(PATHS), st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60)),
       query=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80), known=st.booleans(),
       name=st.sampled_from(['Accept', 'Origin', 'Range', 'Upgrade', 'Sec-WebSocket-Key', 'X-Forwarded-For']),
       value=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40))
def test_whatever_is_asked_the_answer_is_a_documented_one_and_no_error_of_the_server(running, path, query, known, name, value):
    headers = [(name, value), *([('Authorization', f'Bearer {TOKEN}')] if known else [])]
    target = '/' + path.lstrip('/').replace('#', '') + ('?' + query.replace('#', '') if query else '')
    status, _ = ask(running, 'GET', target, headers)
    plain = target.partition('?')[0].rstrip('/') or '/'
    if plain == '/healthz':
        assert status == 200
    elif not known:
        assert status == 401
    else:
        assert status in ((200, 400, 403, 404, 426) if plain in PATHS else (400, 403, 404, 426)), (status, target)
